//! Files that are written whole or not at all.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Writes `text` to `path`. It writes a temporary file in the same directory and renames it, so a
/// failure leaves the old file unchanged. A path that is not a regular file, such as `/dev/stdout`,
/// is opened and written directly.
///
/// # Errors
/// The error of the system call that failed. The temporary file is removed first.
pub fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    let link = fs::canonicalize(path);
    let path = link.as_deref().unwrap_or(path);
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return OpenOptions::new()
            .write(true)
            .open(path)?
            .write_all(text.as_bytes());
    }
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.part", std::process::id()));
    let beside = path.with_file_name(name);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&beside)?;
    // The new file keeps the permissions of the one that it replaces.
    let kept = fs::metadata(path).map_or(Ok(()), |old| file.set_permissions(old.permissions()));
    let done = kept
        .and_then(|()| file.write_all(text.as_bytes()))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&beside, path));
    if done.is_err() {
        let _ = fs::remove_file(&beside);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kit-file-{}-{name}", std::process::id()));
            fs::create_dir(&path).expect("a fresh directory");
            Self(path)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_is_replaced_and_nothing_is_left_beside_it() {
        let dir = Dir::new("replaced");
        let path = dir.0.join("page.html");
        for text in ["one", "two"] {
            replace_file(&path, text).expect("written");
            assert_eq!(fs::read_to_string(&path).expect("read"), text);
        }
        assert_eq!(fs::read_dir(&dir.0).expect("a list").count(), 1);
    }

    #[test]
    fn a_failure_leaves_no_part_behind() {
        let dir = Dir::new("failure");
        let missing = dir.0.join("no such place").join("page.html");
        assert!(replace_file(&missing, "new").is_err());
        assert_eq!(fs::read_dir(&dir.0).expect("a list").count(), 0);
        // The device refuses every write, as a full disk does. It must not be replaced.
        let full = Path::new("/dev/full");
        assert!(replace_file(full, "new").is_err());
        assert!(!fs::metadata(full).expect("still there").is_file());
    }

    #[test]
    fn a_link_stays_one_and_its_target_is_replaced() {
        let dir = Dir::new("link");
        let (path, link) = (dir.0.join("page.html"), dir.0.join("link.html"));
        fs::write(&path, "old").expect("written");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        replace_file(&link, "new").expect("written");
        assert_eq!(fs::read_to_string(&path).expect("read"), "new");
        assert!(fs::symlink_metadata(&link).expect("a link").is_symlink());
    }
}
