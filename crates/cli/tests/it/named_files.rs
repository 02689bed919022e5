//! Files that a user names and that would hold a process up: FIFOs, devices and endless ones.

use crate::support::certificates::{Authority, Now, SideFlags};
use crate::support::{Dir, Process, Source, pageferry};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::path::Path;

fn fifo(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

#[test]
fn tls_files_that_are_no_regular_files_are_refused() {
    let authority = Authority::new("test");
    let here = authority.issue(&["here"], Now);
    let dir = Dir::new();
    let (pipe, huge) = (dir.path("fifo"), dir.path("huge"));
    fifo(&pipe);
    std::fs::File::create(&huge)
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let source = Source::start("16M");
    for (file, why) in [
        (
            pipe.to_str().unwrap(),
            "it is a FIFO, expected a regular file",
        ),
        ("/dev/zero", "it is a device, expected a regular file"),
        ("/dev/stdin", "expected a regular file"),
        (huge.to_str().unwrap(), "it is too large"),
    ] {
        // The certificate, the key and the CA, at both ends.
        for at in [1, 3, 5] {
            let mut flags = here.flags("there");
            flags[at] = file.to_owned();
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            let receive = [&["receive", "--listen", "127.0.0.1:0"][..], &flags].concat();
            pageferry(&receive).assert_failed(2, why);
            let migrate = source.migrate_with("127.0.0.1:9", &flags);
            migrate.end().assert_failed(2, why);
        }
    }
    source.assert_unharmed();
}

#[test]
fn a_kernel_or_initrd_that_is_no_regular_file_is_refused() {
    let dir = Dir::new();
    let (control, pipe, image) = (dir.path("vm"), dir.path("fifo"), dir.path("image"));
    fifo(&pipe);
    std::fs::write(&image, "x").unwrap();
    for (file, why) in [
        (pipe.as_path(), "it is a FIFO, expected a regular file"),
        (Path::new("/dev/zero"), "it is a device"),
        (Path::new("/proc"), "it is a directory"),
    ] {
        for (kernel, initrd) in [(file, image.as_path()), (&image, file)] {
            let [control, kernel, initrd] =
                [&control, kernel, initrd].map(|path: &Path| path.to_str().unwrap());
            let words =
                format!("run --memory 16M --control {control} --kernel {kernel} --initrd {initrd}");
            let args: Vec<&str> = words.split(' ').collect();
            Process::start(&args, &dir).end().assert_failed(2, why);
        }
    }
}

#[test]
fn a_console_whose_fifo_nobody_reads_is_refused() {
    let dir = Dir::new();
    let (control, pipe, image) = (dir.path("vm"), dir.path("fifo"), dir.path("image"));
    fifo(&pipe);
    std::fs::write(&image, "x").unwrap();
    let [control, pipe, image] = [&control, &pipe, &image].map(|path| path.to_str().unwrap());
    let words = format!("run --memory 16M --control {control} --kernel {image} --console {pipe}");
    let args: Vec<&str> = words.split(' ').collect();
    let ended = Process::start(&args, &dir).end();
    ended.assert_failed(2, "start its reader first");
}
