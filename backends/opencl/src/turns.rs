//! Rope's frequencies as fractions of a turn in 64 bits; see `kernels/rope.cl`.

use tegula_sdk::program::OpKind;

/// For each pair, the part of a full turn that it makes in one position, times 2^64; the formula is `tegula_abi::RopeParams`'s.
pub(crate) fn turns(kind: &OpKind, factors: Option<&[f32]>) -> Vec<u64> {
    let OpKind::Rope {
        n_rot, n_ctx_orig, base, freq_scale, ext_factor, beta_fast, beta_slow, ..
    } = *kind
    else {
        return Vec::new();
    };
    let (n, base) = (f64::from(n_rot), f64::from(base));
    let pair = |beta: f32| {
        let turns = f64::from(n_ctx_orig) / (std::f64::consts::TAU * f64::from(beta));
        n * turns.ln() / (2.0 * base.ln())
    };
    let low = pair(beta_fast).floor().max(0.0);
    let high = pair(beta_slow).ceil().min(n - 1.0);
    let frequency = |i: u32| {
        let divisor = factors.and_then(|f| f.get(i as usize)).map_or(1.0, |f| f64::from(*f));
        let full = base.powf(-2.0 * f64::from(i) / n) / divisor;
        let scaled = full * f64::from(freq_scale);
        if ext_factor == 0.0 {
            return scaled;
        }
        let ramp = ((f64::from(i) - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        let mix = f64::from(ext_factor) * (1.0 - ramp);
        scaled * (1.0 - mix) + full * mix
    };
    (0..n_rot / 2).map(|i| fraction(frequency(i) / std::f64::consts::TAU)).collect()
}

/// The part after the point, times 2^64; 0 for what is no number.
fn fraction(turns: f64) -> u64 {
    let part = turns - turns.floor();
    // Exact: a product with a power of two. A part that rounds up to 1 is a full turn.
    (part * 18_446_744_073_709_551_616.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A product of position and fraction must stay exact where contexts end, or long contexts turn to garbage.
    #[test]
    fn angles_are_exact_at_great_positions() {
        for (turns, position) in
            [(0.159_154_943_091_895_35, 100_000u64), (1.25, 3), (1e-9, 1 << 30)]
        {
            let wrapped = fraction(turns).wrapping_mul(position) as i64 as f64 / 2f64.powi(64);
            let wanted = turns * position as f64;
            let off = wrapped - wanted;
            assert!((off - off.round()).abs() < 1e-9, "{turns} {position}: {off}");
        }
    }
}
