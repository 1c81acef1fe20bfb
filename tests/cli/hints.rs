//! Every error that a user can cause has a way out: a walk over the variants of all rooms, counted against the source.

use std::collections::BTreeSet;
use std::fmt::{Debug, Display};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};

use kvtune::checkpoint::CheckpointError;
use kvtune::engine::EngineError;
use kvtune::generation::{GenerationError, RuleFault};
use kvtune::head::HeadError;
use kvtune::model::{ConfigFault, ModelError, TensorProblem, TensorProblems};
use kvtune::optim::OptimError;
use kvtune::recipe::OpenKey;
use kvtune::train::TrainError;
use kvtune::units::Failure;

/// Names of an enum's variants as the source has them, without those that pass another room's error on.
fn variants(file: &str, name: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
    let source = syn::parse_file(&fs::read_to_string(path).unwrap()).unwrap();
    let found = source.items.iter().find_map(|item| match item {
        syn::Item::Enum(item) if item.ident == name => Some(item),
        _ => None,
    });
    let is_own = |variant: &&syn::Variant| {
        let mut errors = variant.attrs.iter().filter(|attribute| attribute.path().is_ident("error"));
        !errors.any(|attribute| attribute.parse_args::<syn::Ident>().is_ok_and(|word| word == "transparent"))
    };
    found.unwrap_or_else(|| panic!("{name} in {file}")).variants.iter().filter(is_own).map(|v| v.ident.to_string()).collect()
}

/// Every variant is among the samples, which have a hint, or among those that no user can cause.
fn walk<E: Debug + Display + Failure>(place: (&str, &str), not_the_users: &[&str], samples: &[E]) {
    let mut seen: BTreeSet<String> = not_the_users.iter().map(ToString::to_string).collect();
    for sample in samples {
        let debug = format!("{sample:?}");
        seen.insert(debug.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned());
        let hint = sample.hint().unwrap_or_else(|| panic!("no hint: {sample}"));
        assert!(!hint.is_empty() && !hint.ends_with('.') && !hint.contains('\n'), "{hint}");
        assert!(!hint.starts_with(char::is_uppercase), "{hint}");
        let text = sample.to_string();
        assert!(!text.is_empty() && !text.ends_with('.') && !text.starts_with(char::is_uppercase), "{text}");
    }
    assert_eq!(seen, variants(place.0, place.1), "{}: each variant needs a sample here", place.1);
}

fn path() -> PathBuf {
    "x".into()
}

fn text() -> String {
    "x".into()
}

#[test]
fn checkpoint() {
    let samples = [
        CheckpointError::Unfinished { dir: path() },
        CheckpointError::Damaged { path: path(), what: text() },
        CheckpointError::Contradiction { path: path(), what: text() },
        CheckpointError::Format { dir: path(), found: 2, expected: 1 },
        CheckpointError::NotGathered { reason: text(), hint: Some(text()) },
        CheckpointError::None { run: path(), skipped: vec![(path(), CheckpointError::Unfinished { dir: path() })] },
    ];
    walk(("checkpoint/error.rs", "CheckpointError"), &[], &samples);
}

#[test]
fn engine() {
    let longest =
        |largest| EngineError::LongestChunk { chunk_size: 14, longest: 21, layer: 0, cache_length: 18, allowed: 15, largest };
    let samples = [
        EngineError::Open { keys: vec![OpenKey::UndoLog] },
        longest(0),
        longest(10),
        EngineError::SessionIds { found: (1, 0), expected: 2 },
        EngineError::SessionLength { tokens: 9, max_tokens: 8 },
        EngineError::OtherSession { expected: text(), found: text() },
        EngineError::EmptySequence,
        EngineError::NoTargets,
        EngineError::OutOfMemory(text()),
        EngineError::Misplaced { layer: 0, stands: 1, expected: 2 },
        EngineError::GivenUp,
    ];
    walk(("engine/error.rs", "EngineError"), &["Torch"], &samples);
}

#[test]
fn model() {
    let problems = TensorProblems(vec![TensorProblem::Missing { name: text() }]);
    let faults = [
        ConfigFault::UnknownName { key: text(), found: None, known: vec!["qwen2"] },
        ConfigFault::UnknownKey { key: text(), known: vec!["factor"] },
        ConfigFault::Missing { key: text(), expected: "a number" },
        ConfigFault::OutOfRange { key: text(), expected: text(), found: text() },
        ConfigFault::Unsupported { key: text(), found: text(), supported: text() },
    ];
    let samples = [
        ModelError::Config { path: path(), fault: faults[0].clone() },
        ModelError::NoWeights { dir: path() },
        ModelError::Shard { index: path(), tensor: text(), file: text(), expected: "a file" },
        ModelError::Tensors { dir: path(), what: "its `config.json`", problems },
        ModelError::UnknownTarget { key: "target_modules", name: text(), known: text(), near: None },
        ModelError::Lora { key: "r", found: text(), expected: "a number" },
        ModelError::NotEmpty { dir: path() },
        ModelError::RopeScaling { dir: path(), reason: text() },
        ModelError::NotMergeable { linear: text(), reason: text() },
        ModelError::OtherTask { adapter: "classes" },
        ModelError::Stopped,
        ModelError::Tokenizer { message: text() },
    ];
    walk(("model/error.rs", "ModelError"), &["NothingTrained"], &samples);
    walk(("model/fields.rs", "ConfigFault"), &[], &faults);
}

#[test]
fn head_and_optimiser() {
    let wrong = HeadError::WrongTargets { head: "next_token", expected: "labels", found: "a class" };
    walk(("head/error.rs", "HeadError"), &["Torch"], &[wrong]);
    walk(("optim/optimizer.rs", "OptimError"), &[], &[OptimError::OtherState(text())]);
}

#[test]
fn training() {
    let samples = [
        TrainError::OutOfMemory { reason: text(), advice: None },
        TrainError::OutOfMemory { reason: text(), advice: Some(text()) },
        TrainError::NotFinite { step: 1, what: "the loss".into(), samples: vec![1] },
        TrainError::LossTooHigh { step: 1, loss: 9.0, most: 8.0 },
        TrainError::UpdateNotFinite { step: 1, name: text() },
    ];
    walk(("train/error.rs", "TrainError"), &[], &samples);
}

#[test]
fn generation() {
    let fault = RuleFault { key: text(), found: text(), expected: "a number" };
    let samples = [
        GenerationError::Config { path: path(), fault },
        GenerationError::EmptyPrompt,
        GenerationError::UnknownToken { token: 9, vocab_size: 8 },
        GenerationError::TooLong { prompt: 3, new_tokens: 2, longest: 4 },
        GenerationError::NothingLikely,
        GenerationError::RotatesByLength,
        GenerationError::NoText,
        GenerationError::NotASession { path: path(), reason: text() },
        GenerationError::OtherSession { path: path(), what: text(), expected: text(), found: text() },
    ];
    walk(("generation/error.rs", "GenerationError"), &[], &samples);
}

/// Texts of `Fault`s, as the source has them.
#[derive(Default)]
struct FaultTexts(Vec<String>);

impl<'ast> Visit<'ast> for FaultTexts {
    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        let is_fault = |path: &syn::ExprPath| {
            path.path.segments.first().is_some_and(|first| first.ident == "Fault" || first.ident == "RowFault")
        };
        if matches!(&*call.func, syn::Expr::Path(path) if is_fault(path)) {
            self.0.extend(call.args.iter().filter_map(literal));
        }
        visit::visit_expr_call(self, call);
    }

    /// A hint that is named before it is given.
    fn visit_local(&mut self, local: &'ast syn::Local) {
        let is_hint = matches!(&local.pat, syn::Pat::Ident(name) if name.ident == "hint");
        if let Some(init) = local.init.as_ref().filter(|_| is_hint) {
            self.0.extend(literal(&init.expr));
        }
        visit::visit_local(self, local);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if call.method == "with_hint" {
            self.0.extend(call.args.iter().filter_map(literal));
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// A text, or the pattern of a formatted one.
fn literal(argument: &syn::Expr) -> Option<String> {
    match argument {
        syn::Expr::Lit(literal) => match &literal.lit {
            syn::Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        syn::Expr::Macro(call) if call.mac.path.is_ident("format") => {
            let text = call.mac.tokens.clone().into_iter().next()?.to_string();
            syn::parse_str::<syn::LitStr>(&text).ok().map(|text| text.value())
        }
        _ => None,
    }
}

#[test]
fn faults_are_told_as_all_errors_are() {
    let mut found = FaultTexts::default();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/**/*.rs");
    for path in glob::glob(source.to_str().unwrap()).unwrap() {
        found.visit_file(&syn::parse_file(&fs::read_to_string(path.unwrap()).unwrap()).unwrap());
    }
    assert!(found.0.len() > 80, "{}", found.0.len());
    for text in found.0 {
        assert!(!text.is_empty() && !text.ends_with('.') && !text.starts_with(char::is_uppercase), "{text}");
    }
}
