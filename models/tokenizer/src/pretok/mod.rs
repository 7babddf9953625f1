//! Splitting of text into words before byte-pair encoding.
//!
//! A vocabulary was trained on words cut by regular expressions, and encodes
//! well only what is cut the same way. `tokenizer.ggml.pre` names the way.
//! Each way is a list of *stages*: a stage cuts every piece it is given into
//! matches and the gaps between them, and hands both to the next stage. The end
//! of a piece counts as the end of the text.
//!
//! The stages are written by hand instead of run by an engine: the patterns
//! need look-ahead, which the fast engines do not have, and one pass over
//! classes of characters is several times faster. Each scanner quotes the
//! pattern it implements.
//!
//! An unknown name is an error: text cut by a guess gives ids the model never
//! saw, and nothing would tell the user why the answers are bad. Only a file
//! without the key gets the way called `default`, as the format says of files
//! older than the key.

mod scan;
mod sets;

/// Length in bytes of a match at the start of a piece, never 0; `None` without one.
pub(crate) type Matcher = fn(&str) -> Option<usize>;

/// What a name of `tokenizer.ggml.pre` stands for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreSpec {
    names: &'static [&'static str],
    pub(crate) stages: &'static [Matcher],
    /// A word that is a token as a whole is not built from merges.
    pub(crate) ignore_merges: bool,
    /// Decoding removes the space before some punctuation.
    pub(crate) clean_spaces: bool,
    /// Whether BOS is added when the file does not say.
    pub(crate) add_bos: bool,
    /// Whether a separator token belongs to the format.
    pub(crate) add_sep: bool,
    /// Whether the BOS default of the tokenizer model (token 11) applies.
    pub(crate) has_default_bos: bool,
}

const BASE: PreSpec = PreSpec {
    names: &[],
    stages: &[],
    ignore_merges: false,
    clean_spaces: true,
    add_bos: false,
    add_sep: false,
    has_default_bos: true,
};
const EXACT: PreSpec = PreSpec { clean_spaces: false, ..BASE };

/// Every known name. Facts about each are those of the models' own tokenizers.
static SPECS: &[PreSpec] = &[
    PreSpec {
        names: &["default"],
        stages: &[scan::ascii_punct_run, scan::gpt2, scan::numbers, scan::three_digits],
        ..BASE
    },
    PreSpec {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        stages: &[scan::llama3],
        ignore_merges: true,
        add_bos: true,
        ..BASE
    },
    PreSpec { names: &["dbrx", "smaug-bpe"], stages: &[scan::llama3], ..BASE },
    PreSpec {
        names: &["glm4", "chatglm-bpe"],
        stages: &[scan::llama3],
        has_default_bos: false,
        ..BASE
    },
    PreSpec {
        names: &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "mpt",
            "olmo",
            "jais",
            "exaone4",
        ],
        stages: &[scan::gpt2],
        ..BASE
    },
    PreSpec {
        names: &["jina-v1-en", "jina-v2-code", "roberta-bpe"],
        stages: &[scan::gpt2],
        add_sep: true,
        ..BASE
    },
    PreSpec { names: &["trillion", "granite-docling"], stages: &[scan::gpt2], ..EXACT },
    PreSpec { names: &["smollm", "command-r"], stages: &[scan::number, scan::gpt2], ..EXACT },
    PreSpec {
        names: &["starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
        stages: &[scan::number, scan::gpt2],
        ..BASE
    },
    PreSpec {
        names: &["falcon"],
        stages: &[scan::ascii_punct_run_backtick, scan::gpt2, scan::three_digits],
        ..BASE
    },
    PreSpec {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        stages: &[scan::qwen2],
        ..EXACT
    },
    PreSpec { names: &["stablelm2", "megrez"], stages: &[scan::qwen2], ..BASE },
    PreSpec { names: &["qwen35"], stages: &[scan::qwen35], ..EXACT },
    PreSpec { names: &["ufakzeka"], stages: &[scan::ufakzeka], ..EXACT },
    PreSpec { names: &["laguna"], stages: &[scan::newline_runs, scan::qwen2], ..EXACT },
    PreSpec {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        stages: &[scan::bailingmoe],
        ..EXACT
    },
    PreSpec { names: &["seed-coder"], stages: &[scan::seed_coder], ..EXACT },
    PreSpec {
        names: &["minicpm5"],
        stages: &[scan::numbers_to_3, scan::minicpm5],
        ignore_merges: true,
        ..BASE
    },
    PreSpec {
        names: &["tekken"],
        stages: &[scan::tekken],
        ignore_merges: true,
        add_bos: true,
        ..EXACT
    },
    PreSpec {
        names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        stages: &[scan::gpt4o],
        ..EXACT
    },
    PreSpec {
        names: &["deepseek-llm"],
        stages: &[
            scan::newline,
            sets::deepseek_letters,
            sets::deepseek_punct,
            scan::trailing_space,
            sets::cjk_wide,
            scan::numbers,
        ],
        ..EXACT
    },
    PreSpec {
        names: &["deepseek-coder"],
        stages: &[
            scan::newline,
            scan::space_letters,
            scan::space_puncts,
            sets::cjk_wide,
            scan::number,
        ],
        ..EXACT
    },
    PreSpec {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        stages: &[scan::numbers_to_3, sets::cjk_kana, scan::deepseek3],
        ..EXACT
    },
    PreSpec { names: &["poro-chat"], stages: &[sets::bloom], ..EXACT },
    PreSpec { names: &["bloom", "gpt3-finnish"], stages: &[sets::bloom], ..BASE },
    PreSpec { names: &["viking"], stages: &[sets::bloom, scan::number], ..EXACT },
];

/// Newlines apart from all else: the only split of vocabularies that merge over spaces.
pub(crate) static LINES: PreSpec = PreSpec { stages: &[scan::newline_runs], ..BASE };

/// Finds a name.
pub(crate) fn find(name: &str) -> Option<&'static PreSpec> {
    SPECS.iter().find(|spec| spec.names.contains(&name))
}

/// Every known name, sorted, for messages.
pub(crate) fn known_names() -> String {
    let mut names: Vec<_> = SPECS.iter().flat_map(|s| s.names).copied().collect();
    names.sort_unstable();
    names.join(", ")
}

/// Cuts `text` into words; together they are `text`.
pub(crate) fn split<'t>(text: &'t str, stages: &[Matcher], word: &mut impl FnMut(&'t str)) {
    let Some((stage, later)) = stages.split_first() else {
        return word(text);
    };
    let mut rest = text;
    while !rest.is_empty() {
        let (piece, tail) = rest.split_at_checked(piece_len(*stage, rest)).unwrap_or((rest, ""));
        if later.is_empty() {
            word(piece);
        } else {
            split(piece, later, word);
        }
        rest = tail;
    }
}

/// Length of the match at the start of `text`, or of the gap before the next one.
#[inline]
fn piece_len(stage: Matcher, text: &str) -> usize {
    if let Some(n) = stage(text) {
        return n.max(1);
    }
    text.char_indices()
        .skip(1)
        .map(|(at, _)| at)
        .find(|&at| text.get(at..).is_some_and(|rest| stage(rest).is_some()))
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn check(pre: &str, text: &str, want: &[&str]) {
        let mut words = Vec::new();
        split(text, find(pre).unwrap().stages, &mut |w| words.push(w));
        assert_eq!(words, want, "{pre}: {text:?}");
    }

    #[test]
    fn text_is_cut_as_each_pattern_says() {
        check(
            "gpt-2",
            "I'm 23  years\n\n old!!",
            &["I", "'m", " 23", " ", " years", "\n\n", " old", "!!"],
        );
        check("gpt-2", "a   ", &["a", "   "]);
        check("smollm", "x 123", &["x", " ", "1", "2", "3"]);
        check(
            "llama3",
            "It'S 12345 (ok)\r\n\n  x",
            &["It", "'S", " ", "123", "45", " (", "ok", ")\r\n\n", " ", " x"],
        );
        check("qwen2", "a1234\n \n b", &["a", "1", "2", "3", "4", "\n \n", " b"]);
        check("qwen2", "x\u{301}y", &["x", "\u{301}y"]);
        check("qwen35", "x\u{301}y", &["x\u{301}y"]);
        check("ufakzeka", "it's", &["it", "'s"]);
        check(
            "gpt-4o",
            "camelCase XMLHttp don't/\n",
            &["camel", "Case", " XMLHttp", " don't", "/\n"],
        );
        check("tekken", "don't 12", &["don", "'t", " ", "1", "2"]);
        check("falcon", "a--b1234", &["a", "--", "b", "123", "4"]);
        check("default", "a=12345", &["a", "=", "123", "45"]);
        check("deepseek-coder", "if x1:\n", &["if", " x", "1", ":", "\n"]);
        check("deepseek-v3", "x1234中文 .foo", &["x", "123", "4", "中文", " .", "foo"]);
        check("bloom", "Hi, you.", &["Hi", ",", " you", "."]);
    }

    #[test]
    fn no_name_stands_for_two_ways() {
        let mut names: Vec<_> = SPECS.iter().flat_map(|s| s.names).collect();
        let n = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), n);
    }

    proptest! {
        /// Lost or repeated text would silently change the prompt.
        #[test]
        fn words_together_are_the_text(text in "([a-zA-Z0-9'’ \n\r\t.,!中あ한é\u{301}\u{a0}\u{3000}🙂<|]|\\PC){0,40}") {
            for spec in SPECS {
                let mut joined = String::new();
                let mut all_full = true;
                split(&text, spec.stages, &mut |w| { all_full &= !w.is_empty(); joined.push_str(w); });
                prop_assert!(all_full);
                prop_assert_eq!(&joined, &text, "{:?}", spec.names);
            }
        }
    }
}
