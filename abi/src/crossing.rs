//! Reading and writing structs whose other side may be older or newer.

use crate::*;
use std::mem::{MaybeUninit, size_of};

/// A struct that starts with `struct_size: usize` and may grow at its end.
///
/// # Safety
/// The type is `repr(C)`, its first field is `struct_size: usize`, and all-zero bytes are a valid value of it.
pub unsafe trait Crossing: Sized {
    /// The shortest size that is still understood; fields beyond it are optional.
    const MIN_SIZE: usize;
}

macro_rules! crossing {
    ($($ty:ty => $min:expr;)*) => {$(
        // SAFETY: the type is declared in this crate as repr(C) with `struct_size` first, of integers, raw
        // pointers and optional functions only, for all of which zero is valid; the assertion checks the offset.
        unsafe impl Crossing for $ty {
            const MIN_SIZE: usize = {
                assert!(std::mem::offset_of!($ty, struct_size) == 0);
                $min
            };
        }
    )*};
}

crossing! {
    Host => std::mem::offset_of!(Host, log);
    Plugin => size_of::<Plugin>();
    BackendTable => std::mem::offset_of!(BackendTable, extension);
    DeviceTable => size_of::<DeviceTable>();
    ErrorRecord => size_of::<ErrorRecord>();
    DeviceInfo => size_of::<DeviceInfo>();
    HeapInfo => size_of::<HeapInfo>();
    BufferTypeInfo => size_of::<BufferTypeInfo>();
    DeviceOptions => size_of::<DeviceOptions>();
    BufferDesc => size_of::<BufferDesc>();
    WeightDesc => std::mem::offset_of!(WeightDesc, rows_per_expert);
    WeightLayout => size_of::<WeightLayout>();
    WeightTile => size_of::<WeightTile>();
    WeightBinding => size_of::<WeightBinding>();
    WeightUpload => size_of::<WeightUpload>();
    CompileOptions => size_of::<CompileOptions>();
    ExecutableMemory => size_of::<ExecutableMemory>();
    Binding => size_of::<Binding>();
    SeqSpan => std::mem::offset_of!(SeqSpan, state_slot);
    KvGroup => size_of::<KvGroup>();
    StatePool => size_of::<StatePool>();
    RunArgs => std::mem::offset_of!(RunArgs, state);
    Value => size_of::<Value>();
    Op => size_of::<Op>();
    KvLayer => size_of::<KvLayer>();
    StateLayer => size_of::<StateLayer>();
    Program => std::mem::offset_of!(Program, state_layers);
    NormParams => size_of::<NormParams>();
    RopeParams => size_of::<RopeParams>();
    KvStoreParams => size_of::<KvStoreParams>();
    AttentionParams => size_of::<AttentionParams>();
    ActivationParams => size_of::<ActivationParams>();
    ScaleParams => size_of::<ScaleParams>();
    SliceParams => size_of::<SliceParams>();
    TopKParams => size_of::<TopKParams>();
    ExpertsParams => size_of::<ExpertsParams>();
    RouterParams => size_of::<RouterParams>();
    ConvStateParams => size_of::<ConvStateParams>();
    GatedDeltaParams => size_of::<GatedDeltaParams>();
    SliceGroupsParams => size_of::<SliceGroupsParams>();
    GluClampedParams => size_of::<GluClampedParams>();
    ConcatGroupsParams => size_of::<ConcatGroupsParams>();
    GroupedRouterParams => size_of::<GroupedRouterParams>();
}

/// Copies a struct of the other side; fields that it does not have are zero. `None` for null, a misaligned pointer, or a
/// `struct_size` below [`Crossing::MIN_SIZE`].
///
/// # Safety
/// `ptr` is null or points to readable memory of at least as many bytes as the `struct_size` that it starts with.
pub unsafe fn read_sized<T: Crossing>(ptr: *const T) -> Option<T> {
    if ptr.is_null() || !ptr.is_aligned() {
        return None;
    }
    // SAFETY: the pointer is not null and aligned, and a Crossing starts with its size.
    let size = unsafe { ptr.cast::<usize>().read() };
    if size < T::MIN_SIZE {
        return None;
    }
    // SAFETY: the caller vouches for `size` bytes.
    Some(unsafe { read_prefix(ptr, size) })
}

/// Copies the first `size` bytes of a struct, at most all of it; the rest is zero.
///
/// # Safety
/// `ptr` is valid for reading `size` bytes.
unsafe fn read_prefix<T: Crossing>(ptr: *const T, size: usize) -> T {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both sides hold that many bytes and do not overlap; all-zero bytes are a valid T by the
    // contract of Crossing, and the other side wrote a valid prefix over them.
    unsafe {
        let bytes = size.min(size_of::<T>());
        std::ptr::copy_nonoverlapping(ptr.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), bytes);
        value.assume_init()
    }
}

/// Fills the caller's struct as far as it reaches, and says in its `struct_size` how far that was. False for null or a size
/// below [`Crossing::MIN_SIZE`].
///
/// # Safety
/// `out` is null or points to writable memory of at least as many bytes as the `struct_size` that it starts with.
pub unsafe fn write_sized<T: Crossing>(out: *mut T, value: &T) -> bool {
    if out.is_null() || !out.is_aligned() {
        return false;
    }
    // SAFETY: not null and aligned; a Crossing starts with its size.
    let size = unsafe { out.cast::<usize>().read() };
    if size < T::MIN_SIZE {
        return false;
    }
    let bytes = size.min(size_of::<T>());
    // SAFETY: `out` holds `size` bytes by the caller's word, `value` all of T; they do not overlap since `value` is borrowed.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>(),
            out.cast::<u8>(),
            bytes,
        );
        out.cast::<usize>().write(bytes);
    }
    true
}

impl<T: Crossing> Slice<T> {
    /// Element `i`, with fields that the writer does not have zero. `None` past the end or for a stride below [`Crossing::MIN_SIZE`].
    ///
    /// # Safety
    /// The slice's memory is alive and holds `len * stride` bytes.
    pub unsafe fn get(&self, i: usize) -> Option<T> {
        if i >= self.len || self.ptr.is_null() || self.stride < T::MIN_SIZE {
            return None;
        }
        // SAFETY: element i lies within `len * stride` bytes by the caller's word.
        unsafe {
            let at = self.ptr.cast::<u8>().add(i * self.stride).cast::<T>();
            if !at.is_aligned() {
                return None;
            }
            Some(read_prefix(at, self.stride))
        }
    }
}

impl<T> Slice<T> {
    /// The elements as a slice, for frozen types whose stride is their size. `None` for any other stride.
    ///
    /// # Safety
    /// The slice's memory is alive for `'a` and holds `len` valid elements.
    pub unsafe fn frozen<'a>(&self) -> Option<&'a [T]> {
        if self.len == 0 {
            return Some(&[]);
        }
        if self.ptr.is_null() || !self.ptr.is_aligned() || self.stride != size_of::<T>() {
            return None;
        }
        // SAFETY: not null, aligned, and alive with `len` elements by the caller's word.
        Some(unsafe { std::slice::from_raw_parts(self.ptr, self.len) })
    }
}

impl Str {
    /// The text; `None` for bytes that are not UTF-8 or a null pointer with a length.
    ///
    /// # Safety
    /// The bytes are alive for `'a`.
    pub unsafe fn get<'a>(&self) -> Option<&'a str> {
        if self.len == 0 {
            return Some("");
        }
        if self.ptr.is_null() || isize::try_from(self.len).is_err() {
            return None;
        }
        // SAFETY: not null, of a length that fits, alive by the caller's word.
        std::str::from_utf8(unsafe { std::slice::from_raw_parts(self.ptr, self.len) }).ok()
    }
}
