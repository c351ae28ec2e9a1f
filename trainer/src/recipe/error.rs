//! What can be wrong with a recipe. Each variant is one sentence: where, what was found, what was expected, what to do.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::layers::shorten;

/// Who wrote a value.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// Nobody: it stands in `Default`.
    Default,
    /// A recipe file.
    File {
        /// Which file.
        path: Arc<Path>,
        /// Line of the key, counted from 1.
        line: usize,
    },
    /// A `--set` argument.
    Set {
        /// What followed `--set`.
        argument: Arc<str>,
    },
    /// No place in particular: something that the files leave out. The path is the last file's.
    Absent(Arc<Path>),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Default => f.write_str("recipe"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Set { argument } => write!(f, "--set {}", shorten(argument)),
            Self::Absent(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Why a recipe was refused.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// No file was named.
    #[error("no recipe was named; name at least one file, as in `trainer recipes/quickstart.toml`")]
    NoFile,
    /// There is no such file.
    #[error("{}: no such recipe; {advice}", path.display())]
    Missing {
        /// The path as it was given.
        path: PathBuf,
        /// The nearest file that exists, or what else to do.
        advice: String,
    },
    /// The file is there but cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{}:{line}:{column}: not TOML: {message}; the line reads `{text}`", path.display())]
    Syntax {
        /// Which file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// Counted from 1, in characters.
        column: usize,
        /// What the TOML reader said.
        message: String,
        /// The line itself, trimmed.
        text: String,
    },
    /// A `--set` argument that is not `key.path=value`.
    #[error("--set {argument}: {problem}; write it as `--set table.key=value`")]
    Set {
        /// What followed `--set`.
        argument: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A key that means nothing.
    #[error("{origin}: unknown key `{key}`; {advice}")]
    UnknownKey {
        /// Who wrote it.
        origin: Origin,
        /// The whole key, dotted.
        key: String,
        /// The nearest known key, or all of them.
        advice: String,
    },
    /// A name that is none of the choices.
    #[error("{origin}: `{key}` is \"{found}\", expected {expected}")]
    UnknownChoice {
        /// Who wrote it.
        origin: Origin,
        /// The whole key, dotted.
        key: String,
        /// What it holds.
        found: String,
        /// The choices, and the nearest if one is near.
        expected: String,
    },
    /// A value of the wrong type.
    #[error("{origin}: `{key}` is {found}, expected {expected}")]
    Type {
        /// Who wrote it.
        origin: Origin,
        /// The whole key, dotted.
        key: String,
        /// What it holds.
        found: String,
        /// What it may hold.
        expected: String,
    },
    /// A value that the rest of the recipe rules out.
    #[error("{origin}: `{key}` is {found}, expected {expected}; {advice}")]
    Invalid {
        /// Who wrote it.
        origin: Origin,
        /// The whole key, dotted.
        key: &'static str,
        /// What it holds.
        found: String,
        /// What it may hold.
        expected: String,
        /// What to do.
        advice: String,
    },
}
