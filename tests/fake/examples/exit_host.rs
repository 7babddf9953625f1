//! A host that ends: `exit_host PLUGIN MODEL SCENARIO`, and with `CORE.so` before these, one that has the core in that library and closes it
//! before it ends. Whatever is alive by then, the exit code is 0.

#![expect(unsafe_code, reason = "opens a library, and ends in ways of C")]
#![allow(
    clippy::unwrap_used,
    missing_docs,
    unreachable_pub,
    reason = "a program for tests: what cannot go on fails"
)]

#[path = "exit/scenario.rs"]
mod scenario;

use std::ffi::{CString, c_char};
use std::path::Path;

type Run = unsafe extern "C" fn(*const c_char, *const c_char, *const c_char) -> i32;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [plugin, model, name] => assert!(scenario::run(Path::new(plugin), Path::new(model), name)),
        [core, texts @ ..] if texts.len() == 3 => {
            let texts: Vec<CString> =
                texts.iter().map(|t| CString::new(t.as_str()).unwrap()).collect();
            // SAFETY: a library of the tests, whose function has this type; it is closed after its last use.
            unsafe {
                let core = libloading::Library::new(core).unwrap();
                let run = *core.get::<Run>("exit_core_run").unwrap();
                assert_eq!(run(texts[0].as_ptr(), texts[1].as_ptr(), texts[2].as_ptr()), 0);
                core.close().unwrap();
            }
        }
        _ => panic_usage(),
    }
    println!("end of main");
}

#[expect(clippy::panic, reason = "a program for tests")]
fn panic_usage() -> ! {
    panic!("three arguments, or four")
}
