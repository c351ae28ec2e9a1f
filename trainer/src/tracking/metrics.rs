//! `metrics.jsonl`: one JSON object per line, `step` first, then the names in order.
//!
//! A line is one write, so a kill leaves whole lines and at most one torn tail, which is cut when the file is opened
//! again and passed over when it is read. JSON has no NaN or infinities; they are the strings `"NaN"`, `"Infinity"` and
//! `"-Infinity"`, as Python's and JavaScript's readers spell them.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::{Metrics, Tracker};

/// Why metrics could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The file cannot be opened or made.
    #[error("cannot open {}", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A line cannot be written; the lines before it are whole.
    #[error("cannot write to {}", path.display())]
    Write {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A line is not what [`MetricsFile`] writes.
    #[error("{}:{line}: {problem}, expected an object with `step` and numbers; remove the line", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
}

/// A `metrics.jsonl` that is written to.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    len: u64,
}

impl MetricsFile {
    /// Opens the file for appending, making it if it is not there. A torn last line is cut.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(path: &Path) -> Result<Self, MetricsError> {
        let open = || {
            let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
            let len = len_of_whole_lines(&mut file)?;
            file.set_len(len)?;
            file.seek(SeekFrom::Start(len))?;
            Ok((file, len))
        };
        let (file, len) = open().map_err(|source| MetricsError::Open { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), file, len })
    }
}

/// Bytes up to the last line feed.
fn len_of_whole_lines(file: &mut File) -> std::io::Result<u64> {
    let mut block = [0; 4096];
    let mut end = file.seek(SeekFrom::End(0))?;
    while end > 0 {
        let start = end.saturating_sub(block.len() as u64);
        let block = &mut block[..(end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(block)?;
        if let Some(at) = block.iter().rposition(|&byte| byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

fn line(step: usize, metrics: &Metrics) -> String {
    let mut line = format!("{{\"step\":{step}");
    for (name, &value) in metrics {
        let value = match value {
            x if x.is_nan() => "NaN".into(),
            f64::INFINITY => "Infinity".into(),
            f64::NEG_INFINITY => "-Infinity".into(),
            x => serde_json::Value::from(x),
        };
        line.push_str(&format!(",{}:{value}", serde_json::Value::from(name.as_str())));
    }
    line.push_str("}\n");
    line
}

impl Tracker for MetricsFile {
    fn log(&mut self, step: usize, metrics: &Metrics) -> Result<(), MetricsError> {
        let line = line(step, metrics);
        if let Err(source) = self.file.write_all(line.as_bytes()) {
            // A full disk may have taken half of the line. If even cutting it fails, reopening will cut it.
            let _ = self.file.set_len(self.len).and_then(|()| self.file.seek(SeekFrom::Start(self.len)));
            return Err(MetricsError::Write { path: self.path.clone(), source });
        }
        self.len += line.len() as u64;
        Ok(())
    }

    fn finish(&mut self) -> Result<(), MetricsError> {
        self.file.sync_all().map_err(|source| MetricsError::Write { path: self.path.clone(), source })
    }
}

/// The lines of a `metrics.jsonl`, in their order; a torn last line is left out.
///
/// # Errors
/// When the file cannot be read or a whole line is not a step's metrics.
pub fn read_metrics(path: &Path) -> Result<Vec<(usize, Metrics)>, MetricsError> {
    let bytes = std::fs::read(path).map_err(|source| MetricsError::Open { path: path.to_owned(), source })?;
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    bytes[..whole]
        .split_inclusive(|&byte| byte == b'\n')
        .enumerate()
        .map(|(idx, line)| {
            parse(line).map_err(|problem| MetricsError::Line { path: path.to_owned(), line: idx + 1, problem })
        })
        .collect()
}

fn parse(line: &[u8]) -> Result<(usize, Metrics), String> {
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(line).map_err(|error| format!("not a JSON object ({error})"))?;
    let step = object.get("step").and_then(serde_json::Value::as_u64).ok_or("`step` is no whole number")?;
    let mut metrics = Metrics::new();
    for (name, value) in object.iter().filter(|(name, _)| *name != "step") {
        let number = match value.as_str() {
            Some("NaN") => Some(f64::NAN),
            Some("Infinity") => Some(f64::INFINITY),
            Some("-Infinity") => Some(f64::NEG_INFINITY),
            _ => value.as_f64(),
        };
        metrics.insert(name.clone(), number.ok_or_else(|| format!("`{name}` is {value}"))?);
    }
    Ok((step as usize, metrics))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(entries: &[(&str, f64)]) -> Metrics {
        entries.iter().map(|&(name, value)| (name.to_owned(), value)).collect()
    }

    #[test]
    fn one_line_per_call_with_step_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::open(&path).expect("opens");
        file.log(1, &metrics(&[("train/loss", -0.25), ("rollout/raw_reward", 1.0), ("z \"q\"", 1e-7)])).expect("logs");
        file.log(2, &metrics(&[("a", f64::NAN), ("b", f64::INFINITY), ("c", f64::NEG_INFINITY)])).expect("logs");
        file.log(3, &Metrics::new()).expect("logs");
        file.finish().expect("finishes");
        insta::assert_snapshot!(std::fs::read_to_string(&path).expect("reads"), @r#"
    {"step":1,"rollout/raw_reward":1.0,"train/loss":-0.25,"z \"q\"":1e-7}
    {"step":2,"a":"NaN","b":"Infinity","c":"-Infinity"}
    {"step":3}
    "#);
        let lines = read_metrics(&path).expect("reads back");
        assert_eq!(lines[0].1["train/loss"], -0.25);
        assert!(lines[1].1["a"].is_nan());
        assert_eq!(lines[1].1["c"], f64::NEG_INFINITY);
    }

    #[test]
    fn a_torn_tail_is_cut_on_reopening_wherever_the_kill_came() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        // Longer than a block, so that the search for the line feed takes several.
        let long = metrics(&[("x".repeat(5000).as_str(), 1.0)]);
        let whole = line(1, &metrics(&[("a", 1.0)]));
        let torn = line(2, &long);
        for cut in [0, 1, 10, 4095, 4096, 4097, torn.len() - 1] {
            std::fs::write(&path, format!("{whole}{}", &torn[..cut])).expect("writes");
            assert_eq!(read_metrics(&path).expect("reads").len(), 1);
            let mut file = MetricsFile::open(&path).expect("opens");
            file.log(2, &metrics(&[("b", 2.0)])).expect("logs");
            let want = format!("{whole}{}", line(2, &metrics(&[("b", 2.0)])));
            assert_eq!(std::fs::read_to_string(&path).expect("reads"), want, "cut at {cut}");
        }
        std::fs::write(&path, &torn[..20]).expect("writes");
        MetricsFile::open(&path).expect("opens");
        assert_eq!(std::fs::read(&path).expect("reads"), b"");
    }

    #[test]
    fn a_full_disk_leaves_whole_lines() {
        let path = PathBuf::from("/dev/full");
        let Ok(full) = OpenOptions::new().write(true).open(&path) else { return };
        let mut file = MetricsFile { path, file: full, len: 0 };
        let error = file.log(1, &metrics(&[("a", 1.0)])).expect_err("the disk is full");
        insta::assert_snapshot!(
            format!("{:#}", anyhow::Error::new(error)),
            @"cannot write to /dev/full: No space left on device (os error 28)"
        );
    }

    #[test]
    fn a_line_of_something_else_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let error = |text: &str| {
            std::fs::write(&path, text).expect("writes");
            let error = read_metrics(&path).expect_err("is no metrics file").to_string();
            error.replace(&*folder.path().to_string_lossy(), "runs/x")
        };
        insta::assert_snapshot!(
            error("{\"step\":1}\n[]\n"),
            @"runs/x/metrics.jsonl:2: not a JSON object (invalid type: sequence, expected a map at line 1 column 0), expected an object with `step` and numbers; remove the line"
        );
        insta::assert_snapshot!(
            error("{\"a\":1}\n"),
            @"runs/x/metrics.jsonl:1: `step` is no whole number, expected an object with `step` and numbers; remove the line"
        );
        insta::assert_snapshot!(
            error("{\"step\":1,\"a\":\"fast\"}\n"),
            @r#"runs/x/metrics.jsonl:1: `a` is "fast", expected an object with `step` and numbers; remove the line"#
        );
    }
}
