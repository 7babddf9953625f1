//! What kind each token is, and which ones end a generation.
//!
//! Files are unreliable here: converters mark end-of-turn tokens as plain text
//! or name no end-of-turn id. The rules below repair that by the tokens' texts
//! and give the same kinds and the same set of end tokens as llama.cpp, which
//! is what published files are tested with. A token that looks like an end of
//! turn becomes a control token whatever its stated type.

use std::collections::BTreeSet;

use crate::texts::TextMap;
use crate::{SpecialIds, Texts, TokenId};

/// Kinds of a token, as a set of bits. The values are llama.cpp's, so that both can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenAttr(u16);

impl TokenAttr {
    /// No kind known: the token decodes to nothing.
    pub const UNDEFINED: Self = Self(0);
    /// Stands for text that cannot be encoded.
    pub const UNKNOWN: Self = Self(1);
    /// Reserved, decodes to nothing unless another kind is set.
    pub const UNUSED: Self = Self(2);
    /// Text.
    pub const NORMAL: Self = Self(4);
    /// Structure such as BOS; typed text never becomes one unless special text is parsed.
    pub const CONTROL: Self = Self(8);
    /// Text that is always one token.
    pub const USER_DEFINED: Self = Self(16);
    /// One byte, written `<0xXX>`.
    pub const BYTE: Self = Self(32);
    /// White space before it in a text belongs to it.
    pub const LSTRIP: Self = Self(128);
    /// White space after it in a text belongs to it.
    pub const RSTRIP: Self = Self(256);

    /// Whether any of `kinds` is set.
    pub fn has(self, kinds: Self) -> bool {
        self.0 & kinds.0 != 0
    }

    /// The bits.
    pub fn bits(self) -> u16 {
        self.0
    }

    /// Both sets together.
    pub const fn with(self, more: Self) -> Self {
        Self(self.0 | more.0)
    }

    fn without(self, fewer: Self) -> Self {
        Self(self.0 & !fewer.0)
    }

    fn from_type(token_type: i32) -> Self {
        match token_type {
            1 => Self::NORMAL,
            2 => Self::UNKNOWN,
            3 => Self::CONTROL,
            4 => Self::USER_DEFINED,
            5 => Self::UNUSED,
            6 => Self::BYTE,
            _ => Self::UNDEFINED,
        }
    }
}

/// Texts of tokens that end a turn, in case the file names none.
const EOT: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];
const EOM: &[&str] = &["<|eom_id|>"];
const FIM_PRE: &[&str] = &[
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
];
const FIM_SUF: &[&str] = &[
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
];
const FIM_MID: &[&str] = &[
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
];
const FIM_PAD: &[&str] = &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"];
const FIM_REP: &[&str] = &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"];
const FIM_SEP: &[&str] = &["<|file_sep|>"];
/// Texts of tokens that end a generation wherever they occur.
const EOG: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];
/// Parts of a reply's structure that users expect to see.
const ALWAYS_SHOWN: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// The outcome: attributes of every token, completed ids, and the end tokens.
#[derive(Debug)]
pub(crate) struct Specials {
    pub(crate) attrs: Vec<TokenAttr>,
    pub(crate) ids: SpecialIds,
    pub(crate) eog: BTreeSet<TokenId>,
}

/// Looks tokens up by text while kinds are being decided.
struct Kinds<'v> {
    texts: &'v Texts,
    map: &'v TextMap,
    attrs: Vec<TokenAttr>,
}

impl Kinds<'_> {
    fn find(&self, text: &str) -> Option<TokenId> {
        self.map.get(self.texts, text.as_bytes())
    }

    /// Ids of those texts that are tokens, lowest first.
    fn find_all(&self, texts: &[&str]) -> Vec<TokenId> {
        let mut ids: Vec<_> = texts.iter().filter_map(|t| self.find(t)).collect();
        ids.sort_unstable();
        ids
    }

    fn update(&mut self, id: TokenId, change: impl Fn(TokenAttr) -> TokenAttr) {
        if let Some(attr) = self.attrs.get_mut(id as usize) {
            *attr = change(*attr);
        }
    }

    fn make_control(&mut self, id: TokenId) {
        self.update(id, |attr| attr.with(TokenAttr::CONTROL));
    }
}

/// Decides the kinds. `token_types`, where given, has one entry a token; all `ids` are in range.
pub(crate) fn decide(
    texts: &Texts,
    map: &TextMap,
    token_types: Option<&[i32]>,
    mut ids: SpecialIds,
) -> Specials {
    let attrs = match token_types {
        Some(types) => types.iter().map(|&t| TokenAttr::from_type(t)).collect(),
        None => vec![TokenAttr::NORMAL; texts.len()],
    };
    let mut kinds = Kinds { texts, map, attrs };
    for (id, names) in [
        (&mut ids.eot, EOT),
        (&mut ids.eom, EOM),
        (&mut ids.fim_pre, FIM_PRE),
        (&mut ids.fim_suf, FIM_SUF),
        (&mut ids.fim_mid, FIM_MID),
        (&mut ids.fim_pad, FIM_PAD),
        (&mut ids.fim_rep, FIM_REP),
        (&mut ids.fim_sep, FIM_SEP),
    ] {
        if id.is_none()
            && let Some(&found) = kinds.find_all(names).first()
        {
            *id = Some(found);
            kinds.make_control(found);
        }
    }
    mark_unused(&mut kinds);
    let mut eog: BTreeSet<TokenId> =
        [ids.fim_pad, ids.fim_rep, ids.fim_sep].into_iter().flatten().collect();
    for id in kinds.find_all(EOG) {
        eog.insert(id);
        kinds.make_control(id);
    }
    for id in kinds.find_all(ALWAYS_SHOWN) {
        kinds.update(id, |_| TokenAttr::USER_DEFINED);
    }
    eog.extend([ids.eos, ids.eot, ids.eom].into_iter().flatten());
    drop_false_ends(&mut kinds, &mut eog);
    Specials { attrs: kinds.attrs, ids, eog }
}

/// Control tokens that call themselves unused are not generated.
fn mark_unused(kinds: &mut Kinds<'_>) {
    const NEEDLE: &[u8] = b"unused";
    for (attr, text) in kinds.attrs.iter_mut().zip(kinds.texts.iter()) {
        if attr.has(TokenAttr::CONTROL) && text.windows(NEEDLE.len()).any(|w| w == NEEDLE) {
            *attr = attr.with(TokenAttr::UNUSED);
        }
    }
}

/// Two formats use an end token's text for something else.
fn drop_false_ends(kinds: &mut Kinds<'_>, eog: &mut BTreeSet<TokenId>) {
    let ends = |eog: &BTreeSet<TokenId>, text: &str| kinds.find(text).filter(|id| eog.contains(id));
    let has_call = ends(eog, "<|call|>").or(ends(eog, "<|calls|>")).is_some();
    let has_other = ends(eog, "<|return|>").or(ends(eog, "<|flush|>")).is_some();
    // Harmony: `<|end|>` ends a message, `<|return|>` and `<|call|>` end the generation.
    let message_end = ends(eog, "<|end|>").filter(|_| has_call && has_other);
    // Gemma 4 has `</s>` as text (HTML).
    let html = ends(eog, "</s>").filter(|_| ends(eog, "<|tool_response>").is_some());
    if let Some(id) = message_end {
        eog.remove(&id);
        kinds.update(id, |_| TokenAttr::USER_DEFINED);
    }
    if let Some(id) = html {
        eog.remove(&id);
        kinds.update(id, |_| TokenAttr::NORMAL);
    }
}

/// Marks tokens that swallow white space beside them. GGUF has no key for it, so it goes by model.
pub(crate) fn mark_strips(
    specials: &mut Specials,
    texts: &Texts,
    map: &TextMap,
    pre: &str,
    arch: &str,
    name: &str,
) {
    let attrs = std::mem::take(&mut specials.attrs);
    let mut kinds = Kinds { texts, map, attrs };
    let name = name.to_lowercase();
    let lstrip = |kinds: &mut Kinds<'_>, text: &str| {
        if let Some(id) = kinds.find(text) {
            kinds.update(id, |attr| attr.with(TokenAttr::LSTRIP));
        }
    };
    let jina = ["jina-v2-de", "jina-v2-es", "jina-v2-code"].iter().any(|p| pre.contains(p));
    if jina || arch.contains("nomic-bert-moe") || arch.contains("jina-bert-v3") {
        lstrip(&mut kinds, "<mask>");
    } else if name.contains("phi-3") || name.contains("phi3") {
        for attr in &mut kinds.attrs {
            if attr.has(PARSED) {
                *attr = attr.with(TokenAttr::RSTRIP);
            }
        }
        for id in kinds.find_all(&["<unk>", "<s>", "<|endoftext|>"]) {
            kinds.update(id, |attr| attr.without(TokenAttr::RSTRIP));
        }
    } else if name.contains("modern-bert") {
        lstrip(&mut kinds, "[MASK]");
    }
    specials.attrs = kinds.attrs;
}

/// Kinds whose text is looked for in prompts.
pub(crate) const PARSED: TokenAttr =
    TokenAttr::CONTROL.with(TokenAttr::USER_DEFINED).with(TokenAttr::UNKNOWN);
/// Of these, the kinds that are looked for only if special text is parsed.
pub(crate) const PARSED_ON_REQUEST: TokenAttr = TokenAttr::CONTROL.with(TokenAttr::UNKNOWN);
