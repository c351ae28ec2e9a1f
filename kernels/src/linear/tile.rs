//! The bodies of the products, written once over [`Lanes`]: a few rows by a few panels in registers.
//!
//! Every output is one chain of multiply-adds over K in ascending order, started from zero. Where K is cut into blocks
//! the chain goes on from the stored value, which changes nothing. So its bits depend neither on the number of rows nor
//! on how the work is cut into tiles, blocks and threads.

use std::ops::Range;

use super::format::{Bf16, E2m1, E4m3, F32, Format};
use super::{Cell, Linear, PANEL, Packed, Rows};
#[cfg(target_arch = "x86_64")]
use crate::lanes::{Avx2, Avx512};
use crate::lanes::{Lanes, Scalar, load, store};
use crate::pool::ColumnPart;
use crate::{Backend, backend};

/// Rows that are multiplied with codes unpacked in registers; for more of them a panel is unpacked first.
const FEW: usize = 16;
/// Of those, how many at a time; of codes, which need registers to be unpacked in, fewer.
const TILE: usize = 6;
const TILE_OF_CODES: usize = 4;
/// Inputs that are multiplied at a time for many rows: a panel of them (16 KiB) stays in the first-level cache.
const BLOCK_INPUTS: usize = 256;
/// Rows that are multiplied at a time: with [`BLOCK_INPUTS`] inputs they (204 KiB) stay in the second-level cache.
const BLOCK_ROWS: usize = 192;
/// Bytes after which addresses fall on the same places in the first-level cache.
const PAGE: usize = 4096;
/// From row to row in the copy of such a block.
const ROW_STRIDE: usize = BLOCK_INPUTS + PANEL;

/// A product to be done: all rows of `x`, the outputs that `y` has columns for.
pub struct Work<'w, 'y> {
    pub(super) weight: &'w Linear,
    pub(super) x: Rows<'w>,
    pub(super) y: &'w mut ColumnPart<'y>,
}

/// Room for unpacked panels and for tiles of rows.
#[derive(Debug, Default)]
pub struct Scratch {
    panel: Vec<Cell>,
    rows: Vec<f32>,
}

/// The product in one backend.
pub type ProductFn = fn(&mut Work<'_, '_>, &mut Scratch);

/// Every backend this machine can run: `scalar`, the reference, first; the fastest last.
pub(super) fn backends() -> Vec<(&'static str, ProductFn)> {
    let mut table: Vec<(&'static str, ProductFn)> = vec![("scalar", scalar)];
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: these are handed out only where the CPU has what they need.
        table.extend(Backend::Avx2.is_available().then_some(("avx2", (|w, s| unsafe { avx2(w, s) }) as ProductFn)));
        // SAFETY: as above.
        table.extend(
            Backend::Avx512.is_available().then_some(("avx512", (|w, s| unsafe { avx512(w, s) }) as ProductFn)),
        );
    }
    table
}

/// The product in the backend in use.
pub(super) fn product(work: &mut Work<'_, '_>, scratch: &mut Scratch) {
    match backend() {
        Backend::Scalar => scalar(work, scratch),
        // SAFETY: a backend is in use only where the CPU has it.
        #[cfg(target_arch = "x86_64")]
        Backend::Avx2 => unsafe { avx2(work, scratch) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Backend::Avx512 => unsafe { avx512(work, scratch) },
        #[cfg(not(target_arch = "x86_64"))]
        other => unreachable!("{other:?} is not of this architecture"),
    }
}

fn scalar(work: &mut Work<'_, '_>, scratch: &mut Scratch) {
    body::<_, 4, 1>(Scalar, work, scratch);
}

/// Six rows by one panel, of two registers, fill the sixteen registers there are.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(work: &mut Work<'_, '_>, scratch: &mut Scratch) {
    // SAFETY: this function has these features.
    body::<_, 6, 1>(unsafe { Avx2::assume() }, work, scratch);
}

/// Twelve rows by two panels, of one register each, take 24 of 32 registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512(work: &mut Work<'_, '_>, scratch: &mut Scratch) {
    // SAFETY: this function has these features.
    body::<_, 12, 2>(unsafe { Avx512::assume() }, work, scratch);
}

#[inline(always)]
fn body<S: Lanes, const R: usize, const P: usize>(s: S, work: &mut Work<'_, '_>, scratch: &mut Scratch) {
    let (num_rows, inputs) = (work.x.len(), work.weight.inputs);
    if num_rows > FEW {
        many::<S, R, P>(s, work, scratch);
    } else if num_rows > 2 && (inputs * size_of::<f32>()).is_multiple_of(PAGE) {
        // Rows whole pages apart fight for the same places in the first-level cache: a copy lies a little askew.
        let stride = inputs + PANEL;
        if scratch.rows.len() < num_rows * stride {
            scratch.rows.resize(num_rows * stride, 0.0);
        }
        let copy = &mut scratch.rows[..num_rows * stride];
        for (r, to) in copy.chunks_exact_mut(stride).enumerate() {
            to[..inputs].copy_from_slice(work.x.row(r));
        }
        few(s, &mut Work { weight: work.weight, x: Rows::columns(copy, stride, 0, inputs), y: &mut *work.y });
    } else {
        few(s, work);
    }
}

/// One panel, or a block of its inputs.
#[derive(Clone, Copy)]
struct Panel<'a> {
    cells: &'a [Cell],
    scales: &'a [[u8; PANEL]],
}

/// The inputs of R rows.
trait Inputs<const R: usize>: Copy {
    /// How many each row has.
    fn len(&self) -> usize;
    /// # Safety
    /// `k` is below [`Inputs::len`].
    unsafe fn get(&self, r: usize, k: usize) -> f32;
}

impl<const R: usize> Inputs<R> for [&[f32]; R] {
    #[inline(always)]
    fn len(&self) -> usize {
        assert!(self.iter().all(|row| row.len() == self[0].len()), "rows differ in length");
        self[0].len()
    }
    #[inline(always)]
    unsafe fn get(&self, r: usize, k: usize) -> f32 {
        // SAFETY: every row has as many inputs as the first, and `k` is one of them.
        unsafe { *self[r].get_unchecked(k) }
    }
}

/// A block of rows, copied together: [`ROW_STRIDE`] values apart, so that one address and constants reach all of them, and
/// rows that lie a power of two apart in memory do not fight for the same places in the cache.
#[derive(Clone, Copy)]
struct Tile<'a> {
    rows: &'a [f32],
    inputs: usize,
}

impl<const R: usize> Inputs<R> for Tile<'_> {
    #[inline(always)]
    fn len(&self) -> usize {
        assert!(self.inputs <= ROW_STRIDE && self.rows.len() >= R * ROW_STRIDE, "{R} rows of {}", self.inputs);
        self.inputs
    }
    #[inline(always)]
    unsafe fn get(&self, r: usize, k: usize) -> f32 {
        // SAFETY: `k` is below the length, and R rows of at least as many values are there: `len` saw to it.
        unsafe { *self.rows.get_unchecked(r * ROW_STRIDE + k) }
    }
}

/// `acc[r][p] += x[r] . panel[p]`, input after input; `prefetch` asks for the next panels on the way.
///
/// Arrays are filled by loops here, not by closures: a closure that is not inlined has none of the backend's instructions.
#[inline(always)]
fn multiply<S: Lanes, F: Format<S>, const R: usize, const P: usize>(
    s: S,
    x: impl Inputs<R>,
    panels: [Panel<'_>; P],
    prefetch: bool,
    acc: &mut [[S::V; P]; R],
) {
    let inputs = x.len();
    let num_cells = inputs.div_ceil(F::GROUP);
    assert!(panels.iter().all(|p| p.cells.len() == num_cells), "panels of {num_cells} cells");
    let cells_per_block = if F::BLOCK == 0 { num_cells.max(1) } else { F::BLOCK / F::GROUP };
    let mut sums = *acc;
    let mut g = 0;
    let mut block = 0;
    while g < num_cells {
        let mut scale = [s.zero(); P];
        if F::BLOCK > 0 {
            for p in 0..P {
                scale[p] = F::scale(s, &panels[p].scales[block]);
            }
        }
        let end = num_cells.min(g + cells_per_block);
        // Whole cells; the last one may have fewer inputs.
        let whole = end.min(inputs / F::GROUP);
        macro_rules! input {
            ($j:literal, $ready:ident) => {
                if $j < F::GROUP {
                    let mut w = [s.zero(); P];
                    for p in 0..P {
                        w[p] = F::at::<$j>(s, $ready[p], scale[p]);
                    }
                    for r in 0..R {
                        // SAFETY: the input is one of `inputs`: the cell is whole, or its rest was counted.
                        let x = s.splat(unsafe { x.get(r, g * F::GROUP + $j) });
                        for p in 0..P {
                            sums[r][p] = s.fma(x, w[p], sums[r][p]);
                        }
                    }
                }
            };
        }
        // SAFETY: g is below `num_cells`, the length of every panel by the assertion above.
        let cell = |p: usize, g: usize| &unsafe { panels[p].cells.get_unchecked(g) }.0;
        macro_rules! ready {
            () => {{
                let mut ready = [F::ready(s, s.dwords(cell(0, g))); P];
                for p in 1..P {
                    ready[p] = F::ready(s, s.dwords(cell(p, g)));
                }
                ready
            }};
        }
        while g < whole {
            if prefetch {
                // The same cells of the next P panels, which lie behind these: the processor's own prefetching follows a
                // panel, but not from one to the next.
                for p in 0..P {
                    s.prefetch(panels[p].cells.as_ptr().wrapping_add(P * num_cells + g));
                }
            }
            let ready = ready!();
            input!(0, ready);
            input!(1, ready);
            input!(2, ready);
            input!(3, ready);
            input!(4, ready);
            input!(5, ready);
            input!(6, ready);
            input!(7, ready);
            g += 1;
        }
        if g < end {
            let (ready, rest) = (ready!(), inputs - g * F::GROUP);
            if rest > 0 {
                input!(0, ready);
            }
            if rest > 1 {
                input!(1, ready);
            }
            if rest > 2 {
                input!(2, ready);
            }
            g += 1;
        }
        block += 1;
    }
    *acc = sums;
}

/// P panels of a weight from `first` on, whole.
#[inline(always)]
fn panels<const P: usize>(weight: &Linear, group: usize, block: usize, first: usize) -> [Panel<'_>; P] {
    let num_cells = weight.inputs.div_ceil(group);
    let num_scales = if block == 0 { 0 } else { weight.inputs.div_ceil(block) };
    let mut panels = [Panel { cells: &[], scales: &[] }; P];
    for (panel, p) in panels.iter_mut().zip(first..) {
        panel.cells = &weight.packed.cells[p * num_cells..][..num_cells];
        panel.scales = &weight.packed.scales[p * num_scales..][..num_scales];
    }
    panels
}

/// At most [`FEW`] rows: codes are unpacked in registers.
#[inline(always)]
fn few<S: Lanes>(s: S, work: &mut Work<'_, '_>) {
    match work.weight.packed.format {
        Packed::F32 => few_of::<S, F32>(s, work),
        Packed::Bf16 => few_of::<S, Bf16>(s, work),
        Packed::E4m3 => few_of::<S, E4m3>(s, work),
        Packed::E2m1 => few_of::<S, E2m1>(s, work),
    }
}

#[inline(always)]
fn few_of<S: Lanes, F: Format<S>>(s: S, work: &mut Work<'_, '_>) {
    let first = work.y.columns().start / PANEL;
    // Several panels at a time, for more chains than the latency of a multiply-add and for several streams of weights;
    // codes need registers of their own.
    match (work.x.len(), F::BLOCK == 0) {
        (0, _) => {}
        (1, true) => {
            let first = few_rows::<S, F, 1, 4>(s, work, first);
            few_rows::<S, F, 1, 1>(s, work, first);
        }
        (1, false) => {
            let first = few_rows::<S, F, 1, 2>(s, work, first);
            few_rows::<S, F, 1, 1>(s, work, first);
        }
        (2, _) => {
            let first = few_rows::<S, F, 2, 2>(s, work, first);
            few_rows::<S, F, 2, 1>(s, work, first);
        }
        (..=FEW, _) => {
            // One panel at a time, so that it comes from memory once.
            for panel in first..work.y.columns().end.div_ceil(PANEL) {
                for tile in tiles(0..work.x.len(), if F::BLOCK == 0 { TILE } else { TILE_OF_CODES }) {
                    match tile.len() {
                        2 => few_block::<S, F, 2, 1>(s, work, panel, tile.start),
                        3 => few_block::<S, F, 3, 1>(s, work, panel, tile.start),
                        4 => few_block::<S, F, 4, 1>(s, work, panel, tile.start),
                        5 if F::BLOCK == 0 => few_block::<S, F, 5, 1>(s, work, panel, tile.start),
                        6 if F::BLOCK == 0 => few_block::<S, F, 6, 1>(s, work, panel, tile.start),
                        n => unreachable!("tiles of 2 to {TILE} rows, not {n}"),
                    }
                }
            }
        }
        (n, _) => unreachable!("{n} rows are not few"),
    }
}

/// Multiplies all rows, which are R, with the panels from `first` on, P at a time; returns the first panel that is left.
#[inline(always)]
fn few_rows<S: Lanes, F: Format<S>, const R: usize, const P: usize>(
    s: S,
    work: &mut Work<'_, '_>,
    mut first: usize,
) -> usize {
    while first + P <= work.y.columns().end.div_ceil(PANEL) {
        few_block::<S, F, R, P>(s, work, first, 0);
        first += P;
    }
    first
}

/// Multiplies R rows from `row` on with P panels from `first` on.
#[inline(always)]
fn few_block<S: Lanes, F: Format<S>, const R: usize, const P: usize>(
    s: S,
    work: &mut Work<'_, '_>,
    first: usize,
    row: usize,
) {
    let mut x = [work.x.row(row); R];
    for r in 1..R {
        x[r] = work.x.row(row + r);
    }
    let end = work.y.columns().end;
    let mut acc = [[s.zero(); P]; R];
    multiply::<S, F, R, P>(s, x, panels::<P>(work.weight, F::GROUP, F::BLOCK, first), row == 0, &mut acc);
    for r in 0..R {
        for p in 0..P {
            let from = (first + p) * PANEL;
            store(s, work.y.row(row + r, from..end.min(from + PANEL)), acc[r][p]);
        }
    }
}

/// Any number of rows: a block of a panel's inputs is unpacked once and multiplied with a block of rows, at most R at a
/// time, with P panels.
#[inline(always)]
fn many<S: Lanes, const R: usize, const P: usize>(s: S, work: &mut Work<'_, '_>, scratch: &mut Scratch) {
    match work.weight.packed.format {
        Packed::F32 => many_of::<S, F32, R, P>(s, work, scratch),
        Packed::Bf16 => many_of::<S, Bf16, R, P>(s, work, scratch),
        Packed::E4m3 => many_of::<S, E4m3, R, P>(s, work, scratch),
        Packed::E2m1 => many_of::<S, E2m1, R, P>(s, work, scratch),
    }
}

#[inline(always)]
fn many_of<S: Lanes, F: Format<S>, const R: usize, const P: usize>(
    s: S,
    work: &mut Work<'_, '_>,
    scratch: &mut Scratch,
) {
    let (num_rows, inputs) = (work.x.len(), work.weight.inputs);
    let columns = work.y.columns();
    let last = columns.end.div_ceil(PANEL);
    if F::GROUP > 1 && scratch.panel.len() < P * BLOCK_INPUTS {
        scratch.panel.resize(P * BLOCK_INPUTS, Cell([0; PANEL]));
    }
    let room = num_rows.min(BLOCK_ROWS) * ROW_STRIDE;
    if scratch.rows.len() < room {
        scratch.rows.resize(room, 0.0);
    }
    for row in (0..num_rows).step_by(BLOCK_ROWS) {
        let rows = row..num_rows.min(row + BLOCK_ROWS);
        for from in (0..inputs.max(1)).step_by(BLOCK_INPUTS) {
            let block = from..inputs.min(from + BLOCK_INPUTS);
            for (row, to) in rows.clone().zip(scratch.rows.chunks_exact_mut(ROW_STRIDE)) {
                to[..block.len()].copy_from_slice(&work.x.row(row)[block.clone()]);
            }
            let mut first = columns.start / PANEL;
            while first < last {
                if first + P <= last {
                    panel_block::<S, F, R, P>(s, work, scratch, rows.clone(), block.clone(), first);
                    first += P;
                } else {
                    panel_block::<S, F, R, 1>(s, work, scratch, rows.clone(), block.clone(), first);
                    first += 1;
                }
            }
        }
    }
}

/// Cuts rows into as few tiles of at most `most` as there can be, as even as they can be: small ones leave the arithmetic
/// waiting.
fn tiles(rows: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let (n, num_tiles) = (rows.len(), rows.len().div_ceil(most));
    (0..num_tiles).map(move |i| rows.start + n * i / num_tiles..rows.start + n * (i + 1) / num_tiles)
}

#[inline(always)]
fn panel_block<S: Lanes, F: Format<S>, const R: usize, const P: usize>(
    s: S,
    work: &mut Work<'_, '_>,
    scratch: &mut Scratch,
    rows: Range<usize>,
    inputs: Range<usize>,
    first: usize,
) {
    let whole = panels::<P>(work.weight, F::GROUP, F::BLOCK, first);
    let cells = inputs.start / F::GROUP..inputs.end.div_ceil(F::GROUP);
    let mut blocks = [Panel { cells: &[], scales: &[] }; P];
    if F::GROUP == 1 {
        for p in 0..P {
            blocks[p].cells = &whole[p].cells[cells.clone()];
        }
    } else {
        for p in 0..P {
            let scales: &[_] = match F::BLOCK {
                0 => &[],
                block => &whole[p].scales[inputs.start / block..inputs.end.div_ceil(block)],
            };
            let panel = Panel { cells: &whole[p].cells[cells.clone()], scales };
            unpack::<S, F>(s, panel, &mut scratch.panel[p * BLOCK_INPUTS..][..BLOCK_INPUTS]);
        }
        for p in 0..P {
            blocks[p].cells = &scratch.panel[p * BLOCK_INPUTS..][..inputs.len()];
        }
    }
    for tile in tiles(rows.clone(), R) {
        let part = Tile { rows: &scratch.rows[(tile.start - rows.start) * ROW_STRIDE..], inputs: inputs.len() };
        let (row, go_on) = (tile.start, inputs.start > 0);
        match tile.len() {
            1 => block_rows::<S, 1, P>(s, work, part, blocks, go_on, first, row),
            2 => block_rows::<S, 2, P>(s, work, part, blocks, go_on, first, row),
            3 => block_rows::<S, 3, P>(s, work, part, blocks, go_on, first, row),
            4 => block_rows::<S, 4, P>(s, work, part, blocks, go_on, first, row),
            5 if R > 4 => block_rows::<S, 5, P>(s, work, part, blocks, go_on, first, row),
            6 if R > 4 => block_rows::<S, 6, P>(s, work, part, blocks, go_on, first, row),
            7 if R > 6 => block_rows::<S, 7, P>(s, work, part, blocks, go_on, first, row),
            8 if R > 6 => block_rows::<S, 8, P>(s, work, part, blocks, go_on, first, row),
            9 if R > 6 => block_rows::<S, 9, P>(s, work, part, blocks, go_on, first, row),
            10 if R > 6 => block_rows::<S, 10, P>(s, work, part, blocks, go_on, first, row),
            11 if R > 6 => block_rows::<S, 11, P>(s, work, part, blocks, go_on, first, row),
            12 if R > 6 => block_rows::<S, 12, P>(s, work, part, blocks, go_on, first, row),
            n => unreachable!("tiles of at most {R} rows, not {n}"),
        }
    }
}

/// Multiplies R rows from `row` on, copied to `x`, with a block of inputs; `go_on` from what `y` holds.
#[inline(always)]
fn block_rows<S: Lanes, const R: usize, const P: usize>(
    s: S,
    work: &mut Work<'_, '_>,
    x: Tile<'_>,
    blocks: [Panel<'_>; P],
    go_on: bool,
    first: usize,
    row: usize,
) {
    let end = work.y.columns().end;
    let of = |p: usize| (first + p) * PANEL..end.min((first + p + 1) * PANEL);
    let mut acc = [[s.zero(); P]; R];
    if go_on {
        for r in 0..R {
            for p in 0..P {
                acc[r][p] = load(s, work.y.row(row + r, of(p)));
            }
        }
    }
    multiply::<S, F32, R, P>(s, x, blocks, false, &mut acc);
    for r in 0..R {
        for p in 0..P {
            store(s, work.y.row(row + r, of(p)), acc[r][p]);
        }
    }
}

/// Writes the weights of a panel as f32, one cell an input. Inputs that fill up the last cell give zeros or rubbish that
/// nobody reads.
#[inline(always)]
fn unpack<S: Lanes, F: Format<S>>(s: S, panel: Panel<'_>, out: &mut [Cell]) {
    let cells_per_block = if F::BLOCK == 0 { panel.cells.len().max(1) } else { F::BLOCK / F::GROUP };
    let blocks = panel.cells.chunks(cells_per_block).zip(out.chunks_mut(cells_per_block * F::GROUP));
    for (block, (cells, out)) in blocks.enumerate() {
        let scale = if F::BLOCK == 0 { s.zero() } else { F::scale(s, &panel.scales[block]) };
        for (cell, out) in cells.iter().zip(out.chunks_exact_mut(F::GROUP)) {
            let ready = F::ready(s, s.dwords(&cell.0));
            macro_rules! input {
                ($j:literal) => {
                    if let Some(out) = out.get_mut($j) {
                        let mut values = [0.0; PANEL];
                        s.store(&mut values, F::at::<$j>(s, ready, scale));
                        out.0 = values.map(f32::to_bits);
                    }
                };
            }
            input!(0);
            input!(1);
            input!(2);
            input!(3);
            input!(4);
            input!(5);
            input!(6);
            input!(7);
        }
    }
}
