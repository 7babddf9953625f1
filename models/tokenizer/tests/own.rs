//! Behaviour on small vocabularies of this project's own: no other data is needed.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::sync::Arc;

use proptest::prelude::*;
use tegula_tokenizer::{
    Detokenizer, EncodeOptions, SpecialIds, Texts, TokenAttr, Tokenizer, TokenizerError, Vocab,
};

const RAW: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };
const PARSED: EncodeOptions = EncodeOptions { add_special: true, parse_special: true };

/// GPT-2's stand-in for a byte.
fn stand_in(byte: u8) -> char {
    let is_plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_plain(byte) {
        return char::from(byte);
    }
    let n_before = (0..byte).filter(|&b| !is_plain(b)).count() as u32;
    char::from_u32(0x100 + n_before).unwrap()
}

/// All bytes, some merges, and two control tokens.
fn byte_level(pre: &str) -> Vocab {
    let mut tokens: Vec<String> = (0..=255).map(|b| stand_in(b).to_string()).collect();
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ã ©"];
    tokens.extend(merges.iter().map(|m| m.replace(' ', "")));
    let mut types = vec![1; tokens.len()];
    tokens.extend(["<|bos|>".to_owned(), "<|im_end|>".to_owned()]);
    types.extend([3, 1]);
    Vocab {
        model: "gpt2".to_owned(),
        pre: Some(pre.to_owned()),
        special: SpecialIds { bos: Some(264), eos: Some(265), ..SpecialIds::default() },
        add_bos: Some(true),
        tokens: tokens.iter().collect(),
        token_types: Some(types),
        merges: Some(merges.iter().collect()),
        ..Vocab::default()
    }
}

/// A few pieces with scores, and byte tokens.
fn sentencepiece() -> Vocab {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut types = vec![2, 3, 3];
    tokens.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
    types.extend([6; 256]);
    let pieces = ["▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab", "▁▁"];
    tokens.extend(pieces.map(str::to_owned));
    types.extend([1; 9]);
    let mut scores = vec![0.0; 259];
    scores.extend([-9.0, -9.1, -9.2, -9.3, -3.0, -2.0, -1.0, -4.0, -0.5]);
    Vocab {
        model: "llama".to_owned(),
        tokens: tokens.iter().collect(),
        token_types: Some(types),
        scores: Some(scores),
        ..Vocab::default()
    }
}

fn texts(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let text = |&id: &u32| String::from_utf8(tokenizer.token_text(id).unwrap().to_vec()).unwrap();
    ids.iter().map(text).collect()
}

#[test]
fn text_becomes_the_best_merges() {
    let bpe = Tokenizer::new(&byte_level("gpt-2")).unwrap();
    for (text, want) in [
        ("hello world", &["hello", "Ġwor", "l", "d"][..]),
        ("é", &["Ã©"]),
        ("a<|bos|>", &["a", "<", "|", "b", "o", "s", "|", ">"]),
        ("", &[]),
    ] {
        assert_eq!(texts(&bpe, &bpe.encode(text, RAW)), want, "{text:?}");
    }
    let spm = Tokenizer::new(&sentencepiece()).unwrap();
    for (text, want) in [
        ("abc", &["▁a", "bc"][..]),
        ("  a", &["▁▁", "▁a"]),
        ("é", &["▁", "<0xC3>", "<0xA9>"]),
        ("</s>", &["▁", "<0x3C>", "<0x2F>", "<0x73>", "<0x3E>"]),
    ] {
        assert_eq!(texts(&spm, &spm.encode(text, RAW)), want, "{text:?}");
    }
}

#[test]
fn special_text_is_parsed_only_on_request() {
    let bpe = Tokenizer::new(&byte_level("gpt-2")).unwrap();
    let ids = bpe.encode("hello<|im_end|>", PARSED);
    assert_eq!(texts(&bpe, &ids), ["<|bos|>", "hello", "<|im_end|>"]);
    // The file calls it plain text; it ends generations all the same.
    assert!(bpe.is_eog(265) && bpe.is_control(265));
    assert!(bpe.attr(265).unwrap().has(TokenAttr::NORMAL));
    assert_eq!(bpe.detokenize(&ids, true, false).unwrap(), b"hello");
    assert_eq!(bpe.detokenize(&ids, false, true).unwrap(), b"<|bos|>hello<|im_end|>");
}

#[test]
fn the_space_in_front_is_removed_from_whole_texts_only() {
    let spm = Arc::new(Tokenizer::new(&sentencepiece()).unwrap());
    let ids = spm.encode("ab", RAW);
    assert_eq!(spm.detokenize(&ids, false, false).unwrap(), b"ab");
    let stream = |mut d: Detokenizer<Arc<Tokenizer>>| {
        let mut text = String::new();
        ids.iter().for_each(|&id| text += d.push(id).unwrap());
        text + &d.finish()
    };
    assert_eq!(stream(Detokenizer::new(Arc::clone(&spm), false)), " ab");
    assert_eq!(stream(Detokenizer::at_text_start(Arc::clone(&spm), false)), "ab");
}

#[test]
fn a_vocabulary_that_contradicts_itself_is_refused_by_name() {
    type Spoil = fn(&mut Vocab);
    let cases: [(Spoil, &str); 12] = [
        (|v| v.tokens = Texts::new(), "the vocabulary is empty"),
        (|v| v.model = "plamo2".to_owned(), "unknown tokenizer model 'plamo2'"),
        (|v| v.pre = Some("new".to_owned()), "unknown pre-tokenizer 'new'"),
        (|v| v.pre = Some("new".to_owned()), "qwen2"),
        (|v| v.scores = Some(vec![0.0]), "scores has 1 entries"),
        (|v| v.token_types = Some(vec![1; 3]), "token_type has 3 entries"),
        (|v| v.scores = Some(vec![f32::NAN; 266]), "score of token 0"),
        (|v| v.special.eos = Some(266), "the eos token has id 266"),
        (|v| v.merges = None, "needs tokenizer.ggml.merges"),
        (|v| v.tokens.push(b"a"), "token_type has 266 entries"),
        (
            |v| {
                v.tokens.push(b"a");
                v.token_types = None;
            },
            "tokens 97 and 266 have the same text",
        ),
        (
            |v| {
                v.special.sep = None;
                v.add_sep = Some(true);
            },
            "no sep token",
        ),
    ];
    for (spoil, want) in cases {
        let mut vocab = byte_level("gpt-2");
        spoil(&mut vocab);
        let error = Tokenizer::new(&vocab).unwrap_err().to_string();
        assert!(error.contains(want), "{error} should say {want}");
    }
}

#[test]
fn merges_outside_the_vocabulary_are_counted_and_ids_outside_are_errors() {
    let mut vocab = byte_level("gpt-2");
    let merges = vocab.merges.as_mut().unwrap();
    for merge in ["x y", "unknown h", "", " ", "nospace"] {
        merges.push(merge.as_bytes());
    }
    let tokenizer = Tokenizer::new(&vocab).unwrap();
    assert_eq!(tokenizer.n_merges_skipped(), 5);
    assert_eq!(tokenizer.n_bytes_missing(), 0);
    assert!(matches!(
        tokenizer.detokenize(&[1, 999], false, true),
        Err(TokenizerError::TokenOutOfRange { id: 999, n_vocab: 266 })
    ));
    assert!(Detokenizer::new(&tokenizer, true).push(u32::MAX).is_err());
}

#[test]
fn long_texts_are_encoded_like_short_ones() {
    let bpe = Tokenizer::new(&byte_level("gpt-2")).unwrap();
    let mut vocab = sentencepiece();
    vocab.add_space_prefix = Some(false);
    let spm = Tokenizer::new(&vocab).unwrap();
    for (tokenizer, line) in [(bpe, "hello worlds\u{e9} hell\n"), (spm, "ab abc  bc\u{e9} a\n")] {
        let once = tokenizer.encode(line, RAW);
        assert_eq!(tokenizer.encode(&line.repeat(2000), RAW), once.repeat(2000));
    }
}

#[test]
fn a_tokenizer_is_shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<Tokenizer>();
}

/// Any vocabulary at all, with bytes that need not be text.
fn any_vocab() -> impl Strategy<Value = Vocab> {
    let text = prop::collection::vec(
        prop::sample::select(b"ab \n<>\xe2\x96\x81\xc3\xff0x".to_vec()),
        0..6,
    );
    let id = || prop::option::of(0u32..12);
    (
        prop::sample::select(vec!["gpt2", "llama", "gemma4", "bert", "t5"]),
        prop::collection::btree_set(text.clone(), 1..12),
        prop::collection::vec(text, 0..12),
        prop::collection::vec((-1i32..9, prop::num::f32::ANY), 12),
        (id(), id(), id(), id()),
        prop::collection::vec(any::<u8>(), 0..40),
        any::<[bool; 4]>(),
    )
        .prop_map(|(model, tokens, merges, facts, (bos, eos, unk, sep), blob, flags)| Vocab {
            model: model.to_owned(),
            pre: Some("llama3".to_owned()),
            token_types: flags[0].then(|| facts.iter().take(tokens.len()).map(|f| f.0).collect()),
            scores: flags[1].then(|| facts.iter().take(tokens.len()).map(|f| f.1).collect()),
            tokens: tokens.iter().collect(),
            merges: Some(merges.iter().collect()),
            special: SpecialIds { bos, eos, unk, sep, ..SpecialIds::default() },
            add_bos: Some(flags[2]),
            add_space_prefix: Some(flags[3]),
            add_sep: Some(false),
            add_eos: Some(false),
            name: "phi-3".to_owned(),
            precompiled_charsmap: flags[2].then_some(blob),
            ..Vocab::default()
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Lost text would change what the user asked.
    #[test]
    fn byte_level_text_survives(text in "\\PC{0,30}|[helo wr\n'é0-9]{0,40}", pre in 0usize..6) {
        let pre = ["gpt-2", "qwen2", "smollm", "deepseek-llm", "gpt-4o", "tekken"][pre];
        let mut vocab = byte_level(pre);
        vocab.add_bos = None;
        let tokenizer = Tokenizer::new(&vocab).unwrap();
        let ids = tokenizer.encode(&text, RAW);
        let mut bytes = Vec::new();
        for id in ids {
            bytes.extend_from_slice(tokenizer.token_to_piece(id, true).unwrap());
        }
        prop_assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }

    /// A hostile file must not bring the process down.
    #[test]
    fn no_vocabulary_panics(vocab in any_vocab(), text in "[ab \n<>▁Ã0x]{0,20}") {
        let Ok(tokenizer) = Tokenizer::new(&vocab) else { return Ok(()) };
        for options in [RAW, PARSED] {
            let ids = tokenizer.encode(&text, options);
            prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
            tokenizer.detokenize(&ids, true, true).unwrap();
            let mut detokenizer = Detokenizer::new(&tokenizer, true);
            for id in ids {
                detokenizer.push(id).unwrap();
            }
            detokenizer.finish();
        }
    }
}
