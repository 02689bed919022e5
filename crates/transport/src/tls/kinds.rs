//! The keys and signatures that serve in certificates, as rustls lists them for its provider.

use rustls::crypto::ring;
use rustls::pki_types::{AlgorithmIdentifier, SignatureVerificationAlgorithm, alg_id};
use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

type Names = [(AlgorithmIdentifier, &'static str)];

const KEYS: &Names = &[
    (alg_id::ECDSA_P256, "ECDSA P-256"),
    (alg_id::ECDSA_P384, "ECDSA P-384"),
    (alg_id::ED25519, "Ed25519"),
    (alg_id::RSA_ENCRYPTION, "RSA of 2048 to 8192 bits"),
];
/// The sizes of RSA keys that ring takes. It rounds the number of bits up to whole bytes.
const RSA_BITS: RangeInclusive<usize> = 2048..=8192;
const HASHES: &Names = &[
    (alg_id::ECDSA_SHA256, "SHA-256"),
    (alg_id::ECDSA_SHA384, "SHA-384"),
    (alg_id::RSA_PKCS1_SHA256, "SHA-256"),
    (alg_id::RSA_PKCS1_SHA384, "SHA-384"),
    (alg_id::RSA_PKCS1_SHA512, "SHA-512"),
    (alg_id::RSA_PSS_SHA256, "SHA-256"),
    (alg_id::RSA_PSS_SHA384, "SHA-384"),
    (alg_id::RSA_PSS_SHA512, "SHA-512"),
];

fn supported() -> &'static [&'static dyn SignatureVerificationAlgorithm] {
    ring::default_provider()
        .signature_verification_algorithms
        .all
}

fn name_of(id: &[u8], names: &Names) -> Option<&'static str> {
    // Parameters may be absent where the known identifier ends with NULL.
    let mut known = names.iter().filter(|(known, _)| known.starts_with(id));
    known.next().map(|&(_, name)| name)
}

/// The names of the keys, each with those of its hashes. Ed25519 has none.
fn names() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    let mut names = BTreeMap::<_, BTreeSet<_>>::new();
    for kind in supported() {
        if let Some(key) = name_of(&kind.public_key_alg_id(), KEYS) {
            let hash = name_of(&kind.signature_alg_id(), HASHES);
            names.entry(key).or_default().extend(hash);
        }
    }
    names
}

/// Lists the signatures that serve.
pub(super) fn signatures() -> String {
    let with_hashes = |(key, hashes): (&str, BTreeSet<&str>)| match Vec::from_iter(hashes) {
        none if none.is_empty() => key.to_owned(),
        hashes => format!("{key} with {}", either(&hashes)),
    };
    let list = Vec::from_iter(names().into_iter().map(with_hashes));
    format!("{} (PSS: with a salt as long as the hash)", either(&list))
}

/// Says why a key verifies no signature. `key` is the contents of its SubjectPublicKeyInfo.
pub(super) fn why_not_key(key: &[u8]) -> Option<String> {
    let (algorithm, value) = der(key).unwrap_or_default();
    let mut kinds = supported().iter().map(|kind| kind.public_key_alg_id());
    let is = if !kinds.any(|kind| *kind == *algorithm) {
        "of a kind that is not supported".to_owned()
    } else if *algorithm != *alg_id::RSA_ENCRYPTION {
        return None;
    } else {
        match rsa_bits(value) {
            Some(bits) if RSA_BITS.contains(&bits.next_multiple_of(8)) => return None,
            Some(bits) => format!("RSA of {bits} bits"),
            None => "damaged".to_owned(),
        }
    };
    let keys = Vec::from_iter(names().into_keys());
    Some(format!("is {is}: expected {}", either(&keys)))
}

/// The length of the modulus of the RSA key in a BIT STRING.
fn rsa_bits(key: &[u8]) -> Option<usize> {
    let (bits, _) = der(key)?;
    let (numbers, _) = der(bits.get(1..)?)?;
    let (modulus, _) = der(numbers)?;
    let start = modulus.iter().position(|&byte| byte != 0)?;
    let [first, rest @ ..] = &modulus[start..] else {
        return None;
    };
    Some(first.ilog2() as usize + 1 + 8 * rest.len())
}

/// Splits the contents of the first DER value from the bytes behind it.
fn der(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&len, rest) = bytes.get(1..)?.split_first()?;
    if len < 0x80 {
        return rest.split_at_checked(len.into());
    }
    let (len, rest) = rest.split_at_checked((len & 0x7f).into())?;
    let longer = |sum: usize, &byte| sum.checked_mul(256)?.checked_add(usize::from(byte));
    rest.split_at_checked(len.iter().try_fold(0, longer)?)
}

/// Joins names as `a, b or c`.
fn either<T: Borrow<str>>(names: &[T]) -> String {
    match names {
        [rest @ .., last] if !rest.is_empty() => {
            format!("{} or {}", rest.join(", "), last.borrow())
        }
        names => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A new version of the library may know more kinds. Then they need names here.
    #[test]
    fn each_kind_of_the_library_has_a_name() {
        for kind in supported() {
            let (key, signature) = (kind.public_key_alg_id(), kind.signature_alg_id());
            assert!(name_of(&key, KEYS).is_some(), "{key:?}");
            assert!(
                key == signature || name_of(&signature, HASHES).is_some(),
                "{signature:?}"
            );
        }
        assert_eq!(
            signatures(),
            "ECDSA P-256 with SHA-256 or SHA-384, ECDSA P-384 with SHA-256 or SHA-384, Ed25519 or \
             RSA of 2048 to 8192 bits with SHA-256, SHA-384 or SHA-512 (PSS: with a salt as \
             long as the hash)"
        );
    }

    #[test]
    fn the_size_of_an_rsa_key_is_that_of_its_modulus() {
        let long = |tag, contents: &[u8]| {
            let [.., high, low] = contents.len().to_be_bytes();
            [&[tag, 0x82, high, low], contents].concat()
        };
        let key = |first: u8, rest: usize| {
            let modulus = long(2, &[&[0, first][..], &vec![1; rest]].concat());
            let numbers = long(0x30, &[&modulus[..], &[2, 3, 1, 0, 1]].concat());
            let algorithm = alg_id::RSA_ENCRYPTION;
            let mut key = vec![0x30, algorithm.len().try_into().unwrap()];
            key.extend_from_slice(&algorithm);
            key.extend(long(3, &[&[0][..], &numbers].concat()));
            key
        };
        for (first, rest, bits) in [(0x80, 254, 2040), (0xff, 127, 1024), (1, 1024, 8193)] {
            let why = why_not_key(&key(first, rest)).unwrap();
            let right = "expected ECDSA P-256, ECDSA P-384, Ed25519 or RSA of 2048 to 8192 bits";
            assert_eq!(why, format!("is RSA of {bits} bits: {right}"));
        }
        for (first, rest) in [(1, 255), (0x80, 255), (0xff, 1023)] {
            assert_eq!(why_not_key(&key(first, rest)), None);
        }
        let whole = key(0xff, 255);
        for len in 0..whole.len() - 5 {
            assert!(why_not_key(&whole[..len]).is_some(), "{len} bytes");
        }
    }
}
