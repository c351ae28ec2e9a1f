//! Tests across crates: golden cases of the model in both forwards, recipes end to end, what a person sees.

mod golden;
mod formats_golden;
mod convert;
mod score;
mod sizes;
mod text_golden;
mod engine_golden;
mod policy_golden;
mod engine_bits;
mod engine;
mod program;
mod bad_input;
mod recipes;
mod multi_token;
