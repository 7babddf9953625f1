//! Compiles the shaders to SPIR-V and embeds them.
//!
//! The compiler is `glslc` (Debian: `apt install glslc`), or what `TEGULA_GLSLC` names. One that lacks cooperative matrices (Debian 12 has such) builds
//! all but the kernels that need them; none at all is an error, since a backend without kernels is none.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What every compiler must compile, and what a newer one can.
const SHADERS: [&str; 19] = [
    "elementwise",
    "norm",
    "rope",
    "kv_store",
    "embed",
    "copy",
    "argmax",
    "top_k",
    "router",
    "experts_sort",
    "combine",
    "conv_state",
    "gated_delta",
    "attention",
    "attention_combine",
    "matvec",
    "matmul",
    "to_half",
    "probe",
];
const OPTIONAL: [&str; 1] = ["matmul_coopmat"];

fn main() -> ExitCode {
    println!("cargo::rerun-if-env-changed=TEGULA_GLSLC");
    println!("cargo::rerun-if-changed=src/shaders");
    println!("cargo::rerun-if-changed=build.rs");
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("cargo::error={why}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let compiler = std::env::var("TEGULA_GLSLC").ok().or_else(set_up).unwrap_or("glslc".into());
    let mut table = String::new();
    for name in SHADERS {
        compile(&compiler, name, &out)?;
        table += &entry(name, true);
    }
    for name in OPTIONAL {
        let is_built = compile(&compiler, name, &out).is_ok();
        if !is_built {
            println!(
                "cargo::warning={compiler} does not compile {name}.comp: built without it, prompts will be slower"
            );
        }
        table += &entry(name, is_built);
    }
    std::fs::write(out.join("shaders.rs"), table).map_err(|error| format!("shaders.rs: {error}"))
}

/// The compiler that `cargo xtask setup` puts into the cache folder where the system's is too old or missing.
fn set_up() -> Option<String> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|folder| folder.is_absolute())
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    let path = cache.join("tegula/tools/glslc/glslc");
    path.is_file().then(|| path.to_string_lossy().into_owned())
}

fn entry(name: &str, is_built: bool) -> String {
    let constant = name.to_uppercase();
    if is_built {
        format!(
            "pub(crate) const {constant}: &[u8] = include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.spv\"));\n"
        )
    } else {
        format!("pub(crate) const {constant}: &[u8] = &[];\n")
    }
}

fn compile(compiler: &str, name: &str, out: &Path) -> Result<(), String> {
    let source = format!("src/shaders/{name}.comp");
    let output = Command::new(compiler)
        .args(["--target-env=vulkan1.2", "-O", "-Werror", &source, "-o"])
        .arg(out.join(format!("{name}.spv")))
        .output()
        .map_err(|error| {
            format!(
                "cannot run the shader compiler `{compiler}`: {error}. Run `cargo xtask setup`, install it (Debian and Ubuntu: apt install glslc; \
                 Fedora: dnf install glslc) or name one in TEGULA_GLSLC"
            )
        })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let first = text.lines().find(|line| line.contains("error")).unwrap_or("no message");
    Err(format!("{source}: {first}"))
}
