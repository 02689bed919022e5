//! The test programs of the workspace.
//!
//! **Guarantee.** All are built by one command with one set of features, whichever of them then
//! run: no crate is compiled twice for two of them.

use serde_json::Value;
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The crates whose tests run optimised too.
const STRESSED: [&str; 6] = [
    "pageferry-hypervisor",
    "pageferry-machine",
    "pageferry-memslot",
    "pageferry-migration",
    "pageferry-tdp",
    "pageferry-userfault",
];

/// The crate of the benchmarks. It compiles other projects, which no other crate needs. It changes
/// no features of the crates that all share.
const BENCH: &str = "pageferry-bench";

/// The programs that run longest, in this order. The others fill the gaps at the end.
const LONGEST: [&str; 7] = [
    "pageferry-migration it",
    "pageferry it",
    "pageferry-tdp it",
    "pageferry-bridge it",
    "pageferry-machine it",
    "pageferry-hypervisor it",
    "pageferry-pager it",
];

/// The kinds of tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Kind {
    /// Unit tests, of a library or a program
    Lib,
    /// Integration tests
    It,
    /// Examples in the documentation
    Doc,
}

impl Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lib => "lib",
            Self::It => "it",
            Self::Doc => "doc",
        })
    }
}

/// A test program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) package: String,
    pub(super) kind: Kind,
    pub(super) path: PathBuf,
    /// The folder of its package, in which it runs.
    pub(super) folder: PathBuf,
}

impl Program {
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.package, self.kind)
    }

    /// Programs with a lower number come first: the longest, and then the others.
    fn turn(&self) -> usize {
        let name = self.name();
        let longest = LONGEST.iter().position(|long| *long == name);
        longest.unwrap_or(LONGEST.len())
    }
}

/// The words by which cargo takes all crates, or all but [`BENCH`] if `packages` do not name it.
pub(super) fn workspace(packages: &[String]) -> impl Iterator<Item = &'static str> {
    let exclude = [Some("--exclude"), Some(BENCH)];
    let named = packages.iter().any(|name| name == BENCH);
    let words = if named { [None, None] } else { exclude };
    std::iter::once("--workspace").chain(words.into_iter().flatten())
}

/// The folder of the workspace.
pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Cargo, in the workspace.
pub(super) fn cargo() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root());
    cargo
}

/// Builds the test programs of the workspace, or those of [`STRESSED`] by the profile `stress`.
/// Those of [`BENCH`] are built only if `packages` name it.
pub(super) fn build(profile: &str, packages: &[String]) -> Result<Vec<Program>, String> {
    let mut cargo = cargo();
    cargo.args(["test", "--no-run", "--profile", profile]);
    if profile == "stress" {
        cargo.args(STRESSED.iter().flat_map(|name| ["-p", name]));
    } else {
        cargo.args(workspace(packages));
    }
    let output = cargo
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|why| format!("cannot run {}: {why}", env!("CARGO")))?;
    if !output.status.success() {
        return Err(format!("the tests do not build ({})", output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let mut programs: Vec<_> = text.lines().filter_map(program).collect();
    programs.sort_by_key(Program::turn);
    Ok(programs)
}

/// The test program in a message of cargo.
fn program(line: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    if !message["profile"]["test"].as_bool()? {
        return None;
    }
    let kind = match message["target"]["kind"][0].as_str()? {
        "test" if message["target"]["name"] == "it" => Kind::It,
        // A model: without its `cfg`, it has no tests.
        "test" => return None,
        _ => Kind::Lib,
    };
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    // The end of it is `/NAME#VERSION`, or `#NAME@VERSION` where folder and name differ.
    let (before, after) = message["package_id"].as_str()?.rsplit_once('#')?;
    let package = match after.split_once('@') {
        Some((name, _)) => name,
        None => before.rsplit('/').next()?,
    };
    Some(Program {
        package: package.to_owned(),
        kind,
        path: message["executable"].as_str()?.into(),
        folder: folder.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(id: &str, kind: &str, test: bool) -> String {
        let name = if id.starts_with("model") {
            "loom"
        } else {
            "it"
        };
        format!(
            r#"{{"reason":"compiler-artifact","package_id":"path+file:///w/crates/{id}",
             "manifest_path":"/w/crates/x/Cargo.toml","target":{{"kind":["{kind}"],"name":"{name}"}},
             "profile":{{"test":{test}}},"executable":"/t/n-1"}}"#
        )
        .replace('\n', "")
    }

    #[test]
    fn test_programs_are_read_from_cargo() {
        let program = |package: &str, kind| {
            Some(Program {
                package: package.to_owned(),
                kind,
                path: "/t/n-1".into(),
                folder: "/w/crates/x".into(),
            })
        };
        let read = |id, kind| super::program(&message(id, kind, true));
        assert_eq!(
            read("x#pageferry-x@0.1.0", "test"),
            program("pageferry-x", Kind::It)
        );
        assert_eq!(read("xtask#0.1.0", "bin"), program("xtask", Kind::Lib));
        assert_eq!(super::program(&message("xtask#0.1.0", "bin", false)), None);
        assert_eq!(read("model#pageferry-x@0.1.0", "test"), None);
        assert_eq!(super::program("not JSON"), None);
    }
}
