//! The boundary as a core uses it: a whole small model from open to tokens, and every way in which a wrong host is refused.

#![expect(unsafe_code, reason = "calls the boundary's tables")]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking, its helpers too"
)]

mod common;

use common::{Call, Failure, Rig, Seq, Session, Setup, call, f32_bytes, f32s, i32_bytes};
use common::{negotiate, noise, steps, whole};
use std::ptr::{null, null_mut};
use tegula_reference::{Reference, ReferenceDevice};
use tegula_sdk::abi::{self, Status};
use tegula_sdk::program::{
    Activation, DType, Dim, KvLayer, Norm, Program, ProgramBuilder, Rope, RopeStyle,
};
use tegula_sdk::{Backend, Error};

const N_VOCAB: usize = 19;
const N_EMBD: usize = 16;
const N_FF: usize = 24;
const HEAD_DIM: u32 = 8;

/// Two layers of two heads over one head of keys, the second with a window and a group of its own.
fn model() -> (Program, Vec<(&'static str, Vec<u8>)>) {
    let mut b = ProgramBuilder::new("tiny");
    let tokens = b.input("tokens", DType::I32, &[Dim::NTokens]);
    let positions = b.input("positions", DType::I32, &[Dim::NTokens]);
    let wanted = b.input("outputs", DType::I32, &[Dim::NOutputs]);
    let names: [[&'static str; 8]; 2] = [
        ["0.norm", "0.q", "0.k", "0.v", "0.o", "0.gate", "0.up", "0.down"],
        ["1.norm", "1.q", "1.k", "1.v", "1.o", "1.gate", "1.up", "1.down"],
    ];
    let (e, f, d) = (N_EMBD as u64, N_FF as u64, u64::from(HEAD_DIM));
    let shapes: [&[u64]; 8] =
        [&[e], &[2 * d, e], &[d, e], &[d, e], &[e, 2 * d], &[f, e], &[f, e], &[e, f]];
    let mut shaped = vec![("embd", N_VOCAB * N_EMBD)];
    let table = b.weight("embd", DType::F32, &[N_VOCAB as u64, e]);
    let norm = Norm { eps: 1e-6, n: N_EMBD as u32 };
    let rope = Rope::new(RopeStyle::Neox, HEAD_DIM, HEAD_DIM, 100.0);
    let mut x = b.embed(tokens, table);
    for (layer, names) in (0..).zip(names) {
        b.layer(Some(layer));
        let w: Vec<_> = names
            .iter()
            .zip(shapes)
            .map(|(name, shape)| {
                shaped.push((name, usize::try_from(shape.iter().product::<u64>()).unwrap()));
                b.weight(name, DType::F32, shape)
            })
            .collect();
        let kv = b.kv_layer(KvLayer {
            group: layer,
            index: 0,
            n_head_kv: 1,
            head_dim_k: HEAD_DIM,
            head_dim_v: HEAD_DIM,
            dtype_k: DType::F16,
            dtype_v: DType::BF16,
        });
        let h = b.rms_norm(x, Some(w[0]), norm);
        let (q, k, v) = (b.matmul(h, w[1], None), b.matmul(h, w[2], None), b.matmul(h, w[3], None));
        let (q, k) = (b.rope(q, positions, None, rope), b.rope(k, positions, None, rope));
        b.kv_store(kv, k, v);
        let a = b.attention(kv, q, None, 2, 0.35, 0.0, 3 * layer);
        let a = b.matmul(a, w[4], None);
        x = b.add(x, a);
        let h = b.rms_norm(x, None, norm);
        let (gate, up) = (b.matmul(h, w[5], None), b.matmul(h, w[6], None));
        let h = b.glu(Activation::Silu, gate, up);
        let h = b.matmul(h, w[7], None);
        x = b.add(x, h);
    }
    let x = b.gather_rows(x, wanted);
    let logits = b.matmul(x, table, None);
    let best = b.argmax(logits);
    b.output("logits", logits);
    b.output("best", best);
    let weights = (0..).zip(shaped).map(|(seed, (name, n))| (name, f32_bytes(&noise(seed, n))));
    (b.finish().unwrap(), weights.collect())
}

fn setup<'a>(
    program: &'a Program,
    weights: &'a [(&'a str, Vec<u8>)],
    split: common::Split<'a>,
    kv: &'a [(u32, Vec<u32>)],
) -> Setup<'a> {
    Setup { program, weights, split, kv, n_tokens_max: 8, n_ctx_max: 16 }
}

/// The run of `tokens` of one sequence from `first_pos` on, with the logits of all of them.
fn step(tokens: &[i32], first_pos: u32, tables: &[(Vec<u32>, u32)]) -> Call {
    let n = u32::try_from(tokens.len()).unwrap();
    let from = i32::try_from(first_pos).unwrap();
    let up_to = i32::try_from(n).unwrap();
    Call {
        n_tokens: n,
        n_outputs: n,
        inputs: vec![
            i32_bytes(tokens),
            i32_bytes(&(from..from + up_to).collect::<Vec<_>>()),
            i32_bytes(&(0..up_to).collect::<Vec<_>>()),
        ],
        seqs: vec![Seq { n_tokens: n, first_pos, tables: tables.to_vec() }],
        outputs: vec![tokens.len() * N_VOCAB * 4, tokens.len() * 4],
        on_device: false,
    }
}

const TOKENS: [i32; 7] = [3, 18, 0, 7, 7, 11, 2];

/// Prompts in pieces of any size, weights in any tiles and caches in any segments must give one answer, to the bit.
#[test]
fn a_whole_model_says_the_same_in_every_cut() {
    let (program, weights) = model();
    let rig = Rig::new();
    let run = |split: common::Split<'_>, kv: &[(u32, Vec<u32>)], tables: &[_], piece: usize| {
        let mut session = Session::new(&rig, &setup(&program, &weights, split, kv)).unwrap();
        let (mut logits, mut best) = (Vec::new(), Vec::new());
        for (i, tokens) in TOKENS.chunks(piece).enumerate() {
            let first_pos = u32::try_from(i * piece).unwrap();
            let mut call = step(tokens, first_pos, tables);
            call.on_device = i % 2 == 1;
            let outputs = session.run(&call).unwrap();
            logits.extend(f32s(&outputs[0]));
            best.extend(outputs[1].as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)));
        }
        (logits, best)
    };
    let in_order = [(vec![0, 1], 0), (vec![0, 1], 0)];
    let (logits, best) = run(&whole, &[(4, vec![2]), (4, vec![2])], &in_order, 7);
    assert_eq!(logits.len(), TOKENS.len() * N_VOCAB);
    for (logits, best) in logits.chunks(N_VOCAB).zip(&best) {
        assert!(logits.iter().all(|x| x.is_finite()));
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(logits[usize::try_from(*best).unwrap()], max);
    }
    assert_ne!(logits[..N_VOCAB], logits[N_VOCAB..2 * N_VOCAB]);
    let shuffled = [(vec![2, 0], 0), (vec![1, 2], 0)];
    let kv = [(4, vec![1, 2]), (4, vec![1, 1, 1])];
    for (step, piece) in [(1, 1), (2, 7), (7, 3), (19, 2)] {
        let got = run(&steps(step), &kv, &shuffled, piece);
        assert!(
            got == (logits.clone(), best.clone()),
            "tiles of {step} rows, {piece} tokens a run"
        );
    }
}

/// A window needs no KvBlocks from before it: their memory is the next sequence's.
#[test]
fn tables_may_begin_at_the_window() {
    let (program, weights) = model();
    let rig = Rig::new();
    let kv = [(2, vec![4]), (2, vec![4])];
    let mut session = Session::new(&rig, &setup(&program, &weights, &whole, &kv)).unwrap();
    let all = (vec![0, 1, 2, 3], 0);
    let full = session.run(&step(&TOKENS, 0, &[all.clone(), all.clone()])).unwrap();
    session.run(&step(&TOKENS[..6], 0, &[all.clone(), all.clone()])).unwrap();
    let last = session.run(&step(&TOKENS[6..], 6, &[all, (vec![2, 3], 4)])).unwrap();
    assert_eq!(last[0], full[0][6 * N_VOCAB * 4..]);
}

/// A prompt's inner pieces want no logits: nothing need be bound for them.
#[test]
fn runs_may_want_no_outputs() {
    let (program, weights) = model();
    let rig = Rig::new();
    let kv = [(8, vec![1]), (8, vec![1])];
    let mut session = Session::new(&rig, &setup(&program, &weights, &whole, &kv)).unwrap();
    let mut call = step(&TOKENS, 0, &[(vec![0], 0), (vec![0], 0)]);
    (call.n_outputs, call.outputs, call.inputs[2]) = (0, vec![], vec![]);
    session.run(&call).unwrap();
}

/// What a core could get wrong must come back as an error that names it, never as a crash or as wrong text.
#[test]
fn wrong_runs_are_refused_by_name() {
    let (program, weights) = model();
    let rig = Rig::new();
    let kv = [(4, vec![1, 1]), (4, vec![2])];
    let mut session = Session::new(&rig, &setup(&program, &weights, &whole, &kv)).unwrap();
    let good = step(&TOKENS, 0, &[(vec![0, 1], 0), (vec![1, 0], 0)]);
    type Spoil = fn(&mut Call);
    let cases: [(&str, Spoil); 14] = [
        ("token 1 has id 19; the table has 19 rows", |call| {
            call.inputs[0][4..8].copy_from_slice(&19i32.to_le_bytes());
        }),
        ("token 0 has id -1; the table has 19 rows", |call| {
            call.inputs[0][..4].copy_from_slice(&(-1i32).to_le_bytes());
        }),
        ("(gather_rows) of `tiny`: row 7 of 7", |call| {
            call.inputs[2][..4].copy_from_slice(&7i32.to_le_bytes());
        }),
        ("KvBlock 2 is in none of 2 segments", |call| call.seqs[0].tables[0].0[1] = 2),
        ("KvBlock 4294967295 is in none of 1 segments", |call| {
            call.seqs[0].tables[1].0[0] = u32::MAX;
        }),
        ("position 4 is in no KvBlock: the table covers 0..4", |call| {
            call.seqs[0].tables[0].0.truncate(1);
        }),
        ("position 0 is in no KvBlock: the table covers 4..12", |call| {
            call.seqs[0].tables[0].1 = 4;
        }),
        ("sequences of 6 tokens in a run of 7", |call| call.seqs[0].n_tokens = 6),
        ("reaches position 17; compiled for 16", |call| call.seqs[0].first_pos = 10),
        ("9 tokens; compiled for at most 8", |call| call.n_tokens = 9),
        ("9 outputs; compiled for at most 8", |call| call.n_outputs = 9),
        ("5 sequences; compiled for at most 4", |call| call.seqs = vec![call.seqs[0].clone(); 5]),
        ("`tokens`: 28 bytes at 0 are outside a range of 27", |call| {
            call.inputs[0].pop();
        }),
        ("output 1 is not bound", |call| {
            call.outputs.pop();
        }),
    ];
    for (expected, spoil) in cases {
        let mut call = good.clone();
        spoil(&mut call);
        let failure = session.run(&call).unwrap_err();
        assert_eq!(failure.status, Status::INVALID_ARGUMENT, "{expected}: {failure:?}");
        assert!(failure.message.contains(expected), "{expected}: {}", failure.message);
    }
    let mut short = good.clone();
    short.outputs[0] -= 1;
    let message = session.run(&short).unwrap_err().message;
    assert!(message.contains("`logits`: 532 bytes at 0"), "{message}");
    session.run(&good).unwrap();
}

/// A wrong plan of weights must not become a read of foreign memory.
#[test]
fn wrong_tilings_are_refused_by_name() {
    let (program, weights) = model();
    let rig = Rig::new();
    let kv = [(4, vec![1]), (4, vec![1])];
    let table_only = |n: u64, tiles: &[(u64, u64)]| {
        if n == N_VOCAB as u64 { tiles.to_vec() } else { whole(n) }
    };
    for (tiles, expected) in [
        (&[(0, 9), (10, 9)][..], "weight `embd`: a tile of 9 rows from 10 on, where row 9 is next"),
        (&[(0, 10), (9, 10)], "a tile of 10 rows from 9 on, where row 10 is next"),
        (&[(0, 18)], "tiles of 18 rows for 19"),
        (&[], "tiles of 0 rows for 19"),
        (&[(0, 20)], "upload of 20 rows from 0 on, of 19"),
    ] {
        let split = |n| table_only(n, tiles);
        let result = Session::new(&rig, &setup(&program, &weights, &split, &kv));
        let failure = result.err().unwrap();
        assert_eq!(failure.status, Status::INVALID_ARGUMENT);
        assert!(failure.message.contains(expected), "{expected}: {}", failure.message);
    }
    let result = Session::new(&rig, &setup(&program, &weights[1..], &whole, &kv));
    assert_eq!(result.err().unwrap().message, "weight `embd` is not bound");
}

/// `max_size` is a promise in both directions: one byte more is refused with the limit.
#[test]
fn buffers_keep_the_stated_limits() {
    let rig = Rig::new();
    let info = rig.buffer_type();
    let max_size = info.max_size.get().unwrap();
    assert!(info.preferred_chunk.get().unwrap() <= max_size);
    for size in [max_size + 1, u64::MAX] {
        let failure = rig.alloc(size).unwrap_err();
        assert_eq!((failure.status, failure.asked), (Status::TOO_BIG, size));
        assert_eq!(failure.limit, max_size);
    }
    assert_eq!(rig.alloc(0).unwrap_err().status, Status::INVALID_ARGUMENT);
    let buffer = rig.alloc(10).unwrap();
    let mut address = null_mut();
    // SAFETY: the buffer is live.
    call(|e| unsafe { rig.table.buffer_map.unwrap()(rig.device, buffer, &raw mut address, e) })
        .unwrap();
    assert_eq!(address.addr() % usize::try_from(info.alignment).unwrap(), 0);
    let mut fence = 0;
    let mut write = |offset, size, bytes: &[u8]| {
        let range = abi::BufferRange { buffer, offset, size };
        // SAFETY: `bytes` are at least `size`.
        call(|e| unsafe {
            rig.table.queue_write.unwrap()(rig.queue, range, bytes.as_ptr(), &raw mut fence, e)
        })
    };
    write(2, 8, b"abcdefgh").unwrap();
    assert_eq!(write(3, 8, b"abcdefgh").unwrap_err().status, Status::INVALID_ARGUMENT);
    assert_eq!(write(u64::MAX, 2, b"ab").unwrap_err().status, Status::INVALID_ARGUMENT);
    // SAFETY: the mapping holds 10 bytes, and the queue is idle.
    assert_eq!(unsafe { std::slice::from_raw_parts(address.add(2), 8) }, b"abcdefgh");
    rig.free(buffer);
}

/// Weights of a mapped file are used in place; a write there would kill the process.
#[test]
fn imports_are_read_and_never_written() {
    let rig = Rig::new();
    let file = *b"weights";
    let desc = abi::BufferDesc {
        struct_size: size_of::<abi::BufferDesc>(),
        size: 7,
        ..Default::default()
    };
    let (mut buffer, mut fence, mut out) = (null_mut(), 0, [0u8; 7]);
    let import = rig.table.buffer_import.unwrap();
    // SAFETY: `file` outlives the buffer.
    call(|e| unsafe { import(rig.device, &raw const desc, file.as_ptr(), &raw mut buffer, e) })
        .unwrap();
    let range = abi::BufferRange { buffer, offset: 0, size: 7 };
    // SAFETY: `out` holds 7 bytes.
    call(|e| unsafe {
        rig.table.queue_read.unwrap()(rig.queue, range, out.as_mut_ptr(), &raw mut fence, e)
    })
    .unwrap();
    assert_eq!(out, file);
    let own = rig.alloc(7).unwrap();
    let target = abi::BufferRange { buffer: own, ..range };
    let mut copy = |from, to| {
        // SAFETY: both buffers are live.
        call(|e| unsafe { rig.table.queue_copy.unwrap()(rig.queue, from, to, &raw mut fence, e) })
    };
    copy(range, target).unwrap();
    assert!(copy(target, range).unwrap_err().message.contains("read-only"));
    rig.free(own);
    rig.free(buffer);
}

/// A null handle is a bug of the core's that must not become a crash inside a plugin.
#[test]
fn null_handles_are_invalid_arguments() {
    let rig = Rig::new();
    let (backend, table) = (rig.backend, rig.table);
    let (mut n, mut fence, mut out) = (0, 0, null_mut());
    let mut queue = null_mut();
    let nowhere = abi::BufferRange::NONE;
    // SAFETY: null is what is tried; all other pointers are to locals.
    let failures: [Result<(), Failure>; 9] = unsafe {
        [
            call(|e| backend.device_count.unwrap()(null(), &raw mut n, e)),
            call(|e| backend.device_count.unwrap()(rig.handle, null_mut(), e)),
            call(|e| backend.device_info.unwrap()(rig.handle, 0, null_mut(), e)),
            call(|e| backend.device_open.unwrap()(rig.handle, 0, null(), &raw mut out, e)),
            call(|e| table.buffer_alloc.unwrap()(rig.device, null(), null_mut(), e)),
            call(|e| table.queue_create.unwrap()(null(), &raw mut queue, e)),
            call(|e| table.queue_run.unwrap()(rig.queue, null_mut(), null(), &raw mut fence, e)),
            call(|e| table.queue_write.unwrap()(rig.queue, nowhere, null(), &raw mut fence, e)),
            call(|e| table.queue_wait.unwrap()(rig.queue, 1 << 40, u64::MAX, e)),
        ]
    };
    for failure in failures {
        assert_eq!(failure.unwrap_err().status, Status::INVALID_ARGUMENT);
    }
    for (index, heap, buffer_type) in [(1, 0, 0), (0, 1, 1)] {
        let mut info =
            abi::HeapInfo { struct_size: size_of::<abi::HeapInfo>(), ..Default::default() };
        let mut kind = abi::BufferTypeInfo {
            struct_size: size_of::<abi::BufferTypeInfo>(),
            ..Default::default()
        };
        let (heap_info, type_info) =
            (backend.heap_info.unwrap(), backend.buffer_type_info.unwrap());
        // SAFETY: the handle is live and the pointers are to locals.
        let failures = unsafe {
            [
                call(|e| heap_info(rig.handle, index, heap, &raw mut info, e)),
                call(|e| type_info(rig.handle, index, buffer_type, &raw mut kind, e)),
            ]
        };
        for failure in failures {
            assert_eq!(failure.unwrap_err().status, Status::NOT_FOUND);
        }
    }
}

/// What `tegula devices` prints and the planner counts on.
#[test]
fn the_device_states_what_it_is() {
    let rig = Rig::new();
    let mut info =
        abi::DeviceInfo { struct_size: size_of::<abi::DeviceInfo>(), ..Default::default() };
    let mut heap = abi::HeapInfo { struct_size: size_of::<abi::HeapInfo>(), ..Default::default() };
    // SAFETY: the handle is live and the pointers are to locals.
    unsafe {
        call(|e| rig.backend.device_info.unwrap()(rig.handle, 0, &raw mut info, e)).unwrap();
        call(|e| rig.backend.heap_info.unwrap()(rig.handle, 0, 0, &raw mut heap, e)).unwrap();
    }
    assert_eq!(
        (info.kind, heap.kind, heap.pool),
        (abi::DeviceKind::CPU, abi::HeapKind::HOST, abi::POOL_HOST)
    );
    assert!(info.name.to_text().ends_with(" (reference)"), "{:?}", info.name);
    let (total, free) = (heap.total.get().unwrap(), heap.free.get().unwrap());
    assert!(free > 0 && free <= total);
    assert!(rig.buffer_type().max_size.get().unwrap() <= total);
}

/// A core that shares no revision must be told so instead of being given tables that it misreads.
#[test]
fn a_core_without_a_common_revision_is_refused() {
    let (status, plugin) = negotiate(tegula_reference::tegula_backend_v1, (1000, 1001));
    assert_eq!(status, Status::INCOMPATIBLE);
    assert_eq!((plugin.revision_min, plugin.revision_max), (abi::REVISION_MIN, abi::REVISION));
}

/// A backend that panics wherever it can.
struct Panicking;

impl Backend for Panicking {
    const ID: &'static str = "panicking";
    const DESCRIPTION: &'static str = "panics";
    type Device = ReferenceDevice;
    fn open() -> Result<Self, Error> {
        panic!("no driver today")
    }
    fn n_devices(&self) -> u32 {
        panic!()
    }
    fn device_info(&self, _: u32) -> Result<abi::DeviceInfo, Error> {
        panic!()
    }
    fn heap_info(&self, _: u32, _: u32) -> Result<abi::HeapInfo, Error> {
        panic!()
    }
    fn buffer_type_info(&self, _: u32, _: u32) -> Result<abi::BufferTypeInfo, Error> {
        panic!()
    }
    fn open_device(&self, _: u32, _: &abi::DeviceOptions) -> Result<ReferenceDevice, Error> {
        panic!()
    }
}

unsafe extern "C" fn panicking(host: *const abi::Host, out: *mut abi::Plugin) -> Status {
    // SAFETY: passed on unchanged.
    unsafe { tegula_sdk::negotiate::<Panicking>(host, out, "0") }
}

/// A bug in a plugin must end as an error in the application, with its message, and not as the end of the application.
#[test]
fn panics_are_caught_at_the_boundary() {
    assert_eq!(Reference::ID, "reference");
    let (status, plugin) = negotiate(panicking, (1, 1));
    assert_eq!(status, Status::OK);
    let mut handle = null_mut();
    // SAFETY: the table is static and the pointer is to a local.
    let failure = call(|e| unsafe { (*plugin.backend).open.unwrap()(&raw mut handle, e) });
    let failure = failure.unwrap_err();
    assert_eq!(failure.status, Status::PANIC);
    assert_eq!(failure.message, "the backend panicked: no driver today");
    assert!(handle.is_null());
}
