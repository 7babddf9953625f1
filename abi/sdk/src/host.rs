//! The host's log sink behind the `log` crate.
//!
//! `log` is a static of its own in every shared object, so each plugin installs a logger that hands records to the host.

use std::sync::atomic::{AtomicPtr, Ordering};
use tegula_abi::{Host, LogLevel, Str};

static HOST: AtomicPtr<Host> = AtomicPtr::new(std::ptr::null_mut());

struct HostLog;

impl log::Log for HostLog {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        !HOST.load(Ordering::Acquire).is_null()
    }

    fn log(&self, record: &log::Record<'_>) {
        let host = HOST.load(Ordering::Acquire);
        // SAFETY: the pointer is null or the record that the host promised to keep while the plugin is loaded.
        let Some(host) = (unsafe { tegula_abi::read_sized(host) }) else { return };
        let Some(sink) = host.log else { return };
        let message = record.args().to_string();
        let level = match record.level() {
            log::Level::Error => LogLevel::ERROR,
            log::Level::Warn => LogLevel::WARN,
            log::Level::Info => LogLevel::INFO,
            log::Level::Debug => LogLevel::DEBUG,
            log::Level::Trace => LogLevel::TRACE,
        };
        // SAFETY: the sink is callable from any thread; both texts live for the call.
        unsafe { sink(host.ctx, level, Str::of(record.target()), Str::of(&message)) };
    }

    fn flush(&self) {}
}

/// Sends the plugin's records and panics to the host from now on.
///
/// # Safety
/// `host` is null or lives as long as the plugin is loaded.
pub(crate) unsafe fn connect(host: *const Host) {
    // SAFETY: as the caller promises.
    let Some(copy) = (unsafe { tegula_abi::read_sized(host) }) else { return };
    HOST.store(host.cast_mut(), Ordering::Release);
    log::set_max_level(match copy.log_level_max {
        LogLevel::OFF => log::LevelFilter::Off,
        LogLevel::ERROR => log::LevelFilter::Error,
        LogLevel::WARN => log::LevelFilter::Warn,
        LogLevel::INFO => log::LevelFilter::Info,
        LogLevel::DEBUG => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    });
    // A second negotiation of the same plugin finds the logger in place: only the host changes then.
    if log::set_logger(&HostLog).is_ok() {
        std::panic::set_hook(Box::new(|info| log::error!("panic in a backend: {info}")));
    }
}
