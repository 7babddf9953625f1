//! `tojson` as Hugging Face defines it: Python's `json.dumps` with `ensure_ascii=False`.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::python::{number_text, pay};

/// Nesting beyond this is an error; values can be built by templates.
pub(super) const DEPTH_MAX: usize = 100;

/// A template's view of JSON; objects keep their order. Levels below [`DEPTH_MAX`] are left out.
pub(super) fn to_value(json: &serde_json::Value) -> Value {
    convert(json, 0)
}

fn convert(json: &serde_json::Value, depth: usize) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(n), _, _) => Value::from(n),
            (_, Some(n), _) => Value::from(n),
            (_, _, Some(x)) => Value::from(x),
            _ => Value::UNDEFINED,
        },
        Json::String(text) => Value::from(text.as_str()),
        _ if depth > DEPTH_MAX => Value::UNDEFINED,
        Json::Array(items) => {
            Value::from(items.iter().map(|i| convert(i, depth + 1)).collect::<Vec<_>>())
        }
        Json::Object(map) => {
            Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), convert(v, depth + 1))))
        }
    }
}

struct Style {
    item_separator: String,
    key_separator: String,
    indent: Option<String>,
    sort_keys: bool,
    ascii: bool,
}

/// The filter. `indent` may be a number or a text; separators are Python's defaults unless given.
#[expect(clippy::needless_pass_by_value, reason = "the engine passes arguments by value")]
pub(super) fn tojson(
    state: &State,
    value: &Value,
    ensure_ascii: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        Some(v) if v.is_none() || v.is_undefined() => None,
        Some(v) => Some(match v.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(v.as_i64().unwrap_or(0).clamp(0, 64) as usize),
        }),
        None => None,
    };
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ascii = ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let style = Style { item_separator, key_separator, indent, sort_keys, ascii };
    let mut out = String::new();
    write_value(&mut out, state, value, &style, 0)?;
    Ok(Value::from(out))
}

fn write_value(
    out: &mut String,
    state: &State,
    value: &Value,
    style: &Style,
    depth: usize,
) -> Result<(), Error> {
    pay(state, value)?;
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::BadSerialization, "the value is nested too deeply"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number_text(value)),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.map(|item| Ok((None, item)));
            write_items(out, state, ('[', ']'), items, style, depth)?;
        }
        ValueKind::Map => {
            let mut items = Vec::new();
            for key in value.try_iter()? {
                pay(state, &key)?;
                items.push((Some(key_text(&key)), value.get_item(&key)?));
            }
            if style.sort_keys {
                items.sort_by(|(a, _), (b, _)| a.cmp(b));
            }
            write_items(out, state, ('{', '}'), items.into_iter().map(Ok), style, depth)?;
        }
        other => {
            let message = format!("a value of type {other} is not JSON serializable");
            return Err(Error::new(ErrorKind::BadSerialization, message));
        }
    }
    Ok(())
}

/// JSON keys are text; Python writes other keys as the values they are.
fn key_text(key: &Value) -> String {
    match key.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        ValueKind::Number => number_text(key),
        _ => key.to_string(),
    }
}

fn write_items(
    out: &mut String,
    state: &State,
    (open, close): (char, char),
    items: impl Iterator<Item = Result<(Option<String>, Value), Error>>,
    style: &Style,
    depth: usize,
) -> Result<(), Error> {
    out.push(open);
    let mut n_items = 0;
    for item in items {
        let (key, item) = item?;
        if n_items > 0 {
            out.push_str(&style.item_separator);
        }
        n_items += 1;
        new_line(out, style, depth + 1);
        if let Some(key) = key {
            write_string(out, &key, style.ascii);
            out.push_str(&style.key_separator);
        }
        write_value(out, state, &item, style, depth + 1)?;
    }
    if n_items > 0 {
        new_line(out, style, depth);
    }
    out.push(close);
    Ok(())
}

fn new_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn write_string(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
