//! TLS: what protects a channel, and what each end says if it cannot begin.

use pageferry_testkit::LIMIT;
use pageferry_testkit::certificates::Side;
use pageferry_testkit::certificates::{Authority, Validity};
use pageferry_testkit::handshake::*;
use pageferry_transport::channel::*;
use pageferry_transport::handshake::*;
use pageferry_transport::wire::*;
use std::io::{Read, Write};
use std::thread;

const WAIT: Wait<'static> = Wait::block("test").within(LIMIT);
const FIRST: ChannelKey = ChannelKey::control(1);

/// Dials a destination. Returns the source's error, and the destination's first report.
fn refused(source: &Protection, destination: Protection) -> (String, String) {
    let destination = Destination::start(destination);
    let identity = Identity::random().unwrap();
    let error = open(&destination.address, source, &identity, FIRST).unwrap_err();
    (error.to_string(), destination.wait_for_stranger(""))
}

fn assert_told((source, destination): (String, String), at_source: &str, at_destination: &str) {
    assert!(source.contains(at_source), "source: {source}");
    assert!(
        destination.contains(at_destination),
        "destination: {destination}"
    );
}

#[test]
fn a_channel_opens_with_certificates_of_the_same_ca() {
    let authority = Authority::new("CA");
    let source = authority.issue(&["source.test"], Validity::Now);
    let target = authority.issue(&["127.0.0.1"], Validity::Now);
    // The source checks the dialled host, and the destination the name that it was given.
    let destination = Destination::start(target.protection(Some("source.test")));
    let identity = Identity::random().unwrap();
    let near = open(
        &destination.address,
        &source.protection(None),
        &identity,
        FIRST,
    )
    .unwrap();
    let far = destination.take(FIRST);
    assert!(near.connection.is_tls() && far.is_tls());
    far.write_all(b"words", &WAIT).unwrap();
    let mut words = [0; 5];
    near.connection.read_exact(&mut words, &WAIT).unwrap();
    assert_eq!(&words, b"words");
    assert!(destination.strangers().is_empty());
}

/// The files may go once they are read, and errors name each text as the caller does.
#[test]
fn certificates_in_memory_serve_as_those_in_files_do() {
    let authority = Authority::new("CA");
    let pem = |side: &Side, peer_name: &str| TlsPem {
        cert: Pem::new("vault:cert", side.read("cert.pem")),
        key: Pem::new("vault:key", side.read("key.pem")),
        ca: Pem::new("vault:ca", side.read("ca.pem")),
        peer_name: Some(peer_name.to_owned()),
    };
    let target = pem(&authority.issue(&["b.test"], Validity::Now), "a.test");
    let source = pem(&authority.issue(&["a.test"], Validity::Now), "b.test");
    let destination = Destination::start(Protection::Tls(target.load().unwrap()));
    let identity = Identity::random().unwrap();
    let protection = Protection::Tls(Tls::from(source.clone()).load().unwrap());
    let near = open(&destination.address, &protection, &identity, FIRST).unwrap();
    assert!(near.connection.is_tls() && destination.take(FIRST).is_tls());

    let swapped = TlsPem {
        cert: source.key.clone(),
        key: source.cert.clone(),
        ..source.clone()
    };
    let foreign = TlsPem {
        key: target.key.clone(),
        ..source.clone()
    };
    let no_ca = TlsPem {
        ca: Pem::new("vault:ca", *b""),
        ..source.clone()
    };
    let der = TlsPem {
        cert: Pem::new("vault:cert", [0x30, 0x82, 1, 2]),
        ..source
    };
    for (wrong, sentence) in [
        (swapped, "vault:key has no certificate, but a private key"),
        (
            foreign,
            "vault:key is not that of the certificate vault:cert",
        ),
        (no_ca, "vault:ca has no certificate: it is empty"),
        (der, "vault:cert is DER or PKCS#12"),
    ] {
        let text = wrong.load().unwrap_err().to_string();
        assert!(text.contains(sentence), "{sentence}: {text}");
    }
}

#[test]
fn both_ends_hear_of_a_certificate_of_another_time() {
    let authority = Authority::new("CA");
    let good = authority.issue(&["localhost"], Validity::Now);
    let name = Some("localhost");
    for (validity, sentence) in [
        (Validity::Past, "the peer's certificate has expired"),
        (Validity::Future, "the peer's certificate is not valid yet"),
    ] {
        let bad = authority.issue(&["localhost"], validity);
        let told = refused(&good.protection(name), bad.protection(name));
        let alert = "refused this side's certificate: it has expired or is not valid yet";
        assert_told(told, sentence, alert);
        let told = refused(&bad.protection(name), good.protection(name));
        assert_told(told, alert, sentence);
    }
}

#[test]
fn both_ends_hear_of_a_wrong_name() {
    let authority = Authority::new("CA");
    let (a, b) = (
        authority.issue(&["a.test"], Validity::Now),
        authority.issue(&["b.test"], Validity::Now),
    );
    let alert = "it is not for the name that the peer expects";
    let told = refused(&a.protection(Some("c.test")), b.protection(Some("a.test")));
    assert_told(told, "is not for `c.test`, but for `b.test`", alert);
    let told = refused(&a.protection(Some("b.test")), b.protection(Some("c.test")));
    assert_told(told, alert, "is not for `c.test`, but for `a.test`");
    // The dialled host counts if no name was given.
    let told = refused(&a.protection(None), b.protection(None));
    assert_told(told, "is not for `127.0.0.1`", alert);
}

#[test]
fn both_ends_hear_of_a_wrong_root() {
    // Also with two CAs of the same name, as after a CA was made anew.
    for other in ["another CA", "CA"] {
        let (ours, theirs) = (Authority::new("CA"), Authority::new(other));
        let name = Some("localhost");
        let good = ours.issue(&["localhost"], Validity::Now);
        let trusts_ours = ours.trusted_by(theirs.issue(&["localhost"], Validity::Now));
        let sentence = "no CA of this side signed the peer's certificate";
        let alert = "no CA of the peer signed it";
        let told = refused(&good.protection(name), trusts_ours.protection(name));
        assert_told(told, sentence, alert);
        let told = refused(&trusts_ours.protection(name), good.protection(name));
        assert_told(told, alert, sentence);
    }
}

/// Finds the certificate or the key of this name.
fn fixture(name: &str) -> &'static str {
    let all = include_str!("../fixtures/certificates.pem");
    let named = |block: &'static str| block.strip_prefix(name)?.strip_prefix('\n');
    all.split("\n\n").find_map(named).unwrap()
}

/// A side with certificates of the fixtures. The first one is that of the host.
fn of_fixtures(cert: &[&str], ca: &[&str]) -> TlsPem {
    let pem = |name: &str, fixtures: &[&str]| {
        let texts: Vec<_> = fixtures.iter().map(|name| fixture(name)).collect();
        Pem::new(name, texts.join("\n"))
    };
    TlsPem {
        cert: pem("cert", cert),
        key: pem("key", &["key"]),
        ca: pem("ca", ca),
        peer_name: Some("localhost".to_owned()),
    }
}

fn protection(pem: &TlsPem) -> Protection {
    Protection::Tls(pem.load().unwrap())
}

const SIGNATURES: &str = "ECDSA P-256 with SHA-256 or SHA-384, ECDSA P-384 with SHA-256 or \
    SHA-384, Ed25519 or RSA of 2048 to 8192 bits with SHA-256, SHA-384 or SHA-512";
const KEYS: &str = "ECDSA P-256, ECDSA P-384, Ed25519 or RSA of 2048 to 8192 bits";
const NO_CA_OR_KIND: &str = "no CA of the peer signed it, or the peer does not support its kind of \
    signature; give both sides the same CA, which signs with ECDSA P-256 with SHA-256 or SHA-384,";

/// The side that has such a certificate says so before it connects, if it knows the CA. Otherwise
/// both ends say so.
#[test]
fn signatures_of_another_kind_are_named_at_both_ends() {
    for (cert, ca) in [
        ("rsa-md5", "rsa"),
        ("rsa-sha1", "rsa"),
        ("rsa-pss-salt-20", "rsa"),
        ("p256-sha512", "p256"),
    ] {
        let why =
            format!("its signature is of a kind that is not supported: expected {SIGNATURES}");
        let error = of_fixtures(&[cert], &[ca]).load().unwrap_err().to_string();
        let expected = format!("cert does not serve: {why} (PSS: with a salt as long as the hash)");
        assert_eq!(error, expected, "{cert}");

        // Each side trusts only the CA of the other.
        let other = Authority::new("other").issue(&["localhost"], Validity::Now);
        let shows = protection(&TlsPem {
            ca: Pem::new("ca", other.read("ca.pem")),
            ..of_fixtures(&[cert], &[])
        });
        let knows = || {
            protection(&TlsPem {
                cert: Pem::new("cert", other.read("cert.pem")),
                key: Pem::new("key", other.read("key.pem")),
                ..of_fixtures(&[], &[ca])
            })
        };
        let sentence = format!("the peer's certificate is not acceptable: {why}");
        assert_told(refused(&knows(), shows.clone()), &sentence, NO_CA_OR_KIND);
        assert_told(refused(&shows, knows()), NO_CA_OR_KIND, &sentence);
    }
}

/// As after a CA was made anew with a key of another kind.
#[test]
fn a_root_with_another_kind_of_key_is_another_root() {
    let side = Authority::new("CA").issue(&["localhost"], Validity::Now);
    let shows = protection(&TlsPem {
        ca: Pem::new("ca", side.read("ca.pem")),
        ..of_fixtures(&["rsa-sha512"], &[])
    });
    let told = refused(&shows, side.protection(Some("localhost")));
    let sentence = "no CA of this side signed the peer's certificate";
    assert_told(told, NO_CA_OR_KIND, sentence);
}

#[test]
fn signatures_of_each_kind_that_is_named_serve() {
    for (cert, ca) in [
        ("rsa-sha512", "rsa"),
        ("rsa-pss-sha384", "rsa"),
        ("p256-sha384", "p256"),
    ] {
        let side = || protection(&of_fixtures(&[cert], &[ca]));
        let destination = Destination::start(side());
        let identity = Identity::random().unwrap();
        let near = open(&destination.address, &side(), &identity, FIRST).unwrap();
        assert!(near.connection.is_tls(), "{cert}");
    }
}

#[test]
fn keys_that_verify_nothing_are_named_with_their_file() {
    for (ca, is) in [
        ("p521", "of a kind that is not supported"),
        ("ed448", "of a kind that is not supported"),
        ("rsa-pss", "of a kind that is not supported"),
        ("rsa-1024", "RSA of 1024 bits"),
    ] {
        for (cert, roots, which) in [
            (
                &["rsa-sha512"][..],
                &[ca][..],
                "ca does not serve: the key of certificate 1",
            ),
            (
                &["rsa-sha512"],
                &["rsa", ca],
                "ca does not serve: the key of certificate 2",
            ),
            (
                &["rsa-sha512", ca],
                &["rsa"],
                "cert does not serve: the key of certificate 2",
            ),
            (
                &[ca],
                &["rsa"],
                "cert does not serve: the key of certificate 1",
            ),
        ] {
            let error = of_fixtures(cert, roots).load().unwrap_err().to_string();
            assert_eq!(error, format!("{which} in it is {is}: expected {KEYS}"));
        }
    }
}

#[test]
fn certificates_that_are_none_of_a_host_are_named_with_their_file() {
    for (cert, why) in [
        ("version-1", "it is of X.509 version 1"),
        (
            "own-ca",
            "it is that of a CA: expected one that a CA has issued for the host",
        ),
    ] {
        let error = of_fixtures(&[cert], &["rsa"])
            .load()
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("cert does not serve: {why}")),
            "{error}"
        );
    }
}

#[test]
fn a_client_without_a_certificate_is_refused() {
    let authority = Authority::new("CA");
    let side = authority.issue(&["localhost"], Validity::Now);
    let destination = Destination::start(side.protection(None));
    let mut roots = rustls::RootCertStore::empty();
    let pem = side.read("ca.pem");
    let root = <rustls::pki_types::CertificateDer<'_> as rustls::pki_types::pem::PemObject>::
        from_pem_slice(pem.as_bytes()).unwrap();
    roots.add(root).unwrap();
    let provider = rustls::crypto::ring::default_provider();
    let config = rustls::ClientConfig::builder_with_provider(provider.into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "localhost".try_into().unwrap();
    let mut tls = rustls::ClientConnection::new(config.into(), name).unwrap();
    let mut socket = socket_of(&destination.address);
    let mut stream = rustls::Stream::new(&mut tls, &mut socket);
    let hello = Hello::ours(FIRST, SessionId::random().unwrap());
    let told = stream
        .write_all(&hello.encode())
        .and_then(|()| stream.read_exact(&mut [0]));
    let alert = told.unwrap_err().to_string();
    assert!(alert.contains("CertificateRequired"), "{alert}");
    destination.wait_for_stranger("the peer sent no certificate");
}

#[test]
fn a_side_without_tls_and_one_with_it_tell_each_other() {
    let side = Authority::new("CA").issue(&["localhost"], Validity::Now);
    let tls = || side.protection(Some("localhost"));
    let told = refused(&PLAIN, tls());
    let required = "the destination requires TLS";
    assert_told(
        told,
        required,
        "the peer does not use TLS, and this side requires it",
    );
    let told = refused(&tls(), PLAIN);
    let both = "configure TLS at both or at neither";
    assert_told(told, both, "the peer uses TLS, and this side does not");
}

#[test]
fn a_server_of_another_protocol_is_recognized() {
    let side = Authority::new("CA").issue(&["localhost"], Validity::Now);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string().parse().unwrap();
    let identity = Identity::random().unwrap();
    for (answer, sentence) in [
        (
            &b"SSH-2.0-OpenSSH_9.6\r\n"[..],
            "does not speak TLS: it began with \"SSH-2.0-\"",
        ),
        (&b""[..], "closed the connection during the TLS handshake"),
    ] {
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut socket, _) = listener.accept().unwrap();
                socket.read_exact(&mut [0; 100]).unwrap();
                socket.write_all(answer).unwrap();
                socket.shutdown(std::net::Shutdown::Write).unwrap();
                let _ = socket.read_to_end(&mut Vec::new());
            });
            let tls = side.protection(Some("localhost"));
            let error = open(&address, &tls, &identity, FIRST)
                .unwrap_err()
                .to_string();
            assert!(error.contains(sentence), "{error}");
        });
    }
}

#[test]
fn files_that_do_not_fit_are_named_with_the_reason() {
    let authority = Authority::new("CA");
    let (side, other) = (
        authority.issue(&["a.test"], Validity::Now),
        authority.issue(&["b.test"], Validity::Now),
    );
    let why = || side.files(None).load().unwrap_err().to_string();
    let (cert, key) = (side.read("cert.pem"), side.read("key.pem"));

    side.write("key.pem", &other.read("key.pem"));
    assert!(
        why().contains("is not that of the certificate"),
        "{}",
        why()
    );
    side.write("key.pem", &cert);
    assert!(why().contains("key.pem has no private key"), "{}", why());
    side.write("key.pem", &key);
    side.write("cert.pem", "nothing");
    assert!(why().contains("cert.pem has no certificate"), "{}", why());
    side.write(
        "cert.pem",
        "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
    );
    assert!(why().contains("cert.pem does not serve"), "{}", why());
    side.write("cert.pem", &cert);
    side.write("ca.pem", "");
    assert!(why().contains("ca.pem has no certificate"), "{}", why());
    std::fs::remove_file(side.path("ca.pem")).unwrap();
    assert!(why().contains("cannot read"), "{}", why());
    assert!(matches!(
        other.files(Some("not a name")).load(),
        Err(TlsError::BadName { .. })
    ));
}

#[test]
fn a_unix_socket_needs_a_name_to_check_the_peer_by() {
    let side = Authority::new("CA").issue(&["localhost"], Validity::Now);
    let (near, _far) = Connection::pair().unwrap();
    let identity = Identity::random().unwrap();
    let tls = side.protection(None);
    let error = open_on(near, None, &tls, &identity, FIRST, LIMIT, &|| false).unwrap_err();
    assert!(matches!(
        error,
        HandshakeError::Channel(ChannelError::Tls(TlsError::NoName))
    ));
}

#[test]
fn the_exporter_is_the_same_at_both_ends_and_of_one_connection() {
    let (a, b) = tls_pair();
    let (c, d) = tls_pair();
    assert_eq!(a.exporter().unwrap(), b.exporter().unwrap());
    assert_eq!(c.exporter().unwrap(), d.exporter().unwrap());
    assert_ne!(a.exporter().unwrap(), c.exporter().unwrap());
    let (plain, _) = Connection::pair().unwrap();
    assert_eq!(plain.exporter().unwrap(), [0; 32]);
}

#[test]
fn bytes_that_rustls_holds_are_pending_although_the_socket_is_empty() {
    let (near, far) = tls_pair();
    assert!(!far.has_pending());
    near.write_all(&[7; 1000], &WAIT).unwrap();
    let mut byte = [0];
    far.read_exact(&mut byte, &WAIT).unwrap();
    assert!(far.has_pending());
    far.wait_readable(&WAIT).unwrap();
    far.read_exact(&mut [0; 999], &WAIT).unwrap();
    assert!(!far.has_pending());
}

#[test]
fn both_directions_carry_bulk_at_once() {
    const LEN: usize = 24 << 20;
    let (near, far) = tls_pair();
    near.set_buffers(Some(32 << 10), None).unwrap();
    let bytes = |seed: usize| -> Vec<u8> { (0..LEN).map(|i| (i / 7 + seed) as u8).collect() };
    let (there, back) = (bytes(1), bytes(2));
    thread::scope(|scope| {
        for (connection, bytes) in [(&near, &there), (&far, &back)] {
            scope.spawn(move || {
                for piece in bytes.chunks(700_001) {
                    connection.write_all(piece, &WAIT).unwrap();
                }
            });
        }
        for (connection, bytes) in [(&far, &there), (&near, &back)] {
            scope.spawn(move || {
                let mut received = vec![0; LEN];
                for piece in received.chunks_mut(300_007) {
                    connection.read_exact(piece, &WAIT).unwrap();
                }
                assert!(received == *bytes);
            });
        }
    });
}

#[test]
fn renewed_certificates_protect_later_connections() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let protection = |authority: &Authority| {
        let side = authority.issue(&["localhost"], Validity::Now);
        side.protection(Some("localhost"))
    };
    let destination = Destination::start(protection(&old));
    let identity = Identity::random().unwrap();
    let renewed = protection(&new);
    assert!(open(&destination.address, &renewed, &identity, FIRST).is_err());
    destination.acceptor.set_protection(protection(&new));
    open(&destination.address, &renewed, &identity, FIRST).unwrap();
}

/// Each wrong file is named, with the right one, and without words of a library.
#[test]
fn files_that_were_mixed_up_are_named() {
    let authority = Authority::new("CA");
    let side = authority.issue(&["a.test"], Validity::Now);
    let other = authority.issue(&["b.test"], Validity::Now);
    let good = side.files(None);
    good.load().unwrap();
    let path = |name: &str, contents: &[u8]| {
        let path = side.path(name);
        std::fs::write(&path, contents).unwrap();
        path
    };
    let read = |path: &std::path::Path| std::fs::read(path).unwrap();
    // The certificate of the key comes behind that of another one.
    let chain = [read(&other.path("cert.pem")), read(&good.cert)].concat();
    let encrypted =
        b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let nonsense = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
    let certificate = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let cases = [
        (good.key.clone(), good.key.clone(), "swapped"),
        (good.cert.clone(), good.cert.clone(), "swapped"),
        (path("chain.pem", &chain), good.key.clone(), "put it first"),
        (
            good.cert.clone(),
            path("secret.pem", encrypted),
            "without a passphrase",
        ),
        (
            good.cert.clone(),
            path("odd.pem", nonsense),
            "expected ECDSA P-256",
        ),
        (good.cert.clone(), path("empty.pem", b""), "is empty"),
        (
            path("odd-cert.pem", certificate),
            good.key.clone(),
            "no X.509 certificate",
        ),
        (other.path("cert.pem"), good.key.clone(), "made together"),
    ];
    for (cert, key, part) in cases {
        let files = TlsFiles {
            cert,
            key,
            ..good.clone()
        };
        let text = files.load().unwrap_err().to_string();
        assert!(text.contains(part), "{part}: {text}");
        for debug in ["(", "{", "Error", "Other"] {
            assert!(!text.contains(debug), "{debug}: {text}");
        }
    }
}

/// A bit that flips on the way is damage at both ends, and no question of trust.
#[test]
fn damage_under_tls_is_told_as_damage() {
    let authority = Authority::new("CA");
    let source = authority
        .issue(&["localhost"], Validity::Now)
        .protection(Some("localhost"));
    let target = authority
        .issue(&["localhost"], Validity::Now)
        .protection(Some("localhost"));
    let destination = Destination::start(target);
    let relay = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = relay.local_addr().unwrap().to_string().parse().unwrap();
    thread::scope(|scope| {
        let to = &destination;
        scope.spawn(move || {
            let (near, _) = relay.accept().unwrap();
            let far = socket_of(&to.address);
            let forward =
                |mut from: &std::net::TcpStream, mut to: &std::net::TcpStream, flip: bool| {
                    let mut bytes = [0; 4096];
                    let mut seen = 0;
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        // Far behind the TLS handshake: within the large packets.
                        if flip && (10_000..14_096).contains(&(seen + count)) {
                            bytes[count / 2] ^= 1;
                        }
                        seen += count;
                        if to.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Both);
                };
            thread::scope(|scope| {
                scope.spawn(|| forward(&near, &far, true));
                forward(&far, &near, false);
            });
        });
        let identity = Identity::random().unwrap();
        let error = open(&address, &source, &identity, FIRST).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("were damaged") || text.contains("are damaged"),
            "{text}"
        );
    });
    destination.wait_for_stranger("damaged");
}
