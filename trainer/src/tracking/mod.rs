//! What a person and a machine see of a run: the console, the metrics file, the run's folder.

mod console;
mod diagnosis;
mod metrics;
mod run_dir;

use std::collections::BTreeMap;

pub use console::{Console, EvalLine, Header, Stage, StepLine, Summary};
pub use diagnosis::why_nothing_is_learned;
pub use metrics::{MetricsError, MetricsFile, read_metrics};
pub use run_dir::{RunDir, RunDirError};

/// Named numbers of one step, such as `rollout/raw_reward` or `train/loss`; sorted by name.
pub type Metrics = BTreeMap<String, f64>;

/// Where metrics go.
pub trait Tracker {
    /// Writes the metrics of a step. May be called several times for one step, with different names.
    ///
    /// # Errors
    /// When they could not be written; what was written before is whole.
    fn log(&mut self, step: usize, metrics: &Metrics) -> Result<(), MetricsError>;

    /// Everything that was logged is safe when this returns.
    ///
    /// # Errors
    /// When it is not.
    fn finish(&mut self) -> Result<(), MetricsError>;
}
