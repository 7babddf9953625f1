//! Writes the C header of the boundary from the Rust tables.
//!
//! cbindgen reads types, not macros, and knows no "open" enums; so the sources are first rewritten, line by line, into
//! plain declarations: `open_enum!` becomes an enum with a fixed representation (C sees an integer typedef with constants, so
//! that unknown values stay legal), `handle!` becomes an opaque struct, and everything that is not a declaration goes.

use anyhow::{Context as _, Result, anyhow, bail};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The modules of `tegula-abi` that declare what crosses.
const MODULES: [&str; 7] = ["lib", "types", "error", "backend", "device", "program", "run"];

/// The text of `include/tegula_backend.h`, from the folder of the crate `tegula-abi`.
///
/// # Errors
/// A source that cannot be read, or that cbindgen refuses, or a name in the output without the project's prefix.
pub(crate) fn generate(abi: &Path) -> Result<String> {
    let mut source = String::new();
    for module in MODULES {
        let path = abi.join("src").join(module).with_extension("rs");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        source.push_str(&plain_declarations(&text));
    }
    source.push_str(
        "extern \"C\" {\n/// The one symbol of a plugin: negotiates and returns at once. See `TegulaBackendEntry`.\n\
         pub fn tegula_backend_v1(host: *const Host, out: *mut Plugin) -> Status;\n}\n",
    );
    let path = abi.join("cbindgen.toml");
    let config =
        cbindgen::Config::from_file(&path).map_err(|e| anyhow!("{}: {e}", path.display()))?;
    let text = bind(config, &source)?;
    // A negative macro needs its brackets to survive in an expression.
    let text = text.replace(" -1\n", " (-1)\n").replace(" -2\n", " (-2)\n");
    let text = text.replace("[`", "`").replace("`]", "`").replace("crate::", "");
    // cbindgen splits the name between its two capitals.
    let text = text.replace("TEGULA_D_TYPE_", "TEGULA_DTYPE_");
    if let Some(name) = unprefixed(&text) {
        bail!("{name}: a constant without an entry in [export.rename] of abi/cbindgen.toml");
    }
    Ok(text)
}

/// A folder that goes with the value.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing depends on the folder being gone.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What cbindgen writes for one file of declarations; it reads files only.
fn bind(config: cbindgen::Config, source: &str) -> Result<String> {
    let folder =
        Scratch(std::env::temp_dir().join(format!("tegula-header-{}", std::process::id())));
    std::fs::create_dir_all(&folder.0).with_context(|| folder.0.display().to_string())?;
    let file = folder.0.join("boundary.rs");
    std::fs::write(&file, source).with_context(|| file.display().to_string())?;
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(&file)
        .generate()
        .context("cbindgen")?;
    let mut out = Vec::new();
    bindings.write(&mut out);
    String::from_utf8(out).context("cbindgen's output")
}

/// A `#define` whose name is not spelled as C names of this project are.
fn unprefixed(header: &str) -> Option<&str> {
    header
        .lines()
        .filter_map(|line| line.strip_prefix("#define ")?.split([' ', '(']).next())
        .find(|name| !name.starts_with("TEGULA_"))
}

/// What a line of the source belongs to.
enum Place {
    Top,
    OpenEnum,
    Handles,
    /// An item to be left out, up to a closing bracket in the first column.
    Dropped,
}

/// Rewrites one source file into declarations that cbindgen reads.
fn plain_declarations(source: &str) -> String {
    let mut out = String::new();
    let mut place = Place::Top;
    for line in source.lines() {
        let body = line.trim_start();
        place = match place {
            Place::Dropped if line.starts_with('}') => Place::Top,
            Place::Dropped => Place::Dropped,
            Place::OpenEnum | Place::Handles if line == "}" => Place::Top,
            Place::OpenEnum => {
                match body.split_once(": ").filter(|(_, rest)| rest.ends_with(" {")) {
                    Some((name, repr)) if !body.starts_with("///") => {
                        let repr = repr.trim_end_matches(" {");
                        let _ = writeln!(out, "#[repr({repr})]\npub enum {name} {{");
                    }
                    _ => {
                        let _ = writeln!(out, "{body}");
                    }
                }
                Place::OpenEnum
            }
            Place::Handles => {
                if body.starts_with("///") {
                    let _ = writeln!(out, "{body}");
                } else {
                    let _ = writeln!(out, "pub struct {body} {{ opaque: u8 }}");
                }
                Place::Handles
            }
            Place::Top if line == "open_enum! {" => Place::OpenEnum,
            Place::Top if line == "handle! {" => Place::Handles,
            Place::Top if is_left_out(line) && line.ends_with('}') => Place::Top,
            Place::Top if is_left_out(line) => Place::Dropped,
            Place::Top => {
                if !is_ignored(line) {
                    let _ = writeln!(out, "{line}");
                }
                Place::Top
            }
        };
    }
    // An opaque struct has no representation that C should see.
    out.replace("#[repr(C)]\npub struct BackendHandle", "pub struct BackendHandle")
}

fn is_left_out(line: &str) -> bool {
    ["impl", "unsafe impl", "macro_rules!"].iter().any(|start| line.starts_with(start))
}

fn is_ignored(line: &str) -> bool {
    ["//!", "use ", "mod ", "pub use ", "pub(crate) use", "#![", "#[derive"]
        .iter()
        .any(|start| line.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn macros_become_declarations_that_a_generator_reads() {
        let check = |source: &str, expected: &str| {
            assert_eq!(plain_declarations(source), expected, "{source}");
        };
        check(
            "open_enum! {\n    /// Kinds.\n    Kind: u32 {\n        /// One.\n        One = 1,\n    }\n}\n",
            "/// Kinds.\n#[repr(u32)]\npub enum Kind {\n/// One.\nOne = 1,\n}\n",
        );
        check(
            "handle! {\n    /// Owned.\n    Thing\n}\n",
            "/// Owned.\npub struct Thing { opaque: u8 }\n",
        );
        check(
            "impl A {\n    fn f() {}\n}\n#[derive(Clone)]\npub struct B {\n}\n",
            "pub struct B {\n}\n",
        );
        check(
            "//! Words.\nuse a;\nmod b;\nimpl C for D {}\npub const E: u32 = 1;\n",
            "pub const E: u32 = 1;\n",
        );
    }

    #[test]
    fn a_constant_without_the_prefix_is_found() {
        assert_eq!(unprefixed("#define TEGULA_A 1\n#define TegulaB 2\n"), Some("TegulaB"));
        assert_eq!(unprefixed("#define TEGULA_A 1\n// #define x\n"), None);
    }
}
