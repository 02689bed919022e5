//! Files that a user names.

use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use std::fs::File;
use std::io::{self, Error, ErrorKind, Read};
use std::path::Path;

/// Reads a regular file of at most `most` bytes. It never waits: a FIFO, a device or a socket is
/// refused without reading it, and a file that grows meanwhile is read up to the limit.
///
/// ```
/// use pageferry_transport::tls::read_regular_file;
/// use std::path::Path;
///
/// let why = read_regular_file(Path::new("/dev/zero"), 1 << 20).unwrap_err();
/// assert!(why.to_string().contains("expected a regular file"));
/// ```
///
/// # Errors
/// When the file cannot be opened or read, is not a regular file, or is larger.
pub fn read_regular_file(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    // Opening a FIFO would wait for a writer without NONBLOCK. NOCTTY: a terminal stays a stranger.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = open(path, flags, Mode::empty())?;
    let kind = match FileType::from_raw_mode(fstat(&fd)?.st_mode) {
        FileType::RegularFile => None,
        FileType::Fifo => Some("a FIFO"),
        FileType::Directory => Some("a directory"),
        FileType::Socket => Some("a socket"),
        _ => Some("a device"),
    };
    if let Some(kind) = kind {
        let why = format!("it is {kind}, expected a regular file");
        return Err(Error::new(ErrorKind::InvalidInput, why));
    }
    let mut bytes = Vec::new();
    File::from(fd)
        .take(most.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let why = format!("it is too large: expected at most {most} bytes");
        return Err(Error::new(ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, mknodat};

    #[test]
    fn only_a_regular_file_within_its_limit_is_read() {
        let path = std::env::temp_dir().join(format!("pf-file-{}", std::process::id()));
        std::fs::write(&path, [7; 100]).unwrap();
        assert_eq!(read_regular_file(&path, 100).unwrap(), [7; 100]);
        let why = read_regular_file(&path, 99).unwrap_err().to_string();
        assert!(why.contains("at most 99 bytes"), "{why}");
        std::fs::remove_file(&path).unwrap();
        let why = read_regular_file(&path, 99).unwrap_err();
        assert_eq!(why.kind(), ErrorKind::NotFound);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let why = read_regular_file(&path, 99).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(why.contains("it is a FIFO"), "{why}");
        for (path, kind) in [("/dev/zero", "a device"), ("/tmp", "a directory")] {
            let why = read_regular_file(Path::new(path), 99)
                .unwrap_err()
                .to_string();
            assert!(why.contains(kind), "{why}");
        }
    }
}
