//! Groups to rewards: a rule reads the text of a rollout and says right, wrong or unscorable. One rule a file.
//!
//! A rule's work is bounded by what it counts, never by a clock, so the same text gets the same reward on any machine;
//! it never runs what it reads and never panics, whatever the text. Knows `datasets` alone.
#![forbid(unsafe_code)]

mod config;
mod error;
mod rule;
mod self_test;

pub mod reasoning_gym;

pub use config::RewardConfig;
pub use error::RewardError;
pub use rule::{RewardFn, score_groups};
pub use self_test::self_test;
