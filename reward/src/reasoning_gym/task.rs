//! The tasks that are known, what each reads from a row, and its checker.

use num_bigint::BigInt;
use serde_json::Value;

use super::expression;
use super::python::Decimal;
use super::{
    bitwise_arithmetic, calendar_arithmetic, countdown, decimal_arithmetic, decimal_chain_sum, decimal_value,
    fraction_simplification, mini_sudoku, number_sorting, prime_factorization, puzzle24, reference_in_text,
    spell_backward, word_sorting,
};

/// What a checker says; `None` where the package's raises or does not come back, or the row lacks what it reads.
pub(super) type Score = Option<f64>;

/// A row as a checker sees it.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    /// The reference answer.
    pub(super) answer: &'a str,
    /// The package's metadata.
    pub(super) metadata: &'a Value,
}

impl<'a> Row<'a> {
    pub(super) fn text(self, field: &str) -> Option<&'a str> {
        self.metadata.get(field)?.as_str()
    }

    pub(super) fn number(self, field: &str) -> Option<f64> {
        self.metadata.get(field)?.as_f64()
    }

    pub(super) fn integer(self, field: &str) -> Option<BigInt> {
        self.metadata.get(field)?.as_i64().map(BigInt::from)
    }

    pub(super) fn integers(self, field: &str) -> Option<Vec<BigInt>> {
        self.metadata.get(field)?.as_array()?.iter().map(|number| number.as_i64().map(BigInt::from)).collect()
    }

    pub(super) fn texts(self, field: &str) -> Option<Vec<&'a str>> {
        self.metadata.get(field)?.as_array()?.iter().map(Value::as_str).collect()
    }

    pub(super) fn grid(self, field: &str) -> Option<Vec<Vec<i64>>> {
        let line = |line: &Value| line.as_array()?.iter().map(Value::as_i64).collect();
        self.metadata.get(field)?.as_array()?.iter().map(line).collect()
    }
}

/// What must stand in a field for a checker to work.
pub(super) enum Shape {
    Text,
    DecimalText,
    FactorsText,
    NumberList,
    BitwiseProblem,
    OneOf(&'static [&'static str]),
    Integer,
    Integers,
    Texts,
    SquareGrid,
}

impl Shape {
    pub(super) fn fits(&self, value: &Value) -> bool {
        let text = value.as_str();
        let list = value.as_array().filter(|list| !list.is_empty());
        match self {
            Self::Text => text.is_some_and(|text| !text.is_empty()),
            Self::DecimalText => {
                let number = text.and_then(|text| Decimal::parse(&text.replace(',', "")));
                matches!(number, Some(Decimal::Finite(_)))
            }
            Self::FactorsText => text.and_then(prime_factorization::factors).is_some_and(|list| !list.is_empty()),
            Self::NumberList => text.and_then(number_sorting::numbers).is_some(),
            Self::BitwiseProblem => {
                matches!(text.map(expression::evaluate), Some(Ok(expression::Value::Exact(value))) if value.is_integer())
            }
            Self::OneOf(names) => text.is_some_and(|text| names.contains(&text)),
            Self::Integer => value.is_i64(),
            Self::Integers => list.is_some_and(|list| list.iter().all(Value::is_i64)),
            Self::Texts => list.is_some_and(|list| list.iter().all(Value::is_string)),
            Self::SquareGrid => list.is_some_and(|lines| {
                let is_line = |line: &Value| {
                    line.as_array().is_some_and(|line| line.len() == lines.len() && line.iter().all(Value::is_i64))
                };
                lines.iter().all(is_line)
            }),
        }
    }

    pub(super) fn expected(&self) -> String {
        match self {
            Self::Text => "a text that is not empty".into(),
            Self::DecimalText => "a number written as text".into(),
            Self::FactorsText => "integers with × between them, as text".into(),
            Self::NumberList => "a list of numbers written as text, such as ['-3', '1.5']".into(),
            Self::BitwiseProblem => "an expression of integers, such as ((0x1 + 0xf) << 0x2)".into(),
            Self::OneOf(names) => format!("one of {}", names.join(", ")),
            Self::Integer => "an integer".into(),
            Self::Integers => "a list of integers".into(),
            Self::Texts => "a list of texts".into(),
            Self::SquareGrid => "a square of integers, one list a line".into(),
        }
    }
}

/// One task of the package.
pub(super) struct Task {
    /// As `metadata.source_dataset` says it.
    pub(super) name: &'static str,
    /// The package's checker of the task; no answer is `None`.
    pub(super) score: fn(Row<'_>, Option<&str>) -> Score,
    /// What the reference answer must look like.
    pub(super) answer: Shape,
    /// The metadata that the checker reads.
    pub(super) metadata: &'static [(&'static str, Shape)],
}

/// A task with the package's default checker.
const fn by_text(name: &'static str) -> Task {
    Task { name, score: reference_in_text::score, answer: Shape::Text, metadata: &[] }
}

/// The tasks, by name.
pub(super) static TASKS: [Task; 22] = [
    by_text("base_conversion"),
    by_text("basic_arithmetic"),
    Task {
        name: "bitwise_arithmetic",
        score: bitwise_arithmetic::score,
        answer: Shape::Text,
        metadata: &[("problem", Shape::BitwiseProblem)],
    },
    Task {
        name: "calendar_arithmetic",
        score: calendar_arithmetic::score,
        answer: Shape::Text,
        metadata: &[("task", Shape::OneOf(&calendar_arithmetic::KINDS))],
    },
    Task { name: "chain_sum", score: decimal_value::score, answer: Shape::DecimalText, metadata: &[] },
    Task {
        name: "countdown",
        score: countdown::score,
        answer: Shape::Text,
        metadata: &[("numbers", Shape::Integers), ("target", Shape::Integer)],
    },
    Task { name: "decimal_arithmetic", score: decimal_arithmetic::score, answer: Shape::DecimalText, metadata: &[] },
    Task { name: "decimal_chain_sum", score: decimal_chain_sum::score, answer: Shape::DecimalText, metadata: &[] },
    Task {
        name: "fraction_simplification",
        score: fraction_simplification::score,
        answer: Shape::Text,
        metadata: &[
            ("simplified_numerator", Shape::Integer),
            ("simplified_denominator", Shape::Integer),
            ("numerator", Shape::Integer),
            ("denominator", Shape::Integer),
        ],
    },
    by_text("gcd"),
    by_text("lcm"),
    by_text("leg_counting"),
    by_text("letter_counting"),
    Task {
        name: "mini_sudoku",
        score: mini_sudoku::score,
        answer: Shape::Text,
        metadata: &[("solution", Shape::SquareGrid)],
    },
    by_text("number_filtering"),
    Task {
        name: "number_sorting",
        score: number_sorting::score,
        answer: Shape::NumberList,
        metadata: &[("direction", Shape::OneOf(&["ascending", "descending"]))],
    },
    Task { name: "prime_factorization", score: prime_factorization::score, answer: Shape::FactorsText, metadata: &[] },
    Task { name: "products", score: decimal_value::score, answer: Shape::DecimalText, metadata: &[] },
    Task { name: "puzzle24", score: puzzle24::score, answer: Shape::Text, metadata: &[] },
    by_text("simple_equations"),
    Task { name: "spell_backward", score: spell_backward::score, answer: Shape::Text, metadata: &[] },
    Task {
        name: "word_sorting",
        score: word_sorting::score,
        answer: Shape::Text,
        metadata: &[("sorted_words", Shape::Texts)],
    },
];

/// The task of that name.
pub(super) fn find(name: &str) -> Option<&'static Task> {
    TASKS.iter().find(|task| task.name == name)
}
