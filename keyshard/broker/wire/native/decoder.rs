//! Entries as they are stored -> Arrow columns.
//!
//! The same walk as `decoding.py`, which stays the reference: whatever is not plain here (damaged,
//! chunked, encrypted, a key that is no text, a number that is no time, ...) is left to it, error
//! texts included. So this code has to be right where it answers, and may always decline.
//!
//! No crates, and nothing of Python: a shared library with four functions. Bytes of the network are
//! only looked at through checked slices; `unsafe` is what the four functions are given,
//! and the columns that `arrow.rs` hands over.

use std::collections::HashSet;
use std::panic::catch_unwind;
use std::ptr;
use std::slice;

mod arrow;
mod crc32c;
use arrow::ArrowArray;
use crc32c::crc32c;

/// Numbers of an opened entry: see `Opened`.
const OPENED: usize = 7;
/// Numbers of an entry that came: see `came`.
const CAME: usize = 5;
/// Type of the command that brings an entry, and its field in `BaseCommand`.
const MESSAGE: u64 = 9;
/// Times from here on are none; `TIME_MS_MAX` in `columns/content.py`.
const TIME_MS_MAX: u64 = 253_370_764_800_000;
const BYTES_MAX: usize = i32::MAX as usize;
/// Properties of a message from which on it is left to the reference before its memory is counted.
const PROPERTIES_MAX: usize = 1 << 21;

/// An entry is left to the reference, because it is not plain.
struct NotPlain;
type Plain<T> = Result<T, NotPlain>;

fn part(data: &[u8], from: usize, size: usize) -> Plain<&[u8]> {
    let end = from.checked_add(size).ok_or(NotPlain)?;
    data.get(from..end).ok_or(NotPlain)
}

fn size_at(data: &[u8], at: usize) -> Plain<usize> {
    let four: [u8; 4] = part(data, at, 4)?.try_into().map_err(|_| NotPlain)?;
    Ok(u32::from_be_bytes(four) as usize)
}

/// A protobuf message, field by field.
struct Fields<'a> {
    data: &'a [u8],
    at: usize,
}

#[derive(Clone, Copy)]
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
            let byte = *self.data.get(self.at).ok_or(NotPlain)?;
            self.at += 1;
            if shift == 63 && byte > 1 {
                return Err(NotPlain);
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(NotPlain)
    }

    fn next(&mut self) -> Plain<Option<(u64, Value<'a>)>> {
        if self.at == self.data.len() {
            return Ok(None);
        }
        let tag = self.number()?;
        let value = match tag & 7 {
            0 => Value::Number(self.number()?),
            2 => {
                let size = usize::try_from(self.number()?).map_err(|_| NotPlain)?;
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
            _ => return Err(NotPlain),
        };
        if tag >> 3 == 0 || tag >> 3 > 0x1fff_ffff {
            return Err(NotPlain);
        }
        Ok(Some((tag >> 3, value)))
    }
}

impl<'a> Value<'a> {
    fn number(self) -> Plain<u64> {
        match self {
            Value::Number(number) => Ok(number),
            _ => Err(NotPlain),
        }
    }

    fn bytes(self) -> Plain<&'a [u8]> {
        match self {
            Value::Bytes(bytes) => Ok(bytes),
            _ => Err(NotPlain),
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
            return Err(NotPlain);
        }
        self.properties.push(property(data)?);
        Ok(())
    }
}

fn property(data: &[u8]) -> Plain<(&str, &str)> {
    let (mut key, mut value) = (None, None);
    let mut fields = Fields::of(data);
    while let Some((field, found)) = fields.next()? {
        let text = std::str::from_utf8(found.bytes()?).map_err(|_| NotPlain)?;
        match field {
            1 => key = Some(text),
            2 => value = Some(text),
            _ => return Err(NotPlain),
        }
    }
    Ok((key.ok_or(NotPlain)?, value.ok_or(NotPlain)?))
}

/// A metadata column; `MetadataColumn` of `core/metadata_columns.py`, in the same order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Stored {
    kind: u32,
    origin: u32,
    field: u32,
    field_in_batch: u32,
    wanted: u32,
}

const TEXT: u32 = 1;
const NUMBER: u32 = 2;
const TIME: u32 = 3;
const KEY: u32 = 1;
const MESSAGE_FIELD: u32 = 2;
const ENTRY: u32 = 3;
const BROKER: u32 = 4;

/// The values of the metadata columns that a message or an entry states, by column.
type Stated<'a> = [Option<Value<'a>>];

/// The metadata columns of a call, and the fields that any of them needs: one bit for each number.
struct Table<'t> {
    columns: &'t [Stored],
    fields: u64,
    fields_in_batch: u64,
}

fn is_in(fields: u64, field: u64) -> bool {
    field < 64 && fields >> field & 1 != 0
}

impl<'t> Table<'t> {
    fn of(columns: &'t [Stored]) -> Plain<Self> {
        let (mut fields, mut fields_in_batch) = (0, 0);
        for one in columns {
            // The bytes of an entry's fields count in its memory, whether they are wanted or not.
            let of_message = one.origin == MESSAGE_FIELD && one.wanted != 0;
            if one.origin == ENTRY || of_message {
                fields |= 1u64.checked_shl(one.field).ok_or(NotPlain)?;
            }
            if of_message {
                fields_in_batch |= 1u64.checked_shl(one.field_in_batch).ok_or(NotPlain)?;
            }
        }
        Ok(Table { columns, fields, fields_in_batch })
    }

    /// Keeps the value of a field of an entry's metadata.
    fn keep<'a>(&self, field: u64, value: Value<'a>, stated: &mut Stated<'a>) {
        for (one, kept) in self.columns.iter().zip(stated) {
            if u64::from(one.field) == field && (one.origin == ENTRY || one.origin == MESSAGE_FIELD) {
                *kept = Some(value);
            }
        }
    }

    /// Keeps the value of a field of a message's metadata in a batch.
    fn keep_in_batch<'a>(&self, field: u64, value: Value<'a>, stated: &mut Stated<'a>) {
        for (one, kept) in self.columns.iter().zip(stated) {
            if u64::from(one.field_in_batch) == field && one.origin == MESSAGE_FIELD {
                *kept = Some(value);
            }
        }
    }

    /// Bytes of an entry that columns repeat for each of its messages.
    fn repeated(&self, stated: &Stated) -> Plain<usize> {
        let mut size = 0;
        for (one, value) in self.columns.iter().zip(stated) {
            if one.origin == ENTRY && one.kind <= TEXT {
                size += match value {
                    Some(value) => value.bytes()?.len(),
                    None => 0,
                };
            }
        }
        Ok(size)
    }
}

/// An entry whose metadata was read.
struct Opened {
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

/// The value of a field that the broker added to an entry.
fn of_broker(frame: &[u8], at: usize, wanted: u32) -> Plain<Option<Value<'_>>> {
    if part(frame, at, 2)? != [0x0e, 0x02] {
        return Ok(None);
    }
    let mut found = None;
    let mut fields = Fields::of(part(frame, at + 6, size_at(frame, at + 2)?)?);
    while let Some((field, value)) = fields.next()? {
        if field == u64::from(wanted) {
            found = Some(value);
        }
    }
    Ok(found)
}

/// Where the metadata of a frame lies, after its checksum was found right, now or by an earlier call.
fn metadata_of<const CHECKED: bool>(frame: &[u8], mut at: usize) -> Plain<(usize, usize)> {
    if part(frame, at, 2).is_ok_and(|magic| magic == [0x0e, 0x02]) {
        at = at.checked_add(6 + size_at(frame, at + 2)?).ok_or(NotPlain)?;
    }
    if part(frame, at, 2)? == [0x0e, 0x01] {
        let stated = size_at(frame, at + 2)? as u32;
        at += 6;
        if !CHECKED && crc32c(frame.get(at..).ok_or(NotPlain)?) != stated {
            return Err(NotPlain);
        }
    }
    let size = size_at(frame, at)?;
    part(frame, at + 4, size)?;
    Ok((at + 4, size))
}

/// Opens an entry, and keeps what its metadata states of the columns of the table.
fn opened<'a, const CHECKED: bool>(
    frame: &'a [u8], at: usize, table: &Table, stated: &mut Stated<'a>,
) -> Plain<(Opened, Said<'a>)> {
    let (from, size) = metadata_of::<CHECKED>(frame, at)?;
    let mut said = Said::default();
    let (mut producer, mut sequence_id, mut publish_ms) = (None, None, None);
    let (mut count, mut compression, mut uncompressed, mut schema) = (None, 0, 0, 0);
    let mut fields = Fields::of(part(frame, from, size)?);
    stated.fill(None);
    while let Some((field, value)) = fields.next()? {
        if is_in(table.fields, field) {
            table.keep(field, value, stated);
        }
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
            13 => return Err(NotPlain),
            16 => schema = schema_version(value.bytes()?),
            17 => said.of_bytes = value.number()? != 0,
            18 => said.ordering_key = Some(value.bytes()?),
            25 => said.null_value = value.number()? != 0,
            27 => {
                if value.number()? > 1 {
                    return Err(NotPlain);
                }
            }
            _ => {}
        }
    }
    let publish_ms = publish_ms.ok_or(NotPlain)?;
    let narrow = u64::from(u32::MAX);
    producer.ok_or(NotPlain)?;
    sequence_id.ok_or(NotPlain)?;
    if publish_ms >= TIME_MS_MAX || compression > narrow || uncompressed > narrow {
        return Err(NotPlain);
    }
    if count.is_some_and(|count| count < 1 || count > BYTES_MAX as u64) {
        return Err(NotPlain);
    }
    let opened = Opened {
        payload: from + size,
        batched: count.is_some(),
        count: count.unwrap_or(1),
        compression,
        uncompressed,
        publish_ms,
        schema,
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
            _ => return Err(NotPlain),
        }
    }
    let (MESSAGE, Some(message)) = (kind, message) else { return Err(NotPlain) };
    let (mut consumer, mut redelivered, mut id) = (None, 0, None);
    let mut fields = Fields::of(message);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => consumer = Some(value.number()?),
            2 => id = Some(value.bytes()?),
            3 => redelivered = value.number()?,
            // Words of an entry that is acknowledged in part.
            4 => return Err(NotPlain),
            _ => {}
        }
    }
    let (mut ledger, mut entry) = (None, None);
    let mut fields = Fields::of(id.ok_or(NotPlain)?);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => ledger = Some(value.number()?),
            2 => entry = Some(value.number()?),
            _ => {}
        }
    }
    let position = (4 + size) as u64;
    Ok([consumer.ok_or(NotPlain)?, ledger.ok_or(NotPlain)?, entry.ok_or(NotPlain)?, redelivered, position])
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

    fn push(&mut self, value: &[u8]) -> Plain<()> {
        if self.data.len() + value.len() > BYTES_MAX {
            return Err(NotPlain);
        }
        self.data.extend_from_slice(value);
        self.offsets.push(self.data.len() as i32);
        Ok(())
    }

    fn array(&self, has_value: &Validity) -> ArrowArray {
        has_value.array(&[self.offsets.as_ptr().cast(), self.data.as_ptr()])
    }

    fn shrink(&mut self) {
        self.offsets.shrink_to_fit();
        self.data.shrink_to_fit();
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

    /// Rows of these other buffers.
    fn array(&self, others: &[*const u8]) -> ArrowArray {
        let nulls = self.rows - self.valid;
        let bits = if nulls == 0 { ptr::null() } else { self.bits.as_ptr() };
        ArrowArray::new(self.rows, nulls, [&[bits], others].concat(), Vec::new(), None)
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

/// The values of a metadata column.
struct Column {
    stored: Stored,
    bytes: Bytes,
    numbers: Vec<i64>,
    has_value: Validity,
}

impl Column {
    /// Without memory where it is not wanted.
    fn new(stored: Stored) -> Self {
        let of_bytes = stored.wanted != 0 && stored.kind <= TEXT;
        Column {
            stored,
            bytes: if of_bytes { Bytes::new() } else { Bytes::default() },
            numbers: Vec::new(),
            has_value: Validity::default(),
        }
    }

    fn wants(&self, origin: u32) -> bool {
        self.stored.wanted != 0 && self.stored.origin == origin
    }

    fn push_bytes(&mut self, value: Option<&[u8]>) -> Plain<()> {
        self.bytes.push(value.unwrap_or_default())?;
        self.has_value.push(value.is_some());
        Ok(())
    }

    /// The value of some messages.
    fn push(&mut self, value: Option<Value>, messages: usize) -> Plain<()> {
        if self.stored.kind <= TEXT {
            let bytes = value.map(Value::bytes).transpose()?;
            if self.stored.kind == TEXT {
                std::str::from_utf8(bytes.unwrap_or_default()).map_err(|_| NotPlain)?;
            }
            for _ in 0..messages {
                self.push_bytes(bytes)?;
            }
            return Ok(());
        }
        let number = value.map(Value::number).transpose()?;
        let (number, valid) = match (self.stored.kind, number) {
            (NUMBER, Some(number)) => (number as i64, true),
            (TIME, Some(time_ms)) if time_ms >= TIME_MS_MAX => return Err(NotPlain),
            (TIME, Some(time_ms)) => (time_ms as i64 * 1000, time_ms != 0),
            _ => (0, false),
        };
        for _ in 0..messages {
            self.numbers.push(number);
            self.has_value.push(valid);
        }
        Ok(())
    }
}

struct Columns {
    keeps_values: bool,
    limits: Limits,
    /// Bytes of the newest entry that columns repeat for each message.
    repeated: usize,
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
    metadata: Vec<Column>,
    slots: Vec<i32>,
    entries: Vec<i64>,
}

impl Columns {
    fn new(keeps_values: bool, table: &Table, limits: Limits) -> Self {
        Columns {
            keeps_values,
            limits,
            repeated: 0,
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
            metadata: table.columns.iter().map(|one| Column::new(*one)).collect(),
            slots: Vec::new(),
            entries: Vec::new(),
        }
    }

    /// The column of properties: a list of pairs for each message.
    fn properties(&self, rows: usize) -> ArrowArray {
        let pairs = self.property_keys.offsets.len() - 1;
        let text = |one: &Bytes| {
            let buffers = vec![ptr::null(), one.offsets.as_ptr().cast(), one.data.as_ptr()];
            ArrowArray::new(pairs, 0, buffers, Vec::new(), None)
        };
        let names_and_values = vec![text(&self.property_keys), text(&self.property_values)];
        let entries = ArrowArray::new(pairs, 0, vec![ptr::null()], names_and_values, None);
        let buffers = vec![ptr::null(), self.property_offsets.as_ptr().cast()];
        ArrowArray::new(rows, 0, buffers, vec![entries], None)
    }

    /// Counts the memory of one more message; `count` in `wire/decoding.py`.
    fn count(&mut self, said: &Said, value: &[u8]) -> Plain<()> {
        let keys = said.key.unwrap_or_default().len() + said.ordering_key.unwrap_or_default().len();
        let pairs: usize = said.properties.iter().map(|(key, value)| key.len() + value.len()).sum();
        let bytes = value.len() + 2 * keys + self.repeated + pairs;
        self.memory += self.limits.row + self.limits.property * said.properties.len() as u64 + bytes as u64;
        if self.memory > self.limits.memory { Err(NotPlain) } else { Ok(()) }
    }

    /// One more message; whether its key was set as bytes and routes it.
    fn push<const METADATA: bool>(&mut self, said: &Said, stated: &Stated, value: &[u8]) -> Plain<bool> {
        self.count(said, value)?;
        let text = |bytes| std::str::from_utf8(bytes).map(|_| ()).map_err(|_| NotPlain);
        let (key, ordering_key) = (said.key.unwrap_or_default(), said.ordering_key.unwrap_or_default());
        text(key)?;
        text(ordering_key)?;
        if said.event_ms >= TIME_MS_MAX {
            return Err(NotPlain);
        }
        let kept = self.keeps_values && !said.null_value;
        self.values.push(if kept { value } else { &[] })?;
        self.has_value.push(kept);
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
                return Err(NotPlain);
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
            self.push_metadata(said, stated)?;
        }
        Ok(of_bytes)
    }

    /// What is wanted of a message beside its content.
    fn push_metadata(&mut self, said: &Said, stated: &Stated) -> Plain<()> {
        for (column, value) in self.metadata.iter_mut().zip(stated) {
            if column.wants(MESSAGE_FIELD) {
                column.push(*value, 1)?;
            } else if column.wants(KEY) {
                match said.key {
                    Some(key) if said.of_bytes => column.push_bytes(Some(&from_base64(key)?))?,
                    key => column.push_bytes(key)?,
                }
            }
        }
        Ok(())
    }

    /// What is wanted of an entry beside the content of its messages.
    fn push_of_entry(&mut self, frame: &[u8], at: usize, stated: &Stated, messages: usize) -> Plain<()> {
        for (column, value) in self.metadata.iter_mut().zip(stated) {
            if column.wants(ENTRY) {
                column.push(*value, messages)?;
            } else if column.wants(BROKER) {
                column.push(of_broker(frame, at, column.stored.field)?, messages)?;
            }
        }
        Ok(())
    }

    /// Adds an entry. `of_entry` and `of_message` are for what the table needs of them.
    fn entry<'a, const METADATA: bool>(
        &mut self, frame: &'a [u8], at: usize, unpacked: Option<&'a [u8]>, table: &Table,
        of_entry: &mut Stated<'a>, of_message: &mut Stated<'a>,
    ) -> Plain<()> {
        let (opened, said) = opened::<true>(frame, at, table, of_entry)?;
        let payload = match unpacked {
            Some(payload) => payload,
            None if opened.compression == 0 => frame.get(opened.payload..).ok_or(NotPlain)?,
            None => return Err(NotPlain),
        };
        if opened.count > self.limits.messages {
            return Err(NotPlain);
        }
        (self.repeated, self.memory) = (table.repeated(of_entry)?, 0);
        let first = self.slots.len();
        let (of_bytes, size) = if opened.batched {
            self.batch::<METADATA>(payload, opened.count as usize, table, of_message)?
        } else {
            (self.push::<METADATA>(&said, of_entry, payload)?, payload.len())
        };
        if METADATA {
            self.push_of_entry(frame, at, of_entry, self.slots.len() - first)?;
        }
        let slots = &self.slots[first..];
        let mixed = slots.iter().any(|slot| *slot != slots[0]);
        // What compiled.py reads: messages, payload, slot of the first or 0, whether slots differ, and
        // whether a key was set as bytes.
        let row = [slots.len() as i64, size as i64, i64::from(slots[0]), i64::from(mixed), i64::from(of_bytes)];
        self.entries.extend_from_slice(&row);
        Ok(())
    }

    fn batch<'a, const METADATA: bool>(
        &mut self, payload: &'a [u8], count: usize, table: &Table, stated: &mut Stated<'a>,
    ) -> Plain<(bool, usize)> {
        if count > payload.len() / 4 + 1 {
            return Err(NotPlain);
        }
        let (mut at, mut size, mut of_bytes) = (0, 0, false);
        for _ in 0..count {
            let said_size = size_at(payload, at)?;
            let said = said_in_batch::<METADATA>(part(payload, at + 4, said_size)?, table, stated)?;
            at += 4 + said_size;
            let length = said.length.ok_or(NotPlain)?;
            let routed = self.push::<METADATA>(&said, stated, part(payload, at, length)?)?;
            of_bytes |= routed;
            at += length;
            size += length;
        }
        if at == payload.len() { Ok((of_bytes, size)) } else { Err(NotPlain) }
    }
}

/// What a batch says of a message, and where metadata is wanted, of its columns.
fn said_in_batch<'a, const METADATA: bool>(
    data: &'a [u8], table: &Table, stated: &mut Stated<'a>,
) -> Plain<Said<'a>> {
    let mut said = Said::default();
    if METADATA {
        stated.fill(None);
    }
    let mut fields = Fields::of(data);
    while let Some((field, value)) = fields.next()? {
        match field {
            1 => said.add_property(value.bytes()?)?,
            2 => said.key = Some(value.bytes()?),
            3 => said.length = Some(usize::try_from(value.number()?).map_err(|_| NotPlain)?),
            5 => said.event_ms = value.number()?,
            6 => said.of_bytes = value.number()? != 0,
            7 => said.ordering_key = Some(value.bytes()?),
            9 => said.null_value = value.number()? != 0,
            _ if METADATA && is_in(table.fields_in_batch, field) => {
                table.keep_in_batch(field, value, stated);
            }
            _ => {}
        }
    }
    Ok(said)
}

/// Base64 as the Java client writes it: padded, and nothing else between.
fn from_base64(text: &[u8]) -> Plain<Vec<u8>> {
    if text.len() % 4 != 0 {
        return Err(NotPlain);
    }
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    if padding > 2 {
        return Err(NotPlain);
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
            _ => return Err(NotPlain),
        };
        bits = bits << 6 | u32::from(six);
        held += 6;
        if held >= 8 {
            held -= 8;
            found.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    if bits != 0 { Err(NotPlain) } else { Ok(found) }
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

/// Times of messages of which none has one.
static NO_TIMES: [i64; 4096] = [0; 4096];

/// What is found: memory of the columns' owner, and the columns.
struct Found {
    slots: *const i32,
    entries: *const i64,
    array: ArrowArray,
}

/// The columns as a record batch, in the order of `content_with` in `columns/content.py`.
fn found(columns: Columns) -> Plain<Found> {
    let rows = columns.slots.len();
    if columns.metadata.iter().any(|one| one.stored.wanted != 0 && one.has_value.rows != rows) {
        return Err(NotPlain);
    }
    let mut c = Box::new(columns);
    // They are held for as long as their rows: what growing left over would be as well.
    if c.has_event.valid == 0 && rows <= NO_TIMES.len() {
        c.event_us = Vec::new();
    }
    for column in [
        &mut c.values, &mut c.keys, &mut c.ordering_keys, &mut c.property_keys, &mut c.property_values,
    ] {
        column.shrink();
    }
    c.metadata.iter_mut().for_each(|column| column.bytes.shrink());
    c.event_us.shrink_to_fit();
    c.property_offsets.shrink_to_fit();
    c.slots.shrink_to_fit();
    let times = if c.event_us.is_empty() { NO_TIMES.as_ptr() } else { c.event_us.as_ptr() };
    let mut children = vec![
        c.values.array(&c.has_value),
        c.keys.array(&c.has_key),
        c.ordering_keys.array(&c.has_ordering_key),
        c.has_event.array(&[times.cast()]),
        c.properties(rows),
    ];
    for one in c.metadata.iter().filter(|one| one.stored.wanted != 0) {
        children.push(if one.stored.kind <= TEXT {
            one.bytes.array(&one.has_value)
        } else {
            one.has_value.array(&[one.numbers.as_ptr().cast()])
        });
    }
    let (slots, entries) = (c.slots.as_ptr(), c.entries.as_ptr());
    Ok(Found { slots, entries, array: ArrowArray::new(rows, 0, vec![ptr::null()], children, Some(c)) })
}

/// Numbers that tell whether library and caller belong together.
#[no_mangle]
pub extern "C" fn keyshard_decoder_version() -> u64 {
    9
}

/// Reads the commands of frames, behind their sizes: for each that is an entry its consumer, ledger,
/// entry, count of redeliveries and where what is stored begins; for every other one a position 0.
///
/// # Safety
/// `frames` and `sizes` have `count` values, each frame has its size, and `numbers` has room for
/// `CAME` times as many.
#[no_mangle]
pub unsafe extern "C" fn keyshard_came(
    count: usize, frames: *const *const u8, sizes: *const u64, numbers: *mut u64,
) {
    let _ = catch_unwind(|| {
        // SAFETY: the caller's.
        let (frames, sizes, numbers) = unsafe {
            (
                slice::from_raw_parts(frames, count),
                slice::from_raw_parts(sizes, count),
                slice::from_raw_parts_mut(numbers, count * CAME),
            )
        };
        for (number, row) in numbers.chunks_exact_mut(CAME).enumerate() {
            // SAFETY: the caller's.
            let frame = unsafe { slice::from_raw_parts(frames[number], sizes[number] as usize) };
            row.copy_from_slice(&came(frame).unwrap_or([0; CAME]));
        }
    });
}

/// Opens entries: the numbers of `Opened` for each, into `numbers`. Whether all of them are plain.
///
/// # Safety
/// `frames`, `sizes` and `positions` have `count` values, each frame has its size, and `numbers` has
/// room for `OPENED` times as many.
#[no_mangle]
pub unsafe extern "C" fn keyshard_open(
    count: usize, frames: *const *const u8, sizes: *const u64, positions: *const u64, numbers: *mut u64,
) -> bool {
    catch_unwind(|| {
        // SAFETY: the caller's.
        let (frames, sizes, positions, numbers) = unsafe {
            (
                slice::from_raw_parts(frames, count),
                slice::from_raw_parts(sizes, count),
                slice::from_raw_parts(positions, count),
                slice::from_raw_parts_mut(numbers, count * OPENED),
            )
        };
        let table = Table { columns: &[], fields: 0, fields_in_batch: 0 };
        for (number, row) in numbers.chunks_exact_mut(OPENED).enumerate() {
            // SAFETY: the caller's.
            let frame = unsafe { slice::from_raw_parts(frames[number], sizes[number] as usize) };
            let Ok((entry, _)) = opened::<false>(frame, positions[number] as usize, &table, &mut []) else {
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

/// Decodes entries that `keyshard_open` has opened; it has compared their checksums. Whether all of
/// them are plain; then `array` has the columns. `slots` and `entries` point into memory that lives
/// until the columns are released.
///
/// # Safety
/// As for `keyshard_open`; `metadata` has `columns` values, `limits` is one, `array` has room for one. `unpacked` and
/// `unpacked_sizes` have `count` values: the payload of each entry, or null for what lies in the
/// frame.
#[no_mangle]
pub unsafe extern "C" fn keyshard_decode(
    count: usize, frames: *const *const u8, sizes: *const u64, positions: *const u64,
    unpacked: *const *const u8, unpacked_sizes: *const u64, keeps_values: bool,
    columns: usize, metadata: *const Stored, limits: *const Limits,
    slots: *mut *const i32, entries: *mut *const i64, array: *mut ArrowArray,
) -> bool {
    let made = catch_unwind(|| {
        // SAFETY: the caller's.
        let (frames, sizes, positions, unpacked, unpacked_sizes, stored) = unsafe {
            (
                slice::from_raw_parts(frames, count),
                slice::from_raw_parts(sizes, count),
                slice::from_raw_parts(positions, count),
                slice::from_raw_parts(unpacked, count),
                slice::from_raw_parts(unpacked_sizes, count),
                slice::from_raw_parts(metadata, columns),
            )
        };
        let table = Table::of(stored)?;
        let (mut of_entry, mut of_message) = (vec![None; stored.len()], vec![None; stored.len()]);
        // SAFETY: the caller's.
        let mut columns = Columns::new(keeps_values, &table, unsafe { *limits });
        if keeps_values {
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
            if stored.iter().any(|one| one.wanted != 0) {
                columns.entry::<true>(frame, position, payload, &table, &mut of_entry, &mut of_message)?;
            } else {
                columns.entry::<false>(frame, position, payload, &table, &mut of_entry, &mut of_message)?;
            }
        }
        found(columns)
    });
    match made {
        Ok(Ok(made)) => {
            // SAFETY: the caller's.
            unsafe {
                *slots = made.slots;
                *entries = made.entries;
                array.write(made.array);
            }
            true
        }
        _ => false,
    }
}
