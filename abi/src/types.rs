//! What every table is made of: strings, arrays, figures and open enums.

use abi_stable::StableAbi;

/// A borrowed piece of UTF-8, not terminated. Lives for the call unless the field says otherwise. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct Str {
    /// First byte; may be null when `len` is 0.
    pub ptr: *const u8,
    /// Length in bytes.
    pub len: usize,
}

/// A borrowed array whose elements may be of a newer, longer type than the reader's. Frozen.
///
/// Element `i` starts `i * stride` bytes after `ptr`; `stride` is the writer's size of `T`. A reader refuses a
/// stride below the first revision's size of `T` and takes defaults for fields beyond it.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct Slice<T> {
    /// First element; may be null when `len` is 0.
    pub ptr: *const T,
    /// Number of elements.
    pub len: usize,
    /// Distance between elements in bytes.
    pub stride: usize,
}

impl<T> Slice<T> {
    /// The array without elements.
    pub const EMPTY: Self =
        Self { ptr: std::ptr::null(), len: 0, stride: std::mem::size_of::<T>() };

    /// Borrows `items` for as long as the caller keeps them.
    pub const fn of(items: &[T]) -> Self {
        Self { ptr: items.as_ptr(), len: items.len(), stride: std::mem::size_of::<T>() }
    }
}

impl Str {
    /// Borrows `text` for as long as the caller keeps it.
    pub const fn of(text: &str) -> Self {
        Self { ptr: text.as_ptr(), len: text.len() }
    }
}

// SAFETY: the two structs below are plain pointers and lengths; what they point to is governed by the
// contract of the field they stand in, which for statics is static data.
unsafe impl Send for Str {}
// SAFETY: as above.
unsafe impl Sync for Str {}
// SAFETY: as above; a `Slice` only ever gives out shared views of `T`.
unsafe impl<T: Sync> Send for Slice<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Slice<T> {}

/// Declares an open enumeration: a transparent integer with named constants.
macro_rules! open_enum {
    ($(#[$meta:meta])* $name:ident: $repr:ty { $($(#[$vmeta:meta])* $variant:ident = $value:expr,)* }) => {
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, abi_stable::StableAbi)]
        pub struct $name(pub $repr);

        impl $name {
            $($(#[$vmeta])* pub const $variant: Self = Self($value);)*

            /// The constant's name in lower case, or `None` for a value this revision does not know.
            pub fn name(self) -> Option<String> {
                $(if self == Self::$variant { return Some(stringify!($variant).to_ascii_lowercase()); })*
                None
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(&name),
                    None => write!(f, "unknown({})", self.0),
                }
            }
        }
    };
}
pub(crate) use open_enum;

open_enum! {
    /// How much a [`Figure`]'s value may be trusted. Zeroed memory says "unknown".
    FigureState: u32 {
        /// Nobody could say; `value` means nothing.
        UNKNOWN = 0,
        /// `value` holds.
        KNOWN = 1,
        /// The question makes no sense here (free memory of a device without memory of its own).
        NOT_APPLICABLE = 2,
    }
}

open_enum! {
    /// Where a [`Figure`] comes from.
    FigureSource: u32 {
        /// Not stated.
        NONE = 0,
        /// The driver or the operating system was asked, and this is its answer.
        DRIVER = 1,
        /// Tried or timed on this machine.
        MEASURED = 2,
        /// An operator's cap (`TEGULA_MAX_BUFFER`, `TEGULA_MEMORY_LIMIT`).
        OVERRIDE = 3,
        /// Computed from other figures, or a documented floor where the driver cannot be asked.
        DERIVED = 4,
    }
}

/// A number with its state and source. Frozen: passed and embedded by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, StableAbi)]
pub struct Figure {
    /// The number, in the unit that the field names; meaningless unless `state` is KNOWN.
    pub value: u64,
    /// Whether `value` holds.
    pub state: FigureState,
    /// Who says so.
    pub source: FigureSource,
}

impl Figure {
    /// Nobody could say.
    pub const UNKNOWN: Self =
        Self { value: 0, state: FigureState::UNKNOWN, source: FigureSource::NONE };
    /// The question makes no sense here.
    pub const NOT_APPLICABLE: Self =
        Self { value: 0, state: FigureState::NOT_APPLICABLE, source: FigureSource::NONE };

    /// A known value and its source.
    pub const fn known(value: u64, source: FigureSource) -> Self {
        Self { value, state: FigureState::KNOWN, source }
    }

    /// The value, if it is known.
    pub fn get(self) -> Option<u64> {
        (self.state == FigureState::KNOWN).then_some(self.value)
    }
}

open_enum! {
    /// Severity of a log record, as in the `log` crate.
    LogLevel: u32 {
        /// Nothing is wanted.
        OFF = 0,
        /// Something failed.
        ERROR = 1,
        /// Something works other than asked, or slower.
        WARN = 2,
        /// What a user may want to know once.
        INFO = 3,
        /// What a developer wants to know.
        DEBUG = 4,
        /// Everything.
        TRACE = 5,
    }
}

open_enum! {
    /// Element and block types. Numbers and layouts are GGUF's (`F32` 0, `F16` 1, `Q4_0` 2, ...).
    DType: u32 {
        /// 32-bit float.
        F32 = 0,
        /// 16-bit float.
        F16 = 1,
        /// 32-bit signed integer: token ids, positions, row numbers.
        I32 = 26,
        /// bfloat16.
        BF16 = 30,
    }
}

/// Text of fixed capacity inside a struct: UTF-8, ended by the first NUL or by the capacity. Frozen.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct Text<const N: usize> {
    /// The bytes; unused ones are zero.
    pub bytes: [u8; N],
}

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Self { bytes: [0; N] }
    }
}

impl<const N: usize> Text<N> {
    /// Copies as many whole characters of `text` as fit, leaving room for the NUL.
    pub fn new(text: &str) -> Self {
        let mut out = Self::default();
        let mut end = text.len().min(N.saturating_sub(1));
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        for (to, from) in out.bytes.iter_mut().zip(&text.as_bytes()[..end]) {
            *to = *from;
        }
        out
    }

    /// The text up to the first NUL; bytes that are not UTF-8 become U+FFFD.
    pub fn to_text(&self) -> String {
        let end = self.bytes.iter().position(|b| *b == 0).unwrap_or(N);
        String::from_utf8_lossy(&self.bytes[..end]).into_owned()
    }
}

impl<const N: usize> std::fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.to_text())
    }
}
