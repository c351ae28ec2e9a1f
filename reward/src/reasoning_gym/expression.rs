//! Arithmetic as the package's computer-algebra parser reads it, on exact rationals of bounded size.
//!
//! The package hands the answer to SymPy's `parse_expr`, which evaluates Python source whose integer literals are exact
//! and whose decimal literals are floats. Reproduced: `+ - * / // % **`, the integer operators `~ & | ^ << >>`,
//! `==` and `!=`, parentheses, `!` and `!!`, comments, literals of all radices, division by zero (an infinity without
//! direction, or NaN). Not reproduced, our choice: names (SymPy has hundreds of functions and constants, and makes a
//! symbol of any other word) count as no expression, as do SymPy's few forms beyond arithmetic, and a chain of comparisons
//! is evaluated to its end. What leaves the rationals, or the bounds, is `Beyond`: an answer such as 36**29**95 never
//! comes back from the package.
//!
//! Operators wait on an explicit stack, so no text can exhaust the thread's.

use num_bigint::BigInt;
use num_integer::Integer;
use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};

use super::python::{self, MAX_INT_DIGITS};

/// Deeper parentheses Python refuses: its own limit of 200, of which each literal uses one.
const MAX_PARENS: usize = 199;

/// More operators in a row than these end in Python's recursion limit; measured with CPython 3.11 and SymPy 1.14.
const MAX_OPERATORS: usize = 2986;

/// Bits of the largest numerator or denominator. A double ends at 1024.
const MAX_BITS: u64 = 1 << 16;

/// Work per expression, in operations on machine words: some hundredths of a second.
const MAX_WORK: u64 = 5_000_000;

/// What an expression comes to.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// Made of integers alone.
    Exact(BigRational),
    /// Touched by a decimal literal; finite.
    Float(f64),
    /// Something other than zero, divided by zero.
    Infinity,
    /// Zero divided by zero, and what follows from it.
    NotANumber,
    /// A comparison, with its right side for the next link of the chain.
    Truth(bool, Box<Value>),
}

/// Why an expression has no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The package's evaluation raises an error.
    Malformed,
    /// The evaluation left the rationals, or a bound on work was reached.
    Beyond,
}

impl Value {
    /// `float(value)`: infinite where an exact value is beyond doubles.
    ///
    /// # Errors
    /// `Malformed` for `Infinity`, which Python will not convert.
    pub(super) fn to_float(&self) -> Result<f64, Stop> {
        match self {
            Self::Exact(value) => Ok(value.to_f64().unwrap_or(f64::NAN)),
            Self::Float(value) => Ok(*value),
            Self::NotANumber => Ok(f64::NAN),
            Self::Truth(holds, _) => Ok(if *holds { 1.0 } else { 0.0 }),
            Self::Infinity => Err(Stop::Malformed),
        }
    }

    /// `int(value)`: towards zero.
    ///
    /// # Errors
    /// `Malformed` for what is no number.
    pub(super) fn to_int(&self) -> Result<BigInt, Stop> {
        match self {
            Self::Exact(value) => Ok(value.to_integer()),
            Self::Float(value) => num_traits::FromPrimitive::from_f64(value.trunc()).ok_or(Stop::Malformed),
            Self::Truth(holds, _) => Ok(BigInt::from(*holds)),
            Self::NotANumber | Self::Infinity => Err(Stop::Malformed),
        }
    }

    fn from_int(value: BigInt) -> Self {
        Self::Exact(BigRational::from_integer(value))
    }

    /// A float result; what over- or underflows was a number to SymPy, whose floats have no smallest or largest.
    fn from_float(value: f64, is_zero: bool) -> Result<Self, Stop> {
        if is_zero {
            return Ok(Self::Exact(BigRational::zero()));
        }
        if value.is_normal() { Ok(Self::Float(value)) } else { Err(Stop::Beyond) }
    }

    fn is_zero(&self) -> bool {
        match self {
            Self::Exact(value) => value.is_zero(),
            Self::Float(value) => *value == 0.0,
            _ => false,
        }
    }

    /// As a finite double, for arithmetic with one.
    fn as_operand(&self) -> Result<f64, Stop> {
        match self {
            Self::Float(value) => Ok(*value),
            Self::Exact(value) => value.to_f64().filter(|value| value.is_finite()).ok_or(Stop::Beyond),
            _ => Err(Stop::Malformed),
        }
    }

    /// The integer that the integer operators need.
    fn as_integer(&self) -> Result<&BigInt, Stop> {
        match self {
            Self::Exact(value) if value.is_integer() => Ok(value.numer()),
            _ => Err(Stop::Malformed),
        }
    }

    /// A comparison that is used as a number is one.
    fn settled(self) -> Self {
        match self {
            Self::Truth(holds, _) => Self::from_int(BigInt::from(holds)),
            other => other,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Equal,
    NotEqual,
    Or,
    Xor,
    And,
    ShiftLeft,
    ShiftRight,
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Rem,
    Pow,
    Plus,
    Minus,
    Invert,
    Open,
}

/// Binary operators as they are written; the longer of two with a common beginning stands first.
const BINARY: [(&str, Op); 14] = [
    ("**", Op::Pow),
    ("//", Op::FloorDiv),
    ("<<", Op::ShiftLeft),
    (">>", Op::ShiftRight),
    ("==", Op::Equal),
    ("!=", Op::NotEqual),
    ("+", Op::Add),
    ("-", Op::Sub),
    ("*", Op::Mul),
    ("/", Op::Div),
    ("%", Op::Rem),
    ("|", Op::Or),
    ("^", Op::Xor),
    ("&", Op::And),
];

impl Op {
    /// How tightly it binds in Python's grammar.
    fn level(self) -> u8 {
        match self {
            Self::Open => 0,
            Self::Equal | Self::NotEqual => 1,
            Self::Or => 2,
            Self::Xor => 3,
            Self::And => 4,
            Self::ShiftLeft | Self::ShiftRight => 5,
            Self::Add | Self::Sub => 6,
            Self::Mul | Self::Div | Self::FloorDiv | Self::Rem => 7,
            Self::Plus | Self::Minus | Self::Invert => 8,
            Self::Pow => 9,
        }
    }
}

/// The value of `text`.
///
/// # Errors
/// `Malformed` where the package's evaluation raises, `Beyond` where ours ends first.
pub(super) fn evaluate(text: &str) -> Result<Value, Stop> {
    let mut reader = Reader { rest: python::strip(text), num_parens: 0 };
    let mut machine = Machine::default();
    loop {
        // An operand, after any signs and opening parentheses.
        loop {
            reader.skip_blanks();
            let Some(op) = reader.take_prefix() else { break };
            if op == Op::Open && reader.num_parens > MAX_PARENS {
                return Err(Stop::Malformed);
            }
            machine.push_operator(op)?;
        }
        let number = reader.take_number()?;
        machine.push_result(|_| number.ok_or(Stop::Beyond));
        // Whatever may follow one: factorials and closing parentheses, then an operator or the end.
        loop {
            let num_marks = reader.take_factorial_marks();
            if num_marks > 0 {
                machine.factorial(num_marks)?;
            }
            reader.skip_blanks();
            if !reader.take_close() {
                break;
            }
            machine.close()?;
        }
        match reader.take_binary() {
            Some(op) => machine.push_binary(op)?,
            None if reader.is_at_end() => return machine.finish(),
            None => return Err(Stop::Malformed),
        }
    }
}

/// The integers that a text writes out: runs of digits that no letter, underscore or other digit touches. The package
/// holds these, rather than the parsed operands, against the numbers of the puzzle.
pub(super) fn written_integers(text: &str) -> Vec<BigInt> {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|word| !word.is_empty() && word.len() <= MAX_INT_DIGITS && word.bytes().all(|b| b.is_ascii_digit()))
        .filter_map(|word| BigInt::parse_bytes(word.as_bytes(), 10))
        .collect()
}

struct Reader<'a> {
    rest: &'a str,
    num_parens: usize,
}

impl<'a> Reader<'a> {
    /// Blanks, comments and, inside parentheses, line ends.
    fn skip_blanks(&mut self) {
        loop {
            let before = self.rest.len();
            self.rest = self.rest.trim_start_matches([' ', '\t', '\x0c']);
            if self.rest.starts_with('#') {
                self.rest = &self.rest[self.rest.find('\n').unwrap_or(self.rest.len())..];
            }
            for line_end in ["\n", "\r\n"] {
                if self.num_parens > 0 {
                    self.rest = self.rest.strip_prefix(line_end).unwrap_or(self.rest);
                }
            }
            self.rest = self.rest.strip_prefix("\\\n").unwrap_or(self.rest);
            if self.rest.len() == before {
                return;
            }
        }
    }

    /// Whether nothing but blank lines and comments is left.
    fn is_at_end(&mut self) -> bool {
        if !self.rest.is_empty() && !self.rest.starts_with(['\n', '\r']) || self.num_parens > 0 {
            return false;
        }
        self.rest.split('\n').all(|line| python::strip(line).is_empty() || python::strip(line).starts_with('#'))
    }

    fn take(&mut self, what: &str) -> bool {
        match self.rest.strip_prefix(what) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn take_prefix(&mut self) -> Option<Op> {
        if self.take("(") {
            self.num_parens += 1;
            return Some(Op::Open);
        }
        [("+", Op::Plus), ("-", Op::Minus), ("~", Op::Invert)]
            .into_iter()
            .find(|(sign, _)| self.take(sign))
            .map(|x| x.1)
    }

    fn take_close(&mut self) -> bool {
        let is_close = self.num_parens > 0 && self.take(")");
        self.num_parens -= usize::from(is_close);
        is_close
    }

    fn take_binary(&mut self) -> Option<Op> {
        BINARY.into_iter().find(|(sign, _)| self.take(sign)).map(|x| x.1)
    }

    /// Exclamation marks that touch the operand and do not begin a `!=`.
    fn take_factorial_marks(&mut self) -> usize {
        let mut num_marks = 0;
        while self.rest.starts_with('!') && !self.rest.starts_with("!=") {
            self.rest = &self.rest[1..];
            num_marks += 1;
        }
        num_marks
    }

    /// A Python literal: an integer of any radix or a float, with single underscores between digits. `None` for one
    /// beyond our range.
    fn take_number(&mut self) -> Result<Option<Value>, Stop> {
        let bytes = self.rest.as_bytes();
        let radix = match bytes {
            [b'0', b'x' | b'X', ..] => 16,
            [b'0', b'o' | b'O', ..] => 8,
            [b'0', b'b' | b'B', ..] => 2,
            _ => 10,
        };
        if radix != 10 {
            let is_part = |c: &u8| c.is_ascii_alphanumeric() || *c == b'_';
            let num_bytes = bytes.iter().take_while(|c| is_part(c)).count();
            let value = python::int_any_radix(&self.rest[..num_bytes]).ok_or(Stop::Malformed)?;
            self.advance_past_number(num_bytes)?;
            return Ok(Some(value).filter(|value| value.bits() <= MAX_BITS).map(Value::from_int));
        }
        let num_whole = num_digits(bytes);
        let mut num_bytes = num_whole;
        let mut num_fraction = 0;
        let has_point = bytes.get(num_bytes) == Some(&b'.');
        if has_point {
            num_fraction = num_digits(&bytes[num_bytes + 1..]);
            num_bytes += 1 + num_fraction;
        }
        if num_whole + num_fraction == 0 {
            return Err(Stop::Malformed);
        }
        let num_exponent = num_exponent_bytes(&bytes[num_bytes..]);
        num_bytes += num_exponent;
        let literal = self.rest[..num_bytes].replace('_', "");
        self.advance_past_number(num_bytes)?;
        if has_point || num_exponent > 0 {
            let value: f64 = literal.parse().map_err(|_| Stop::Malformed)?;
            let is_nonzero =
                literal.bytes().take_while(|c| !matches!(c, b'e' | b'E')).any(|c| matches!(c, b'1'..=b'9'));
            return Ok(Some(value).filter(|value| value.is_normal() || !is_nonzero).map(Value::Float));
        }
        let has_leading_zero = literal.starts_with('0') && literal.bytes().any(|c| c != b'0');
        if has_leading_zero || literal.len() > MAX_INT_DIGITS {
            return Err(Stop::Malformed);
        }
        BigInt::parse_bytes(literal.as_bytes(), 10).map(|value| Some(Value::from_int(value))).ok_or(Stop::Malformed)
    }

    /// Moves on, unless something touches the number that would make it another word.
    fn advance_past_number(&mut self, num_bytes: usize) -> Result<(), Stop> {
        self.rest = &self.rest[num_bytes..];
        let is_glued = self.rest.starts_with(|c: char| c.is_alphanumeric() || c == '_' || c == '.');
        if is_glued { Err(Stop::Malformed) } else { Ok(()) }
    }
}

/// Bytes of digits with single underscores between them, from the front.
fn num_digits(bytes: &[u8]) -> usize {
    let mut at = 0;
    while bytes.get(at).is_some_and(u8::is_ascii_digit)
        || at > 0
            && bytes[at - 1] != b'_'
            && bytes.get(at) == Some(&b'_')
            && bytes.get(at + 1).is_some_and(u8::is_ascii_digit)
    {
        at += 1;
    }
    at
}

/// Bytes of an exponent at the front, 0 if there is none.
fn num_exponent_bytes(bytes: &[u8]) -> usize {
    if !matches!(bytes.first(), Some(b'e' | b'E')) {
        return 0;
    }
    let num_sign = usize::from(matches!(bytes.get(1), Some(b'+' | b'-')));
    match num_digits(&bytes[1 + num_sign..]) {
        0 => 0,
        num_digits => 1 + num_sign + num_digits,
    }
}

/// The stacks of operands and waiting operators, and the account of the work.
#[derive(Default)]
struct Machine {
    values: Vec<Value>,
    operators: Vec<Op>,
    num_operators: usize,
    work: u64,
    /// Why the evaluation ended before the text.
    stop: Option<Stop>,
}

impl Machine {
    fn push_operator(&mut self, op: Op) -> Result<(), Stop> {
        if op != Op::Open {
            self.num_operators += 1;
        }
        if self.num_operators > MAX_OPERATORS {
            return Err(Stop::Malformed);
        }
        self.operators.push(op);
        Ok(())
    }

    /// Does what binds tighter, or as tight from the left, before `op` waits for its right side.
    fn push_binary(&mut self, op: Op) -> Result<(), Stop> {
        let is_right_first = op == Op::Pow;
        while let Some(&top) = self.operators.last()
            && (top.level() > op.level() || top.level() == op.level() && !is_right_first)
        {
            self.apply_top()?;
        }
        self.push_operator(op)
    }

    /// Does all that waits since the last open parenthesis, and drops it.
    fn close(&mut self) -> Result<(), Stop> {
        while self.operators.last().is_some_and(|&op| op != Op::Open) {
            self.apply_top()?;
        }
        self.operators.pop();
        let value = self.pop_value()?.settled();
        self.values.push(value);
        Ok(())
    }

    fn finish(mut self) -> Result<Value, Stop> {
        while !self.operators.is_empty() {
            self.apply_top()?;
        }
        let value = self.pop_value()?;
        self.stop.map_or(Ok(value), Err)
    }

    fn pop_value(&mut self) -> Result<Value, Stop> {
        self.values.pop().ok_or(Stop::Malformed)
    }

    /// Applies the operator on top, or only its syntax once the evaluation has stopped: a text that Python cannot parse
    /// is malformed, whatever its beginning would have cost.
    fn apply_top(&mut self) -> Result<(), Stop> {
        let op = self.operators.pop().ok_or(Stop::Malformed)?;
        let right = self.pop_value()?;
        let left = match op {
            Op::Plus | Op::Minus | Op::Invert => None,
            _ => Some(self.pop_value()?),
        };
        self.push_result(|machine| match (op, left) {
            (Op::Plus, _) => Ok(right),
            (Op::Minus, _) => Ok(negated(right)),
            (Op::Invert, _) => Ok(Value::from_int(!right.as_integer()?.clone())),
            (Op::Equal | Op::NotEqual, Some(left)) => Ok(compared(left, right, op == Op::Equal)),
            (_, Some(left)) => machine.binary(op, left, right),
            (_, None) => Err(Stop::Malformed),
        });
        Ok(())
    }

    /// Pushes what `evaluation` gives; after the first that stopped, a place holder.
    fn push_result(&mut self, evaluation: impl FnOnce(&mut Self) -> Result<Value, Stop>) {
        let result = match self.stop {
            None => evaluation(self),
            Some(stop) => Err(stop),
        };
        let value = result.unwrap_or_else(|stop| {
            self.stop = Some(stop);
            Value::NotANumber
        });
        self.values.push(value);
    }

    fn binary(&mut self, op: Op, left: Value, right: Value) -> Result<Value, Stop> {
        match (&left, &right) {
            (Value::Exact(left), Value::Exact(right)) => self.exact(op, left, right),
            (Value::Exact(_) | Value::Float(_), Value::Exact(_) | Value::Float(_)) => float(op, &left, &right),
            _ => unbounded(op, &left, &right),
        }
    }

    /// Charges `amount`, so that the text that costs too much ends at once.
    fn charge(&mut self, amount: u64) -> Result<(), Stop> {
        self.work = self.work.saturating_add(amount);
        if self.work > MAX_WORK { Err(Stop::Beyond) } else { Ok(()) }
    }

    fn exact(&mut self, op: Op, left: &BigRational, right: &BigRational) -> Result<Value, Stop> {
        let (num_left, num_right) = (num_words(left), num_words(right));
        let are_integers = left.is_integer() && right.is_integer();
        self.charge(16 + num_left.saturating_mul(num_right))?;
        if !are_integers || op == Op::Div {
            // Fractions are brought to lowest terms, bit by bit: 64 passes for each word.
            self.charge(64 * (num_left + num_right).pow(2))?;
        }
        let value = match op {
            Op::Add if are_integers => BigRational::from_integer(left.numer() + right.numer()),
            Op::Sub if are_integers => BigRational::from_integer(left.numer() - right.numer()),
            Op::Mul if are_integers => BigRational::from_integer(left.numer() * right.numer()),
            Op::Add => left + right,
            Op::Sub => left - right,
            Op::Mul => left * right,
            Op::Div if right.is_zero() => {
                return Ok(if left.is_zero() { Value::NotANumber } else { Value::Infinity });
            }
            Op::Div => left / right,
            Op::FloorDiv | Op::Rem if right.is_zero() => return Err(Stop::Malformed),
            Op::FloorDiv => (left / right).floor(),
            Op::Rem => left - right * (left / right).floor(),
            Op::Pow => return self.power(left, right),
            _ => return self.integer(op, left, right),
        };
        bounded(value)
    }

    /// The operators that only integers have.
    fn integer(&mut self, op: Op, left: &BigRational, right: &BigRational) -> Result<Value, Stop> {
        if !left.is_integer() || !right.is_integer() {
            return Err(Stop::Malformed);
        }
        let (left, right) = (left.numer(), right.numer());
        let value = match op {
            Op::Or => left | right,
            Op::Xor => left ^ right,
            Op::And => left & right,
            _ if right.is_negative() => return Err(Stop::Malformed),
            Op::ShiftRight => match right.to_u64() {
                Some(shift) if shift <= MAX_BITS => left >> shift,
                _ => BigInt::from(if left.is_negative() { -1 } else { 0 }),
            },
            _ if left.is_zero() => BigInt::ZERO,
            _ => match right.to_u64() {
                Some(shift) if shift <= MAX_BITS => left << shift,
                _ => return Err(Stop::Beyond),
            },
        };
        bounded(BigRational::from_integer(value))
    }

    /// `base ** exponent` where it is rational and small enough; looked at before it is computed.
    fn power(&mut self, base: &BigRational, exponent: &BigRational) -> Result<Value, Stop> {
        if exponent.is_zero() || base.is_one() {
            return Ok(Value::Exact(BigRational::one()));
        }
        if base.is_zero() {
            return Ok(if exponent.is_negative() { Value::Infinity } else { Value::Exact(BigRational::zero()) });
        }
        let base = if exponent.is_integer() { base.clone() } else { self.root(base, exponent.denom())? };
        let times = exponent.numer();
        if base.is_one() {
            return Ok(Value::Exact(base));
        }
        if base == -BigRational::one() {
            return Ok(Value::Exact(if times.is_even() { BigRational::one() } else { base }));
        }
        let times_abs = times.abs().to_u32().ok_or(Stop::Beyond)?;
        let num_bits = (base.numer().bits().max(base.denom().bits())).saturating_mul(u64::from(times_abs));
        if num_bits > MAX_BITS {
            return Err(Stop::Beyond);
        }
        self.charge((num_bits / 64 + 1).pow(2))?;
        let power = BigRational::new_raw(base.numer().pow(times_abs), base.denom().pow(times_abs));
        bounded(if times.is_negative() { power.recip() } else { power })
    }

    /// The `degree`-th root of a base, where numerator and denominator have exact ones.
    fn root(&mut self, base: &BigRational, degree: &BigInt) -> Result<BigRational, Stop> {
        if base.is_negative() {
            // A complex number, which the package's conversion refuses.
            return Err(Stop::Malformed);
        }
        let num_bits = base.numer().bits().max(base.denom().bits());
        let degree = degree.to_u32().filter(|&degree| u64::from(degree) < num_bits.max(2)).ok_or(Stop::Beyond)?;
        self.charge(64 * (num_bits / 64 + 1).pow(2))?;
        let (numer, denom) = (base.numer().nth_root(degree), base.denom().nth_root(degree));
        let is_exact = numer.pow(degree) == *base.numer() && denom.pow(degree) == *base.denom();
        if is_exact { Ok(BigRational::new_raw(numer, denom)) } else { Err(Stop::Beyond) }
    }

    /// Replaces the value on top by its `n!` or `n!!`.
    fn factorial(&mut self, num_marks: usize) -> Result<(), Stop> {
        self.num_operators += 1;
        if num_marks > 2 || self.num_operators > MAX_OPERATORS {
            return Err(Stop::Malformed);
        }
        let value = self.pop_value()?;
        self.push_result(|machine| machine.factorial_of(value, num_marks as u64));
        Ok(())
    }

    fn factorial_of(&mut self, value: Value, step: u64) -> Result<Value, Stop> {
        let mut factor = match value {
            Value::Exact(value) if value.is_integer() && value.is_negative() && step == 1 => {
                return Ok(Value::Infinity);
            }
            Value::Exact(value) if value.is_integer() => value.numer().to_u64().ok_or(Stop::Beyond)?,
            Value::Infinity => return Err(Stop::Malformed),
            Value::NotANumber => return Ok(Value::NotANumber),
            _ => return Err(Stop::Beyond),
        };
        let mut product = BigInt::one();
        while factor > 1 {
            self.charge(16 + product.bits() / 64)?;
            product *= factor;
            if product.bits() > MAX_BITS {
                return Err(Stop::Beyond);
            }
            factor = factor.saturating_sub(step);
        }
        Ok(Value::from_int(product))
    }
}

/// The words of the longer of numerator and denominator.
fn num_words(value: &BigRational) -> u64 {
    value.numer().bits().max(value.denom().bits()) / 64 + 1
}

fn bounded(value: BigRational) -> Result<Value, Stop> {
    let is_small = value.numer().bits() <= MAX_BITS && value.denom().bits() <= MAX_BITS;
    if is_small { Ok(Value::Exact(value)) } else { Err(Stop::Beyond) }
}

fn negated(value: Value) -> Value {
    match value {
        Value::Exact(value) => Value::Exact(-value),
        Value::Float(value) => Value::Float(-value),
        other => other,
    }
}

/// One link of a chain of comparisons; an exact number never equals a float, even of its value.
fn compared(left: Value, right: Value, wants_equal: bool) -> Value {
    let (so_far, left) = match left {
        Value::Truth(holds, last) => (holds, *last),
        other => (true, other),
    };
    let holds = so_far && (left == right) == wants_equal;
    Value::Truth(holds, Box::new(right))
}

/// Arithmetic with at least one float, on doubles as SymPy's floats of 15 digits are.
fn float(op: Op, left: &Value, right: &Value) -> Result<Value, Stop> {
    match op {
        Op::Div if right.is_zero() => return Ok(if left.is_zero() { Value::NotANumber } else { Value::Infinity }),
        Op::FloorDiv | Op::Rem if right.is_zero() => return Err(Stop::Malformed),
        Op::Pow if right.is_zero() => return Ok(Value::Exact(BigRational::one())),
        Op::Pow if left.is_zero() && right.as_operand()? < 0.0 => return Ok(Value::Infinity),
        Op::Mul | Op::Div | Op::Pow if left.is_zero() => return Ok(Value::Exact(BigRational::zero())),
        _ => {}
    }
    let is_zero_product = op == Op::Mul && right.is_zero();
    let (x, y) = (left.as_operand()?, right.as_operand()?);
    match op {
        Op::Add => Value::from_float(x + y, x + y == 0.0),
        Op::Sub => Value::from_float(x - y, x - y == 0.0),
        Op::Mul => Value::from_float(x * y, is_zero_product),
        Op::Div => Value::from_float(x / y, false),
        Op::FloorDiv => match num_traits::FromPrimitive::from_f64((x / y).floor()) {
            Some(floor) => Ok(Value::from_int(floor)),
            None => Err(Stop::Beyond),
        },
        Op::Rem => {
            let rest = x % y;
            let rest = if rest != 0.0 && (rest < 0.0) != (y < 0.0) { rest + y } else { rest };
            Value::from_float(rest, rest == 0.0)
        }
        // A negative base to a broken exponent is complex, which the package's conversion refuses.
        Op::Pow if x < 0.0 && y.fract() != 0.0 => Err(Stop::Malformed),
        Op::Pow => Value::from_float(x.powf(y), false),
        _ => Err(Stop::Malformed),
    }
}

/// Arithmetic with at least one operand that is no finite number.
fn unbounded(op: Op, left: &Value, right: &Value) -> Result<Value, Stop> {
    use Value::{Infinity, NotANumber, Truth};
    if matches!(left, Truth(..)) || matches!(right, Truth(..)) {
        return Err(Stop::Malformed);
    }
    let is_any_nan = *left == NotANumber || *right == NotANumber;
    let are_both = *left == Infinity && *right == Infinity;
    Ok(match op {
        Op::Pow if right.is_zero() => Value::Exact(BigRational::one()),
        Op::Add | Op::Sub | Op::Mul | Op::Div | Op::FloorDiv | Op::Rem | Op::Pow if is_any_nan => NotANumber,
        Op::Rem => NotANumber,
        Op::Add | Op::Sub => {
            if are_both {
                NotANumber
            } else {
                Infinity
            }
        }
        Op::Mul => {
            if left.is_zero() || right.is_zero() {
                NotANumber
            } else {
                Infinity
            }
        }
        Op::Div | Op::FloorDiv if are_both => NotANumber,
        Op::Div | Op::FloorDiv if *right == Infinity => Value::Exact(BigRational::zero()),
        Op::Div | Op::FloorDiv => Infinity,
        Op::Pow if *right == Infinity => NotANumber,
        Op::Pow if right.as_operand()? > 0.0 => Infinity,
        Op::Pow => Value::Exact(BigRational::zero()),
        _ => return Err(Stop::Malformed),
    })
}
