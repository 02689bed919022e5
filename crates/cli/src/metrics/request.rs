//! The head of an HTTP request: only `GET /metrics` is served.

/// The longest head of a request in bytes, with the empty line at its end.
pub(crate) const MAX_HEAD_BYTES: usize = 8192;

/// Why a request is not served, by its HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It is no request of HTTP/1.0 or HTTP/1.1, or its head is too long.
    BadRequest,
    /// It asks for another path.
    NotFound,
    /// It has another method than GET.
    MethodNotAllowed,
}

impl Refusal {
    /// The status line without its version.
    pub(crate) const fn status(self) -> &'static str {
        match self {
            Self::BadRequest => "400 Bad Request",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed",
        }
    }
}

/// The length of the head, once it is complete.
pub(crate) fn head_end(bytes: &[u8]) -> Option<usize> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    Some(end + 4)
}

/// Checks a complete head, with the empty line at its end.
pub(crate) fn check(head: &[u8]) -> Result<(), Refusal> {
    let lines = head
        .strip_suffix(b"\r\n\r\n")
        .filter(|_| head.len() <= MAX_HEAD_BYTES)
        .ok_or(Refusal::BadRequest)?;
    let text = core::str::from_utf8(lines).map_err(|_| Refusal::BadRequest)?;
    let mut lines = text.split("\r\n");
    let request = lines.next().unwrap_or_default();
    let mut words = request.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Refusal::BadRequest);
    };
    let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
    let is_target = target.starts_with('/') && target.bytes().all(|byte| byte.is_ascii_graphic());
    let is_version = matches!(version, "HTTP/1.0" | "HTTP/1.1");
    if !is_method || !is_target || !is_version || !lines.all(is_field) {
        return Err(Refusal::BadRequest);
    }
    if target.split('?').next() != Some("/metrics") {
        return Err(Refusal::NotFound);
    }
    if method != "GET" {
        return Err(Refusal::MethodNotAllowed);
    }
    Ok(())
}

/// Whether a line is a header field: a name, a colon, and a value.
fn is_field(line: &str) -> bool {
    let is_text = |c: char| c == '\t' || !c.is_control();
    line.split_once(':').is_some_and(|(name, value)| {
        let in_name = |byte: u8| byte.is_ascii_graphic() && byte != b':';
        !name.is_empty() && name.bytes().all(in_name) && value.chars().all(is_text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_get_metrics_is_served() {
        let bad = Err(Refusal::BadRequest);
        for (head, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n", Ok(())),
            ("GET /metrics HTTP/1.0\r\n\r\n", Ok(())),
            ("GET /metrics?x=1 HTTP/1.1\r\nA: \r\nb:c\r\n\r\n", Ok(())),
            ("GET / HTTP/1.1\r\n\r\n", Err(Refusal::NotFound)),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", Err(Refusal::NotFound)),
            ("POST / HTTP/1.1\r\n\r\n", Err(Refusal::NotFound)),
            (
                "POST /metrics HTTP/1.1\r\n\r\n",
                Err(Refusal::MethodNotAllowed),
            ),
            (
                "HEAD /metrics HTTP/1.1\r\n\r\n",
                Err(Refusal::MethodNotAllowed),
            ),
            ("get /metrics HTTP/1.1\r\n\r\n", bad),
            ("GET metrics HTTP/1.1\r\n\r\n", bad),
            ("GET  /metrics HTTP/1.1\r\n\r\n", bad),
            ("GET /metrics HTTP/1.1 \r\n\r\n", bad),
            ("GET /metrics HTTP/2\r\n\r\n", bad),
            ("GET /metrics\r\n\r\n", bad),
            ("GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", bad),
            ("GET /metrics HTTP/1.1\r\n: no name\r\n\r\n", bad),
            ("GET /metrics HTTP/1.1\r\na b: space\r\n\r\n", bad),
            ("GET /metrics HTTP/1.1\r\na: b\n\r\n\r\n", bad),
            ("GET /metrics HTTP/1.1\r\na: b\r\n", bad),
            ("\r\n\r\n", bad),
            ("", bad),
        ] {
            assert_eq!(check(head.as_bytes()), expected, "{head:?}");
        }
        assert_eq!(check(b"GET /\xff HTTP/1.1\r\n\r\n"), bad);
        let long = format!("GET /metrics HTTP/1.1\r\na: {}\r\n\r\n", "b".repeat(8192));
        assert_eq!(check(long.as_bytes()), bad);
    }

    #[test]
    fn a_head_ends_with_its_empty_line() {
        assert_eq!(head_end(b"GET / HTTP/1.1\r\n\r"), None);
        assert_eq!(head_end(b"a\r\n\r\nbody"), Some(5));
    }
}
