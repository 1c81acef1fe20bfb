//! What can be wrong with a model directory, an adapter, or a request to make one.

use std::fmt;
use std::path::PathBuf;

use super::fields::ConfigFault;
use crate::units::{Exit, Failure, Fault, FaultKind, PassedFault, abridged, quoted, shape};

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A key of `config.json` is missing, out of bounds or asks for what isn't built.
    #[error("`{path}`: {fault}", path = abridged(path.display()))]
    Config {
        path: PathBuf,
        /// What is wrong with which key.
        fault: ConfigFault,
    },
    /// There are no safetensors in the directory.
    #[error("no `model.safetensors` and no `model.safetensors.index.json` in `{dir}`", dir = abridged(dir.display()))]
    NoWeights { dir: PathBuf },
    /// The index names a file that it must not name.
    #[error("`{index}` puts `{tensor}` into `{file}`: expected {expected}", index = abridged(index.display()), tensor = quoted(tensor), file = quoted(file))]
    Shard {
        index: PathBuf,
        /// The first tensor which the index puts there.
        tensor: String,
        /// The file as the index names it.
        file: String,
        expected: &'static str,
    },
    /// Tensors are missing, too many, or of the wrong shape or dtype.
    #[error("the tensors in `{dir}` don't fit {what}: {problems}", dir = abridged(dir.display()))]
    Tensors {
        dir: PathBuf,
        /// What they should fit, such as `its config.json`.
        what: &'static str,
        problems: TensorProblems,
    },
    /// A file can't be read or written, or isn't what it should be.
    #[error(transparent)]
    Passed(PassedFault),
    /// The recipe names a LoRA target that no layer has, or gives a setting to what is no target.
    #[error("unknown name `{name}` in `{key}`: {} {known}", if is_of_targets(key) { "the targets are" } else { "the layers have" }, name = quoted(name))]
    UnknownTarget {
        /// The key of `[lora]` at fault.
        key: &'static str,
        /// The name that the user wrote.
        name: String,
        /// The names that are known, in backticks.
        known: String,
        /// The known name that may be meant.
        near: Option<String>,
    },
    /// No target, a zero `r` or the like.
    #[error("`lora.{key}` is {found}, expected {expected}", found = quoted(found))]
    Lora { key: &'static str, found: String, expected: &'static str },
    /// An adapter that was trained for another head than the model has.
    #[error("the adapter was trained to predict {adapter}, and `head.kind` asks for something else")]
    OtherTask { adapter: &'static str },
    #[error("nothing of the model is trained, so there is nothing to save")]
    NothingTrained,
    /// A new model would be written over something.
    #[error("`{dir}` exists and is not empty", dir = abridged(dir.display()))]
    NotEmpty { dir: PathBuf },
    /// A recipe asks for scaled rotary embeddings that the model can't have.
    #[error("`model.rope_scaling` does not fit `{dir}`: {reason}", dir = abridged(dir.display()))]
    RopeScaling { dir: PathBuf, reason: String },
    /// What was trained has no place in the weights.
    #[error("`{linear}` can't be merged: {reason}", linear = quoted(linear))]
    NotMergeable { linear: String, reason: String },
    /// A write was stopped from outside.
    #[error("the model is not written: it was interrupted")]
    Stopped,
    /// A tokenizer from which no vocabulary can be read.
    #[error("the tokenizer is not usable: {message}", message = abridged(message))]
    Tokenizer { message: String },
}

/// Whether a key of `[lora]` sets something for the targets that another key names.
fn is_of_targets(key: &str) -> bool {
    !key.starts_with("target")
}

impl From<Fault> for ModelError {
    fn from(fault: Fault) -> Self {
        Self::Passed(PassedFault(fault))
    }
}

impl Failure for ModelError {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::NoWeights { .. } => "only safetensors are read: convert `.bin` or `.pt` weights to them first".into(),
            Self::Shard { .. } => "the index may be damaged or hostile: take the model from its source again".into(),
            Self::Tensors { problems, .. } if problems.are_mxfp4() => {
                "the experts are quantised as MXFP4, which is not unpacked here: use a version of the model in bf16".into()
            }
            Self::Tensors { .. } => "check that weights and configuration belong together and that all files are complete".into(),
            Self::UnknownTarget { near: Some(near), .. } => format!("did you mean `{near}`?"),
            Self::UnknownTarget { key, .. } if is_of_targets(key) => {
                format!("use names from that list in `lora.{key}`, or leave the name out")
            }
            Self::UnknownTarget { .. } => "use names from that list, or `target_modules = \"all-linear\"`".into(),
            Self::Lora { key, .. } => format!("correct `lora.{key}` in the recipe"),
            Self::OtherTask { .. } => {
                "an adapter of classes (`task_type` `SEQ_CLS`) goes with `head.kind = \"seq_classification\"`, any other without it".into()
            }
            Self::NotEmpty { .. } => "choose another `--out`, or empty the directory".into(),
            Self::RopeScaling { .. } => "correct `model.rope_scaling`, leave it out, or take another model".into(),
            Self::NotMergeable { .. } => "use the adapter beside its base: `--for peft`".into(),
            Self::Stopped => "start it again: nothing of it was left".into(),
            Self::Tokenizer { .. } => "give the contents of a `tokenizer.json` that has a vocabulary".into(),
            _ => return self.origin()?.hint(),
        })
    }

    fn kind(&self) -> FaultKind {
        match self {
            Self::NoWeights { .. } => FaultKind::NoWeights,
            Self::Stopped => FaultKind::Interrupted,
            Self::Lora { .. } => FaultKind::BadSetting,
            _ => self.origin().map_or(FaultKind::Other, Failure::kind),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::UnknownTarget { .. }
            | Self::Lora { .. }
            | Self::OtherTask { .. }
            | Self::NotEmpty { .. }
            | Self::RopeScaling { .. } => Exit::Usage,
            _ => self.origin().map_or(Exit::Data, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Config { fault, .. } => Some(fault),
            Self::Passed(e) => Some(e),
            _ => None,
        }
    }
}

/// One tensor that isn't as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorProblem {
    Missing {
        name: String,
    },
    Extra {
        name: String,
    },
    Shape {
        name: String,
        /// The shape it should have.
        expected: Vec<usize>,
        found: Vec<usize>,
    },
    /// It has a dtype that can't be read.
    Dtype {
        name: String,
        found: String,
    },
}

/// All problems of a file or directory; prints the first of each kind and how many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorProblems(pub Vec<TensorProblem>);

const NAMED: usize = 8;

impl TensorProblems {
    /// Whether tensors are there in blocks of 4-bit numbers with scales, as gpt-oss is published.
    fn are_mxfp4(&self) -> bool {
        let is_block =
            |problem: &TensorProblem| matches!(problem, TensorProblem::Extra { name } if name.ends_with("proj_blocks"));
        self.0.iter().any(is_block)
    }
}

impl fmt::Display for TensorProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = ["missing", "extra", "wrong shape", "unreadable dtype"];
        let mut separator = "";
        for (kind, title) in kinds.iter().enumerate() {
            let of_kind: Vec<&TensorProblem> = self.0.iter().filter(|problem| problem.kind() == kind).collect();
            if of_kind.is_empty() {
                continue;
            }
            write!(f, "{separator}{} {title} (", of_kind.len())?;
            for (i, problem) in of_kind.iter().take(NAMED).enumerate() {
                write!(f, "{}{problem}", if i == 0 { "" } else { ", " })?;
            }
            if of_kind.len() > NAMED {
                write!(f, " and {} more", of_kind.len() - NAMED)?;
            }
            f.write_str(")")?;
            separator = "; ";
        }
        Ok(())
    }
}

impl TensorProblem {
    fn kind(&self) -> usize {
        match self {
            Self::Missing { .. } => 0,
            Self::Extra { .. } => 1,
            Self::Shape { .. } => 2,
            Self::Dtype { .. } => 3,
        }
    }
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { name } | Self::Extra { name } => write!(f, "`{}`", quoted(name)),
            Self::Shape { name, expected, found } => {
                write!(f, "`{}` expected {}, found {}", quoted(name), shape(expected), shape(found))
            }
            Self::Dtype { name, found } => write!(f, "`{}` is {found}", quoted(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut_and_counted() {
        let missing = (0..20).map(|i| TensorProblem::Missing { name: format!("m{i}") });
        let shape = TensorProblem::Shape { name: "s".into(), expected: vec![2, 3], found: vec![3, 2] };
        let text = TensorProblems(missing.chain([shape]).collect()).to_string();
        assert!(text.starts_with("20 missing (`m0`, `m1`, "), "{text}");
        assert!(text.ends_with("`m7` and 12 more); 1 wrong shape (`s` expected [2, 3], found [3, 2])"), "{text}");
    }
}
