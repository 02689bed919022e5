//! Snapshots in object stores: S3, Google Cloud Storage and Azure, and files by an address.
//!
//! **Guarantee.** A read gives the bytes of the object that was opened, or an error: never fewer
//! bytes, and never those of an object that took its place. A read that cannot be done ends with an
//! error in a bounded time.
//!
//! **Mechanism.** The crate `object_store` speaks with the stores, on a runtime of two threads.
//! Every request names the entity tag that the object had when it was opened. A request that fails,
//! or brings too few bytes, is repeated from the first missing byte, after a pause that doubles. A
//! [`Cache`] stands before each object. TLS verifies bytes on their way. Only a packed snapshot has
//! checksums of its own.
//!
//! **Neighbours.** Below: [`Store`] and [`Source`] of `pager`, and the cache.

use crate::stores::Cache;
use crate::stores::reasons::{self, is_final};
use crate::{FileSource, Source, SourceError, Store};
use futures_util::{FutureExt, StreamExt};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{Error, GetOptions, ObjectMeta, ObjectStore, RetryConfig};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem::discriminant;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// The requests of a process at once. A VM has at most 16 reads of faults, and 16 of a recording.
const REQUESTS: usize = 128;
/// The pauses before a request is repeated.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(2);
/// A read that makes progress may take this many times the patience.
const SLOW: u32 = 6;

/// How long a read tries.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// The time for an answer, and for each part of its body. Then the request is repeated.
    pub answer: Duration,
    /// The time without a single byte, over all repetitions. Then the read fails.
    pub read: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(3),
            read: Duration::from_secs(10),
        }
    }
}

/// The object stores: `s3://bucket/key`, `gs://bucket/key`, `az://container/blob`, and `file:///`
/// for a path of this host.
#[derive(Debug)]
pub struct ObjectStores {
    shared: OnceLock<Arc<Shared>>,
    patience: Patience,
    cache: Cache,
    environment: BTreeMap<String, String>,
    /// By scheme and bucket: connections are used again.
    clients: Mutex<HashMap<(String, String), Arc<dyn ObjectStore>>>,
}

#[derive(Debug)]
struct Shared {
    /// `None` while it is dropped.
    runtime: Option<Runtime>,
    requests: Semaphore,
    patience: Patience,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A request that hangs must not hold the end up.
            runtime.shutdown_background();
        }
    }
}

impl Shared {
    /// Waits for a request. A panic in it is its error: another crate's defect costs one read.
    fn wait<T>(
        &self,
        address: &str,
        request: impl Future<Output = Result<T, SourceError>>,
    ) -> Result<T, SourceError> {
        let runtime = self.runtime.as_ref().expect("taken by `drop` only");
        let caught = runtime.block_on(AssertUnwindSafe(request).catch_unwind());
        caught.unwrap_or_else(|_| {
            let why = "the request ended in a panic";
            Err(refused(address, io::ErrorKind::Other, why))
        })
    }
}

impl ObjectStores {
    /// The stores with the credentials and endpoints that the environment of this process names.
    /// See `docs/object-stores.md` for the variables.
    ///
    /// # Errors
    /// A sentence that names a variable that no request can use.
    pub fn from_env(cache: Cache) -> io::Result<Self> {
        let variables = std::env::vars_os()
            .filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)));
        Self::new(variables, cache, Patience::default())
    }

    /// The stores with the credentials and endpoints of these variables.
    ///
    /// # Errors
    /// As [`Self::from_env`].
    pub fn new(
        environment: impl IntoIterator<Item = (String, String)>,
        cache: Cache,
        patience: Patience,
    ) -> io::Result<Self> {
        let environment = reasons::settings(environment)
            .map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        Ok(Self {
            shared: OnceLock::new(),
            patience,
            cache,
            environment,
            clients: Mutex::default(),
        })
    }

    /// The runtime. A pager that opens no object has none.
    fn shared(&self) -> io::Result<&Arc<Shared>> {
        if let Some(shared) = self.shared.get() {
            return Ok(shared);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("object-store")
            .enable_all()
            .build()?;
        let shared = Arc::new(Shared {
            runtime: Some(runtime),
            requests: Semaphore::new(REQUESTS),
            patience: self.patience,
        });
        // Another thread may have been faster.
        Ok(self.shared.get_or_init(|| shared))
    }

    fn client(&self, scheme: &str, bucket: &str) -> Result<Arc<dyn ObjectStore>, Error> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (scheme.to_owned(), bucket.to_owned());
        if let Some(client) = clients.get(&key) {
            return Ok(client.clone());
        }
        // reqwest takes the provider of the process. It is ring in this workspace, and whoever
        // chose another one may have it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Reads repeat their requests themselves.
        let once = RetryConfig {
            max_retries: 0,
            ..RetryConfig::default()
        };
        // `from_env` of the builders would do the same, but only with the process's environment.
        macro_rules! configured {
            ($builder:ty, $key:ty) => {
                self.environment
                    .iter()
                    .filter_map(|(key, value)| Some((key.parse::<$key>().ok()?, value)))
                    .fold(<$builder>::new(), |builder, (key, value)| {
                        builder.with_config(key, value)
                    })
                    .with_retry(once)
            };
        }
        let client: Arc<dyn ObjectStore> = match scheme {
            "s3" => Arc::new(
                configured!(AmazonS3Builder, AmazonS3ConfigKey)
                    .with_bucket_name(bucket)
                    .build()?,
            ),
            "gs" => Arc::new(
                configured!(GoogleCloudStorageBuilder, GoogleConfigKey)
                    .with_bucket_name(bucket)
                    .build()?,
            ),
            _ => Arc::new(
                configured!(MicrosoftAzureBuilder, AzureConfigKey)
                    .with_container_name(bucket)
                    .build()?,
            ),
        };
        clients.insert(key, client.clone());
        Ok(client)
    }
}

fn refused(address: &str, kind: io::ErrorKind, why: impl Into<String>) -> SourceError {
    SourceError::Failed {
        what: address.to_owned(),
        why: io::Error::new(kind, why.into()),
    }
}

impl Store for ObjectStores {
    fn schemes(&self) -> &[&str] {
        &["s3", "gs", "az", "file"]
    }

    fn open(&self, address: &str) -> Result<Arc<dyn Source>, SourceError> {
        let usage = || {
            let why = "expected SCHEME://BUCKET/KEY, or file:///PATH";
            refused(address, io::ErrorKind::InvalidInput, why)
        };
        let (scheme, rest) = address.split_once("://").ok_or_else(usage)?;
        let (bucket, key) = rest.split_once('/').ok_or_else(usage)?;
        if key.is_empty() || bucket.is_empty() != (scheme == "file") {
            return Err(usage());
        }
        if scheme == "file" {
            return Ok(Arc::new(FileSource::open(rest.as_ref())?));
        }
        if key.split('/').any(str::is_empty) {
            // `object_store` would ask for another object.
            let why =
                "expected a key without a slash at its start or end, and without two in a row";
            return Err(refused(address, io::ErrorKind::InvalidInput, why));
        }
        let path = Path::parse(key)
            .map_err(|why| refused(address, io::ErrorKind::InvalidInput, why.to_string()))?;
        let client = self
            .client(scheme, bucket)
            .map_err(|why| refused(address, io::ErrorKind::InvalidInput, why.to_string()))?;
        let head = GetOptions {
            head: true,
            ..GetOptions::default()
        };
        let shared = self.shared().map_err(|why| SourceError::Failed {
            what: address.to_owned(),
            why,
        })?;
        let mut tries = Tries::new(self.patience);
        let meta = shared.wait(address, async {
            loop {
                let asked = client.get_opts(&path, head.clone());
                match timeout(self.patience.answer, asked).await {
                    Ok(Ok(found)) => return Ok(found.meta),
                    Ok(Err(why)) if is_final(&why) => {
                        // The answer to HEAD has no body, which would tell the reason.
                        let first = GetOptions {
                            range: Some((0..1).into()),
                            ..GetOptions::default()
                        };
                        let asked = client.get_opts(&path, first);
                        return match timeout(self.patience.answer, asked).await {
                            Ok(Ok(found)) => Ok(found.meta),
                            Ok(Err(same)) if discriminant(&same) == discriminant(&why) => {
                                Err(of_store(address, &same))
                            }
                            _ => Err(of_store(address, &why)),
                        };
                    }
                    Ok(Err(why)) => tries.again(address, &told(&why)).await?,
                    Err(_) => tries.again(address, "no answer in time").await?,
                }
            }
        })?;
        let object = Arc::new(Object {
            shared: shared.clone(),
            address: address.to_owned(),
            client,
            path,
            identity: identity(&meta),
            meta,
        });
        Ok(self.cache.wrap(address, object))
    }
}

/// The identity of an object. A copy of the same bytes often has the same tag.
fn identity(meta: &ObjectMeta) -> String {
    match &meta.e_tag {
        Some(tag) => format!("{} bytes, entity tag {tag}", meta.size),
        None => format!("{} bytes, changed at {}", meta.size, meta.last_modified),
    }
}

/// The reason of a refusal, with the proxy of this process.
fn told(why: &Error) -> String {
    let proxy = [
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
        "HTTP_PROXY",
        "http_proxy",
    ]
    .into_iter()
    .find_map(|name| Some(format!("{name}={}", std::env::var(name).ok()?)));
    reasons::reason(why, proxy.as_deref())
}

fn of_store(address: &str, why: &Error) -> SourceError {
    let kind = match why {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            io::ErrorKind::PermissionDenied
        }
        _ => io::ErrorKind::Other,
    };
    refused(address, kind, told(why))
}

/// The repetitions of a request.
struct Tries {
    patience: Patience,
    began: Instant,
    /// The last byte that came.
    progress: Instant,
    pause: Duration,
    count: u32,
}

impl Tries {
    fn new(patience: Patience) -> Self {
        let now = Instant::now();
        Self {
            patience,
            began: now,
            progress: now,
            pause: FIRST_PAUSE,
            count: 1,
        }
    }

    /// Waits before the next request, or gives up.
    async fn again(&mut self, address: &str, why: &str) -> Result<(), SourceError> {
        // Half of the pause is random, so that many readers do not come back at once.
        let random = RandomState::new().hash_one(self.count) % 1000;
        let pause = self.pause / 2 + self.pause / 2 * random as u32 / 1000;
        if self.progress.elapsed() + pause > self.patience.read
            || self.began.elapsed() > self.patience.read * SLOW
        {
            let why = format!("given up after {} requests: {why}", self.count);
            return Err(refused(address, io::ErrorKind::TimedOut, why));
        }
        tracing::debug!("{address}: request {} failed: {why}", self.count);
        tokio::time::sleep(pause).await;
        self.pause = (self.pause * 2).min(LAST_PAUSE);
        self.count += 1;
        Ok(())
    }

    fn progressed(&mut self) {
        self.progress = Instant::now();
        self.pause = FIRST_PAUSE;
    }
}

/// An object, as it was when it was opened.
#[derive(Debug)]
struct Object {
    shared: Arc<Shared>,
    address: String,
    client: Arc<dyn ObjectStore>,
    path: Path,
    meta: ObjectMeta,
    identity: String,
}

/// The end of a request.
enum Ended {
    Final(SourceError),
    Again(String),
}

impl Object {
    fn changed(&self, now: String) -> Ended {
        Ended::Final(SourceError::Changed {
            what: self.address.clone(),
            before: self.identity.clone(),
            now,
        })
    }

    fn ended(&self, why: &Error) -> Ended {
        match why {
            Error::Precondition { .. } => self.changed("another object".to_owned()),
            why if is_final(why) => Ended::Final(of_store(&self.address, why)),
            why => Ended::Again(told(why)),
        }
    }

    /// Asks for the bytes from `offset` on, and counts those that came in `filled`.
    async fn request(
        &self,
        offset: u64,
        buffer: &mut [u8],
        filled: &mut usize,
    ) -> Result<(), Ended> {
        let silent = |_| Ended::Again("no answer in time".to_owned());
        let patience = self.shared.patience.answer;
        let asked = GetOptions {
            // A weak tag never matches. What the answer says is compared all the same.
            if_match: self.meta.e_tag.clone().filter(|tag| !tag.starts_with("W/")),
            range: Some((offset + *filled as u64..offset + buffer.len() as u64).into()),
            ..GetOptions::default()
        };
        let found = timeout(patience, self.client.get_opts(&self.path, asked))
            .await
            .map_err(silent)?
            .map_err(|why| self.ended(&why))?;
        let now = identity(&found.meta);
        if now != self.identity {
            return Err(self.changed(now));
        }
        let mut body = found.into_stream();
        while *filled < buffer.len() {
            let part = timeout(patience, body.next()).await.map_err(silent)?;
            let part = part.ok_or_else(|| Ended::Again("the body ended early".to_owned()))?;
            let part = part.map_err(|why| self.ended(&why))?;
            let rest = &mut buffer[*filled..];
            if part.len() > rest.len() {
                let why = "the body has more bytes than were asked for";
                return Err(Ended::Again(why.to_owned()));
            }
            rest[..part.len()].copy_from_slice(&part);
            *filled += part.len();
        }
        Ok(())
    }

    async fn fill(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        let mut tries = Tries::new(self.shared.patience);
        let mut filled = 0;
        loop {
            let before = filled;
            let permit = self.shared.requests.acquire().await;
            let ended = self.request(offset, buffer, &mut filled).await;
            drop(permit);
            if filled > before {
                tries.progressed();
            }
            match ended {
                Ok(()) => return Ok(()),
                Err(Ended::Final(why)) => return Err(why),
                Err(Ended::Again(why)) => tries.again(&self.address, &why).await?,
            }
        }
    }
}

impl Source for Object {
    fn bytes(&self) -> u64 {
        self.meta.size
    }

    fn block(&self) -> u64 {
        crate::stores::cache::BLOCK
    }

    fn reads(&self) -> usize {
        // Requests take 20 ms or more each, and stores answer as many as one asks.
        64
    }

    fn is_zero(&self, _offset: u64, _len: u64) -> bool {
        false
    }

    fn read_now(&self, _offset: u64, _buffer: &mut [u8]) -> Result<bool, SourceError> {
        Ok(false)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        if buffer.is_empty() {
            return Ok(());
        }
        let end = offset.saturating_add(buffer.len() as u64);
        if end > self.meta.size {
            return Err(SourceError::Short {
                what: self.address.clone(),
                end,
            });
        }
        self.shared.wait(&self.address, self.fill(offset, buffer))
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }
}
