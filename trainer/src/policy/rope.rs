//! Rotary positions on the last r channels, in interleaved pairs (SPEC 4.1). Shapes: `..` any leading axes, C channels,
//! R/2 frequencies.

use tch::{Device, Kind, Tensor};

/// `exp(i t f_p)` for every position, as complex numbers `[.., R/2]`. Angles are f32 products, as in the references.
pub(super) fn rope_table(positions: &[i64], shape: &[i64], frequencies: &[f32], device: Device) -> Tensor {
    let t = Tensor::from_slice(positions).to_kind(Kind::Float).view(shape).unsqueeze(-1);
    let angle = (t * Tensor::from_slice(frequencies)).to_device(device);
    Tensor::complex(&angle.cos(), &angle.sin())
}

/// Rotates the last `R` channels of `x` `[.., C]` by `table`, which is broadcast over the leading axes.
pub(super) fn rotate(x: &Tensor, table: &Tensor) -> Tensor {
    let (c, pairs) = (x.size()[x.dim() - 1], table.size()[table.dim() - 1]);
    let mut parts = x.split_with_sizes([c - 2 * pairs, 2 * pairs], -1);
    let rotary = parts.pop().expect("two sizes give two parts");
    let mut shape = rotary.size();
    let last = shape.len() - 1;
    shape[last] = pairs;
    shape.push(2);
    let rotated = (rotary.reshape(shape).view_as_complex() * table).view_as_real().flatten(-2, -1);
    parts.push(rotated);
    Tensor::cat(&parts, -1)
}
