//! Firecracker processes with a root and a mount namespace of their own, as the jailer makes them.

use crate::fc::{Hosts, source_at, take};
use pageferry_testkit::firecracker::Quirk;
use pageferry_testkit::wait_until;
use std::path::Path;

/// Nothing of ours is left beside the API sockets, and in the mount namespaces.
#[track_caller]
fn check_nothing_is_left(hosts: &Hosts) {
    for api in &hosts.apis {
        let left = std::fs::read_dir(api.parent().unwrap()).unwrap();
        let left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let left: Vec<_> = left.filter(|name| name.starts_with('.')).collect();
        assert!(left.is_empty(), "{left:?}");
    }
    for double in [&hosts.source, &hosts.target] {
        let mounts = double.mounts();
        assert!(!mounts.contains("tmpfs"), "{mounts}");
    }
}

#[test]
fn a_vm_moves_from_jail_to_jail() {
    let Some(mut hosts) = Hosts::in_jails(&[12 << 20], [Quirk::Right; 2]) else {
        return;
    };
    wait_until("the guest to work", || {
        hosts.source.status().touched() > 500
    });
    let route = hosts.route();
    let moved = hosts.migrate(&route, |_| ());
    let sent = moved.sent.unwrap();
    assert!(sent.pages.precopy > 0, "{:?}", sent.pages);
    moved.received.unwrap();
    let loaded = hosts.target.status().loaded;
    let state = Path::new(loaded["snapshot_path"].as_str().unwrap());
    assert!(
        state.starts_with("/") && state.ancestors().count() == 3,
        "{state:?}"
    );
    let status = hosts.target.verify();
    assert_eq!((status.wrong, &status.state[..]), (0, "Running"));
    assert_eq!(hosts.source.status().state, "Paused");
    check_nothing_is_left(&hosts);
}

#[test]
fn a_failed_move_leaves_nothing_in_the_jails() {
    for (quirks, sentence) in [
        (
            [Quirk::RefuseCreate, Quirk::Right],
            "the VM cannot be saved",
        ),
        // The tmpfs has no room for more.
        ([Quirk::MoreMemory, Quirk::Right], "No space left on device"),
        (
            [Quirk::LinkState, Quirk::Right],
            "Too many levels of symbolic links",
        ),
        ([Quirk::Right, Quirk::ShortHandshake], "its regions have"),
    ] {
        let Some(mut hosts) = Hosts::in_jails(&[8 << 20, 4 << 20], quirks) else {
            return;
        };
        let route = hosts.route();
        let moved = hosts.migrate(&route, |_| ());
        let text = format!(
            "{} {}",
            moved.sent.unwrap_err(),
            moved.received.unwrap_err()
        );
        assert!(text.contains(sentence), "{quirks:?}: {text}");
        assert_eq!(hosts.source.status().state, "Running");
        let status = hosts.source.verify();
        assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
        check_nothing_is_left(&hosts);
    }
}

/// A path that leads into the jail, and one by which nobody can tell where that is.
#[test]
fn an_api_socket_is_found_in_a_jail_by_other_paths() {
    let Some(hosts) = Hosts::in_jails(&[12 << 20], [Quirk::Right; 2]) else {
        return;
    };
    let api = hosts.source_options().api;
    let link = hosts.directory.join("link");
    std::os::unix::fs::symlink(&api, &link).unwrap();
    drop(take(source_at(&link)).unwrap());
    check_nothing_is_left(&hosts);
    // A second name of the socket outside.
    let outside = hosts.directory.join("outside");
    std::fs::hard_link(&hosts.apis[0], &outside).unwrap();
    let error = take(source_at(&outside)).unwrap_err().to_string();
    assert!(error.contains("does not lie below the root"), "{error}");
}
