//! Prompts equal those of the reference, for every published template there is data for.
//!
//! A difference means that a model is prompted in another format than it was
//! trained on: worse answers, without any error.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod common;

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};
use tegula_tokenizer::{ChatInput, ChatTemplate, ChatTime, TemplateError, Tokenizer};

/// The time at which the reference was rendered.
const NOW: ChatTime = ChatTime { year: 2026, month: 1, day: 15, hour: 12, minute: 34, second: 56 };

fn render(template: &ChatTemplate, case: &Value) -> Result<String, TemplateError> {
    let empty = Map::new();
    template.render(&ChatInput {
        messages: &case["messages"],
        tools: case.get("tools").filter(|t| !t.is_null()),
        add_generation_prompt: case.get("add_generation_prompt").is_none_or(|v| v == true),
        extra: Some(case.get("extra").and_then(Value::as_object).unwrap_or(&empty)),
        now: NOW,
    })
}

/// What is wrong with one rendering, if anything.
fn problem(got: Result<String, TemplateError>, want: &Value) -> Option<String> {
    let refusal = (want["error"] == "raise_exception").then(|| want["message"].as_str().unwrap());
    match (want.get("expected").and_then(Value::as_str), got) {
        (Some(want), Ok(got)) if got == want => None,
        (Some(want), Ok(got)) => Some(format!("\n   got {got:?}\n  want {want:?}")),
        (Some(_), Err(error)) => Some(error.to_string()),
        (None, Err(TemplateError::Refused { message, .. })) if refusal == Some(&message) => None,
        // Python alone trips here (over absent tools or content in parts): rendering is right.
        (None, Ok(_)) if refusal.is_none() => None,
        (None, got) => Some(format!("{got:?}, expected {want}")),
    }
}

/// Cases that differ, with what differs.
fn differences(source: &str, expected: &Value, cases: &Value) -> Vec<(String, String)> {
    let text = |key: &str| expected[key].as_str().unwrap_or_default();
    let template = match ChatTemplate::new(source, text("bos_token"), text("eos_token")) {
        Ok(template) => template,
        Err(error) => return vec![("compile".to_owned(), error.to_string())],
    };
    let results = expected["results"].as_object().unwrap();
    results
        .iter()
        .filter_map(|(name, want)| {
            Some((name.clone(), problem(render(&template, &cases[name]), want)?))
        })
        .collect()
}

#[test]
fn templates_render_as_in_the_reference() {
    let Some(dir) = common::golden("chat") else { return };
    let cases = common::json(&dir.join("cases.json"));
    let known =
        common::json(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat_known.json"));
    let known: BTreeSet<&str> = known.as_object().unwrap().keys().map(String::as_str).collect();
    let mut found = BTreeSet::new();
    let mut names: Vec<_> =
        std::fs::read_dir(dir.join("templates")).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    let mut n_cases = 0;
    for path in &names {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let source = std::fs::read_to_string(path).unwrap();
        let expected = common::json(&dir.join("expected").join(format!("{name}.json")));
        let wrong = differences(&source, &expected, &cases["cases"]);
        n_cases += expected["results"].as_object().unwrap().len();
        for (case, problem) in wrong {
            let key = format!("{name}/{case}");
            if !known.contains(key.as_str()) {
                eprintln!("{key}: {problem}");
            }
            found.insert(key);
        }
    }
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    let new: Vec<_> = found.difference(&known).collect();
    let gone: Vec<_> = known.difference(&found).collect();
    eprintln!("{} templates, {n_cases} cases, {} known differences", names.len(), known.len());
    assert!(new.is_empty(), "prompts that differ from the reference: {new:?}");
    assert!(gone.is_empty(), "no longer different, remove from chat_known.json: {gone:?}");
}

/// The whole way from messages to the ids that the real models were measured with.
#[test]
fn real_models_see_the_reference_prompt() {
    let Some(dir) = common::golden("real") else { return };
    let messages = serde_json::json!([
        {"role": "system", "content": "You are a concise assistant."},
        {"role": "user", "content": "What is the capital of France, and which river runs through it?"},
    ]);
    for (file, prompt) in [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-q4_1__chat.json"),
        ("gemma-3-270m-q4_k_m.gguf", "gemma-3-270m-q4_k_m__chat.json"),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-0.5b-q4_k_m__chat.json"),
    ] {
        let Some(path) = common::vocab_file(file) else { continue };
        let vocab = common::load_vocab(&path);
        let tokenizer = Tokenizer::new(&vocab).unwrap();
        let template = ChatTemplate::of_model(&vocab, &tokenizer, None).unwrap().unwrap();
        let text = render(&template, &serde_json::json!({ "messages": messages })).unwrap();
        let want = common::json(&dir.join(prompt));
        assert_eq!(text.trim_start_matches("<bos>"), want["text"].as_str().unwrap(), "{file}");
        assert_eq!(tokenizer.encode_prompt(&text), common::ids(&want["ids"]), "{file}");
    }
}
