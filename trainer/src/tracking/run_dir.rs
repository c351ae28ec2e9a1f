//! The folder of a run: `runs/<name>`, or `runs/<name>-2` and on when that is taken.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rollout::model::checkpoint::write_atomically;

/// Why a run's folder could not be made or written to.
#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// A file stands where a folder is needed.
    #[error("{} is a file, expected a folder; move it away or set `output_dir` to another folder", path.display())]
    FileInTheWay {
        /// The file.
        path: PathBuf,
    },
    /// The system refuses to make the folder.
    #[error("cannot make the run folder {} (set `output_dir` to a folder that can be written to)", path.display())]
    Create {
        /// Which folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The system refuses to write a file in it.
    #[error("cannot write {}", path.display())]
    Write {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// A folder that belongs to this run alone.
#[derive(Clone, Debug, PartialEq)]
pub struct RunDir {
    path: PathBuf,
}

impl RunDir {
    /// Whether a run's folder could be made in `output_dir`, as far as looking can tell.
    ///
    /// # Errors
    /// When a file stands in the way.
    pub fn check(output_dir: &Path) -> Result<(), RunDirError> {
        match output_dir.ancestors().find(|ancestor| ancestor.is_file()) {
            Some(file) => Err(RunDirError::FileInTheWay { path: file.to_owned() }),
            None => Ok(()),
        }
    }

    /// Makes `output_dir/name`, or the first of `name-2`, `name-3`, ... that is free. Of two runs that start at once,
    /// each gets its own.
    ///
    /// # Errors
    /// When no folder can be made there.
    pub fn create(output_dir: &Path, name: &str) -> Result<Self, RunDirError> {
        Self::check(output_dir)?;
        let refuse = |path: &Path, source| RunDirError::Create { path: path.to_owned(), source };
        std::fs::create_dir_all(output_dir).map_err(|source| refuse(output_dir, source))?;
        let mut path = output_dir.join(name);
        for attempt in 2_u64.. {
            match std::fs::create_dir(&path) {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    path = output_dir.join(format!("{name}-{attempt}"));
                }
                Err(source) => return Err(refuse(&path, source)),
            }
        }
        Ok(Self { path })
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `metrics.jsonl`
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// `rollouts/step-000012.parquet`
    pub fn trajectories(&self, step: usize) -> PathBuf {
        self.path.join("rollouts").join(format!("step-{step:06}.parquet"))
    }

    /// `checkpoints/step-000010`
    pub fn checkpoint(&self, step: usize) -> PathBuf {
        self.path.join("checkpoints").join(format!("step-{step:06}"))
    }

    /// Writes `recipe.toml`: all of it or nothing.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_recipe(&self, toml: &str) -> Result<(), RunDirError> {
        let path = self.path.join("recipe.toml");
        write_atomically(&path, toml.as_bytes()).map_err(|source| {
            // A folder that holds nothing is of no use; one that holds something stays.
            let _ = std::fs::remove_dir(&self.path);
            RunDirError::Write { path, source }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentence(error: RunDirError, folder: &Path) -> String {
        format!("{:#}", anyhow::Error::new(error)).replace(&*folder.to_string_lossy(), "home")
    }

    #[test]
    fn a_taken_name_gets_a_number() {
        let folder = tempfile::tempdir().expect("a folder");
        let output_dir = folder.path().join("deep/runs");
        let names: Vec<_> = (0..3)
            .map(|_| {
                let run = RunDir::create(&output_dir, "quick").expect("makes a folder");
                run.path().strip_prefix(&output_dir).expect("inside").to_owned()
            })
            .collect();
        assert_eq!(names, ["quick", "quick-2", "quick-3"].map(PathBuf::from));
        std::fs::write(output_dir.join("other"), "").expect("writes");
        assert!(RunDir::create(&output_dir, "other").expect("makes a folder").path().ends_with("other-2"));
    }

    #[test]
    fn runs_that_start_at_once_get_their_own() {
        let folder = tempfile::tempdir().expect("a folder");
        let make = || RunDir::create(folder.path(), "quick").expect("makes a folder").path().to_owned();
        let paths: std::collections::BTreeSet<PathBuf> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert_eq!(paths.len(), 8);
    }

    #[test]
    fn the_recipe_is_written_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let run = RunDir::create(folder.path(), "quick").expect("makes a folder");
        run.write_recipe("seed = 1\n").expect("writes");
        let files: Vec<_> = std::fs::read_dir(run.path()).expect("reads").flatten().map(|f| f.file_name()).collect();
        assert_eq!(files, ["recipe.toml"]);
        assert!(run.checkpoint(10).ends_with("quick/checkpoints/step-000010"));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_one_sentence() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("runs"), "").expect("writes");
        let error =
            |output_dir: &Path| sentence(RunDir::create(output_dir, "quick").expect_err("fails"), folder.path());
        insta::assert_snapshot!(
            error(&folder.path().join("runs")),
            @"home/runs is a file, expected a folder; move it away or set `output_dir` to another folder"
        );
        insta::assert_snapshot!(
            error(&folder.path().join("runs/deeper")),
            @"home/runs is a file, expected a folder; move it away or set `output_dir` to another folder"
        );
        // The system's own words differ between users.
        let refused = error(Path::new("/dev/null/runs"));
        insta::assert_snapshot!(
            refused.split("): ").next().expect("one part"),
            @"cannot make the run folder /dev/null/runs (set `output_dir` to a folder that can be written to"
        );
    }
}
