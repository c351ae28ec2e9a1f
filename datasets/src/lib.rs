//! The words and the data: what a prompt, a group, a rollout and a sample are, how prompts are read and trajectories
//! are written. Knows no other crate of the workspace.
#![forbid(unsafe_code)]

mod group;
mod guard;
mod order;
mod prompt;
mod reader;
mod sample;
mod trajectory;

pub use group::{FinishReason, Group, IndexerChoices, Reward, Rollout, RoutingChoices, Verdict};
pub use order::PromptOrder;
pub use prompt::Prompt;
pub use reader::{PromptColumns, PromptError, PromptSet, RowPlace, read_prompts};
pub use sample::Sample;
pub use trajectory::{
    TrajectoryError, TrajectoryExtra, TrajectoryRow, read_trajectories, trajectory_schema, write_trajectories,
};
