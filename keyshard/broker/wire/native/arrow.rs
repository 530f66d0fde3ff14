//! Arrow's C data interface: columns that their receiver takes over without a copy.

use std::any::Any;
use std::ffi::c_void;
use std::ptr;

/// `struct ArrowArray` of the interface.
#[repr(C)]
pub struct ArrowArray {
    length: i64,
    null_count: i64,
    offset: i64,
    n_buffers: i64,
    n_children: i64,
    buffers: *const *const u8,
    children: *const *mut ArrowArray,
    dictionary: *mut ArrowArray,
    release: Option<unsafe extern "C" fn(*mut ArrowArray)>,
    private_data: *mut c_void,
}

/// What lives as long as an array.
struct Held {
    buffers: Vec<*const u8>,
    children: Vec<*mut ArrowArray>,
    _owner: Option<Box<dyn Any>>,
}

impl ArrowArray {
    /// An array of `length` values, `nulls` of them null.
    ///
    /// `owner` owns the memory of the buffers, also of those of the children.
    pub fn new(
        length: usize, nulls: usize, buffers: Vec<*const u8>, children: Vec<ArrowArray>,
        owner: Option<Box<dyn Any>>,
    ) -> Self {
        let children = children.into_iter().map(|child| Box::into_raw(Box::new(child))).collect();
        let held = Box::new(Held { buffers, children, _owner: owner });
        ArrowArray {
            length: length as i64,
            null_count: nulls as i64,
            offset: 0,
            n_buffers: held.buffers.len() as i64,
            n_children: held.children.len() as i64,
            buffers: held.buffers.as_ptr(),
            children: held.children.as_ptr(),
            dictionary: ptr::null_mut(),
            release: Some(release),
            private_data: Box::into_raw(held).cast(),
        }
    }
}

/// Frees an array, and those of its children that were not moved elsewhere.
unsafe extern "C" fn release(array: *mut ArrowArray) {
    // SAFETY: by the interface, an array of `new` is released once, and nobody uses it afterwards.
    unsafe {
        let held = Box::from_raw((*array).private_data.cast::<Held>());
        for child in &held.children {
            let mut child = Box::from_raw(*child);
            if let Some(release) = child.release {
                release(&mut *child);
            }
        }
        (*array).release = None;
    }
}
