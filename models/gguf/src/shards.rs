//! Split models: what a shard says of itself, and where its siblings are.
//!
//! A model split by `gguf-split` is files named `<prefix>-00001-of-00003.gguf`. Each says in `split.no` (from 0) and
//! `split.count` which one it is. Name and metadata must agree, since nothing else would notice two shards that were
//! swapped or copied over each other. Siblings are looked for beside the path that was given, and where one is missing
//! there, beside the file that the path links to: download caches link from a folder of names to a folder of hashes,
//! and people link to the first shard of a model that is kept elsewhere.

use std::path::{Path, PathBuf};

use crate::error::clip;
use crate::{GgufError, GgufFile, Limits, Metadata, ShardProblem};

const NO_KEY: &str = "split.no";
const COUNT_KEY: &str = "split.count";
const TENSORS_COUNT_KEY: &str = "split.tensors.count";
const ARCHITECTURE_KEY: &str = "general.architecture";

/// What a file's metadata says about the split model it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    /// From 1, as in names.
    pub(crate) number: u64,
    pub(crate) count: u64,
    pub(crate) n_tensors: Option<u64>,
}

impl Split {
    /// `None` for a file that is a whole model: no `split.count`, the 0 that merging leaves behind, or 1.
    pub(crate) fn of(metadata: &Metadata, limits: &Limits) -> Result<Option<Split>, GgufError> {
        let Some(count) = metadata.opt_u64(COUNT_KEY)?.filter(|count| *count != 0) else {
            return Ok(None);
        };
        let bad = |problem| bad_shard(metadata.file(), problem);
        let allowed = limits.n_shards_max;
        if count > allowed {
            return Err(bad(ShardProblem::TooMany { count, allowed }));
        }
        let no = metadata.get_u64(NO_KEY)?;
        if no >= count {
            return Err(bad(ShardProblem::Numbers { no, count }));
        }
        if count == 1 {
            return Ok(None);
        }
        let n_tensors = metadata.opt_u64(TENSORS_COUNT_KEY)?;
        Ok(Some(Split { number: no.saturating_add(1), count, n_tensors }))
    }
}

pub(crate) fn bad_shard(file: &Path, problem: ShardProblem) -> GgufError {
    GgufError::BadShard { file: file.to_owned(), problem }
}

/// A path of the form `<folder>/<prefix>-<number>-of-<count>.gguf`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ShardName {
    folder: PathBuf,
    prefix: String,
    number: u64,
    count: u64,
}

impl ShardName {
    /// File names that are not UTF-8 have no such form here.
    fn parse(path: &Path) -> Option<ShardName> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = name.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let (number, count) = (five_digits(number)?, five_digits(count)?);
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Some(ShardName { folder, prefix: prefix.to_owned(), number, count })
    }

    fn sibling_name(&self, number: u64) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count)
    }

    fn sibling(&self, number: u64) -> PathBuf {
        self.folder.join(self.sibling_name(number))
    }

    /// The first sibling that is not there; a link to nothing counts as not there.
    fn first_missing(&self) -> Option<u64> {
        (1..=self.count).find(|number| !self.sibling(*number).exists())
    }
}

fn five_digits(text: &str) -> Option<u64> {
    let all_digits = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if all_digits { text.parse().ok() } else { None }
}

/// The paths of all shards, in order, found from the one at `path`, which says `split` of itself.
pub(crate) fn find_siblings(path: &Path, split: Split) -> Result<Vec<PathBuf>, GgufError> {
    let Split { number, count, .. } = split;
    let given = ShardName::parse(path);
    let linked = path.canonicalize().ok().and_then(|target| ShardName::parse(&target));
    let Some(name) = given.as_ref().or(linked.as_ref()) else {
        return Err(bad_shard(path, ShardProblem::Unnamed { number, count }));
    };
    let agrees = |name: &ShardName| (name.number, name.count) == (number, count);
    if !agrees(name) {
        let (named, named_count) = (name.number, name.count);
        let problem = ShardProblem::Renamed { named, named_count, number, count };
        return Err(bad_shard(path, problem));
    }
    let Some(missing) = name.first_missing() else {
        return distinct_paths(name);
    };
    match linked.as_ref().filter(|linked| agrees(linked) && linked.first_missing().is_none()) {
        Some(linked) => distinct_paths(linked),
        None => {
            let name = name.sibling_name(missing);
            Err(bad_shard(path, ShardProblem::Missing { number: missing, count, name }))
        }
    }
}

/// All paths of the set, which lead to as many files.
fn distinct_paths(name: &ShardName) -> Result<Vec<PathBuf>, GgufError> {
    let mut targets: Vec<(PathBuf, u64)> = Vec::new();
    let mut paths = Vec::new();
    for number in 1..=name.count {
        let path = name.sibling(number);
        let target = path.canonicalize().map_err(|cause| GgufError::Io {
            file: path.clone(),
            action: "open",
            cause,
        })?;
        targets.push((target, number));
        paths.push(path);
    }
    targets.sort();
    for ((target, first), (other, second)) in targets.iter().zip(targets.iter().skip(1)) {
        if target == other {
            let (first, second, target) = (*first, *second, target.clone());
            let file = name.sibling(second);
            return Err(bad_shard(&file, ShardProblem::SameFile { first, second, target }));
        }
    }
    Ok(paths)
}

/// Checks that the file found in the place of shard `number` is that shard of the model of which `opened` is one.
/// `first` is the metadata of shard 1, once it is known.
pub(crate) fn check_member(
    file: &GgufFile,
    number: u64,
    opened: Split,
    first: Option<&Metadata>,
    limits: &Limits,
) -> Result<(), GgufError> {
    let bad = |problem| bad_shard(file.path(), problem);
    let count = opened.count;
    let Some(split) = Split::of(file.metadata(), limits)? else {
        return Err(bad(ShardProblem::NotSplit { number, count }));
    };
    if (split.number, split.count) != (number, count) {
        return Err(bad(ShardProblem::Renamed {
            named: number,
            named_count: count,
            number: split.number,
            count: split.count,
        }));
    }
    let disagree = |key, got: String, expected: String, of| {
        bad(ShardProblem::Disagree { key, got, expected, of })
    };
    if let (Some(got), Some(expected)) = (split.n_tensors, opened.n_tensors)
        && got != expected
    {
        let (got, expected) = (got.to_string(), expected.to_string());
        return Err(disagree(TENSORS_COUNT_KEY, got, expected, opened.number));
    }
    let architecture =
        |metadata: &Metadata| metadata.get(ARCHITECTURE_KEY).map(|value| clip(&value.to_string()));
    match (architecture(file.metadata()), first.and_then(architecture)) {
        (Some(got), Some(expected)) if got != expected => {
            Err(disagree(ARCHITECTURE_KEY, got, expected, 1))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_are_recognised_exactly() {
        let check = |path: &str, expected: Option<(&str, u64, u64)>| {
            let name = ShardName::parse(Path::new(path));
            let got = name.as_ref().map(|n| (n.prefix.as_str(), n.number, n.count));
            assert_eq!(got, expected, "{path}");
            if let Some(name) = &name {
                assert_eq!(
                    name.sibling(name.number),
                    Path::new(path),
                    "{path} does not round-trip"
                );
            }
        };
        check("a-00001-of-00003.gguf", Some(("a", 1, 3)));
        check("/m/x-of-y-00002-of-00003.gguf", Some(("x-of-y", 2, 3)));
        check("-00001-of-00002.gguf", Some(("", 1, 2)));
        check("a-1-of-3.gguf", None);
        check("a-00001-of-00003", None);
        check("a-00001-of-00003.bin", None);
        check("a-+0001-of-00003.gguf", None);
        check("a-000001-of-00003.gguf", None);
        check("00001-of-00003.gguf", None);
        check("a.gguf", None);
        check("..", None);
    }
}
