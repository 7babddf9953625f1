//! The printable stand-ins for bytes in byte-level vocabularies.
//!
//! GPT-2 wrote each byte as a visible character: printable Latin-1 bytes as
//! themselves, the others as U+0100 and up in ascending order.

/// Whether a byte stands for itself.
const fn is_plain(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// The character of each byte.
pub(crate) const CHAR_OF: [char; 256] = {
    let mut table = ['\0'; 256];
    let mut next = 0x100u32;
    let mut byte = 0usize;
    while byte < 256 {
        let code = if is_plain(byte as u8) {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        table[byte] = match char::from_u32(code) {
            Some(c) => c,
            None => '\0',
        };
        byte += 1;
    }
    table
};

/// The byte of each stand-in below U+0144; 256 for characters that are none.
const BYTE_OF: [u16; 0x144] = {
    let mut table = [256u16; 0x144];
    let mut byte = 0usize;
    while byte < 256 {
        table[CHAR_OF[byte] as usize] = byte as u16;
        byte += 1;
    }
    table
};

/// The byte that `c` stands for.
pub(crate) fn byte_of(c: char) -> Option<u8> {
    BYTE_OF.get(c as usize).and_then(|&b| u8::try_from(b).ok())
}

/// The value of `<0xXX>`.
pub(crate) fn byte_token_value(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    match digits {
        [a, b] if a.is_ascii_hexdigit() && b.is_ascii_hexdigit() => {
            u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        for byte in 0..=255u8 {
            assert_eq!(byte_of(CHAR_OF[usize::from(byte)]), Some(byte));
        }
        assert_eq!(CHAR_OF[usize::from(b' ')], 'Ġ');
        assert_eq!(CHAR_OF[usize::from(b'\n')], 'Ċ');
        assert_eq!(CHAR_OF[0xad], 'Ń');
        assert_eq!(byte_of('中'), None);
        assert_eq!(byte_token_value(b"<0x0A>"), Some(10));
        assert_eq!(byte_token_value(b"<0x+A>"), None);
    }
}
