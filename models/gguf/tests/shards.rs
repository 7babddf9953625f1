//! Split models: any shard opens the whole, and a set that does not fit together is refused with the name of the file
//! that is missing or wrong. What users meet: one file of several downloaded, or renamed, or copied over another.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::path::{Path, PathBuf};

use tegula_gguf::{DType, Gguf, GgufError, GgufWriter};

/// A shard as `gguf-split` writes it: number from 0, the same counts in each, one tensor.
fn shard(no: u16, count: u16, n_tensors: i32, tensor: &str) -> GgufWriter<'static> {
    let writer = match no {
        0 => {
            GgufWriter::new().meta("general.architecture", "llama").meta("llama.block_count", 1u32)
        }
        _ => GgufWriter::new(),
    };
    writer
        .meta("split.no", no)
        .meta("split.count", count)
        .meta("split.tensors.count", n_tensors)
        .tensor(tensor, &[2], DType::F32, vec![no as u8 + 1; 8])
}

fn name(number: u16) -> String {
    format!("m-{number:05}-of-00003.gguf")
}

fn tensor_name(no: u16) -> String {
    format!("blk.{no}.weight")
}

/// A folder with a good model of three shards.
fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for no in 0..3 {
        shard(no, 3, 3, &tensor_name(no)).write_to(folder.path().join(name(no + 1))).unwrap();
    }
    folder
}

fn check_whole(path: &Path) {
    let gguf = Gguf::open(path).unwrap();
    assert_eq!(gguf.shards().len(), 3, "{}", path.display());
    assert_eq!(gguf.metadata().get_str("general.architecture").unwrap(), "llama");
    for no in 0..3u16 {
        let tensor = gguf.required_tensor(&tensor_name(no)).unwrap();
        assert_eq!(tensor.shard(), usize::from(no));
        assert_eq!(gguf.read_tensor(tensor).unwrap(), [no as u8 + 1; 8]);
    }
    assert_eq!(gguf.summary().unwrap().n_shards, 3);
}

#[test]
fn any_shard_opens_the_whole() {
    let folder = model();
    for number in 1..=3 {
        check_whole(&folder.path().join(name(number)));
    }
}

#[cfg(unix)]
#[test]
fn links_are_followed() {
    use std::os::unix::fs::symlink;
    let folder = model();
    // A link to one shard of a model kept elsewhere, with its name and without.
    let elsewhere = tempfile::tempdir().unwrap();
    let same_name = elsewhere.path().join(name(2));
    symlink(folder.path().join(name(2)), &same_name).unwrap();
    check_whole(&same_name);
    let other_name = elsewhere.path().join("model.gguf");
    symlink(folder.path().join(name(1)), &other_name).unwrap();
    check_whole(&other_name);
    // A download cache: names link to files named by hash.
    let (blobs, snapshot) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for number in 1..=3 {
        let blob = blobs.path().join(format!("sha{number}"));
        std::fs::copy(folder.path().join(name(number)), &blob).unwrap();
        symlink(&blob, snapshot.path().join(name(number))).unwrap();
    }
    check_whole(&snapshot.path().join(name(3)));
    // A whole model in one file.
    let single = elsewhere.path().join("single.gguf");
    common::sample().write_to(blobs.path().join("sha9")).unwrap();
    symlink(blobs.path().join("sha9"), &single).unwrap();
    assert_eq!(Gguf::open(&single).unwrap().shards()[0].path, single);
}

/// Damages the good model, opens one shard and looks for `says` in the error.
fn check(damage: impl FnOnce(&Path), open: &str, says: &str) {
    let folder = model();
    damage(folder.path());
    let error = Gguf::open(folder.path().join(open)).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(says), "{message:?} lacks {says:?}");
    assert!(!message.contains('\n'), "{message:?}");
}

fn replace(number: u16, writer: GgufWriter<'static>) -> impl FnOnce(&Path) {
    move |folder| writer.write_to(folder.join(name(number))).unwrap()
}

#[test]
fn sets_that_do_not_fit_are_refused() {
    let remove =
        |number| move |folder: &Path| std::fs::remove_file(folder.join(name(number))).unwrap();
    let copy = |from, to| {
        move |folder: &Path| {
            std::fs::copy(folder.join(name(from)), folder.join(name(to))).unwrap();
        }
    };
    let rename = |from: u16, to: &'static str| {
        move |folder: &Path| std::fs::rename(folder.join(name(from)), folder.join(to)).unwrap()
    };
    check(remove(2), &name(1), "shard 2 of 3 is missing; put \"m-00002-of-00003.gguf\" beside");
    check(remove(1), &name(3), "shard 1 of 3 is missing; put \"m-00001-of-00003.gguf\" beside");
    check(copy(1, 2), &name(1), "name says shard 2 of 3, the metadata says shard 1 of 3");
    check(copy(1, 2), &name(2), "m-00002-of-00003.gguf: the name says shard 2 of 3");
    check(rename(1, "m.gguf"), "m.gguf", "does not end in -00001-of-00003.gguf");
    check(rename(1, "m-00001-of-00002.gguf"), "m-00001-of-00002.gguf", "name says shard 1 of 2");
    check(replace(2, shard(1, 4, 3, "x")), &name(1), "the metadata says shard 2 of 4");
    check(
        replace(3, common::sample()),
        &name(1),
        "in the place of shard 3 of 3, but it is not part",
    );
    check(
        replace(1, common::sample()),
        &name(2),
        "in the place of shard 1 of 3, but it is not part",
    );
    check(replace(2, shard(1, 3, 3, "blk.0.weight")), &name(1), "\"blk.0.weight\" is already in");
    check(
        replace(2, shard(1, 3, 9, "x")),
        &name(1),
        "split.tensors.count is 9 here and 3 in shard 1",
    );
    check(replace(2, shard(5, 3, 3, "x")), &name(2), "split.no is 5 and split.count is 3");
    check(replace(1, shard(0, 60_000, 3, "x")), &name(1), "at most 1024 shards");
    check(
        replace(2, shard(1, 3, 3, "x").tensor("y", &[1], DType::F32, vec![0; 4])),
        &name(1),
        "split.tensors.count is 3, but the 3 shards hold 4 tensors",
    );
    check(
        replace(2, shard(1, 3, 3, "x").meta("general.architecture", "qwen2")),
        &name(1),
        "general.architecture is \"qwen2\" here and \"llama\" in shard 1",
    );
    check(replace(2, GgufWriter::new().meta("split.count", 3u16)), &name(2), "no key \"split.no\"");
    check(
        replace(2, GgufWriter::new().meta("split.no", 1u16).meta("split.count", "three")),
        &name(2),
        "\"split.count\" holds a string",
    );
    check(
        |folder| std::fs::write(folder.join(name(2)), b"<html>").unwrap(),
        &name(1),
        "m-00002-of-00003.gguf: this is not a GGUF file",
    );
    check(
        |folder| {
            std::fs::remove_file(folder.join(name(2))).unwrap();
            std::fs::create_dir(folder.join(name(2))).unwrap();
        },
        &name(1),
        "m-00002-of-00003.gguf: this is a directory",
    );
}

#[cfg(unix)]
#[test]
fn links_in_a_circle_are_refused() {
    use std::os::unix::fs::symlink;
    let relink = |target: &'static str, number| {
        move |folder: &Path| {
            std::fs::remove_file(folder.join(name(number))).unwrap();
            symlink(PathBuf::from(target), folder.join(name(number))).unwrap();
        }
    };
    check(relink("m-00001-of-00003.gguf", 2), &name(1), "shards 1 and 2 are the same file");
    check(relink("m-00003-of-00003.gguf", 2), &name(1), "shards 2 and 3 are the same file");
    check(relink("m-00002-of-00003.gguf", 2), &name(1), "shard 2 of 3 is missing");
    check(relink("nowhere.gguf", 3), &name(1), "shard 3 of 3 is missing");
}

/// Merging leaves `split.count` 0 behind, and a model that was never cut may say 1.
#[test]
fn merged_models_are_whole() {
    let folder = tempfile::tempdir().unwrap();
    for count in [0, 1] {
        let path = folder.path().join(format!("merged{count}.gguf"));
        shard(0, count, 1, "t").write_to(&path).unwrap();
        assert_eq!(Gguf::open(&path).unwrap().shards().len(), 1);
    }
}

/// Limits hold for the set: a thousand small files must not cost more than one large one.
#[test]
fn limits_are_shared() {
    let folder = model();
    let mut limits = tegula_gguf::Limits::default();
    limits.n_tensors_max = 2;
    let error = Gguf::open_with(folder.path().join(name(1)), &limits).unwrap_err();
    assert!(matches!(error, GgufError::LimitExceeded { limit: "n_tensors_max", .. }), "{error}");
    let mut limits = tegula_gguf::Limits::default();
    limits.header_bytes_max = 400;
    let error = Gguf::open_with(folder.path().join(name(1)), &limits).unwrap_err();
    assert!(matches!(error, GgufError::LimitExceeded { limit: "header_bytes_max", .. }), "{error}");
}

#[test]
fn a_shard_in_memory_is_refused() {
    let error = Gguf::parse(&shard(1, 3, 3, "t").to_bytes().unwrap(), "x.gguf").unwrap_err();
    assert!(error.to_string().contains("can only be opened by path"), "{error}");
}
