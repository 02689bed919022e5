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

/// The code of a file, without comments and without the tests at its end.
fn code(text: &str) -> String {
    let mut kept = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let begins_tests = line.starts_with("#[cfg(") && line.contains("test");
        if begins_tests && lines.peek().is_some_and(|next| next.ends_with('{')) {
            break;
        }
        kept.push_str(line.split("//").next().unwrap());
        kept.push('\n');
    }
    kept
}

/// The names that follow `path` in `code`: of `path::a` and of `path::{a, b::c}`.
fn named_after(code: &str, path: &str) -> BTreeSet<String> {
    let name_of = |text: &str| -> String {
        let is_part = |c: &char| c.is_alphanumeric() || *c == '_';
        text.trim_start().chars().take_while(is_part).collect()
    };
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices(path) {
        let before = &code[..at];
        if before.ends_with("::") || before.ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &code[at + path.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            names.insert(name_of(rest));
            continue;
        };
        names.insert(name_of(group));
        let mut depth = 0;
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => drop(names.insert(name_of(&group[at + 1..]))),
                _ => {}
            }
        }
    }
    names
}

/// The modules of `folder`, each with those that it uses. `path` is the folder's own path in its
/// crate, such as `crate::` or `crate::kvm::x86::`. Tests do not count.
fn uses_between_modules(folder: &Path, path: &str) -> BTreeMap<String, BTreeSet<String>> {
    let root = ["lib.rs", "main.rs", "mod.rs"]
        .iter()
        .find_map(|name| std::fs::read_to_string(folder.join(name)).ok())
        .expect("a module of modules has a file of its own");
    let files = sources(folder);
    // Modules that are compiled for tests only.
    let mut of_tests = Vec::new();
    for (file, text) in &files {
        let is_root = ["lib.rs", "main.rs", "mod.rs"]
            .iter()
            .any(|name| file.ends_with(name));
        let inside = if is_root {
            file.parent().unwrap().to_owned()
        } else {
            file.with_extension("")
        };
        for pair in text.lines().collect::<Vec<_>>().windows(2) {
            if pair[0].starts_with("#[cfg(")
                && pair[0].contains("test")
                && let Some(name) = pair[1].trim_start_matches("pub ").strip_prefix("mod ")
            {
                of_tests.push(inside.join(name.trim_end_matches(';')));
            }
        }
    }
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut codes = Vec::new();
    for (file, text) in &files {
        let place = file.strip_prefix(folder).unwrap().with_extension("");
        let parts: Vec<_> = place.iter().map(|part| part.to_str().unwrap()).collect();
        if of_tests
            .iter()
            .any(|tests| file.with_extension("").starts_with(tests))
            || ["lib", "main", "mod"].contains(&parts[0])
        {
            continue;
        }
        modules.entry(parts[0].to_owned()).or_default();
        let depth = parts.len() - usize::from(parts.last() == Some(&"mod"));
        codes.push((parts[0].to_owned(), "super::".repeat(depth), code(text)));
    }
    // The names that the folder's own file passes on, with their modules.
    let mut passed_on = BTreeMap::new();
    for name in modules.keys() {
        for shown in named_after(&code(&root), &format!("{name}::")) {
            passed_on.insert(shown, name.clone());
        }
    }
    for (module, above, code) in codes {
        for name in [path, above.as_str()]
            .into_iter()
            .flat_map(|path| named_after(&code, path))
        {
            let known = modules.contains_key(&name).then_some(&name);
            if let Some(used) = known.or_else(|| passed_on.get(&name))
                && *used != module
            {
                modules.get_mut(&module).unwrap().insert(used.clone());
            }
        }
    }
    modules
}

/// The modules that use each other in a circle, or that use such ones and are used by them.
fn in_circles(uses: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    let mut left: BTreeSet<String> = uses.keys().cloned().collect();
    loop {
        let keeps = |name: &String| {
            let uses_left = uses[name].iter().any(|used| left.contains(used));
            let is_used = left.iter().any(|other| uses[other].contains(name));
            uses_left && is_used
        };
        let next: BTreeSet<_> = left.iter().filter(|name| keeps(name)).cloned().collect();
        if next == left {
            return left;
        }
        left = next;
    }
}

/// Folders whose modules use each other in one direction only.
const LAYERED: &[(&str, &str)] = &[
    ("crates/migration/src", "crate::"),
    ("crates/machine/src/kvm/x86", "crate::kvm::x86::"),
    ("crates/tdp/src", "crate::"),
];

#[test]
fn modules_use_each_other_in_one_direction() {
    for (folder, path) in LAYERED {
        let uses = uses_between_modules(&root().join(folder), path);
        assert!(uses.len() > 3, "{folder}: {uses:?}");
        let circle = in_circles(&uses);
        let edges: Vec<_> = circle
            .iter()
            .flat_map(|from| uses[from].intersection(&circle).map(move |to| (from, to)))
            .collect();
        assert!(circle.is_empty(), "{folder} has a circle in {edges:?}");
    }
}

#[test]
fn a_circle_of_modules_is_seen() {
    let uses = |list: &[(&str, &str)]| {
        let names = list.iter().flat_map(|(from, to)| [from, to]);
        let mut uses: BTreeMap<String, BTreeSet<String>> = names
            .map(|name| ((*name).to_owned(), BTreeSet::new()))
            .collect();
        for (from, to) in list {
            uses.get_mut(*from).unwrap().insert((*to).to_owned());
        }
        uses
    };
    assert!(in_circles(&uses(&[("a", "b"), ("b", "c"), ("a", "c")])).is_empty());
    let circle = in_circles(&uses(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]));
    assert_eq!(circle.into_iter().collect::<Vec<_>>(), ["b", "c"]);
    let code = "use crate::{a::B, c::{d, e}, f};\ncrate::g::h(); super::crate::no; // crate::i\n";
    let named = named_after(&self::code(code), "crate::");
    assert_eq!(named.into_iter().collect::<Vec<_>>(), ["a", "c", "f", "g"]);
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
