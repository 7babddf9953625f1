//! `tegula tokenize`: stdin to ids, or ids to text.

use crate::args::TokenizeArgs;
use anyhow::{Context, Result};
use std::io::{Read, Write};
use tegula::{EncodeOptions, ModelFile};

pub(crate) fn run(args: &TokenizeArgs) -> Result<()> {
    let mut input = Vec::new();
    std::io::stdin().read_to_end(&mut input).context("stdin")?;
    let file = ModelFile::open(crate::models::find(&args.model)?)?;
    let tokenizer = file.tokenizer();
    if args.decode {
        let ids = read_ids(&String::from_utf8_lossy(&input))?;
        let bytes = tokenizer.detokenize(&ids, args.no_special, !args.no_special)?;
        return Ok(std::io::stdout().write_all(&bytes)?);
    }
    let text = String::from_utf8(input)
        .context("stdin is not UTF-8; convert it first (for example with iconv)")?;
    let options = EncodeOptions {
        add_special: !args.no_special,
        parse_special: !args.no_special && !args.no_parse_special,
    };
    let ids = tokenizer.encode(&text, options);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &ids)?;
        writeln!(out)?;
    } else {
        let words: Vec<String> = ids.iter().map(ToString::to_string).collect();
        writeln!(out, "{}", words.join(" "))?;
    }
    Ok(())
}

/// Ids separated by spaces, commas or lines, or a JSON array of them.
fn read_ids(text: &str) -> Result<Vec<u32>> {
    text.split(|c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']'))
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().with_context(|| format!("`{word}` is no token id")))
        .collect()
}
