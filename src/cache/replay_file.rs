//! The replay log as bytes: one safetensors file, checked before anything in it is believed, and the hash of what stands in it.
//!
//! `docs/reference/replay-log.md` describes the file.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

use tch::{Kind, Tensor};

use super::{ChunkSpan, HeadBudgets, LayerLog, ReplayLog, Routing, Victims};
use crate::files::{self, Dtype, RawTensor, TensorFile};
use crate::store::content_of;
use crate::units::{Fault, abridged};

const FORMAT: &str = "kvtune replay log";
const VERSION: &str = "1";
/// Which chunks are blocks of decoding, where some are.
const BLOCKS: &str = "blocks";
/// Above every position and every length: sums of what a file claims do not overflow.
const LIMIT: i64 = 1 << 31;

impl ReplayLog {
    /// BLAKE3 of everything that [`Self::save`] would write, in hex.
    pub fn hash(&self) -> String {
        let parts = |RawTensor { name, dtype, shape, bytes }| [format!("{name} {dtype} {shape:?}").into_bytes().into(), bytes];
        files::hash_parts(self.tensors().flat_map(parts))
    }

    pub fn save(&self, path: &Path) -> Result<(), Fault> {
        files::write_tensors(path, &self.tensors().collect::<Vec<_>>(), &metadata())
    }

    /// Reads a file of [`Self::save`]. What it holds is a log that some cache could have made: chunks that follow each other, and of
    /// each as many different filled slots as it has to evict.
    pub fn load(path: &Path) -> Result<Self, Fault> {
        read_log(&TensorFile::open(path)?)
    }

    fn tensors(&self) -> impl Iterator<Item = RawTensor<'static>> {
        let batch = self.spans.first().map_or(0, ChunkSpan::num_sequences);
        let spans = self.spans.iter().flat_map(|s| [s.chunk, s.start, s.len]);
        let real = self.spans.iter().flat_map(|s| (0..batch).map(|sequence| s.real_of(sequence)));
        let whole = [
            numbers("spans".into(), vec![self.spans.len(), 3], spans),
            numbers("real".into(), vec![self.spans.len(), batch], real),
            numbers("cache_lengths".into(), vec![self.cache_lengths.len()], self.cache_lengths.iter().copied()),
        ];
        let is_block = || self.spans.iter().map(|s| usize::from(s.is_block));
        let blocks = is_block().any(|b| b > 0).then(|| numbers(BLOCKS.into(), vec![self.spans.len()], is_block()));
        let by_layer = |(layer, log)| layer_tensors(layer, log, self.cache_lengths[layer], self.spans.len());
        let layers = || self.layers.iter().enumerate();
        let budgets = layers().flat_map(|(layer, log)| log.budgets.iter().flat_map(move |own| budget_tensors(layer, own)));
        let routings = layers().filter_map(|(layer, log)| routing_tensor(layer, log, self.spans.len()));
        whole.into_iter().chain(blocks).chain(layers().flat_map(by_layer)).chain(budgets).chain(routings)
    }
}

fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), FORMAT.to_owned()), ("version".to_owned(), VERSION.to_owned())])
}

fn named(layer: usize, what: &str) -> String {
    format!("layer.{layer}.{what}")
}

fn numbers(name: String, shape: Vec<usize>, values: impl Iterator<Item = usize>) -> RawTensor<'static> {
    let bytes: Vec<u8> = values.flat_map(|v| (v as i64).to_le_bytes()).collect();
    RawTensor { name, dtype: Dtype::I64, shape, bytes: bytes.into() }
}

/// How many sequences and heads decided for themselves, by chunk, and the slots of all chunks one after the other.
fn layer_tensors(layer: usize, log: &LayerLog, cache_length: usize, num_chunks: usize) -> [RawTensor<'static>; 2] {
    let counts = (0..num_chunks).flat_map(|c| log.victims(c).map_or([0, 0], |v| [v.num_sequences(), v.num_heads()]));
    let narrowest = Victims::kind(cache_length).elt_size_in_bytes();
    let width = log.all().map(Victims::width).fold(narrowest, usize::max);
    let mut bytes = Vec::new();
    for victims in (0..num_chunks).filter_map(|c| log.victims(c)) {
        victims.flat().iter().for_each(|slot| bytes.extend_from_slice(&slot.to_le_bytes()[..width]));
    }
    let dtype = match width {
        1 => Dtype::U8,
        2 => Dtype::U16,
        _ => Dtype::U32,
    };
    let shape = vec![bytes.len() / width];
    [
        numbers(named(layer, "deciders"), vec![num_chunks, 2], counts),
        RawTensor { name: named(layer, "slots"), dtype, shape, bytes: bytes.into() },
    ]
}

/// The shares of sequences and heads, and which entries leave at once; they come into force before the first chunk that evicts.
fn budget_tensors(layer: usize, budgets: &HeadBudgets) -> [RawTensor<'static>; 2] {
    let (sequences, heads) = (budgets.shares.len(), budgets.shares.first().map_or(0, Vec::len));
    let bytes: Vec<u8> = budgets.leaving.iter().copied().map(u8::from).collect();
    let shape = vec![sequences, heads, bytes.len() / (sequences * heads).max(1)];
    let flat = budgets.shares.iter().flatten().copied();
    let leaving = RawTensor { name: named(layer, "leaving"), dtype: Dtype::U8, shape, bytes: bytes.into() };
    [numbers(named(layer, "shares"), vec![sequences, heads], flat), leaving]
}

/// The experts of all tokens, chunk after chunk, where the layer has some.
fn routing_tensor(layer: usize, log: &LayerLog, num_chunks: usize) -> Option<RawTensor<'static>> {
    let parts: Vec<Tensor> = (0..num_chunks).filter_map(|c| Some(log.routing(c)?.packed().flatten(0, 1))).collect();
    if parts.is_empty() {
        return None;
    }
    let whole = Tensor::cat(&parts, 0);
    let dtype = if whole.kind() == Kind::Uint8 { Dtype::U8 } else { Dtype::I16 };
    let bytes = content_of(&whole).unwrap_or_default();
    let shape = whole.size().iter().map(|&n| n as usize).collect();
    Some(RawTensor { name: named(layer, "experts"), dtype, shape, bytes: bytes.into() })
}

fn invalid(file: &TensorFile, reason: impl Display) -> Fault {
    let message = format!("`{}` is not a valid replay log: {}", abridged(file.path().display()), abridged(reason));
    Fault::data(message, "write it again with `kvtune verify --dump`; the file is damaged or something else")
}

fn read_log(file: &TensorFile) -> Result<ReplayLog, Fault> {
    if file.metadata() != metadata() {
        return Err(invalid(file, format!("its metadata does not say `{FORMAT}`, version {VERSION}")));
    }
    let spans = read_spans(file)?;
    let (_, cache_lengths) = read_numbers(file, "cache_lengths", &[None])?;
    let found = file.names().len();
    // Whoever claims more layers than the file can hold is not believed any further.
    let layers = cache_lengths.len().min(found);
    let budget = (0..layers).filter(|&l| is_divided(file, l)).count();
    let routed = (0..layers).filter(|&l| file.contains(&named(l, "experts"))).count();
    let expected = 3 + usize::from(file.contains(BLOCKS)) + 2 * (cache_lengths.len() + budget) + routed;
    if expected != found {
        return Err(invalid(file, format!("expected {expected} tensors for {} layers, found {found}", cache_lengths.len())));
    }
    let layers = cache_lengths.iter().enumerate().map(|(l, &c)| read_layer(file, l, c, &spans)).collect::<Result<_, _>>()?;
    let log = ReplayLog { spans, cache_lengths, layers };
    let heads: Vec<usize> = log.head_counts().map(|(_, heads)| heads).collect();
    if heads.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err(invalid(file, format!("some of its choices are of {} KV heads, others of another number", heads[0])));
    }
    Ok(log)
}

/// Numbers below [`LIMIT`], of a shape in which `None` is any length.
fn read_numbers(file: &TensorFile, name: &str, shape: &[Option<usize>]) -> Result<(Vec<usize>, Vec<usize>), Fault> {
    let view = file.get(name)?;
    let fits = |(n, expected): (&usize, &Option<usize>)| expected.is_none_or(|e| e == *n);
    if view.dtype != Dtype::I64 || view.shape.len() != shape.len() || !view.shape.iter().zip(shape).all(fits) {
        let shape: Vec<String> = shape.iter().map(|n| n.map_or("any".to_owned(), |n| n.to_string())).collect();
        let (expected, found, dtype) = (shape.join(", "), view.shape, view.dtype);
        return Err(invalid(file, format!("`{name}` is {dtype} of shape {found:?}, expected I64 of shape [{expected}]")));
    }
    let all = view.bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
    let checked = |v: i64| match v {
        0..LIMIT => Ok(v as usize),
        _ => Err(invalid(file, format!("`{name}` holds {v}, expected 0 to {LIMIT}"))),
    };
    Ok((view.shape.to_vec(), all.map(checked).collect::<Result<_, _>>()?))
}

/// Chunks that cover the tokens of every sequence once.
fn read_spans(file: &TensorFile) -> Result<Vec<ChunkSpan>, Fault> {
    let (shape, flat) = read_numbers(file, "spans", &[None, Some(3)])?;
    let (real_shape, real) = read_numbers(file, "real", &[Some(shape[0]), None])?;
    if real.is_empty() {
        return Err(invalid(file, "it has no chunks"));
    }
    let batch = real_shape[1];
    let blocks = if file.contains(BLOCKS) { read_numbers(file, BLOCKS, &[Some(shape[0])])?.1 } else { vec![0; shape[0]] };
    let lengths: Vec<usize> = (0..batch).map(|b| real[b..].iter().step_by(batch).sum()).collect();
    let (mut spans, mut next, mut event) = (Vec::<ChunkSpan>::with_capacity(shape[0]), 0, 0);
    for (index, (numbers, real)) in flat.chunks(3).zip(real.chunks(batch)).enumerate() {
        let &[chunk, start, len] = numbers else { break };
        // The prefill span is event 0 in any number of pieces; after it every chunk is one.
        let follows = start == next && len > 0 && (chunk == event + usize::from(index > 0) || chunk == 0 && event == 0);
        let is_whole = lengths.iter().zip(real).all(|(&t, &real)| real == t.saturating_sub(start).min(len));
        if !follows || !is_whole {
            return Err(invalid(file, format!("chunk {index} does not follow from those before it")));
        }
        let active = real.iter().rposition(|&tokens| tokens > 0).map_or(0, |last| last + 1);
        spans.push(ChunkSpan { index, chunk, start, len, real: real[..active].to_vec(), is_block: blocks[index] > 0 });
        (next, event) = (start + len, chunk);
    }
    // The last block may have pads for the longest sequence, too.
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let is_whole = |last: &ChunkSpan| if last.is_block { (last.start + 1..=next).contains(&longest) } else { longest == next };
    if !spans.last().is_some_and(is_whole) {
        return Err(invalid(file, format!("its chunks have {next} positions, and no sequence as many tokens")));
    }
    Ok(spans)
}

fn is_divided(file: &TensorFile, layer: usize) -> bool {
    file.contains(&named(layer, "shares"))
}

/// The budgets of a layer whose heads hold `filled` entries each before chunk `span`, for a batch of so many sequences.
fn read_budgets(
    file: &TensorFile,
    layer: usize,
    batch: usize,
    span: &ChunkSpan,
    filled: usize,
    cache_length: usize,
) -> Result<HeadBudgets, Fault> {
    let (shape, flat) = read_numbers(file, &named(layer, "shares"), &[None, None])?;
    let (view, active, sequences) = (file.get(&named(layer, "leaving"))?, span.num_sequences(), shape[0]);
    if shape[1] == 0 || ![active, batch].contains(&sequences) {
        let (name, heads) = (named(layer, "shares"), shape[1]);
        let expected = format!("{active} sequences and some heads");
        return Err(invalid(file, format!("`{name}` is of {sequences} sequences and {heads} heads, expected {expected}")));
    }
    if view.dtype != Dtype::U8 || view.shape != [sequences, shape[1], filled] || view.bytes.iter().any(|&b| b > 1) {
        let (dtype, found) = (view.dtype, view.shape);
        let expected = format!("zeros and ones, U8 of shape [{sequences}, {}, {filled}]", shape[1]);
        return Err(invalid(file, format!("`{}` is {dtype} of shape {found:?}, expected {expected}", named(layer, "leaving"))));
    }
    for (share, own) in flat.iter().zip(view.bytes.chunks(filled.max(1))) {
        let leave: usize = own.iter().map(|&b| usize::from(b)).sum();
        if *share == 0 || *share > 2 * cache_length || leave > filled.saturating_sub(*share) {
            return Err(invalid(file, format!("layer {layer}: {leave} of {filled} entries leave for a share of {share} slots")));
        }
    }
    let shares = flat.chunks(shape[1]).take(active).map(<[usize]>::to_vec).collect();
    let leaving: Vec<bool> = view.bytes.iter().take(active * shape[1] * filled).map(|&b| b == 1).collect();
    Ok(HeadBudgets::recorded(span.index, filled, shares, leaving))
}

/// The experts of a layer's tokens, where it has some: of each token different ones.
fn read_routing(file: &TensorFile, layer: usize, spans: &[ChunkSpan], log: &mut LayerLog) -> Result<(), Fault> {
    let name = named(layer, "experts");
    if !file.contains(&name) {
        return Ok(());
    }
    let view = file.get(&name)?;
    let tokens: usize = spans.iter().map(|span| span.num_sequences() * span.len).sum();
    let wrong = |found: String| invalid(file, format!("`{name}` is {found}, expected U8 or I16 of shape [{tokens}, any]"));
    let (width, kind) = match view.dtype {
        Dtype::U8 => (1, Kind::Uint8),
        Dtype::I16 => (2, Kind::Int16),
        other => return Err(wrong(other.to_string())),
    };
    let &[found, top_k] = view.shape else { return Err(wrong(format!("of shape {:?}", view.shape))) };
    if found != tokens || top_k == 0 {
        return Err(wrong(format!("of shape {:?}", view.shape)));
    }
    let chosen: Vec<i64> = view.bytes.chunks(width).map(number).collect();
    if !chosen.chunks(top_k).all(|own| are_different(own, 1 << 15)) {
        return Err(invalid(file, format!("`{name}` names an expert twice for a token, or one beyond {}", 1 << 15)));
    }
    let largest = chosen.iter().copied().max().unwrap_or(0);
    let (whole, mut start) = (Tensor::from_slice(&chosen).view([tokens as i64, top_k as i64]).to_kind(kind), 0);
    for span in spans {
        let (sequences, len) = (span.num_sequences() as i64, span.len as i64);
        let own = whole.narrow(0, start, sequences * len).view([sequences, len, top_k as i64]);
        log.record_routing(|| Routing::of_host(&own, largest), false);
        start += sequences * len;
    }
    Ok(())
}

fn read_layer(file: &TensorFile, layer: usize, cache_length: usize, spans: &[ChunkSpan]) -> Result<LayerLog, Fault> {
    let (_, deciders) = read_numbers(file, &named(layer, "deciders"), &[Some(spans.len()), Some(2)])?;
    let view = file.get(&named(layer, "slots"))?;
    let width = match view.dtype {
        Dtype::U8 => 1,
        Dtype::U16 => 2,
        Dtype::U32 => 4,
        other => return Err(invalid(file, format!("`{}` is {other}, expected U8, U16 or U32", named(layer, "slots")))),
    };
    let (mut rest, mut filled, mut log) = (view.bytes, 0, LayerLog::default());
    let mut capacity = cache_length;
    for (span, decided) in spans.iter().zip(deciders.chunks(2)) {
        if log.budgets.is_none() && span.evictions(filled, cache_length) > 0 && is_divided(file, layer) {
            let budgets = read_budgets(file, layer, spans[0].num_sequences(), span, filled, cache_length)?;
            (capacity, filled) = (budgets.slots, budgets.slots);
            log.budgets = Some(budgets);
        }
        let wrong = |reason: String| invalid(file, format!("layer {layer}, chunk {}: {reason}", span.index));
        let (sequences, heads, e) = (decided[0], decided[1], span.evictions(filled, capacity));
        let (active, batch) = (span.num_sequences(), spans[0].num_sequences());
        let is_one_of = if e == 0 { sequences == 0 && heads == 0 } else { [1, active, batch].contains(&sequences) && heads > 0 };
        if span.len > cache_length || !is_one_of {
            return Err(wrong(format!("{sequences} sequences and {heads} heads decide which {e} of {filled} entries leave")));
        }
        // The product may overflow; what it asks for is compared with what is there before any of it is taken.
        let size = [sequences, heads, e, width].into_iter().try_fold(1usize, usize::checked_mul);
        let Some((here, behind)) = size.and_then(|size| rest.split_at_checked(size)) else {
            return Err(wrong(format!("expected {sequences} × {heads} × {e} slots, found {}", rest.len() / width)));
        };
        rest = behind;
        let slots: Vec<i64> = here.chunks(width).map(number).collect();
        if !slots.chunks(e.max(1)).all(|own| are_different(own, filled)) {
            return Err(wrong(format!("expected {e} different slots below {filled}")));
        }
        let size = [sequences as i64, heads as i64, e as i64];
        // Older logs have choices of sequences that have ended, too.
        let own = |slots: Tensor| slots.narrow(0, 0, sequences.min(active) as i64);
        log.record((e > 0).then(|| Victims::of_host(&own(Tensor::from_slice(&slots).view(size)), capacity)));
        filled += span.len - e;
    }
    read_routing(file, layer, spans, &mut log)?;
    if rest.is_empty() { Ok(log) } else { Err(invalid(file, format!("layer {layer}: {} slots too many", rest.len() / width))) }
}

fn number(bytes: &[u8]) -> i64 {
    bytes.iter().rev().fold(0, |n, &byte| n << 8 | i64::from(byte))
}

fn are_different(slots: &[i64], limit: usize) -> bool {
    let mut sorted = slots.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).all(|pair| pair[0] != pair[1]) && sorted.last().is_none_or(|&slot| slot < limit as i64)
}
