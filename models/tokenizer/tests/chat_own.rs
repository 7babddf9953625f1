//! Templates of this project's own: limits, errors, and the built-in format.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod common;

use serde_json::{Value, json};
use tegula_tokenizer::{
    ChatInput, ChatTemplate, ChatTime, TemplateError, TemplateOrigin, Tokenizer, Vocab,
};

fn render(source: &str, messages: &Value) -> Result<String, TemplateError> {
    ChatTemplate::new(source, "<s>", "</s>")?.render(&ChatInput {
        messages,
        tools: None,
        add_generation_prompt: true,
        extra: None,
        now: ChatTime::from_unix(0),
    })
}

#[test]
fn templates_have_python_habits() {
    let messages =
        json!([{"role": "user", "content": "Hi"}, {"a": null, "b": [1.0, true, "x"], "t": "<é>"}]);
    for (source, want) in [
        ("{% if true %}\n  a\n    {% endif %}\nb", "  a\nb"),
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{{ messages[1] }}", "{'a': None, 'b': [1.0, True, 'x'], 't': '<é>'}"),
        ("{{ messages[1] | tojson }}", r#"{"a": null, "b": [1.0, true, "x"], "t": "<é>"}"#),
        (
            "{{ {'b': [1], 'a': {}} | tojson(indent=2) }}",
            "{\n  \"b\": [\n    1\n  ],\n  \"a\": {}\n}",
        ),
        ("{{ [1, 'é'] | tojson(separators=(',', ':'), ensure_ascii=true) }}", "[1,\"\\u00e9\"]"),
        (
            "{% for m in messages[::-1] %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
            "user",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        (
            "{{ 'a,b'.split(',')[-1].upper() }}{{ ' x '.strip() }}{{ 'ab'.startswith('a') }}",
            "BxTrue",
        ),
        ("{{ tools is defined }}{{ nothing is none }}{{ none }}", "FalseFalseNone"),
        (
            "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
            "role=user;content=Hi;",
        ),
        ("{{ strftime_now('%d %b %Y') }}", "01 Jan 1970"),
        ("{{ 'a\nb\n' | indent(2, first=true) }}", "  a\n  b\n"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ 'x' + nowhere }}", "x"),
    ] {
        assert_eq!(render(source, &messages).unwrap(), want, "{source}");
    }
}

#[test]
fn content_in_parts_reaches_templates_that_cannot_take_it() {
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
    assert_eq!(render("{{ '>' + messages[0].content }}", &parts).unwrap(), ">ab");
    let call = json!([{"tool_calls": [{"function": {"arguments": {"x": 1}}}]}]);
    let source = "{{ '>' + messages[0].tool_calls[0].function.arguments }}";
    assert_eq!(render(source, &call).unwrap(), r#">{"x":1}"#);
    let text = json!([{"tool_calls": [{"function": {"arguments": "{\"x\": 1}"}}]}]);
    let source = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}{{ v }}{% endfor %}";
    assert_eq!(render(source, &text).unwrap(), "x1");
}

#[test]
fn errors_name_the_line_and_the_templates_own_words() {
    let none = json!([]);
    for (source, want) in [
        ("\n{{ raise_exception('No tools here') }}", "(line 2): No tools here"),
        ("{% macro m() %}\n{{ raise_exception('deep') }}{% endmacro %}{{ m() }}", "deep"),
        ("\n\n{% if %}", "line 3: syntax error"),
        ("{{ messages[0].content.x.y }}", "line 1: undefined value"),
        ("{% include 'other' %}", "other"),
    ] {
        let error = render(source, &none).unwrap_err().to_string();
        assert!(error.contains(want), "{source}: {error}");
    }
}

#[test]
fn hostile_templates_end_with_an_error() {
    let deep = format!("{}1{}", "(".repeat(100_000), ")".repeat(100_000));
    let nested = format!("{}1{}", "[".repeat(5_000), "]".repeat(5_000));
    let long = " ".repeat((1 << 20) + 1);
    let sources = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".to_owned(),
        "{% set ns = namespace(s='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}".to_owned(),
        "{% set ns = namespace(s='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}".to_owned(),
        "{% set ns = namespace(s='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}".to_owned(),
        "{{ 'a' * 99999999999 }}".to_owned(),
        "{% set s = 'a' * 90000000 %}{{ s }}{{ s }}{{ s }}".to_owned(),
        "{% set ns = namespace(l=[1, 2]) %}{% for i in range(22) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l }}".to_owned(),
        "{% set ns = namespace(l=[1, 2]) %}{% for i in range(22) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l | tojson }}".to_owned(),
        "{% set ns = namespace(l=[1, 2]) %}{% for i in range(22) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l | join }}".to_owned(),
        "{% set ns = namespace(l=[1, 2]) %}{% for i in range(22) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l | sort | length }}".to_owned(),
        "{% set ns = namespace(l=[1, 2]) %}{% for i in range(22) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l ~ 'x' }}".to_owned(),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_owned(),
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson }}".to_owned(),
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}".to_owned(),
        "{{ 'a\n' * 1000000 | indent(900) }}".to_owned(),
        "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}".to_owned(),
        format!("{{{{ {deep} }}}}"),
        format!("{{{{ {nested} }}}}"),
        long,
    ];
    for (i, source) in sources.into_iter().enumerate() {
        eprintln!("source {i}");
        let start = std::time::Instant::now();
        let result = render(&source, &json!([]));
        let head: String = source.chars().take(120).collect();
        assert!(result.is_err(), "{head} gave {} bytes", result.map_or(0, |t| t.len()));
        assert!(start.elapsed().as_secs() < 20, "{head} took {:?}", start.elapsed());
    }
}

fn gemma(template: Option<&str>, arch: &str) -> Option<ChatTemplate> {
    let vocab = Vocab {
        model: "llama".to_owned(),
        arch: arch.to_owned(),
        tokens: ["<pad>", "<eos>", "<bos>", "a"].into_iter().collect(),
        special: tegula_tokenizer::SpecialIds { bos: Some(2), eos: Some(1), ..Default::default() },
        chat_template: template.map(str::to_owned),
        ..Vocab::default()
    };
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    ChatTemplate::of_model(&vocab, &tokenizer, None).unwrap()
}

#[test]
fn a_model_without_template_gets_the_documented_one_or_none() {
    assert_eq!(gemma(Some("x"), "gemma3").unwrap().origin(), &TemplateOrigin::File);
    assert!(gemma(None, "llama").is_none());
    let template = gemma(None, "gemma3").unwrap();
    assert_eq!(template.origin(), &TemplateOrigin::BuiltIn("gemma"));
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]);
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        extra: None,
        now: ChatTime::from_unix(0),
    };
    assert_eq!(
        template.render(&input).unwrap(),
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n\
         <start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    );
    let tool = json!([{"role": "tool", "content": "x"}]);
    let error = template.render(&ChatInput { messages: &tool, ..input }).unwrap_err();
    assert!(matches!(error, TemplateError::Refused { .. }), "{error}");
}
