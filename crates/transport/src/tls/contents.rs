//! Looks at a PEM text that is not the expected one, and says what it is.

use super::{Pem, TlsError};

/// The most bytes of a text that are looked at.
const MOST_BYTES: usize = 1 << 20;

/// The contents that a text should have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Certificates.
    Certificate,
    /// A private key.
    Key,
}

/// Replaces `error` if the text has something else that is known.
pub(super) fn explained(error: TlsError, pem: &Pem, wanted: Wanted) -> TlsError {
    let bytes = &pem.bytes()[..pem.bytes().len().min(MOST_BYTES)];
    match what_else(bytes, wanted) {
        Some(why) => TlsError::WrongContents {
            pem: pem.name().to_owned(),
            why,
        },
        None => error,
    }
}

fn what_else(bytes: &[u8], wanted: Wanted) -> Option<&'static str> {
    let text = String::from_utf8_lossy(bytes);
    let has = |label: &str| text.contains(&format!("-----BEGIN {label}-----"));
    let certificate = has("CERTIFICATE") || has("X509 CERTIFICATE");
    let key = ["PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY"].into_iter();
    let key = key.clone().any(has);
    let encrypted = has("ENCRYPTED PRIVATE KEY") || text.contains("Proc-Type: 4,ENCRYPTED");
    Some(match wanted {
        Wanted::Key if bytes.is_empty() => "has no private key: it is empty",
        Wanted::Certificate if bytes.is_empty() => "has no certificate: it is empty",
        // The first bytes of a long SEQUENCE.
        _ if bytes.starts_with(&[0x30, 0x82]) => {
            "is DER or PKCS#12: expected PEM, which `openssl x509`, `pkey` or `pkcs12` writes"
        }
        Wanted::Key if encrypted => {
            "is an encrypted key: give one without a passphrase, such as `openssl pkey -in OLD -out NEW` writes"
        }
        Wanted::Key if has("OPENSSH PRIVATE KEY") => {
            "is a key of OpenSSH: expected PKCS#8, which `openssl genpkey` writes"
        }
        Wanted::Key if has("DSA PRIVATE KEY") => {
            "is a DSA key: expected one of another kind, such as `openssl genpkey -algorithm ed25519` writes"
        }
        Wanted::Key if certificate && !key => {
            "has no private key, but a certificate: are certificate and key swapped?"
        }
        Wanted::Key if has("PUBLIC KEY") && !key => "is a public key: expected the private key",
        Wanted::Certificate if has("TRUSTED CERTIFICATE") => {
            "is a certificate with trust settings of OpenSSL: `openssl x509 -in OLD -out NEW` writes one without"
        }
        Wanted::Certificate if (key || encrypted) && !certificate => {
            "has no certificate, but a private key: are certificate and key swapped?"
        }
        _ if !certificate && (has("CERTIFICATE REQUEST") || has("NEW CERTIFICATE REQUEST")) => {
            "is a request for a certificate: expected the certificate that the CA makes of it"
        }
        _ if !certificate && (has("PKCS7") || has("CMS")) => {
            "is PKCS#7: expected PEM with `BEGIN CERTIFICATE`, which `openssl pkcs7 -print_certs` writes"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_file_is_named() {
        let pem = |label: &str| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
        let legacy = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n";
        for (bytes, wanted, part) in [
            (String::new(), Wanted::Key, "empty"),
            (String::new(), Wanted::Certificate, "empty"),
            (
                pem("ENCRYPTED PRIVATE KEY"),
                Wanted::Key,
                "without a passphrase",
            ),
            (legacy.into(), Wanted::Key, "without a passphrase"),
            (pem("OPENSSH PRIVATE KEY"), Wanted::Key, "OpenSSH"),
            (pem("DSA PRIVATE KEY"), Wanted::Key, "DSA"),
            (pem("PUBLIC KEY"), Wanted::Key, "expected the private key"),
            (pem("CERTIFICATE"), Wanted::Key, "swapped"),
            (pem("PRIVATE KEY"), Wanted::Certificate, "swapped"),
            (pem("EC PRIVATE KEY"), Wanted::Certificate, "swapped"),
            (pem("ENCRYPTED PRIVATE KEY"), Wanted::Certificate, "swapped"),
            (pem("CERTIFICATE REQUEST"), Wanted::Certificate, "request"),
            (
                pem("TRUSTED CERTIFICATE"),
                Wanted::Certificate,
                "trust settings",
            ),
            (pem("PKCS7"), Wanted::Certificate, "PKCS#7"),
        ] {
            let found = what_else(bytes.as_bytes(), wanted);
            assert!(
                found.is_some_and(|why| why.contains(part)),
                "{part}: {found:?}"
            );
        }
        assert!(
            what_else(&[0x30, 0x82, 1], Wanted::Key)
                .unwrap()
                .contains("DER")
        );
        let both = [pem("CERTIFICATE"), pem("PRIVATE KEY")].concat();
        for wanted in [Wanted::Key, Wanted::Certificate] {
            assert_eq!(what_else(both.as_bytes(), wanted), None);
        }
        assert_eq!(what_else(b"text", Wanted::Key), None);
    }
}
