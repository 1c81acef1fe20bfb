//! Every message and hint of the source is told in one way: lower case at the start, no full stop at the end.

use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};

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
    assert!(found.0.len() > 300, "{}", found.0.len());
    for text in found.0 {
        assert!(!text.is_empty() && !text.ends_with('.') && !text.starts_with(char::is_uppercase), "{text}");
    }
}
