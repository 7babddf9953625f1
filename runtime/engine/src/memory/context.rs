//! How long the context is: what was asked for, or the longest that fits, and why.

use crate::Error;
use crate::memory::units::format_size;

/// The context chosen, and the reason in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextChoice {
    /// Tokens.
    pub n_ctx: u32,
    /// What decided it.
    pub reason: String,
}

/// What the choice depends on.
#[derive(Debug, Clone, Copy)]
pub struct ContextInputs {
    /// `-c`, if given. Honoured or refused, never changed.
    pub asked: Option<u32>,
    /// The context the model was trained on, as the file says; not to be trusted with an allocation.
    pub trained: u64,
    /// Bytes of one token in the KV cache.
    pub kv_bytes_per_token: u64,
    /// Bytes that are free for the KV cache, if known.
    pub budget: Option<u64>,
}

/// Fewest tokens that are of any use.
const N_CTX_MIN: u64 = 16;

/// The longest context chosen without being asked when nobody knows how much memory is free.
const N_CTX_BLIND: u64 = 4096;

/// Chooses the context.
pub fn choose(inputs: ContextInputs) -> Result<ContextChoice, Error> {
    let per_token = inputs.kv_bytes_per_token.max(1);
    let fits = inputs.budget.map(|budget| budget / per_token);
    if let Some(asked) = inputs.asked {
        let bytes = u64::from(asked).saturating_mul(per_token);
        if asked == 0 {
            return Err(Error::Option { name: "-c", why: "a context of 0 tokens".into() });
        }
        if let Some(budget) = inputs.budget.filter(|budget| bytes > *budget) {
            return Err(Error::ContextDoesNotFit {
                asked: u64::from(asked),
                bytes,
                per_token,
                budget,
                fits: budget / per_token,
            });
        }
        let reason = if u64::from(asked) > inputs.trained {
            format!("asked for; the model was trained on {} tokens", inputs.trained)
        } else {
            "asked for".to_owned()
        };
        return Ok(ContextChoice { n_ctx: asked, reason });
    }
    let trained = inputs.trained.max(1);
    let (limit, reason) = match fits {
        Some(fits) if fits < trained => (
            fits,
            format!(
                "the longest that fits: {} free for the KV cache at {per_token} bytes a token; trained on {trained}",
                format_size(inputs.budget.unwrap_or(0)),
            ),
        ),
        Some(_) => (trained, "the context the model was trained on".to_owned()),
        None if trained > N_CTX_BLIND => (
            N_CTX_BLIND,
            format!("free memory is unknown, so not the trained {trained}; -c overrides"),
        ),
        None => (trained, "the context the model was trained on".to_owned()),
    };
    if limit < N_CTX_MIN.min(trained) {
        return Err(Error::ContextDoesNotFit {
            asked: N_CTX_MIN,
            bytes: N_CTX_MIN.saturating_mul(per_token),
            per_token,
            budget: inputs.budget.unwrap_or(0),
            fits: limit,
        });
    }
    Ok(ContextChoice { n_ctx: u32::try_from(limit).unwrap_or(u32::MAX), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(asked: Option<u32>, trained: u64, budget: Option<u64>) -> Option<u32> {
        let inputs = ContextInputs { asked, trained, kv_bytes_per_token: 100, budget };
        choose(inputs).ok().map(|choice| choice.n_ctx)
    }

    /// An asked context is never changed, a file's claim never sizes an allocation, and what does not fit is refused.
    #[test]
    fn contexts_are_honoured_or_refused() {
        let table = [
            ((Some(4096), 8192, Some(1 << 20)), Some(4096)),
            ((Some(16_384), 8192, Some(1 << 30)), Some(16_384)),
            ((Some(20_000), 8192, Some(1 << 20)), None),
            ((Some(0), 8192, Some(1 << 20)), None),
            ((Some(20_000), 8192, None), Some(20_000)),
            ((None, 8192, Some(1 << 30)), Some(8192)),
            ((None, 2_147_483_647, Some(1 << 20)), Some(10_485)),
            ((None, u64::MAX, Some(u64::MAX)), Some(u32::MAX)),
            ((None, 8192, Some(100)), None),
            ((None, 8192, None), Some(4096)),
            ((None, 4, Some(1 << 20)), Some(4)),
        ];
        for ((asked, trained, budget), expected) in table {
            assert_eq!(check(asked, trained, budget), expected, "{asked:?} {trained} {budget:?}");
        }
    }
}
