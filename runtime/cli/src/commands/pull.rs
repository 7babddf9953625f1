//! `tegula pull`: fetches a model from the Hugging Face hub into the cache folder.

use crate::args::PullArgs;
use crate::download::{Source, download, is_same};
use crate::hub::{Hub, RepoFile};
use crate::models;
use crate::output;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::path::Path;
use tegula::memory::units::format_size;

pub(crate) fn run(args: &PullArgs) -> Result<()> {
    let wanted = Wanted::parse(&args.name)?;
    let hub = Hub::from_env()?;
    let info = hub.info(wanted.repo, &args.revision)?;
    let files = wanted.select(&info.files)?;
    let folder = models::folder()?;
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for file in &files {
        let source = Source { hub: &hub, repo: wanted.repo, commit: &info.commit, file };
        fetch(&source, &folder, args.force)?;
    }
    match files.first() {
        Some(first) => output::print(&folder.join(first.name()).display().to_string()),
        None => Ok(()),
    }
}

fn fetch(source: &Source, folder: &Path, force: bool) -> Result<()> {
    let file = source.file;
    let target = folder.join(file.name());
    let bar = bar(file);
    if target.exists() {
        if is_same(&target, file, &bar)? {
            bar.finish_and_clear();
            eprintln!("{} is already there", file.name());
            return Ok(());
        }
        if !force {
            bail!(
                "{} exists and is another file than {}/{}; move it away, or replace it with --force",
                target.display(),
                source.repo,
                file.path
            );
        }
    }
    let size = file.size.map_or_else(|| "size unknown".to_owned(), format_size);
    bar.suspend(|| eprintln!("{} ({size})", file.name()));
    let done = download(source, &target, &bar);
    bar.finish_and_clear();
    done
}

fn bar(file: &RepoFile) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let template =
        "{bar:30} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    match file.size {
        Some(size) => ProgressBar::new(size).with_style(style),
        None => ProgressBar::no_length(),
    }
}

/// What a name asks for: `OWNER/REPO`, `OWNER/REPO:QUANT` or `OWNER/REPO/FILE.gguf`.
#[derive(Debug, PartialEq, Eq)]
struct Wanted<'a> {
    repo: &'a str,
    which: Which<'a>,
}

#[derive(Debug, PartialEq, Eq)]
enum Which<'a> {
    Only,
    Quant(&'a str),
    File(&'a str),
}

/// A model of a repository: its file, or its shards in order.
struct Group<'a> {
    name: &'a str,
    files: Vec<&'a RepoFile>,
}

impl<'a> Wanted<'a> {
    fn parse(name: &'a str) -> Result<Self> {
        let usage = "give OWNER/REPO, OWNER/REPO:QUANT or OWNER/REPO/FILE.gguf";
        // As copied from a browser.
        let short = ["https://huggingface.co/", "huggingface.co/", "hf.co/"]
            .iter()
            .find_map(|host| name.strip_prefix(host))
            .unwrap_or(name);
        let Some((owner, rest)) = short.split_once('/') else {
            bail!("`{name}` names no repository of the hub: {usage}");
        };
        let end = rest.find(['/', ':']).unwrap_or(rest.len());
        let (repo, tail) = rest.split_at(end);
        for part in [owner, repo] {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if part.is_empty() || part.starts_with('.') || !part.chars().all(plain) {
                bail!("`{name}`: `{part}` is no name of an owner or repository: {usage}");
            }
        }
        let which = match (tail.strip_prefix(':'), tail.strip_prefix('/')) {
            (Some(quant), _) if !quant.is_empty() && !quant.contains('/') => Which::Quant(quant),
            (_, Some(file)) if file.to_lowercase().ends_with(".gguf") => Which::File(file),
            (None, None | Some("")) => Which::Only,
            _ => bail!("`{name}`: `{tail}` is neither :QUANT nor /FILE.gguf: {usage}"),
        };
        Ok(Self { repo: short.get(..owner.len() + 1 + repo.len()).unwrap_or(short), which })
    }

    /// The files to fetch, or an error that lists what there is.
    fn select(&self, files: &'a [RepoFile]) -> Result<Vec<&'a RepoFile>> {
        let groups = groups(files);
        if groups.is_empty() {
            bail!(
                "{} has no .gguf file; look for a repository of the model in GGUF format (their names often end in -GGUF)",
                self.repo
            );
        }
        let fits = |group: &&Group| match self.which {
            Which::Only => !is_companion(group.name),
            Which::Quant(quant) => !is_companion(group.name) && has_quant(group.name, quant),
            Which::File(path) => {
                group.name == path || group.files.iter().any(|file| file.path == path)
            }
        };
        let fitting: Vec<&Group> = groups.iter().filter(fits).collect();
        let asked = match self.which {
            Which::Only => "a model".to_owned(),
            Which::Quant(quant) => format!("one with {quant} in its name"),
            Which::File(path) => path.to_owned(),
        };
        match fitting.as_slice() {
            [group] => group.complete(self.repo),
            [] => bail!("{} has several files, but not {asked}:{}", self.repo, lines(&groups)),
            several => bail!(
                "{} has several models; choose with :QUANT or /FILE.gguf:{}",
                self.repo,
                lines(several.iter().copied())
            ),
        }
    }
}

impl<'a> Group<'a> {
    fn complete(&self, repo: &str) -> Result<Vec<&'a RepoFile>> {
        let count = self.files.first().and_then(|file| models::shard_of(&file.path));
        if let Some((_, _, count)) =
            count.filter(|(_, _, count)| *count as usize != self.files.len())
        {
            bail!("{repo}: {} has {} of its {count} shards", self.name, self.files.len());
        }
        Ok(self.files.clone())
    }
}

fn groups(files: &[RepoFile]) -> Vec<Group<'_>> {
    let key =
        |file: &'_ RepoFile| models::shard_of(&file.path).map(|(_, number, count)| (count, number));
    let mut sorted: Vec<&RepoFile> = files.iter().collect();
    sorted.sort_by(|a, b| (base(a), key(a)).cmp(&(base(b), key(b))));
    sorted.dedup_by(|a, b| a.path == b.path);
    let mut groups: Vec<Group> = Vec::new();
    for file in sorted {
        let count = |file: &RepoFile| models::shard_of(&file.path).map(|(_, _, count)| count);
        let same = |group: &&mut Group<'_>| {
            let first = group.files.first();
            group.name == base(file) && first.and_then(|f| count(f)) == count(file)
        };
        match groups.last_mut().filter(same) {
            Some(group) if count(file).is_some() => group.files.push(file),
            _ => groups.push(Group { name: base(file), files: vec![file] }),
        }
    }
    groups
}

/// A file's path, without the number where it is a shard.
fn base(file: &RepoFile) -> &str {
    models::shard_of(&file.path).map_or(&file.path, |(base, _, _)| base)
}

/// Files beside a model that are none: projectors of images, and statistics for quantising.
fn is_companion(path: &str) -> bool {
    let path = path.to_lowercase();
    path.contains("mmproj") || path.contains("imatrix")
}

/// Whether a path names the quantisation: as a word of it, so that Q4_K is not found in Q4_K_M.
fn has_quant(path: &str, quant: &str) -> bool {
    let (path, quant) = (path.to_lowercase(), quant.to_lowercase());
    path.match_indices(&quant).any(|(at, found)| {
        let before = path.get(..at).and_then(|text| text.chars().next_back());
        let after = path.get(at + found.len()..).and_then(|text| text.chars().next());
        !before.is_some_and(|c| c.is_alphanumeric())
            && !after.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

fn lines<'a>(groups: impl IntoIterator<Item = &'a Group<'a>>) -> String {
    let line = |group: &Group| {
        let size = group.files.iter().map(|file| file.size).sum::<Option<u64>>();
        let size = size.map(|size| format!("  {}", format_size(size))).unwrap_or_default();
        match group.files.as_slice() {
            [file] => format!("\n  {}{size}", file.path),
            files => format!("\n  {}.gguf{size} in {} shards", group.name, files.len()),
        }
    };
    groups.into_iter().map(line).collect()
}
