//! The header of a riscv64 `Image` (Linux, `Documentation/arch/riscv/boot-image-header.rst`).
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | two instructions |
//! | 8 | 8 | text offset: the kernel's place behind the start of RAM |
//! | 16 | 8 | size in memory, with what is not in the file |
//! | 24 | 8 | flags: bit 0 for big-endian |
//! | 48 | 8 | magic `"RISCV\0\0\0"`, deprecated |
//! | 56 | 4 | magic `"RSC\x05"` |
//!
//! All are little-endian.

/// The length of the header.
const HEADER: usize = 64;
const MAGIC: &[u8] = b"RSC\x05";
/// The largest text offset and the largest size in memory that a kernel may have: 1 GiB.
const MOST: u64 = 1 << 30;
/// The bytes behind the header that are searched for compressed instructions.
const SAMPLE: usize = 64 * 1024;

/// The reason why a kernel is not loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The file has less bytes than the header.
    #[error("the kernel has {0} bytes, less than the 64 of its header: give an uncompressed Image")]
    Short(usize),
    /// The file has another format.
    #[error("the kernel is {0}: expected an uncompressed riscv64 Image (arch/riscv/boot/Image)")]
    Format(&'static str),
    /// The kernel is big-endian.
    #[error("the kernel is big-endian: expected a little-endian one")]
    BigEndian,
    /// The kernel has compressed instructions.
    #[error(
        "the kernel has compressed instructions (extension C), which our harts lack: build it for \
         rv64ima, with CONFIG_NONPORTABLE=y, CONFIG_EFI=n and CONFIG_RISCV_ISA_C=n (PORTABLE \
         selects EFI, and EFI selects C)"
    )]
    Compressed,
    /// A field of the header has an impossible value.
    #[error("the kernel's header has {field} {value:#x}: expected {expected}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The values that it may have.
        expected: &'static str,
    },
    /// The file ends early.
    #[error("the kernel has {bytes} bytes of {memory} in memory: it was truncated")]
    Truncated {
        /// The length of the file.
        bytes: usize,
        /// The size in memory.
        memory: u64,
    },
}

/// A kernel's place and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Image {
    /// The distance from the start of RAM, a multiple of the page size.
    pub(super) text_offset: u64,
    /// The size in memory, not less than the file.
    pub(super) memory_bytes: u64,
}

impl Image {
    /// Reads the header of `kernel`, and checks that our harts can run it.
    pub(super) fn read(kernel: &[u8]) -> Result<Self, ImageError> {
        if let Some(format) = other_format(kernel) {
            return Err(ImageError::Format(format));
        }
        let Some(header) = kernel.first_chunk::<HEADER>() else {
            return Err(ImageError::Short(kernel.len()));
        };
        let word =
            |at: usize| u64::from_le_bytes(*header[at..].first_chunk().expect("in 64 bytes"));
        let (text_offset, memory, flags) = (word(8), word(16), word(24));
        if flags & 1 != 0 {
            return Err(ImageError::BigEndian);
        }
        if !text_offset.is_multiple_of(4096) || text_offset > MOST {
            return Err(ImageError::Field {
                field: "text offset",
                value: text_offset,
                expected: "a multiple of 4096, at most 1 GiB",
            });
        }
        if !(1..=MOST).contains(&memory) {
            return Err(ImageError::Field {
                field: "image size",
                value: memory,
                expected: "1 to 1 GiB",
            });
        }
        // What is not in the file is zeroed memory, which is a small part of any kernel.
        if (kernel.len() as u64) < memory / 4 {
            return Err(ImageError::Truncated {
                bytes: kernel.len(),
                memory,
            });
        }
        if has_compressed_code(kernel) {
            return Err(ImageError::Compressed);
        }
        Ok(Self {
            text_offset,
            memory_bytes: memory.max(kernel.len() as u64),
        })
    }
}

/// The name of a format that is often taken for an `Image`.
fn other_format(kernel: &[u8]) -> Option<&'static str> {
    let starts = |magic: &[u8]| kernel.starts_with(magic);
    let at = |offset: usize, magic: &[u8]| {
        kernel
            .get(offset..)
            .is_some_and(|rest| rest.starts_with(magic))
    };
    if at(56, MAGIC) {
        return None;
    }
    if kernel.len() < HEADER {
        return None;
    }
    // The header of a kernel that unpacks itself under EFI (drivers/firmware/efi/libstub,
    // `zboot-header.S`) names the format of the packed kernel at byte 24.
    if starts(b"MZ") && at(4, b"zimg") {
        return Some(match kernel.get(24..28) {
            Some(b"gzip") => "an EFI zboot image, packed with gzip",
            Some(b"zstd") => "an EFI zboot image, packed with zstd",
            Some(b"xzke") => "an EFI zboot image, packed with xz",
            Some(b"lzma") => "an EFI zboot image, packed with lzma",
            Some(b"lzo\0") => "an EFI zboot image, packed with lzo",
            Some(b"lz4\0") => "an EFI zboot image, packed with lz4",
            _ => "an EFI zboot image",
        });
    }
    Some(if starts(b"\x1f\x8b") {
        "compressed with gzip"
    } else if starts(b"\xfd7zXZ") {
        "compressed with xz"
    } else if starts(b"\x28\xb5\x2f\xfd") {
        "compressed with zstd"
    } else if starts(b"\x02\x21\x4c\x18") || starts(b"\x04\x22\x4d\x18") {
        "compressed with lz4"
    } else if starts(b"\x5d\0\0") {
        "compressed with lzma"
    } else if starts(b"BZh") {
        "compressed with bzip2"
    } else if starts(b"\x89LZO\0") {
        "compressed with lzo"
    } else if starts(b"\x7fELF") {
        "an ELF file"
    } else if at(56, b"ARM\x64") {
        "an Image for arm64"
    } else if at(0x202, b"HdrS") {
        "a bzImage for x86"
    } else {
        "no Linux kernel that we know"
    })
}

/// Whether code near the start has instructions of 2 bytes.
///
/// The lowest two bits of an instruction of 4 bytes are ones. Without compressed instructions that
/// holds for every aligned word of code. With them, many words begin in the middle of one or with a
/// short one. The magic of a program for EFI is one, too: only kernels with C have it.
fn has_compressed_code(kernel: &[u8]) -> bool {
    if kernel.starts_with(b"MZ") {
        return true;
    }
    let end = kernel.len().min(HEADER + SAMPLE);
    let words = kernel[HEADER..end].chunks_exact(4);
    let (mut full, mut other) = (0, 0);
    for word in words.filter(|word| *word != [0; 4]) {
        if word[0] & 3 == 3 {
            full += 1;
        } else {
            other += 1;
        }
    }
    other > full / 4
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A kernel that is no more than a header and 64 KiB of `addi x0, x0, 0`.
    pub(in super::super) fn kernel() -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[8..16].copy_from_slice(&(2u64 << 20).to_le_bytes());
        bytes[16..24].copy_from_slice(&(128u64 << 10).to_le_bytes());
        bytes[48..56].copy_from_slice(b"RISCV\0\0\0");
        bytes[56..60].copy_from_slice(MAGIC);
        bytes.extend(0x13_u32.to_le_bytes().repeat(SAMPLE / 4));
        bytes
    }

    fn changed(change: impl Fn(&mut Vec<u8>)) -> ImageError {
        let mut bytes = kernel();
        change(&mut bytes);
        Image::read(&bytes).unwrap_err()
    }

    #[test]
    fn the_header_says_place_and_size() {
        let image = Image::read(&kernel()).unwrap();
        assert_eq!(
            (image.text_offset, image.memory_bytes),
            (2 << 20, 128 << 10)
        );
    }

    #[test]
    fn other_files_are_named() {
        for (magic, at, name) in [
            (&b"\x1f\x8b"[..], 0, "gzip"),
            (b"\xfd7zXZ", 0, "xz"),
            (b"\x28\xb5\x2f\xfd", 0, "zstd"),
            (b"\x02\x21\x4c\x18", 0, "lz4"),
            (b"\x04\x22\x4d\x18", 0, "lz4"),
            (b"\x5d\0\0\x80", 0, "lzma"),
            (b"BZh9", 0, "bzip2"),
            (b"\x89LZO\0", 0, "lzo"),
            (b"MZ\0\0zimg", 0, "EFI zboot"),
            (b"\x7fELF", 0, "ELF"),
            (b"ARM\x64", 56, "arm64"),
            (b"HdrS", 0x202, "x86"),
            (b"", 0, "know"),
        ] {
            let why = changed(|kernel| {
                kernel[56] = 0;
                kernel[at..at + magic.len()].copy_from_slice(magic);
            });
            assert!(why.to_string().contains(name), "{why}");
        }
        for (name, shown) in [
            (b"gzip", "gzip"),
            (b"zstd", "zstd"),
            (b"xzke", "xz"),
            (b"lzma", "lzma"),
            (b"lzo\0", "lzo"),
            (b"lz4\0", "lz4"),
        ] {
            let why = changed(|kernel| {
                kernel[..8].copy_from_slice(b"MZ\0\0zimg");
                kernel[24..28].copy_from_slice(name);
                kernel[56] = 0;
            });
            let expected = format!("EFI zboot image, packed with {shown}");
            assert!(why.to_string().contains(&expected), "{why}");
        }
        for length in [0, 10, 63] {
            let short = changed(|kernel| kernel.truncate(length));
            assert_eq!(short, ImageError::Short(length));
        }
    }

    #[test]
    fn impossible_headers_are_refused() {
        let field = |why: ImageError, name: &str| {
            assert!(matches!(why, ImageError::Field { field, .. } if field == name));
        };
        field(changed(|kernel| kernel[8] = 1), "text offset");
        field(changed(|kernel| kernel[15] = 1), "text offset");
        field(changed(|kernel| kernel[16..24].fill(0)), "image size");
        field(changed(|kernel| kernel[23] = 1), "image size");
        assert_eq!(changed(|kernel| kernel[24] = 1), ImageError::BigEndian);
        let short = changed(|kernel| kernel.truncate(100));
        assert!(matches!(short, ImageError::Truncated { bytes: 100, .. }));
    }

    #[test]
    fn compressed_instructions_are_refused() {
        assert_eq!(
            changed(|kernel| kernel[..2].copy_from_slice(b"MZ")),
            ImageError::Compressed
        );
        // c.addi, then three instructions of 4 bytes that begin in the middle of a word.
        let mixed = changed(|kernel| {
            for (index, byte) in (0..).zip(&mut kernel[HEADER..]) {
                *byte = if index % 4 == 2 { 0x13 } else { 0x05 };
            }
        });
        assert_eq!(mixed, ImageError::Compressed);
        for line in [
            "CONFIG_NONPORTABLE=y",
            "CONFIG_EFI=n",
            "CONFIG_RISCV_ISA_C=n",
        ] {
            assert!(mixed.to_string().contains(line), "{mixed}");
        }
    }

    proptest! {
        #[test]
        fn damaged_kernels_never_panic(
            damage in prop::collection::vec((0..HEADER, any::<u8>()), 1..9),
            length in 0..kernel().len(),
        ) {
            let mut bytes = kernel();
            for (at, value) in damage {
                bytes[at] = value;
            }
            bytes.truncate(length);
            if let Ok(image) = Image::read(&bytes) {
                prop_assert!(image.memory_bytes >= length as u64);
            }
        }
    }
}
