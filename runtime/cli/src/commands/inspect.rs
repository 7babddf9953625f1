//! `tegula inspect`: a model file's metadata and tensors, whatever its architecture.

use crate::args::InspectArgs;
use crate::output;
use anyhow::Result;
use serde_json::{Map, Value as Json, json};
use tegula::Gguf;
use tegula::gguf::{Array, Value};
use tegula::memory::units::format_size;

/// Elements of an array and characters of a text that are shown without `--full`.
const SHOWN_ELEMENTS: usize = 6;
const SHOWN_CHARS: usize = 100;

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    let gguf = Gguf::open(&args.model)?;
    let metadata = metadata(&gguf, args.full);
    if args.json {
        return output::print_json(&json!({
            "path": args.model.display().to_string(),
            "shards": gguf.shards().iter().map(|s| s.path.display().to_string()).collect::<Vec<_>>(),
            "metadata": metadata,
            "tensors": tensors_json(&gguf),
        }));
    }
    output::print(&gguf.summary()?.to_string())?;
    let rows: Vec<Vec<String>> =
        metadata.iter().map(|(key, value)| vec![key.clone(), value.to_string()]).collect();
    output::print(&format!("\n{}", output::table(&["key", "value"], &rows, &[])))?;
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
    let table = output::table(&["tensor", "type", "dimensions", "bytes"], &rows, &[3]);
    output::print(&format!("\n{table}"))
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
    let (elements, chars) =
        if full { (usize::MAX, usize::MAX) } else { (SHOWN_ELEMENTS, SHOWN_CHARS) };
    gguf.metadata()
        .iter()
        .map(|(key, value)| (key.to_owned(), value_json(value, elements, chars)))
        .collect()
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
        Value::F32(x) => json!(x),
        Value::F64(x) => json!(x),
        Value::Bool(x) => json!(x),
        other => other.integer().map_or(Json::Null, integer_json),
    }
}

fn element_json(array: &Array, i: usize, elements: usize, chars: usize) -> Option<Json> {
    Some(match array {
        Array::String(strings) => text_json(strings.get(i)?, chars),
        Array::F32(values) => json!(values.get(i)?),
        Array::F64(values) => json!(values.get(i)?),
        Array::Bool(values) => json!(values.get(i)?),
        Array::Array(inner) => value_json(&Value::Array(inner.get(i)?.clone()), elements, chars),
        other => integer_json(other.integer(i)?),
    })
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
