//! What a forward pass computes, op by op: how the engine, the trainer and recorded runs are held against each other.

use std::collections::HashMap;
use std::fmt;

/// The results of one op.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Numbers, row-major, without padding.
    Numbers(Vec<f32>),
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
    /// Takes in numbers.
    pub fn numbers(&mut self, name: impl Into<String>, values: Vec<f32>) {
        self.ops.push((name.into(), Values::Numbers(values)));
    }

    /// Takes in choices; their order within a row means nothing.
    pub fn choices(&mut self, name: impl Into<String>, rows: impl IntoIterator<Item = Vec<u32>>) {
        let sorted = rows.into_iter().map(|mut row| {
            row.sort_unstable();
            row
        });
        self.ops.push((name.into(), Values::Choices(sorted.collect())));
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
            Some(Values::Numbers(values)) => values,
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
        /// The largest absolute difference; infinite where one is not finite and the other is.
        max_abs: f32,
        /// The largest absolute value of the second pass, for scale.
        largest: f32,
        /// Where the largest difference is.
        at: usize,
        /// Whether every number has the same bits (0 and -0 aside).
        is_same: bool,
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
    /// The passes hold different amounts, or one chose where the other computed.
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

/// Compares the ops that `want` has: in the order in which `got` computed them, then those that `got` lacks.
pub fn compare(got: &Trace, want: &Trace) -> Vec<Difference> {
    let wanted: HashMap<&str, &Values> = want.ops.iter().map(|(name, values)| (name.as_str(), values)).collect();
    let both = got.ops.iter().filter_map(|(name, got)| {
        let want = wanted.get(name.as_str())?;
        Some(Difference { name: name.clone(), extent: extent(got, want) })
    });
    let missing = want.ops.iter().filter(|(name, _)| got.get(name).is_none());
    both.chain(missing.map(|(name, _)| Difference { name: name.clone(), extent: Extent::Missing })).collect()
}

fn extent(got: &Values, want: &Values) -> Extent {
    match (got, want) {
        (Values::Numbers(got), Values::Numbers(want)) if got.len() == want.len() => {
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
            Extent::Numbers { max_abs, largest, at, is_same: got == want }
        }
        (Values::Choices(got), Values::Choices(want)) if got.len() == want.len() => {
            let different = |(_, (a, b)): &(usize, (&Vec<u32>, &Vec<u32>))| a != b;
            let num_different = got.iter().zip(want).enumerate().filter(different).count();
            let first = got.iter().zip(want).position(|(a, b)| a != b).unwrap_or(0);
            Extent::Choices { num_different, num_rows: got.len(), first }
        }
        _ => {
            let shown = |values: &Values| match values {
                Values::Numbers(values) => format!("{} numbers", values.len()),
                Values::Choices(rows) => format!("choices of {} rows", rows.len()),
            };
            Extent::Shape { got: shown(got), want: shown(want) }
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match &self.extent {
            Extent::Numbers { max_abs, largest, at, .. } => {
                write!(f, "{name} differs by {max_abs:.2e} at element {at} (values up to {largest:.2e})")
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

    fn trace(numbers: &[f32], choices: &[&[u32]]) -> Trace {
        let mut trace = Trace::default();
        trace.numbers("a", numbers.to_vec());
        trace.choices("b", choices.iter().map(|row| row.to_vec()));
        trace
    }

    #[track_caller]
    fn check(got: &Trace, want: &Trace, sentences: &[&str]) {
        let differences = compare(got, want);
        let bad: Vec<String> =
            differences.iter().filter(|d| !d.extent.is_within(1e-3)).map(Difference::to_string).collect();
        assert_eq!(bad, sentences);
    }

    #[test]
    fn what_is_the_same_and_what_is_not() {
        let want = trace(&[1.0, f32::NEG_INFINITY, 3.0], &[&[1, 2], &[]]);
        check(&want, &want, &[]);
        check(&trace(&[1.0005, f32::NEG_INFINITY, 3.0], &[&[2, 1], &[]]), &want, &[]);
        check(
            &trace(&[1.0, f32::NEG_INFINITY, 3.5], &[&[1, 3], &[4]]),
            &want,
            &[
                "a differs by 5.00e-1 at element 2 (values up to inf)",
                "b chooses differently in 2 of 2 rows, first in row 0",
            ],
        );
        check(
            &trace(&[f32::NAN, 0.0, 3.0], &[&[1, 2], &[]]),
            &want,
            &["a differs by inf at element 0 (values up to inf)"],
        );
        check(&trace(&[1.0], &[&[1, 2], &[]]), &want, &["a holds 1 numbers, expected 3 numbers"]);
        check(&Trace::default(), &want, &["a was not computed", "b was not computed"]);
    }
}
