//! Arrow columns -> entries, and entries -> frames.
//!
//! The same as `encoding.py` and `frames.py`, which stay the reference. It declines (returns false)
//! whatever does not fit, such as an output that is too small; the reference then encodes it.
//!
//! Payloads and entries are two calls, since the caller compresses in between. No crates, and
//! nothing of Python. Columns are looked at through checked slices; `unsafe` is what the functions
//! are given.

use std::ops::Range;
use std::panic::catch_unwind;
use std::slice;

mod crc32c;
use crc32c::crc32c;

/// What precedes the checksum of an entry.
const CHECKED: [u8; 2] = [0x0e, 0x01];
/// Type and field of the command of an entry.
const SEND: u64 = 6;

/// Why the entries are left to the reference.
struct Odd;
type Fits<T> = Result<T, Odd>;

/// A column of bytes, as Arrow has it; absent if `offsets` is null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Binary {
    validity: *const u8,
    offsets: *const i32,
    data: *const u8,
    data_size: u64,
    /// First row within the buffers.
    start: u64,
    rows: u64,
}

/// A column of numbers; absent if `values` is null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Numbers {
    validity: *const u8,
    values: *const i64,
    start: u64,
    rows: u64,
}

/// A column of maps of text to text; absent if `offsets` is null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Maps {
    validity: *const u8,
    offsets: *const i32,
    start: u64,
    rows: u64,
    names: Binary,
    texts: Binary,
}

/// The messages.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Messages {
    values: Binary,
    keys: Binary,
    ordering_keys: Binary,
    events: Numbers,
    properties: Maps,
    deliver_ats: Numbers,
    keys_of_bytes: u64,
}

/// The common part of all entries of a producer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Head {
    producer_name: *const u8,
    producer_name_size: u64,
    schema_version: *const u8,
    schema_version_size: u64,
    publish_ms: u64,
    compression: u64,
}

/// Whether a row is valid.
///
/// # Safety
/// `validity` is null or has a bit for each row.
unsafe fn is_valid(validity: *const u8, row: usize) -> bool {
    // SAFETY: the caller's.
    validity.is_null() || unsafe { *validity.add(row / 8) } >> (row % 8) & 1 == 1
}

fn part<'a>(offsets: &[i32], data: &'a [u8], at: usize) -> Fits<&'a [u8]> {
    let from = usize::try_from(*offsets.get(at).ok_or(Odd)?).map_err(|_| Odd)?;
    let to = usize::try_from(*offsets.get(at + 1).ok_or(Odd)?).map_err(|_| Odd)?;
    data.get(from..to).ok_or(Odd)
}

impl Binary {
    /// The bytes of a row; none if it is null or the column is absent.
    ///
    /// # Safety
    /// The pointers are those of a column with `start + rows` rows.
    unsafe fn get<'a>(&self, row: usize) -> Fits<Option<&'a [u8]>> {
        if self.offsets.is_null() {
            return Ok(None);
        }
        let rows = self.rows as usize;
        if row >= rows {
            return Err(Odd);
        }
        let at = self.start as usize + row;
        // SAFETY: the caller's.
        unsafe {
            if !is_valid(self.validity, at) {
                return Ok(None);
            }
            let offsets = slice::from_raw_parts(self.offsets, self.start as usize + rows + 1);
            let data: &[u8] = if self.data.is_null() {
                &[]
            } else {
                slice::from_raw_parts(self.data, self.data_size as usize)
            };
            part(offsets, data, at).map(Some)
        }
    }
}

impl Numbers {
    /// The number of a row; none if it is null or the column is absent.
    ///
    /// # Safety
    /// The pointers are those of a column with `start + rows` rows.
    unsafe fn get(&self, row: usize) -> Fits<Option<u64>> {
        if self.values.is_null() {
            return Ok(None);
        }
        if row >= self.rows as usize {
            return Err(Odd);
        }
        let at = self.start as usize + row;
        // SAFETY: the caller's.
        Ok(unsafe { is_valid(self.validity, at).then(|| *self.values.add(at) as u64) })
    }
}

/// What is written, within the size that the caller gave.
struct Output<'a> {
    room: &'a mut [u8],
    at: usize,
}

fn number_size(mut number: u64) -> usize {
    let mut size = 1;
    while number > 0x7f {
        number >>= 7;
        size += 1;
    }
    size
}

fn bytes_size(tag: u64, size: usize) -> usize {
    number_size(tag) + number_size(size as u64) + size
}

impl Output<'_> {
    fn put(&mut self, bytes: &[u8]) -> Fits<()> {
        let end = self.at.checked_add(bytes.len()).ok_or(Odd)?;
        self.room.get_mut(self.at..end).ok_or(Odd)?.copy_from_slice(bytes);
        self.at = end;
        Ok(())
    }

    fn number(&mut self, mut number: u64) -> Fits<()> {
        let mut bytes = [0u8; 10];
        let mut size = 0;
        while number > 0x7f {
            bytes[size] = number as u8 | 0x80;
            number >>= 7;
            size += 1;
        }
        bytes[size] = number as u8;
        self.put(&bytes[..=size])
    }

    fn field(&mut self, number: u64, value: u64) -> Fits<()> {
        self.number(number << 3)?;
        self.number(value)
    }

    fn bytes_field(&mut self, number: u64, bytes: &[u8]) -> Fits<()> {
        self.number(number << 3 | 2)?;
        self.number(bytes.len() as u64)?;
        self.put(bytes)
    }
}

impl Messages {
    /// The properties of a row: the first of its pairs, and the end of them.
    ///
    /// # Safety
    /// The pointers are those of a column with `start + rows` rows.
    unsafe fn pairs(&self, row: usize) -> Fits<(usize, usize)> {
        let maps = &self.properties;
        if maps.offsets.is_null() {
            return Ok((0, 0));
        }
        if row >= maps.rows as usize {
            return Err(Odd);
        }
        let at = maps.start as usize + row;
        // SAFETY: the caller's.
        unsafe {
            if !is_valid(maps.validity, at) {
                return Ok((0, 0));
            }
            let from = usize::try_from(*maps.offsets.add(at)).map_err(|_| Odd)?;
            let to = usize::try_from(*maps.offsets.add(at + 1)).map_err(|_| Odd)?;
            Ok((from, to))
        }
    }

    /// Writes properties as the repeated field `field`.
    ///
    /// # Safety
    /// The pointers are those of columns.
    unsafe fn put_pairs(&self, field: u64, pairs: Range<usize>, out: &mut Output) -> Fits<()> {
        for pair in pairs {
            // SAFETY: the caller's.
            let (name, text) = unsafe {
                (
                    self.properties.names.get(pair)?.ok_or(Odd)?,
                    self.properties.texts.get(pair)?.ok_or(Odd)?,
                )
            };
            let size = bytes_size(1 << 3 | 2, name.len()) + bytes_size(2 << 3 | 2, text.len());
            out.number(field << 3 | 2)?;
            out.number(size as u64)?;
            out.bytes_field(1, name)?;
            out.bytes_field(2, text)?;
        }
        Ok(())
    }

    /// Writes a message of a batch: the size of its metadata, its metadata, and its value.
    ///
    /// # Safety
    /// The pointers are those of columns.
    unsafe fn write(&self, row: usize, sequence_id: u64, out: &mut Output) -> Fits<()> {
        // SAFETY: the caller's.
        let (value, key, ordering_key, event, (first, end)) = unsafe {
            (
                self.values.get(row)?, self.keys.get(row)?, self.ordering_keys.get(row)?,
                self.events.get(row)?, self.pairs(row)?,
            )
        };
        let size_at = out.at;
        out.put(&[0; 4])?;
        // SAFETY: the caller's.
        unsafe { self.put_pairs(1, first..end, out)? };
        if let Some(key) = key {
            out.bytes_field(2, key)?;
        }
        out.field(3, value.map_or(0, <[u8]>::len) as u64)?;
        if let Some(event) = event {
            out.field(5, event)?;
        }
        if key.is_some() && self.keys_of_bytes != 0 {
            out.field(6, 1)?;
        }
        if let Some(ordering_key) = ordering_key {
            out.bytes_field(7, ordering_key)?;
        }
        out.field(8, sequence_id)?;
        if value.is_none() {
            out.field(9, 1)?;
        }
        let size = u32::try_from(out.at - size_at - 4).map_err(|_| Odd)?;
        out.room[size_at..size_at + 4].copy_from_slice(&size.to_be_bytes());
        out.put(value.unwrap_or_default())
    }

    /// Writes what is stored of an entry: checksum, metadata and payload.
    ///
    /// # Safety
    /// The pointers are those of columns, and of `head`.
    unsafe fn write_entry(
        &self, rows: Range<usize>, sequence_id: u64, head: &Head, payload: &[u8], unpacked: u64,
        out: &mut Output,
    ) -> Fits<()> {
        let (row, batched) = (rows.start, rows.len() > 1);
        // SAFETY: the caller's.
        let (name, schema, value, key, ordering_key, event, deliver_at, (first, end)) = unsafe {
            (
                slice::from_raw_parts(head.producer_name, head.producer_name_size as usize),
                slice::from_raw_parts(head.schema_version, head.schema_version_size as usize),
                self.values.get(row)?, self.keys.get(row)?, self.ordering_keys.get(row)?,
                self.events.get(row)?, self.deliver_ats.get(row)?, self.pairs(row)?,
            )
        };
        out.put(&CHECKED)?;
        let checksum_at = out.at;
        out.put(&[0; 8])?;
        let metadata_at = out.at;
        out.bytes_field(1, name)?;
        out.field(2, sequence_id)?;
        out.field(3, head.publish_ms)?;
        if !batched {
            // SAFETY: the caller's.
            unsafe { self.put_pairs(4, first..end, out)? };
        }
        if let Some(key) = key {
            out.bytes_field(6, key)?;
        }
        if (payload.len() as u64) < unpacked {
            out.field(8, head.compression)?;
        }
        out.field(9, unpacked)?;
        if batched {
            out.field(11, rows.len() as u64)?;
        } else if let Some(event) = event {
            out.field(12, event)?;
        }
        if !schema.is_empty() {
            out.bytes_field(16, schema)?;
        }
        if key.is_some() && self.keys_of_bytes != 0 {
            out.field(17, 1)?;
        }
        if let Some(ordering_key) = ordering_key {
            out.bytes_field(18, ordering_key)?;
        }
        if let Some(deliver_at) = deliver_at {
            out.field(19, deliver_at)?;
        }
        if batched {
            out.field(24, sequence_id + rows.len() as u64 - 1)?;
        } else if value.is_none() {
            out.field(25, 1)?;
        }
        let size = u32::try_from(out.at - metadata_at).map_err(|_| Odd)?;
        out.room[metadata_at - 4..metadata_at].copy_from_slice(&size.to_be_bytes());
        out.put(payload)?;
        let checksum = crc32c(&out.room[metadata_at - 4..out.at]);
        out.room[checksum_at..checksum_at + 4].copy_from_slice(&checksum.to_be_bytes());
        Ok(())
    }
}

/// Writes the frame of an entry of `count` messages.
fn write_frame(producer: u64, first: u64, count: u64, stored: &[u8], out: &mut Output) -> Fits<()> {
    let mut command = [0u8; 64];
    let mut said = Output { room: &mut command, at: 0 };
    said.field(1, producer)?;
    said.field(2, first)?;
    if count > 1 {
        said.field(3, count)?;
        said.field(6, first + count - 1)?;
    }
    let size = said.at;
    let command_size = 2 + bytes_size(SEND << 3 | 2, size);
    let whole = u32::try_from(4 + command_size + stored.len()).map_err(|_| Odd)?;
    out.put(&whole.to_be_bytes())?;
    out.put(&(command_size as u32).to_be_bytes())?;
    out.field(1, SEND)?;
    out.bytes_field(SEND, &command[..size])?;
    out.put(stored)
}

/// A number that tells whether library and caller belong together.
#[no_mangle]
pub extern "C" fn keyshard_encoder_version() -> u64 {
    3
}

/// Writes the payloads of entries one after the other, without compression; whether they fit.
///
/// # Safety
/// `messages` is one, with the pointers of columns. `ends` has `count` rows, ascending; the first
/// entry begins at `start`. `room` has `size` bytes, and `payload_ends` room for `count` numbers.
#[no_mangle]
pub unsafe extern "C" fn keyshard_payloads(
    messages: *const Messages, start: u64, ends: *const u64, count: u64, sequence_id: u64,
    room: *mut u8, size: u64, payload_ends: *mut u64,
) -> bool {
    catch_unwind(|| {
        // SAFETY: the caller's.
        let (messages, ends, room, payload_ends) = unsafe {
            (
                *messages,
                slice::from_raw_parts(ends, count as usize),
                slice::from_raw_parts_mut(room, size as usize),
                slice::from_raw_parts_mut(payload_ends, count as usize),
            )
        };
        let mut out = Output { room, at: 0 };
        let mut row = start;
        for (end, payload_end) in ends.iter().zip(payload_ends) {
            let alone = *end == row + 1;
            while row < *end {
                // SAFETY: the caller's.
                let written = unsafe {
                    if alone {
                        let value = messages.values.get(row as usize);
                        value.and_then(|value| out.put(value.unwrap_or_default()))
                    } else {
                        messages.write(row as usize, sequence_id + row, &mut out)
                    }
                };
                if written.is_err() {
                    return false;
                }
                row += 1;
            }
            *payload_end = out.at as u64;
        }
        true
    })
    .unwrap_or(false)
}

/// Writes entries one after the other, with payloads that may be compressed; whether they fit.
///
/// # Safety
/// As for `keyshard_payloads`; `head` is one. `payloads` has as many bytes as the last of
/// `payload_ends`, and `unpacked` the sizes of the payloads without compression; a smaller payload
/// is compressed. `payload_ends`,
/// `unpacked` and `entry_ends` have `count` numbers.
#[no_mangle]
pub unsafe extern "C" fn keyshard_entries(
    messages: *const Messages, start: u64, ends: *const u64, count: u64, sequence_id: u64,
    head: *const Head, payloads: *const u8, payload_ends: *const u64, unpacked: *const u64,
    room: *mut u8, size: u64, entry_ends: *mut u64,
) -> bool {
    catch_unwind(|| {
        // SAFETY: the caller's.
        let (messages, head, ends, payload_ends, unpacked, room, entry_ends) = unsafe {
            (
                *messages,
                *head,
                slice::from_raw_parts(ends, count as usize),
                slice::from_raw_parts(payload_ends, count as usize),
                slice::from_raw_parts(unpacked, count as usize),
                slice::from_raw_parts_mut(room, size as usize),
                slice::from_raw_parts_mut(entry_ends, count as usize),
            )
        };
        let all = payload_ends.last().map_or(0, |end| *end as usize);
        // SAFETY: the caller's.
        let payloads = unsafe { slice::from_raw_parts(payloads, all) };
        let mut out = Output { room, at: 0 };
        let (mut row, mut payload_start) = (start, 0);
        for number in 0..ends.len() {
            let (end, payload_end) = (ends[number], payload_ends[number] as usize);
            let Some(payload) = payloads.get(payload_start..payload_end) else {
                return false;
            };
            let rows = row as usize..end as usize;
            // SAFETY: the caller's.
            let written = unsafe {
                messages.write_entry(
                    rows, sequence_id + row, &head, payload, unpacked[number], &mut out,
                )
            };
            if written.is_err() {
                return false;
            }
            entry_ends[number] = out.at as u64;
            (row, payload_start) = (end, payload_end);
        }
        true
    })
    .unwrap_or(false)
}

/// Writes the frames of entries one after the other; their size, or 0 if they do not fit.
///
/// # Safety
/// `stored`, `sizes`, `firsts` and `counts` have `count` values: the bytes of each entry, its
/// sequence id and its number of messages. `room` has `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn keyshard_frames(
    producer: u64, count: u64, stored: *const *const u8, sizes: *const u64, firsts: *const u64,
    counts: *const u64, room: *mut u8, size: u64,
) -> u64 {
    catch_unwind(|| {
        // SAFETY: the caller's.
        let (stored, sizes, firsts, counts, room) = unsafe {
            (
                slice::from_raw_parts(stored, count as usize),
                slice::from_raw_parts(sizes, count as usize),
                slice::from_raw_parts(firsts, count as usize),
                slice::from_raw_parts(counts, count as usize),
                slice::from_raw_parts_mut(room, size as usize),
            )
        };
        let mut out = Output { room, at: 0 };
        for number in 0..stored.len() {
            // SAFETY: the caller's.
            let data = unsafe { slice::from_raw_parts(stored[number], sizes[number] as usize) };
            if write_frame(producer, firsts[number], counts[number], data, &mut out).is_err() {
                return 0;
            }
        }
        out.at as u64
    })
    .unwrap_or(0)
}
