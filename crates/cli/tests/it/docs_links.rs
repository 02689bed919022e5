//! The links of the documents lead to files and headings that exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The documents below `folder`, without those of builds and of downloads.
fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let (path, name) = entry.map(|e| (e.path(), e.file_name())).unwrap();
        let name = name.to_str().unwrap();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            documents(&path, found);
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The lines outside blocks of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// The anchors of the headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| -> String {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
        let spaced = heading.chars().filter(kept);
        spaced.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// The targets of the links in a line.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let after = line.split("](").skip(1);
    after.filter_map(|rest| rest.split_once(')').map(|(link, _)| link))
}

/// The reason why a link of `document` leads nowhere.
fn broken(document: &Path, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let file = match path {
        "" => document.to_owned(),
        path => document.parent().unwrap().join(path),
    };
    if !file.exists() {
        return Some(format!("{}: no file for {link}", document.display()));
    }
    let has_anchor = || anchors(&text(&file)).contains(anchor);
    let lost = !anchor.is_empty() && path.ends_with(".md") | path.is_empty() && !has_anchor();
    lost.then(|| format!("{}: no heading for {link}", document.display()))
}

#[test]
fn links_of_documents_lead_somewhere() {
    let mut all = Vec::new();
    documents(&root(), &mut all);
    assert!(all.len() > 20, "{} documents", all.len());
    let broken: Vec<String> = all
        .iter()
        .flat_map(|document| {
            let text = text(document);
            let broken = prose(&text)
                .flat_map(links)
                .filter_map(|link| broken(document, link));
            broken.collect::<Vec<_>>()
        })
        .collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let document = root().join("docs/own-vmm.md");
    let says = |link| broken(&document, link).unwrap_or_default();
    assert!(says("nowhere.md").contains("no file for nowhere.md"));
    assert!(says("mmu.md#nothing").contains("no heading for mmu.md#nothing"));
    assert!(says("#nothing").contains("no heading for #nothing"));
    for link in [
        "mmu.md#terms",
        "#memory",
        "../README.md",
        "https://example.com/x.md#y",
    ] {
        assert_eq!(says(link), "", "{link}");
    }
}

/// The index of the decisions names each of them, and each file is of a crate.
#[test]
fn the_index_of_the_decisions_is_complete() {
    let folder = root().join("docs/decisions");
    let index = text(&folder.join("README.md"));
    let named: BTreeSet<&str> = prose(&index).flat_map(links).collect();
    let mut files = Vec::new();
    documents(&folder, &mut files);
    for file in files {
        let name = file.file_stem().unwrap().to_str().unwrap();
        if name == "README" {
            continue;
        }
        assert!(root().join("crates").join(name).is_dir(), "no crate {name}");
        let text = text(&file);
        let titles = prose(&text).filter(|line| line.starts_with("## "));
        for anchor in anchors(&titles.collect::<Vec<_>>().join("\n")) {
            let link = format!("{name}.md#{anchor}");
            assert!(named.contains(link.as_str()), "the index lacks {link}");
        }
    }
}
