//! Typed access to metadata: [`FromValue`] and the getters of [`Metadata`].
//!
//! Files disagree about the width and sign of the same key, so integers convert by value: a u64 that holds 4096 is a
//! u32, an i32 that holds -1 is an error that says so. Nothing else converts: no bool is a number, no integer is a
//! float. A key of the wrong type is an error also where the key is optional, because to take the default instead would
//! run the model with other numbers than its maker meant.

use std::borrow::Cow;

use crate::error::describe;
use crate::{Array, GgufError, Metadata, StringArray, Value};

/// Why a value does not convert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The value has another type.
    Type,
    /// The type is right and the value does not fit.
    Range,
}

/// A Rust type that a metadata value can be read as.
pub trait FromValue<'a>: Sized {
    /// What is needed, for messages: `a u32`.
    const EXPECTED: &'static str;

    /// Converts without loss, except that an f64 asked for as f32 is rounded to nearest.
    ///
    /// # Errors
    /// [`Mismatch`] says whether the type or the value is in the way.
    fn from_value(value: &'a Value) -> Result<Self, Mismatch>;
}

macro_rules! integers {
    ($( $rust:ty, $variant:ident, $one:literal, $many:literal; )*) => { $(
        impl<'a> FromValue<'a> for $rust {
            const EXPECTED: &'static str = $one;
            fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
                let integer = value.integer().ok_or(Mismatch::Type)?;
                integer.try_into().map_err(|_| Mismatch::Range)
            }
        }
        impl<'a> FromValue<'a> for Cow<'a, [$rust]> {
            const EXPECTED: &'static str = $many;
            fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
                match value {
                    Value::Array(Array::$variant(elements)) => Ok(Cow::Borrowed(elements)),
                    Value::Array(array) => convert_integers(array).map(Cow::Owned),
                    _ => Err(Mismatch::Type),
                }
            }
        }
    )* };
}

integers! {
    u8, U8, "a u8", "an array of u8";
    u16, U16, "a u16", "an array of u16";
    u32, U32, "a u32", "an array of u32";
    u64, U64, "a u64", "an array of u64";
    i8, I8, "an i8", "an array of i8";
    i16, I16, "an i16", "an array of i16";
    i32, I32, "an i32", "an array of i32";
    i64, I64, "an i64", "an array of i64";
}

fn convert_integers<T: TryFrom<i128>>(array: &Array) -> Result<Vec<T>, Mismatch> {
    (0..array.len())
        .map(|index| {
            let integer = array.integer(index).ok_or(Mismatch::Type)?;
            T::try_from(integer).map_err(|_| Mismatch::Range)
        })
        .collect()
}

/// The nearest f32; a finite number that f32 cannot hold does not become infinite.
fn narrow(x: f64) -> Result<f32, Mismatch> {
    let narrowed = x as f32;
    if narrowed.is_infinite() && x.is_finite() { Err(Mismatch::Range) } else { Ok(narrowed) }
}

impl<'a> FromValue<'a> for f32 {
    const EXPECTED: &'static str = "an f32";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match *value {
            Value::F32(x) => Ok(x),
            Value::F64(x) => narrow(x),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for f64 {
    const EXPECTED: &'static str = "an f64";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match *value {
            Value::F32(x) => Ok(x.into()),
            Value::F64(x) => Ok(x),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for Cow<'a, [f32]> {
    const EXPECTED: &'static str = "an array of f32";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::F32(elements)) => Ok(Cow::Borrowed(elements)),
            Value::Array(Array::F64(elements)) => {
                elements.iter().map(|x| narrow(*x)).collect::<Result<_, _>>().map(Cow::Owned)
            }
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for bool {
    const EXPECTED: &'static str = "a bool";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        if let Value::Bool(b) = *value { Ok(b) } else { Err(Mismatch::Type) }
    }
}

impl<'a> FromValue<'a> for Cow<'a, [bool]> {
    const EXPECTED: &'static str = "an array of bool";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::Bool(elements)) => Ok(Cow::Borrowed(elements)),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string in UTF-8";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::String(bytes) => std::str::from_utf8(bytes).map_err(|_| Mismatch::Range),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for &'a [u8] {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        if let Value::String(bytes) = value { Ok(bytes) } else { Err(Mismatch::Type) }
    }
}

impl<'a> FromValue<'a> for &'a Array {
    const EXPECTED: &'static str = "an array";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        if let Value::Array(array) = value { Ok(array) } else { Err(Mismatch::Type) }
    }
}

impl<'a> FromValue<'a> for &'a StringArray {
    const EXPECTED: &'static str = "an array of strings";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::String(strings)) => Ok(strings),
            _ => Err(Mismatch::Type),
        }
    }
}

impl Metadata {
    /// The value of `key` as `T`, or `None` where the key is absent.
    ///
    /// # Errors
    /// [`GgufError::WrongType`] and [`GgufError::OutOfRange`].
    pub fn optional<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        T::from_value(value).map(Some).map_err(|mismatch| {
            let (file, key, expected) = (self.file().to_owned(), key.to_owned(), T::EXPECTED);
            match mismatch {
                Mismatch::Type => {
                    GgufError::WrongType { file, key, expected, got: describe_type(value) }
                }
                Mismatch::Range => {
                    let got = describe(value.value_type(), &value.to_string());
                    GgufError::OutOfRange { file, key, expected, got }
                }
            }
        })
    }

    /// The value of `key` as `T`.
    ///
    /// # Errors
    /// [`GgufError::MissingKey`], [`GgufError::WrongType`] and [`GgufError::OutOfRange`].
    pub fn required<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, GgufError> {
        self.optional(key)?.ok_or_else(|| GgufError::MissingKey {
            file: self.file().to_owned(),
            key: key.to_owned(),
            expected: T::EXPECTED,
        })
    }

    /// A value per layer: an array of exactly `n` elements as it is, a scalar `n` times, `None` where the key is absent.
    ///
    /// Keys such as `attention.head_count_kv` are a scalar in most models and an array in those whose layers differ.
    ///
    /// # Errors
    /// [`GgufError::WrongType`], [`GgufError::OutOfRange`] and [`GgufError::WrongLength`].
    pub fn optional_per_layer<'a, T>(
        &'a self,
        key: &str,
        n: usize,
    ) -> Result<Option<Vec<T>>, GgufError>
    where
        T: FromValue<'a> + Clone + 'a,
        Cow<'a, [T]>: FromValue<'a>,
    {
        if !matches!(self.get(key), Some(Value::Array(_))) {
            return Ok(self.optional::<T>(key)?.map(|scalar| vec![scalar; n]));
        }
        let Some(elements) = self.optional::<Cow<'a, [T]>>(key)? else { return Ok(None) };
        if elements.len() != n {
            let (file, key) = (self.file().to_owned(), key.to_owned());
            let (expected, got) = (n as u64, elements.len() as u64);
            return Err(GgufError::WrongLength { file, key, expected, got });
        }
        Ok(Some(elements.into_owned()))
    }
}

macro_rules! getters {
    ($( $get:ident, $opt:ident, $rust:ty, $what:literal; )*) => {
        /// Getters by name; `opt_` ones give `None` where the key is absent.
        impl Metadata {
            $(
                #[doc = concat!("The key's value as ", $what, ".\n\n# Errors\nAs [`Metadata::required`].")]
                pub fn $get(&self, key: &str) -> Result<$rust, GgufError> {
                    self.required(key)
                }
                #[doc = concat!("The key's value as ", $what, ", if there.\n\n# Errors\nAs [`Metadata::optional`].")]
                pub fn $opt(&self, key: &str) -> Result<Option<$rust>, GgufError> {
                    self.optional(key)
                }
            )*
        }
    };
}

getters! {
    get_u32, opt_u32, u32, "a u32, from any integer type that holds one";
    get_u64, opt_u64, u64, "a u64, from any integer type that holds one";
    get_i32, opt_i32, i32, "an i32, from any integer type that holds one";
    get_i64, opt_i64, i64, "an i64, from any integer type that holds one";
    get_f32, opt_f32, f32, "an f32; an f64 is rounded to nearest";
    get_f64, opt_f64, f64, "an f64, from either float type";
    get_bool, opt_bool, bool, "a bool";
    get_str, opt_str, &str, "text";
    get_array, opt_array, &Array, "an array of anything";
    get_strings, opt_strings, &StringArray, "an array of strings";
    get_u32s, opt_u32s, Cow<'_, [u32]>, "an array of u32, borrowed where the file has that type";
    get_i32s, opt_i32s, Cow<'_, [i32]>, "an array of i32, borrowed where the file has that type";
    get_f32s, opt_f32s, Cow<'_, [f32]>, "an array of f32, borrowed where the file has that type";
    get_bools, opt_bools, Cow<'_, [bool]>, "an array of bool";
}

/// `a u32`, or `an array of u32`.
fn describe_type(value: &Value) -> String {
    match value {
        Value::Array(array) => format!("an array of {}", array.element_type()),
        scalar => scalar.value_type().with_article().to_owned(),
    }
}
