//! Element by element: unary functions, gated units, sums, products, scaling and the soft cap.
//!
//! All of them are one loop over vectors; the last, incomplete vector goes through a padded copy, so that an element's
//! result does not depend on its place.

use super::math;
use super::{Kernel, Simd};
use crate::kernels::{KernelError, Kernels, expect_len};

/// A function of one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unary {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x Phi(x)`, the tanh form.
    GeluTanh,
    /// `x Phi(x)`, the error function form.
    GeluErf,
    /// `x / (1 + e^-1.702x)`.
    GeluQuick,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
    /// Hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `e^x`.
    Exp,
    /// `-x`.
    Neg,
}

/// The function applied to the gate of a gated unit, `f(gate) * up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Glu {
    /// SwiGLU.
    Silu,
    /// GeGLU with the tanh form.
    GeluTanh,
    /// GeGLU with the error function form.
    GeluErf,
    /// GeGLU with the sigmoid form.
    GeluQuick,
    /// ReGLU.
    Relu,
    /// The gated linear unit of the original paper.
    Sigmoid,
}

impl Glu {
    fn unary(self) -> Unary {
        match self {
            Glu::Silu => Unary::Silu,
            Glu::GeluTanh => Unary::GeluTanh,
            Glu::GeluErf => Unary::GeluErf,
            Glu::GeluQuick => Unary::GeluQuick,
            Glu::Relu => Unary::Relu,
            Glu::Sigmoid => Unary::Sigmoid,
        }
    }
}

/// What happens to each element.
#[derive(Clone, Copy)]
enum Map {
    Unary(Unary),
    Glu(Unary),
    Add,
    Mul,
    Scale(f32),
    Softcap(f32),
    GluClamped { alpha: f32, limit: f32 },
}

#[inline(always)]
fn unary<S: Simd>(s: S, f: Unary, x: S::F) -> S::F {
    let zero = s.splat(0.0);
    match f {
        Unary::Silu => math::silu(s, x),
        Unary::GeluTanh => math::gelu_tanh(s, x),
        Unary::GeluErf => math::gelu_erf(s, x),
        Unary::GeluQuick => math::gelu_quick(s, x),
        Unary::Relu => s.max(zero, x),
        Unary::ReluSquared => {
            let positive = s.max(zero, x);
            s.mul(positive, positive)
        }
        Unary::Tanh => math::tanh(s, x),
        Unary::Sigmoid => math::sigmoid(s, x),
        Unary::Exp => math::exp(s, x),
        Unary::Neg => s.mul(x, s.splat(-1.0)),
    }
}

#[inline(always)]
fn apply<S: Simd>(s: S, map: Map, a: S::F, b: S::F) -> S::F {
    match map {
        Map::Unary(f) => unary(s, f, a),
        Map::Glu(f) => s.mul(unary(s, f, a), b),
        Map::Add => s.add(a, b),
        Map::Mul => s.mul(a, b),
        Map::Scale(factor) => s.mul(a, s.splat(factor)),
        Map::Softcap(cap) => math::softcap(s, a, cap),
        Map::GluClamped { alpha, limit } => {
            let (high, low) = (s.splat(limit), s.splat(-limit));
            // The bound is the second operand where the definition says so: a value that is no number becomes the bound.
            let (gate, up) = (s.min(a, high), s.min(s.max(b, low), high));
            let e = math::exp(s, s.mul(gate, s.splat(-alpha)));
            let one = s.splat(1.0);
            s.mul(s.div(gate, s.add(one, e)), s.add(up, one))
        }
    }
}

/// `out[i] = map(a[i], b[i])`. The three pointers may be equal.
struct MapKernel {
    map: Map,
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    n: usize,
}

/// Longest vector.
const LANES_MAX: usize = 16;

impl Kernel for MapKernel {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let MapKernel { map, a, b, out, n } = self;
        // SAFETY: the methods of `Kernels` have checked that all three have `n` elements; loads precede the store of
        // the same place, so equal pointers are fine.
        unsafe {
            let whole = n / S::LANES * S::LANES;
            for i in (0..whole).step_by(S::LANES) {
                s.store(out.add(i), apply(s, map, s.load(a.add(i)), s.load(b.add(i))));
            }
            if whole < n {
                let (mut va, mut vb) = ([0.0; LANES_MAX], [0.0; LANES_MAX]);
                std::ptr::copy_nonoverlapping(a.add(whole), va.as_mut_ptr(), n - whole);
                std::ptr::copy_nonoverlapping(b.add(whole), vb.as_mut_ptr(), n - whole);
                let result = apply(s, map, s.load(va.as_ptr()), s.load(vb.as_ptr()));
                s.store(va.as_mut_ptr(), result);
                std::ptr::copy_nonoverlapping(va.as_ptr(), out.add(whole), n - whole);
            }
        }
    }
}

impl Kernels {
    fn map1(
        self,
        name: &'static str,
        map: Map,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        expect_len(name, "out", &[x.len()], out.len())?;
        self.dispatch(MapKernel {
            map,
            a: x.as_ptr(),
            b: x.as_ptr(),
            out: out.as_mut_ptr(),
            n: x.len(),
        });
        Ok(())
    }

    fn map2(
        self,
        name: &'static str,
        map: Map,
        a: &[f32],
        b: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        expect_len(name, "b", &[a.len()], b.len())?;
        expect_len(name, "out", &[a.len()], out.len())?;
        self.dispatch(MapKernel {
            map,
            a: a.as_ptr(),
            b: b.as_ptr(),
            out: out.as_mut_ptr(),
            n: a.len(),
        });
        Ok(())
    }

    /// `out = f(x)`.
    ///
    /// # Errors
    /// [`KernelError::Length`] when the lengths differ.
    pub fn unary(self, f: Unary, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.map1("unary", Map::Unary(f), x, out)
    }

    /// `out = f(gate) * up`.
    ///
    /// # Errors
    /// [`KernelError::Length`] when the lengths differ.
    pub fn glu(self, f: Glu, gate: &[f32], up: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.map2("glu", Map::Glu(f.unary()), gate, up, out)
    }

    /// `out = a / (1 + e^(-alpha a)) * (b + 1)` with `a = min(gate, limit)` and `b = clamp(up, -limit, limit)`.
    ///
    /// # Errors
    /// [`KernelError::Length`] when the lengths differ.
    pub fn glu_clamped(
        self,
        alpha: f32,
        limit: f32,
        gate: &[f32],
        up: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.map2("glu_clamped", Map::GluClamped { alpha, limit }, gate, up, out)
    }

    /// `out = a + b`.
    ///
    /// # Errors
    /// [`KernelError::Length`] when the lengths differ.
    pub fn add(self, a: &[f32], b: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.map2("add", Map::Add, a, b, out)
    }

    /// `out = a * b`.
    ///
    /// # Errors
    /// [`KernelError::Length`] when the lengths differ.
    pub fn mul(self, a: &[f32], b: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.map2("mul", Map::Mul, a, b, out)
    }

    /// `out = x * factor`.
    ///
    /// # Errors
    /// [`KernelError::Length`] when the lengths differ.
    pub fn scale(self, factor: f32, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.map1("scale", Map::Scale(factor), x, out)
    }

    /// `out = cap * tanh(x / cap)`.
    ///
    /// # Errors
    /// [`KernelError::Length`] when the lengths differ.
    pub fn softcap(self, cap: f32, x: &[f32], out: &mut [f32]) -> Result<(), KernelError> {
        self.map1("softcap", Map::Softcap(cap), x, out)
    }
}
