//! The arithmetic of the V4 forward pass, one op a file (a folder where backends differ). Every op has a scalar f32
//! form, and works row by row in one fixed order: what a row gives does not depend on the rows beside it.
//!
//! Shapes: R rows (tokens), D model width, N streams, H heads, c head width, r rotary width, E experts.

#[macro_use]
mod dispatch;
mod lanes;
pub mod math;

pub mod activation;
pub mod attention;
pub mod compressor;
pub mod experts;
pub mod hyper_connection;
pub mod indexer;
pub mod linear;
pub mod logits;
pub mod norm;
pub mod pages;
pub mod pool;
pub mod quant;
pub mod rope;
pub mod router;
pub mod sinkhorn_jacobian;

pub use dispatch::{Backend, backend, set_backend};
