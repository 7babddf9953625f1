//! Ways to come to the end of a process, or of the core in it, with something of a model alive or not.

use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tegula::{
    Model, ModelOptions, Outputs, PlanOptions, RegistryOptions, Runtime, RuntimeOptions, Sequence,
};

/// Never dropped: what C++ would destroy after `main`, Rust leaves alone.
static KEPT: OnceLock<(Runtime, Model)> = OnceLock::new();
/// Steps of threads that decode for ever.
static STEPS: AtomicU64 = AtomicU64::new(0);

fn open(plugin: &Path, model: &Path) -> (Runtime, Model) {
    let registry = RegistryOptions { explicit: vec![plugin.to_owned()], standard: false };
    let runtime = Runtime::new(&RuntimeOptions { registry, ..Default::default() });
    let id = format!("{}:0", runtime.registry().backends[0].id());
    // One sequence may decode beside the first.
    let plan = PlanOptions { n_ctx: Some(512), n_ubatch: 32, n_parallel: 2, ..Default::default() };
    let options = ModelOptions { device: Some(id), plan, ..Default::default() };
    let model = Model::open(&runtime, model, &options, &mut |_| {}).unwrap();
    (runtime, model)
}

fn eval(sequence: &mut Sequence, tokens: &[u32]) {
    let mut n = 0;
    let go_on = AtomicBool::new(false);
    let rows = sequence.eval(tokens, Outputs::Last, &go_on, |_, row| {
        n += usize::from(row.iter().all(|x| x.is_finite()));
        Ok(())
    });
    rows.unwrap();
    assert_eq!(n, 1);
}

/// Decodes until the process is gone.
fn decode_for_ever(mut sequence: Sequence, model: &Model) {
    loop {
        if sequence.n_past() > 400 {
            sequence = model.sequence();
        }
        eval(&mut sequence, &[7]);
        STEPS.fetch_add(1, Ordering::SeqCst);
    }
}

/// Starts a thread that decodes, and returns in the middle of its work.
fn begin_decoding((runtime, model): (Runtime, Model)) {
    let (_, model) = KEPT.get_or_init(|| (runtime, model));
    std::thread::spawn(|| decode_for_ever(model.sequence(), model));
    while STEPS.load(Ordering::SeqCst) < 3 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Does what is named; the caller then ends. `false` for a name that is none.
pub fn run(plugin: &Path, model: &Path, name: &str) -> bool {
    let (runtime, model) = open(plugin, model);
    let mut sequence = model.sequence();
    eval(&mut sequence, &[3, 5, 7]);
    match name {
        "dropped in order" => {
            drop(sequence);
            drop(model);
            drop(runtime);
        }
        "model after runtime" => {
            drop(runtime);
            eval(&mut sequence, &[9]);
            drop(sequence);
            drop(model);
        }
        "sequence last" => {
            drop(runtime);
            drop(model);
            eval(&mut sequence, &[9]);
        }
        "sequence last, on a thread" => {
            drop(runtime);
            drop(model);
            std::thread::spawn(move || eval(&mut sequence, &[9])).join().unwrap();
        }
        "two runtimes" => {
            let path = runtime.registry().backends[0].path().to_owned();
            let registry = RegistryOptions { explicit: vec![path], standard: false };
            let other = Runtime::new(&RuntimeOptions { registry, ..Default::default() });
            drop(runtime);
            eval(&mut sequence, &[9]);
            drop((sequence, model));
            assert_eq!(other.devices().len(), 1);
        }
        "leaked" => {
            Box::leak(Box::new((runtime, model, sequence)));
        }
        "static" => {
            drop(sequence);
            KEPT.get_or_init(|| (runtime, model));
        }
        "in a thread's local" => {
            thread_local! { static HELD: std::cell::RefCell<Vec<(Runtime, Model, Sequence)>> = const { std::cell::RefCell::new(Vec::new()) }; }
            HELD.with_borrow_mut(|held| held.push((runtime, model, sequence)));
        }
        "decoding" => begin_decoding((runtime, model)),
        "exit" => exit_now(0, (runtime, model, sequence)),
        "exit while decoding" => {
            begin_decoding((runtime, model));
            exit_now(0, ());
        }
        "_exit while decoding" => {
            begin_decoding((runtime, model));
            // SAFETY: ends the process; that is the case.
            unsafe { libc::_exit(0) }
        }
        _ => return false,
    }
    true
}

#[expect(clippy::exit, reason = "the end of the process is what is tested")]
fn exit_now<T>(code: i32, _alive: T) -> ! {
    std::process::exit(code)
}
