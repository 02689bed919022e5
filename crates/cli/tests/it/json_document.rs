//! `docs/json-output.md` against the output of the programs: its tables name every key, and no
//! other.

use serde_json::Value;
use std::collections::BTreeSet;

/// The document.
pub(crate) struct Document(String);

impl Document {
    pub(crate) fn read() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/json-output.md");
        Self(std::fs::read_to_string(path).expect("the document"))
    }

    /// The lines from the heading `title` to the next heading.
    #[track_caller]
    pub(crate) fn section(&self, title: &str) -> Section {
        let lines = self
            .0
            .lines()
            .skip_while(|line| line.trim_start_matches('#').trim() != title);
        let lines: Vec<String> = lines
            .enumerate()
            .take_while(|(index, line)| *index == 0 || !line.starts_with('#'))
            .map(|(_, line)| line.to_owned())
            .collect();
        assert!(!lines.is_empty(), "no section '{title}'");
        Section(lines)
    }
}

/// A section's lines.
pub(crate) struct Section(Vec<String>);

impl Section {
    /// This section and another, for an output that has the tables of both.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// The rows of its tables: the cells of each.
    pub(crate) fn rows(&self) -> impl Iterator<Item = Vec<&str>> {
        let rows = self.0.iter().filter_map(|line| line.strip_prefix('|'));
        rows.map(|row| {
            row.trim_end_matches('|')
                .split('|')
                .map(str::trim)
                .collect()
        })
    }

    /// The names in code spans.
    fn names(&self) -> BTreeSet<String> {
        let spans = self
            .0
            .iter()
            .flat_map(|line| line.split('`').skip(1).step_by(2));
        let words = spans
            .flat_map(|span| span.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-'));
        words
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect()
    }

    /// The paths in the first column of tables whose first heading is `key`. A path that begins
    /// with a point continues from the parent of the path before.
    fn paths(&self) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        let mut of_keys = false;
        for row in self.rows() {
            match row[0] {
                "key" => of_keys = true,
                "code" | "benchmark" | "command" => of_keys = false,
                cell if of_keys => {
                    for span in cell.split('`').skip(1).step_by(2) {
                        let parent = all.last().and_then(|last| last.rsplit_once('.'));
                        all.push(match (span.strip_prefix('.'), parent) {
                            (Some(rest), Some((parent, _))) => format!("{parent}.{rest}"),
                            _ => span.to_owned(),
                        });
                    }
                }
                _ => {}
            }
        }
        all
    }

    /// Fails unless `output` has every key that the tables name, except those of `absent`. Fails
    /// unless the section names every key of `output`, except those below `open`.
    #[track_caller]
    pub(crate) fn assert_describes(&self, output: &Value, absent: &[&str], open: &[&str]) {
        let names = self.names();
        let mut unnamed = BTreeSet::new();
        keys(output, open, &mut |key| {
            if !names.contains(key) {
                unnamed.insert(key.to_owned());
            }
        });
        assert!(
            unnamed.is_empty(),
            "not in docs/json-output.md: {unnamed:?}"
        );
        let paths = self.paths();
        assert!(!paths.is_empty(), "no table of keys");
        for path in paths.iter().filter(|path| !absent.contains(&path.as_str())) {
            assert!(
                has(output, path),
                "docs/json-output.md names {path}, which is not in\n{output:#}"
            );
        }
    }
}

fn keys(value: &Value, open: &[&str], visit: &mut dyn FnMut(&str)) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                visit(key);
                if !open.contains(&key.as_str()) {
                    keys(value, open, visit);
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| keys(value, open, visit)),
        _ => {}
    }
}

/// Whether `path` exists: points between keys, `[]` for any element of an array, `*` for any key.
fn has(value: &Value, path: &str) -> bool {
    let (first, rest) = path.split_once('.').unwrap_or((path, ""));
    let (name, list) = match first.strip_suffix("[]") {
        Some(name) => (name, true),
        None => (first, false),
    };
    let inner = |value: &Value| -> bool {
        match value {
            Value::Array(all) if list => {
                all.iter().any(|value| rest.is_empty() || has(value, rest))
            }
            // A path need not name elements of an array as such: an array of rows.
            value => rest.is_empty() || has(value, rest),
        }
    };
    match value {
        Value::Object(map) if name == "*" => map.values().any(inner),
        Value::Object(map) => map.get(name).is_some_and(inner),
        Value::Array(rows) => rows.iter().any(|row| has(row, path)),
        _ => false,
    }
}
