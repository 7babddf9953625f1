//! `tegula inspect`: a model file's metadata and tensors, whatever its architecture.

use crate::args::InspectArgs;
use crate::table::{table, terminal_width};
use crate::{models, output};
use anyhow::Result;
use serde_json::{Map, Value as Json, json};
use tegula::Gguf;
use tegula::gguf::{Array, Value};
use tegula::memory::units::format_size;

/// Elements of an array and characters of a text that are shown without `--full`.
const SHOWN_ELEMENTS: usize = 6;
const SHOWN_CHARS: usize = 100;

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    let path = models::find(&args.model)?;
    let gguf = Gguf::open(&path)?;
    let metadata = metadata(&gguf, args.full);
    if args.json {
        return output::print_json(&json!({
            "path": path.display().to_string(),
            "shards": gguf.shards().iter().map(|s| s.path.display().to_string()).collect::<Vec<_>>(),
            "metadata": metadata,
            "tensors": tensors_json(&gguf),
        }));
    }
    output::print(gguf.summary()?.to_string().trim_end())?;
    let rows: Vec<Vec<String>> = gguf
        .metadata()
        .iter()
        .map(|(key, value)| vec![key.to_owned(), cell(value, args.full)])
        .collect();
    let width = terminal_width().filter(|_| !args.full);
    output::print(&format!("\n{}", table(&["key", "value"], &rows, &[], width)))?;
    let rows: Vec<Vec<String>> = gguf
        .tensors()
        .iter()
        .map(|tensor| {
            let dims: Vec<String> = tensor.dims().iter().map(ToString::to_string).collect();
            vec![
                tensor.name().to_owned(),
                tensor.dtype().name().to_owned(),
                dims.join(" x "),
                format_size(tensor.n_bytes()),
            ]
        })
        .collect();
    let tensors = table(&["tensor", "type", "dimensions", "bytes"], &rows, &[3], width);
    output::print(&format!("\n{tensors}"))
}

fn tensors_json(gguf: &Gguf) -> Vec<Json> {
    gguf.tensors()
        .iter()
        .map(|tensor| {
            json!({
                "name": tensor.name(),
                "type": tensor.dtype().name(),
                "dims": tensor.dims(),
                "shard": tensor.shard(),
                "offset": tensor.offset(),
                "bytes": tensor.n_bytes(),
            })
        })
        .collect()
}

fn metadata(gguf: &Gguf, full: bool) -> Map<String, Json> {
    let (elements, chars) = limits(full);
    gguf.metadata()
        .iter()
        .map(|(key, value)| (key.to_owned(), value_json(value, elements, chars)))
        .collect()
}

/// A value for the table: one that is cut begins with its length, which a narrow terminal leaves.
fn cell(value: &Value, full: bool) -> String {
    let (n, what) = match value {
        Value::Array(array) if !full && array.len() > SHOWN_ELEMENTS => (array.len(), "values"),
        Value::String(bytes) if !full => {
            (String::from_utf8_lossy(bytes).chars().count(), "characters")
        }
        _ => (0, ""),
    };
    let (elements, chars) = limits(full);
    let whole = value_json(value, elements, chars);
    match whole {
        Json::Array(mut shown) if n > elements => {
            shown.pop();
            format!("{n} {what}: {}", Json::Array(shown))
        }
        Json::String(_) if n > chars => {
            let Value::String(bytes) = value else { return whole.to_string() };
            let cut: String = String::from_utf8_lossy(bytes).chars().take(chars).collect();
            format!("{n} {what}: {}", json!(cut))
        }
        other => other.to_string(),
    }
}

fn limits(full: bool) -> (usize, usize) {
    if full { (usize::MAX, usize::MAX) } else { (SHOWN_ELEMENTS, SHOWN_CHARS) }
}

/// A value as JSON; long arrays and texts are cut to `elements` and `chars`, and say so.
fn value_json(value: &Value, elements: usize, chars: usize) -> Json {
    match value {
        Value::Array(array) => {
            let n = array.len();
            let mut shown: Vec<Json> = (0..n.min(elements))
                .filter_map(|i| element_json(array, i, elements, chars))
                .collect();
            if n > elements {
                shown.push(json!(format!("... {n} in all")));
            }
            Json::Array(shown)
        }
        Value::String(bytes) => text_json(bytes, chars),
        Value::F32(x) => float_json(*x),
        Value::F64(x) => json!(x),
        Value::Bool(x) => json!(x),
        other => other.integer().map_or(Json::Null, integer_json),
    }
}

fn element_json(array: &Array, i: usize, elements: usize, chars: usize) -> Option<Json> {
    Some(match array {
        Array::String(strings) => text_json(strings.get(i)?, chars),
        Array::F32(values) => float_json(*values.get(i)?),
        Array::F64(values) => json!(values.get(i)?),
        Array::Bool(values) => json!(values.get(i)?),
        Array::Array(inner) => value_json(&Value::Array(inner.get(i)?.clone()), elements, chars),
        other => integer_json(other.integer(i)?),
    })
}

/// As short as tells it from its neighbours: 1e-5, not 9.999999747378752e-6.
fn float_json(x: f32) -> Json {
    x.to_string().parse::<f64>().map_or(Json::Null, |x| json!(x))
}

fn integer_json(n: i128) -> Json {
    i64::try_from(n)
        .map(|n| json!(n))
        .or_else(|_| u64::try_from(n).map(|n| json!(n)))
        .unwrap_or(Json::Null)
}

fn text_json(bytes: &[u8], chars: usize) -> Json {
    let text = String::from_utf8_lossy(bytes);
    let n = text.chars().count();
    if n <= chars {
        return json!(text);
    }
    let cut: String = text.chars().take(chars).collect();
    json!(format!("{cut}... {n} characters in all"))
}
