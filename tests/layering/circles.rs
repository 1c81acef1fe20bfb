//! Circles of files inside a room: whoever opens one of them must read all. A file depends on the files that define the items it names,
//! whether by `super::x`, by `crate::room::x`, or by a name that the room re-exports. Tests inside a file do not count.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::{flatten, module_of, sources, types_of_macro};

#[test]
fn files_of_a_room_form_no_circle() {
    let mut rooms: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for (file, source) in sources().into_iter().filter(|(file, _)| file.contains('/')) {
        rooms.entry(module_of(&file)[0].clone()).or_default().push((file, source));
    }
    let found: Vec<String> = rooms.values().flat_map(|files| circles(files)).collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// Two files of a room `den`, and whether they form a circle.
#[test]
fn each_kind_of_circle_is_seen() {
    for (one, other, is_circle) in [
        ("use super::b::B; pub struct A;", "use super::a::A; pub struct B;", true),
        ("use crate::den::b::B; pub struct A;", "use kvtune::den::a::A; pub struct B;", true),
        // By the names that the room re-exports.
        ("use super::B; pub struct A;", "use super::A; pub struct B;", true),
        ("use crate::den::{B, Shared}; pub struct A;", "fn f() { let _ = super::A; } pub struct B;", true),
        ("use super::Renamed; pub struct A;", "use super::A; pub struct B;", true),
        // By a module that is imported whole, by a glob, and in a macro.
        ("use super::b; pub struct A; fn f() { b::g(); }", "use super::A; pub struct B; pub fn g() {}", true),
        ("use super::b::*; pub struct A;", "use super::A; pub struct B;", true),
        ("pub struct A; fn f() { println!(\"{}\", super::b::g()); }", "use super::A; pub struct B; pub fn g() {}", true),
        ("pub struct A; impl super::B { fn f() {} }", "pub struct B; type X = super::a::A;", true),
        // By a type that a macro declares.
        ("table! { pub struct A in \"a\" { b: super::B = super::B } }", "use super::A; pub struct B;", true),
        // One way only.
        ("use super::B; pub struct A;", "pub struct B;", false),
        ("pub struct A;", "use super::A; pub struct B;", false),
        // What the door itself defines.
        ("use super::Shared; pub struct A;", "use super::{A, Shared}; pub struct B;", false),
        // Other rooms, and tests.
        ("use super::B; pub struct A;", "use crate::cave::A; pub struct B;", false),
        ("use super::B; pub struct A;", "pub struct B; #[cfg(test)] mod tests { use super::super::A; }", false),
        ("use super::B; pub struct A;", "pub struct B; #[cfg(test)] use super::A;", false),
        ("use super::B; pub struct A;", "pub struct B; /// As [`super::A`].\nfn f() {}", false),
    ] {
        let door = "mod a; mod b; pub use a::A; pub use b::{B, B as Renamed}; pub struct Shared;";
        let found = circles(&room(&[("den/mod.rs", door), ("den/a.rs", one), ("den/b.rs", other)]));
        assert_eq!(!found.is_empty(), is_circle, "{one} | {other}: {found:?}");
    }
}

#[test]
fn a_door_is_part_of_a_circle_by_what_it_uses() {
    let user = "use super::Shared; pub struct A;";
    for (door, is_circle) in [
        ("mod a; pub use a::A; pub struct Shared;", false),
        ("mod a; pub use a::A; pub struct Shared(A);", true),
        ("mod a; pub struct Shared(a::A);", true),
        ("mod a; use a::A; pub struct Shared(A);", true),
        ("mod a; use self::a::A; pub struct Shared;", true),
        ("mod a; pub use a::f; pub struct Shared; fn g() { f(); }", true),
        ("mod a; pub use a::f; pub struct Shared; fn g(f: usize) -> usize { f }", false),
    ] {
        let found = circles(&room(&[("den/mod.rs", door), ("den/a.rs", &format!("{user} pub fn f() {{}}"))]));
        assert_eq!(!found.is_empty(), is_circle, "{door}: {found:?}");
    }
}

#[test]
fn a_circle_is_named_by_its_files() {
    let files = [
        ("den/mod.rs", "mod a; mod deep; pub use deep::C;"),
        ("den/a.rs", "use super::C; pub struct A;"),
        ("den/deep/mod.rs", "mod c; pub use c::C;"),
        ("den/deep/c.rs", "use crate::den::a::A; pub struct C;"),
    ];
    assert_eq!(circles(&room(&files)), ["src/den: a circle of files: a.rs takes C of deep/c.rs; deep/c.rs takes A of a.rs"]);
}

fn room(files: &[(&str, &str)]) -> Vec<(String, String)> {
    files.iter().map(|(file, source)| ((*file).to_owned(), format!("//! A file.\n{source}"))).collect()
}

/// A path, counted from the crate's root.
type AbsolutePath = Vec<String>;

/// By file, what is taken of it.
type Names = BTreeMap<String, BTreeSet<String>>;

/// What one file, or a module in it, offers and takes.
#[derive(Default)]
struct Module {
    file: String,
    items: BTreeSet<String>,
    /// By the name that they have here.
    imports: BTreeMap<String, AbsolutePath>,
    globs: Vec<AbsolutePath>,
}

/// The circles among the files of one room.
fn circles(files: &[(String, String)]) -> Vec<String> {
    let parsed: Vec<(&str, syn::File)> = files
        .iter()
        .map(|(file, source)| (file.as_str(), syn::parse_file(source).unwrap_or_else(|error| panic!("src/{file}: {error}"))))
        .collect();
    let is_module = |path: &[String]| files.iter().any(|(file, _)| module_of(file) == path);
    let mut house = House::default();
    let mut of_tests = Vec::new();
    for (file, parsed) in &parsed {
        of_tests.extend(house.enter(file, &module_of(file), &parsed.items, &is_module));
    }
    let mut edges: BTreeMap<&str, Names> = BTreeMap::new();
    for (file, parsed) in parsed.iter().filter(|(file, _)| !of_tests.iter().any(|path| module_of(file).starts_with(path))) {
        let mut named = Named { house: &house, module: module_of(file), is_door: file.ends_with("mod.rs"), files: Names::new() };
        named.visit_file(parsed);
        named.files.remove(*file);
        edges.insert(file, named.files);
    }
    let reach: BTreeMap<&str, BTreeSet<&str>> = edges.keys().map(|&file| (file, reached(&edges, file))).collect();
    let mut circles: BTreeSet<Vec<&str>> = BTreeSet::new();
    for (file, others) in reach.iter().filter(|(file, others)| others.contains(*file)) {
        circles.insert(others.iter().copied().filter(|other| reach.get(other).is_some_and(|r| r.contains(file))).collect());
    }
    let room = module_of(&files[0].0)[0].clone();
    circles.iter().map(|circle| format!("src/{room}: a circle of files: {}", told(circle, &edges))).collect()
}

/// Which file of a circle takes what from which other.
fn told(circle: &[&str], edges: &BTreeMap<&str, Names>) -> String {
    let short = |file: &str| file.split_once('/').map_or(file, |(_, rest)| rest).to_owned();
    let names = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(", ");
    let takes = |file: &&str| {
        let within = edges[file].iter().filter(|(other, _)| circle.contains(&other.as_str()));
        let taken: Vec<String> = within.map(|(other, taken)| format!("{} of {}", names(taken), short(other))).collect();
        format!("{} takes {}", short(file), taken.join(" and "))
    };
    circle.iter().map(takes).collect::<Vec<_>>().join("; ")
}

/// The files that a file leads to; itself among them if it lies in a circle.
fn reached<'a>(edges: &'a BTreeMap<&str, Names>, file: &str) -> BTreeSet<&'a str> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![file.to_owned()]);
    while let Some(file) = open.pop() {
        for other in edges.get(file.as_str()).into_iter().flat_map(BTreeMap::keys) {
            if reached.insert(other.as_str()) {
                open.push(other.clone());
            }
        }
    }
    reached
}

/// The modules of a room, by their paths.
#[derive(Default)]
struct House(BTreeMap<AbsolutePath, Module>);

impl House {
    /// Takes the items of a module in; returns the modules that exist for tests only.
    fn enter(
        &mut self,
        file: &str,
        path: &[String],
        items: &[syn::Item],
        is_module: &dyn Fn(&[String]) -> bool,
    ) -> Vec<AbsolutePath> {
        let mut module = Module { file: file.to_owned(), ..Module::default() };
        let mut of_tests = Vec::new();
        for item in items {
            match item {
                syn::Item::Mod(inner) => {
                    let path = [path, &[inner.ident.to_string()]].concat();
                    if is_of_tests(&inner.attrs) {
                        of_tests.push(path);
                    } else if let Some((_, items)) = &inner.content {
                        of_tests.extend(self.enter(file, &path, items, is_module));
                    }
                }
                syn::Item::Use(item) if !is_of_tests(&item.attrs) => {
                    for (name, leaf) in leaves(&item.tree) {
                        let Some(target) = absolute(&leaf, path, is_module) else { continue };
                        match target.last().map(String::as_str) {
                            Some("*") => module.globs.push(target[..target.len() - 1].to_vec()),
                            _ => drop(module.imports.insert(name, target)),
                        }
                    }
                }
                item => module.items.extend(name_of(item).into_iter().chain(types_of_macro(item))),
            }
        }
        self.0.insert(path.to_vec(), module);
        of_tests
    }

    /// The file that defines what `path` names. A folder named as a whole is none.
    fn file_of(&self, path: &[String], depth: usize) -> Option<&str> {
        let known = (1..=path.len()).rev().find(|&len| self.0.contains_key(&path[..len]))?;
        let module = &self.0[&path[..known]];
        let Some(name) = path.get(known) else { return (!module.file.ends_with("mod.rs")).then_some(&module.file) };
        if name == "*" {
            return self.file_of(&path[..known], depth);
        }
        if module.items.contains(name) || depth == 0 {
            return Some(&module.file);
        }
        let rest = &path[known + 1..];
        match module.imports.get(name) {
            Some(target) => self.file_of(&[target, rest].concat(), depth - 1),
            None => module.globs.iter().find_map(|glob| self.file_of(&[glob, &path[known..]].concat(), depth - 1)),
        }
    }
}

/// The leaves of a `use` with the names that they get.
fn leaves(tree: &syn::UseTree) -> Vec<(String, Vec<String>)> {
    let mut paths = Vec::new();
    flatten(tree, &[], &mut paths);
    let mut names = Vec::new();
    names_of(tree, "", &mut names);
    let is_self = |path: &Vec<String>| path.len() > 1 && path.last().is_some_and(|last| last == "self");
    let whole = |path: Vec<String>| if is_self(&path) { path[..path.len() - 1].to_vec() } else { path };
    names.into_iter().zip(paths.into_iter().map(whole)).collect()
}

/// The names that a `use` gives, in the order of [`flatten`].
fn names_of(tree: &syn::UseTree, parent: &str, names: &mut Vec<String>) {
    match tree {
        syn::UseTree::Path(path) => names_of(&path.tree, &path.ident.to_string(), names),
        syn::UseTree::Name(name) if name.ident == "self" => names.push(parent.to_owned()),
        syn::UseTree::Name(name) => names.push(name.ident.to_string()),
        syn::UseTree::Rename(rename) => names.push(rename.rename.to_string()),
        syn::UseTree::Glob(_) => names.push("*".to_owned()),
        syn::UseTree::Group(group) => group.items.iter().for_each(|tree| names_of(tree, parent, names)),
    }
}

/// A path as `module` writes it, from the crate's root; `None` for one that leads out of the crate.
fn absolute(path: &[String], module: &[String], is_module: &dyn Fn(&[String]) -> bool) -> Option<AbsolutePath> {
    let mut at = match path.first()?.as_str() {
        "crate" | "kvtune" => Vec::new(),
        "super" | "self" => module.to_vec(),
        first if is_module(&[module, &[first.to_owned()]].concat()) => module.to_vec(),
        _ => return None,
    };
    for part in path {
        match part.as_str() {
            "super" => drop(at.pop()),
            "crate" | "kvtune" | "self" => {}
            name => at.push(name.to_owned()),
        }
    }
    Some(at)
}

fn is_of_tests(attributes: &[syn::Attribute]) -> bool {
    let names_test = |attribute: &syn::Attribute| match &attribute.meta {
        syn::Meta::List(list) => list.tokens.to_string().split(|c: char| !c.is_alphanumeric()).any(|word| word == "test"),
        _ => false,
    };
    attributes.iter().any(|attribute| attribute.path().is_ident("cfg") && names_test(attribute))
}

fn name_of(item: &syn::Item) -> Option<String> {
    let ident = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Macro(item) => item.ident.as_ref()?,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Collects the files whose items one file names.
struct Named<'a> {
    house: &'a House,
    module: AbsolutePath,
    is_door: bool,
    files: Names,
}

/// How many re-exports may lead to one another.
const DEPTH: usize = 8;

impl Named<'_> {
    fn note(&mut self, path: &[String]) {
        let is_module = |path: &[String]| self.house.0.contains_key(path);
        let imported = path.first().and_then(|first| self.house.0.get(&self.module)?.imports.get(first));
        let target = match imported {
            Some(import) => Some([import, &path[1..]].concat()),
            None => absolute(path, &self.module, &is_module),
        };
        if let Some(file) = target.and_then(|target| self.house.file_of(&target, DEPTH)) {
            let names = self.files.entry(file.to_owned()).or_default();
            names.extend(path.iter().rev().find(|part| *part != "self").cloned());
        }
    }
}

impl<'ast> Visit<'ast> for Named<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Const(item) => &item.attrs,
            syn::Item::Static(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_of_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // What a door hands on it need not use.
        if self.is_door && !matches!(item.vis, syn::Visibility::Inherited) {
            return;
        }
        for (_, leaf) in leaves(&item.tree) {
            self.note(&leaf);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.module.push(item.ident.to_string());
        visit::visit_item_mod(self, item);
        self.module.pop();
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let syn::Expr::Path(function) = &*call.func {
            self.note(&parts(&function.path));
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts = parts(path);
        // A lower-case name alone may be a variable.
        if parts.len() > 1 || parts[0].starts_with(char::is_uppercase) {
            self.note(&parts);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, invocation: &'ast syn::Macro) {
        let mut paths = super::Paths { module: self.module.clone(), found: Vec::new(), complaints: Vec::new() };
        paths.visit_macro(invocation);
        for path in paths.found {
            self.note(&[vec!["crate".to_owned()], path].concat());
        }
        visit::visit_macro(self, invocation);
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}

fn parts(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}
