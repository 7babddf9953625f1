//! Random models on random devices of the fake backend.

#![allow(dead_code, reason = "each test file uses its part")]

use proptest::prelude::*;
use std::path::Path;
use tegula::{Caps, DType, RegistryOptions, Runtime, RuntimeOptions, Split};
use tegula_e2e::RandomModel;
use test_tegula_fake::{
    BufferTypeConfig, DeviceConfig, Fake, Fig, HeapConfig, Installed, LayoutConfig,
};

pub(crate) const KIB: u64 = 1 << 10;

/// A runtime with these plugins and nothing else.
pub(crate) fn fake_runtime(fakes: &[&Installed], caps: Caps) -> Runtime {
    let explicit = fakes.iter().map(|fake| fake.plugin.clone()).collect();
    let registry = RegistryOptions { explicit, standard: false };
    let runtime = Runtime::new(&RuntimeOptions { registry, caps, ..Default::default() });
    assert!(runtime.registry().skipped.is_empty(), "{:?}", runtime.registry().skipped);
    runtime
}

/// Where a device keeps its keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KvHeap {
    /// With the weights.
    Same,
    /// In another heap of the same bytes.
    SamePool,
    /// In memory of its own, a fraction of the device's: one 2^n-th.
    Own(u32),
}

/// What kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Card,
    Integrated,
    Host,
}

/// A device; its sizes are powers of two, memory of what model and context take, buffers of the model's bytes.
#[derive(Debug, Clone)]
pub(crate) struct Card {
    pub(crate) kind: Kind,
    pub(crate) memory: f64,
    pub(crate) knows_free: bool,
    /// Of the greatest buffer, against the model's bytes; none is unknown.
    pub(crate) max_size: Option<f64>,
    pub(crate) preferred: Option<f64>,
    pub(crate) alignment: u64,
    pub(crate) granularity: u64,
    pub(crate) import_alignment: u64,
    pub(crate) kv_heap: KvHeap,
    pub(crate) grouped: Option<(u32, u64)>,
    pub(crate) weight_alignment: u64,
}

/// A model, the devices it is meant for, and the wishes.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) model: RandomModel,
    pub(crate) cards: Vec<Card>,
    pub(crate) n_ctx: Option<u32>,
    pub(crate) dtype_k: DType,
    pub(crate) dtype_v: DType,
    pub(crate) n_ubatch: u32,
    pub(crate) n_outputs: u32,
    pub(crate) mmap: bool,
    pub(crate) split: Split,
    pub(crate) place: Vec<String>,
}

impl Case {
    /// The smallest buffer that a case has: a few thousand chunks hold the model, and a plan is made in no time.
    fn least_buffer(&self) -> u64 {
        (self.model.tensor_bytes() / 2000).max(4 * KIB)
    }

    fn card(&self, number: usize, card: &Card) -> DeviceConfig {
        let base = self.model.tensor_bytes() as f64;
        // Near what all of it takes, so that now and then memory decides.
        let tokens = u64::from(self.n_ctx.unwrap_or(self.model.n_ctx_train));
        let rows = [self.dtype_k, self.dtype_v].map(|dtype| self.model.kv_row_bytes(dtype));
        let all = base + (rows[0] + rows[1]) as f64 * f64::from(self.model.n_layer) * tokens as f64;
        let bytes = ((all * card.memory.exp2()) as u64).max(64 * KIB);
        let name = ["A", "B", "C"][number];
        let device = match card.kind {
            Kind::Card => DeviceConfig::gpu(name, bytes),
            Kind::Integrated => DeviceConfig::integrated(name, bytes),
            Kind::Host => DeviceConfig::host(name, bytes),
        };
        let size = |power: f64| ((base * power.exp2()) as u64).max(self.least_buffer());
        let change = |kind: &mut BufferTypeConfig| {
            kind.max_size = card.max_size.map_or(Fig::unknown(), |power| size(power).into());
            kind.preferred_chunk =
                card.preferred.map_or(Fig::unknown(), |power| size(power).into());
            kind.alignment = card.alignment;
            kind.granularity = card.granularity;
            kind.import_alignment = card.import_alignment;
        };
        let device = device.buffer_type(0, change).with(|device| {
            device.weight_alignment = card.weight_alignment;
            if let Some((rows_per_group, pad)) = card.grouped {
                device.weight_layout = LayoutConfig::Grouped { rows_per_group, pad };
            }
            if !card.knows_free {
                device.heaps[0].free = Fig::unknown();
                device.heaps[0].total = Fig::unknown();
            }
        });
        let first = &device.heaps[0];
        let heap = match card.kv_heap {
            KvHeap::Same => return device,
            KvHeap::SamePool => first.clone(),
            KvHeap::Own(shift) => {
                let bytes = (bytes >> shift).max(64 * KIB);
                HeapConfig { pool: 17, total: bytes.into(), free: bytes.into(), ..first.clone() }
            }
        };
        device.with(|device| {
            let kv = BufferTypeConfig {
                name: "for kv".into(),
                heap: device.heaps.len() as u32,
                max_size: (2 * self.least_buffer()).into(),
                ..device.buffer_types[0].clone()
            };
            device.heaps.push(heap);
            device.type_for.kv = device.buffer_types.len() as u32;
            device.buffer_types.push(kv);
        })
    }

    /// The devices as the fake is told of them.
    pub(crate) fn devices(&self) -> Vec<DeviceConfig> {
        self.cards.iter().enumerate().map(|(number, card)| self.card(number, card)).collect()
    }

    pub(crate) fn selector(&self) -> String {
        let ids: Vec<String> = (0..self.cards.len()).map(|n| format!("fake:{n}")).collect();
        ids.join(",")
    }

    pub(crate) fn install(&self, folder: &Path) -> Installed {
        let fake = self.devices().into_iter().fold(Fake::new(), Fake::device);
        fake.install(folder).unwrap()
    }

    /// What goes together: no more tokens than a plan over the least buffers is made for quickly, one proportion for each device.
    fn agree(mut self) -> Self {
        let most = u32::try_from(self.least_buffer() / 8).unwrap_or(u32::MAX).min(1 << 18);
        self.n_ctx = self.n_ctx.map(|n| n.min(most));
        self.model.n_ctx_train = self.model.n_ctx_train.min(most);
        let n = self.cards.len();
        if let Split::Proportions(numbers) = &mut self.split {
            numbers.truncate(n);
            numbers[0] = numbers[0].max(0.5);
        }
        self.place.retain(|rule| rule[rule.len() - 1..].parse::<usize>().is_ok_and(|d| d < n));
        self
    }
}

/// From 1 to 2^`bits`, every magnitude alike.
pub(crate) fn magnitude(bits: f64) -> impl Strategy<Value = u32> {
    (0.0..bits).prop_map(|power: f64| power.exp2() as u32)
}

pub(crate) const KV_TYPES: [DType; 5] =
    [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0];

/// Shapes from tiny to hundreds of gigabytes, or only tiny ones.
pub(crate) fn models(tiny: bool) -> impl Strategy<Value = RandomModel> {
    let weights = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q8_0,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ];
    let (layers, embd, ff) = if tiny { (4u32, 4, 8) } else { (48, 256, 800) };
    let shape = (
        prop::sample::select(vec!["llama", "qwen2", "gemma3"]),
        1..=layers,
        1u32..=embd,
        prop::sample::select(vec![(1u32, 1u32), (4, 1), (4, 2), (6, 3), (8, 8)]),
        prop::sample::select(if tiny { vec![32u32, 64] } else { vec![32, 64, 128, 256] }),
        1u32..=ff,
        258u32..=if tiny { 320 } else { 1200 },
    );
    let rest = (
        if tiny { magnitude(9.0).boxed() } else { magnitude(10.0).prop_map(|n| n << 8).boxed() },
        any::<bool>(),
        prop::collection::vec(prop::sample::select(weights.to_vec()), 1..4),
        any::<u64>(),
    );
    (shape, rest).prop_map(|(shape, (n_ctx_train, tied, dtypes, seed))| {
        let (arch, n_layer, embd, (n_head, n_head_kv), head_dim, ff, n_vocab) = shape;
        RandomModel {
            arch,
            n_layer,
            n_embd: 32 * embd,
            n_head,
            n_head_kv,
            head_dim,
            n_ff: 32 * ff,
            n_vocab,
            n_ctx_train,
            tied,
            dtypes,
            seed,
        }
    })
}

pub(crate) fn cards(tiny: bool) -> impl Strategy<Value = Card> {
    let kinds = prop::sample::select(vec![Kind::Card, Kind::Card, Kind::Integrated, Kind::Host]);
    let memory = if tiny { 0.0..6.0 } else { -1.5..2.0 };
    let sizes = (
        memory,
        prop::bool::weighted(0.9),
        prop::option::weighted(0.9, -12.0..1.0f64),
        prop::option::of(-12.0..1.0f64),
    );
    let alignments = (
        prop::sample::select(vec![1u64, 64, 256, 4096]),
        prop::sample::select(vec![1u64, 256, 4096, 65_536]),
        prop::sample::select(vec![1u64, 64, 4096]),
        prop::sample::select(vec![1u64, 4, 64]),
    );
    let kv_heap = prop_oneof![
        3 => Just(KvHeap::Same),
        1 => Just(KvHeap::SamePool),
        1 => (0u32..6).prop_map(KvHeap::Own),
    ];
    let grouped = prop::option::weighted(
        0.25,
        (prop::sample::select(vec![2u32, 8, 16]), prop::sample::select(vec![0u64, 8, 24])),
    );
    (kinds, sizes, alignments, kv_heap, grouped).prop_map(
        |(kind, sizes, aligned, kv_heap, grouped)| {
            let (memory, knows_free, max_size, preferred) = sizes;
            let (alignment, granularity, import_alignment, weight_alignment) = aligned;
            Card {
                kind,
                memory,
                knows_free,
                max_size,
                preferred,
                alignment,
                granularity,
                import_alignment,
                kv_heap,
                grouped,
                weight_alignment,
            }
        },
    )
}

pub(crate) fn cases(tiny: bool) -> impl Strategy<Value = Case> {
    let n_ctx = if tiny { magnitude(9.0).boxed() } else { magnitude(18.0).boxed() };
    let wishes = (
        prop::option::of(n_ctx),
        prop::sample::select(KV_TYPES.to_vec()),
        prop::sample::select(KV_TYPES.to_vec()),
        prop::sample::select(vec![1u32, 7, 64, 512, 2048]),
        prop::sample::select(vec![1u32, 4, 512]),
        any::<bool>(),
    );
    let split = prop_oneof![
        2 => Just(Split::Fill),
        1 => Just(Split::None),
        1 => Just(Split::Layer),
        1 => prop::collection::vec(0.0f32..4.0, 3).prop_map(Split::Proportions),
    ];
    let places = vec![
        r"blk\.0\.ffn_=fake:0",
        r"blk\..*\.ffn_down=fake:1",
        r"blk\.[0-9]*[13579]\.attn_=fake:1",
        "token_embd=fake:1",
        "output=fake:2",
    ];
    let place = prop::collection::vec(prop::sample::select(places), 0..2);
    let devices = prop::collection::vec(cards(tiny), 1..=3);
    (models(tiny), devices, wishes, split, place).prop_map(
        |(model, cards, wishes, split, place)| {
            let (n_ctx, dtype_k, dtype_v, n_ubatch, n_outputs, mmap) = wishes;
            let place = place.into_iter().map(str::to_owned).collect();
            let case = Case {
                model,
                cards,
                n_ctx,
                dtype_k,
                dtype_v,
                n_ubatch,
                n_outputs,
                mmap,
                split,
                place,
            };
            case.agree()
        },
    )
}
