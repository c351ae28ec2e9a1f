//! What a forward pass computes, op by op: how the engine, the trainer and recorded runs are held against each other.

use std::collections::HashMap;
use std::fmt;

/// The results of one op.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Numbers, row-major, without padding.
    Numbers {
        /// Rows first: `[R, ..]`.
        shape: Vec<usize>,
        /// As many as the shape has room for.
        values: Vec<f32>,
    },
    /// For each row the experts or blocks that were chosen, ascending.
    Choices(Vec<Vec<u32>>),
}

/// The ops of one forward pass over whole sequences, in the order of computation. Rows are the tokens of all sequences,
/// one sequence after the other.
///
/// Names are those of the golden cases: `layers.i.` and `mtp.` followed by
///
/// - `hc_attn.post` `[R, N]`, `hc_attn.comb` `[R, N, N]`, `hc_attn.collapsed` `[R, D]`; the same for `hc_ffn`,
/// - `q_residual` `[R, q_lora_rank]`, `attn_out` `[R, D]`,
/// - `compressed_kv` and `indexer.keys`: the complete blocks of each sequence, `[_, width]`,
/// - `indexer.scores`: of each row the scores of the blocks that it may see; `indexer.topk`: those chosen,
/// - `router.logits` `[R, E]`, `router.experts`, `router.weights` `[R, K]` in the order of ascending experts,
/// - `shared_out`, `ffn_out` `[R, D]`, and `streams_out` `[R, N, D]`;
///
/// then `head_collapsed`, `final_norm` `[R, D]` and `logits` `[R, V]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    ops: Vec<(String, Values)>,
}

impl Trace {
    /// Takes in numbers, as many rows of shape `row` as there are; rows of no one shape come one number a row (`&[]`).
    ///
    /// # Panics
    /// When the numbers do not fill whole rows, or the op is told twice.
    pub fn numbers(&mut self, name: impl Into<String>, row: &[usize], values: Vec<f32>) {
        let (name, width) = (name.into(), row.iter().product::<usize>());
        assert!(values.len().is_multiple_of(width), "`{name}`: {} numbers for rows of shape {row:?}", values.len());
        let shape = std::iter::once(values.len() / width.max(1)).chain(row.iter().copied()).collect();
        self.push(name, Values::Numbers { shape, values });
    }

    /// Takes in choices; their order within a row means nothing.
    ///
    /// # Panics
    /// When the op is told twice.
    pub fn choices(&mut self, name: impl Into<String>, rows: impl IntoIterator<Item = Vec<u32>>) {
        let sorted = rows.into_iter().map(|mut row| {
            row.sort_unstable();
            row
        });
        self.push(name, Values::Choices(sorted.collect()));
    }

    /// Takes in the results of an op as another trace holds them.
    ///
    /// # Panics
    /// When the op is told twice.
    pub fn push(&mut self, name: impl Into<String>, values: Values) {
        let name = name.into();
        assert!(self.get(&name).is_none(), "op `{name}` is told twice");
        self.ops.push((name, values));
    }

    /// Name and results of every op.
    pub fn ops(&self) -> &[(String, Values)] {
        &self.ops
    }

    /// The results of op `name`.
    pub fn get(&self, name: &str) -> Option<&Values> {
        self.ops.iter().find(|(op, _)| op == name).map(|(_, values)| values)
    }

    /// The numbers of op `name`.
    ///
    /// # Panics
    /// When there is no such op, or it made choices.
    pub fn numbers_of(&self, name: &str) -> &[f32] {
        match self.get(name) {
            Some(Values::Numbers { values, .. }) => values,
            other => panic!("op `{name}` has no numbers: {other:?}"),
        }
    }
}

/// How one op of two forward passes differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The op.
    pub name: String,
    /// What kind, and how much.
    pub extent: Extent,
}

/// How much an op differs.
#[derive(Clone, Debug, PartialEq)]
pub enum Extent {
    /// Of numbers.
    Numbers {
        /// The largest absolute difference: 0 where all are equal, infinite where one of two is not a number or only one
        /// is infinite.
        max_abs: f32,
        /// The largest absolute value of the second pass, for scale.
        largest: f32,
        /// Where the largest difference is: an index for each dimension, the row first.
        at: Vec<usize>,
    },
    /// Of choices: rows that chose differently.
    Choices {
        /// How many.
        num_different: usize,
        /// Of how many.
        num_rows: usize,
        /// The first of them.
        first: usize,
    },
    /// The passes hold results of other shapes, or one chose where the other computed.
    Shape {
        /// What the first holds.
        got: String,
        /// What the second holds.
        want: String,
    },
    /// The first pass has no such op.
    Missing,
}

impl Extent {
    /// Whether numbers lie within `tolerance` of each other and choices are the same.
    pub fn is_within(&self, tolerance: f32) -> bool {
        match self {
            Self::Numbers { max_abs, .. } => *max_abs <= tolerance,
            Self::Choices { num_different, .. } => *num_different == 0,
            Self::Shape { .. } | Self::Missing => false,
        }
    }
}

/// Compares the ops that `want` has: in the order in which `got` computed them, then those that `got` lacks. What `got`
/// tells beside them is left out.
///
/// ```
/// use rollout::model::{Trace, compare, first_beyond};
///
/// let pass = |attn_out: f32| {
///     let mut trace = Trace::default();
///     trace.numbers("layers.0.attn_out", &[2], vec![1.0, attn_out]);
///     trace.choices("layers.0.router.experts", [vec![3, 1]]);
///     trace
/// };
/// let differences = compare(&pass(2.0), &pass(2.5));
/// assert_eq!(
///     first_beyond(&differences, 2e-4).unwrap().to_string(),
///     "layers.0.attn_out differs by 5.00e-1 at [0, 1] (values up to 2.50e0)"
/// );
/// ```
pub fn compare(got: &Trace, want: &Trace) -> Vec<Difference> {
    let wanted: HashMap<&str, &Values> = want.ops.iter().map(|(name, values)| (name.as_str(), values)).collect();
    let both = got.ops.iter().filter_map(|(name, got)| {
        let want = wanted.get(name.as_str())?;
        Some(Difference { name: name.clone(), extent: extent(got, want) })
    });
    let missing = want.ops.iter().filter(|(name, _)| got.get(name).is_none());
    both.chain(missing.map(|(name, _)| Difference { name: name.clone(), extent: Extent::Missing })).collect()
}

/// The first op that is not within `tolerance`: where two passes part.
pub fn first_beyond(differences: &[Difference], tolerance: f32) -> Option<&Difference> {
    differences.iter().find(|difference| !difference.extent.is_within(tolerance))
}

fn extent(got: &Values, want: &Values) -> Extent {
    match (got, want) {
        (Values::Numbers { shape, values: got }, Values::Numbers { shape: wanted, values: want })
            if shape == wanted =>
        {
            let difference = |a: f32, b: f32| match (a - b).abs() {
                _ if a == b => 0.0,
                d if d.is_nan() => f32::INFINITY,
                d => d,
            };
            let (mut max_abs, mut at) = (0.0, 0);
            for (i, (a, b)) in got.iter().zip(want).enumerate() {
                let d = difference(*a, *b);
                if d > max_abs {
                    (max_abs, at) = (d, i);
                }
            }
            let largest = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            Extent::Numbers { max_abs, largest, at: index(at, shape) }
        }
        (Values::Choices(got), Values::Choices(want)) if got.len() == want.len() => {
            let different = |(_, (a, b)): &(usize, (&Vec<u32>, &Vec<u32>))| a != b;
            let num_different = got.iter().zip(want).enumerate().filter(different).count();
            let first = got.iter().zip(want).position(|(a, b)| a != b).unwrap_or(0);
            Extent::Choices { num_different, num_rows: got.len(), first }
        }
        _ => {
            let shown = |values: &Values| match values {
                Values::Numbers { shape, .. } => format!("numbers of shape {shape:?}"),
                Values::Choices(rows) => format!("choices of {} rows", rows.len()),
            };
            Extent::Shape { got: shown(got), want: shown(want) }
        }
    }
}

/// The place of the element `at`, row-major, of a tensor of `shape`.
fn index(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&size| {
            let i = at % size.max(1);
            at /= size.max(1);
            i
        })
        .collect();
    index.reverse();
    index
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match &self.extent {
            Extent::Numbers { max_abs, largest, at, .. } => {
                write!(f, "{name} differs by {max_abs:.2e} at {at:?} (values up to {largest:.2e})")
            }
            Extent::Choices { num_different, num_rows, first } => {
                write!(f, "{name} chooses differently in {num_different} of {num_rows} rows, first in row {first}")
            }
            Extent::Shape { got, want } => write!(f, "{name} holds {got}, expected {want}"),
            Extent::Missing => write!(f, "{name} was not computed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(row: &[usize], numbers: &[f32], choices: &[&[u32]]) -> Trace {
        let mut trace = Trace::default();
        trace.numbers("a", row, numbers.to_vec());
        trace.choices("b", choices.iter().map(|row| row.to_vec()));
        trace
    }

    const INF: f32 = f32::INFINITY;
    const NAN: f32 = f32::NAN;

    /// Two rows of three numbers, and what two rows chose.
    fn want() -> Trace {
        trace(&[3], &[1.0, -INF, 3.0, 4.0, 5.0, 6.0], &[&[1, 2], &[]])
    }

    #[track_caller]
    fn check(got: &Trace, want: &Trace, sentences: &[&str]) {
        let differences = compare(got, want);
        let bad: Vec<String> =
            differences.iter().filter(|d| !d.extent.is_within(1e-3)).map(Difference::to_string).collect();
        assert_eq!(bad, sentences);
        assert_eq!(first_beyond(&differences, 1e-3).map(Difference::to_string), bad.first().cloned());
    }

    #[test]
    fn what_is_the_same_has_no_difference() {
        check(&want(), &want(), &[]);
        check(&trace(&[3], &[1.0005, -INF, 3.0, 4.0, 5.0, 6.0], &[&[2, 1], &[]]), &want(), &[]);
        check(&trace(&[2], &[], &[]), &trace(&[2], &[], &[]), &[]);
        let is_zero = |d: &Difference| !matches!(d.extent, Extent::Numbers { max_abs, .. } if max_abs != 0.0);
        assert!(compare(&want(), &want()).iter().all(is_zero));
    }

    #[test]
    fn the_largest_difference_is_told_with_its_place() {
        check(
            &trace(&[3], &[1.25, -INF, 3.0, 4.0, 5.5, 6.25], &[&[1, 3], &[4]]),
            &want(),
            &[
                "a differs by 5.00e-1 at [1, 1] (values up to inf)",
                "b chooses differently in 2 of 2 rows, first in row 0",
            ],
        );
    }

    #[test]
    fn what_is_not_finite_on_one_side_differs_without_bound() {
        for (numbers, at) in [
            ([NAN, -INF, 3.0, 4.0, 5.0, 6.0], "[0, 0]"),
            ([1.0, INF, 3.0, 4.0, 5.0, 6.0], "[0, 1]"),
            ([1.0, 0.0, 3.0, 4.0, 5.0, 6.0], "[0, 1]"),
            ([9.0, -INF, 3.0, 4.0, 5.0, INF], "[1, 2]"),
        ] {
            let got = trace(&[3], &numbers, &[&[1, 2], &[]]);
            check(&got, &want(), &[&format!("a differs by inf at {at} (values up to inf)")]);
            assert!(!compare(&got, &want())[0].extent.is_within(f32::MAX));
        }
        let nothing = trace(&[1], &[NAN], &[]);
        check(&nothing, &nothing, &["a differs by inf at [0, 0] (values up to 0.00e0)"]);
    }

    #[test]
    fn other_shapes_and_absent_ops_differ() {
        let transposed = trace(&[2], &[1.0, -INF, 3.0, 4.0, 5.0, 6.0], &[&[1, 2], &[]]);
        check(&transposed, &want(), &["a holds numbers of shape [3, 2], expected numbers of shape [2, 3]"]);
        let shorter = trace(&[3], &[1.0, -INF, 3.0], &[&[1, 2]]);
        check(
            &shorter,
            &want(),
            &[
                "a holds numbers of shape [1, 3], expected numbers of shape [2, 3]",
                "b holds choices of 1 rows, expected choices of 2 rows",
            ],
        );
        let mut chosen = Trace::default();
        chosen.choices("a", [vec![1], vec![2]]);
        check(&chosen, &want(), &["a holds choices of 2 rows, expected numbers of shape [2, 3]", "b was not computed"]);
        check(&Trace::default(), &want(), &["a was not computed", "b was not computed"]);
        check(&want(), &Trace::default(), &[]);
    }

    #[test]
    fn the_order_is_that_of_the_computation() {
        let mut want = Trace::default();
        want.choices("b", [vec![1, 2], vec![]]);
        want.numbers("a", &[3], vec![0.0; 6]);
        let named: Vec<String> = compare(&self::want(), &want).into_iter().map(|d| d.name).collect();
        assert_eq!(named, ["a", "b"]);
    }

    #[test]
    #[should_panic(expected = "op `a` is told twice")]
    fn an_op_is_told_once() {
        want().numbers("a", &[], vec![]);
    }

    #[test]
    #[should_panic(expected = "`c`: 4 numbers for rows of shape [3]")]
    fn numbers_fill_their_rows() {
        want().numbers("c", &[3], vec![0.0; 4]);
    }
}
