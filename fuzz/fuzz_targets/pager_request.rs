//! The body of a request for a restore, and its name: what is taken is the same when it is written
//! and read again.

use pageferry_pager::{Name, Restore};

pub(crate) fn run(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(name) = text.parse::<Name>()
    {
        assert!(!text.contains('/') && name.as_str() == text);
    }
    if let Ok(restore) = serde_json::from_slice::<Restore>(bytes) {
        let text = serde_json::to_vec(&restore).unwrap();
        assert_eq!(serde_json::from_slice::<Restore>(&text).unwrap(), restore);
    }
}
