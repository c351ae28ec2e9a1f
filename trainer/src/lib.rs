//! Rewards to new weights: the recipe, the training loop, and what a person sees of it. The only crate that knows tch.
#![forbid(unsafe_code)]

pub mod recipe;
pub mod cli;
pub mod setup;
pub mod run;
pub mod sft;
pub mod evaluate;
pub mod parity;
pub mod generate;
pub mod advantage;
pub mod pack;
pub mod policy;
pub mod parallel;
pub mod loss;
pub mod update;
pub mod optimizer;
pub mod weight_sync;
pub mod checkpoint;
pub mod tracking;
pub mod report;
