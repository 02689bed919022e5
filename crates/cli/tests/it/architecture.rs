//! ARCHITECTURE.md names every crate and its dependencies, as in the `Cargo.toml` files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The cells of the rows of the table whose header is `header`.
fn table(header: &str) -> Vec<Vec<String>> {
    let document = text("ARCHITECTURE.md");
    let mut lines = document.lines().skip_while(|line| *line != header);
    assert!(
        lines.next().is_some(),
        "ARCHITECTURE.md has no table '{header}'"
    );
    lines
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            line.trim_matches('|')
                .split('|')
                .map(|cell| cell.trim().to_owned())
                .collect()
        })
        .collect()
}

/// The texts between backticks in `cell`.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// The names of the folders in `crates`.
fn crates() -> BTreeSet<String> {
    std::fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// The crates of this workspace that `name` depends on, without those for development.
fn used_by(name: &str) -> BTreeSet<String> {
    let mut counts = false;
    let mut used = BTreeSet::new();
    for line in text(format!("crates/{name}/Cargo.toml")).lines() {
        if let Some(section) = line.strip_prefix('[') {
            counts = section.ends_with("dependencies]") && !section.ends_with("dev-dependencies]");
        } else if let Some(rest) = line.strip_prefix("pageferry-")
            && counts
        {
            let end = rest.find(['.', ' ', '=']).unwrap();
            used.insert(rest[..end].to_owned());
        }
    }
    used
}

#[test]
fn the_code_map_names_every_crate_once() {
    let named: Vec<_> = table("| crate | question | where to start |")
        .iter()
        .map(|row| {
            quoted(&row[0])[0]
                .strip_prefix("crates/")
                .unwrap()
                .to_owned()
        })
        .collect();
    assert_eq!(named.iter().cloned().collect::<BTreeSet<_>>(), crates());
    assert_eq!(
        named.len(),
        crates().len(),
        "a crate has two rows: {named:?}"
    );
}

#[test]
fn the_table_of_dependencies_is_that_of_the_manifests() {
    let documented: BTreeMap<_, BTreeSet<_>> = table("| crate | uses |")
        .iter()
        .map(|row| {
            let used = quoted(&row[1]).into_iter().map(str::to_owned).collect();
            (quoted(&row[0])[0].to_owned(), used)
        })
        .collect();
    let real: BTreeMap<_, _> = crates()
        .into_iter()
        .map(|name| (name.clone(), used_by(&name)))
        .collect();
    assert_eq!(documented, real);
}

/// The Rust files below `folder`, with their texts.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
    found
}

#[test]
fn the_migration_names_no_engine() {
    for (path, text) in sources(&root().join("crates/migration/src")) {
        for (at, line) in text.lines().enumerate() {
            let line = line.to_lowercase();
            let named = ["kvm", "\"soft\"", "soft engine", "engine::soft"];
            let named = named.iter().find(|name| line.contains(*name));
            assert_eq!(named, None, "{}:{}: {line}", path.display(), at + 1);
        }
    }
}

#[test]
fn the_code_map_names_files_that_exist() {
    for row in table("| crate | question | where to start |") {
        let folder = root().join(quoted(&row[0])[0]).join("src");
        for file in quoted(&row[2]) {
            let is_path = file.ends_with(".rs") || file.ends_with('/');
            assert!(
                !is_path || folder.join(file).exists(),
                "{}: no {file}",
                folder.display()
            );
        }
    }
}
