//! The process that loads the plugin and runs the suite. Whatever the plugin does to it, another one tells the user.

use super::line::{Case, Device, Fact, Line, Plugin, tell};
use super::select::Selection;
use crate::args::VerifyArgs;
use anyhow::{Context, Result, bail};
use std::path::Path;
use tegula_conformance::{
    Check, Event, Expectations, GROUPS, Outcome, Verdict, check_group_watched, run_checks_watched,
};
use tegula_plugin::{
    Backend, DeviceInfo, ENTRY_SYMBOL, LAYOUT_SYMBOL, REVISION, REVISION_MIN, Registry,
    RegistryOptions, exported_symbols,
};

/// Runs what is chosen, and tells each step on stdout.
pub(super) fn run(args: &VerifyArgs, selection: &Selection) -> Result<()> {
    if let Err(error) = suite(args, selection) {
        tell(&Line::Refused { reason: crate::output::explain(&error) })?;
    }
    Ok(tell(&Line::Done)?)
}

fn suite(args: &VerifyArgs, selection: &Selection) -> Result<()> {
    begin("load/the file and its symbols")?;
    let exports = exported_symbols(&args.plugin)?;
    begin("load/opening the plugin and listing its devices")?;
    let backend = open(&args.plugin)?;
    begin("load/opening the oracle")?;
    let oracle =
        selection.needs_oracle().then(|| find_oracle(args.oracle.as_deref(), backend.id()));
    let oracle = oracle.transpose()?;
    tell(&Line::Opened(Plugin {
        id: backend.id().to_owned(),
        version: backend.version().to_owned(),
        description: backend.description().to_owned(),
        path: backend.path().display().to_string(),
        oracle: oracle.as_ref().map(|oracle| {
            format!("{} {}  {}", oracle.id(), oracle.version(), oracle.path().display())
        }),
    }))?;
    for fact in facts(&backend, &exports) {
        tell(&Line::Fact(fact))?;
    }
    list_faulty(&backend, args.device)?;
    for device in devices(&backend, args.device)? {
        tell(&Line::Device(Device { id: device.id(), name: device.name.clone() }))?;
        if let Some(oracle) = &oracle {
            check(&backend, device.index, oracle, selection)?;
        }
    }
    begin("load/closing the plugin")?;
    drop(backend);
    Ok(())
}

fn begin(case: &str) -> std::io::Result<()> {
    tell(&Line::Begin { case: case.to_owned() })
}

/// The one backend of a file.
fn open(path: &Path) -> Result<Backend> {
    let options = RegistryOptions { explicit: vec![path.to_owned()], standard: false };
    let registry = Registry::load(&options);
    if let Some(backend) = registry.backends.first() {
        return Ok(backend.clone());
    }
    let reason = registry.skipped.first().map(|skipped| skipped.reason.to_string());
    bail!("{}: {}", path.display(), reason.unwrap_or_else(|| "it gave no backend".into()))
}

/// What to measure against: the backend that is named, by id or file; or the first of the search path that is only used when
/// it is named, since to be right, and not to be fast, is then what it is for. Another one than the plugin itself is preferred.
fn find_oracle(named: Option<&str>, own: &str) -> Result<Backend> {
    if let Some(path) = named.map(Path::new).filter(|path| path.is_file()) {
        return open(path).context("the oracle cannot be used");
    }
    let registry = Registry::load(&RegistryOptions::default());
    let mut fitting: Vec<_> = registry
        .backends
        .iter()
        .filter(|backend| named.map_or_else(|| is_oracle(backend), |id| backend.id() == id))
        .collect();
    fitting.sort_by_key(|backend| backend.id() == own);
    if let Some(backend) = fitting.first() {
        return Ok((*backend).clone());
    }
    let wanted = named.map_or_else(
        || "results are compared with an oracle, and no backend here is one (a backend whose devices have rank 0)".to_owned(),
        |id| format!("there is no backend `{id}` to compare results with"),
    );
    let there: Vec<_> = registry.backends.iter().map(Backend::id).collect();
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    bail!(
        "{wanted}; backends found: {there}. Put one into a folder that is searched (`tegula devices` lists them), or name it: \
         --oracle ID, or --oracle PATH.so. `--only abi` needs none"
    )
}

fn is_oracle(backend: &Backend) -> bool {
    let devices = backend.devices();
    !devices.is_empty() && devices.iter().all(|device| device.rank == 0)
}

/// What was agreed at the negotiation.
fn facts(backend: &Backend, exports: &[String]) -> Vec<Fact> {
    let fact = |what: &str, found, is_good| Fact { what: what.to_owned(), found, is_good };
    let (min, max) = backend.revisions();
    let revisions = format!(
        "{min}..={max}, this core {REVISION_MIN}..={REVISION}; both use {}",
        backend.revision()
    );
    let strangers: Vec<_> = exports
        .iter()
        .map(String::as_str)
        .filter(|name| ![ENTRY_SYMBOL, LAYOUT_SYMBOL].contains(name))
        .collect();
    let symbols = if strangers.is_empty() {
        exports.join(", ")
    } else {
        let shown: Vec<_> = strangers.iter().copied().take(5).collect();
        format!(
            "{} besides the entry symbols: {}{}; hide them (-fvisibility=hidden, or a version script), since other libraries could be bound to them",
            strangers.len(),
            shown.join(", "),
            if strangers.len() > shown.len() { ", ..." } else { "" }
        )
    };
    // A record that differs keeps the plugin from being opened.
    let layout = if exports.iter().any(|name| name == LAYOUT_SYMBOL) {
        "present, without a difference"
    } else {
        "none; plugins in Rust have one"
    };
    vec![
        fact("revisions", revisions, true),
        fact("exported symbols", symbols, strangers.is_empty()),
        fact("layout record", layout.to_owned(), true),
    ]
}

/// Devices that cannot be used are failures, unless another one is asked for.
fn list_faulty(backend: &Backend, wanted: Option<u32>) -> Result<()> {
    for faulty in backend.faulty() {
        if wanted.is_none_or(|wanted| wanted == faulty.index) {
            let found = format!("cannot be used: {}", faulty.error);
            let what = format!("device {}:{}", backend.id(), faulty.index);
            tell(&Line::Fact(Fact { what, found, is_good: false }))?;
        }
    }
    Ok(())
}

/// The devices to be checked.
fn devices(backend: &Backend, wanted: Option<u32>) -> Result<Vec<&DeviceInfo>> {
    let all = backend.devices();
    let chosen: Vec<_> =
        all.iter().filter(|device| wanted.is_none_or(|index| index == device.index)).collect();
    if chosen.is_empty() && backend.faulty().is_empty() {
        let there: Vec<_> = all.iter().map(|device| device.index.to_string()).collect();
        match wanted {
            Some(index) => bail!("there is no device {index}; there are: {}", there.join(", ")),
            None => bail!("it finds no device on this machine, so that nothing can be checked"),
        }
    }
    Ok(chosen)
}

fn check(backend: &Backend, index: u32, oracle: &Backend, selection: &Selection) -> Result<()> {
    let expectations = Expectations::unknown();
    let mut broken = None;
    let mut watch = |event: Event<'_>| {
        let told = match event {
            Event::Begin(case) => begin(case),
            Event::End(verdict) => tell(&Line::End(Case::of(verdict))),
        };
        if let Err(error) = told {
            broken.get_or_insert(error);
        }
    };
    for group in GROUPS.iter().filter(|group| selection.has_group(group.name)) {
        tell(&Line::Part { name: group.name.to_owned() })?;
        let report = check_group_watched(group, backend, index, oracle, &expectations, &mut watch);
        if report.verdicts.is_empty() {
            let outcome = Outcome::Failed("the group has no cases".into());
            let name = group.name.to_owned();
            watch(Event::End(&Verdict { name, outcome, is_good: false, note: None }));
        }
    }
    for kind in selection.kinds() {
        tell(&Line::Part { name: kind.to_owned() })?;
        let is_chosen = |check: &Check| Selection::is_of_kind(check.name, kind);
        run_checks_watched(&is_chosen, backend, index, oracle, &expectations, &mut watch);
    }
    broken.map_or(Ok(()), |error| Err(error.into()))
}
