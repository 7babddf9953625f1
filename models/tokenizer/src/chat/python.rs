//! Python's habits, for templates written with them in mind.
//!
//! Values print as Python's `str` prints them (`None`, `True`, `{'a': 1}`), and
//! names of Hugging Face's environment exist.

use std::fmt::{self, Write};

use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};

use super::json::{DEPTH_MAX, tojson};

/// The message of `raise_exception`, as the cause of the engine's error.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Gives an environment Python's habits.
pub(super) fn install(env: &mut Environment<'static>) {
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(print);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_filter("tojson", tojson);
    env.add_filter("string", str_of);
    env.add_filter("indent", indent);
    env.add_function("raise_exception", raise_exception);
}

/// Turns `{% generation %}`, which marks what is trained on and prints nothing itself, into an
/// `if` that always holds. Lines and white space stay as they are.
pub(super) fn adapt_source(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end);
        match tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['-', '+']).trim() {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Jinja's `indent`: unlike the engine's own it keeps a newline at the end.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes arguments by value")]
fn indent(state: &State, text: &str, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let (width, first, blank): (Option<Value>, Option<bool>, Option<bool>) = from_args(&args)?;
    let pick = |given: Option<bool>, name: &str| -> Result<bool, Error> {
        Ok(given.or(kwargs.get::<Option<bool>>(name)?).unwrap_or(false))
    };
    let width = width.or(kwargs.get::<Option<Value>>("width")?);
    let (first, blank) = (pick(first, "first")?, pick(blank, "blank")?);
    kwargs.assert_all_used()?;
    let margin = match width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(margin) => margin.to_owned(),
            None => " ".repeat(width.as_i64().unwrap_or(0).clamp(0, 1000) as usize),
        },
    };
    state.consume_fuel((text.matches('\n').count() as u64 + 1) * (margin.len() as u64 / 64 + 1))?;
    let mut out = String::with_capacity(text.len());
    for (i, line) in text.split('\n').enumerate() {
        let is_indented = if i == 0 { first } else { blank || !line.is_empty() };
        out.push_str(if i > 0 { "\n" } else { "" });
        out.push_str(if is_indented { &margin } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, message.to_owned());
    Err(error.with_source(Raised(message.to_owned())))
}

/// Prints `{{ value }}`.
fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        return out.write_str(text).map_err(Error::from);
    }
    let text = str_of(state, value)?;
    out.write_str(&text).map_err(Error::from)
}

/// Charges for visiting a value and copying its text.
pub(super) fn pay(state: &State, value: &Value) -> Result<(), Error> {
    state.consume_fuel(1 + value.as_str().map_or(0, str::len) as u64 / 64)
}

/// Python's `str`.
fn str_of(state: &State, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None if value.is_undefined() => {}
        None => repr(&mut out, state, value, 0)?,
    }
    Ok(out)
}

/// Python's `repr`. Lists can be far longer than the work that made them, so each value is paid for.
fn repr(out: &mut String, state: &State, value: &Value, depth: usize) -> Result<(), Error> {
    pay(state, value)?;
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "the value is nested too deeply"));
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number_text(value)),
        ValueKind::String => repr_string(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, state, &item, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, state, &key, depth + 1)?;
                out.push_str(": ");
                repr(out, state, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => _ = write!(out, "{value}"),
    }
    Ok(())
}

/// Single quotes, unless the text has some and no double ones.
fn repr_string(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => _ = write!(out, "\\x{:02x}", u32::from(c)),
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Integers as they are; floats as Python prints them: shortest digits, a point always, exponents
/// from 10¹⁶ and below 10⁻⁴.
pub(super) fn number_text(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else { return value.to_string() };
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) {
        let text = format!("{x:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(e) => ('-', e),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{x:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_marks_become_conditions() {
        let source = "a {%- generation +%}x{% endgeneration %} {% if generation %}{% x";
        assert_eq!(adapt_source(source), "a {%- if true +%}x{% endif %} {% if generation %}{% x");
    }

    #[test]
    fn values_print_as_in_python() {
        for (json, want) in [
            ("null", "None"),
            ("[true, 1, 1.0, 1e22, 0.00001, -2.5]", "[True, 1, 1.0, 1e+22, 1e-05, -2.5]"),
            (r#"{"a": "it's", "b": "\"q\" 'x'\n"}"#, r#"{'a': "it's", 'b': '"q" \'x\'\n'}"#),
            ("\"x'y\"", "x'y"),
        ] {
            let value = super::super::json::to_value(&serde_json::from_str(json).unwrap());
            let env = Environment::new();
            assert_eq!(str_of(&env.empty_state(), &value).unwrap(), want);
        }
    }
}
