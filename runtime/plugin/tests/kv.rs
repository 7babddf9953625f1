//! KV tables and imported memory, through a backend that looks at what it is given.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod common;

use common::*;
use std::sync::Arc;
use tegula_plugin::*;
use tegula_program::ffi::FfiProgram;
use tegula_program::{Dim, KvLayer, ProgramBuilder};
use tegula_quant::DType;

const BLOCK_LEN: u32 = 4;
/// Bytes of one block's keys: 1 head of 4 f16.
const K: u64 = 4 * 2 * BLOCK_LEN as u64;

fn desc(size: u64) -> BufferDesc {
    BufferDesc { size, buffer_type: 0, usage: BufferUsage::KV }
}

/// Stores keys and values in one layer, and gives the keys back.
fn program() -> FfiProgram {
    let mut b = ProgramBuilder::new("kv");
    let k = b.input("k", DType::F32, &[Dim::NTokens, Dim::Fixed(4)]);
    let v = b.input("v", DType::F32, &[Dim::NTokens, Dim::Fixed(4)]);
    let layer = b.kv_layer(KvLayer {
        group: 0,
        index: 0,
        n_head_kv: 1,
        head_dim_k: 4,
        head_dim_v: 4,
        dtype_k: DType::F16,
        dtype_v: DType::F16,
    });
    b.kv_store(layer, k, v);
    let q = b.scale(k, 1.0);
    b.output("q", q);
    FfiProgram::new(&b.finish().unwrap())
}

/// A block table that reaches too short, or names a block that is not there, would send the device into other
/// people's memory; it never gets there.
#[test]
fn tables_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let fault = "device.program_compile=compile_any;device.queue_run=run_any";
    let registry = load(&[&faulty(dir.path(), "libtegula_x.so", fault)]);
    let device = Device::open(&registry.backends[0], 0, DeviceOptions::default()).unwrap();
    let options = CompileOptions {
        n_tokens_max: 8,
        n_outputs_max: 8,
        n_seqs_max: 2,
        n_ctx_max: 32,
        scratch_type: 0,
        scratch_chunk_max: 1 << 20,
    };
    let executable = device.compile(&program(), &options, &[]).unwrap();
    let buffer = Arc::new(device.alloc(&desc(1024)).unwrap());
    let tile = |offset: u64, size: u64| (Arc::clone(&buffer), offset..offset + size);
    let mut group = KvGroup::new(&device, BLOCK_LEN, 1);
    assert_eq!(group.push_segment(2, &[tile(0, 2 * K), tile(64, 2 * K)]).unwrap(), 0);
    assert_eq!(group.push_segment(1, &[tile(128, K), tile(160, K)]).unwrap(), 2);
    assert!(group.push_segment(1, &[tile(0, K)]).is_err(), "values have no tile");
    assert!(group.push_segment(1, &[tile(0, K), tile(1000, K)]).is_err(), "outside the buffer");
    let mut queue = device.queue().unwrap();
    let kv_data = vec![0u8; 8 * 16];
    let mut run = |group: &KvGroup, seqs: &[SeqSpan<'_>]| {
        let mut out = vec![0u8; 8 * 16];
        let mut args = RunArgs {
            n_tokens: 3,
            n_outputs: 0,
            inputs: &[InputData::Host(&kv_data), InputData::Host(&kv_data)],
            outputs: &mut [OutputData::Host(&mut out)],
            scratch: &[],
            seqs,
            kv: &[group],
            state: None,
        };
        queue.run(&executable, &mut args)?;
        let at = |i: usize| f32::from_le_bytes(out[i..i + 4].try_into().unwrap());
        Ok::<_, DeviceError>((at(0), at(4)))
    };
    let table = |blocks| [BlockTable { blocks, first_pos: 0 }];
    let seq = |first_token, n_tokens, first_pos, tables| SeqSpan {
        first_token,
        n_tokens,
        first_pos,
        tables,
        state_slot: 0,
    };
    let (a, b) = (table(&[2, 1]), table(&[1]));
    let windowed = [BlockTable { blocks: &[2], first_pos: 8 }];
    assert_eq!(run(&group, &[seq(0, 2, 5, &a), seq(2, 1, 3, &b)]).unwrap(), (4.0, 160.0));
    assert_eq!(run(&group, &[seq(0, 3, 9, &windowed)]).unwrap(), (2.0, 160.0));
    let unaligned = [BlockTable { blocks: &[1, 2], first_pos: 2 }];
    let strange = table(&[3]);
    for (seqs, expected) in [
        (&[][..], "sequences of 0 tokens in a run of 3"),
        (&[seq(0, 2, 0, &b)], "sequences of 2 tokens"),
        (&[seq(1, 3, 0, &b)], "rows 0.. at 1"),
        (&[seq(0, 3, 2, &b)], "positions 0..4 for positions 2..5"),
        (&[seq(0, 3, u32::MAX, &b)], "overflow"),
        (&[seq(0, 3, 30, &b)], "positions up to 33 of 32"),
        (&[seq(0, 3, 0, &strange)], "KvBlock 3 of 3"),
        (&[seq(0, 3, 4, &unaligned)], "block table of positions 2..10"),
        (&[seq(0, 3, 4, &windowed)], "block table of positions 8..12"),
        (&[seq(0, 3, 0, &[])], "0 block tables for 1 KV groups"),
    ] {
        let error = run(&group, seqs).unwrap_err();
        assert_eq!(error.kind, DeviceErrorKind::InvalidArgument);
        assert!(error.to_string().contains(expected), "{error}");
    }
    // A changed table is looked at again.
    assert!(group.pop_segment());
    assert!(run(&group, &[seq(0, 3, 9, &windowed)]).is_err());
    group.push_segment(1, &[tile(128, K), tile(160, K - 1)]).unwrap();
    let error = run(&group, &[seq(0, 3, 9, &windowed)]).unwrap_err();
    assert!(error.to_string().contains("a KV tile of 31 bytes"), "{error}");
}

/// Weights that are used where the file is mapped: the mapping lives as long as the buffer, and nobody writes to it.
#[test]
fn imports_keep_their_owner() {
    let dir = tempfile::tempdir().unwrap();
    let fault = "type.flags=TEGULA_BUFFER_TYPE_FLAG_IMPORT;backend.buffer_type_info=other_type;device.buffer_import=import_host;device.buffer_free=free_imported";
    let registry = load(&[&faulty(dir.path(), "libtegula_x.so", fault)]);
    let device = Device::open(&registry.backends[0], 0, DeviceOptions::default()).unwrap();
    let owner: Arc<Vec<u8>> = Arc::new((0..64).collect());
    let buffer = device.import(&desc(0), owner.clone(), 16..48).unwrap();
    assert_eq!((buffer.size(), buffer.is_read_only(), Arc::strong_count(&owner)), (32, true, 2));
    let mut queue = device.queue().unwrap();
    let mut back = [0; 4];
    queue.read(&buffer, 28, &mut back).unwrap();
    assert_eq!(back, [44, 45, 46, 47]);
    assert!(queue.write(&buffer, 0, &back).is_err(), "an import is only read");
    assert!(device.import(&desc(0), owner.clone(), 60..80).is_err(), "outside the owner's bytes");
    drop(buffer);
    assert_eq!(Arc::strong_count(&owner), 1);
}
