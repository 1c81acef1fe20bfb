//! What the tokens of a scene carry: keys, values and queries by sequence, head and position, exact and as a buffer gives them back.

use kvtune::ops::attention::KvBlock;
use kvtune::recipe::BufferKind;
use kvtune::store::Bits;
use tch::{Kind, Tensor};

use super::scene::Scene;

/// Width of a head.
pub(crate) const HEAD_DIM: usize = 8;
/// Query heads of a KV head.
pub(crate) const PER_GROUP: usize = 2;
/// The factor on `q · k`.
pub(crate) const SCALE: f64 = 0.75;

/// How keys and values are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drawn {
    /// Small integers whose Euclidean norm is one too: sums are exact, and norms tie.
    Whole,
    /// Keys along the axes: the mean of their directions is a count.
    Axes,
    /// Any number: what is computed from it differs by roundings from one order of summation to another.
    Real,
}

impl Drawn {
    /// How policy and buffer are best put to the test.
    fn of(scene: &Scene) -> Self {
        match scene.rule().0.as_str() {
            // Along axes the scores of one head are counts; those of different heads are not.
            "keydiff" if scene.buffer == BufferKind::Plain && scene.rule().2.is_none() => Self::Axes,
            "keydiff" | "expected-attention" | "qh2o" | "qh2o-vlen" | "defensivekv" | "dropkv" | "lagkv" | "learned" | "rkv"
            | "triattention" => Self::Real,
            _ => Self::Whole,
        }
    }
}

/// One vector.
pub(crate) type Head = [f64; HEAD_DIM];

/// Keys or values of all tokens.
#[derive(Debug)]
struct Plane {
    exact_bgtd: Tensor,
    exact: Vec<Head>,
    stored: Vec<Head>,
}

impl Plane {
    fn new(scene: &Scene, drawn: Drawn, salt: u64) -> Self {
        let (sequences, heads, tokens) = (scene.lengths.len(), scene.groups as usize, scene.total());
        let mut exact: Vec<Head> = Vec::new();
        for sequence in 0..sequences {
            for head in 0..heads {
                exact.extend((0..tokens).map(|p| vector(drawn, salt, [sequence, head, p])));
            }
        }
        let size = [sequences as i64, scene.groups, tokens as i64, HEAD_DIM as i64];
        Self::of_tensor(scene.buffer, Tensor::from_slice(&exact.concat()).view(size))
    }

    fn of_tensor(buffer: BufferKind, exact_bgtd: Tensor) -> Self {
        let (exact, stored) = (heads_of(&exact_bgtd), heads_of(&restored(buffer, &exact_bgtd)));
        Self { exact_bgtd, exact, stored }
    }
}

/// The vectors of a tensor `(…, D)`.
pub(crate) fn heads_of(x: &Tensor) -> Vec<Head> {
    let flat = Vec::<f64>::try_from(x.contiguous().view(-1)).unwrap();
    flat.chunks(HEAD_DIM).map(|x| x.try_into().unwrap()).collect()
}

/// What a buffer gives back for vectors `(…, D)`.
fn restored(buffer: BufferKind, x: &Tensor) -> Tensor {
    let through = |bits: Bits| {
        let [level, range] = bits.quantise(x);
        bits.restore(&level, &range, HEAD_DIM as i64, Kind::Double)
    };
    match buffer {
        BufferKind::Plain => x.shallow_clone(),
        BufferKind::Int8 => through(Bits::Eight),
        BufferKind::Int4 => through(Bits::Four),
    }
}

/// Keys and values of a scene.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) drawn: Drawn,
    heads: usize,
    tokens: usize,
    keys: Plane,
    values: Plane,
    /// What the model says of each token `(B, G, T, 1)`, for a policy that asks; and one by one.
    numbers_bgt1: Option<Tensor>,
    numbers: Vec<f32>,
}

impl Content {
    pub(crate) fn new(scene: &Scene) -> Self {
        let drawn = Drawn::of(scene);
        let size = [scene.lengths.len() as i64, scene.groups, scene.total() as i64, 1];
        let numbers =
            (0..size.iter().product::<i64>()).map(|at| (mixed(&[5, at as usize]) % scene.levels) as f32).collect::<Vec<_>>();
        let has_numbers = scene.build().traits().model_feature.is_some();
        let numbers_bgt1 = has_numbers.then(|| Tensor::from_slice(&numbers).to_kind(Kind::Double).view(size));
        let keys = Plane::new(scene, drawn, 1);
        let values = Plane::new(scene, if drawn == Drawn::Axes { Drawn::Whole } else { drawn }, 2);
        Self { drawn, heads: scene.groups as usize, tokens: scene.total(), keys, values, numbers_bgt1, numbers }
    }

    /// Keys and values `(B, G, T, D)` of a model, and what it says of them.
    pub(crate) fn of_tensors(buffer: BufferKind, [k_bgtd, v_bgtd]: [Tensor; 2], numbers_bgt1: Option<Tensor>) -> Self {
        let (heads, tokens) = (k_bgtd.size()[1] as usize, k_bgtd.size()[2] as usize);
        let (keys, values) = (Plane::of_tensor(buffer, k_bgtd), Plane::of_tensor(buffer, v_bgtd));
        let flat = |numbers: &Tensor| Vec::<f32>::try_from(numbers.to_kind(Kind::Float).contiguous().view(-1)).unwrap();
        let numbers = numbers_bgt1.as_ref().map(flat).unwrap_or_default();
        Self { drawn: Drawn::Real, heads, tokens, keys, values, numbers_bgt1, numbers }
    }

    fn at(&self, [sequence, head, position]: [usize; 3]) -> usize {
        (sequence * self.heads + head) * self.tokens + position
    }

    /// Key and value of a token.
    pub(crate) fn exact(&self, at: [usize; 3]) -> (&Head, &Head) {
        (&self.keys.exact[self.at(at)], &self.values.exact[self.at(at)])
    }

    /// What the model says of a token.
    pub(crate) fn number(&self, at: [usize; 3]) -> f32 {
        self.numbers[self.at(at)]
    }

    /// Key and value of a token as later chunks see them.
    pub(crate) fn stored(&self, at: [usize; 3]) -> (&Head, &Head) {
        (&self.keys.stored[self.at(at)], &self.values.stored[self.at(at)])
    }

    /// Key and value of a token as the chunk that begins at `start` sees them.
    pub(crate) fn seen(&self, at: [usize; 3], start: usize) -> (&Head, &Head) {
        if at[2] >= start { self.exact(at) } else { self.stored(at) }
    }

    /// The entries of the tokens from `start` on, which have a tag beside key and value. Pads are no numbers: nobody may look at them.
    pub(crate) fn chunk(&self, start: usize, real: &[usize], len: usize) -> KvBlock {
        let of = |plane_bgtd: &Tensor| {
            let chunk = plane_bgtd.narrow(0, 0, real.len() as i64).narrow(2, start as i64, len as i64).copy();
            for (sequence, &real) in real.iter().enumerate() {
                let _ = chunk.get(sequence as i64).narrow(1, real as i64, (len - real) as i64).fill_(f64::NAN);
            }
            chunk
        };
        let (k, v) = (&self.keys.exact_bgtd, &self.values.exact_bgtd);
        let tags = self.tags_like(k);
        KvBlock::of_planes([k, v].into_iter().chain([&tags]).chain(&self.numbers_bgt1).map(of))
    }

    fn tags_like(&self, k_bgtd: &Tensor) -> Tensor {
        let (batch, heads, tokens, _) = k_bgtd.size4().unwrap();
        let tags = (0..batch as usize * self.heads * self.tokens)
            .flat_map(|at| tag([at / self.tokens / self.heads, at / self.tokens % self.heads, at % self.tokens]));
        Tensor::from_slice(&tags.collect::<Vec<f64>>()).view([batch, heads, tokens, TAG_WIDTH]).to_kind(k_bgtd.kind())
    }
}

/// Numbers of a tag, which an entry has beside key and value.
pub(crate) const TAG_WIDTH: i64 = 2;

/// What tells an entry from all others, whatever keys and values are.
pub(crate) fn tag([sequence, head, position]: [usize; 3]) -> [f64; TAG_WIDTH as usize] {
    [position as f64 + 0.5, (sequence * 100 + head) as f64]
}

/// The query of a token in query head `head`.
pub(crate) fn query(at: [usize; 3]) -> Head {
    vector(Drawn::Real, 3, at)
}

/// A number that depends on all of `parts`, and on nothing else.
pub(crate) fn mixed(parts: &[usize]) -> u64 {
    let mut x = parts.iter().fold(0x9e37_79b9_7f4a_7c15_u64, |x, &part| {
        (x ^ part as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(29).wrapping_add(0x94d0_49bb_1331_11eb)
    });
    x ^= x >> 31;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 29)
}

fn vector(drawn: Drawn, salt: u64, [sequence, head, position]: [usize; 3]) -> Head {
    let draw = |i: usize| mixed(&[salt as usize, sequence, head, position, i]);
    let mut x = [0.0; HEAD_DIM];
    match drawn {
        Drawn::Real => x = std::array::from_fn(|i| draw(i) as f64 / u64::MAX as f64 * 2.0 - 1.0),
        // The reciprocal of a power of two is exact, and so are directions that cancel.
        Drawn::Axes => x[(draw(0) % 3) as usize] = 2f64.powi((position % 32) as i32) * sign(draw(1)),
        Drawn::Whole => {
            // 1 + 1 + 1 + 1 + 4 + 4 + 4 = 16: the norm is 4 times the magnitude.
            let mut order: Vec<usize> = (0..HEAD_DIM).collect();
            order.sort_by_key(|&i| draw(i));
            let magnitude = (1 + draw(99) % 6) as f64;
            for (&i, size) in order.iter().zip([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 0.0]) {
                x[i] = size * magnitude * sign(draw(10 + i));
            }
        }
    }
    x
}

fn sign(draw: u64) -> f64 {
    if draw.is_multiple_of(2) { 1.0 } else { -1.0 }
}
