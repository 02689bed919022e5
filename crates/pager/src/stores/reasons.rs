//! Why an object store refuses, in our words: what to set, and whether it may pass.
//!
//! **Mechanism.** A store says its reason by a status and by the code in the body of its answer.
//! `object_store` has both in the text of an error only. The codes are those of Amazon's list of
//! error responses of S3, which other servers use too.

use object_store::Error;
use reqwest::Url;
use std::collections::BTreeMap;

/// The variables that are addresses of servers, as [`settings`] names them.
const ENDPOINTS: [&str; 6] = [
    "aws_endpoint",
    "aws_endpoint_url",
    "aws_endpoint_url_s3",
    "azure_endpoint",
    "azure_storage_endpoint",
    "google_base_url",
];

/// Checks the variables that begin with `AWS_`, `GOOGLE_` or `AZURE_`. An empty one counts as none.
/// Returns them in small letters.
///
/// # Errors
/// A sentence that names the variable.
pub(crate) fn settings(
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<BTreeMap<String, String>, String> {
    let mut settings = BTreeMap::new();
    for (name, value) in environment {
        let value = value.trim();
        let ours = ["AWS_", "GOOGLE_", "AZURE_"];
        if value.is_empty() || !ours.iter().any(|start| name.starts_with(start)) {
            continue;
        }
        if value.contains(|c: char| c.is_control()) {
            return Err(format!(
                "{name} has a line break or another control character"
            ));
        }
        let key = name.to_ascii_lowercase();
        if ENDPOINTS.contains(&&*key) {
            let url = Url::parse(value).ok();
            let url = url.filter(|url| ["http", "https"].contains(&url.scheme()));
            if url.as_ref().and_then(Url::host_str).is_none() {
                return Err(format!(
                    "{name} is '{value}': expected an address such as https://minio.example:9000"
                ));
            }
        }
        settings.insert(key, value.to_owned());
    }
    Ok(settings)
}

/// An error and its cause: what `object_store` says ends before "connection refused", or the fault
/// of a certificate.
pub(crate) fn with_cause(why: &Error) -> String {
    let mut cause: &dyn std::error::Error = why;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    let (text, cause) = (why.to_string(), cause.to_string());
    match text.contains(&cause) {
        true => text,
        false => format!("{text}: {cause}"),
    }
}

/// The HTTP status in the text of an error.
fn status(text: &str) -> Option<u16> {
    let (_, behind) = text.split_once("status code: ")?;
    behind.get(..3)?.parse().ok()
}

/// Whether the answer will be the same next time.
pub(crate) fn is_final(why: &Error) -> bool {
    match why {
        Error::Generic { .. } => {
            let text = with_cause(why);
            let refuses =
                |status| matches!(status, 300..=499) && ![408, 425, 429].contains(&status);
            status(&text).is_some_and(refuses) || FOR_GOOD.iter().any(|part| text.contains(part))
        }
        Error::JoinError { .. } => false,
        _ => true,
    }
}

/// Parts of the texts of errors without a status that stay.
const FOR_GOOD: [&str; 7] = [
    "redirect without LOCATION",
    "URL scheme is not allowed",
    "169.254.169.254",
    "invalid peer certificate",
    "InvalidContentType",
    "builder error",
    "non-partial response",
];

/// Parts of texts, and what to do. The first that fits counts.
const ADVICE: [(&str, &str); 21] = [
    (
        "RequestTimeTooSkewed",
        "the clock of this host differs from the store's: set it",
    ),
    (
        "ExpiredToken",
        "the credentials have expired: renew AWS_SESSION_TOKEN",
    ),
    (
        "TokenRefreshRequired",
        "the credentials have expired: renew AWS_SESSION_TOKEN",
    ),
    (
        "InvalidToken",
        "the store does not know this AWS_SESSION_TOKEN",
    ),
    (
        "InvalidAccessKeyId",
        "the store does not know this AWS_ACCESS_KEY_ID",
    ),
    (
        "SignatureDoesNotMatch",
        "AWS_SECRET_ACCESS_KEY is not that of AWS_ACCESS_KEY_ID",
    ),
    (
        "AuthorizationHeaderMalformed",
        "the bucket is in another region: set AWS_REGION",
    ),
    (
        "PermanentRedirect",
        "the bucket is in another region: set AWS_REGION",
    ),
    (
        "IllegalLocationConstraint",
        "the bucket is in another region: set AWS_REGION",
    ),
    (
        "redirect without LOCATION",
        "the bucket is in another region: set AWS_REGION",
    ),
    (
        "InvalidObjectState",
        "the object is in an archive: restore it in the store first",
    ),
    (
        "Server Side Encryption",
        "the object has a key of its own (SSE-C), which is not supported",
    ),
    ("NoSuchBucket", "there is no such bucket at this store"),
    ("NoSuchKey", "there is no such object in the bucket"),
    (
        "AccessDenied",
        "these credentials may not read the object: they need s3:GetObject",
    ),
    (
        "169.254.169.254",
        "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or \
         AWS_SKIP_SIGNATURE=true for a public bucket",
    ),
    (
        "URL scheme is not allowed",
        "AWS_ENDPOINT has no TLS: set AWS_ALLOW_HTTP=true if that is right",
    ),
    (
        "InvalidContentType",
        "the server speaks no TLS: set AWS_ENDPOINT to http://... and AWS_ALLOW_HTTP=true",
    ),
    (
        "invalid peer certificate",
        "this host trusts no authority of the server's certificate: add it to those of the host",
    ),
    (
        "non-partial response",
        "the store gives no parts of objects, which a lazy restore needs",
    ),
    (
        "status code: 403",
        "the store refuses these credentials, or they may not read the object",
    ),
];

/// The reason of a refusal, with what to set. `proxy` is the proxy that requests go through.
pub(crate) fn reason(why: &Error, proxy: Option<&str>) -> String {
    let text = with_cause(why);
    let advice = ADVICE.iter().find(|(part, _)| text.contains(part));
    // The region of the bucket, if the store tells it.
    let region = text
        .split_once("<Region>")
        .and_then(|(_, behind)| behind.split_once("</Region>"))
        .map(|(region, _)| format!("={region}"));
    match (advice, proxy) {
        (Some((_, advice)), _) if advice.ends_with("AWS_REGION") => {
            format!("{advice}{} ({text})", region.unwrap_or_default())
        }
        (Some((_, advice)), _) => format!("{advice} ({text})"),
        (None, Some(proxy)) if status(&text).is_none() => format!("{text} (through {proxy})"),
        (None, _) => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: &str, value: &str) -> Result<BTreeMap<String, String>, String> {
        settings([(name.to_owned(), value.to_owned())])
    }

    #[test]
    fn settings_that_no_request_can_use_are_named() {
        for (name, value) in [
            ("AWS_ENDPOINT", "localhost:9000"),
            ("AWS_ENDPOINT", "http://"),
            ("AWS_ENDPOINT_URL", "minio"),
            ("AZURE_ENDPOINT", "ftp://host"),
            ("AWS_SECRET_ACCESS_KEY", "two\nlines"),
        ] {
            let refused = set(name, value).unwrap_err();
            assert!(refused.starts_with(name), "{refused}");
        }
        assert_eq!(set("AWS_ENDPOINT", " ").unwrap(), BTreeMap::new());
        assert_eq!(set("PATH", "a\nb").unwrap(), BTreeMap::new());
        let trimmed = set("AWS_ENDPOINT", " https://minio:9000\n").unwrap();
        assert_eq!(trimmed["aws_endpoint"], "https://minio:9000");
    }
}
