//! Sliding windows: which layers see only the latest positions.

use tegula_gguf::Value;

use crate::ArchError;
use crate::hparams::{Hparams, Keys};

/// Positions a query of each layer sees, 0 for all. `attention.sliding_window_pattern` is a period whose last layer sees
/// everything, or says for each layer whether it has the window; where it is absent, the period is `period_default`.
/// `window_default` holds for files without a length.
pub(crate) fn read(
    keys: &Keys<'_>,
    hparams: &Hparams,
    period_default: u32,
    window_default: u32,
) -> Result<Vec<u32>, ArchError> {
    let window = keys.opt_u32("attention.sliding_window", 0..=u32::MAX)?.unwrap_or(window_default);
    let n_layer = hparams.layers.len();
    let key = "attention.sliding_window_pattern";
    let windowed = if let Some(Value::Array(_)) = keys.metadata.get(&keys.full(key)) {
        let pattern = keys.metadata.optional_per_layer::<bool>(&keys.full(key), n_layer)?;
        pattern.unwrap_or_default()
    } else {
        // A period of 0 is no layer without a window.
        let period = keys.opt_u32(key, 0..=u32::MAX)?.unwrap_or(period_default);
        (1..=n_layer).map(|nth| !nth.is_multiple_of(period as usize)).collect()
    };
    Ok(windowed.into_iter().map(|windowed| if windowed { window } else { 0 }).collect())
}

/// The smallest window of all layers.
pub(crate) fn smallest(windows: &[u32]) -> Option<u32> {
    windows.iter().copied().filter(|window| *window > 0).min()
}
