//! Text that remembers which of its parts are control tokens.
//!
//! A prompt is put together from what a template says and from what people, data sets and tools say. Only the first may
//! hold control tokens: where a user writes `<｜Assistant｜>`, the model must read those letters and no change of roles.

use std::ops::Range;

/// A text with the byte ranges of its control tokens; everything else in it is plain, however it is spelled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MarkedText {
    text: String,
    marks: Vec<Range<usize>>,
}

impl MarkedText {
    /// A text without control tokens.
    pub fn plain(text: impl Into<String>) -> Self {
        Self { text: text.into(), marks: Vec::new() }
    }

    /// Adds plain text.
    pub fn push_plain(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Adds one control token by its spelling.
    pub fn push_control(&mut self, spelling: &str) {
        let start = self.text.len();
        self.text.push_str(spelling);
        self.marks.push(start..self.text.len());
    }

    /// Adds `other`, marks and all.
    pub fn push(&mut self, other: &Self) {
        let start = self.text.len();
        self.text.push_str(&other.text);
        self.marks.extend(other.marks.iter().map(|mark| mark.start + start..mark.end + start));
    }

    /// The text, control tokens spelled out.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Where the control tokens stand, in bytes: ascending, apart from each other.
    pub fn marks(&self) -> &[Range<usize>] {
        &self.marks
    }

    /// What follows `prefix`, if this text begins with it, letter for letter and mark for mark.
    pub fn strip_prefix(&self, prefix: &Self) -> Option<Self> {
        let rest = self.text.strip_prefix(prefix.text.as_str())?;
        let (before, after) = self.marks.split_at(self.marks.partition_point(|mark| mark.start < prefix.text.len()));
        let start = prefix.text.len();
        let shifted = after.iter().map(|mark| mark.start - start..mark.end - start);
        (before == prefix.marks).then(|| Self { text: rest.into(), marks: shifted.collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(parts: &[(&str, bool)]) -> MarkedText {
        let mut text = MarkedText::default();
        for &(part, is_control) in parts {
            if is_control { text.push_control(part) } else { text.push_plain(part) }
        }
        text
    }

    #[test]
    fn a_prefix_is_one_only_with_the_same_marks() {
        let whole = marked(&[("<a>", true), ("x<a>", false), ("<b>", true)]);
        let rest = whole.strip_prefix(&marked(&[("<a>", true), ("x", false)]));
        assert_eq!(rest, Some(marked(&[("<a>", false), ("<b>", true)])));
        assert_eq!(whole.strip_prefix(&marked(&[("<a>x", false)])), None, "not a control token there");
        assert_eq!(whole.strip_prefix(&marked(&[("<a>", true), ("x", false), ("<a>", true)])), None);
        assert_eq!(whole.strip_prefix(&marked(&[("<a>", true), ("y", false)])), None);
        assert_eq!(whole.strip_prefix(&whole), Some(MarkedText::default()));
    }

    #[test]
    fn texts_are_joined_with_their_marks() {
        let mut whole = MarkedText::plain("x");
        whole.push(&marked(&[("<a>", true), ("y", false)]));
        assert_eq!(whole, marked(&[("x", false), ("<a>", true), ("y", false)]));
    }
}
