//! The slow, obvious backend: the oracle for all others, and the template that authors copy.
//!
//! It runs on the host's processor, one thing after the other. Every op is a plain function over slices that accumulates in
//! f64 and stores f32, so that its results can be checked by hand and other backends can be measured against them.
//!
//! # Decisions
//! * **One thread, no kernels.** A weight row is decoded once per op and used for all tokens; nothing else is done for speed.
//! * **`unsafe` stays at the edge.** Buffers and the queue touch raw memory; values, weights and ops never do.
//! * **Everything is checked.** Ranges, rows, token ids, positions and KvBlock ids of a wrong host come back as errors that name
//!   them. Fast backends may rely on what the core promises; this one is also the test of the core.
//! * **Memory is stated.** Values live in scratch as [`tegula_sdk::scratch`] plans it. What an op copies out of it
//!   to work on is stated as host memory, for the greatest op, before anything is compiled.
//!
//! # A recipe for a new backend
//! 1. Copy this folder, rename the package and [`Backend::ID`](tegula_sdk::Backend::ID). It builds a plugin at once: `crate-type` makes the
//!    shared object, [`export_backend!`](tegula_sdk::export_backend) its two symbols.
//! 2. `backend.rs`: load the driver in `open` (never earlier), list devices, and state their heaps and buffer types. Take `max_size` from
//!    the driver, as the minimum of all that binds. What cannot be found out is `Figure::UNKNOWN`, never a guess.
//! 3. `device.rs`: allocate exactly what is asked or fail with the numbers. State in `weight_layout` how weights are to lie, and write them so
//!    in `Queue::upload`. State in `memory` all that a compiled program takes.
//! 4. `supports`: say `false` for every op that is not written yet. The core runs those elsewhere, so the first op that works is already useful.
//! 5. `executable.rs` and `ops/`: replace the walk over ops by whatever the device wants: recorded commands, generated code, a graph.
//! 6. `queue.rs`: this one is done when a call returns. One that works later returns the fence value at which it will be done,
//!    and keeps an error for `wait`.
//! 7. Compare each op with this backend over shapes, types and tilings until the results agree.

mod backend;
#[expect(unsafe_code, reason = "copies bytes to and from memory that the core owns")]
mod buffer;
#[expect(unsafe_code, reason = "imports are memory that the core owns")]
mod device;
mod executable;
mod ops;
#[expect(unsafe_code, reason = "the core hands raw pointers to a queue")]
mod queue;
mod values;
mod weight;

pub use backend::Reference;
pub use device::ReferenceDevice;
pub use executable::Executable;
pub use queue::Queue;

tegula_sdk::export_backend!(Reference);
