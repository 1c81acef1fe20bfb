//! The guide `docs/guides/add-a-policy.md`: its policy is this directory's, kept to the contract, and proved.

use kvtune::cache;
use kvtune::recipe::{BufferKind, PolicyRecipe, Storage};

use super::scenes::scenes;
use super::shelf::{self, EXAMPLE};
use super::simulated::check;
use crate::support::case::{Case, EXACT, PLAIN, compare};
use crate::support::{batch, context, engine_with, model, settings};

/// What the guide's policy keeps, as its line in the registry says.
const KEEPS: &str = "tokens of long values, and the first few";

const GUIDE: &str = include_str!("../../docs/guides/add-a-policy.md");

/// What stands between lines of three backticks, by the word behind the first.
fn blocks(word: &str) -> Vec<&'static str> {
    let fence = format!("```{word}\n");
    GUIDE.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

#[test]
fn the_guide_shows_the_policy_that_is_tested_here() {
    let [shown, trait_lines @ ..] = &blocks("rust")[..] else { panic!("no rust block") };
    assert_eq!(*shown, include_str!("shelf/value_norm.rs"));
    assert!(!trait_lines.is_empty());
}

#[test]
fn the_guide_names_every_method_and_every_trait() {
    // What stands between a keyword and a mark in the first item of a source that begins with `item`.
    let named = |source: &'static str, item: &str, keyword: &'static str, mark: char| -> Vec<&str> {
        let (_, body) = source.split_once(item).unwrap();
        let body = body.split("\n}").next().unwrap();
        body.split(keyword).skip(1).map(|rest| rest.split(mark).next().unwrap()).collect()
    };
    let methods = named(include_str!("../../src/cache/policy.rs"), "pub trait Policy", "    fn ", '(');
    assert!(methods.contains(&"score") && methods.len() == 4, "{methods:?}");
    let traits = named(include_str!("../../src/cache/policy.rs"), "pub struct PolicyTraits", "    pub ", ':');
    assert!(traits.contains(&"grace") && traits.len() >= 8, "{traits:?}");
    for name in methods.into_iter().chain(traits) {
        assert!(GUIDE.contains(&format!("`{name}`")), "the guide does not name `{name}`");
    }
}

#[test]
fn the_guides_lines_are_like_those_of_their_files() {
    let lines: Vec<&str> = blocks("rust")[1..].iter().flat_map(|block| block.lines().map(str::trim)).collect();
    // The line of a policy that is there already, with this one's names and words.
    for (file, source, name, [there, here]) in [
        ("registry.rs", include_str!("../../src/cache/policies/registry.rs"), "knorm", ["keys of small norm", KEEPS]),
        ("scenes.rs", include_str!("scenes.rs"), "streaming-llm", [""; 2]),
        ("support/grid.rs", include_str!("../support/grid.rs"), "streaming-llm", [""; 2]),
    ] {
        let renamed = |line: &str| {
            let line = line.trim().replace(&format!("\"{name}"), &format!("\"{EXAMPLE}")).replace(name, "value_norm");
            if there.is_empty() { line } else { line.replace(there, here) }
        };
        let own: Vec<String> = source.lines().filter(|line| line.contains(name)).map(renamed).collect();
        assert!(own.iter().any(|line| lines.contains(&line.as_str())), "no line of the guide is like one of {file}: {own:#?}");
    }
}

#[test]
fn the_guides_policy_keeps_its_promises() {
    tch::set_num_threads(1);
    for (p, params) in ["", "init_grace_tokens = 0", "init_grace_tokens = 2"].into_iter().enumerate() {
        for buffer in [BufferKind::Plain, BufferKind::Int8, BufferKind::Int4] {
            for scene in scenes((p, (EXAMPLE, params)), (buffer, p == 1), Storage::Preallocated) {
                assert_eq!(check(&scene), (0, false), "{scene:?}: it asks for no attention, and all is foreseen");
            }
        }
    }
}

#[test]
fn the_guides_policy_is_proved() {
    for (name, params) in [("as it is", ""), ("without sinks", "init_grace_tokens = 0")] {
        let case = Case { name, lengths: &[44, 37, 9], cache: &[18, 15, 22], ..PLAIN };
        let model = model(&case);
        let recipe = PolicyRecipe::with_params(EXAMPLE, toml::from_str(params).unwrap());
        let settings = settings(&case, &model).with_policy(EXAMPLE, |length| shelf::build(&recipe, length)).unwrap();
        let found = compare(&engine_with(&case, settings), &model, &batch(&case), context(&case)).unwrap();
        assert!(found.worst() <= EXACT, "{name}: {:.2e}", found.worst());
        assert!(found.untested().is_empty(), "{name}");
    }
}

#[test]
fn the_guides_policy_refuses_what_it_says() {
    let recipe = PolicyRecipe::with_params(EXAMPLE, toml::from_str("init_grace_tokens = 18").unwrap());
    let error = shelf::build(&recipe, 18).unwrap_err().to_string();
    assert!(error.contains("`init_grace_tokens` = 18 leaves no slot to evict: `cache_length` is 18"), "{error}");
    // The engine checks a policy that it is given as one that it builds.
    let (case, recipe) = (PLAIN, PolicyRecipe::with_params(EXAMPLE, toml::from_str("init_grace_tokens = 14").unwrap()));
    let error =
        settings(&case, &model(&case)).with_policy(EXAMPLE, |length| shelf::build(&recipe, length)).unwrap_err().to_string();
    assert!(error.contains("the largest that works is 4"), "{error}");
    let longer = Case { name: "chunks that are drawn", is_randomized: true, cache: &[18], chunk: 4, ..PLAIN };
    let error =
        settings(&longer, &model(&longer)).with_policy(EXAMPLE, |length| shelf::build(&recipe, length)).unwrap_err().to_string();
    assert!(error.contains("makes chunks of up to 6 tokens, as their sizes vary; layer 0 with `cache_length` = 18"), "{error}");
    let quantised = |length| cache::build(&PolicyRecipe::named("qh2o"), length);
    let error = settings(&case, &model(&case)).with_policy("mine", quantised).unwrap_err();
    assert!(error.to_string().contains("the policy `mine` weighs the errors of quantisation"), "{error}");
}

#[test]
fn the_guide_is_linked_from_where_people_begin() {
    for (file, text) in
        [("README", include_str!("../../README.md")), ("CONTRIBUTING", include_str!("../../docs/CONTRIBUTING.md"))]
    {
        assert!(text.contains("guides/add-a-policy.md"), "{file} does not link the guide");
        let is_docs = file == "CONTRIBUTING";
        let reference = if is_docs { "(reference/policies.md)" } else { "(docs/reference/policies.md)" };
        assert!(text.contains(reference), "{file} does not link the table of policies");
    }
}
