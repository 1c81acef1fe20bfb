//! GGUF files for llama.cpp and Ollama: which exports can be one, and how it is loaded.

use std::path::{Path, PathBuf};

use super::trained::{ExportTarget, Trained};
use crate::files::{self, GgufDtype, GgufFile, architecture_of};
use crate::model::{CHAT_TEMPLATE, ModelConfig};
use crate::recipe::Recipe;
use crate::units::{Fault, abridged, shell_word};

pub(super) const GGUF_MODEL: &str = "model.gguf";
pub(super) const GGUF_ADAPTER: &str = "adapter.gguf";
pub(super) const MODELFILE: &str = "Modelfile";
/// What a base in Hugging Face's format is to become, beside the adapter.
const GGUF_BASE: &str = "base.gguf";

/// How to come to a file where none is written here.
pub(super) const CONVERT: &str = "use `--for merged`, and let llama.cpp's `convert_hf_to_gguf.py` make a file of it";

#[derive(Debug)]
pub(super) struct GgufUsage {
    /// The type of a whole model's matrices; none for the adapter alone.
    whole: Option<GgufDtype>,
    for_ollama: bool,
    /// The files of the base, where it is a GGUF model.
    base: Vec<PathBuf>,
    /// The longest sequence in tokens that was trained, or else that the model is made for.
    longest: usize,
    /// Whether a chat template lies beside the adapter.
    has_template: bool,
}

impl GgufUsage {
    /// For a base in `base`; none where `target` is another form. Fails where the export cannot be a GGUF file.
    pub(super) fn of(
        trained: &Trained<'_>,
        target: ExportTarget,
        base: &Path,
        config: &ModelConfig,
    ) -> Result<Option<Self>, Fault> {
        let ExportTarget::Gguf { whole, for_ollama } = target else { return Ok(None) };
        let file = GgufFile::of_model(base)?;
        if whole.is_some() && file.is_none() {
            let message = format!("`--quantize` needs a base that is a GGUF file, and `{}` is none", abridged(base.display()));
            return Err(Fault::usage(message, CONVERT));
        }
        if whole.is_none() && architecture_of(config.model_type).is_none() {
            let message = format!("llama.cpp's names of tensors are not known here for the family `{}`", config.model_type);
            let hint = "use `--for vllm`, which writes an adapter of one factor, and let llama.cpp's `convert_lora_to_gguf.py` make a file of it";
            return Err(Fault::usage(message, hint));
        }
        let base = file.map_or_else(Vec::new, |file| file.paths().map(Path::to_owned).collect());
        let trained_at = |recipe: &Recipe| recipe.data.each().try_fold(0, |most, set| Some(set.max_seq_length?.max(most)));
        let longest = trained.recipe.and_then(trained_at).unwrap_or_else(|| config.trained_positions());
        let has_template = trained.chat_template.is_some() && whole.is_none();
        Ok(Some(Self { whole, for_ollama, base, longest, has_template }))
    }

    /// Lines of a shell; the base, a file or its folder, is told as `base`, and the export lies in `here`.
    pub(super) fn lines(&self, base: &str, here: &str) -> String {
        let (file, longest) = (|name: &str| shell_word(format!("{here}/{name}")), self.longest);
        let convert = match (self.whole, &self.base[..]) {
            (None, []) => format!(
                "# DIRECTORY: the base as a plain model in Hugging Face's format\npython convert_hf_to_gguf.py --outfile {} DIRECTORY\n",
                file(GGUF_BASE)
            ),
            _ => String::new(),
        };
        if self.for_ollama {
            return format!("{convert}ollama create trained --file {}\nollama run trained", file(MODELFILE));
        }
        let template =
            if self.has_template { format!(" --jinja --chat-template-file {}", file(CHAT_TEMPLATE)) } else { String::new() };
        let model = match (self.whole, self.base.first()) {
            (Some(_), _) => file(GGUF_MODEL),
            (None, None) => format!("{} --lora {}", file(GGUF_BASE), file(GGUF_ADAPTER)),
            (None, Some(first)) => format!("{} --lora {}", shell_word(told(base, first).display()), file(GGUF_ADAPTER)),
        };
        format!("{convert}llama-cli -m {model} -c {longest}{template}")
    }

    /// What Ollama makes a model of (its `docs/modelfile.mdx`). It cuts longer texts, by default at a length by the GPU's memory.
    pub(super) fn modelfile(&self) -> Option<String> {
        if !self.for_ollama {
            return None;
        }
        let place = |path: &PathBuf| files::absolute(path).display().to_string();
        let (files, adapter) = match (self.whole, &self.base[..]) {
            (Some(_), _) => (vec![format!("./{GGUF_MODEL}")], String::new()),
            (None, []) => (vec![format!("./{GGUF_BASE}")], format!("ADAPTER ./{GGUF_ADAPTER}\n")),
            (None, base) => (base.iter().map(place).collect(), format!("ADAPTER ./{GGUF_ADAPTER}\n")),
        };
        let from = files.join("\nFROM ");
        Some(format!("FROM {from}\n{adapter}PARAMETER num_ctx {}\n", self.longest))
    }

    /// What to do with an adapter that llama.cpp does not load.
    pub(super) fn instead(&self) -> &'static str {
        if self.base.is_empty() { CONVERT } else { "add `--quantize q8_0`, which writes the whole model" }
    }

    /// What differs from what was trained.
    pub(super) fn note(&self) -> Option<String> {
        let words =
            "trained with another chat template than the base's, which Ollama takes: write a `TEMPLATE` into the `Modelfile`";
        (self.for_ollama && self.has_template).then(|| words.to_owned())
    }
}

/// A file of a base that is told as `base`.
fn told(base: &str, file: &Path) -> PathBuf {
    let Some(name) = file.file_name() else { return base.into() };
    if Path::new(base).ends_with(name) { base.into() } else { Path::new(base).join(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(whole: Option<GgufDtype>, for_ollama: bool, base: &[&str]) -> GgufUsage {
        GgufUsage { whole, for_ollama, base: base.iter().map(PathBuf::from).collect(), longest: 64, has_template: false }
    }

    #[test]
    fn an_adapter_goes_beside_a_file_of_its_base() {
        let of_file = usage(None, false, &["m.gguf"]);
        assert_eq!(of_file.lines("m.gguf", "here"), "llama-cli -m m.gguf --lora here/adapter.gguf -c 64");
        let of_directory = usage(None, false, &[]).lines("m", "here");
        assert!(
            of_directory.contains("--outfile here/base.gguf DIRECTORY\nllama-cli -m here/base.gguf --lora "),
            "{of_directory}"
        );
        assert!(usage(None, false, &["/models/m/x.gguf"]).lines("m", ".").starts_with("llama-cli -m m/x.gguf "));
        let with_template = GgufUsage { has_template: true, ..of_file };
        assert!(with_template.lines("m.gguf", "$HOME").ends_with(" --jinja --chat-template-file '$HOME/chat_template.jinja'"));
        assert!(with_template.note().is_none() && GgufUsage { for_ollama: true, ..with_template }.note().is_some());
        assert_eq!(
            usage(Some(GgufDtype::Q8_0), false, &["m.gguf"]).lines("m.gguf", "here"),
            "llama-cli -m here/model.gguf -c 64"
        );
    }

    #[test]
    fn a_modelfile_names_what_lies_beside_it_and_the_base_by_its_place() {
        let modelfile = |whole, base| usage(whole, true, base).modelfile().unwrap();
        assert_eq!(modelfile(Some(GgufDtype::Q8_0), &["/m/m.gguf"]), "FROM ./model.gguf\nPARAMETER num_ctx 64\n");
        let of_two = "FROM /m/1.gguf\nFROM /m/2.gguf\nADAPTER ./adapter.gguf\nPARAMETER num_ctx 64\n";
        assert_eq!(modelfile(None, &["/m/1.gguf", "/m/2.gguf"]), of_two);
        assert_eq!(modelfile(None, &[]), "FROM ./base.gguf\nADAPTER ./adapter.gguf\nPARAMETER num_ctx 64\n");
        assert_eq!(usage(None, false, &[]).modelfile(), None);
        assert!(
            usage(None, true, &["m.gguf"]).lines("m.gguf", "here").starts_with("ollama create trained --file here/Modelfile\n")
        );
    }
}
