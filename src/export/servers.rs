//! What programs that serve adapters can load, and why not the rest.

use crate::model::AdapterFeature;

/// A program that loads adapters but not all of them.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) name: &'static str,
    /// The ranks that it has room for; none are given where it takes any.
    pub(super) ranks: &'static [usize],
    /// What it does not load, and what it does instead.
    pub(super) refused: &'static [(AdapterFeature, &'static str)],
}

const EMBEDDING_REASON: &str =
    "matrices beside the embedding have no common factor with those of linears: merge them, or use PEFT";

/// In a tied model the same tensor is the embedding, which must stay.
const OUTPUT_REASON: &str = "matrices beside `lm_head` are not loaded for every model: merge them, or use PEFT";

/// The rank for which vLLM has room when nothing is said.
pub(super) const VLLM_DEFAULT_RANK: usize = 16;

/// `vllm/lora/peft_helper.py` and `vllm/config/lora.py`. It reads one rank and one factor; patterns it drops without a word.
pub(super) const VLLM: Server = Server {
    name: "vLLM",
    ranks: &[1, 8, 16, 32, 64, 128, 256, 320, 512],
    refused: &[
        (AdapterFeature::Magnitudes, "it says that it does not support DoRA"),
        (AdapterFeature::BiasOfB, "it loads adapters without biases only"),
        (AdapterFeature::BaseBiases, "it loads adapters with `bias = \"none\"` only"),
        (
            AdapterFeature::Experts,
            "which experts it loads, and by which names, differs by its version and the model's quantisation",
        ),
        (AdapterFeature::Routers, "it has no place for matrices beside a router"),
        (AdapterFeature::Embedding, EMBEDDING_REASON),
        (AdapterFeature::Output, OUTPUT_REASON),
        (AdapterFeature::SavedModules, "it loads adapters without `modules_to_save` only"),
        (AdapterFeature::Classes, "it loads adapters without `modules_to_save` only, and the scores of classes are one"),
    ],
};

/// `src/llama-adapter.cpp`, which ends at a name that is no pair of A and B. A file has one `alpha`.
pub(super) const LLAMA_CPP: Server = Server {
    name: "llama.cpp",
    ranks: &[],
    refused: &[
        (AdapterFeature::Magnitudes, "it has no place for the magnitudes of DoRA"),
        (AdapterFeature::BiasOfB, "it has no place for a bias of B"),
        (AdapterFeature::BaseBiases, "it has no place for trained biases"),
        (AdapterFeature::Experts, "how it computes matrices beside those of experts differs by its version"),
        (AdapterFeature::Routers, "what it computes beside a router has not been tried"),
        (AdapterFeature::Embedding, EMBEDDING_REASON),
        (AdapterFeature::Output, OUTPUT_REASON),
        (AdapterFeature::SavedModules, "it has no place for a module that was trained in full"),
        (AdapterFeature::Classes, "it has no place for the matrix that scores classes"),
    ],
};

impl Server {
    /// What of an adapter it does not load, and why.
    pub(super) fn refusals(&self, features: &[AdapterFeature]) -> Vec<String> {
        let why = |feature| self.refused.iter().find(|(refused, _)| refused == feature).map(|(_, why)| (*why).to_owned());
        features.iter().filter_map(why).collect()
    }

    /// The smallest rank that it has room for, and an adapter of rank `r` fits in.
    pub(super) fn rank(&self, r: usize) -> Option<usize> {
        if self.ranks.is_empty() { Some(r) } else { self.ranks.iter().copied().find(|rank| *rank >= r) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_grow_to_the_next_that_there_is() {
        let ranks = [1, 2, 8, 9, 65, 257, 321, 512, 513].map(|r| VLLM.rank(r));
        let expected = [Some(1), Some(8), Some(8), Some(16), Some(128), Some(320), Some(512), Some(512), None];
        assert_eq!(ranks, expected);
        assert_eq!(LLAMA_CPP.rank(513), Some(513));
    }
}
