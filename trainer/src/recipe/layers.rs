//! The layers of a recipe: parsed with the place of every key, merged, and read into structs.
//!
//! A layer is a tree of [`Node`]s that know who wrote them, so an error found after merging still names the file and
//! the line. The lowest layer is `Recipe::default()` itself.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::de::{self, IntoDeserializer, Unexpected, Visitor};
use toml::de::{DeTable, DeValue};

use super::error::{Origin, RecipeError};

/// A value with its writer.
#[derive(Clone, Debug)]
pub struct Node {
    pub origin: Origin,
    pub value: Value,
}

/// Keys in the order of the alphabet: the order of a table says nothing.
pub type Table = BTreeMap<String, Node>;

#[derive(Clone, Debug)]
pub enum Value {
    Bool(bool),
    Integer(i64),
    Float(f64),
    String(String),
    /// What no key takes (a date, a number beyond 64 bits), as it was written.
    Other(String),
    Array(Vec<Node>),
    Table(Table),
}

impl fmt::Display for Value {
    /// As an error shows it.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Bool(b) => write!(f, "{b}"),
            Self::Integer(n) => write!(f, "{n}"),
            Self::Float(x) => write!(f, "{x:?}"),
            Self::String(s) => write!(f, "the string {:?}", shorten(s)),
            Self::Other(text) => write!(f, "{}", shorten(text)),
            Self::Array(_) => write!(f, "an array"),
            Self::Table(_) => write!(f, "a table"),
        }
    }
}

/// What a message shows of a text from outside: its beginning, if it is long, and no control characters.
pub fn shorten(text: &str) -> String {
    const MOST: usize = 120;
    let shown = text.chars().take(MOST).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c });
    let cut = text.chars().nth(MOST).map_or("", |_| "...");
    shown.chain(cut.chars()).collect()
}

/// The layer of a recipe file.
pub fn from_file(path: &Path) -> Result<Node, RecipeError> {
    let text = std::fs::read_to_string(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => RecipeError::Missing { path: path.to_owned(), advice: nearest_file(path) },
        _ => RecipeError::Read { path: path.to_owned(), source },
    })?;
    from_text(path, &text)
}

/// The layer of a recipe file's text.
pub fn from_text(path: &Path, text: &str) -> Result<Node, RecipeError> {
    let document = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(text.len(), |span| span.start).min(text.len());
        let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        RecipeError::Syntax {
            path: path.to_owned(),
            line: line_of(text, at),
            column: text[start..at].chars().count() + 1,
            message: match error.message().lines().collect::<Vec<_>>().join(", ") {
                // The reader takes a bare word that starts with `t` or `f` for a boolean.
                message if message.starts_with("invalid boolean") => {
                    "expected true, false or a string in quotes".into()
                }
                message => message,
            },
            text: shorten(text[start..].lines().next().unwrap_or_default().trim()),
        }
    })?;
    let path: Arc<Path> = path.into();
    let origin = |offset: usize| Origin::File { path: path.clone(), line: line_of(text, offset) };
    Ok(Node { origin: origin(0), value: Value::Table(table(document.into_inner(), &origin)) })
}

/// Line of a byte, counted from 1.
fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset].iter().filter(|&&b| b == b'\n').count() + 1
}

fn table(keys: DeTable, origin: &dyn Fn(usize) -> Origin) -> Table {
    let node = |(key, value): (toml::Spanned<_>, toml::Spanned<DeValue>)| {
        let origin_of_key = origin(key.span().start);
        let name: std::borrow::Cow<str> = key.into_inner();
        (name.into_owned(), Node { origin: origin_of_key, value: convert(value.into_inner(), origin) })
    };
    keys.into_iter().map(node).collect()
}

fn convert(value: DeValue, origin: &dyn Fn(usize) -> Origin) -> Value {
    match value {
        DeValue::Boolean(b) => Value::Bool(b),
        DeValue::Integer(n) => i64::from_str_radix(n.as_str(), n.radix()).map_or_else(
            |_| Value::Other(format!("{}, which does not fit 64 bits", shorten(n.as_str()))),
            Value::Integer,
        ),
        DeValue::Float(x) => x.as_str().parse().map_or_else(|_| Value::Other(x.as_str().to_owned()), Value::Float),
        DeValue::String(s) => Value::String(s.into_owned()),
        DeValue::Datetime(d) => Value::Other(d.to_string()),
        DeValue::Array(items) => Value::Array(
            items
                .into_iter()
                .map(|item| Node { origin: origin(item.span().start), value: convert(item.into_inner(), origin) })
                .collect(),
        ),
        DeValue::Table(keys) => Value::Table(table(keys, origin)),
    }
}

/// All `--set` arguments as one layer, so that `--set loss.clip_eps_low=0.1 --set loss.type=x` means the same in either
/// order. The same key twice: the later one counts.
pub fn from_sets(arguments: &[String]) -> Result<Node, RecipeError> {
    let mut layer = Node { origin: Origin::Default, value: Value::Table(Table::new()) };
    for argument in arguments {
        let refuse = |problem: &str| RecipeError::Set { argument: shorten(argument), problem: problem.to_owned() };
        let (key, text) = argument.split_once('=').ok_or_else(|| refuse("there is no `=`"))?;
        let (key, text) = (key.trim(), text.trim());
        let origin = Origin::Set { argument: argument.as_str().into() };
        let mut value = match DeValue::parse(text) {
            Ok(value) => convert(value.into_inner(), &|_| origin.clone()),
            Err(_) => Value::String(text.to_owned()),
        };
        for part in key.rsplit('.') {
            if part.is_empty() || !part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-') {
                return Err(refuse(&format!("`{}` is not a dotted key", shorten(key))));
            }
            value = Value::Table(Table::from([(part.to_owned(), Node { origin: origin.clone(), value })]));
        }
        overlay(&mut layer, Node { origin, value }, false);
    }
    Ok(layer)
}

/// The layer of a value's own fields: the defaults.
pub fn from_default<T: serde::Serialize>(value: &T) -> Node {
    fn node(value: toml::Value) -> Node {
        let value = match value {
            toml::Value::Boolean(b) => Value::Bool(b),
            toml::Value::Integer(n) => Value::Integer(n),
            toml::Value::Float(x) => Value::Float(x),
            toml::Value::String(s) => Value::String(s),
            toml::Value::Datetime(d) => Value::Other(d.to_string()),
            toml::Value::Array(items) => Value::Array(items.into_iter().map(node).collect()),
            toml::Value::Table(keys) => Value::Table(keys.into_iter().map(|(k, v)| (k, node(v))).collect()),
        };
        Node { origin: Origin::Default, value }
    }
    node(toml::Value::try_from(value).expect("the defaults of a recipe are TOML"))
}

/// Lays `upper` over `lower`: tables merge key by key, everything else is replaced.
///
/// A table of `upper` that changes `type` starts anew, for the lower layers' keys belong to another variant.
pub fn merge(lower: &mut Node, upper: Node) {
    overlay(lower, upper, true);
}

fn overlay(lower: &mut Node, upper: Node, variants: bool) {
    match (&mut lower.value, upper.value) {
        (Value::Table(below), Value::Table(above)) => {
            if let (true, Some(was), Some(is)) = (variants, below.get("type"), above.get("type"))
                && let (Value::String(was), Value::String(is)) = (&was.value, &is.value)
                && was != is
            {
                below.clear();
            }
            for (key, node) in above {
                match below.get_mut(&key) {
                    Some(old) => overlay(old, node, variants),
                    None => {
                        below.insert(key, node);
                    }
                }
            }
            lower.origin = upper.origin;
        }
        (_, value) => *lower = Node { origin: upper.origin, value },
    }
}

/// Who wrote `key` (dotted); `None` if nobody did.
pub fn origin_of<'a>(root: &'a Node, key: &str) -> Option<&'a Origin> {
    let mut node = root;
    for part in key.split('.') {
        let Value::Table(keys) = &node.value else { return None };
        node = keys.get(part)?;
    }
    Some(&node.origin)
}

/// Reads a tree of merged layers. `known_keys` are all dotted keys there are, for the advice on an unknown one.
pub fn read<T: de::DeserializeOwned>(root: &Node, known_keys: &[String]) -> Result<T, RecipeError> {
    T::deserialize(Reader { node: root, key: String::new() }).map_err(|fault| fault.into_error(root, known_keys))
}

/// An error on its way up; the first table that it passes says where it happened.
#[derive(Debug)]
struct Fault {
    at: Option<(String, Origin)>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    UnknownKey { siblings: &'static [&'static str] },
    UnknownChoice { found: String, choices: &'static [&'static str] },
    Type { found: Option<String>, expected: String },
}

impl Fault {
    fn new(kind: Kind) -> Self {
        Self { at: None, kind }
    }

    fn at(mut self, key: &str, node: &Node) -> Self {
        if let Kind::Type { found: found @ None, .. } = &mut self.kind {
            *found = Some(node.value.to_string());
        }
        self.at.get_or_insert_with(|| (key.to_owned(), node.origin.clone()));
        self
    }

    fn into_error(self, root: &Node, known_keys: &[String]) -> RecipeError {
        let (key, origin) = self.at.unwrap_or_else(|| (String::new(), root.origin.clone()));
        match self.kind {
            Kind::UnknownKey { siblings } => {
                let advice = advise_key(&key, siblings, known_keys);
                RecipeError::UnknownKey { origin, key: shorten(&key), advice }
            }
            Kind::UnknownChoice { found, choices } => {
                let mut expected = choices.iter().map(|c| format!("\"{c}\"")).collect::<Vec<_>>().join(" or ");
                if let (Some(near), true) = (nearest(&found, choices.iter().copied()), choices.len() > 1) {
                    expected.push_str(&format!("; did you mean \"{near}\"?"));
                }
                RecipeError::UnknownChoice { origin, key, found: shorten(&found), expected }
            }
            Kind::Type { found, expected } => {
                RecipeError::Type { origin, key, found: found.unwrap_or_default(), expected }
            }
        }
    }
}

fn advise_key(key: &str, siblings: &'static [&'static str], known_keys: &[String]) -> String {
    let (table, name) = key.rsplit_once('.').map_or(("", key), |(table, name)| (table, name));
    let dotted = |name: &str| if table.is_empty() { name.to_owned() } else { format!("{table}.{name}") };
    // A slip of the pen first, then the right key in the wrong table, then what there is.
    if let Some(sibling) = nearest(name, siblings.iter().copied()) {
        return format!("did you mean `{}`?", dotted(sibling));
    }
    // Not the key itself: another variant of the table may take it.
    let leaf = |known: &&String| known.rsplit('.').next() == Some(name) && known.as_str() != key;
    if let Some(elsewhere) = known_keys.iter().find(leaf) {
        return format!("did you mean `{elsewhere}`?");
    }
    let place = if table.is_empty() { "the top of a recipe".to_owned() } else { format!("[{table}]") };
    match siblings {
        [] => format!("{place} takes no such keys; remove it"),
        _ => format!("{place} takes {}", siblings.join(", ")),
    }
}

/// The candidate that a slip of the pen would turn into `word`, if there is one.
pub fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| {
            let slips = strsim::damerau_levenshtein(word, candidate);
            let likeness = strsim::jaro_winkler(word, candidate);
            (candidate, slips, likeness)
        })
        .filter(|&(_, slips, likeness)| slips <= 1 + word.chars().count() / 4 || likeness > 0.9)
        .max_by(|a, b| a.2.total_cmp(&b.2))
        .map(|(candidate, ..)| candidate)
}

fn nearest_file(path: &Path) -> String {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let Ok(entries) = std::fs::read_dir(folder) else {
        return format!("there is no folder {} either; check the path and where you started", folder.display());
    };
    let mut recipes: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.ends_with(".toml") && name != "Cargo.toml")
        .collect();
    recipes.sort();
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match nearest(name, recipes.iter().map(String::as_str)) {
        Some(near) => format!("did you mean {}?", path.with_file_name(near).display()),
        None if recipes.is_empty() => format!("there are no recipes in {}; check the path", folder.display()),
        None => format!("{} has {}", folder.display(), recipes.join(", ")),
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for Fault {}

impl de::Error for Fault {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(Kind::Type { found: None, expected: message.to_string() })
    }

    fn invalid_type(_: Unexpected, expected: &dyn de::Expected) -> Self {
        Self::new(Kind::Type { found: None, expected: in_words(&expected.to_string()) })
    }

    fn invalid_value(_: Unexpected, expected: &dyn de::Expected) -> Self {
        Self::new(Kind::Type { found: None, expected: in_words(&expected.to_string()) })
    }

    fn unknown_field(_: &str, siblings: &'static [&'static str]) -> Self {
        Self::new(Kind::UnknownKey { siblings })
    }

    fn unknown_variant(found: &str, choices: &'static [&'static str]) -> Self {
        Self::new(Kind::UnknownChoice { found: found.to_owned(), choices })
    }
}

/// serde's names of types, as a person would say them.
fn in_words(expected: &str) -> String {
    match expected {
        "usize" | "u64" | "u32" | "u16" | "u8" => "a whole number, 0 or more".to_owned(),
        "isize" | "i64" | "i32" | "i16" | "i8" => "a whole number".to_owned(),
        "f64" | "f32" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a string" | "path string" => "a string in quotes".to_owned(),
        other if other == "a map" || other.starts_with("struct ") => "a table".to_owned(),
        other => other.to_owned(),
    }
}

/// serde's view of a node.
struct Reader<'a> {
    node: &'a Node,
    key: String,
}

impl<'de> de::Deserializer<'de> for Reader<'_> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::Bool(b) => visitor.visit_bool(*b),
            Value::Integer(n) => visitor.visit_i64(*n),
            Value::Float(x) => visitor.visit_f64(*x),
            Value::String(s) => visitor.visit_str(s),
            Value::Other(text) => Err(de::Error::invalid_type(Unexpected::Other(text), &visitor)),
            Value::Array(items) => {
                let mut readers = Vec::with_capacity(items.len());
                for (idx, node) in items.iter().enumerate() {
                    readers.push(Reader { node, key: format!("{}[{idx}]", self.key) });
                }
                visitor.visit_seq(de::value::SeqDeserializer::new(readers.into_iter()))
            }
            Value::Table(keys) => {
                // `type` comes first: it says what the other keys mean.
                let mut entries: Vec<(&String, &Node)> = keys.iter().collect();
                entries.sort_by_key(|(key, _)| key.as_str() != "type");
                visitor.visit_map(TableReader { entries: entries.into_iter(), table: &self.key, value: None })
            }
        }
        .map_err(|fault| fault.at(&self.key, self.node))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_some(self)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        // `--set name=2026` means the text: a shell takes the quotes away.
        match (&self.node.origin, &self.node.value) {
            (_, Value::String(_) | Value::Array(_) | Value::Table(_)) => self.deserialize_any(visitor),
            (Origin::Set { argument }, _) => {
                let text = argument.split_once('=').map_or("", |(_, text)| text.trim());
                visitor.visit_str(text)
            }
            _ => self.deserialize_any(visitor),
        }
    }

    /// serde would also fill a struct from an array, field by field in their order.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::Array(_) => {
                let fault: Fault = de::Error::invalid_type(Unexpected::Seq, &"a map");
                Err(fault.at(&self.key, self.node))
            }
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let fault: Fault = match &self.node.value {
            Value::String(choice) => match visitor.visit_enum(choice.as_str().into_deserializer()) {
                Ok(value) => return Ok(value),
                Err(fault) => fault,
            },
            _ => de::Error::invalid_type(Unexpected::Other("no string"), &"a string"),
        };
        Err(fault.at(&self.key, self.node))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

impl IntoDeserializer<'_, Fault> for Reader<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

struct TableReader<'a> {
    entries: std::vec::IntoIter<(&'a String, &'a Node)>,
    table: &'a str,
    value: Option<Reader<'a>>,
}

impl<'de> de::MapAccess<'de> for TableReader<'_> {
    type Error = Fault;

    fn next_key_seed<K: de::DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let Some((name, node)) = self.entries.next() else { return Ok(None) };
        let key = if self.table.is_empty() { name.clone() } else { format!("{}.{name}", self.table) };
        let read = seed.deserialize(name.as_str().into_deserializer()).map_err(|fault: Fault| fault.at(&key, node))?;
        self.value = Some(Reader { node, key });
        Ok(Some(read))
    }

    fn next_value_seed<V: de::DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        let reader = self.value.take().expect("a value is asked for after its key");
        let (key, node) = (reader.key.clone(), reader.node);
        seed.deserialize(reader).map_err(|fault| fault.at(&key, node))
    }
}
