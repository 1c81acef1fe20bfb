//! What a recipe says of the rows of benchmarks: whose wording a prompt has, and which task's rows they are.

use super::words::words;

words! {
    /// Whose wording a prompt of LongBench v2 has.
    pub enum LongBenchPrompt {
        /// Upstream's for direct answers, as a message of the user where the model has a chat template. The reply is `The correct answer is (X)`.
        Upstream = "upstream",
        /// Upstream's in two steps, to be evaluated only: first the model thinks, then it is asked for the answer, without the text.
        UpstreamCot = "upstream-cot",
        /// Upstream's wording without the text.
        UpstreamNoContext = "upstream-no-context",
        /// That of `keys_values`: ends in `Answer:` and the beginning of the reply, which is the letter alone.
        KeysValues = "keys-values",
        /// That of lm-evaluation-harness: ends in `Answer:`, and the reply is the letter.
        LmEval = "lm-eval",
    }
}

words! {
    /// The kinds of HELMET's rows.
    pub enum HelmetFamily {
        /// Questions with passages, of which some answer them.
        Kilt = "kilt",
        /// A value by its key.
        JsonKv = "json_kv",
        /// Passages that are to be ranked.
        Msmarco = "msmarco",
        /// RULER's needles in HELMET's wording.
        Niah = "niah",
        /// Labels learned from many examples.
        Icl = "icl",
        /// Questions on stories. HELMET has them judged by a model.
        NarrativeQa = "narrativeqa",
        /// Questions on books without choices.
        InfbenchQa = "infbench_qa",
        /// Questions on books with four choices.
        InfbenchChoice = "infbench_choice",
        /// Summaries of books. HELMET has them judged by a model.
        InfbenchSum = "infbench_sum",
        /// Summaries of lawsuits. HELMET has them judged by a model.
        MultiLexsum = "multi_lexsum",
    }
}

impl HelmetFamily {
    /// Whether its prompts are messages of the user where the model has a chat template.
    pub fn is_message(self) -> bool {
        matches!(self, Self::NarrativeQa | Self::InfbenchQa | Self::InfbenchChoice | Self::InfbenchSum | Self::MultiLexsum)
    }
}
