//! Entries as they are stored -> the buffers of Arrow columns.
//!
//! The same walk as `decoding.py`, which stays the reference: whatever is not plain here (damaged,
//! chunked, encrypted, a key that is no text, a number that is no time, ...) is left to it, error
//! texts included. So this code has to be right where it answers, and may always decline.
//!
//! No crates, and nothing of Python: a shared library with five functions. Bytes of the network are
//! only looked at through checked slices; `unsafe` is what the five functions are given.

use std::collections::HashSet;
use std::mem::size_of_val;
use std::panic::catch_unwind;
use std::slice;

/// Numbers of an opened entry: see `Opened`.
const OPENED: usize = 7;
/// Numbers of an entry that came: see `came`.
const CAME: usize = 5;
/// Type of the command that brings an entry, and its field in `BaseCommand`.
const MESSAGE: u64 = 9;
/// Times from here on are none; `TIME_MS_MAX` in `arrow/metadata.py`.
const TIME_MS_MAX: u64 = 253_370_764_800_000;
const BYTES_MAX: usize = i32::MAX as usize;
/// Properties of a message from which on it is left to the reference before its memory is counted.
const PROPERTIES_MAX: usize = 1 << 21;

/// Why an entry is left to the reference.
struct Odd;
type Plain<T> = Result<T, Odd>;

fn part(data: &[u8], from: usize, size: usize) -> Plain<&[u8]> {
    let end = from.checked_add(size).ok_or(Odd)?;
    data.get(from..end).ok_or(Odd)
}

fn size_at(data: &[u8], at: usize) -> Plain<usize> {
    let four: [u8; 4] = part(data, at, 4)?.try_into().map_err(|_| Odd)?;
    Ok(u32::from_be_bytes(four) as usize)
}

/// A protobuf message, field by field.
struct Fields<'a> {
    data: &'a [u8],
    at: usize,
}

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Eight or four bytes, which no field that is read here has.
    Fixed,
}

impl<'a> Fields<'a> {
    fn of(data: &'a [u8]) -> Self {
        Fields { data, at: 0 }
    }

    fn number(&mut self) -> Plain<u64> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let byte = *self.data.get(self.at).ok_or(Odd)?;
            self.at += 1;
            if shift == 63 && byte > 1 {
                return Err(Odd);
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Odd)
    }

    fn next(&mut self) -> Plain<Option<(u64, Value<'a>)>> {
        if self.at == self.data.len() {
            return Ok(None);
        }
        let tag = self.number()?;
        let value = match tag & 7 {
            0 => Value::Number(self.number()?),
            2 => {
                let size = usize::try_from(self.number()?).map_err(|_| Odd)?;
                let found = part(self.data, self.at, size)?;
                self.at += size;
                Value::Bytes(found)
            }
            kind @ (1 | 5) => {
                let size = if kind == 1 { 8 } else { 4 };
                part(self.data, self.at, size)?;
                self.at += size;
                Value::Fixed
            }
            _ => return Err(Odd),
        };
        if tag >> 3 == 0 || tag >> 3 > 0x1fff_ffff {
            return Err(Odd);
        }
        Ok(Some((tag >> 3, value)))
    }
}

impl<'a> Value<'a> {
    fn number(self) -> Plain<u64> {
        match self {
            Value::Number(number) => Ok(number),
            _ => Err(Odd),
        }
    }

    fn bytes(self) -> Plain<&'a [u8]> {
        match self {
            Value::Bytes(bytes) => Ok(bytes),
            _ => Err(Odd),
        }
    }
}

/// What is said of one message, by an entry's metadata or inside a batch.
#[derive(Default)]
struct Said<'a> {
    key: Option<&'a [u8]>,
    ordering_key: Option<&'a [u8]>,
    of_bytes: bool,
    null_value: bool,
    event_ms: u64,
    properties: Vec<(&'a str, &'a str)>,
    length: Option<usize>,
}

impl<'a> Said<'a> {
    fn add_property(&mut self, data: &'a [u8]) -> Plain<()> {
        if self.properties.len() == PROPERTIES_MAX {
            return Err(Odd);
        }
        self.properties.push(property(data)?);
        Ok(())
    }
}

fn property(data: &[u8]) -> Plain<(&str, &str)> {
    let (mut key, mut value) = (None, None);
    let mut fields = Fields::of(data);
    while let Some((field, found)) = fields.next()? {
        let text = std::str::from_utf8(found.bytes()?).map_err(|_| Odd)?;
        match field {
            1 => key = Some(text),
            2 => value = Some(text),
            _ => return Err(Odd),
        }
    }
    Ok((key.ok_or(Odd)?, value.ok_or(Odd)?))
}

/// An entry whose metadata was read.
struct Opened<'a> {
    producer: &'a [u8],
    sequence_id: u64,
    payload: usize,
    /// 0: no batch.
    batched: bool,
    count: u64,
    compression: u64,
    uncompressed: u64,
    publish_ms: u64,
    /// One more than the version of the schema; 0: none is said.
    schema: u64,
}

/// What is wanted of the content, and beside it; `_wanted` in `bulk.py`.
const VALUES: u32 = 1;
const KEY_BYTES: u32 = 2;
const SEQUENCE_ID: u32 = 4;
const PRODUCER: u32 = 8;
const BROKER_TIME: u32 = 16;

/// When the broker stored an entry, milliseconds; 0 where it does not say so.
fn broker_ms(frame: &[u8], at: usize) -> Plain<u64> {
    if part(frame, at, 2)? != [0x0e, 0x02] {
        return Ok(0);
    }
    let mut time_ms = 0;
    let mut fields = Fields::of(part(frame, at + 6, size_at(frame, at + 2)?)?);
    while let Some((field, value)) = fields.next()? {
        if field == 1 {
            time_ms = value.number()?;
        }
    }
    if time_ms < TIME_MS_MAX { Ok(time_ms) } else { Err(Odd) }
}

/// Where the metadata of a frame lies, after its checksum was found right.
fn metadata_of(frame: &[u8], mut at: usize) -> Plain<(usize, usize)> {
    if part(frame, at, 2).is_ok_and(|magic| magic == [0x0e, 0x02]) {
        at = at.checked_add(6 + size_at(frame, at + 2)?).ok_or(Odd)?;
    }
    if part(frame, at, 2)? == [0x0e, 0x01] {
        let told = size_at(frame, at + 2)? as u32;
        at += 6;
        if crc32c(frame.get(at..).ok_or(Odd)?) != told {
            return Err(Odd);
        }
    }
    let size = size_at(frame, at)?;
    part(frame, at + 4, size)?;
    Ok((at + 4, size))
}

fn opened<'a>(frame: &'a [u8], at: usize) -> Plain<(Opened<'a>, Said<'a>)> {
    let (from, size) = metadata_of(frame, at)?;
    let mut said = Said::default();
    let (mut producer, mut sequence_id, mut publish_ms) = (None, None, None);
    let (mut count, mut compression, mut uncompressed, mut schema) = (None, 0, 0, 0);
    let mut fields = Fields::of(part(frame, from, size)?);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => producer = Some(value.bytes()?),
            2 => sequence_id = Some(value.number()?),
            3 => publish_ms = Some(value.number()?),
            4 => said.add_property(value.bytes()?)?,
            6 => said.key = Some(value.bytes()?),
            8 => compression = value.number()?,
            9 => uncompressed = value.number()?,
            11 => count = Some(value.number()?),
            12 => said.event_ms = value.number()?,
            13 => return Err(Odd),
            16 => schema = schema_version(value.bytes()?),
            17 => said.of_bytes = value.number()? != 0,
            18 => said.ordering_key = Some(value.bytes()?),
            25 => said.null_value = value.number()? != 0,
            27 => {
                if value.number()? > 1 {
                    return Err(Odd);
                }
            }
            _ => {}
        }
    }
    let publish_ms = publish_ms.ok_or(Odd)?;
    let narrow = u64::from(u32::MAX);
    let (producer, sequence_id) = (producer.ok_or(Odd)?, sequence_id.ok_or(Odd)?);
    if publish_ms >= TIME_MS_MAX || compression > narrow || uncompressed > narrow {
        return Err(Odd);
    }
    if count.is_some_and(|count| count < 1 || count > BYTES_MAX as u64) {
        return Err(Odd);
    }
    let opened = Opened {
        payload: from + size,
        batched: count.is_some(),
        count: count.unwrap_or(1),
        compression,
        uncompressed,
        publish_ms,
        schema,
        producer,
        sequence_id,
    };
    Ok((opened, said))
}

/// One more than the version of a schema as the broker names it; 0 for what is none.
fn schema_version(written: &[u8]) -> u64 {
    match written.try_into().map(i64::from_be_bytes) {
        Ok(version) if version >= 0 => version as u64 + 1,
        _ => 0,
    }
}

/// What a frame says of the entry in it: `CommandMessage` of `pulsar_api.proto`.
fn came(frame: &[u8]) -> Plain<[u64; CAME]> {
    let size = size_at(frame, 0)?;
    let mut command = Fields::of(part(frame, 4, size)?);
    let (mut kind, mut message) = (0, None);
    while let Some((field, value)) = command.next()? {
        match field {
            1 => kind = value.number()?,
            MESSAGE => message = Some(value.bytes()?),
            _ => return Err(Odd),
        }
    }
    let (MESSAGE, Some(message)) = (kind, message) else { return Err(Odd) };
    let (mut consumer, mut redelivered, mut id) = (None, 0, None);
    let mut fields = Fields::of(message);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => consumer = Some(value.number()?),
            2 => id = Some(value.bytes()?),
            3 => redelivered = value.number()?,
            // Words of an entry that is acknowledged in part.
            4 => return Err(Odd),
            _ => {}
        }
    }
    let (mut ledger, mut entry) = (None, None);
    let mut fields = Fields::of(id.ok_or(Odd)?);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => ledger = Some(value.number()?),
            2 => entry = Some(value.number()?),
            _ => {}
        }
    }
    let position = (4 + size) as u64;
    Ok([consumer.ok_or(Odd)?, ledger.ok_or(Odd)?, entry.ok_or(Odd)?, redelivered, position])
}

/// A column of bytes: offsets, and whether a row is null.
#[derive(Default)]
struct Bytes {
    offsets: Vec<i32>,
    data: Vec<u8>,
}

impl Bytes {
    fn new() -> Self {
        Bytes { offsets: vec![0], data: Vec::new() }
    }

    /// Without memory where it is not wanted.
    fn new_if(wanted: bool) -> Self {
        if wanted { Bytes::new() } else { Bytes::default() }
    }

    fn push(&mut self, value: &[u8]) -> Plain<()> {
        if self.data.len() + value.len() > BYTES_MAX {
            return Err(Odd);
        }
        self.data.extend_from_slice(value);
        self.offsets.push(self.data.len() as i32);
        Ok(())
    }
}

/// Which rows have a value.
#[derive(Default)]
struct Validity {
    bits: Vec<u8>,
    rows: usize,
    valid: usize,
}

impl Validity {
    fn push(&mut self, valid: bool) {
        if self.rows % 8 == 0 {
            self.bits.push(0);
        }
        if valid {
            self.bits[self.rows / 8] |= 1 << (self.rows % 8);
            self.valid += 1;
        }
        self.rows += 1;
    }
}

/// Most that an entry may hold; `wire/entries.py`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Limits {
    messages: u64,
    memory: u64,
    row: u64,
    property: u64,
}

struct Columns {
    /// Bits of what is wanted.
    wanted: u32,
    limits: Limits,
    /// Bytes of the name of the producer of the newest entry.
    producer: usize,
    /// Memory of the messages of the newest entry.
    memory: u64,
    values: Bytes,
    has_value: Validity,
    keys: Bytes,
    has_key: Validity,
    ordering_keys: Bytes,
    has_ordering_key: Validity,
    event_us: Vec<i64>,
    has_event: Validity,
    property_offsets: Vec<i32>,
    property_keys: Bytes,
    property_values: Bytes,
    key_bytes: Bytes,
    has_key_bytes: Validity,
    sequence_ids: Vec<i64>,
    has_sequence_id: Validity,
    producers: Bytes,
    broker_us: Vec<i64>,
    has_broker_time: Validity,
    slots: Vec<i32>,
    entries: Vec<i64>,
}

impl Columns {
    fn new(wanted: u32, limits: Limits) -> Self {
        Columns {
            wanted,
            limits,
            producer: 0,
            memory: 0,
            values: Bytes::new(),
            has_value: Validity::default(),
            keys: Bytes::new(),
            has_key: Validity::default(),
            ordering_keys: Bytes::new(),
            has_ordering_key: Validity::default(),
            event_us: Vec::new(),
            has_event: Validity::default(),
            property_offsets: vec![0],
            property_keys: Bytes::new(),
            property_values: Bytes::new(),
            key_bytes: Bytes::new_if(wanted & KEY_BYTES != 0),
            has_key_bytes: Validity::default(),
            sequence_ids: Vec::new(),
            has_sequence_id: Validity::default(),
            producers: Bytes::new_if(wanted & PRODUCER != 0),
            broker_us: Vec::new(),
            has_broker_time: Validity::default(),
            slots: Vec::new(),
            entries: Vec::new(),
        }
    }

    /// Counts the memory of one more message; `count` in `wire/decoding.py`.
    fn count(&mut self, said: &Said, value: &[u8]) -> Plain<()> {
        let keys = said.key.unwrap_or_default().len() + said.ordering_key.unwrap_or_default().len();
        let pairs: usize = said.properties.iter().map(|(key, value)| key.len() + value.len()).sum();
        let bytes = value.len() + 2 * keys + self.producer + pairs;
        self.memory += self.limits.row + self.limits.property * said.properties.len() as u64 + bytes as u64;
        if self.memory > self.limits.memory { Err(Odd) } else { Ok(()) }
    }

    /// One more message; whether its key was set as bytes and routes it.
    fn push<const METADATA: bool>(&mut self, said: &Said, sequence_id: Option<u64>, value: &[u8]) -> Plain<bool> {
        self.count(said, value)?;
        let text = |bytes| std::str::from_utf8(bytes).map(|_| ()).map_err(|_| Odd);
        let (key, ordering_key) = (said.key.unwrap_or_default(), said.ordering_key.unwrap_or_default());
        text(key)?;
        text(ordering_key)?;
        if said.event_ms >= TIME_MS_MAX {
            return Err(Odd);
        }
        if self.wanted & VALUES != 0 {
            self.values.push(if said.null_value { &[] } else { value })?;
            self.has_value.push(!said.null_value);
        }
        self.keys.push(key)?;
        self.has_key.push(said.key.is_some());
        self.ordering_keys.push(ordering_key)?;
        self.has_ordering_key.push(said.ordering_key.is_some());
        self.event_us.push(said.event_ms as i64 * 1000);
        self.has_event.push(said.event_ms != 0);
        let mut names = HashSet::new();
        for (key, value) in &said.properties {
            // Which of two with one name counts is for the reference to say.
            if !names.insert(key) {
                return Err(Odd);
            }
            self.property_keys.push(key.as_bytes())?;
            self.property_values.push(value.as_bytes())?;
        }
        self.property_offsets.push(self.property_keys.offsets.len() as i32 - 1);
        let of_bytes = said.of_bytes && said.ordering_key.is_none() && said.key.is_some();
        self.slots.push(match (said.ordering_key, said.key) {
            (None, None) => 0,
            (None, Some(key)) if of_bytes => slot(&from_base64(key)?),
            (None, Some(key)) => slot(key),
            (Some(ordering_key), _) => slot(ordering_key),
        });
        if METADATA {
            self.push_metadata(said, sequence_id)?;
        }
        Ok(of_bytes)
    }

    /// What is wanted of a message beside its content.
    fn push_metadata(&mut self, said: &Said, sequence_id: Option<u64>) -> Plain<()> {
        if self.wanted & KEY_BYTES != 0 {
            let key = said.key.unwrap_or_default();
            if said.of_bytes {
                self.key_bytes.push(&from_base64(key)?)?;
            } else {
                self.key_bytes.push(key)?;
            }
            self.has_key_bytes.push(said.key.is_some());
        }
        if self.wanted & SEQUENCE_ID != 0 {
            self.sequence_ids.push(sequence_id.unwrap_or(0) as i64);
            self.has_sequence_id.push(sequence_id.is_some());
        }
        Ok(())
    }

    /// What is wanted of an entry beside the content of its messages.
    fn push_of_entry(&mut self, producer: &[u8], broker_ms: u64, messages: usize) -> Plain<()> {
        if self.wanted & PRODUCER != 0 {
            std::str::from_utf8(producer).map_err(|_| Odd)?;
            for _ in 0..messages {
                self.producers.push(producer)?;
            }
        }
        if self.wanted & BROKER_TIME != 0 {
            for _ in 0..messages {
                self.broker_us.push(broker_ms as i64 * 1000);
                self.has_broker_time.push(broker_ms != 0);
            }
        }
        Ok(())
    }

    fn entry<const METADATA: bool>(&mut self, frame: &[u8], at: usize, unpacked: Option<&[u8]>) -> Plain<()> {
        let (opened, said) = opened(frame, at)?;
        let payload = match unpacked {
            Some(payload) => payload,
            None if opened.compression == 0 => frame.get(opened.payload..).ok_or(Odd)?,
            None => return Err(Odd),
        };
        if opened.count > self.limits.messages {
            return Err(Odd);
        }
        (self.producer, self.memory) = (opened.producer.len(), 0);
        let first = self.slots.len();
        let (of_bytes, size) = if opened.batched {
            self.batch::<METADATA>(payload, opened.count as usize)?
        } else {
            (self.push::<METADATA>(&said, Some(opened.sequence_id), payload)?, payload.len())
        };
        if METADATA {
            let time_ms = if self.wanted & BROKER_TIME != 0 { broker_ms(frame, at)? } else { 0 };
            self.push_of_entry(opened.producer, time_ms, self.slots.len() - first)?;
        }
        let slots = &self.slots[first..];
        let mixed = slots.iter().any(|slot| *slot != slots[0]);
        // What bulk.py reads: messages, payload, slot of the first or 0, whether slots differ, and
        // whether the first key was set as bytes.
        let row = [slots.len() as i64, size as i64, i64::from(slots[0]), i64::from(mixed), i64::from(of_bytes)];
        self.entries.extend_from_slice(&row);
        Ok(())
    }

    fn batch<const METADATA: bool>(&mut self, payload: &[u8], count: usize) -> Plain<(bool, usize)> {
        if count > payload.len() / 4 + 1 {
            return Err(Odd);
        }
        let (mut at, mut size, mut of_bytes) = (0, 0, false);
        for index in 0..count {
            let said_size = size_at(payload, at)?;
            let (said, sequence_id) = said_in_batch::<METADATA>(part(payload, at + 4, said_size)?)?;
            at += 4 + said_size;
            let length = said.length.ok_or(Odd)?;
            let routed = self.push::<METADATA>(&said, sequence_id, part(payload, at, length)?)?;
            of_bytes = if index == 0 { routed } else { of_bytes };
            at += length;
            size += length;
        }
        if at == payload.len() { Ok((of_bytes, size)) } else { Err(Odd) }
    }
}

/// What a batch says of a message; its sequence id only where metadata is wanted.
fn said_in_batch<const METADATA: bool>(data: &[u8]) -> Plain<(Said<'_>, Option<u64>)> {
    let (mut said, mut sequence_id) = (Said::default(), None);
    let mut fields = Fields::of(data);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => said.add_property(value.bytes()?)?,
            2 => said.key = Some(value.bytes()?),
            3 => said.length = Some(usize::try_from(value.number()?).map_err(|_| Odd)?),
            5 => said.event_ms = value.number()?,
            6 => said.of_bytes = value.number()? != 0,
            7 => said.ordering_key = Some(value.bytes()?),
            8 if METADATA => sequence_id = Some(value.number()?),
            9 => said.null_value = value.number()? != 0,
            _ => {}
        }
    }
    Ok((said, sequence_id))
}

/// Base64 as the Java client writes it: padded, and nothing else between.
fn from_base64(text: &[u8]) -> Plain<Vec<u8>> {
    if text.len() % 4 != 0 {
        return Err(Odd);
    }
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    if padding > 2 {
        return Err(Odd);
    }
    let mut found = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut held) = (0u32, 0);
    for byte in &text[..text.len() - padding] {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return Err(Odd),
        };
        bits = bits << 6 | u32::from(six);
        held += 6;
        if held >= 8 {
            held -= 8;
            found.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    if bits != 0 { Err(Odd) } else { Ok(found) }
}

/// Slot of a routing key; `core/ring/key_slot.py`.
fn slot(key: &[u8]) -> i32 {
    match (murmur3(key) & 0x7fff_ffff) % 65_536 {
        0 => 1,
        slot => slot as i32,
    }
}

/// MurmurHash3, 32 bits, seed 0.
fn murmur3(data: &[u8]) -> u32 {
    let mix = |block: u32| block.wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593);
    let mut hash = 0u32;
    let blocks = data.chunks_exact(4);
    let tail = blocks.remainder();
    for block in blocks {
        hash ^= mix(u32::from_le_bytes([block[0], block[1], block[2], block[3]]));
        hash = hash.rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64);
    }
    if !tail.is_empty() {
        hash ^= mix(tail.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte)));
    }
    hash ^= data.len() as u32;
    hash = (hash ^ hash >> 16).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
    hash ^ hash >> 16
}

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

fn crc32c(data: &[u8]) -> u32 {
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

/// Buffers of the columns, in the order of `_BUFFERS` in `bulk.py`, and counts of values.
#[repr(C)]
pub struct Found {
    addresses: [*const u8; 25],
    sizes: [u64; 25],
    values: u64,
    keys: u64,
    ordering_keys: u64,
    events: u64,
    properties: u64,
    key_bytes: u64,
    sequence_ids: u64,
    producers: u64,
    broker_times: u64,
    columns: Box<Columns>,
}

fn found(columns: Columns) -> Box<Found> {
    fn bytes<T>(values: &[T]) -> (*const u8, u64) {
        (values.as_ptr().cast(), size_of_val(values) as u64)
    }
    let mut c = Box::new(columns);
    // They are held for as long as their rows: what growing left over would be as well.
    if c.has_event.valid == 0 {
        c.event_us = Vec::new();
    }
    for column in [
        &mut c.values, &mut c.keys, &mut c.ordering_keys, &mut c.property_keys,
        &mut c.property_values, &mut c.key_bytes, &mut c.producers,
    ] {
        column.offsets.shrink_to_fit();
        column.data.shrink_to_fit();
    }
    c.event_us.shrink_to_fit();
    c.property_offsets.shrink_to_fit();
    c.slots.shrink_to_fit();
    let buffers = [
        bytes(&c.has_value.bits), bytes(&c.values.offsets), bytes(&c.values.data),
        bytes(&c.has_key.bits), bytes(&c.keys.offsets), bytes(&c.keys.data),
        bytes(&c.has_ordering_key.bits), bytes(&c.ordering_keys.offsets), bytes(&c.ordering_keys.data),
        bytes(&c.has_event.bits), bytes(&c.event_us),
        bytes(&c.property_offsets),
        bytes(&c.property_keys.offsets), bytes(&c.property_keys.data),
        bytes(&c.property_values.offsets), bytes(&c.property_values.data),
        bytes(&c.has_key_bytes.bits), bytes(&c.key_bytes.offsets), bytes(&c.key_bytes.data),
        bytes(&c.has_sequence_id.bits), bytes(&c.sequence_ids),
        bytes(&c.producers.offsets), bytes(&c.producers.data),
        bytes(&c.has_broker_time.bits), bytes(&c.broker_us),
    ];
    Box::new(Found {
        addresses: buffers.map(|buffer| buffer.0),
        sizes: buffers.map(|buffer| buffer.1),
        values: c.has_value.valid as u64,
        keys: c.has_key.valid as u64,
        ordering_keys: c.has_ordering_key.valid as u64,
        events: c.has_event.valid as u64,
        properties: c.property_keys.offsets.len() as u64 - 1,
        key_bytes: c.has_key_bytes.valid as u64,
        sequence_ids: c.has_sequence_id.valid as u64,
        producers: c.producers.offsets.len().saturating_sub(1) as u64,
        broker_times: c.has_broker_time.valid as u64,
        columns: c,
    })
}

/// Numbers that tell whether library and caller belong together.
#[no_mangle]
pub extern "C" fn keyshard_decoder_version() -> u64 {
    7
}

/// Reads the commands of frames, behind their sizes: for each that is an entry its consumer, ledger,
/// entry, count of redeliveries and where what is stored begins; for every other one a position 0.
///
/// # Safety
/// `frames` and `sizes` have `count` values, each frame has its size, and `told` has room for
/// `CAME` times as many.
#[no_mangle]
pub unsafe extern "C" fn keyshard_came(
    count: usize, frames: *const *const u8, sizes: *const u64, told: *mut u64,
) {
    let _ = catch_unwind(|| {
        // SAFETY: the caller's.
        let (frames, sizes, told) = unsafe {
            (
                slice::from_raw_parts(frames, count),
                slice::from_raw_parts(sizes, count),
                slice::from_raw_parts_mut(told, count * CAME),
            )
        };
        for (number, row) in told.chunks_exact_mut(CAME).enumerate() {
            // SAFETY: the caller's.
            let frame = unsafe { slice::from_raw_parts(frames[number], sizes[number] as usize) };
            row.copy_from_slice(&came(frame).unwrap_or([0; CAME]));
        }
    });
}

/// Opens entries: the numbers of `Opened` for each, into `told`. Whether all of them are plain.
///
/// # Safety
/// `frames`, `sizes` and `positions` have `count` values, each frame has its size, and `told` has
/// room for `OPENED` times as many.
#[no_mangle]
pub unsafe extern "C" fn keyshard_open(
    count: usize, frames: *const *const u8, sizes: *const u64, positions: *const u64, told: *mut u64,
) -> bool {
    catch_unwind(|| {
        // SAFETY: the caller's.
        let (frames, sizes, positions, told) = unsafe {
            (
                slice::from_raw_parts(frames, count),
                slice::from_raw_parts(sizes, count),
                slice::from_raw_parts(positions, count),
                slice::from_raw_parts_mut(told, count * OPENED),
            )
        };
        for (number, row) in told.chunks_exact_mut(OPENED).enumerate() {
            // SAFETY: the caller's.
            let frame = unsafe { slice::from_raw_parts(frames[number], sizes[number] as usize) };
            let Ok((entry, _)) = opened(frame, positions[number] as usize) else {
                return false;
            };
            row.copy_from_slice(&[
                entry.payload as u64, u64::from(entry.batched), entry.count, entry.compression,
                entry.uncompressed, entry.publish_ms, entry.schema,
            ]);
        }
        true
    })
    .unwrap_or(false)
}

/// Decodes entries; null where one is not plain. What is found belongs to the caller.
///
/// # Safety
/// As for `keyshard_open`; `wanted` has the bits of what is wanted, `limits` is one; `unpacked` and `unpacked_sizes` have `count` values: the payload of each
/// entry, or null for what lies in the frame.
#[no_mangle]
pub unsafe extern "C" fn keyshard_decode(
    count: usize, frames: *const *const u8, sizes: *const u64, positions: *const u64,
    unpacked: *const *const u8, unpacked_sizes: *const u64, wanted: u32, limits: *const Limits,
    slots: *mut *const i32, entries: *mut *const i64,
) -> *mut Found {
    let made = catch_unwind(|| {
        // SAFETY: the caller's.
        let (frames, sizes, positions, unpacked, unpacked_sizes) = unsafe {
            (
                slice::from_raw_parts(frames, count),
                slice::from_raw_parts(sizes, count),
                slice::from_raw_parts(positions, count),
                slice::from_raw_parts(unpacked, count),
                slice::from_raw_parts(unpacked_sizes, count),
            )
        };
        // SAFETY: the caller's.
        let mut columns = Columns::new(wanted, unsafe { *limits });
        if wanted & VALUES != 0 {
            // Never more than there is: the payloads are in memory already.
            let size = (0..count).map(|one| if unpacked[one].is_null() { sizes[one] } else { unpacked_sizes[one] });
            columns.values.data.reserve_exact(size.sum::<u64>() as usize);
        }
        for number in 0..count {
            // SAFETY: the caller's.
            let (frame, payload) = unsafe {
                let payload = unpacked[number];
                (
                    slice::from_raw_parts(frames[number], sizes[number] as usize),
                    (!payload.is_null())
                        .then(|| slice::from_raw_parts(payload, unpacked_sizes[number] as usize)),
                )
            };
            let position = positions[number] as usize;
            let entry = if wanted & !VALUES == 0 {
                columns.entry::<false>(frame, position, payload)
            } else {
                columns.entry::<true>(frame, position, payload)
            };
            if entry.is_err() {
                return None;
            }
        }
        Some(found(columns))
    });
    match made {
        Ok(Some(made)) => {
            // SAFETY: the caller's.
            unsafe {
                *slots = made.columns.slots.as_ptr();
                *entries = made.columns.entries.as_ptr();
            }
            Box::into_raw(made)
        }
        _ => std::ptr::null_mut(),
    }
}

/// Frees what was found.
///
/// # Safety
/// `found` came from `keyshard_decode` and was not freed before.
#[no_mangle]
pub unsafe extern "C" fn keyshard_free(found: *mut Found) {
    // SAFETY: the caller's.
    drop(unsafe { Box::from_raw(found) });
}
