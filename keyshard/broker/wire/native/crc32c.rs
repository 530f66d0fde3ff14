//! The checksum of entries.

const fn crc_table() -> [[u32; 256]; 8] {
    let mut table = [[0u32; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[0][byte] = crc;
        byte += 1;
    }
    let mut slice = 1;
    while slice < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = table[slice - 1][byte];
            table[slice][byte] = before >> 8 ^ table[0][(before & 0xff) as usize];
            byte += 1;
        }
        slice += 1;
    }
    table
}

static CRC: [[u32; 256]; 8] = crc_table();

pub fn crc32c(data: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has these instructions.
        return unsafe { crc32c_by_processor(data) };
    }
    crc32c_by_table(data)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
unsafe fn crc32c_by_processor(data: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u64, _mm_crc32_u8};
    let blocks = data.chunks_exact(8);
    let tail = blocks.remainder();
    let mut crc = u64::from(u32::MAX);
    for block in blocks {
        let eight = [block[0], block[1], block[2], block[3], block[4], block[5], block[6], block[7]];
        crc = _mm_crc32_u64(crc, u64::from_le_bytes(eight));
    }
    !tail.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte))
}

fn crc32c_by_table(data: &[u8]) -> u32 {
    let blocks = data.chunks_exact(8);
    let tail = blocks.remainder();
    let mut crc = u32::MAX;
    for block in blocks {
        let low = crc ^ u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
        crc = (0..4).fold(0, |found, byte| {
            found ^ CRC[7 - byte][(low >> (8 * byte) & 0xff) as usize] ^ CRC[3 - byte][block[4 + byte] as usize]
        });
    }
    !tail.iter().fold(crc, |crc, byte| crc >> 8 ^ CRC[0][((crc ^ u32::from(*byte)) & 0xff) as usize])
}
