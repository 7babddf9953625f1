//! Threads, and orders of making and freeing. What a handle needs lives as long as the handle does.

use super::PASSED;
use crate::case::Case;
use crate::cases::chain;
use crate::report::Outcome;
use crate::session::{Place, Rig, Session};
use crate::suite::scratch_chunk_max;
use crate::{Fault, Result, compare, wrong};
use std::sync::Arc;
use tegula_plugin::{
    Backend, Buffer, BufferDesc, BufferUsage, CompileOptions, Device, DeviceOptions, Executable,
    InputData, OutputData, Queue, RunArgs,
};
use tegula_program::ffi::FfiProgram;
use tegula_program::{DType, Dim, ProgramBuilder};

/// Runs of each thread.
const RUNS: usize = 20;

/// Runs all steps of the case again and again, and compares.
fn hammer(rig: &mut Rig, case: &Case, wanted: &[Vec<Vec<u8>>]) -> Result<()> {
    let most = scratch_chunk_max(rig);
    let bound = case.bound_on(rig);
    let mut session = Session::new(rig, case, most)?;
    for run in 0..RUNS {
        let place = if run % 2 == 0 { Place::Host } else { Place::Device };
        for (step, wanted) in case.steps.iter().zip(wanted) {
            for (got, want) in session.run(step, place)?.iter().zip(wanted) {
                compare::check(DType::F32, got, want, bound)?;
            }
        }
    }
    session.check_surroundings()
}

/// Runs on both rigs at once, each with data of its own.
fn at_once(rigs: &mut [Rig; 2], oracle: &Backend) -> Result<Outcome> {
    let cases = [chain::residual("threads/first", 2)?, chain::residual("threads/second", 3)?];
    let mut oracle = Rig::open(oracle, 0)?;
    let mut wanted = Vec::new();
    for case in &cases {
        let most = scratch_chunk_max(&oracle);
        let mut session = Session::new(&mut oracle, case, most)?;
        let steps = case.steps.iter().map(|step| session.run(step, Place::Host));
        wanted.push(steps.collect::<Result<Vec<_>>>()?);
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = rigs
            .iter_mut()
            .zip(cases.iter().zip(&wanted))
            .map(|(rig, (case, wanted))| scope.spawn(move || hammer(rig, case, wanted)))
            .collect();
        for thread in threads {
            thread.join().unwrap_or_else(|_| wrong("a thread of the suite panicked"))?;
        }
        Ok(PASSED)
    })
}

pub(super) fn queues_at_once(backend: &Backend, index: u32, oracle: &Backend) -> Result<Outcome> {
    let first = Rig::open(backend, index)?;
    let second = Rig { device: first.device.clone(), queue: first.device.queue()? };
    at_once(&mut [first, second], oracle)
}

pub(super) fn devices_at_once(backend: &Backend, index: u32, oracle: &Backend) -> Result<Outcome> {
    at_once(&mut [Rig::open(backend, index)?, Rig::open(backend, index)?], oracle)
}

/// A doubling executable with its scratch: no weights, so that it can be passed around.
struct Doubler {
    executable: Executable,
    scratch: Vec<Buffer>,
}

impl Doubler {
    fn new(device: &Device) -> Result<Self> {
        let mut b = ProgramBuilder::new("double");
        let x = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(8)]);
        let y = b.scale(x, 2.0);
        b.output("y", y);
        let options = CompileOptions {
            n_tokens_max: 4,
            n_outputs_max: 1,
            n_seqs_max: 1,
            n_ctx_max: 1,
            scratch_type: device.info().type_for_scratch,
            scratch_chunk_max: 1 << 20,
        };
        let executable = device.compile(&FfiProgram::new(&b.finish()?), &options, &[])?;
        let mut scratch = Vec::new();
        for piece in &executable.memory().scratch {
            let usage = BufferUsage::SCRATCH;
            let desc =
                BufferDesc { size: piece.size.max(1), buffer_type: options.scratch_type, usage };
            scratch.push(device.alloc(&desc)?);
        }
        Ok(Self { executable, scratch })
    }

    /// Doubles `x` 32 times over.
    fn run(&self, queue: &mut Queue, x: f32) -> Result<()> {
        let spans: Vec<_> = self.scratch.iter().map(Buffer::whole).collect();
        let mut host = (crate::session::HostBytes::new(128), crate::session::HostBytes::new(128));
        host.0.get_mut().copy_from_slice(&crate::data::f32_bytes(&[x; 32]));
        let mut args = RunArgs {
            n_tokens: 4,
            n_outputs: 0,
            inputs: &[InputData::Host(host.0.get())],
            outputs: &mut [OutputData::Host(host.1.get_mut())],
            scratch: &spans,
            seqs: &[],
            kv: &[],
            state: None,
        };
        queue.run(&self.executable, &mut args)?;
        let got = crate::data::f32s(host.1.get());
        if got == [2.0 * x; 32] { Ok(()) } else { wrong(format!("twice {x} is {got:?}")) }
    }
}

/// Two threads use one executable, each through a queue of its own: runs exclude each other, and nobody gets the other's results.
pub(super) fn executable_shared(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    let device = Device::open(backend, index, DeviceOptions::default())?;
    let doubler = Doubler::new(&device)?;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for first in [1.0f32, 1000.0] {
            let (device, doubler) = (&device, &doubler);
            threads.push(scope.spawn(move || {
                let mut queue = device.queue()?;
                let mut runs = (0..RUNS * 10).map(|i| first + i as f32);
                runs.try_for_each(|x| doubler.run(&mut queue, x))
            }));
        }
        for thread in threads {
            thread.join().unwrap_or_else(|_| wrong("a thread of the suite panicked"))?;
        }
        Ok(PASSED)
    })
}

/// Everything is made, then all but one thing is dropped, in every rotation; what is left is used where it can be, and goes last.
pub(super) fn orders(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    type Thing = Box<dyn std::any::Any + Send>;
    const N: usize = 4;
    for rotation in 0..N {
        for is_backward in [false, true] {
            let device = Device::open(backend, index, DeviceOptions::default())?;
            let mut queue = device.queue()?;
            let kind = device.info().type_for_weights;
            let desc = BufferDesc { size: 4096, buffer_type: kind, usage: BufferUsage::ANY };
            let buffer = Arc::new(device.alloc(&desc)?);
            queue.write(&buffer, 0, &[7; 64])?;
            let doubler = Doubler::new(&device)?;
            doubler.run(&mut queue, 3.0)?;
            let mut things: Vec<Thing> =
                vec![Box::new(device), Box::new(queue), Box::new(buffer), Box::new(doubler)];
            things.rotate_left(rotation);
            if is_backward {
                things.reverse();
            }
            while let Some(thing) = things.pop() {
                drop(thing);
            }
        }
    }
    // A queue, a buffer and an executable work when the device's own handle is gone.
    let device = Device::open(backend, index, DeviceOptions::default())?;
    let (mut queue, doubler) = (device.queue()?, Doubler::new(&device)?);
    drop(device);
    doubler.run(&mut queue, 5.0)?;
    drop(doubler);
    drop(queue);
    Ok(PASSED)
}

/// A device that is opened and closed many times leaves no thread and no file open.
pub(super) fn again(backend: &Backend, index: u32, _: &Backend) -> Result<Outcome> {
    let once = || -> Result<()> {
        let device = Device::open(backend, index, DeviceOptions::default())?;
        Doubler::new(&device)?.run(&mut device.queue()?, 1.0)
    };
    let count = |what: &str| {
        let entries = std::fs::read_dir(what).map_err(|e| Fault::Wrong(format!("{what}: {e}")));
        Ok::<_, Fault>(entries?.count())
    };
    once()?;
    let census = || Ok::<_, Fault>((count("/proc/self/task")?, count("/proc/self/fd")?));
    let before = census()?;
    for _ in 0..RUNS {
        once()?;
    }
    // Other tests of the process have threads of their own, which come and go: a leak grows with every turn.
    let (tasks, files) = census()?;
    if tasks >= before.0 + RUNS || files >= before.1 + RUNS {
        return wrong(format!("threads and files {before:?} became {:?}", (tasks, files)));
    }
    Ok(PASSED)
}
