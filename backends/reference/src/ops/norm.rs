//! Norms over groups of `n` elements, in place.

/// `x / sqrt(mean(x^2) + eps) * weight`.
pub(crate) fn rms_norm(x: &mut [f32], weight: Option<&[f32]>, eps: f32, n: usize) {
    for group in x.chunks_exact_mut(n) {
        let mean_square = group.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n as f64;
        let scale = 1.0 / (mean_square + f64::from(eps)).sqrt();
        for (i, x) in group.iter_mut().enumerate() {
            let weight = weight.map_or(1.0, |weight| f64::from(weight[i]));
            *x = (f64::from(*x) * scale * weight) as f32;
        }
    }
}

/// `x / sqrt(sum(x^2) + eps)`.
pub(crate) fn l2_norm(x: &mut [f32], eps: f32, n: usize) {
    for group in x.chunks_exact_mut(n) {
        let sum = group.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let root = (sum + f64::from(eps)).sqrt();
        group.iter_mut().for_each(|x| *x = (f64::from(*x) / root) as f32);
    }
}

/// `(x - mean) / sqrt(variance + eps) * weight + bias`.
pub(crate) fn layer_norm(x: &mut [f32], weight: &[f32], bias: Option<&[f32]>, eps: f32, n: usize) {
    for group in x.chunks_exact_mut(n) {
        let mean = group.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
        let square = |x: &f32| (f64::from(*x) - mean).powi(2);
        let variance = group.iter().map(square).sum::<f64>() / n as f64;
        let scale = 1.0 / (variance + f64::from(eps)).sqrt();
        for (i, x) in group.iter_mut().enumerate() {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[i]));
            *x = ((f64::from(*x) - mean) * scale * f64::from(weight[i]) + bias) as f32;
        }
    }
}
