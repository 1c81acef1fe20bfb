//! The lines that load what was written, by the programs that it is for.

use std::path::Path;

use super::trained::ExportTarget;
use crate::files::has_of_model;

/// The file in an export for llama.cpp and its kin.
pub(super) const GGUF_MODEL: &str = "model.gguf";

/// What decides how an export is loaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    pub(super) target: ExportTarget,
    /// How many classes it scores; none where it predicts tokens.
    pub(super) classes: Option<usize>,
    pub(super) has_tokenizer: bool,
    /// The rank for which vLLM must be given room.
    pub(super) max_rank: Option<usize>,
}

impl Usage {
    /// How an export for `target` is loaded, whose base lies in `base`.
    pub(super) fn of(target: ExportTarget, classes: Option<usize>, base: &Path) -> Self {
        Self { target, classes, has_tokenizer: has_of_model(base, "tokenizer.json"), max_rank: None }
    }

    /// Lines of Python or of a shell, each with the name of its language; the export lies in `here`.
    pub(super) fn lines(&self, base: &str, here: &str) -> Vec<(&'static str, String)> {
        let class = if self.classes.is_some() { "AutoModelForSequenceClassification" } else { "AutoModelForCausalLM" };
        let (import, tokenizer) = if self.has_tokenizer {
            (", AutoTokenizer", format!("\ntokenizer = AutoTokenizer.from_pretrained({here:?})"))
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
                    "from peft import PeftModel\n{transformers}base = {class}.from_pretrained({base:?}{labels})\n\
                     model = PeftModel.from_pretrained(base, {here:?}){tokenizer}"
                ),
            )],
            ExportTarget::Vllm => {
                vec![("sh", format!("vllm serve {base:?} --enable-lora{room} --lora-modules adapter={here:?}"))]
            }
            ExportTarget::LlamaCpp => {
                // The converter reads a configuration in Hugging Face's form.
                let is_gguf = Path::new(base).extension().is_some_and(|end| end == "gguf");
                let note = "# DIRECTORY: the model in Hugging Face's form that the GGUF file was made of\n";
                let (note, from, model) = if is_gguf { (note, "DIRECTORY", base) } else { ("", base, "base.gguf") };
                let convert = format!("{note}python convert_lora_to_gguf.py --base {from:?} --outfile adapter.gguf {here:?}");
                vec![("sh", format!("{convert}\nllama-cli -m {model:?} --lora adapter.gguf"))]
            }
            ExportTarget::Gguf(_) => vec![("sh", format!("llama-cli -m {here:?}/{GGUF_MODEL}"))],
            ExportTarget::Merged => {
                let convert = format!("python convert_hf_to_gguf.py --outfile model.gguf {here:?}");
                let served = format!("vllm serve {here:?}\n\n{convert}\nllama-cli -m model.gguf");
                let python = format!("{transformers}model = {class}.from_pretrained({here:?}){tokenizer}");
                [("python", python), ("sh", served)].into_iter().take(if self.classes.is_some() { 1 } else { 2 }).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_of_an_adapter_for_llama_cpp_may_be_the_file_itself() {
        let usage = Usage { target: ExportTarget::LlamaCpp, classes: None, has_tokenizer: true, max_rank: None };
        let lines = |base: &str| usage.lines(base, "here").remove(0).1;
        let of_file = lines("m.gguf");
        assert!(
            of_file.contains("--base \"DIRECTORY\"") && of_file.ends_with("llama-cli -m \"m.gguf\" --lora adapter.gguf"),
            "{of_file}"
        );
        assert!(lines("m").starts_with("python convert_lora_to_gguf.py --base \"m\" "));
    }
}
