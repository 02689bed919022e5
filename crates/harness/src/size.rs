//! Sizes of memory in the form that users write: `512M`, `2G`, `4096K`, `1048576`.
//!
//! The suffixes are powers of 1024. The result is a size that a machine can have, in bytes.
//! Whether the host has that much is another question.

use pageferry_addr::PAGE_SIZE;

/// The most memory that a machine may have: 16 TiB.
pub const MAX_BYTES: u64 = 16 << 40;

/// Reads a size in bytes.
///
/// # Errors
/// One sentence that names the fault of `text` and the expected form.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "invalid size '{text}': expected a whole number and K, M, G or T (powers of 1024), like 512M"
        )
    };
    let (digits, unit) = split(text).ok_or_else(wrong)?;
    let shift = shift(unit).ok_or_else(wrong)?;
    let too_large = || {
        format!(
            "{text} is more memory than a machine may have: choose at most {}",
            show(MAX_BYTES)
        )
    };
    let bytes = digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(1 << shift))
        .filter(|&bytes| bytes <= MAX_BYTES)
        .ok_or_else(too_large)?;
    if bytes == 0 {
        return Err("a machine needs at least one page of memory: try 512M".into());
    }
    if !bytes.is_multiple_of(PAGE_SIZE) {
        let near = bytes.next_multiple_of(PAGE_SIZE) >> 10;
        return Err(format!(
            "{bytes} bytes are not a multiple of 4096 bytes: try {near}K"
        ));
    }
    Ok(bytes)
}

/// Splits a whole number from the unit behind it. `None` without a number.
pub fn split(text: &str) -> Option<(&str, &str)> {
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let digits = &text[..text.len() - unit.len()];
    (!digits.is_empty()).then_some((digits, unit))
}

/// The power of 2 that a unit of bytes stands for.
pub fn shift(unit: &str) -> Option<u32> {
    match unit {
        "" | "B" => Some(0),
        "K" | "k" | "KiB" => Some(10),
        "M" | "m" | "MiB" => Some(20),
        "G" | "g" | "GiB" => Some(30),
        "T" | "t" | "TiB" => Some(40),
        _ => None,
    }
}

/// Writes a size in the largest unit that loses nothing. [`parse`] reads it back.
pub fn show(bytes: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// Writes a rounded size with its unit: `512 MiB`, `1.5 GiB`.
pub fn human(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() < 0.05 || value >= 100.0 {
        format!("{value:.0} {}", units[unit])
    } else {
        format!("{value:.1} {}", units[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_every_unit() {
        assert_eq!(parse("512M"), Ok(512 << 20));
        assert_eq!(parse("2G"), Ok(2 << 30));
        assert_eq!(parse("4096K"), Ok(4 << 20));
        assert_eq!(parse("1MiB"), Ok(1 << 20));
        assert_eq!(parse("8192"), Ok(8192));
        assert_eq!(parse("16T"), Ok(MAX_BYTES));
    }

    #[test]
    fn each_wrong_size_has_its_own_sentence() {
        for (text, part) in [
            ("0", "at least one page"),
            ("0G", "at least one page"),
            ("4097", "not a multiple of 4096"),
            ("1K", "try 4K"),
            ("17T", "at most 16T"),
            ("99999999999999999999G", "at most 16T"),
            ("18446744073709551615T", "at most 16T"),
            ("", "invalid size"),
            ("M", "invalid size"),
            ("-1M", "invalid size"),
            ("1.5G", "invalid size"),
            ("512Q", "invalid size"),
            ("5 1M", "invalid size"),
            ("１M", "invalid size"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_shown_is_read_back() {
        for bytes in [4096, 12288, 1 << 20, 3 << 30, 16 << 40, 5 << 20] {
            assert_eq!(parse(&show(bytes)), Ok(bytes));
        }
        assert_eq!(human(512 << 20), "512 MiB");
        assert_eq!(human(1536 << 20), "1.5 GiB");
    }
}
