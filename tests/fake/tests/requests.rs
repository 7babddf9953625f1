//! Requests on a device that fails in the middle of one: that request ends with an error, every other goes on, and a lost device is known as
//! such. What a server stands or falls with.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use common::{assert_clean, model_file};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use tegula::{
    Error, GenerateOptions, Model, ModelOptions, Outputs, PlanOptions, RegistryOptions, Runtime,
    RuntimeOptions, Sampler, SamplerOptions, Sequence,
};
use tegula_plugin::{DeviceError, DeviceErrorKind as Kind};
use test_tegula_fake::*;

const N_PREDICT: u32 = 12;

fn runtime(fake: &Installed) -> Runtime {
    let registry = RegistryOptions { explicit: vec![fake.plugin.clone()], standard: false };
    Runtime::new(&RuntimeOptions { registry, ..Default::default() })
}

fn open(runtime: &Runtime, file: &Path, device: u32) -> Result<Model, Error> {
    // The KV cache grows while a request is decoded, so that its allocations are among the steps.
    let plan = PlanOptions { n_ctx: Some(64), n_ubatch: 16, n_parallel: 2, ..Default::default() };
    let options =
        ModelOptions { device: Some(format!("fake:{device}")), plan, ..Default::default() };
    Model::open(runtime, file, &options, &mut |_| {})
}

/// One request, greedily: its tokens.
fn request(model: &Model) -> Result<Vec<u32>, Error> {
    let mut sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..Default::default() })?;
    let options =
        GenerateOptions { n_predict: Some(N_PREDICT), ignore_eog: true, ..Default::default() };
    let (prompt, go_on) = ([3, 40, 77, 114, 151], AtomicBool::new(false));
    let mut sequence = model.sequence();
    Ok(tegula::generate(&mut sequence, &prompt, &mut sampler, options, &go_on, |_| {})?.tokens)
}

fn step(sequence: &mut Sequence, tokens: &[u32]) -> Result<Vec<f32>, Error> {
    let mut last = Vec::new();
    sequence.eval(tokens, Outputs::Last, &AtomicBool::new(false), |_, row| {
        last = row.to_vec();
        Ok(())
    })?;
    Ok(last)
}

fn device_error(error: &Error) -> &DeviceError {
    match error {
        Error::Device(own) => own,
        Error::Alloc { source, .. } => source,
        other => panic!("no failure of a device: {other}"),
    }
}

fn gpu() -> DeviceConfig {
    DeviceConfig::gpu("A", 64 * MIB).max_size(64 * KIB)
}

/// The k-th step of a request fails, for every k and in several ways: that request ends with its error, and nothing else. A conversation that
/// was there before and the next request give what they give on a sound device, on the model as it is.
#[test]
fn a_request_fails_and_the_next_succeeds() {
    let Some(file) = model_file() else { return };
    let dir = tempfile::tempdir().unwrap();
    let plain = Fake::new().device(gpu()).install(&dir.path().join("plain")).unwrap();
    let plain = open(&runtime(&plain), &file, 0).unwrap();
    let (tokens, logits) = (request(&plain).unwrap(), {
        let mut sequence = plain.sequence();
        step(&mut sequence, &[9, 8, 7]).unwrap();
        step(&mut sequence, &[6]).unwrap()
    });
    assert_eq!(tokens.len(), N_PREDICT as usize);
    for (at, status, kind, deferred) in [
        (Point::Run, "driver", Kind::Driver, false),
        (Point::Run, "out_of_memory", Kind::OutOfMemory, false),
        (Point::Run, "driver", Kind::Driver, true),
        (Point::Wait, "driver", Kind::Driver, false),
    ] {
        let mut n_failed = 0;
        for k in 1..=40 {
            let what = format!("{at:?} {k}: {status}, deferred {deferred}");
            // The first call is that of the conversation.
            let fault = Fault::new(at, FaultKind::error(status)).nth(k + 1);
            let fault = Fault { deferred, ..fault };
            let fake = Fake::new().device(gpu()).fault(fault);
            let fake = fake.install(&dir.path().join(&what)).unwrap();
            let runtime = runtime(&fake);
            let Ok(model) = open(&runtime, &file, 0) else { continue };
            let mut conversation = model.sequence();
            if step(&mut conversation, &[9, 8, 7]).is_err() {
                // Loading waits too, so that call 2 may be the conversation's own.
                continue;
            }
            let first = request(&model);
            let is_over = first.is_ok();
            match first {
                Ok(found) => assert_eq!(found, tokens, "{what}"),
                Err(error) => {
                    assert_eq!(device_error(&error).kind, kind, "{what}: {error}");
                    n_failed += 1;
                    assert_eq!(request(&model).unwrap(), tokens, "{what}: the next request");
                    assert_eq!(step(&mut conversation, &[6]).unwrap(), logits, "{what}: the other");
                }
            }
            assert!(!model.is_lost(), "{what}");
            drop((conversation, model, runtime));
            assert_clean(&fake, &what);
            if is_over {
                break;
            }
        }
        assert!(n_failed >= N_PREDICT, "{at:?} {status}: only {n_failed} steps were struck");
    }
}

/// A device that is lost, or whose plugin panicked, ends every request on it by that kind of error and is known as lost; other devices go on,
/// and a model that is loaded anew answers, while the old one is still there.
#[test]
fn a_lost_device_is_known_as_lost() {
    let Some(file) = model_file() else { return };
    for (kind, expected) in [
        (FaultKind::DeviceLost, Kind::DeviceLost),
        (FaultKind::error("device_lost"), Kind::DeviceLost),
        (FaultKind::Panic, Kind::Panic),
    ] {
        for k in [1, 2, 7] {
            let dir = tempfile::tempdir().unwrap();
            let what = format!("{kind:?} at step {k}");
            let fault = Fault::new(Point::Run, kind.clone()).device(0).nth(k);
            let fake = Fake::new().device(gpu()).device(gpu()).fault(fault);
            let fake = fake.install(dir.path()).unwrap();
            let runtime = runtime(&fake);
            let (model, other) =
                (open(&runtime, &file, 0).unwrap(), open(&runtime, &file, 1).unwrap());
            let tokens = request(&other).unwrap();
            let first = request(&model).unwrap_err();
            assert_eq!(device_error(&first).kind, expected, "{what}: {first}");
            assert!(model.is_lost() && !other.is_lost(), "{what}");
            for _ in 0..2 {
                let next = request(&model).unwrap_err();
                assert_eq!(device_error(&next).kind, Kind::DeviceLost, "{what}: {next}");
                assert!(next.to_string().contains("fake:0"), "{what}: {next}");
            }
            assert_eq!(request(&other).unwrap(), tokens, "{what}: the other device");
            // The fault counts its calls from the open of the backend: this one is struck later, if at all.
            let again = self::runtime(&fake);
            let reloaded = open(&again, &file, 0).unwrap();
            assert!(!reloaded.is_lost() && model.is_lost(), "{what}");
            if k > 1 {
                step(&mut reloaded.sequence(), &[3]).unwrap();
            }
            drop((model, other, runtime, reloaded, again));
            assert_clean(&fake, &what);
        }
    }
}
