//! The floor plan in code: which room may import which, and how large a file may grow. `docs/ARCHITECTURE.md` explains it.

mod circles;
mod reading;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use syn::buffer::{Cursor, TokenBuffer};
use syn::visit::{self, Visit};

/// The rooms that a room may import.
enum Allowed {
    Only(&'static [&'static str]),
    /// All rows above, but these.
    AboveBut(&'static [&'static str]),
}
use Allowed::{AboveBut, Only};

/// Every room from the ground up; a room imports only from rows above its own.
const ROOMS: &[(&str, Allowed)] = &[
    ("units", Only(&[])),
    ("native", Only(&[])),
    // A memory map is unsafe to make, so `native` makes it.
    ("files", Only(&["units", "native"])),
    ("report", Only(&["units", "files", "native"])),
    ("ops", Only(&["units", "native"])),
    ("metrics", Only(&["units"])),
    // A recipe names metrics, and is refused at the line that names one that there is not.
    ("recipe", Only(&["units", "metrics", "files"])),
    // How a store rounds is a word of a recipe.
    ("store", Only(&["units", "ops", "recipe", "files", "native"])),
    ("dist", Only(&["units", "native"])),
    // A prompt is stripped as the benchmark that it comes from does it, and so is its answer.
    // What foreign patterns may take of memory and time is bounded below, where memory is allocated.
    ("data", Only(&["units", "metrics", "recipe", "files", "native"])),
    ("head", Only(&["units", "recipe", "ops", "native"])),
    ("cache", Only(&["units", "recipe", "ops", "store", "files", "native"])),
    ("model", Only(&["units", "recipe", "ops", "store", "files", "native"])),
    ("optim", Only(&["units", "recipe", "store", "native"])),
    ("checkpoint", Only(&["units", "recipe", "files", "store", "model", "optim", "native"])),
    ("engine", Only(&["units", "recipe", "data", "ops", "store", "model", "cache", "head", "native"])),
    ("plan", Only(&["units", "recipe", "data", "ops", "store", "head", "cache", "model", "optim", "engine", "native"])),
    ("measure", Only(&["units", "report", "recipe", "data", "store", "model", "engine", "plan", "native"])),
    ("verify", Only(&["units", "recipe", "data", "ops", "store", "model", "cache", "head", "engine", "files", "native"])),
    ("generation", Only(&["units", "recipe", "data", "ops", "store", "files", "model", "cache", "engine", "native"])),
    // The cache is written with a test of whoever runs it, which the engine and the proof's walk record.
    ("export", Only(&["units", "report", "recipe", "data", "files", "store", "checkpoint", "model", "head", "engine", "verify"])),
    ("eval", AboveBut(&["optim", "verify"])),
    ("train", AboveBut(&[])),
    ("serve", Only(&["units", "report", "recipe", "data", "model", "engine", "generation", "native"])),
    // What others have written, read again for people.
    ("inspect", Only(&["units", "files", "report", "recipe", "cache", "checkpoint", "verify", "eval", "train"])),
    ("cli", AboveBut(&[])),
    ("lib", Only(&[])),
    // The allocator is chosen where the program is.
    ("main", Only(&["cli", "native"])),
];

/// Whether the plan lets `room` import `other`.
fn may_import(room: &str, other: &str) -> bool {
    let row = |name| ROOMS.iter().position(|(room, _)| *room == name);
    let (Some(at), Some(below)) = (row(room), row(other)) else { return false };
    match &ROOMS[at].1 {
        Only(rooms) => rooms.contains(&other),
        AboveBut(rooms) => below < at && !rooms.contains(&other),
    }
}

const NO_ROOM: &[&str] = &["utils", "util", "common", "base", "helpers", "helper", "misc"];
const LINES_OF_A_FILE: usize = 400;
const LINES_OF_A_DOOR: usize = 100;

#[test]
fn every_import_goes_down() {
    assert_clean(violations);
}

#[test]
fn every_file_keeps_its_budget() {
    assert_clean(over_budget);
}

#[test]
fn the_plan_itself_goes_down() {
    for (at, (room, allowed)) in ROOMS.iter().enumerate() {
        let (Only(others) | AboveBut(others)) = allowed;
        for other in *others {
            assert!(
                ROOMS[..at].iter().any(|(name, _)| name == other),
                "the row of `{room}` names `{other}`, which is not above it"
            );
        }
    }
}

/// One forbidden line of each kind, and beside it the words that the complaint must hold.
#[test]
fn each_kind_of_forbidden_line_is_seen() {
    for (file, source, complaint) in [
        ("ops/rope.rs", "use crate::model::Model;", "`ops` may not import `model`"),
        ("ops/rope.rs", "use crate::{units::Bytes, cache::{slots, undo}};", "`ops` may not import `cache`"),
        ("ops/rope.rs", "use crate::{model as m, units};", "`ops` may not import `model`"),
        ("ops/rope.rs", "fn f() { let x = crate::engine::gradients(); }", "`ops` may not import `engine`"),
        ("ops/rope.rs", "fn f(x: &crate::engine::Engine<'_>) {}", "`ops` may not import `engine`"),
        ("ops/rope.rs", "impl crate::model::Attend for X {}", "`ops` may not import `model`"),
        ("ops/rope.rs", "fn f() { for x in y { if let crate::head::A(_) = x {} } }", "`ops` may not import `head`"),
        ("ops/rope.rs", "use super::super::model::Model;", "`ops` may not import `model`"),
        ("ops/mod.rs", "use super::model::Model;", "`ops` may not import `model`"),
        ("cache/policies/h2o.rs", "type X = super::super::super::head::Head;", "`cache` may not import `head`"),
        (
            "cache/policies/h2o.rs",
            "mod tests { mod deep { use super::super::super::super::super::head; } }",
            "`cache` may not import `head`",
        ),
        ("units.rs", "use super::files::atomic;", "`units` may not import `files`"),
        ("ops/rope.rs", "fn f() { println!(\"{}\", crate::model::depth()); }", "`ops` may not import `model`"),
        ("ops/rope.rs", "fn f() { vec![(1, [super::super::model::depth()])]; }", "`ops` may not import `model`"),
        ("ops/rope.rs", "macro_rules! m { () => { use $crate::{units, model::Model}; } }", "`ops` may not import `model`"),
        ("ops/rope.rs", "fn f() { crate::model::m!(); }", "`ops` may not import `model`"),
        ("ops/rope.rs", "#[derive(crate::model::D)] struct X;", "`ops` may not import `model`"),
        ("ops/rope.rs", "struct X { #[serde(default = \"crate::model::depth\")] y: usize }", "`ops` may not import `model`"),
        ("ops/rope.rs", "pub use crate::cache::Slots;", "`ops` may not import `cache`"),
        ("ops/rope.rs", "use crate::engine::*;", "`ops` may not import `engine`"),
        ("ops/rope.rs", "use crate::*;", "the crate's root"),
        ("ops/mod.rs", "use super::*;", "the crate's root"),
        ("ops/rope.rs", "use super::super as root;", "the crate's root"),
        ("ops/rope.rs", "use crate::{self as root};", "the crate's root"),
        ("ops/rope.rs", "extern crate self as house;", "extern crate"),
        ("ops/rope.rs", "use kvtune::model::Model;", "`ops` may not import `model`"),
        ("ops/rope.rs", "#[path = \"../model/mod.rs\"] mod model;", "`#[path]`"),
        ("ops/rope.rs", "use crate::attic::Thing;", "`attic` is no room"),
        ("attic/thing.rs", "use crate::units::Bytes;", "`attic` is no room"),
        ("main.rs", "use kvtune::train::run;", "`main` may not import `train`"),
        ("main.rs", "fn main() { kvtune::engine::gradients(); }", "`main` may not import `engine`"),
        ("main.rs", "use ::kvtune::engine;", "`main` may not import `engine`"),
        ("lib.rs", "pub mod attic;", "`attic` is no room"),
        ("lib.rs", "pub use engine::Engine;", "re-exports nothing but"),
        ("lib.rs", "pub extern crate self as kvtune;", "re-exports nothing but"),
        ("lib.rs", "pub fn version() {}", "re-exports nothing but"),
    ] {
        let found = violations(file, &format!("//! A file.\n{source}"));
        assert!(found.iter().any(|line| line.contains(complaint)), "`{source}` in {file} went unseen: {found:?}");
    }
}

/// The same for sizes, names and first lines.
#[test]
fn each_kind_of_overrun_is_seen() {
    let long = || format!("//! A file.\n{}", "const A: usize = 0;\n".repeat(LINES_OF_A_FILE));
    for (file, source, complaint) in [
        ("ops/rope.rs", long(), "401 lines"),
        ("ops/mod.rs", long(), "at most 100"),
        ("ops/helpers.rs", "//! A file.\n".to_owned(), "`helpers`"),
        ("ops/rope.rs", "//! A file.\nmod utils {}\n".to_owned(), "`utils`"),
        ("ops/rope.rs", "use std::fs;\n".to_owned(), "first line"),
        ("cache/policies/scored/h2o.rs", "//! A file.\n".to_owned(), "deeper"),
    ] {
        let found = over_budget(file, &source);
        assert!(found.iter().any(|line| line.contains(complaint)), "{file}: {complaint} went unseen: {found:?}");
    }
}

/// Lines that must stay possible: a check that forbids too much is soon switched off.
#[test]
fn lines_of_the_house_pass() {
    for (file, source) in [
        ("ops/rope.rs", "use crate::units::Bytes; use super::attention; use self::inner::x; pub(crate) fn f() {}"),
        ("ops/rope.rs", "pub(in crate::ops) fn f() {} mod tests { use super::*; use super::super::attention; }"),
        ("ops/rope.rs", "/// See `crate::engine::Engine`.\nfn f() { println!(\"crate::engine::Engine {}\", 1); }"),
        ("units.rs", "mod tests { use super::*; }"),
        ("main.rs", "use kvtune::cli; fn main() { kvtune::cli::run(); }"),
        ("verify/mutations.rs", "#[path = \"../../tests/support/mod.rs\"] mod support;"),
        ("lib.rs", "#[cfg(test)] extern crate self as kvtune;"),
    ] {
        assert_eq!(violations(file, &format!("//! A file.\n{source}")), Vec::<String>::new(), "{source}");
    }
    let tests = format!("//! A file.\n#[cfg(test)]\nmod tests {{\n{}}}\n", "const A: usize = 0;\n".repeat(LINES_OF_A_FILE));
    assert_eq!(over_budget("ops/rope.rs", &tests), Vec::<String>::new());
}

/// A reader who meets a type's name must not have to ask which one is meant.
#[test]
fn no_type_name_stands_twice() {
    let found = repeated_types(&sources());
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn a_type_name_that_stands_twice_is_seen() {
    let file = |name: &str, source: &str| (name.to_owned(), format!("//! A file.\n{source}"));
    for (one, other) in [
        ("struct Head;", "enum Head {}"),
        ("pub trait Head {}", "mod tests { struct Head; }"),
        ("type Head = u8;", "fn f() { struct Head; }"),
        ("union Head { x: u8 }", "struct Head;"),
        ("words! { /// Says a word.\npub enum Head { A } }", "struct Head;"),
    ] {
        let found = repeated_types(&[file("head/mod.rs", one), file("recipe/schema.rs", other)]);
        assert_eq!(found, ["`Head` names two types: in src/head/mod.rs, src/recipe/schema.rs"], "{one} {other}");
    }
    let unlike = [
        file("head/mod.rs", "struct Head; impl Iterator for Head { type Item = u8; }"),
        file("a.rs", "impl I for X { type Item = u8; }"),
    ];
    assert_eq!(repeated_types(&unlike), Vec::<String>::new());
}

/// Runs `check` on each file under src and fails with all that it found.
fn assert_clean(check: fn(&str, &str) -> Vec<String>) {
    let found: Vec<String> = sources().iter().flat_map(|(name, source)| check(name, source)).collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// Every file under src: its name below src, and its text.
fn sources() -> Vec<(String, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&src, &mut files);
    assert!(files.len() > 2, "no sources found under {}", src.display());
    let named = |file: PathBuf| {
        let name = file.strip_prefix(&src).expect("below src").to_str().expect("a name in UTF-8").to_owned();
        (name, fs::read_to_string(&file).expect("a readable source"))
    };
    files.into_iter().map(named).collect()
}

/// The types that more than one place defines, wherever in a file. Associated types belong to their trait and do not count.
fn repeated_types(files: &[(String, String)]) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (file, source) in files {
        let mut types = Types(Vec::new());
        types.visit_file(&syn::parse_file(source).unwrap_or_else(|error| panic!("src/{file}: {error}")));
        types.0.into_iter().for_each(|name| places.entry(name).or_default().push(file));
    }
    let repeated = places.iter().filter(|(_, files)| files.len() > 1);
    repeated.map(|(name, files)| format!("`{name}` names two types: in src/{}", files.join(", src/"))).collect()
}

/// Collects the names of the types that a file defines.
struct Types(Vec<String>);

impl<'ast> Visit<'ast> for Types {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let name = match item {
            syn::Item::Struct(item) => Some(&item.ident),
            syn::Item::Enum(item) => Some(&item.ident),
            syn::Item::Union(item) => Some(&item.ident),
            syn::Item::Trait(item) => Some(&item.ident),
            syn::Item::Type(item) => Some(&item.ident),
            _ => None,
        };
        self.0.extend(name.map(ToString::to_string));
        self.0.extend(types_of_macro(item));
        visit::visit_item(self, item);
    }
}

/// The structs and enums that an item's macro declares, as `table! { pub struct DataRecipe … }` does.
fn types_of_macro(item: &syn::Item) -> Vec<String> {
    let syn::Item::Macro(syn::ItemMacro { ident: None, mac, .. }) = item else { return Vec::new() };
    let tokens: Vec<String> = mac.tokens.clone().into_iter().map(|token| token.to_string()).collect();
    let declared = tokens.windows(2).filter(|pair| matches!(pair[0].as_str(), "struct" | "enum"));
    declared.map(|pair| pair[1].clone()).collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
}

/// The sizes, names and first line of one file.
fn over_budget(file: &str, source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let lines = source.split("#[cfg(test)]\nmod tests").next().unwrap_or(source).lines().count();
    let most = if file.ends_with("mod.rs") { LINES_OF_A_DOOR } else { LINES_OF_A_FILE };
    if lines > most {
        found.push(format!("src/{file}: {lines} lines before its tests, expected at most {most}"));
    }
    if !source.starts_with("//! ") {
        found.push(format!("src/{file}: the first line must say what the file is for, after `//!`"));
    }
    if file.split('/').count() > 3 {
        found.push(format!("src/{file}: deeper than room/kind/file.rs"));
    }
    let parts = file.trim_end_matches(".rs").split('/').map(str::to_owned);
    let inline = source.lines().filter_map(|line| line.trim().trim_start_matches("pub ").strip_prefix("mod "));
    let inline = inline.map(|rest| rest.trim_end_matches(|c: char| !c.is_alphanumeric()).to_owned());
    for name in parts.chain(inline).filter(|name| NO_ROOM.contains(&name.as_str())) {
        found.push(format!("src/{file}: `{name}` is the sign of a missing noun"));
    }
    found
}

/// What one file imports against the plan.
fn violations(file: &str, source: &str) -> Vec<String> {
    let module = module_of(file);
    let room = match file {
        "lib.rs" => "lib",
        "main.rs" => "main",
        _ => module.first().expect("a file of a room").as_str(),
    };
    if !ROOMS.iter().any(|(name, _)| *name == room) {
        return vec![format!("src/{file}: `{room}` is no room of the house")];
    }
    let parsed = syn::parse_file(source).unwrap_or_else(|error| panic!("src/{file}: {error}"));
    let mut seen = Paths { module: module.clone(), found: Vec::new(), complaints: Vec::new() };
    seen.visit_file(&parsed);

    let mut found = seen.complaints;
    found.extend(seen.found.iter().filter_map(|path| complaint(room, path)));
    if room == "lib" {
        found.extend(parsed.items.iter().filter_map(not_of_the_root));
    }
    found.into_iter().map(|complaint| format!("src/{file}: {complaint}")).collect()
}

/// `src/cache/policies/h2o.rs` is the module `cache::policies::h2o`, `src/cache/mod.rs` is `cache`, the roots are empty.
fn module_of(file: &str) -> Vec<String> {
    let stem = file.trim_end_matches(".rs").trim_end_matches("/mod");
    stem.split('/').filter(|part| !matches!(*part, "lib" | "main")).map(str::to_owned).collect()
}

/// What is wrong with `path`, counted from the crate's root, in `room`.
fn complaint(room: &str, path: &[String]) -> Option<String> {
    let text = path.join("::");
    let first = match path.first().map(String::as_str) {
        None | Some("*") => return Some("the crate's root names every room: import the room itself".to_owned()),
        Some(first) => first,
    };
    if first == room {
        return None;
    }
    if !ROOMS.iter().any(|(name, _)| *name == first) {
        return Some(format!("`{first}` is no room of the house (`{text}`)"));
    }
    if !may_import(room, first) {
        return Some(format!("`{room}` may not import `{first}` (`{text}`)"));
    }
    None
}

/// lib.rs holds the rooms, nothing else.
fn not_of_the_root(item: &syn::Item) -> Option<String> {
    match item {
        syn::Item::Mod(module) if module.content.is_none() => {
            let name = module.ident.to_string();
            let known = ROOMS.iter().any(|(room, _)| *room == name);
            (!known).then(|| format!("`{name}` is no room of the house"))
        }
        syn::Item::ExternCrate(item) if is_own_name(item) && item.attrs.iter().any(|a| a.path().is_ident("cfg")) => None,
        _ => Some("lib.rs re-exports nothing but the rooms, and holds nothing of its own".to_owned()),
    }
}

/// Collects the paths of one file that leave their module, counted from the crate's root.
struct Paths {
    module: Vec<String>,
    found: Vec<Vec<String>>,
    complaints: Vec<String>,
}

impl Paths {
    fn note(&mut self, path: &[String]) {
        let mut at = match path.first().map(String::as_str) {
            Some("crate" | "kvtune") => Vec::new(),
            Some("super" | "self") => self.module.clone(),
            _ => return,
        };
        for part in path {
            match part.as_str() {
                "super" => drop(at.pop()),
                "crate" | "kvtune" | "self" => {}
                name => at.push(name.to_owned()),
            }
        }
        self.found.push(at);
    }

    /// Paths among loose tokens, as in the arguments of a macro: `crate :: a :: { b , c :: d }`.
    fn scan(&mut self, mut cursor: Cursor<'_>) {
        while !cursor.eof() {
            if let Some((ident, next)) = cursor.ident() {
                let start = ident.to_string();
                let is_root = matches!(start.as_str(), "crate" | "super" | "kvtune");
                cursor = if is_root { self.tail(vec![start], next) } else { next };
            } else if let Some((inside, _, _, next)) = cursor.any_group() {
                self.scan(inside);
                cursor = next;
            } else if let Some((_, next)) = cursor.token_tree() {
                cursor = next;
            }
        }
    }

    /// The rest of a path whose first parts are `path`; returns what stands after it.
    fn tail<'a>(&mut self, mut path: Vec<String>, mut cursor: Cursor<'a>) -> Cursor<'a> {
        while let Some(after) = double_colon(cursor) {
            if let Some((ident, next)) = after.ident() {
                path.push(ident.to_string());
                cursor = next;
            } else if let Some((mut inside, _, _, next)) = after.any_group() {
                while !inside.eof() {
                    inside = match inside.ident() {
                        Some((ident, rest)) => self.tail([path.clone(), vec![ident.to_string()]].concat(), rest),
                        None => inside.token_tree().expect("not at the end").1,
                    };
                }
                return next;
            } else {
                path.push("*".to_owned());
                cursor = after;
                break;
            }
        }
        // `crate` alone is a visibility, and `super` alone an argument's name in a macro.
        if path.len() > 1 {
            self.note(&path);
        }
        cursor
    }
}

fn double_colon(cursor: Cursor<'_>) -> Option<Cursor<'_>> {
    let (first, next) = cursor.punct()?;
    let (second, next) = next.punct()?;
    (first.as_char() == ':' && second.as_char() == ':').then_some(next)
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let mut paths = Vec::new();
        flatten(&item.tree, &[], &mut paths);
        for path in &paths {
            self.note(path);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        // `self` alone is a receiver.
        if names.len() > 1 {
            self.note(&names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, invocation: &'ast syn::Macro) {
        self.scan(TokenBuffer::new2(invocation.tokens.clone()).begin());
        visit::visit_macro(self, invocation);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        // A file of tests is no room: the proofs' factory may be used from inside, too.
        let leads_to_tests = |value: &syn::Expr| match value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => path.value().starts_with("../../tests/"),
            _ => false,
        };
        let hides = |meta: &syn::Meta| meta.require_name_value().map_or(true, |pair| !leads_to_tests(&pair.value));
        if attribute.path().is_ident("path") && hides(&attribute.meta) {
            self.complaints.push("`#[path]` hides where a module lies".to_owned());
        }
        if let syn::Meta::List(list) = &attribute.meta {
            self.scan(TokenBuffer::new2(list.tokens.clone()).begin());
            // serde takes paths as strings: `#[serde(default = "crate::room::function")]`.
            let text = list.tokens.to_string();
            for path in text.split('"').skip(1).step_by(2).filter_map(|text| syn::parse_str::<syn::Path>(text).ok()) {
                self.visit_path(&path);
            }
        }
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {
        // `pub(in crate::room)` can only name an ancestor.
    }

    fn visit_item_extern_crate(&mut self, item: &'ast syn::ItemExternCrate) {
        if !is_own_name(item) {
            self.complaints.push("`extern crate` can give the crate a second name".to_owned());
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.module.push(item.ident.to_string());
        for attribute in &item.attrs {
            self.visit_attribute(attribute);
        }
        if let Some((_, items)) = &item.content {
            for item in items {
                self.visit_item(item);
            }
        }
        self.module.pop();
    }
}

/// `kvtune` inside the library: a name of the crate that [`Paths::note`] follows like `crate`.
fn is_own_name(item: &syn::ItemExternCrate) -> bool {
    item.ident == "self" && item.rename.as_ref().is_some_and(|(_, name)| name == "kvtune")
}

/// The paths of a `use`, one for each leaf of its tree.
fn flatten(tree: &syn::UseTree, prefix: &[String], paths: &mut Vec<Vec<String>>) {
    let with = |ident: &dyn ToString| [prefix, &[ident.to_string()]].concat();
    match tree {
        syn::UseTree::Path(path) => flatten(&path.tree, &with(&path.ident), paths),
        syn::UseTree::Name(name) => paths.push(with(&name.ident)),
        syn::UseTree::Rename(rename) => paths.push(with(&rename.ident)),
        syn::UseTree::Glob(_) => paths.push(with(&"*")),
        syn::UseTree::Group(group) => group.items.iter().for_each(|item| flatten(item, prefix, paths)),
    }
}
