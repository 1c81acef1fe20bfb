//! Loss and gradient of one column of tokens, in blocks of places that have a target: never tokens × vocabulary.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor, no_grad, with_grad};

use super::{BlockLoss, ColumnTargets, Head, Logits, TargetPosition};
use crate::native::cuda::on_device;
use crate::native::{gradients_of, widened_bytes};
use crate::ops::attention::accumulation_kind;
use crate::units::Fault;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SequenceLoss {
    /// The sum of cross-entropies, in nats.
    pub loss_sum: f64,
    pub targets: usize,
    /// Targets that had the largest score of all choices.
    pub correct: usize,
}

/// Losses of a block of target positions, where they were computed.
#[derive(Debug)]
pub struct Losses {
    pub target_positions: Vec<TargetPosition>,
    /// Cross-entropies, and 1 where the target had the first of the largest scores: `(2, N)`, f64.
    pub loss_and_correct_2n: Tensor,
}

impl Losses {
    /// Brings the figures to the host, which waits for them.
    pub fn read(&self) -> Result<Vec<(TargetPosition, f64, bool)>, Fault> {
        let figures = Vec::<f64>::try_from(self.loss_and_correct_2n.to_device(tch::Device::Cpu).view(-1))?;
        let (losses, correct) = figures.split_at(self.target_positions.len());
        let figures = losses.iter().zip(correct).map(|(&loss, &correct)| (loss, correct > 0.0));
        Ok(self.target_positions.iter().zip(figures).map(|(&pick, (loss, correct))| (pick, loss, correct)).collect())
    }
}

/// Logits that are held at a time: few enough for a core's cache, unless that would be too few places for a fast product.
const BLOCK_LOGITS: usize = 1 << 20;
/// On a GPU, which reads the whole output matrix for each block: enough places that arithmetic takes several times as long as that. With a
/// vocabulary of 152 thousand they are 1792, and their scores in f32 a gibibyte.
const BLOCK_LOGITS_CUDA: usize = 1 << 28;
/// The places of a block are a multiple of this, which products need to be fast: 192 of them take 3 % less time in the head than 146.
const BLOCK_PLACES: usize = 64;

/// How many places are evaluated at a time.
fn places_of_block(vocab_size: usize, device: Device) -> usize {
    let logits = if device.is_cuda() { BLOCK_LOGITS_CUDA } else { BLOCK_LOGITS };
    (logits / vocab_size.max(1)).max(1).next_multiple_of(BLOCK_PLACES)
}

/// What the head works on for a column, from sizes.
#[derive(Clone, Copy, Debug)]
pub struct HeadFootprint {
    pub targets: usize,
    /// Scores among which the target is one.
    pub choices: usize,
    pub hidden: usize,
    /// Trained parameters of final norm and output projection.
    pub trained: u64,
    /// Whether these are kept in more bits than they compute in.
    pub is_widened: bool,
    /// Whether a teacher's predictions play a part in the loss.
    pub is_distilled: bool,
    /// Bytes for each score that the model's output takes beside the scores themselves.
    pub of_output: u64,
    pub kind: Kind,
    pub device: Device,
}

impl HeadFootprint {
    /// The most bytes at a time beside the column's hidden states and their gradient: a block's logits and what is trained, with gradients.
    pub fn bytes(&self) -> u64 {
        if self.targets == 0 {
            return 0;
        }
        let (w, wide) = (self.kind.elt_size_in_bytes() as u64, accumulation_kind(self.kind).elt_size_in_bytes() as u64);
        let places = self.targets.min(places_of_block(self.choices, self.device)) as u64;
        // Logits and their powers. The product behind a gradient of the whole matrix copies them, and a narrow model widens them.
        let trains_matrix = self.trained >= (self.choices * self.hidden) as u64;
        let of_gradient = if wide > w || trains_matrix { w } else { 0 };
        let scores = 2 * wide + of_gradient + if self.is_distilled { 4 * wide } else { 0 };
        let of_trained = self.trained * (wide + if self.is_widened { 2 * w } else { 0 });
        let widened = widened_bytes(self.device, self.kind, [places as usize, self.hidden, self.choices]);
        // What follows the products, and widened factors, are not there at the same time.
        let beside = widened.max(places * self.choices as u64 * self.of_output);
        places * (self.choices as u64 * scores + 3 * self.hidden as u64 * w) + of_trained + beside
    }
}

/// Evaluates `head` on the places of a column: the losses at the target positions, in their order, block by block; and the gradient of
/// `weight · Σ losses` with respect to the hidden states, `None` without targets or weight. That of [`Logits::trained`] is added to `totals`,
/// in their order.
///
/// # Shapes
/// `hidden_bne (B, n, E)`, before the model's final norm; the gradient is `(B, n, E)`.
pub fn column_loss(
    head: &Head,
    hidden_bne: &Tensor,
    places: ColumnTargets<'_>,
    logits: &dyn Logits,
    weight: Option<f64>,
    totals: &mut [Tensor],
) -> Result<(Vec<Losses>, Option<Tensor>), Fault> {
    let (_, n, e) = hidden_bne.size3().unwrap_or_default();
    let ColumnTargets { start, target_positions, sequence_weights, soft } = places;
    let flat = hidden_bne.reshape([-1, e]);
    let mut gradient = (weight.is_some() && !target_positions.is_empty()).then(|| flat.zeros_like());
    let parameters = if gradient.is_some() { logits.trained() } else { Vec::new() };
    let mut losses = Vec::new();
    let block = places_of_block(logits.num_scores(), flat.device());
    for (index, target_positions) in target_positions.chunks(block).enumerate() {
        let soft = soft.map(|soft| soft.rows(index * block, target_positions.len()));
        let sequence_weights =
            sequence_weights.map(|sequence_weights| &sequence_weights[index * block..][..target_positions.len()]);
        let place: Vec<i64> = target_positions.iter().map(|p| p.sequence as i64 * n + (p.position - start) as i64).collect();
        let place = on_device(&place, flat.device());
        let hidden_ne = flat.index_select(0, &place);
        let places = ColumnTargets { start, target_positions, sequence_weights, soft: soft.as_ref() };
        let leaf = hidden_ne.detach().set_requires_grad(weight.is_some());
        let leaves: Vec<&Tensor> = std::iter::once(&leaf).chain(&parameters).collect();
        let (of_block, parts) = block_loss(head, &leaves, places, logits, weight)?;
        let mut parts = parts.into_iter();
        if let (Some(total), Some(Some(part))) = (&mut gradient, parts.next()) {
            let _ = total.index_add_(0, &place, &part);
        }
        for (total, part) in totals.iter_mut().zip(parts) {
            if let Some(part) = part {
                let _ = total.g_add_(&part);
            }
        }
        losses.push(of_block);
    }
    Ok((losses, gradient.map(|g| g.view(&hidden_bne.size()[..]))))
}

/// Losses of a block, and gradients of the leaves, its hidden states and then parameters; none without a weight.
fn block_loss(
    head: &Head,
    leaves: &[&Tensor],
    places: ColumnTargets<'_>,
    logits: &dyn Logits,
    weight: Option<f64>,
) -> Result<(Losses, Vec<Option<Tensor>>), Fault> {
    let targets: Vec<i64> = places.target_positions.iter().map(|p| p.target).collect();
    let hidden_ne = leaves[0];
    let target_n = on_device(&targets, hidden_ne.device());
    let evaluate = || head.choices(&logits.of_hidden(hidden_ne)).to_kind(accumulation_kind(hidden_ne.kind()));
    let scores_nk = if weight.is_some() { with_grad(evaluate) } else { no_grad(evaluate) };
    let scores = scores_nk.detach();
    let BlockLoss { loss_and_correct_2n, gradient_nk } = no_grad(|| head.losses(&scores, &target_n, places.soft, weight));
    let gradients = match gradient_nk {
        None => Vec::new(),
        Some(mut gradient_nk) => {
            if let Some(sequence_weights) = places.sequence_weights {
                gradient_nk *= on_device(sequence_weights, gradient_nk.device()).to_kind(gradient_nk.kind()).unsqueeze(1);
            }
            gradients_of(&[&scores_nk], &[&gradient_nk], leaves)?
        }
    };
    Ok((Losses { target_positions: places.target_positions.to_vec(), loss_and_correct_2n }, gradients))
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::head::SequenceTargets;

    struct LinearLogits([Tensor; 1]);

    impl Logits for LinearLogits {
        fn of_hidden(&self, hidden_ne: &Tensor) -> Tensor {
            hidden_ne.matmul(&self.0[0])
        }

        fn trained(&self) -> Vec<Tensor> {
            self.0.iter().filter(|weight| weight.requires_grad()).map(Tensor::shallow_clone).collect()
        }

        fn num_scores(&self) -> usize {
            7
        }
    }

    #[test]
    fn loss_and_gradient_equal_autograd_over_the_whole_column() {
        let opts = (Kind::Double, Device::Cpu);
        let (hidden, linear) = (Tensor::randn([2, 5, 4], opts), LinearLogits([Tensor::randn([4, 7], opts)]));
        let labels = [vec![-100, 3, 6, -100, 0], vec![1, -100, -100, -100, 2]];
        let mut target_positions = Vec::new();
        for (sequence, tokens) in labels.iter().enumerate() {
            target_positions.extend(Head::NextToken.target_positions(sequence, SequenceTargets::Tokens(tokens)).unwrap());
        }
        let places = ColumnTargets { start: 0, target_positions: &target_positions, sequence_weights: None, soft: None };
        let (_, frozen) = column_loss(&Head::NextToken, &hidden, places, &linear, Some(0.2), &mut []).unwrap();
        let linear = LinearLogits(linear.0.map(|weight| weight.set_requires_grad(true)));
        let mut total = linear.0[0].zeros_like();
        let (losses, gradient) =
            column_loss(&Head::NextToken, &hidden, places, &linear, Some(0.2), std::slice::from_mut(&mut total)).unwrap();
        assert!(frozen == gradient);
        let leaf = hidden.copy().set_requires_grad(true);
        let target = Tensor::from_slice(&labels.concat());
        let loss =
            leaf.view([-1, 4]).matmul(&linear.0[0]).cross_entropy_loss::<Tensor>(&target, None, tch::Reduction::Sum, -100, 0.0);
        (&loss * 0.2).backward();
        let sum: f64 = losses.iter().flat_map(|losses| losses.read().unwrap()).map(|(_, loss, _)| loss).sum();
        assert!((sum - loss.double_value(&[])).abs() < 1e-12);
        assert!(gradient.unwrap().allclose(&leaf.grad(), 0.0, 1e-13, false));
        assert!(total.allclose(&linear.0[0].grad(), 0.0, 1e-13, false));
    }

    #[test]
    fn classification_reads_the_last_input_and_refuses_labels() {
        let head = Head::on_logits(&[5, 2]);
        assert_eq!(
            head.target_positions(1, SequenceTargets::Class { len: 9, class: 1 }).unwrap(),
            [TargetPosition { sequence: 1, position: 8, target: 1, rank: 0 }]
        );
        assert!(head.target_positions(0, SequenceTargets::Tokens(&[1])).is_err());
        let logits = Tensor::arange(7, (Kind::Float, Device::Cpu)).view([1, 7]);
        assert_eq!(Vec::<f32>::try_from(head.choices(&logits).view(-1)).unwrap(), [5.0, 2.0]);
    }
}
