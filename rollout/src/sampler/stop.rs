//! Texts that end a response, found as the text comes, in pieces that may end anywhere.

/// Looks for the first of some texts. Of texts that end at the same place the longest counts; what is told can no longer
/// become part of one.
#[derive(Clone, Debug, Default)]
pub struct StopText {
    /// Everything that came; from where a text was found, nothing.
    text: String,
    /// Bytes of it that were told.
    num_told: usize,
    /// The text that was found.
    found: Option<String>,
}

impl StopText {
    /// Takes the next piece. True when one of `stop` is complete: what was said before it is all that counts.
    pub fn push(&mut self, piece: &str, stop: &[String]) -> bool {
        if self.found.is_some() {
            return true;
        }
        let longest = stop.iter().map(String::len).max().unwrap_or(0);
        let before = self.text.len();
        self.text.push_str(piece);
        // A text that is complete now ends within the piece, so it begins at most its length before it.
        let from = floor_char_boundary(&self.text, (before + 1).saturating_sub(longest));
        let ends =
            stop.iter().filter_map(|text| Some((from + self.text[from..].find(text.as_str())? + text.len(), text)));
        let first = ends.min_by_key(|(end, text)| (*end, usize::MAX - text.len()));
        if let Some((end, text)) = first {
            self.text.truncate(end - text.len());
            self.found = Some(text.clone());
        }
        self.found.is_some()
    }

    /// The text since the last call that no text of `stop` can still begin in.
    pub fn take_certain(&mut self, stop: &[String]) -> String {
        let certain = match self.found {
            Some(_) => self.text.len(),
            None => self.text.len() - self.open_len(stop),
        };
        self.take_until(certain)
    }

    /// The rest, when nothing follows.
    pub fn take_rest(&mut self) -> String {
        self.take_until(self.text.len())
    }

    fn take_until(&mut self, end: usize) -> String {
        // What was told before a text was found in it had been certain: none can have begun there.
        let piece = self.text.get(self.num_told..end).unwrap_or("").to_owned();
        self.num_told = self.num_told.max(end);
        piece
    }

    /// The length of the longest end of the text that one of `stop` begins with.
    fn open_len(&self, stop: &[String]) -> usize {
        let open = |text: &String| {
            let most = (text.len() - 1).min(self.text.len());
            (1..=most).rev().find(|&len| text.is_char_boundary(len) && self.text.ends_with(&text[..len])).unwrap_or(0)
        };
        stop.iter().map(open).max().unwrap_or(0)
    }

    /// The text so far, without what was found.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What ended it.
    pub fn found(&self) -> Option<&str> {
        self.found.as_deref()
    }
}

fn floor_char_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The first end of one of `stop` in the whole text; of several there the longest.
    fn first_stop<'a>(text: &str, stop: &'a [String]) -> Option<(usize, &'a str)> {
        (1..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(|end| {
            let ending = stop.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
            ending.max_by_key(|stop| stop.len()).map(|stop| (end - stop.len(), stop.as_str()))
        })
    }

    proptest! {
        #[test]
        fn pieces_tell_what_the_whole_text_says(
            text in "[abé]{0,24}",
            stop in prop::collection::vec("[abé]{1,4}", 0..4),
            cuts in prop::collection::vec(0usize..24, 0..12),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|&at| at <= text.len() && text.is_char_boundary(at)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let want = first_stop(&text, &stop);
            let (mut matcher, mut told) = (StopText::default(), String::new());
            for ends in cuts.windows(2) {
                let found = matcher.push(&text[ends[0]..ends[1]], &stop);
                told += &matcher.take_certain(&stop);
                let seen = &text[..ends[1]];
                prop_assert_eq!(found, first_stop(seen, &stop).is_some());
                if found {
                    break;
                }
                // Nothing is held back that could not become one of the texts.
                let held = &seen[told.len()..];
                prop_assert!(held.is_empty() || stop.iter().any(|stop| stop.starts_with(held)), "{held:?} is held back");
            }
            told += &matcher.take_rest();
            prop_assert_eq!(&told, &text[..want.map_or(text.len(), |(at, _)| at)]);
            prop_assert_eq!(matcher.text(), &told[..]);
            prop_assert_eq!(matcher.found(), want.map(|(_, stop)| stop));
        }
    }
}
