//! [`SharedMut`]: an output that several threads write at places that do not overlap.

/// A mutable slice that can be written from several threads. It checks bounds, not overlap: each use states why no two
/// tasks touch the same element.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<'a, T> {
    data: *mut T,
    len: usize,
    borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `unsafe` methods whose callers promise that tasks do not overlap; then sending the slice
// to other threads is as sound as splitting it.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedMut { data: slice.as_mut_ptr(), len: slice.len(), borrow: std::marker::PhantomData }
    }

    /// Elements `at..at + len`, or the part of them that exists.
    ///
    /// # Safety
    /// While the returned slice lives, no other slice or pointer from this value touches those elements.
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, at: usize, len: usize) -> &'a mut [T] {
        let at = at.min(self.len);
        let len = len.min(self.len - at);
        // SAFETY: inside the original slice; the caller promises that nothing overlaps.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(at), len) }
    }

    /// The address of element 0.
    #[inline(always)]
    pub(crate) fn as_mut_ptr(&self) -> *mut T {
        self.data
    }
}
