//! Prompts in, groups of rollouts with logprobs out: the inference engine for models of the DeepSeek-V4 family.
//! Gets weights from [`model::WeightUpdate`] and nowhere else, and knows neither tch nor rewards.
#![forbid(unsafe_code)]

pub mod chat;
pub mod convert;
pub mod engine;
pub mod kv_cache;
pub mod memory;
pub mod model;
pub mod prefix_cache;
pub mod sampler;
pub mod score;
pub mod server;
pub mod stop_tokens;
pub mod tokenizer;
