//! Fields of the status files of procfs (`Documentation/filesystems/proc.rst`).

/// The text of a line, behind its name. `name` ends with the colon.
pub(crate) fn field<'s>(status: &'s str, name: &str) -> Option<&'s str> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim())
}

/// The first number of a line.
pub(crate) fn number(status: &str, name: &str) -> Option<u64> {
    field(status, name)?.split_whitespace().next()?.parse().ok()
}

/// The bits of a line that has them as a hexadecimal number.
pub(crate) fn mask(status: &str, name: &str) -> Option<u64> {
    u64::from_str_radix(field(status, name)?, 16).ok()
}

/// The value of a line like `RssAnon:     123 kB`, in bytes.
pub(crate) fn kib(text: &str, name: &str) -> Option<u64> {
    let kib: u64 = field(text, name)?.strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
