//! Which tensor of a checkpoint is stored in which number format (v4/SPEC 9.1).

use std::fmt;

/// A number format of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain values of 32 bits.
    F32,
    /// Plain values of 16 bits, bfloat16.
    Bf16,
    /// Integers, for the hash-routing tables.
    I64,
    /// e4m3 codes, one e8m0 scale per tile of 128 by 128.
    Fp8,
    /// e2m1 codes, one e8m0 scale per 32 columns.
    Mxfp4,
}

/// A layout of a whole checkpoint, named after what the routed experts are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Layout {
    /// The published one: routed experts in MXFP4, the other large matrices in FP8, the rest in bf16 and f32
    Mxfp4,
    /// The published -Base one: all large matrices in FP8, the rest in bf16 and f32
    Fp8,
    /// Everything in bf16 but the few tensors that the release keeps in f32
    Bf16,
    /// Everything in f32
    F32,
}

impl Layout {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Mxfp4, Self::Fp8, Self::Bf16, Self::F32];

    /// The format of the parameter `name` (a release name, not a hash table).
    pub fn format(self, name: &str) -> Format {
        let is_f32 =
            name.contains("hc_") || [".attn_sink", ".ape", ".gate.bias"].iter().any(|suffix| name.ends_with(suffix));
        match self {
            Self::F32 => Format::F32,
            _ if is_f32 => Format::F32,
            Self::Mxfp4 if is_routed_expert(name) => Format::Mxfp4,
            Self::Mxfp4 | Self::Fp8 if is_large_matrix(name) => Format::Fp8,
            _ => Format::Bf16,
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mxfp4 => "mxfp4",
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

/// Whether a parameter is a matrix of a routed expert: what MXFP4 is for.
pub fn is_routed_expert(name: &str) -> bool {
    name.contains(".ffn.experts.")
}

/// Whether the release stores the parameter in 8 bits or fewer.
fn is_large_matrix(name: &str) -> bool {
    const SUFFIXES: [&str; 8] = [
        ".attn.wq_a.weight",
        ".attn.wq_b.weight",
        ".attn.wkv.weight",
        ".attn.wo_a.weight",
        ".attn.wo_b.weight",
        ".attn.indexer.wq_b.weight",
        ".e_proj.weight",
        ".h_proj.weight",
    ];
    is_routed_expert(name) || name.contains(".shared_experts.") || SUFFIXES.iter().any(|s| name.ends_with(s))
}
