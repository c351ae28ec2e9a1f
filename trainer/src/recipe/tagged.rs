//! Enums that a table's `type` key picks: `[loss] type = "ppo_clip"`.
//!
//! serde's own `tag = "type"` copies the table aside before it looks at the fields, and so forgets where they were
//! written. Here `type` is the first key that is read and the variant reads the rest from the same place, so an
//! unknown key or a wrong type inside the variant is reported like any other.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

/// An enum whose variants are picked by `type`.
pub trait Tagged: Sized {
    /// The values of `type`.
    const TAGS: &'static [&'static str];

    /// Reads the variant `tag` from the table's other keys; `None` if there is no such variant.
    fn read<'de, D: Deserializer<'de>>(tag: &str, rest: D) -> Option<Result<Self, D::Error>>;
}

/// Reads a table that starts with `type`.
///
/// # Errors
/// When `type` is not the first key or no variant's, or the variant refuses the rest.
pub fn deserialize<'de, T: Tagged, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    deserializer.deserialize_map(TaggedVisitor(PhantomData))
}

struct TaggedVisitor<T>(PhantomData<T>);

impl<'de, T: Tagged> Visitor<'de> for TaggedVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<T, A::Error> {
        if table.next_key::<String>()?.as_deref() != Some("type") {
            return Err(A::Error::custom("the first key must be `type`"));
        }
        let tag: Tag<T> = table.next_value()?;
        T::read(&tag.0, MapAccessDeserializer::new(table))
            .unwrap_or_else(|| Err(A::Error::unknown_variant(&tag.0, T::TAGS)))
    }
}

/// A value of `type`, checked as it is read so that the error points at its line.
struct Tag<T>(String, PhantomData<T>);

impl<'de, T: Tagged> serde::Deserialize<'de> for Tag<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let tag = String::deserialize(deserializer)?;
        if !T::TAGS.contains(&tag.as_str()) {
            return Err(D::Error::unknown_variant(&tag, T::TAGS));
        }
        Ok(Self(tag, PhantomData))
    }
}

/// Defines an enum that `type` picks; each variant holds the struct of its other keys.
macro_rules! tagged_enum {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $tag:literal => $variant:ident($config:ty),)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize)]
        #[serde(tag = "type")]
        $vis enum $name {
            $($(#[$doc])* #[serde(rename = $tag)] $variant($config),)+
        }

        impl $crate::recipe::tagged::Tagged for $name {
            const TAGS: &'static [&'static str] = &[$($tag),+];

            fn read<'de, D: serde::Deserializer<'de>>(tag: &str, rest: D) -> Option<Result<Self, D::Error>> {
                match tag {
                    $($tag => Some(serde::Deserialize::deserialize(rest).map(Self::$variant)),)+
                    _ => None,
                }
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::recipe::tagged::deserialize(deserializer)
            }
        }
    };
}
pub(crate) use tagged_enum;
