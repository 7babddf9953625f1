//! The plugin's symbol: the negotiation, and the tables as the configuration wants them stated.

use crate::builder::config_beside;
use crate::config::{Config, FaultKind, Point};
use crate::failure::{Failure, Result, guard, put_sized, sized};
use crate::faults::{happen, is_struck};
use crate::{backend, device};
use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use tegula_abi::{self as abi, BackendTable, DeviceTable, Status};

/// The variable that names the configuration, or holds it.
const VARIABLE: &str = "TEGULA_FAKE_CONFIG";
/// Bytes that follow a table, so that it may be stated longer than it is.
const BEYOND: usize = 64;

/// The host's record of the last negotiation, for the inner backend.
static HOST: AtomicPtr<abi::Host> = AtomicPtr::new(std::ptr::null_mut());
/// Negotiations so far.
static NEGOTIATIONS: AtomicU64 = AtomicU64::new(0);

/// What a negotiation depends on.
type Key = (String, String, String, Vec<(String, i64)>, Vec<String>);

/// What the answer points to: made once for each key and never freed, since it has to be static.
struct Answer {
    id: String,
    version: String,
    description: String,
    backend: Padded<BackendTable>,
    device: Padded<DeviceTable>,
}

#[repr(C)]
struct Padded<T> {
    table: T,
    _beyond: [u8; BEYOND],
}

/// The plugin's entry.
///
/// # Safety
/// As the boundary says: `host` and `out` are null or valid, `host` for as long as the plugin is loaded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tegula_backend_v1(
    host: *const abi::Host,
    out: *mut abi::Plugin,
) -> Status {
    let mut status = Status::OK;
    let run = || {
        // SAFETY: valid or null by the caller's word.
        status = unsafe { negotiate(host, out) }?;
        Ok(())
    };
    // SAFETY: a null record is allowed.
    let guarded = unsafe { guard(std::ptr::null_mut(), run) };
    if guarded == Status::OK { status } else { guarded }
}

/// # Safety
/// As [`tegula_backend_v1`].
unsafe fn negotiate(host: *const abi::Host, out: *mut abi::Plugin) -> Result<Status> {
    // SAFETY: valid or null by the caller's word.
    let hosts: abi::Host = unsafe { sized(host) }?;
    HOST.store(host.cast_mut(), Ordering::Release);
    let config = config().inspect_err(|failure| {
        // A negotiation has no record to say it in.
        eprintln!("tegula-fake: {failure:?}");
    })?;
    let n = NEGOTIATIONS.fetch_add(1, Ordering::Relaxed) + 1;
    let answer = answer(&config)?;
    let mut plugin = abi::Plugin {
        struct_size: size_of::<abi::Plugin>(),
        revision_min: config.revisions[0],
        revision_max: config.revisions[1],
        id: abi::Str::of(&answer.id),
        version: abi::Str::of(&answer.version),
        description: abi::Str::of(&answer.description),
        backend: &raw const answer.backend.table,
    };
    let faults = config.faults.iter().filter(|f| f.at == Point::Negotiate && is_struck(f, n));
    for fault in faults {
        happen(fault, 0)?;
        if fault.kind == FaultKind::Null {
            plugin.backend = std::ptr::null();
        }
    }
    let size = config.stated_size("plugin", size_of::<abi::Plugin>());
    // SAFETY: valid or null by the caller's word.
    unsafe { put_sized(out, &plugin, size) }?;
    let has_common =
        hosts.revision_max >= config.revisions[0] && hosts.revision_min <= config.revisions[1];
    let is_fine = has_common || !config.refuses_revisions;
    Ok(if is_fine { Status::OK } else { Status::INCOMPATIBLE })
}

/// The host's record.
pub(crate) fn host() -> *const abi::Host {
    HOST.load(Ordering::Acquire)
}

/// The configuration as it is now.
pub(crate) fn config() -> Result<Config> {
    let own = own_file().map(|file| config_beside(&file)).filter(|file| file.is_file());
    let text = match (own, std::env::var_os(VARIABLE)) {
        (Some(path), _) => read(&path)?,
        (None, Some(value)) if value.as_bytes().starts_with(b"{") => {
            value.to_string_lossy().into_owned()
        }
        (None, Some(value)) => read(Path::new(&value))?,
        (None, None) => return Ok(Config::default()),
    };
    serde_json::from_str(&text).map_err(|e| Failure::from(e.to_string()))
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| Failure::from(format!("{}: {e}", path.display())))
}

/// The plugin's file, as the dynamic linker was given it.
pub(crate) fn own_file() -> Option<PathBuf> {
    let address = tegula_backend_v1 as *const c_void;
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is writable, and all-zero bytes are a valid Dl_info; the address is only compared. The name lives as long as
    // this file is mapped.
    let name = unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        let name = info.assume_init().dli_fname;
        if name.is_null() {
            return None;
        }
        CStr::from_ptr(name)
    };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

fn answer(config: &Config) -> Result<&'static Answer> {
    static ANSWERS: Mutex<Vec<(Key, &'static Answer)>> = Mutex::new(Vec::new());
    let sizes = config.struct_sizes.iter().map(|(name, delta)| (name.clone(), *delta)).collect();
    let Config { id, version, description, missing, .. } = config.clone();
    let key: Key = (id.clone(), version.clone(), description.clone(), sizes, missing);
    let mut answers = ANSWERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, answer)) = answers.iter().find(|(known, _)| *known == key) {
        return Ok(answer);
    }
    let mut device = Padded { table: device::TABLE, _beyond: [0; BEYOND] };
    let mut backend = Padded { table: backend::TABLE, _beyond: [0; BEYOND] };
    for name in &config.missing {
        if !remove(&mut backend.table, &mut device.table, name) {
            return Err(Failure::from(format!("`{name}` is no function of a table")));
        }
    }
    device.table.struct_size = config.stated_size("device_table", size_of::<DeviceTable>());
    backend.table.struct_size = config.stated_size("backend_table", size_of::<BackendTable>());
    let answer = Box::leak(Box::new(Answer { id, version, description, backend, device }));
    answer.backend.table.device = &raw const answer.device.table;
    answers.push((key, answer));
    Ok(answer)
}

/// Takes a function out of its table.
fn remove(backend: &mut BackendTable, device: &mut DeviceTable, name: &str) -> bool {
    macro_rules! functions {
        ($($table:ident: $($function:ident)*;)*) => {
            match name {
                $($(concat!(stringify!($table), ".", stringify!($function)) => {
                    $table.$function = None;
                })*)*
                _ => return false,
            }
        };
    }
    functions! {
        backend: open close device_count device_info heap_info buffer_type_info device_open extension;
        device: close buffer_alloc buffer_import buffer_free buffer_map weight_layout program_supports
            program_memory program_compile executable_free queue_create queue_free queue_write queue_read
            queue_copy queue_upload queue_run queue_wait;
    }
    true
}
