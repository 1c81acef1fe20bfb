//! The lines that load what was written, by the programs that it is for.

use std::path::Path;

use super::gguf::GgufUsage;
use super::trained::ExportTarget;
use crate::files::has_of_model;
use crate::units::shell_word;

/// What decides how an export is loaded.
#[derive(Debug)]
pub(super) struct Usage {
    pub(super) target: ExportTarget,
    /// How many classes it scores; none where it predicts tokens.
    pub(super) classes: Option<usize>,
    pub(super) has_tokenizer: bool,
    /// The rank for which vLLM must be given room.
    pub(super) max_rank: Option<usize>,
    pub(super) gguf: Option<GgufUsage>,
}

impl Usage {
    /// How an export for `target` is loaded, whose base lies in `base`.
    pub(super) fn of(target: ExportTarget, classes: Option<usize>, base: &Path) -> Self {
        Self { target, classes, has_tokenizer: has_of_model(base, "tokenizer.json"), max_rank: None, gguf: None }
    }

    /// Lines of Python or of a shell, each with the name of its language; the export lies in `here`.
    pub(super) fn lines(&self, base: &str, here: &str) -> Vec<(&'static str, String)> {
        // A string of JSON is one of Python.
        let [base_text, here_text] = [base, here].map(|path| serde_json::Value::from(path).to_string());
        let [base_word, here_word] = [base, here].map(shell_word);
        let class = if self.classes.is_some() { "AutoModelForSequenceClassification" } else { "AutoModelForCausalLM" };
        let (import, tokenizer) = if self.has_tokenizer {
            // Texts are trained with an end of sequence behind them, at which the class is read; tokenizers do not write it.
            let inputs = "\ninputs = tokenizer(text + tokenizer.eos_token, return_tensors=\"pt\")";
            let inputs = if self.classes.is_some() { inputs } else { "" };
            (", AutoTokenizer", format!("\ntokenizer = AutoTokenizer.from_pretrained({here_text}){inputs}"))
        } else {
            ("", String::new())
        };
        let transformers = format!("from transformers import {class}{import}\n\n");
        let labels = self.classes.map_or_else(String::new, |count| format!(", num_labels={count}"));
        let room = self.max_rank.map_or_else(String::new, |rank| format!(" --max-lora-rank {rank}"));
        match self.target {
            ExportTarget::Peft => vec![(
                "python",
                format!(
                    "from peft import PeftModel\n{transformers}base = {class}.from_pretrained({base_text}{labels})\n\
                     model = PeftModel.from_pretrained(base, {here_text}){tokenizer}"
                ),
            )],
            ExportTarget::Vllm => {
                vec![("sh", format!("vllm serve {base_word} --enable-lora{room} --lora-modules adapter={here_word}"))]
            }
            ExportTarget::Gguf { .. } => self.gguf.iter().map(|gguf| ("sh", gguf.lines(base, here))).collect(),
            ExportTarget::Merged => {
                let convert = format!("python convert_hf_to_gguf.py --outfile model.gguf {here_word}");
                let served = format!("vllm serve {here_word}\n\n{convert}\nllama-cli -m model.gguf");
                let python = format!("{transformers}model = {class}.from_pretrained({here_text}){tokenizer}");
                [("python", python), ("sh", served)].into_iter().take(if self.classes.is_some() { 1 } else { 2 }).collect()
            }
        }
    }
}
