//! Rates of pages in the form that users write: `200M` or `800mbit`.
//!
//! K, M and G are powers of 1024 bytes a second, as for sizes. kbit, mbit and gbit are powers of
//! 1000 bits a second, as for links.

use pageferry_migration::Settings;

/// Reads a rate in bytes a second. It is one that a migration can have.
///
/// # Errors
/// One sentence that names the fault of `text` and the expected form.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit());
    let (digits, unit) = text.split_at(unit_at.unwrap_or(text.len()));
    let (times, divided_by) = match unit {
        "" | "B" => (1, 1),
        "K" | "k" | "KiB" => (1 << 10, 1),
        "M" | "m" | "MiB" => (1 << 20, 1),
        "G" | "g" | "GiB" => (1 << 30, 1),
        "kbit" => (1000, 8),
        "mbit" => (1_000_000, 8),
        "gbit" => (1_000_000_000, 8),
        _ => return Err(no_rate(text)),
    };
    if digits.is_empty() {
        return Err(no_rate(text));
    }
    let number = digits.parse::<u64>().unwrap_or(u64::MAX);
    let rate = number.saturating_mul(times) / divided_by;
    Settings::check_rate(rate).map_err(|e| e.to_string())?;
    Ok(rate)
}

fn no_rate(text: &str) -> String {
    format!(
        "invalid rate '{text}': expected a whole number and K, M or G (bytes a second, powers of 1024), or kbit, mbit or gbit, like 200M or 800mbit"
    )
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
