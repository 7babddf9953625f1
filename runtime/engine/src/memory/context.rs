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

/// How many tokens of KV cache fit, and the pool that decides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fit {
    /// Tokens.
    pub tokens: u64,
    /// Bytes that are left in the deciding pool.
    pub budget: u64,
    /// Bytes of one token in it.
    pub per_token: u64,
}

/// What the choice depends on.
#[derive(Debug, Clone, Copy)]
pub struct ContextInputs {
    /// `-c`, if given. Honoured or refused, never changed.
    pub asked: Option<u32>,
    /// The context the model was trained on, as the file says; not to be trusted with an allocation.
    pub trained: u64,
    /// What fits in the memory that is left, if that is known.
    pub fits: Option<Fit>,
}

/// Fewest tokens that are of any use.
const N_CTX_MIN: u64 = 16;

/// The longest context chosen without being asked when nobody knows how much memory is free.
const N_CTX_BLIND: u64 = 4096;

/// Chooses the context.
pub fn choose(inputs: ContextInputs) -> Result<ContextChoice, Error> {
    if let Some(asked) = inputs.asked {
        return honour(asked, inputs);
    }
    let trained = inputs.trained.max(1);
    let (limit, reason) = match inputs.fits {
        Some(fit) if fit.tokens < trained => (
            fit.tokens,
            format!(
                "the longest that fits: {} free for it at {} bytes a token; trained on {trained}",
                format_size(fit.budget),
                fit.per_token,
            ),
        ),
        None if trained > N_CTX_BLIND => (
            N_CTX_BLIND,
            format!("free memory is unknown, so not the trained {trained}; -c overrides"),
        ),
        _ => (trained, "the context the model was trained on".to_owned()),
    };
    if limit < N_CTX_MIN.min(trained) {
        return Err(does_not_fit(N_CTX_MIN, inputs.fits));
    }
    Ok(ContextChoice { n_ctx: u32::try_from(limit).unwrap_or(u32::MAX), reason })
}

fn honour(asked: u32, inputs: ContextInputs) -> Result<ContextChoice, Error> {
    if asked == 0 {
        return Err(Error::Option { name: "-c", why: "a context of 0 tokens".into() });
    }
    if inputs.fits.is_some_and(|fit| fit.tokens < u64::from(asked)) {
        return Err(does_not_fit(u64::from(asked), inputs.fits));
    }
    let reason = if u64::from(asked) > inputs.trained {
        format!("asked for; the model was trained on {} tokens", inputs.trained)
    } else {
        "asked for".to_owned()
    };
    Ok(ContextChoice { n_ctx: asked, reason })
}

fn does_not_fit(asked: u64, fits: Option<Fit>) -> Error {
    let fit = fits.unwrap_or(Fit { tokens: 0, budget: 0, per_token: 1 });
    Error::ContextDoesNotFit {
        asked,
        bytes: asked.saturating_mul(fit.per_token),
        per_token: fit.per_token,
        budget: fit.budget,
        fits: fit.tokens,
        remedies: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(asked: Option<u32>, trained: u64, budget: Option<u64>) -> Option<u32> {
        let fit = |budget| Fit { tokens: budget / 100, budget, per_token: 100 };
        let fits = budget.map(fit);
        let inputs = ContextInputs { asked, trained, fits };
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
