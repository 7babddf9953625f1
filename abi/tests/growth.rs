//! Structs of revision 1, as plugins and cores that were built with it hand them over, are read as they were meant.

#![allow(clippy::unwrap_used, unsafe_code, reason = "a test that cannot go on fails")]

use std::mem::size_of;
use tegula_abi::*;

/// The first `size` bytes of `value`, which says so, then bytes that nobody may read as fields.
fn shortened<T: Crossing>(value: &T, size: usize) -> Vec<u64> {
    let mut words = vec![u64::MAX; size_of::<T>() / 8 + 1];
    // SAFETY: both hold `size` bytes, of which the first are `struct_size`.
    unsafe {
        let out = words.as_mut_ptr().cast::<u8>();
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>(), out, size);
    }
    words[0] = size as u64;
    words
}

/// What a reader of today sees of a struct that ended after `size` bytes.
fn read<T: Crossing>(value: &T, size: usize) -> Option<T> {
    let words = shortened(value, size);
    // SAFETY: the words hold a whole T, aligned, and say how much of it counts.
    unsafe { read_sized(words.as_ptr().cast::<T>()) }
}

fn none<T>() -> Slice<T> {
    Slice { ptr: std::ptr::null(), len: 0, stride: size_of::<T>() }
}

/// A plugin of the graphics card from last year must go on working: what it does not state has its default.
#[test]
#[cfg(target_pointer_width = "64")]
fn structs_of_revision_1_are_understood() {
    let ids = [7u32];
    let layers = [StateLayer { struct_size: size_of::<StateLayer>(), n_elements: 3 }];
    let program = Program {
        struct_size: size_of::<Program>(),
        name: Str::of("p"),
        values: none(),
        ops: none(),
        inputs: Slice::of(&ids),
        outputs: none(),
        kv_layers: none(),
        state_layers: Slice::of(&layers),
    };
    let seen = read(&program, 144).unwrap();
    assert_eq!((seen.inputs.len, seen.state_layers.len), (1, 0));
    assert!(read(&program, 143).is_none());

    let pool = StatePool {
        struct_size: size_of::<StatePool>(),
        generation: 1,
        n_slots: 0,
        n_layers: 0,
        tiles: none(),
    };
    let args = RunArgs {
        struct_size: size_of::<RunArgs>(),
        n_tokens: 5,
        n_outputs: 1,
        inputs: none(),
        outputs: none(),
        scratch: none(),
        seqs: none(),
        kv: none(),
        state: &raw const pool,
    };
    let seen = read(&args, 136).unwrap();
    assert_eq!((seen.n_tokens, seen.state.is_null()), (5, true));
    assert!(read(&args, 135).is_none());

    let desc = WeightDesc {
        struct_size: size_of::<WeightDesc>(),
        n_in: 64,
        n_rows: 8,
        rows_per_expert: 4,
        ..WeightDesc::default()
    };
    let seen = read(&desc, 32).unwrap();
    assert_eq!((seen.n_rows, seen.rows_per_expert), (8, 0));
}

/// Elements of arrays grow too: a core of revision 1 lays its sequences 32 bytes apart.
#[test]
#[cfg(target_pointer_width = "64")]
fn arrays_of_revision_1_are_understood() {
    let span = |first_token, n_tokens| SeqSpan {
        struct_size: 32,
        first_token,
        n_tokens,
        first_pos: 9,
        reserved: 0,
        tables: std::ptr::null(),
        state_slot: 77,
        reserved_end: 0,
    };
    let mut words = Vec::new();
    for span in [span(0, 2), span(2, 3)] {
        words.extend_from_slice(&shortened(&span, 32)[..4]);
    }
    let slice: Slice<SeqSpan> = Slice { ptr: words.as_ptr().cast(), len: 2, stride: 32 };
    // SAFETY: two elements of 32 bytes are there.
    let (first, second) = unsafe { (slice.get(0).unwrap(), slice.get(1).unwrap()) };
    assert_eq!((first.n_tokens, first.state_slot), (2, 0));
    assert_eq!((second.first_token, second.n_tokens, second.state_slot), (2, 3, 0));
}
