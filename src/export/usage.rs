//! The lines that load what was written, by the programs that it is for.

use std::path::Path;

use super::trained::{ExportTarget, GgufExport};
use crate::files::has_of_model;

/// The file of a model, and of an adapter alone, in an export for llama.cpp and its kin.
pub(super) const GGUF_MODEL: &str = "model.gguf";
pub(super) const GGUF_ADAPTER: &str = "adapter.gguf";
/// What Ollama makes a model of.
pub(super) const MODELFILE: &str = "Modelfile";

/// What decides how an export is loaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    pub(super) target: ExportTarget,
    /// How many classes it scores; none where it predicts tokens.
    pub(super) classes: Option<usize>,
    pub(super) has_tokenizer: bool,
    /// The rank for which vLLM must be given room.
    pub(super) max_rank: Option<usize>,
    /// The longest sequence in tokens, as it was trained with or as the model is made for it.
    pub(super) longest: usize,
}

impl Usage {
    /// How an export for `target` is loaded, whose base lies in `base`.
    pub(super) fn of(target: ExportTarget, classes: Option<usize>, base: &Path) -> Self {
        Self { target, classes, has_tokenizer: has_of_model(base, "tokenizer.json"), max_rank: None, longest: 0 }
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
        let longest = self.longest;
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
            ExportTarget::Gguf(GgufExport { has_modelfile: true, .. }) => {
                vec![("sh", format!("ollama create trained --file {here:?}/{MODELFILE}\nollama run trained"))]
            }
            ExportTarget::Gguf(GgufExport { dtype: Some(_), .. }) => {
                vec![("sh", format!("llama-cli -m {here:?}/{GGUF_MODEL} -c {longest}"))]
            }
            ExportTarget::Gguf(_) => {
                let is_gguf = is_gguf(Path::new(base));
                let convert = format!("python convert_hf_to_gguf.py --outfile base.gguf {base:?}\n");
                let (convert, model) = if is_gguf { (String::new(), base) } else { (convert, "base.gguf") };
                vec![("sh", format!("{convert}llama-cli -m {model:?} --lora {here:?}/{GGUF_ADAPTER} -c {longest}"))]
            }
            ExportTarget::Merged => {
                let convert = format!("python convert_hf_to_gguf.py --outfile model.gguf {here:?}");
                let served = format!("vllm serve {here:?}\n\n{convert}\nllama-cli -m model.gguf");
                let python = format!("{transformers}model = {class}.from_pretrained({here:?}){tokenizer}");
                [("python", python), ("sh", served)].into_iter().take(if self.classes.is_some() { 1 } else { 2 }).collect()
            }
        }
    }
    /// What Ollama makes a model of (`docs/modelfile.mdx`), for a base in `base`. Ollama cuts longer texts at 4 096 tokens, if nothing is said.
    pub(super) fn modelfile(&self, base: &Path) -> Option<String> {
        let ExportTarget::Gguf(GgufExport { dtype, has_modelfile: true }) = self.target else { return None };
        let base = std::path::absolute(base).unwrap_or_else(|_| base.to_owned());
        let from = match dtype {
            Some(_) => format!("./{GGUF_MODEL}"),
            None => format!("{}\nADAPTER ./{GGUF_ADAPTER}", base.display()),
        };
        Some(format!("FROM {from}\nPARAMETER num_ctx {}\n", self.longest))
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::GgufDtype;

    fn usage(dtype: Option<GgufDtype>, has_modelfile: bool) -> Usage {
        let target = ExportTarget::Gguf(GgufExport { dtype, has_modelfile });
        Usage { target, classes: None, has_tokenizer: true, max_rank: None, longest: 64 }
    }

    #[test]
    fn an_adapter_goes_beside_a_file_of_its_base() {
        let lines = |base: &str| usage(None, false).lines(base, "here").remove(0).1;
        assert_eq!(lines("m.gguf"), "llama-cli -m \"m.gguf\" --lora \"here\"/adapter.gguf -c 64");
        let of_directory = lines("m");
        assert!(of_directory.starts_with("python convert_hf_to_gguf.py --outfile base.gguf \"m\"\nllama-cli -m \"base.gguf\""));
    }

    #[test]
    fn a_modelfile_names_what_lies_beside_it_and_the_base_by_its_place() {
        let base = Path::new("/models/m.gguf");
        let whole = usage(Some(GgufDtype::Q8_0), true);
        assert_eq!(whole.modelfile(base).unwrap(), "FROM ./model.gguf\nPARAMETER num_ctx 64\n");
        let adapter = "FROM /models/m.gguf\nADAPTER ./adapter.gguf\nPARAMETER num_ctx 64\n";
        assert_eq!(usage(None, true).modelfile(base).unwrap(), adapter);
        assert_eq!(usage(None, false).modelfile(base), None);
        assert!(whole.lines("m.gguf", "here")[0].1.starts_with("ollama create trained --file \"here\"/Modelfile"));
    }
}
