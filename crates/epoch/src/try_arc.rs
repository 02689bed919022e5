#![expect(
    unsafe_code,
    reason = "counts the users of an allocation, and frees it after the last"
)]
//! Allocations that may fail: boxes, and a reference-counted pointer.

use crate::OutOfMemory;
use crate::sync::{Ordering, Users};
use alloc::alloc::{Layout, alloc};
use alloc::boxed::Box;
use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::NonNull;

/// Puts `value` into a box.
pub(crate) fn try_box<T>(value: T) -> Result<Box<T>, OutOfMemory> {
    const { assert!(size_of::<T>() > 0) };
    let layout = Layout::new::<T>();
    // SAFETY: the layout's size is not 0.
    let memory: *mut T = unsafe { alloc(layout) }.cast();
    if memory.is_null() {
        let bytes = layout.size();
        return Err(OutOfMemory { bytes });
    }
    // SAFETY: the memory was just allocated by the global allocator with the layout of `T`, like
    // that of a box.
    unsafe {
        memory.write(value);
        Ok(Box::from_raw(memory))
    }
}

/// A reference-counted pointer that can be made without a panic or an abort: `alloc::sync::Arc`
/// aborts the process if the allocator refuses memory, and its `try_new` is not stable.
///
/// ```
/// use pageferry_epoch::TryArc;
///
/// let one = TryArc::try_new(7)?;
/// let other = one.clone();
/// drop(one);
/// assert_eq!(*other, 7);
/// # Ok::<(), pageferry_epoch::OutOfMemory>(())
/// ```
pub struct TryArc<T> {
    counted: NonNull<Counted<T>>,
    owns: PhantomData<Counted<T>>,
}

struct Counted<T> {
    value: T,
    /// The number of pointers.
    users: Users,
}

// SAFETY: pointers on several threads share the value (`T: Sync`), and the last one drops it, on
// any thread (`T: Send`).
unsafe impl<T: Send + Sync> Send for TryArc<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for TryArc<T> {}

impl<T> TryArc<T> {
    /// Moves `value` into a new allocation.
    ///
    /// # Errors
    /// If the allocator refuses memory. Then `value` is dropped.
    pub fn try_new(value: T) -> Result<Self, OutOfMemory> {
        let users = Users::new(1);
        let counted = Box::leak(try_box(Counted { value, users })?);
        Ok(Self {
            counted: NonNull::from(counted),
            owns: PhantomData,
        })
    }

    fn counted(&self) -> &Counted<T> {
        // SAFETY: the allocation lives as long as any pointer to it.
        unsafe { self.counted.as_ref() }
    }
}

impl<T> Deref for TryArc<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.counted().value
    }
}

impl<T> Clone for TryArc<T> {
    fn clone(&self) -> Self {
        // Relaxed: `self` keeps the allocation, and sending the clone orders it.
        let before = self.counted().users.fetch_add(1, Ordering::Relaxed);
        // A count that wraps would free memory in use. Memory for so many pointers does not exist,
        // so they must have been forgotten.
        assert!(before < isize::MAX as usize, "too many clones");
        Self {
            counted: self.counted,
            owns: PhantomData,
        }
    }
}

impl<T> Drop for TryArc<T> {
    fn drop(&mut self) {
        // Release: the accesses of this user happen before the drop of the value. Acquire: the last
        // user drops the value after the accesses of all others.
        if self.counted().users.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: the allocation comes from a box, and no other pointer is left.
            drop(unsafe { Box::from_raw(self.counted.as_ptr()) });
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for TryArc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
