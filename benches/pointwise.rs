//! What a layer does number by number: norms, gates and rotations, each as the one operation that it is, beside the chain of libtorch's
//! operations under autograd.
//!
//! `cargo bench --bench pointwise` prints nanoseconds of CPU time for each number, forward and backward, on one thread, at the shapes of
//! a chunk of `recipes/bench/step.toml` and at those of a larger model.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench that cannot go on fails")]

mod shapes;

use kvtune::native::gradients_of;
use kvtune::ops::frequencies::RopeSpec;
use kvtune::ops::pointwise::swiglu;
use kvtune::ops::rms_norm::rms_norm;
use kvtune::ops::rope::Rotation;
use kvtune::report::table::Table;
use shapes::{cpu_now, median};
use tch::{Device, Kind, Tensor, no_grad, with_grad};

type Operation = Box<dyn Fn(&[Tensor]) -> Tensor>;

/// An operation, as it is and as a chain, on leaves.
struct Case {
    name: String,
    leaves: Vec<Tensor>,
    fused: Operation,
    chain: Operation,
}

/// CPU-seconds of the forward without autograd, and of a backward.
fn timed(leaves: &[Tensor], operation: &dyn Fn(&[Tensor]) -> Tensor) -> [f64; 2] {
    let wanted: Vec<&Tensor> = leaves.iter().filter(|leaf| leaf.requires_grad()).collect();
    let seed = no_grad(|| operation(leaves).ones_like());
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for _ in 0..200 {
        let began = cpu_now();
        drop(no_grad(|| operation(leaves)));
        forward.push(cpu_now() - began);
        let y = with_grad(|| operation(leaves));
        let began = cpu_now();
        drop(gradients_of(&[&y], &[&seed], &wanted).unwrap());
        backward.push(cpu_now() - began);
    }
    [median(forward), median(backward)]
}

fn norm_chain(x: &Tensor, weight: &Tensor) -> Tensor {
    let wide = x.to_kind(Kind::Float);
    let root = (wide.square().mean_dim([-1].as_slice(), true, None) + 1e-6).rsqrt();
    (wide * root).to_kind(x.kind()) * weight
}

fn rotation_chain(x_bhnd: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let halves = x_bhnd.chunk(2, -1);
    Tensor::cat(&[&halves[0] * cos - &halves[1] * sin, &halves[1] * cos + &halves[0] * sin], -1)
}

fn cases(kind: Kind, [tokens, hidden, inner, heads, width]: [i64; 5]) -> Vec<Case> {
    let new = |size: &[i64]| Tensor::randn(size, (kind, Device::Cpu));
    let leaf = |size: &[i64]| new(size).set_requires_grad(true);
    let position = Tensor::arange(tokens, (Kind::Int64, Device::Cpu));
    let rotation = Rotation::at(&position, &RopeSpec::plain(1e4, width as usize).frequencies(&[], kind, Device::Cpu), kind);
    let (cos, sin) = (new(&[1, 1, tokens, width / 2]), new(&[1, 1, tokens, width / 2]));
    let norm = |name: &str, weight: Tensor| Case {
        name: format!("{name} of {tokens} × {hidden}"),
        leaves: vec![leaf(&[1, tokens, hidden]), weight],
        fused: Box::new(|leaves| rms_norm(&leaves[0], &leaves[1], 1e-6)),
        chain: Box::new(|leaves| norm_chain(&leaves[0], &leaves[1])),
    };
    vec![
        norm("norm", new(&[hidden])),
        norm("norm with its weight trained", leaf(&[hidden])),
        Case {
            name: format!("gate of {tokens} × {inner}"),
            leaves: vec![leaf(&[1, tokens, inner]), leaf(&[1, tokens, inner])],
            fused: Box::new(|leaves| swiglu(&leaves[0], &leaves[1])),
            chain: Box::new(|leaves| leaves[0].silu() * &leaves[1]),
        },
        Case {
            name: format!("rotation of {tokens} × {heads} × {width}"),
            leaves: vec![leaf(&[1, tokens, heads, width])],
            fused: Box::new(move |leaves| rotation.apply(&leaves[0].transpose(1, 2))),
            chain: Box::new(move |leaves| rotation_chain(&leaves[0].transpose(1, 2), &cos, &sin)),
        },
    ]
}

fn main() {
    tch::set_num_threads(1);
    println!("\nns of CPU time for each number, one thread; in brackets how many times as long the chain takes:");
    let mut table = Table::new(&["what", "dtype", "forward", "chain", "backward", "chain"]);
    for kind in [Kind::Float, Kind::BFloat16] {
        for shape in [[256, 256, 688, 8, 32], [1024, 1536, 8960, 12, 128]] {
            for case in cases(kind, shape) {
                let numbers = case.leaves[0].numel() as f64;
                let (ours, chain) = (timed(&case.leaves, &case.fused), timed(&case.leaves, &case.chain));
                let mut cells = vec![case.name, if kind == Kind::Float { "f32" } else { "bf16" }.to_owned()];
                for half in 0..2 {
                    cells.push(format!("{:.2}", 1e9 * ours[half] / numbers));
                    cells.push(format!("{:.2} ({:.1})", 1e9 * chain[half] / numbers, chain[half] / ours[half]));
                }
                table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
            }
        }
    }
    println!("{table}");
}
