//! Several sequences evaluated together: each gets what it gets alone, and one that is refused disturbs nobody.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::atomic::AtomicBool;
use tegula::{BatchItem, Caps, DType, Error, Model, ModelOptions, Outputs, PlanOptions, Sequence};
use tegula_e2e::{argmax, golden, runtime_with};

/// Prompts of different lengths: some longer than a ubatch.
const PROMPTS: [&[u32]; 5] =
    [&[7], &[8, 9, 10], &[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], &[400, 3, 77, 5], &[1, 2]];
const N_GENERATED: usize = 6;

fn open(folder: &str, device: &str, n_ctx: u32, n_parallel: u32) -> Option<Model> {
    let path = golden("tiny")?.join(folder).join("model-f32.gguf");
    let plan = PlanOptions {
        n_ctx: Some(n_ctx),
        dtype_k: DType::F32,
        dtype_v: DType::F32,
        n_ubatch: 8,
        n_parallel,
        ..PlanOptions::default()
    };
    let options = ModelOptions { device: Some(device.into()), plan, ..ModelOptions::default() };
    let runtime = runtime_with(Caps { max_buffer: Some(320 << 10), memory_limit: None });
    Some(Model::open(&runtime, path, &options, &mut |_| {}).unwrap())
}

/// Greedy text and last logits of each prompt, `together` or one after the other.
fn texts(model: &Model, together: bool) -> Vec<(Vec<u32>, Vec<f32>)> {
    let mut texts: Vec<(Vec<u32>, Vec<f32>)> = vec![Default::default(); PROMPTS.len()];
    let groups: Vec<Vec<usize>> = match together {
        true => vec![(0..PROMPTS.len()).collect()],
        false => (0..PROMPTS.len()).map(|i| vec![i]).collect(),
    };
    for group in groups {
        let mut sequences: Vec<Sequence> = group.iter().map(|_| model.sequence()).collect();
        let mut next: Vec<Vec<u32>> = group.iter().map(|i| PROMPTS[*i].to_vec()).collect();
        for _ in 0..N_GENERATED {
            let tokens = next.clone();
            let mut items: Vec<BatchItem<'_>> =
                sequences.iter_mut().zip(&tokens).map(|(s, t)| BatchItem::new(s, t)).collect();
            let whole = model.eval_batch(&mut items, &AtomicBool::new(false), |item, pos, row| {
                let (text, logits) = &mut texts[group[item]];
                assert_eq!(pos as usize, PROMPTS[group[item]].len() + text.len() - 1);
                text.push(argmax(row));
                *logits = row.to_vec();
                next[item] = vec![argmax(row)];
                Ok(())
            });
            assert!(whole.unwrap() && items.iter().all(|item| item.refusal.is_none()));
        }
    }
    texts
}

/// A server whose clients change each other's answers is of no use.
#[test]
fn together_is_as_alone() {
    for folder in ["llama_rope3", "gemma3", "qwen3_5", "mixtral"] {
        for device in ["reference", "cpu"] {
            let Some(model) = open(folder, device, 256, 5) else { return };
            let (alone, together) = (texts(&model, false), texts(&model, true));
            for ((text, logits), (text_2, logits_2)) in alone.iter().zip(&together) {
                assert_eq!(text, text_2, "{folder} on {device}");
                assert_eq!(text.len(), N_GENERATED);
                // Kernels for several tokens add in another order.
                let most = logits.iter().zip(logits_2).map(|(a, b)| (a - b).abs());
                let most = most.fold(0.0, f32::max);
                assert!(most < 2e-4, "{folder} on {device}: logits differ by {most}");
            }
        }
    }
}

/// Full contexts and wrong tokens happen to one client at a time: the others must get their rows, and the refused sequence keeps what it had.
#[test]
fn a_refusal_is_its_own() {
    let Some(model) = open("llama_rope3", "cpu", 256, 2) else { return };
    let Some(other) = open("llama_rope3", "cpu", 256, 2) else { return };
    let long: Vec<u32> = (1..=300).collect();
    let wrong = [1, 1 << 20];
    type IsExpected = fn(&Error) -> bool;
    let cases: [(&[u32], IsExpected); 2] = [
        (&long, |e| matches!(e, Error::ContextFull { n_ctx: 256, used: 3, asked: 300 })),
        (&wrong, |e| matches!(e, Error::TokenOutOfRange { .. })),
    ];
    for (tokens, is_expected) in cases {
        let (mut good, mut bad, mut foreign) =
            (model.sequence(), model.sequence(), other.sequence());
        let never = AtomicBool::new(false);
        bad.eval(&[1, 2, 3], Outputs::Last, &never, |_, _| Ok(())).unwrap();
        let mut items = [
            BatchItem::new(&mut bad, tokens),
            BatchItem::new(&mut good, &[5, 6]),
            BatchItem::new(&mut foreign, &[5, 6]),
        ];
        let mut rows = Vec::new();
        let whole = model.eval_batch(&mut items, &never, |item, pos, _| {
            rows.push((item, pos));
            Ok(())
        });
        assert!(whole.unwrap());
        assert!(items[0].refusal.as_ref().is_some_and(is_expected), "{:?}", items[0].refusal);
        assert!(matches!(items[2].refusal, Some(Error::OtherModel)));
        assert_eq!(rows, [(1, 1)]);
        assert_eq!((bad.n_past(), good.n_past(), foreign.n_past()), (3, 2, 0));
        // Two hold the cache, so a third is one too many, and is told so alone.
        let mut third = model.sequence();
        let mut items = [BatchItem::new(&mut third, &[1]), BatchItem::new(&mut good, &[7])];
        assert!(model.eval_batch(&mut items, &never, |_, _, _| Ok(())).unwrap());
        let refusal = items[0].refusal.take();
        assert!(matches!(refusal, Some(Error::TooManySequences { n_parallel: 2 })), "{refusal:?}");
        assert_eq!((third.n_past(), good.n_past()), (0, 3));
    }
}
