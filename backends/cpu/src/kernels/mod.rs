//! Kernels: the algorithms in [`generic`], bound to an instruction set that is chosen when [`Kernels`] is made.
//!
//! Decisions:
//! - **One algorithm, thin bindings.** `portable` and `x86_64` give vectors to the same code, so a new instruction set is one
//!   file, and each path is tested against the same oracles.
//! - **Chosen at construction.** [`Kernels::detect`] looks once; after that each task costs one predictable branch.
//! - **No allocation.** Whoever needs scratch says how much beforehand, in f32, and gets a slice.
//! - **16-bit activations for block types, f32 for plain ones.** 8-bit activations would lose more than the weights' own
//!   rounding leaves; f32 ones cost twice the multiplications and an unpacking to four bytes instead of two. Sums of 32
//!   products are exact; from there on sums are f32 in several lanes, so the error of a dot product of `n` terms is about
//!   `sqrt(n / lanes)` roundings of its largest partial sum.

#![allow(
    unsafe_code,
    reason = "vector loads and stores go through pointers; each use states what makes it sound"
)]

pub mod generic;
pub mod portable;
#[cfg(target_arch = "x86_64")]
pub mod x86_64;

pub use generic::attention::{Attention, AttnSeq};
pub use generic::conv::ConvState;
pub use generic::delta::{GatedDelta, HeadPairs};
pub use generic::elementwise::{Glu, Unary};
pub use generic::experts::{Choices, EXPERT_PRODUCTS_MAX, ExpertWeights};
pub use generic::kv::{KvSlot, KvStore};
pub use generic::matmul::{MatMul, RowTile};
pub use generic::rope::{RopeStyle, rope_table};
pub use generic::router::{Gating, Router, RouterGroups};
pub use generic::state::StateSeq;

use generic::{Kernel, PairsKernel, WordsKernel};

/// An instruction set that the kernels are bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// The base instruction set of the target.
    Portable,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 with AVX-VNNI.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512F.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512F with AVX512-VNNI and AVX512-VL.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

impl Isa {
    /// Those that this machine has, slowest first. Never empty.
    pub fn available() -> impl Iterator<Item = Isa> {
        #[cfg(target_arch = "x86_64")]
        let vector = [
            x86_64::avx2::detected().then_some(Isa::Avx2),
            x86_64::avx2::detected_vnni().then_some(Isa::AvxVnni),
            x86_64::avx512::detected().then_some(Isa::Avx512),
            x86_64::avx512::detected_vnni().then_some(Isa::Avx512Vnni),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let vector: [Option<Isa>; 0] = [];
        std::iter::once(Isa::Portable).chain(vector.into_iter().flatten())
    }

    /// For messages and logs.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2+fma+f16c",
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => "avxvnni+fma+f16c",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512f",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => "avx512vnni",
        }
    }
}

/// The kernels of one instruction set. Cheap to copy; usable from any thread.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// Private: a value other than `Portable` is the proof that the machine has it.
    isa: Isa,
}

impl Kernels {
    /// The best that this machine has.
    pub fn detect() -> Kernels {
        Kernels { isa: Isa::available().last().unwrap_or(Isa::Portable) }
    }

    /// A given instruction set, or `None` where the machine does not have it.
    pub fn with_isa(isa: Isa) -> Option<Kernels> {
        Isa::available().any(|have| have == isa).then_some(Kernels { isa })
    }

    /// What these kernels are bound to.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Runs one algorithm on this instruction set.
    #[inline]
    pub(crate) fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        match self.isa {
            Isa::Portable => portable::run(kernel),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `isa` is set by the constructors only, to what `Isa::available` has detected.
            Isa::Avx2 | Isa::AvxVnni => unsafe { x86_64::avx2::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512 | Isa::Avx512Vnni => unsafe { x86_64::avx512::run(kernel) },
        }
    }

    /// Runs an algorithm on pairs of 16-bit integers, on the longest vectors that have them.
    #[inline]
    pub(crate) fn dispatch_pairs<K: PairsKernel>(self, kernel: K) {
        match self.isa {
            Isa::Portable => portable::run_pairs(kernel),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `dispatch`; whatever has AVX-512F here has AVX2 too.
            Isa::Avx2 | Isa::Avx512 => unsafe { x86_64::avx2::run_pairs(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::AvxVnni => unsafe { x86_64::avx2::run_pairs_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512Vnni => unsafe { x86_64::avx512::run_pairs_vnni(kernel) },
        }
    }

    /// Runs an algorithm that unpacks small integers.
    #[inline]
    pub(crate) fn dispatch_words<K: WordsKernel>(self, kernel: K) {
        match self.isa {
            Isa::Portable => portable::run_words(kernel),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `dispatch`; whatever has AVX-512F here has AVX2 too.
            Isa::Avx2 | Isa::Avx512 => unsafe { x86_64::avx2::run_words(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::AvxVnni => unsafe { x86_64::avx2::run_words_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512Vnni => unsafe { x86_64::avx2::run_words_512(kernel) },
        }
    }

    /// Lanes of the vectors that [`Kernels::dispatch_pairs`] gives.
    pub(crate) fn pair_lanes(self) -> usize {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => 16,
            _ => 8,
        }
    }
}

/// Why a kernel refused its arguments, or did not complete.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A slice does not have the length that the shape asks for.
    #[error("{kernel}: {what} has {got} elements, the shape asks for {expected}")]
    Length {
        /// The kernel.
        kernel: &'static str,
        /// The argument.
        what: &'static str,
        /// Elements that the shape asks for; `usize::MAX` when they cannot be counted.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// A shape or parameter that the kernel does not have.
    #[error("{kernel}: {what} is {got}; {allowed}")]
    Shape {
        /// The kernel.
        kernel: &'static str,
        /// The parameter.
        what: &'static str,
        /// Its value.
        got: usize,
        /// What would be right.
        allowed: &'static str,
    },
    /// Row tiles do not continue each other.
    #[error(
        "matmul: tile {index} starts at output row {got}, the rows before it end at {expected}"
    )]
    Tiles {
        /// The tile; the number of tiles when rows are missing at the end.
        index: usize,
        /// The row that comes next.
        expected: usize,
        /// The row found.
        got: usize,
    },
    /// A type that cannot be written.
    #[error(
        "kv_store: {dtype} cannot be written; use F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1"
    )]
    NotEncodable {
        /// The type.
        dtype: tegula_quant::DType,
    },
    /// The threads failed.
    #[error(transparent)]
    Pool(#[from] crate::pool::PoolError),
}

/// Fails unless `got` is the product of `factors`.
pub(crate) fn expect_len(
    kernel: &'static str,
    what: &'static str,
    factors: &[usize],
    got: usize,
) -> Result<(), KernelError> {
    let expected = factors.iter().try_fold(1usize, |n, &f| n.checked_mul(f));
    if expected == Some(got) {
        Ok(())
    } else {
        Err(KernelError::Length { kernel, what, expected: expected.unwrap_or(usize::MAX), got })
    }
}

/// Fails unless `got` is at least `needed`.
pub(crate) fn expect_scratch(
    kernel: &'static str,
    needed: usize,
    got: usize,
) -> Result<(), KernelError> {
    if got >= needed {
        Ok(())
    } else {
        Err(KernelError::Length { kernel, what: "scratch", expected: needed, got })
    }
}
