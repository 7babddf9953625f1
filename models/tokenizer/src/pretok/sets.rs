//! Scanners over listed characters instead of general categories.
//!
//! The lists are facts of the vocabularies: DeepSeek's tokenizers name cased
//! letters and ideographs by range, BLOOM's names its sentence punctuation.

use std::sync::LazyLock;

use super::scan::{run, space_then};
use crate::classes::{SPACE, class_ranges};

/// Cased letters as DeepSeek's first tokenizer lists them.
static CASED: LazyLock<Vec<(char, char)>> = LazyLock::new(|| {
    class_ranges(
        "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ\
         ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ\
         Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]",
    )
});

fn in_ranges(ranges: &[(char, char)], c: char) -> bool {
    let after = ranges.partition_point(|&(first, _)| first <= c);
    after.checked_sub(1).and_then(|i| ranges.get(i)).is_some_and(|&(_, last)| c <= last)
}

/// `\s?{cased letters}+`
pub(super) fn deepseek_letters(text: &str) -> Option<usize> {
    space_then(
        text,
        |c, _| {
            if c.is_ascii() { c.is_ascii_alphabetic() } else { in_ranges(&CASED, c) }
        },
    )
}

/// `\s?[!-/:-~！-／：-～‘-‟　-。]+`
pub(super) fn deepseek_punct(text: &str) -> Option<usize> {
    space_then(
        text,
        |c, _| matches!(c, '!'..='/' | ':'..='~' | '！'..='／' | '：'..='～' | '‘'..='‟' | '\u{3000}'..='。'),
    )
}

/// `[一-龥ࠀ-一가-퟿]+`
pub(super) fn cjk_wide(text: &str) -> Option<usize> {
    let end =
        run(text, 0, |c, _| matches!(c, '一'..='龥' | '\u{800}'..='\u{4dff}' | '가'..='\u{d7ff}'));
    (end > 0).then_some(end)
}

/// `[一-龥぀-ゟ゠-ヿ]+`
pub(super) fn cjk_kana(text: &str) -> Option<usize> {
    let end = run(text, 0, |c, _| matches!(c, '一'..='龥' | '\u{3040}'..='ゟ' | '゠'..='ヿ'));
    (end > 0).then_some(end)
}

/// ` ?[^(\s|.,!?…。，、।۔،)]+`
pub(super) fn bloom(text: &str) -> Option<usize> {
    let outside = |c: char| {
        matches!(
            c,
            '(' | '|' | '.' | ',' | '!' | '?' | '…' | '。' | '，' | '、' | '।' | '۔' | '،' | ')'
        )
    };
    let start = usize::from(text.starts_with(' '));
    let end = run(text, start, |c, k| k & SPACE == 0 && !outside(c));
    (end > start).then_some(end)
}
