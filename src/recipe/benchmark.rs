//! What a recipe says of the rows of benchmarks: whose wording a prompt has, and which task's rows they are.

use super::words::words;

words! {
    /// Whose wording a prompt of LongBench v2 has.
    pub enum LongBenchPrompt {
        /// Upstream's for direct answers, as a message of the user where the model has a chat template. The reply is `The correct answer is (X)`.
        Upstream = "upstream",
        /// Upstream's without the text.
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
        /// Passages to be ranked.
        Msmarco = "msmarco",
        /// RULER's needles in HELMET's wording.
        Niah = "niah",
        /// Labels learned from many examples.
        Icl = "icl",
    }
}
