//! Rules over words: what must not be said, and where.

use super::tree::{File, is_below};
use super::{Finding, Rule, whole};
use crate::source;

pub(super) const RULES: [Rule; 4] = [
    Rule {
        name: "unfinished",
        applies: |file| !file.is_below("xtask/src/tidy"),
        check: unfinished,
    },
    Rule {
        name: "machine-path",
        applies: |file| !file.is_below("xtask/src/tidy"),
        check: machine_path,
    },
    Rule {
        name: "unsafe",
        applies: |file| file.has_extension(&["rs"]) && !is_unsafe_allowed(&file.path),
        check: unsafe_code,
    },
    Rule { name: "backend-name", applies: is_core, check: backend_name },
];

/// Marks of work that is not done. They go stale in the code; the list of work lies elsewhere.
const UNFINISHED: [&str; 5] = ["TODO", "FIXME", "XXX", "todo!(", "unimplemented!("];

/// Folders of one person's or one machine's.
const MACHINE_PATHS: [&str; 3] = ["/root/", "/home/", "/work/"];

/// Where `unsafe` may be written, each with the reason.
const UNSAFE: &[(&str, &str)] = &[
    ("abi/src", "the boundary: raw pointers in, raw pointers out"),
    ("abi/tests", "calls the boundary as a plugin in C would"),
    ("abi/program/src/ffi.rs", "reads a program from the boundary's tables"),
    ("abi/program/src/ffi", "reads the parameters of ops, likewise"),
    ("abi/program/tests", "reads back what it laid out for the boundary"),
    ("abi/sdk", "makes the boundary's tables from safe traits"),
    ("runtime/plugin", "the one crate that opens libraries"),
    ("backends", "kernels and drivers"),
    ("tests/abi", "plugins without the project's own wrappers"),
    ("tests/fake", "a shim between two sets of the boundary's tables"),
];

/// Words that name a backend. The core must work with backends that do not exist yet, so it names none; `cpu` is no such
/// word, because it is a kind of device too.
const BACKEND_WORDS: [&str; 11] = [
    "vulkan",
    "opencl",
    "openvino",
    "cuda",
    "tegula_cpu",
    "tegula-cpu",
    "tegula_reference",
    "tegula-reference",
    "level_zero",
    "level-zero",
    "rocm",
];

fn unfinished(file: &File) -> Vec<(usize, String)> {
    find(&file.text, |line| {
        let word = UNFINISHED.iter().find(|word| words(line, word).next().is_some())?;
        Some(format!("`{word}`: finish it, or say what is missing where users read it"))
    })
}

fn machine_path(file: &File) -> Vec<(usize, String)> {
    find(&file.text, |line| {
        let path = MACHINE_PATHS.iter().find(|path| is_absolute_use(line, path))?;
        Some(format!("`{path}` is a folder of one machine"))
    })
}

/// Whether `line` has `path` at the beginning of a path, and goes on with a name.
fn is_absolute_use(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line.get(..at).and_then(|text| text.chars().next_back());
        let after = line.get(at + path.len()..).and_then(|text| text.chars().next());
        let is_inside = before.is_some_and(|c| c.is_alphanumeric() || "_-.~}/".contains(c));
        !is_inside && after.is_some_and(|c| c.is_alphanumeric() || c == '.')
    })
}

fn is_unsafe_allowed(path: &str) -> bool {
    UNSAFE.iter().any(|(prefix, _)| is_below(path, prefix))
}

fn unsafe_code(file: &File) -> Vec<(usize, String)> {
    find(&source::code(&file.text), |line| {
        words(line, "unsafe").next()?;
        Some("`unsafe` outside the places listed in xtask/src/tidy/wording.rs".to_owned())
    })
}

fn is_core(file: &File) -> bool {
    file.is_below("runtime") && file.has_extension(&["rs"]) && !file.is_for_tests()
}

fn backend_name(file: &File) -> Vec<(usize, String)> {
    let text = source::without_tests(&file.text, &source::code_and_text(&file.text)).to_lowercase();
    find(&text, |line| {
        let word = BACKEND_WORDS.iter().find(|word| line.contains(*word))?;
        Some(format!("`{word}`: the core names no backend, outside docs and tests"))
    })
}

/// The lines, from 1, of which `judge` has something to say.
fn find(text: &str, judge: impl Fn(&str) -> Option<String>) -> Vec<(usize, String)> {
    text.lines().enumerate().filter_map(|(at, line)| Some((at + 1, judge(line)?))).collect()
}

/// Where `word` stands in `line` as a word of its own.
fn words<'a>(line: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = line.get(..*at).and_then(|text| text.chars().next_back());
        let after = line.get(at + word.len()..).and_then(|text| text.chars().next());
        !before.is_some_and(is_part) && (!word.ends_with(is_part) || !after.is_some_and(is_part))
    })
}

/// Places where `unsafe` is allowed and nothing is written.
pub(super) fn needless_exceptions(files: &[File]) -> Vec<Finding> {
    let is_empty = |prefix: &str| !files.iter().any(|file| file.is_below(prefix));
    let needless = UNSAFE.iter().filter(|(prefix, _)| is_empty(prefix));
    needless
        .map(|(prefix, _)| {
            whole(prefix, "does not exist: remove it from xtask/src/tidy/wording.rs")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::lines_found;

    fn check(name: &str, path: &str, text: &str, expected: &[usize]) {
        assert_eq!(lines_found(&RULES, name, path, text), expected, "{name} on {path}: {text:?}");
    }

    #[test]
    fn unfinished_work_is_not_left_in_the_code() {
        check("unfinished", "a.rs", "// TODO: later\n", &[1]);
        check("unfinished", "a.rs", "fn f() {\n    todo!()\n}\n", &[2]);
        check("unfinished", "a.md", "FIXME\nXXX\n", &[1, 2]);
        check("unfinished", "a.rs", "let todos = 1; let XXXL = 2; MYTODO\n", &[]);
    }

    #[test]
    fn nobodys_folders_are_named() {
        check("machine-path", "a.rs", "let p = \"/home/jane/models\";\n", &[1]);
        check("machine-path", "a.md", "see /root/.cache\n/work/x\n", &[1, 2]);
        check(
            "machine-path",
            "a.md",
            "{root}/home/x, ~/work/x, https://a.example/home/x, /home/$USER, net/work/x\n",
            &[],
        );
    }

    #[test]
    fn unsafe_stands_where_it_may() {
        let code = "fn f() { unsafe { g() } }\n";
        check("unsafe", "runtime/engine/src/lib.rs", code, &[1]);
        check("unsafe", "models/gguf/tests/t.rs", "unsafe impl A for B {}\n", &[1]);
        check("unsafe", "runtime/plugin/src/lib.rs", code, &[]);
        check("unsafe", "abi/program/src/ffi.rs", code, &[]);
        check("unsafe", "abi/program/src/op.rs", code, &[1]);
        check(
            "unsafe",
            "models/gguf/src/lib.rs",
            "#![forbid(unsafe_code)]\n// unsafe {\nf(\"unsafe {\");\n",
            &[],
        );
    }

    #[test]
    fn the_core_names_no_backend() {
        let path = "runtime/engine/src/device.rs";
        check("backend-name", path, "if id == \"vulkan\" {}\n", &[1]);
        check("backend-name", path, "use tegula_cpu::Device;\n", &[1]);
        check("backend-name", path, "struct OpenClDevice;\n", &[1]);
        check("backend-name", path, "/// Such as `vulkan:0`.\nfn f() {} // opencl\n", &[]);
        check(
            "backend-name",
            path,
            "fn f() {}\n#[cfg(test)]\nmod tests {\n    const A: &str = \"cuda\";\n}\n",
            &[],
        );
        check("backend-name", path, "if kind == \"cpu\" {}\n", &[]);
        check("backend-name", "runtime/engine/tests/t.rs", "\"vulkan\"\n", &[]);
        check("backend-name", "backends/cpu/src/lib.rs", "\"vulkan\"\n", &[]);
    }

    #[test]
    fn an_exception_for_nothing_is_found() {
        let files = UNSAFE
            .iter()
            .skip(1)
            .map(|(path, _)| File { path: format!("{path}/x.rs"), text: String::new() });
        assert_eq!(needless_exceptions(&files.collect::<Vec<_>>()).len(), 1);
    }
}
