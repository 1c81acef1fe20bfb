//! Event files of TensorBoard: messages of Protocol Buffers, each between its length and checksums.

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

/// A message as it stands in a file.
pub(super) fn record(message: &Message) -> Vec<u8> {
    let length = (message.0.len() as u64).to_le_bytes();
    [&length[..], &checksum(&length), &message.0, &checksum(&message.0)].concat()
}

/// CRC-32C, turned and shifted as TensorFlow does it.
fn checksum(bytes: &[u8]) -> [u8; 4] {
    (crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)).to_le_bytes()
}

fn crc32c(bytes: &[u8]) -> u32 {
    let bit = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), bit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_checksums() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        // The first record of each file that TensorFlow writes.
        let version = Message::default().double(1, 0.0).bytes(3, b"brain.Event:2");
        let record = record(&version);
        assert_eq!((record.len(), &record[..12]), (40, &[24, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22][..]));
    }
}
