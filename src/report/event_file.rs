//! Event files of TensorBoard: messages of Protocol Buffers, in the records of `tensorboard-rs`.

use std::io;

use tensorboard_rs::record_writer::RecordWriter;

/// A message, field after field.
#[derive(Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    pub(super) fn varint(mut self, field: u64, value: u64) -> Self {
        self.key(field, 0);
        self.number(value);
        self
    }

    pub(super) fn double(mut self, field: u64, value: f64) -> Self {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn bytes(mut self, field: u64, bytes: &[u8]) -> Self {
        self.key(field, 2);
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    pub(super) fn message(self, field: u64, inner: &Self) -> Self {
        self.bytes(field, &inner.0)
    }

    pub(super) fn float(mut self, field: u64, value: f32) -> Self {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn key(&mut self, field: u64, wire_type: u64) {
        self.number(field << 3 | wire_type);
    }

    /// Seven bits in each byte, the lowest first.
    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// Messages as they stand in a file, each with its length and checksums.
pub(super) fn records(messages: &[Message]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut writer = RecordWriter::new(&mut bytes);
    messages.iter().try_for_each(|message| writer.write(&message.0))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_its_length_and_checksums() {
        // The first record of each file that TensorFlow writes.
        let version = Message::default().double(1, 0.0).bytes(3, b"brain.Event:2");
        let record = records(&[version]).unwrap();
        assert_eq!((record.len(), &record[..12]), (40, &[24, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22][..]));
    }
}
