//! Heads of HTTP requests for metrics: no panic on any bytes, and only `GET /metrics` is served.

#[path = "../../crates/cli/src/metrics/request.rs"]
mod request;

pub(crate) fn run(data: &[u8]) {
    read(data);
    // A head that is nearly right, with these bytes in one place each.
    let near: [(&[u8], &[u8]); 4] = [
        (b"", b" /metrics HTTP/1.1\r\n\r\n"),
        (b"GET ", b" HTTP/1.1\r\n\r\n"),
        (b"GET /metrics", b"\r\n\r\n"),
        (b"GET /metrics HTTP/1.1\r\n", b"\r\n\r\n"),
    ];
    for (before, after) in near {
        read(&[before, data, after].concat());
    }
}

fn read(bytes: &[u8]) {
    let Some(end) = request::head_end(bytes) else {
        return;
    };
    match request::check(&bytes[..end]) {
        Ok(()) => {
            assert!(end <= request::MAX_HEAD_BYTES);
            let target = &bytes["GET ".len()..];
            assert!(bytes.starts_with(b"GET ") && target.starts_with(b"/metrics"));
        }
        Err(refusal) => assert!(refusal.status().starts_with('4')),
    }
}
