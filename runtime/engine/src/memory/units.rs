//! Sizes as people write and read them.

/// Why a size could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no size: write bytes or a number with KiB, MiB, GiB or TiB, such as 512MiB")]
pub struct SizeError {
    /// What was given.
    pub text: String,
}

const UNITS: [(&str, u64); 10] = [
    ("tib", 1 << 40),
    ("gib", 1 << 30),
    ("mib", 1 << 20),
    ("kib", 1 << 10),
    ("t", 1 << 40),
    ("g", 1 << 30),
    ("m", 1 << 20),
    ("k", 1 << 10),
    ("b", 1),
    ("", 1),
];

/// Reads `4294959104`, `1MiB`, `1.5 GiB` or `512m` (binary multiples, any case). Zero is no size.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let fault = || SizeError { text: text.to_owned() };
    let lower = text.trim().to_ascii_lowercase();
    let (number, factor) = UNITS
        .iter()
        .find_map(|(unit, factor)| lower.strip_suffix(unit).map(|number| (number.trim(), *factor)))
        .ok_or_else(fault)?;
    let bytes = if let Ok(whole) = number.parse::<u64>() {
        whole.checked_mul(factor).ok_or_else(fault)?
    } else {
        let ok = number.chars().all(|c| c.is_ascii_digit() || c == '.');
        let fraction = number.parse::<f64>().ok().filter(|n| ok && n.is_finite());
        let bytes = fraction.ok_or_else(fault)? * factor as f64;
        if bytes >= u64::MAX as f64 {
            return Err(fault());
        }
        bytes as u64
    };
    if bytes == 0 { Err(fault()) } else { Ok(bytes) }
}

/// `1.50 GiB`, `96.0 KiB`, `512 B`.
pub fn format_size(bytes: u64) -> String {
    for (unit, factor) in
        [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
    {
        if bytes >= factor {
            return format!("{:.2} {unit}", bytes as f64 / factor as f64);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator's cap must mean what it says, and a typo must not mean "no cap".
    #[test]
    fn sizes_are_read_exactly_or_refused() {
        let table = [
            ("1MiB", Some(1 << 20)),
            ("4294959104", Some(4_294_959_104)),
            ("64 kib", Some(65_536)),
            ("1.5GiB", Some(1_610_612_736)),
            ("512m", Some(512 << 20)),
            ("10B", Some(10)),
            ("0", None),
            ("", None),
            ("-1", None),
            ("1MB", None),
            ("MiB", None),
            ("1e9", None),
            ("inf", None),
            ("nan", None),
            ("18446744073709551615KiB", None),
            ("99999999999999999999.5TiB", None),
        ];
        for (text, expected) in table {
            assert_eq!(parse_size(text).ok(), expected, "{text}");
        }
    }
}
