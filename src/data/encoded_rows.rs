//! All rows of files as token ids, on all cores and in order: a run writes them down, and a survey shows them.

use super::encoded_sample::EncodedSample;
use super::example::Example;
use super::faults::RowFault;
use super::formats::ExampleReader;
use super::in_order::in_order;
use super::rows;
use super::sample_place::{LineOrRecord, SamplePlace};
use super::source::DataSource;
use crate::units::Fault;

/// What examples of one handing-over take, about.
const BATCH_BYTES: usize = 1 << 18;

const BATCH_EXAMPLES: usize = 256;

/// A row, and its sample or why it is none.
#[derive(Debug)]
pub struct SampleRow<T> {
    pub place: SamplePlace,
    pub sample: Result<T, Fault>,
}

/// Hands over every row, bad or not; fails where a file cannot be read or is damaged, or `consume` refuses.
pub(super) fn each_row<E: From<Fault>>(
    source: &DataSource,
    reader: &ExampleReader<'_>,
    mut consume: impl FnMut(SampleRow<(Example, EncodedSample)>) -> Result<(), E>,
) -> Result<(), E> {
    let encoded = |SampleRow { place, sample }: SampleRow<Example>| {
        let sample = sample.and_then(|example| reader.encoder.encode(&example.content, &place).map(|tokens| (example, tokens)));
        SampleRow { place, sample }
    };
    let encode =
        |batch: Result<Vec<SampleRow<Example>>, Fault>| batch.map(|rows| rows.into_iter().map(encoded).collect::<Vec<_>>());
    in_order(|hand_on| read(source, reader, hand_on), encode, |rows| rows?.into_iter().try_for_each(&mut consume))
}

/// Hands over the rows of all files in batches, until nobody listens; behind them what ends the walk, if it is an error.
fn read(
    source: &DataSource,
    reader: &ExampleReader<'_>,
    hand_on: &mut dyn FnMut(Result<Vec<SampleRow<Example>>, Fault>) -> bool,
) {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    let walked = source.files.iter().try_for_each(|file| {
        rows::each(file, &source.rows, &mut |row| {
            let place = match &row {
                Ok(row) => row.place(),
                Err(error) => error.payload::<RowFault>().map_or_else(
                    || SamplePlace { path: file.as_path().into(), at: LineOrRecord::Whole },
                    |row| row.place.clone(),
                ),
            };
            let sample = row.and_then(|row| reader.example(row));
            // Handing over has its price, which short ones share.
            bytes += BATCH_BYTES / BATCH_EXAMPLES + sample.as_ref().map_or(0, |example| example.content.size());
            batch.push(SampleRow { place, sample });
            if bytes < BATCH_BYTES {
                return Ok(());
            }
            bytes = 0;
            if hand_on(Ok(std::mem::take(&mut batch))) { Ok(()) } else { Err(rows::ENOUGH) }
        })
    });
    match walked {
        Err(None) => {}
        Ok(()) => _ = hand_on(Ok(batch)),
        Err(Some(error)) => _ = hand_on(Ok(batch)) && hand_on(Err(error)),
    }
}
