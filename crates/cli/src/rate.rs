//! Rates of pages in the form that users write: `200M` or `800mbit`.
//!
//! K, M, G and T are powers of 1024 bytes a second, as for sizes. kbit, mbit and gbit are powers
//! of 1000 bits a second, as for links.

use pageferry_harness::size;
use pageferry_migration::Settings;

/// Reads a rate in bytes a second. It is one that a migration can have.
///
/// # Errors
/// One sentence that names the fault of `text` and the expected form.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "invalid rate '{text}': expected a whole number and K, M, G or T (bytes a second, powers of 1024), or kbit, mbit or gbit, like 200M or 800mbit"
        )
    };
    let (digits, unit) = size::split(text).ok_or_else(wrong)?;
    let (times, divided_by) = match unit {
        "kbit" => (1000, 8),
        "mbit" => (1_000_000, 8),
        "gbit" => (1_000_000_000, 8),
        bytes => (1 << size::shift(bytes).ok_or_else(wrong)?, 1),
    };
    let number = digits.parse::<u64>().unwrap_or(u64::MAX);
    let rate = number.saturating_mul(times) / divided_by;
    Settings::check_rate(rate).map_err(|e| e.to_string())?;
    Ok(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_in_every_unit() {
        assert_eq!(parse("65536"), Ok(64 << 10));
        assert_eq!(parse("64K"), Ok(64 << 10));
        assert_eq!(parse("200M"), Ok(200 << 20));
        assert_eq!(parse("3G"), Ok(3 << 30));
        assert_eq!(parse("1T"), Ok(1 << 40));
        assert_eq!(parse("1gbit"), Ok(125_000_000));
        assert_eq!(parse("800mbit"), Ok(100_000_000));
        assert_eq!(parse("8000kbit"), Ok(1_000_000));
    }

    #[test]
    fn each_wrong_rate_has_its_own_sentence() {
        for (text, part) in [
            ("0", "too few"),
            ("0M", "too few"),
            ("1K", "too few"),
            ("1kbit", "too few"),
            ("9999G", "no link carries"),
            ("99999999999999999999999G", "no link carries"),
            ("", "invalid rate"),
            ("M", "invalid rate"),
            ("-1M", "invalid rate"),
            ("1.5G", "invalid rate"),
            ("5Mbps", "invalid rate"),
            ("fast", "invalid rate"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
