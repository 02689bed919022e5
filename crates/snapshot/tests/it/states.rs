//! State files and labels.

use crate::support::{Dir, PAGE, noise, packed, small, try_pack};
use pageferry_snapshot::{
    Compression, Labels, Options, PackError, Snapshot, StateFile, open_input, write_state,
};
use std::fs::File;
use std::path::Path;

fn state(name: &str, file: &Path) -> StateFile {
    StateFile {
        name: name.into(),
        file: open_input(file).unwrap(),
    }
}

#[test]
fn states_and_labels_travel() {
    let dir = Dir::new();
    let memory = dir.write("memory", &noise(1, 3 * PAGE));
    let (one, two) = (noise(2, 100_000), Vec::new());
    let files = [dir.write("one.bin", &one), dir.write("two.bin", &two)];
    let labels = Labels {
        vmm: "firecracker".into(),
        version: "1.16.1".into(),
        cpu: "T2CL".into(),
    };
    let options = Options {
        labels: labels.clone(),
        states: vec![state("vmstate", &files[0]), state("config.json", &files[1])],
        ..small(PAGE as u32, Compression::Lz4)
    };
    packed(&memory, &dir.path("packed"), options);
    let snapshot = Snapshot::open(&dir.path("packed")).unwrap();
    assert_eq!(snapshot.labels(), &labels);
    let names: Vec<_> = snapshot
        .states()
        .iter()
        .map(|state| (&*state.name, state.bytes))
        .collect();
    assert_eq!(names, [("vmstate", 100_000), ("config.json", 0)]);
    for (index, expected) in [one, two].iter().enumerate() {
        assert_eq!(snapshot.read_state(index).unwrap(), *expected);
        let out = dir.path(&format!("state {index}"));
        write_state(&snapshot, index, &out).unwrap();
        assert_eq!(std::fs::read(out).unwrap(), *expected);
    }
}

#[test]
fn states_beyond_their_bounds_are_refused() {
    let dir = Dir::new();
    let memory = dir.write("memory", &noise(1, PAGE));
    let good = dir.write("good", b"state");
    let big = dir.path("big");
    File::create(&big).unwrap().set_len((16 << 20) + 1).unwrap();
    let largest = dir.path("largest");
    File::create(&largest).unwrap().set_len(16 << 20).unwrap();
    let refused = |states: Vec<StateFile>| {
        let options = Options {
            states,
            ..Options::default()
        };
        let error = try_pack(&memory, &dir.path("out"), options).unwrap_err();
        assert!(dir.names().iter().all(|name| !name.contains("out")));
        error.to_string()
    };
    for name in [
        "",
        ".",
        "..",
        "a/b",
        ".hidden",
        "sp ace",
        "ü",
        &"n".repeat(65),
    ] {
        let said = refused(vec![state(name, &good)]);
        assert!(
            said.contains(&format!("'{name}' cannot be the name")),
            "{said}"
        );
    }
    let said = refused(vec![state("s", &good), state("s", &good)]);
    assert!(said.contains("each name once"), "{said}");
    assert!(refused(vec![state("s", &big)]).contains("'s' has more than 16 MiB"));
    let many = (0..65).map(|number| state(&format!("s{number}"), &good));
    assert!(refused(many.collect()).contains("65 states"));

    let options = Options {
        states: vec![state("s", &largest)],
        ..Options::default()
    };
    packed(&memory, &dir.path("packed"), options);
    let snapshot = Snapshot::open(&dir.path("packed")).unwrap();
    assert_eq!(snapshot.read_state(0).unwrap().len(), 16 << 20);

    let options = Options {
        labels: Labels {
            cpu: "x".repeat(257),
            ..Labels::default()
        },
        ..Options::default()
    };
    let error = try_pack(&memory, &dir.path("out"), options).unwrap_err();
    assert!(matches!(error, PackError::Label(_, 257)), "{error}");
}
