//! The files of a command: its executables and their libraries.

use super::Error;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The options of `cargo test` that take the next word as their value.
const WITH_VALUE: [&str; 19] = [
    "--bench",
    "--bin",
    "--color",
    "--config",
    "--example",
    "--exclude",
    "--features",
    "--jobs",
    "--manifest-path",
    "--package",
    "--profile",
    "--target",
    "--target-dir",
    "--test",
    "-C",
    "-F",
    "-Z",
    "-j",
    "-p",
];

/// The commands of one run, in order, and the files they need.
pub(crate) struct Programs {
    /// Each has the path of its executable first.
    pub(crate) commands: Vec<Vec<OsString>>,
    /// Executables, which keep their paths in the lab, so that tests find the programs they start.
    pub(crate) executables: BTreeSet<PathBuf>,
    /// The shared libraries of all executables.
    pub(crate) libraries: BTreeSet<PathBuf>,
}

/// Finds the programs of `command`; builds the tests that `cargo test` names.
pub(crate) fn find(command: &[OsString]) -> Result<Programs, Error> {
    let is = |at: usize, word: &str| command.get(at).is_some_and(|given| given == word);
    let mut programs = if is(0, "cargo") && is(1, "test") {
        tests(&command[2..])?
    } else {
        one(command)?
    };
    for executable in &programs.executables {
        programs.libraries.extend(libraries(executable)?);
    }
    Ok(programs)
}

/// A program of this machine.
fn one(command: &[OsString]) -> Result<Programs, Error> {
    let path = Path::new(&command[0]);
    let found = std::fs::canonicalize(path)
        .ok()
        .filter(|path| path.is_file());
    let Some(executable) = found else {
        return Err(Error::Failed(format!(
            "there is no program {}: give a path, or 'cargo test' with its arguments",
            path.display()
        )));
    };
    let mut words = command.to_vec();
    words[0] = executable.clone().into();
    Ok(Programs {
        commands: vec![words],
        executables: BTreeSet::from([executable]),
        libraries: BTreeSet::new(),
    })
}

/// The test programs that `cargo test ARGUMENTS` would run, each with what follows `--`.
fn tests(arguments: &[OsString]) -> Result<Programs, Error> {
    let split = arguments.iter().position(|word| word == "--");
    let (build, run) = split.map_or((arguments, &[][..]), |at| {
        (&arguments[..at], &arguments[at + 1..])
    });
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "test",
            "--no-run",
            "--message-format=json-render-diagnostics",
        ])
        .args(build)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(Error::io("run cargo"))?;
    if !output.status.success() {
        return Err(Error::Failed(format!(
            "the tests do not build ({})",
            output.status
        )));
    }
    let mut programs = Programs {
        commands: Vec::new(),
        executables: BTreeSet::new(),
        libraries: BTreeSet::new(),
    };
    let filter = filter(build);
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Some((executable, is_test)) = artifact(line) else {
            continue;
        };
        if is_test {
            let mut words = vec![executable.clone().into_os_string()];
            words.extend(filter.cloned());
            words.extend_from_slice(run);
            programs.commands.push(words);
        }
        programs.executables.insert(executable);
    }
    if programs.commands.is_empty() {
        return Err(Error::Failed(
            "these arguments of 'cargo test' name no tests".into(),
        ));
    }
    Ok(programs)
}

/// The name among cargo's own arguments that chooses tests, which cargo gives to each test program.
fn filter(build: &[OsString]) -> Option<&OsString> {
    let is_value = |at: usize| {
        let before = at
            .checked_sub(1)
            .map(|before| build[before].to_string_lossy());
        before.is_some_and(|word| WITH_VALUE.contains(&word.as_ref()))
    };
    let is_option = |word: &OsString| word.to_string_lossy().starts_with('-');
    let words = build.iter().enumerate();
    let mut names = words.filter(|&(at, word)| !is_option(word) && !is_value(at));
    names.next().map(|(_, word)| word)
}

/// The executable in a message of cargo, and whether it is a test.
fn artifact(line: &str) -> Option<(PathBuf, bool)> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let executable = message.get("executable")?.as_str()?;
    let is_test = message["profile"]["test"].as_bool()?;
    Some((executable.into(), is_test))
}

/// The shared libraries of `executable`, with its loader; none if it is static.
fn libraries(executable: &Path) -> Result<Vec<PathBuf>, Error> {
    let output = Command::new("ldd")
        .arg(executable)
        .output()
        .map_err(Error::io("run ldd"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(missing) = text.lines().find(|line| line.contains("not found")) {
        return Err(Error::Failed(format!(
            "{} lacks a library: {}",
            executable.display(),
            missing.trim()
        )));
    }
    Ok(text.lines().filter_map(library).collect())
}

/// The path in a line of ldd: `name => path (address)`, or `path (address)`.
fn library(line: &str) -> Option<PathBuf> {
    let (path, _) = line.rsplit_once(" (")?;
    let path = path
        .rsplit_once("=> ")
        .map_or(path, |(_, path)| path)
        .trim();
    path.starts_with('/').then(|| PathBuf::from(path))
}

/// `word` as busybox's shell reads it literally.
pub(crate) fn quoted(word: &OsStr) -> Result<String, Error> {
    let word = word
        .to_str()
        .ok_or_else(|| Error::Failed(format!("'{}' is not UTF-8: rename it", word.display())))?;
    Ok(format!("'{}'", word.replace('\'', r"'\''")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_ldd() {
        let line = "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f00)";
        assert_eq!(
            library(line),
            Some("/lib/x86_64-linux-gnu/libc.so.6".into())
        );
        let loader = "\t/lib64/ld-linux-x86-64.so.2 (0x00007f00)";
        assert_eq!(library(loader), Some("/lib64/ld-linux-x86-64.so.2".into()));
        assert_eq!(library("\tlinux-vdso.so.1 (0x00007ffd)"), None);
        assert_eq!(library("\tstatically linked"), None);
    }

    #[test]
    fn words_stay_words() {
        let quoted = quoted(OsStr::new("it's $HOME")).unwrap();
        assert_eq!(quoted, r"'it'\''s $HOME'");
    }

    #[test]
    fn executables_are_read_from_cargo() {
        let line = r#"{"reason":"compiler-artifact","profile":{"test":true},"executable":"/t/it"}"#;
        assert_eq!(artifact(line), Some(("/t/it".into(), true)));
        let library =
            r#"{"reason":"compiler-artifact","profile":{"test":false},"executable":null}"#;
        assert_eq!(artifact(library), None);
        assert_eq!(artifact("not JSON"), None);
    }

    #[test]
    fn a_name_that_chooses_tests_is_found() {
        let chosen = |words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            filter(&words).cloned()
        };
        assert_eq!(chosen(&["-p", "machine", "--test", "it"]), None);
        let named = chosen(&["--locked", "--test", "it", "kvm_", "--release"]);
        assert_eq!(named, Some("kvm_".into()));
    }
}
