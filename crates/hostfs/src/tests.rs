use crate::folder::sweep;
use crate::{Folder, ListenError, OwnError, Owner, give, listen_at, own_directory};
use rustix::fs::{AtFlags, Gid, Mode, Uid, chmodat, chownat};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

fn scratch() -> Folder {
    Folder::within(&std::env::temp_dir()).unwrap()
}

fn owner(mode: u32) -> Owner {
    Owner {
        mode,
        ..Owner::default()
    }
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn a_socket_has_its_mode_and_is_not_taken_from_a_listener() {
    let scratch = scratch();
    let path = scratch.path().join("socket");
    for wanted in [0o600, 0o660, 0o666] {
        let (socket, file) = listen_at(&path, &owner(wanted)).unwrap();
        assert_eq!(mode(&path), wanted);
        UnixStream::connect(&path).unwrap();
        let refused = listen_at(&path, &owner(0o600)).unwrap_err();
        assert!(matches!(refused, ListenError::InUse(_)), "{refused}");
        // Left behind, as by a kill.
        file.keep();
        drop(socket);
        assert!(path.exists());
    }
    drop(listen_at(&path, &owner(0o600)).unwrap());
    assert!(!path.exists());
    // Nothing else is left but the file by which this process holds the directory.
    let left = fs::read_dir(scratch.path()).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [".held"]);
}

#[test]
fn a_path_that_cannot_be_listened_at_is_left_as_it_is() {
    let scratch = scratch();
    let path = scratch.path().join("file");
    fs::write(&path, "kept").unwrap();
    let refused = listen_at(&path, &owner(0o600)).unwrap_err();
    assert!(matches!(refused, ListenError::NoSocket(_)), "{refused}");
    assert_eq!(fs::read(&path).unwrap(), b"kept");
    let refused = listen_at(&path.join("below"), &owner(0o600)).unwrap_err();
    assert!(
        refused
            .to_string()
            .ends_with("Not a directory (os error 20)"),
        "{refused}"
    );
    let long = scratch.path().join("x".repeat(200));
    let refused = listen_at(&long, &owner(0o600)).unwrap_err();
    assert!(matches!(refused, ListenError::TooLong(_)), "{refused}");
    // A link is what is there, whatever it leads to.
    let link = scratch.path().join("link");
    symlink("nowhere", &link).unwrap();
    let refused = listen_at(&link, &owner(0o600)).unwrap_err();
    assert!(matches!(refused, ListenError::NoSocket(_)), "{refused}");
}

#[test]
fn only_the_own_socket_is_removed() {
    let scratch = scratch();
    let path = scratch.path().join("socket");
    let (_socket, file) = listen_at(&path, &owner(0o600)).unwrap();
    fs::rename(&path, scratch.path().join("moved")).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    drop(file);
    assert!(path.exists(), "the socket of another is not ours to remove");
}

#[test]
fn one_of_many_gets_a_path_that_somebody_left_behind() {
    let scratch = scratch();
    let path = scratch.path().join("socket");
    for _ in 0..50 {
        drop(UnixListener::bind(&path).unwrap());
        let start = Barrier::new(4);
        let got = std::thread::scope(|scope| {
            let tries: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        listen_at(&path, &owner(0o660)).ok()
                    })
                })
                .collect();
            let all: Vec<_> = tries
                .into_iter()
                .filter_map(|one| one.join().unwrap())
                .collect();
            UnixStream::connect(&path).expect("the one that got it is still there");
            all.len()
        });
        assert_eq!(got, 1);
    }
}

#[test]
fn a_socket_that_goes_takes_no_newer_one_with_it() {
    let scratch = scratch();
    let path = scratch.path().join("socket");
    let (socket, file) = listen_at(&path, &owner(0o600)).unwrap();
    // As another process that replaces the socket, and is half-way.
    let directory = fs::File::open(scratch.path()).unwrap();
    directory.lock().unwrap();
    drop(socket);
    let (gone, goes) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            drop(file);
            gone.send(()).unwrap();
        });
        let early = goes.recv_timeout(Duration::from_millis(50));
        assert!(early.is_err(), "it waits for the lock");
        fs::remove_file(&path).unwrap();
        let _newer = UnixListener::bind(&path).unwrap();
        directory.unlock().unwrap();
        goes.recv_timeout(Duration::from_secs(60)).unwrap();
        UnixStream::connect(&path).unwrap();
    });
}

#[test]
fn a_folder_goes_with_all_it_holds() {
    let outside = scratch();
    fs::write(outside.path().join("kept"), "").unwrap();
    let folder = scratch();
    let path = folder.path().to_owned();
    assert_eq!(mode(&path), 0o700);
    folder.create_directory("a").unwrap();
    fs::create_dir(path.join("a/b")).unwrap();
    fs::write(path.join("a/b/c"), "x").unwrap();
    symlink(outside.path(), path.join("a/link")).unwrap();
    drop(folder);
    assert!(!path.exists());
    assert!(outside.path().join("kept").exists(), "no link is followed");
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    let scratch = scratch();
    let ours = scratch.path().join("ours");
    own_directory(&ours).unwrap();
    own_directory(&ours).unwrap();
    fs::set_permissions(&ours, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = own_directory(&ours).unwrap_err();
    assert!(refused.to_string().contains("mode 777"), "{refused}");
    let (file, link) = (scratch.path().join("file"), scratch.path().join("link"));
    fs::write(&file, "").unwrap();
    assert!(matches!(own_directory(&file), Err(OwnError::Refused(_))));
    symlink("ours", &link).unwrap();
    assert!(matches!(own_directory(&link), Err(OwnError::Refused(_))));
}

/// The source files below a directory.
fn sources(directory: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension() == Some(OsStr::new("rs")) && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
}

#[test]
fn no_other_room_gives_files_away_or_listens_at_a_path() {
    let calls = [
        "chown(",
        "chownat(",
        "chmod(",
        "chmodat(",
        "fs::set_permissions(",
        "UnixListener::bind(",
        "TcpListener::bind(",
        "TcpStream::connect",
        "to_socket_addrs(",
    ];
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for name in [
        "cli",
        "bridge",
        "pager",
        "remote",
        "migration",
        "machine",
        "snapshot",
        "charts",
    ] {
        let mut found = Vec::new();
        sources(&crates.join(name).join("src"), &mut found);
        for path in found {
            let text = fs::read_to_string(&path).unwrap();
            let text = text.split("#[cfg(test)]").next().unwrap();
            let call = calls.iter().find(|call| text.contains(**call));
            assert!(
                call.is_none(),
                "{} calls {call:?}: use this room, or `transport`",
                path.display()
            );
        }
    }
}

/// A user who swaps each new name in his directory for a link to a file of root, and back.
fn swap(directory: &Path, victim: &Path, over: &AtomicBool) -> u64 {
    // Of this thread alone.
    let user = Uid::from_raw(65534);
    rustix::thread::set_thread_groups(&[]).unwrap();
    rustix::thread::set_thread_gid(Gid::from_raw(65534)).unwrap();
    rustix::thread::set_thread_uid(user).unwrap();
    let mut swapped = 0;
    while !over.load(Ordering::Relaxed) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension() == Some(OsStr::new("old")) || path.ends_with("api") {
                continue;
            }
            let aside = path.with_extension("old");
            if fs::rename(&path, &aside).is_ok() && symlink(victim, &path).is_ok() {
                swapped += 1;
                // Long enough for a call by the path.
                std::thread::sleep(Duration::from_micros(20));
                let _ = fs::remove_file(&path);
            }
            let _ = fs::remove_file(&aside).or_else(|_| fs::remove_dir_all(&aside));
        }
    }
    swapped
}

/// A child of its own makes a directory and is killed.
#[test]
fn what_a_killed_process_left_goes_and_what_is_held_stays() {
    const PLACE: &str = "PAGEFERRY_TEST_PLACE";
    if let Some(place) = std::env::var_os(PLACE) {
        let folder = Folder::within(Path::new(&place)).unwrap();
        folder.create("file", &Owner::default()).unwrap();
        folder.create_directory("below").unwrap();
        std::process::abort();
    }
    let root = scratch();
    let name = "tests::what_a_killed_process_left_goes_and_what_is_held_stays";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    root.create_directory("place").unwrap();
    let place = root.path().join("place");
    let child = child.args(["--exact", name]).env(PLACE, &place);
    assert!(!child.output().unwrap().status.success());
    let held = Folder::within(&place).unwrap();
    fs::create_dir(place.join("pageferry-of-somebody")).unwrap();
    let names = || fs::read_dir(&place).unwrap().count();
    assert_eq!(names(), 3, "a young one may be about to be held");
    let directory = crate::open_directory(&place).unwrap();
    sweep(&directory, Duration::ZERO);
    assert_eq!(names(), 2);
    assert!(held.path().exists());
}

#[test]
fn a_user_who_swaps_names_gets_no_file_of_root() {
    if !rustix::process::geteuid().is_root() {
        pageferry_testkit::skip("root", "two users need it");
        return;
    }
    let root = scratch();
    chmodat(&root, ".", Mode::from_raw_mode(0o755), AtFlags::empty()).unwrap();
    let jail = root.path().join("jail");
    fs::create_dir(&jail).unwrap();
    let (user, group) = (Uid::from_raw(65534), Gid::from_raw(65534));
    chownat(&root, "jail", Some(user), Some(group), AtFlags::empty()).unwrap();
    let api = jail.join("api");
    let _api = UnixListener::bind(&api).unwrap();
    chownat(&root, "jail/api", Some(user), Some(group), AtFlags::empty()).unwrap();
    // The victims: a file, and a directory with one.
    let victims = [root.path().join("file"), root.path().join("directory")];
    fs::write(&victims[0], "secret").unwrap();
    fs::set_permissions(&victims[0], fs::Permissions::from_mode(0o600)).unwrap();
    fs::create_dir(&victims[1]).unwrap();
    fs::write(victims[1].join("m"), "secret").unwrap();
    fs::set_permissions(&victims[1], fs::Permissions::from_mode(0o700)).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let attackers: Vec<_> = victims
        .iter()
        .map(|victim| {
            let (jail, victim, over) = (jail.clone(), victim.clone(), over.clone());
            std::thread::spawn(move || swap(&jail, &victim, &over))
        })
        .collect();
    let theirs = Owner {
        user: Some(65534),
        group: Some(65534),
        mode: 0o666,
    };
    let mut made = 0;
    for _ in 0..2000 {
        made += u32::from(listen_at(&jail.join("socket"), &theirs).is_ok());
        if let Ok((folder, owner)) = Folder::beside(&api) {
            made += u32::from(folder.listen("m", &owner).is_ok());
            let file = folder.create("state", &owner);
            made += u32::from(file.is_ok_and(|file| give(file, &theirs).is_ok()));
        }
    }
    over.store(true, Ordering::Relaxed);
    let swapped: u64 = attackers
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .sum();
    assert!(
        swapped > 0 && made > 0,
        "{swapped} names swapped, {made} things made"
    );
    for (path, wanted) in [
        (victims[0].clone(), 0o600),
        (victims[1].clone(), 0o700),
        (victims[1].join("m"), 0o644),
    ] {
        let found = fs::metadata(&path).unwrap();
        assert_eq!(
            (found.uid(), found.mode() & 0o777),
            (0, wanted),
            "{}",
            path.display()
        );
    }
    assert_eq!(fs::read(&victims[0]).unwrap(), b"secret");
}
