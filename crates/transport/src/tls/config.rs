//! The certificates of a side.

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring as provider};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection,
};
use std::sync::Arc;

use super::contents::{self, Wanted};
use super::kinds::why_not_key;
use super::reasons::why_not;
use super::verifier::NamedClients;
use super::{Pem, Tls, TlsError, TlsFiles, TlsPem};

impl Tls {
    /// Reads the certificates, from their files if they are in files.
    ///
    /// # Errors
    /// As [`TlsPem::load`], and [`TlsError::File`].
    pub fn load(&self) -> Result<TlsConfig, TlsError> {
        match self {
            Self::Files(files) => files.load(),
            Self::Pem(pem) => pem.load(),
        }
    }
}

impl TlsFiles {
    /// Does [`TlsFiles::read`] and [`TlsPem::load`].
    ///
    /// # Errors
    /// [`TlsError`], with the path of the file at fault.
    pub fn load(&self) -> Result<TlsConfig, TlsError> {
        self.read()?.load()
    }
}

impl TlsPem {
    /// Takes the certificates and the key out of their texts, and checks that they fit together.
    /// Certificates of a kind that the peer would refuse are refused here, also among the CAs.
    ///
    /// # Errors
    /// [`TlsError`], with the name of the text at fault.
    pub fn load(&self) -> Result<TlsConfig, TlsError> {
        let peer_name = self.peer_name.as_deref().map(parse_name).transpose()?;
        let chain = certificates(&self.cert)?;
        let key = PrivateKeyDer::from_pem_slice(self.key.bytes()).map_err(|error| match error {
            pem::Error::NoItemsFound => TlsError::NoKey {
                pem: self.key.name().to_owned(),
            },
            error => unreadable(&self.key, &error),
        });
        let key = key.map_err(|error| contents::explained(error, &self.key, Wanted::Key))?;
        let roots = anchors(&self.ca, certificates(&self.ca)?)?;
        anchors(&self.cert, chain.clone())?;
        self.build(chain, &key, Arc::new(roots), peer_name)
    }

    fn build(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: &PrivateKeyDer<'static>,
        roots: Arc<RootCertStore>,
        peer_name: Option<ServerName<'static>>,
    ) -> Result<TlsConfig, TlsError> {
        let provider = Arc::new(crypto());
        let signing = provider.key_provider.load_private_key(key.clone_key());
        let signing = signing.map_err(|_| TlsError::WrongContents {
            pem: self.key.name().to_owned(),
            why: "has a key that is damaged or of a kind that is not supported: expected ECDSA \
                  P-256, ECDSA P-384, Ed25519 or RSA of 2048 to 4096 bits",
        })?;
        let fits = |cert: &CertificateDer<'static>| {
            CertifiedKey::new(vec![cert.clone()], Arc::clone(&signing))
                .keys_match()
                .is_ok()
        };
        let own = |error: rustls::Error| match error {
            rustls::Error::InconsistentKeys(_) if chain.iter().skip(1).any(fits) => {
                TlsError::WrongContents {
                    pem: self.cert.name().to_owned(),
                    why: "has the certificate of the key behind another one: put it first, and behind \
                          it the CAs that signed it",
                }
            }
            rustls::Error::InconsistentKeys(_) => TlsError::KeyMismatch {
                cert: self.cert.name().to_owned(),
                key: self.key.name().to_owned(),
            },
            error => malformed(&self.cert, error),
        };
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(own)?
            .with_root_certificates(roots.clone())
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(own)?;
        client.resumption = Resumption::disabled();
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| TlsError::Malformed {
                pem: self.ca.name().to_owned(),
                why: error.to_string(),
            })?;
        // The peer verifies this too. Its CAs, its clock and its part may differ from this side's,
        // so only the errors that these do not change count.
        if let Err(
            error @ rustls::Error::InvalidCertificate(
                CertificateError::UnsupportedSignatureAlgorithmContext { .. }
                | CertificateError::Other(_),
            ),
        ) = verifier.verify_client_cert(&chain[0], &chain[1..], UnixTime::now())
        {
            return Err(own(error));
        }
        let verifier = Arc::new(NamedClients::new(verifier, peer_name.clone()));
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(own)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(own)?;
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(TlsConfig {
            client: Arc::new(client),
            server: Arc::new(server),
            peer_name,
        })
    }
}

/// The certificates of a side, ready for connections. A copy shares them.
#[derive(Debug, Clone)]
pub struct TlsConfig {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    peer_name: Option<ServerName<'static>>,
}

impl TlsConfig {
    /// Starts the side that dials. `host` is the dialled host, `None` for a unix socket.
    ///
    /// # Errors
    /// [`TlsError::NoName`], [`TlsError::BadName`].
    pub fn client(&self, host: Option<&str>) -> Result<rustls::Connection, TlsError> {
        let name = match (&self.peer_name, host) {
            (Some(name), _) => name.clone(),
            (None, Some(host)) => parse_name(host)?,
            (None, None) => return Err(TlsError::NoName),
        };
        let connection = ClientConnection::new(self.client.clone(), name)
            .map_err(|error| TlsError::Broken(error.to_string()))?;
        Ok(connection.into())
    }

    /// The name that a peer's certificate must have, where `host` was dialled.
    #[must_use]
    pub fn name_of(&self, host: Option<&str>) -> Option<String> {
        let own = self.peer_name.as_ref().map(ServerName::to_str);
        own.map(|name| name.into_owned())
            .or_else(|| host.map(str::to_owned))
    }

    /// Starts the side that listens.
    ///
    /// # Errors
    /// [`TlsError::Broken`].
    pub fn server(&self) -> Result<rustls::Connection, TlsError> {
        let connection = ServerConnection::new(self.server.clone())
            .map_err(|error| TlsError::Broken(error.to_string()))?;
        Ok(connection.into())
    }
}

/// Returns ring's algorithms. AES-128 comes first: pages in bulk need the fastest cipher.
fn crypto() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            provider::cipher_suite::TLS13_AES_128_GCM_SHA256,
            provider::cipher_suite::TLS13_AES_256_GCM_SHA384,
            provider::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..provider::default_provider()
    }
}

fn parse_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    // The zone of an IPv6 address is of this host only. No certificate has one.
    let bare = name.split('%').next().unwrap_or(name);
    ServerName::try_from(bare.to_owned()).map_err(|_| TlsError::BadName {
        name: name.to_owned(),
    })
}

/// The certificates of a text, at least one.
fn certificates(pem: &Pem) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem.bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| unreadable(pem, &error))
        .map_err(|error| contents::explained(error, pem, Wanted::Certificate))?;
    if found.is_empty() {
        let none = TlsError::NoCertificate {
            pem: pem.name().to_owned(),
        };
        return Err(contents::explained(none, pem, Wanted::Certificate));
    }
    Ok(found)
}

/// Reads certificates, and checks that rustls can verify signatures with the key of each.
fn anchors(pem: &Pem, certs: Vec<CertificateDer<'_>>) -> Result<RootCertStore, TlsError> {
    let mut anchors = RootCertStore::empty();
    for (index, cert) in certs.into_iter().enumerate() {
        anchors.add(cert).map_err(|error| malformed(pem, error))?;
        if let Some(why) = why_not_key(&anchors.roots[index].subject_public_key_info) {
            return Err(TlsError::Malformed {
                pem: pem.name().to_owned(),
                why: format!("the key of certificate {} in it {why}", index + 1),
            });
        }
    }
    Ok(anchors)
}

/// The error for a certificate of this side.
fn malformed(pem: &Pem, error: rustls::Error) -> TlsError {
    TlsError::Malformed {
        pem: pem.name().to_owned(),
        why: match error {
            rustls::Error::InvalidCertificate(error) => why_not(&error),
            error => error.to_string(),
        },
    }
}

fn unreadable(pem: &Pem, error: &pem::Error) -> TlsError {
    TlsError::Malformed {
        pem: pem.name().to_owned(),
        why: match error {
            pem::Error::MissingSectionEnd { .. } => "a PEM block has no end".to_owned(),
            _ => "a PEM block is not Base64 between its BEGIN and END lines".to_owned(),
        },
    }
}
