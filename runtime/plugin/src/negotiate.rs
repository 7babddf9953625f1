//! The negotiation with an opened plugin: what the host offers, and what of the answer is believed.

use crate::error::{SkipReason, one_line};
use crate::library::Library;
use crate::search::is_id;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use tegula_abi::{self as abi, BackendTable, DeviceTable, LogLevel, Status, Str};

/// Longest text of a plugin that is read: version, description, or one log record.
const MAX_TEXT: usize = 64 * 1024;
/// Lines of a layout difference that are shown; most differences are told in fewer.
const MAX_LAYOUT_LINES: usize = 12;

/// A plugin that negotiated well, with its tables. Dropping it unloads the library.
#[derive(Debug)]
pub(crate) struct Plugin {
    pub(crate) id: String,
    pub(crate) version: String,
    pub(crate) description: String,
    pub(crate) path: PathBuf,
    pub(crate) revision: u32,
    /// Oldest and newest that it speaks.
    pub(crate) revisions: (u32, u32),
    pub(crate) backend: BackendTable,
    pub(crate) device: DeviceTable,
    /// What the tables point into; the strings above are copies.
    _library: Library,
}

/// What a host record's `ctx` points to.
struct HostContext {
    /// `tegula_<id>`, where records of this plugin belong.
    target: String,
}

/// The host record for the plugins of one file name. Made once and never freed: a library that is mapped for two registries keeps
/// the record of either, and may log until its last handle is closed. There are as many as there are ids and log levels.
fn host_record(id: &str) -> &'static abi::Host {
    type Records = BTreeMap<(String, log::LevelFilter), &'static abi::Host>;
    static RECORDS: Mutex<Records> = Mutex::new(BTreeMap::new());
    let key = (id.to_owned(), log::max_level());
    let mut records = RECORDS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(record) = records.get(&key) {
        return record;
    }
    let context = Box::leak(Box::new(HostContext { target: format!("tegula_{id}") }));
    let record: &'static abi::Host = Box::leak(Box::new(abi::Host {
        struct_size: size_of::<abi::Host>(),
        revision_min: abi::REVISION_MIN,
        revision_max: abi::REVISION,
        ctx: std::ptr::from_mut(context).cast(),
        log: Some(log_record),
        log_level_max: level_out(key.1),
        version: Str::of(env!("CARGO_PKG_VERSION")),
        extension: None,
    }));
    records.insert(key, record);
    record
}

fn level_out(level: log::LevelFilter) -> LogLevel {
    match level {
        log::LevelFilter::Off => LogLevel::OFF,
        log::LevelFilter::Error => LogLevel::ERROR,
        log::LevelFilter::Warn => LogLevel::WARN,
        log::LevelFilter::Info => LogLevel::INFO,
        log::LevelFilter::Debug => LogLevel::DEBUG,
        log::LevelFilter::Trace => LogLevel::TRACE,
    }
}

/// `None` for OFF. A severity that is not known is logged as a warning rather than lost.
fn level_in(level: LogLevel) -> Option<log::Level> {
    match level {
        LogLevel::OFF => None,
        LogLevel::ERROR => Some(log::Level::Error),
        LogLevel::INFO => Some(log::Level::Info),
        LogLevel::DEBUG => Some(log::Level::Debug),
        LogLevel::TRACE => Some(log::Level::Trace),
        _ => Some(log::Level::Warn),
    }
}

/// The plugin's records in the host's logger. A plugin without a target of its own name gets it, so that
/// `RUST_LOG=tegula_<id>=debug` always works.
unsafe extern "C" fn log_record(ctx: *mut c_void, level: LogLevel, target: Str, message: Str) {
    // A logger is the application's code and may panic; nothing unwinds into the plugin.
    let result = catch_unwind(AssertUnwindSafe(|| {
        let Some(level) = level_in(level).filter(|level| *level <= log::max_level()) else {
            return;
        };
        // SAFETY: `ctx` is the leaked context of the record that this function came with.
        let context = unsafe { &*ctx.cast::<HostContext>() };
        // SAFETY: both texts live for the call, by the contract of Host::log.
        let (target, message) = unsafe { (text(&target), text(&message)) };
        let target = full_target(&context.target, target.as_deref().unwrap_or_default());
        let message = message.unwrap_or_else(|| "(a record without text)".to_owned());
        // In one statement, since the record borrows the arguments that are made in it.
        log::logger().log(
            &log::Record::builder()
                .level(level)
                .target(&target)
                .args(format_args!("{message}"))
                .build(),
        );
    }));
    drop(result);
}

/// `tegula_<id>` or something below it.
fn full_target(own: &str, target: &str) -> String {
    match target.strip_prefix(own) {
        Some(rest) if rest.is_empty() || rest.starts_with("::") => target.to_owned(),
        _ if target.is_empty() => own.to_owned(),
        _ => format!("{own}::{target}"),
    }
}

/// A plugin's text, in one line. `None` for null with a length, or more than [`MAX_TEXT`].
///
/// # Safety
/// The bytes are alive during the call.
unsafe fn text(text: &Str) -> Option<String> {
    if text.len == 0 {
        return Some(String::new());
    }
    if text.ptr.is_null() || text.len > MAX_TEXT {
        return None;
    }
    // SAFETY: not null, of a bounded length, alive by the caller's word.
    Some(one_line(unsafe { std::slice::from_raw_parts(text.ptr, text.len) }))
}

fn bad(what: impl Into<String>) -> SkipReason {
    SkipReason::BadAnswer { what: what.into() }
}

/// Asks an opened library for its tables. `file_id` is the id in its name.
pub(crate) fn negotiate(
    library: Library,
    path: &Path,
    file_id: &str,
) -> Result<Plugin, SkipReason> {
    // SAFETY: the symbol's name is its contract; it is called below, while `library` is open.
    let entry: abi::BackendEntry = unsafe { library.function(abi::ENTRY_SYMBOL) }
        .ok_or_else(|| bad(format!("{} is gone after opening", abi::ENTRY_SYMBOL)))?;
    let answer = ask(entry, host_record(file_id))?;
    let revision = common_revision(&answer)?;
    check_layouts(&library)?;
    // SAFETY: the texts and tables are static in the plugin by contract, and the library is open.
    unsafe {
        let id = text(&answer.id).filter(|id| is_id(id)).ok_or_else(|| {
            bad("its id is not of lower-case letters, digits and underscores, 1 to 64 of them")
        })?;
        let word = |field: &Str, what: &str| {
            text(field).ok_or_else(|| bad(format!("its {what} is no text")))
        };
        let version = word(&answer.version, "version")?;
        let description = word(&answer.description, "description")?;
        let backend = abi::read_sized(answer.backend)
            .ok_or_else(|| table_fault(answer.backend, "backend"))?;
        let device =
            abi::read_sized(backend.device).ok_or_else(|| table_fault(backend.device, "device"))?;
        check_functions(&backend, &device)?;
        let path = path.to_owned();
        let revisions = (answer.revision_min, answer.revision_max);
        Ok(Plugin {
            id,
            version,
            description,
            path,
            revision,
            revisions,
            backend,
            device,
            _library: library,
        })
    }
}

/// Calls the entry.
fn ask(entry: abi::BackendEntry, host: &'static abi::Host) -> Result<abi::Plugin, SkipReason> {
    let mut answer = abi::Plugin {
        struct_size: size_of::<abi::Plugin>(),
        revision_min: 0,
        revision_max: 0,
        id: Str::of(""),
        version: Str::of(""),
        description: Str::of(""),
        backend: std::ptr::null(),
    };
    // SAFETY: the library exports the symbol, which is of this type by contract; both records are valid for the call.
    let status = unsafe { entry(host, &raw mut answer) };
    let host = (abi::REVISION_MIN, abi::REVISION);
    match status {
        Status::OK => {}
        Status::INCOMPATIBLE => {
            let plugin = (answer.revision_min, answer.revision_max);
            return Err(SkipReason::Revision { plugin, host });
        }
        status => return Err(SkipReason::Entry { status }),
    }
    let size = answer.struct_size;
    let allowed = <abi::Plugin as abi::Crossing>::MIN_SIZE..=size_of::<abi::Plugin>();
    // Below it, fields that are read here are missing; above it, the plugin wrote where it may not.
    if !allowed.contains(&size) {
        return Err(bad(format!(
            "it filled {size} bytes of its answer, {} to {} make sense",
            allowed.start(),
            allowed.end()
        )));
    }
    Ok(answer)
}

fn common_revision(answer: &abi::Plugin) -> Result<u32, SkipReason> {
    let (min, max) = (answer.revision_min, answer.revision_max);
    let common = max.min(abi::REVISION);
    if min > max || common < min.max(abi::REVISION_MIN) {
        let host = (abi::REVISION_MIN, abi::REVISION);
        return Err(SkipReason::Revision { plugin: (min, max), host });
    }
    Ok(common)
}

/// Compares the layouts of a plugin written in Rust of the same revision with ours.
fn check_layouts(library: &Library) -> Result<(), SkipReason> {
    // SAFETY: the symbol's name is its contract.
    let Some(entry) = (unsafe { library.function::<abi::LayoutEntry>(abi::LAYOUT_SYMBOL) }) else {
        return Ok(());
    };
    let record = entry();
    if record.is_null() || !record.is_aligned() {
        return Err(bad("its layout record is null or misaligned"));
    }
    // SAFETY: not null and aligned; the record is static in the plugin and starts with its size.
    let size = unsafe { record.cast::<usize>().read() };
    if size < size_of::<abi::LayoutRecord>() {
        return Err(bad(format!("its layout record has {size} bytes")));
    }
    // SAFETY: it has all the fields, by its size, and the library is open. The layout is looked at as an address only, since a
    // null one is no reference.
    let (revision, format, is_null) = unsafe {
        let layout = (&raw const (*record).layout).cast::<*const ()>().read();
        ((*record).revision, text(&(*record).format), layout.is_null())
    };
    if revision != abi::REVISION || format.as_deref() != Some(abi::LAYOUT_FORMAT) {
        return Ok(());
    }
    if is_null {
        return Err(bad("its layout record has no layout"));
    }
    // SAFETY: not null, and of the type that revision and format say; static in the plugin, and only used here, while it is open.
    let layout = unsafe { (*record).layout };
    abi::check_layout(layout)
        .map_err(|message| SkipReason::Layout { difference: shorten(&message) })
}

/// What differs, and where in the tables. The whole message runs to hundreds of lines and begins with both layouts in full; of each
/// difference it has the way of fields to it, then a paragraph that begins with `Error:` or `Extra:`.
fn shorten(message: &str) -> String {
    let (mut out, mut way, mut is_way, mut is_error) = (Vec::new(), Vec::new(), false, false);
    for line in message.lines().map(str::trim_end).filter(|line| !line.is_empty()) {
        if line.ends_with(" error(s).") || line.ends_with(" error(s)inside:") {
            (is_way, is_error) = (true, false);
            way.clear();
        } else if line.starts_with("Layout of ") {
            is_way = false;
        } else if line.starts_with("Error:") || line.starts_with("Extra:") {
            if !is_error && !way.is_empty() {
                out.push(format!("in {}:", way.join(" -> ")));
            }
            (is_way, is_error) = (false, true);
        }
        if let Some(field) = line.strip_prefix("    field_name:").filter(|_| is_way) {
            way.push(field);
        }
        if is_error {
            out.push(line.to_owned());
        }
    }
    if out.is_empty() {
        out.extend(message.lines().map(ToOwned::to_owned));
    }
    if out.len() > MAX_LAYOUT_LINES {
        out.truncate(MAX_LAYOUT_LINES);
        out.push("...".to_owned());
    }
    out.join("\n")
}

/// Why a table could not be read.
///
/// # Safety
/// `table` is null or static in an open plugin.
unsafe fn table_fault<T: abi::Crossing>(table: *const T, which: &'static str) -> SkipReason {
    if table.is_null() {
        return bad(format!("it gives no {which} table"));
    }
    if !table.is_aligned() {
        return bad(format!("its {which} table is misaligned"));
    }
    // SAFETY: not null, aligned, and a table starts with its size.
    let size = unsafe { table.cast::<usize>().read() };
    bad(format!("its {which} table has {size} bytes, {} are needed", T::MIN_SIZE))
}

/// That every function that is not optional is there.
fn check_functions(backend: &BackendTable, device: &DeviceTable) -> Result<(), SkipReason> {
    macro_rules! require {
        ($($table:ident: $($function:ident)*;)*) => {$($(
            if $table.$function.is_none() {
                return Err(SkipReason::MissingFunction {
                    table: concat!("the ", stringify!($table), " table"),
                    function: stringify!($function),
                });
            }
        )*)*};
    }
    require! {
        backend: open close device_count device_info heap_info buffer_type_info device_open;
        device: close buffer_alloc buffer_free weight_layout program_supports program_memory program_compile
            executable_free queue_create queue_free queue_write queue_read queue_copy queue_upload queue_run queue_wait;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use abi_stable::StableAbi;

    /// `RUST_LOG=tegula_cpu=debug` must catch all records of the plugin.
    #[test]
    fn targets() {
        for (target, full) in [
            ("", "tegula_cpu"),
            ("tegula_cpu", "tegula_cpu"),
            ("tegula_cpu::pool", "tegula_cpu::pool"),
            ("pool", "tegula_cpu::pool"),
            ("tegula_cpux", "tegula_cpu::tegula_cpux"),
        ] {
            assert_eq!(full_target("tegula_cpu", target), full, "{target:?}");
        }
    }

    /// A reordered table is told in a few lines that name the difference, not in hundreds.
    #[test]
    fn layout_difference_is_short() {
        #[repr(C)]
        #[derive(StableAbi)]
        struct Other {
            host: *const u8,
        }
        let message = abi::check_layout(<Other as StableAbi>::LAYOUT).unwrap_err();
        let short = shorten(&message);
        assert!(short.lines().count() <= MAX_LAYOUT_LINES + 1, "{short}");
        for part in ["Error:mismatched", "Boundary", "Other"] {
            assert!(short.contains(part), "{short:?} does not say {part:?}");
        }
        let deep = "Compared <this>:\n    type:A\n2 error(s)inside:\n    <other>\n\n    field_name:backend\n    type:T\n\n    field_name:open\n    type:F\n\nLayout of expected type:\n    field_name:no\n\n\nError:unexpected field\nExpected:\n    open\nFound:\n    close\n";
        assert_eq!(
            shorten(deep),
            "in backend -> open:\nError:unexpected field\nExpected:\n    open\nFound:\n    close"
        );
        assert_eq!(abi::check_layout(abi::BOUNDARY_LAYOUT), Ok(()));
    }
}
