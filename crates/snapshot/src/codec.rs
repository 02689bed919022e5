//! The kinds of stored chunks, and their compressors.
//!
//! **Guarantee.** A decoder never reads or writes outside of its buffers, allocates no length that
//! the bytes say, and fills the whole output or fails.

use crate::error::PackError;
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};

/// How a chunk is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// All its bytes are zero, and nothing is stored.
    Zero = 0,
    /// As it is.
    Raw = 1,
    /// One LZ4 block.
    Lz4 = 2,
    /// One zstd frame.
    Zstd = 3,
}

impl Kind {
    /// The name of the kind.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::Raw => "raw",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        [Self::Zero, Self::Raw, Self::Lz4, Self::Zstd]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }

    /// The kind's bit in the header's set of codecs.
    pub(crate) fn codec(self) -> u8 {
        match self {
            Self::Zero | Self::Raw => 0,
            Self::Lz4 => 1,
            Self::Zstd => 2,
        }
    }
}

/// How a packer stores chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Compression {
    /// As they are: the fastest to read.
    None,
    /// By LZ4.
    #[default]
    Lz4,
    /// By zstd, at a level from 1 to 19: smaller, and slower to read.
    #[cfg(feature = "zstd")]
    Zstd(i32),
}

/// Whether this build reads chunks compressed by zstd.
pub(crate) const HAS_ZSTD: bool = cfg!(feature = "zstd");

/// A packer's compressor, with its buffers.
pub(crate) struct Encoder {
    lz4: Option<CompressTable>,
    #[cfg(feature = "zstd")]
    zstd: Option<zstd::bulk::Compressor<'static>>,
    out: Vec<u8>,
}

impl Encoder {
    pub(crate) fn new(compression: Compression, chunk_bytes: u32) -> Result<Self, PackError> {
        let room = match compression {
            Compression::None => 0,
            Compression::Lz4 => get_maximum_output_size(chunk_bytes as usize),
            #[cfg(feature = "zstd")]
            Compression::Zstd(_) => zstd::zstd_safe::compress_bound(chunk_bytes as usize),
        };
        Ok(Self {
            // A large table from the start: the small one would compress the same bytes otherwise.
            lz4: (compression == Compression::Lz4).then(CompressTable::large),
            #[cfg(feature = "zstd")]
            zstd: match compression {
                Compression::Zstd(level) => Some(
                    zstd::bulk::Compressor::new(level)
                        .map_err(|why| PackError::Compress(why.to_string()))?,
                ),
                _ => None,
            },
            out: vec![0; room],
        })
    }

    /// The kind and the bytes to store. The same chunk always gives the same bytes.
    ///
    /// A chunk that compression shortens by less than a sixteenth is stored as it is: decompression
    /// would cost its readers more than the bytes do.
    pub(crate) fn encode<'a>(&'a mut self, chunk: &'a [u8]) -> Result<(Kind, &'a [u8]), PackError> {
        let failed = |why: String| PackError::Compress(why);
        let mut done = None;
        if let Some(table) = &mut self.lz4 {
            let bytes = compress_into_with_table(chunk, &mut self.out, table);
            done = Some((Kind::Lz4, bytes.map_err(|why| failed(why.to_string()))?));
        }
        #[cfg(feature = "zstd")]
        if let Some(zstd) = &mut self.zstd {
            let bytes = zstd.compress_to_buffer(chunk, &mut self.out[..]);
            done = Some((Kind::Zstd, bytes.map_err(|why| failed(why.to_string()))?));
        }
        Ok(match done {
            Some((kind, bytes)) if bytes <= chunk.len() - chunk.len() / 16 => {
                (kind, &self.out[..bytes])
            }
            _ => (Kind::Raw, chunk),
        })
    }
}

/// Decompresses `stored` into `out`. Returns whether it gave exactly as many bytes.
pub(crate) fn decode(kind: Kind, stored: &[u8], out: &mut [u8]) -> bool {
    match kind {
        Kind::Zero | Kind::Raw => false,
        Kind::Lz4 => decompress_into(stored, out).is_ok_and(|bytes| bytes == out.len()),
        Kind::Zstd => decode_zstd(stored, out),
    }
}

#[cfg(feature = "zstd")]
fn decode_zstd(stored: &[u8], out: &mut [u8]) -> bool {
    use std::cell::RefCell;
    thread_local! {
        // Its tables have 150 KiB: they are made once for each thread.
        static DECODER: RefCell<Option<zstd::bulk::Decompressor<'static>>> =
            const { RefCell::new(None) };
    }
    DECODER.with_borrow_mut(|decoder| {
        if decoder.is_none() {
            *decoder = zstd::bulk::Decompressor::new().ok();
        }
        let all = out.len();
        decoder.as_mut().is_some_and(
            |decoder| matches!(decoder.decompress_to_buffer(stored, out), Ok(n) if n == all),
        )
    })
}

#[cfg(not(feature = "zstd"))]
fn decode_zstd(_: &[u8], _: &mut [u8]) -> bool {
    false
}
