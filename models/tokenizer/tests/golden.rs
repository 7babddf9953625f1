//! Ids and texts equal the reference's, for every vocabulary there is data for.
//!
//! A difference here means that a model sees other tokens than it was trained
//! on (worse answers, without any error), or that a user reads other text than
//! the model wrote.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod common;

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use tegula_tokenizer::{Detokenizer, EncodeOptions, Tokenizer};

/// A difference: its name in the list of known ones, and what differs.
type Difference = (String, String);

/// Everything that differs.
fn differences(
    tokenizer: &Tokenizer,
    facts: &Value,
    cases: &[Value],
    pieces: &[Value],
) -> Vec<Difference> {
    let mut wrong = Vec::new();
    check_facts(tokenizer, facts, &mut wrong);
    for case in cases {
        // Text that is not UTF-8 cannot be handed in.
        if let Some(text) = case.get("text").and_then(Value::as_str) {
            check_case(tokenizer, text, case, &mut wrong);
        }
    }
    for piece in pieces {
        check_piece(tokenizer, piece, &mut wrong);
    }
    wrong
}

fn check_facts(tokenizer: &Tokenizer, facts: &Value, wrong: &mut Vec<Difference>) {
    let mut check = |what: &str, got: Value| {
        if got != facts[what] {
            wrong.push((what.to_owned(), format!("{got}, expected {}", facts[what])));
        }
    };
    let id = |id: Option<u32>| Value::from(id.map_or(-1, i64::from));
    check("n_vocab", tokenizer.n_vocab().into());
    check("add_bos", tokenizer.add_bos().into());
    check("add_eos", tokenizer.add_eos().into());
    check("bos", id(tokenizer.bos()));
    check("eos", id(tokenizer.eos()));
    check("eog", tokenizer.eog_ids().collect::<Vec<_>>().into());
}

fn check_case(tokenizer: &Tokenizer, text: &str, case: &Value, wrong: &mut Vec<Difference>) {
    let i = &case["i"];
    for (what, add_special, parse_special) in
        [("ids", true, false), ("ids_special", true, true), ("ids_raw", false, false)]
    {
        let got = tokenizer.encode(text, EncodeOptions { add_special, parse_special });
        let want = common::ids(&case[what]);
        if got != want {
            wrong.push((
                format!("case {i} {what}"),
                format!("{text:?}\n   got {got:?}\n  want {want:?}"),
            ));
        }
    }
    for (what, ids, remove, unparse) in [
        ("detok", "ids_raw", false, true),
        ("detok_special", "ids_special", false, true),
        ("detok_strip", "ids_special", true, false),
    ] {
        let ids = common::ids(&case[ids]);
        let got = tokenizer.detokenize(&ids, remove, unparse).unwrap();
        let want = common::bytes(&case[what]);
        if got != want {
            let (got, want) = (String::from_utf8_lossy(&got), String::from_utf8_lossy(&want));
            wrong.push((
                format!("case {i} {what}"),
                format!("{text:?}\n   got {got:?}\n  want {want:?}"),
            ));
        }
        check_streaming(tokenizer, &ids, wrong);
    }
}

/// Streamed text must be the text of all pieces.
fn check_streaming(tokenizer: &Tokenizer, ids: &[u32], wrong: &mut Vec<Difference>) {
    let mut streamed = String::new();
    let mut whole = Vec::new();
    let mut detokenizer = Detokenizer::new(tokenizer, true);
    for &id in ids {
        streamed += detokenizer.push(id).unwrap();
        whole.extend_from_slice(tokenizer.token_to_piece(id, true).unwrap());
    }
    streamed += &detokenizer.finish();
    let whole = String::from_utf8_lossy(&whole);
    if streamed != whole {
        wrong.push((
            format!("streaming {ids:?}"),
            format!("\n   got {streamed:?}\n  want {whole:?}"),
        ));
    }
}

fn check_piece(tokenizer: &Tokenizer, piece: &Value, wrong: &mut Vec<Difference>) {
    let id = piece["id"].as_u64().unwrap() as u32;
    let attr = u64::from(tokenizer.attr(id).unwrap().bits());
    if attr != piece["attr"].as_u64().unwrap() {
        wrong.push((format!("token {id} attr"), format!("{attr}, expected {}", piece["attr"])));
    }
    if tokenizer.is_eog(id) != piece["eog"].as_bool().unwrap() {
        wrong.push((format!("token {id} eog"), format!("expected {}", piece["eog"])));
    }
    for (what, special) in [("piece", true), ("piece_nospecial", false)] {
        let got = tokenizer.token_to_piece(id, special).unwrap();
        let want = common::bytes(&piece[what]);
        if got != want {
            let (got, want) = (got.escape_ascii(), want.escape_ascii());
            wrong.push((format!("token {id} {what}"), format!("'{got}', expected '{want}'")));
        }
    }
}

#[test]
fn vocabularies_agree_with_the_reference() {
    let Some(dir) = common::golden("tokenizer") else { return };
    let index = common::json(&dir.join("index.json"));
    let known =
        common::json(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden_known.json"));
    let known: BTreeSet<&str> = known.as_object().unwrap().keys().map(String::as_str).collect();
    let mut found = BTreeSet::new();
    let (mut n_checked, mut n_skipped) = (0, 0);
    for facts in index.as_array().unwrap() {
        let name = facts["name"].as_str().unwrap();
        let Some(path) = common::vocab_file(facts["file"].as_str().unwrap()) else {
            n_skipped += 1;
            found.extend(known.iter().filter(|k| k.starts_with(name)).map(|k| (*k).to_owned()));
            continue;
        };
        let cases = common::json_lines(&dir.join(format!("{name}.jsonl")));
        let pieces = common::json_lines(&dir.join(format!("{name}.pieces.jsonl")));
        let wrong = differences(&common::load(&path), facts, &cases, &pieces);
        n_checked += 1;
        for (what, difference) in wrong {
            let key = format!("{name}/{what}");
            if !known.contains(key.as_str()) {
                eprintln!("{key}: {difference}");
            }
            found.insert(key);
        }
    }
    eprintln!(
        "{n_checked} vocabularies checked, {n_skipped} skipped, {} known differences",
        known.len()
    );
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    let new: Vec<_> = found.difference(&known).collect();
    let gone: Vec<_> = known.difference(&found).collect();
    assert!(new.is_empty(), "differs from the reference: {new:?}");
    assert!(gone.is_empty(), "no longer different, remove from golden_known.json: {gone:?}");
}
