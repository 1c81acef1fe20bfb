//! Chat templates that loop, explode, or ask for what a template must not have.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use kvtune::data::{ChatTemplates, Conversation, message, render_in_children_of};

use super::case::{Case, hold};
use super::ground::Ground;
use crate::starter;

fn template(name: &str, text: impl Into<String>) -> Case {
    let text = text.into();
    let make = move |ground: &Ground| {
        ground.with_messages();
        ground.write("model/chat_template.jinja", &text);
    };
    Case::new(format!("a template with {name}"), make).says(&["chat_template"])
}

#[test]
fn templates() {
    let nested = format!("{}x{}", "{% for a in range(1000) %}".repeat(6), "{% endfor %}".repeat(6));
    let doubled = format!("{{% set x = 'aaaaaaaa' %}}{}{{{{ x }}}}", "{% set x = x ~ x %}".repeat(40));
    hold([
        template("loops within loops", nested),
        template("a range of 2^62", "{% for a in range(4611686018427387904) %}{{ a }}{% endfor %}"),
        template("a text that doubles", doubled),
        template("a product of a text", "{{ 'a' * 9000000000 }}"),
        template("a product of a list", "{{ [1] * 9000000000 }}"),
        template("a macro that calls itself", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
        template("a wide format", "{{ '%9000000000d' % 7 }}"),
        template("padding", "{{ 'a'.ljust(9000000000) }}"),
        template("an open block", "{% for a in messages %}"),
        template("an unknown filter", "{{ messages | unheard }}"),
        template("an include", "{% include '/etc/passwd' %}"),
        template("an import", "{% import 'os' as os %}{{ os.environ }}"),
        template("the inside of Python", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        template("an exception", "{{ raise_exception('no') }}"),
        template("a division by zero", "{{ 1 // 0 }}"),
        template("deep brackets", format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000))),
    ]);
    hold([Case::new("a template of 64 MB", |ground: &Ground| {
        ground.with_messages();
        ground.repeat("model/chat_template.jinja", ("", ""), b"{{ 1 }}", 9 << 20);
    })
    .says(&["chat_template"])]);
}

/// Templates that ask for more stack, memory or time than there is, most of them in a few bytes.
#[allow(clippy::too_many_lines)]
fn hostile() -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = Vec::new();
    let mut add = |name: &str, text: String| all.push((name.to_owned(), text));
    let namespace = "{% set a = namespace() %}{% set a.x = a %}";
    for of in [
        "{a: 1}",
        "[a] | unique",
        "a",
        "a | string",
        "a | tojson",
        "a | pprint",
        "[a] | join",
        "[a] | sort",
        "a == a",
        "a.x.x.x",
        "a | list",
        "[a, a] | groupby('x')",
        "a ~ a",
        "'%s' % a",
        "'{}'.format(a)",
        "[a] | map('string') | list",
        "{1: a} | tojson",
        "a in [a]",
        "{a: a} | dictsort",
        "a | items | list",
        "[[a]] | sum",
        "a | length",
        "a | first",
        "[a, a] | max",
        "a < a",
    ] {
        add("a namespace in itself", format!("{namespace}{{{{ {of} }}}}"));
    }
    add("namespaces in each other", "{% set a = namespace() %}{% set b = namespace(x=a) %}{% set a.x = b %}{{ {a: b} }}".into());
    let deep = "{% set n = namespace(a=[]) %}{% for i in range(20000) %}{% set n.a = [n.a] %}{% endfor %}";
    for of in [
        "1",
        "n.a",
        "n.a | string",
        "n.a | tojson",
        "n.a == n.a",
        "{n.a: 1}",
        "n.a | length",
        "[n.a, n.a] | sort",
        "[n.a] | unique",
    ] {
        add("20 000 lists within lists", format!("{deep}{{{{ {of} }}}}"));
    }
    let dicts = "{% set n = namespace(a={}) %}{% for i in range(20000) %}{% set n.a = {'a': n.a} %}{% endfor %}";
    for of in ["1", "n.a", "n.a | tojson(indent=4)", "n.a == n.a"] {
        add("20 000 dicts within dicts", format!("{dicts}{{{{ {of} }}}}"));
    }
    add("1 000 lists, printed", deep.replace("20000", "1000") + "{{ n.a | pprint }}");
    let wide = "{% set n = namespace(a=[1]) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}";
    for of in ["n.a", "n.a | tojson", "n.a == n.a", "n.a | string | length"] {
        add("2^40 lists from 40", format!("{wide}{{{{ {of} }}}}"));
    }
    let many = |text: &str| text.repeat(32_000);
    for (name, text) in [
        ("a long sum", format!("{{{{ 1{} }}}}", many("+1"))),
        ("a long product", format!("{{{{ 1{} }}}}", many("*1"))),
        ("a long power", format!("{{{{ 1{} }}}}", many("**1"))),
        ("a long chain of texts", format!("{{{{ 'a'{} }}}}", many("~'a'"))),
        ("a long chain of filters", format!("{{{{ 'a'{} }}}}", many("|trim"))),
        ("a long chain of attributes", format!("{{{{ messages{} }}}}", many(".a"))),
        ("a long chain of items", format!("{{{{ messages{} }}}}", many("[0]"))),
        ("a long chain of calls", format!("{{{{ messages{} }}}}", many("()"))),
        ("a long conjunction", format!("{{{{ 1{} }}}}", many(" and 1"))),
        ("a long disjunction", format!("{{{{ 0{} }}}}", many(" or 0"))),
        ("many negations", format!("{{{{ {}1 }}}}", many("not "))),
        ("many signs", format!("{{{{ {}1 }}}}", many("-"))),
        ("a long comparison", format!("{{{{ 1{} }}}}", many(" == 1"))),
        ("a long list of tests", format!("{{{{ 1{} }}}}", many(" is defined"))),
        ("long conditions", format!("{{{{ {}1 }}}}", many("1 if 0 else "))),
        ("a list of many", format!("{{{{ [{}] }}}}", many("1,"))),
        ("a dict of many", format!("{{{{ {{{}}} }}}}", many("'a':1,"))),
        ("many texts", many("{{ 1 }}")),
        ("many comments", many("{# a #}")),
        ("many open braces", many("{{")),
        ("many open tags", many("{%")),
        ("many open comments", many("{#")),
        ("many raw blocks without end", many("{% raw %}")),
        ("elses without end", format!("{{% if 0 %}}{}{{% endif %}}", many("{% elif 0 %}"))),
        ("a name of 64 KB", format!("{{{{ {} }}}}", many("ab"))),
        ("a number of 32 000 digits", format!("{{{{ {} }}}}", many("9"))),
    ] {
        add(name, text);
    }
    for (open, close) in [("(", ")"), ("[", "]"), ("{'a':", "}"), ("messages[", "]"), ("range(", ")"), ("(1,", ")")] {
        add("deep brackets", format!("{{{{ {}1{} }}}}", open.repeat(5000), close.repeat(5000)));
    }
    for (open, close) in [
        ("{% if 1 %}", "{% endif %}"),
        ("{% for a in [1] %}", "{% endfor %}"),
        ("{% with %}", "{% endwith %}"),
        ("{% filter trim %}", "{% endfilter %}"),
        ("{% set a %}", "{% endset %}"),
        ("{% macro a() %}", "{% endmacro %}"),
        ("{% generation %}", "{% endgeneration %}"),
        ("{% block a %}", "{% endblock %}"),
        ("{% call m() %}", "{% endcall %}"),
    ] {
        add("deep blocks", open.repeat(5000) + &close.repeat(5000));
    }
    for (name, text) in [
        ("a text repeated", "{{ 'the ' * 3000000 }}"),
        ("a text repeated beyond", "{{ 'the ' * 300000000 }}"),
        ("a text repeated and replaced", "{{ ('a' * 3000000) | replace('a', 'b' * 1000) }}"),
        ("a text repeated and split", "{{ ('a ' * 3000000).split() | length }}"),
        ("a text as a list", "{{ ('a' * 30000000) | list | length }}"),
        ("a text joined", "{{ range(100000) | join('a' * 10000) }}"),
        ("a list joined by itself", "{% set a = 'a' * 1000000 %}{{ [a, a, a, a, a, a, a, a] | join(a) }}"),
        ("a text in upper case", "{{ ('\u{df}' * 10000000) | upper | length }}"),
        ("a text escaped", "{{ ('<' * 10000000) | escape | length }}"),
        ("a text indented", "{{ ('\\n' * 3000000) | indent(100) | length }}"),
        ("a list repeated", "{{ [1] * 30000000 }}"),
        (
            "a list added to itself",
            "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a | length }}",
        ),
        (
            "a text added to itself",
            "{% set n = namespace(a='a') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a | length }}",
        ),
        ("a huge range", "{{ range(99999999999) | list }}"),
        ("the sum of a huge range", "{{ range(99999999999) | sum }}"),
        ("a range backwards", "{{ range(0, -99999999999, -1) | list }}"),
        ("a range in no steps", "{{ range(0, 1, 0) | list }}"),
        ("a power of a power", "{{ 9 ** 9 ** 9 ** 9 }}"),
        ("batches", "{{ [1] | batch(99999999999, 1) | list }}"),
        ("slices", "{{ [1] | slice(99999999999, 1) | list }}"),
        ("a wide indent", "{{ 'a\nb' | indent(9999999999) }}"),
        ("a wide text", "{{ 'a'.center(9999999999) }}"),
        ("tabs", "{{ '\t'.expandtabs(9999999999) }}"),
        ("a wide number", "{{ '%0999999999d' % 1 }}"),
        ("a wide format", "{{ '{:999999999}'.format(1) }}"),
        ("a wide indent of JSON", "{{ [1] | tojson(indent=999999999) }}"),
        ("macros that call each other", "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}"),
        (
            "a macro that calls itself twice",
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        ),
        ("a macro with itself", "{% macro m(f) %}{{ f(f) }}{% endmacro %}{{ m(m) }}"),
        (
            "a caller that calls",
            "{% macro m() %}{{ caller() }}{% endmacro %}{% macro r() %}{% call m() %}{{ r() }}{% endcall %}{% endmacro %}{{ r() }}",
        ),
        ("a loop that calls itself", "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}"),
        ("a loop over a loop", "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"),
        (
            "sorts within a loop",
            "{% set a = range(100000) | list %}{% for b in range(100000) %}{% set c = a | sort %}{% endfor %}",
        ),
        (
            "searches within a loop",
            "{% set a = 'a' * 10000000 %}{% for b in range(100000) %}{% set c = a.count('b') %}{% endfor %}",
        ),
        ("an include of itself", "{% include 'chat_template' %}"),
        ("an import of itself", "{% import 'chat_template' as a %}{{ a }}"),
        ("a template that extends itself", "{% extends 'chat_template' %}"),
        ("a block in itself", "{% block a %}{{ self.a() }}{% endblock %}"),
        ("a date of many parts", "{{ strftime_now('%c' * 3000000) | length }}"),
    ] {
        add(name, text.to_owned());
    }
    all
}

/// Each ends in a text or in an error, and so do well-meant ones afterwards.
#[test]
fn templates_end_in_a_text_or_an_error() {
    render_in_children_of(starter::in_place(), "render-chat-templates");
    let place = Ground::new();
    let rendered = |template: &str| {
        let templates = ChatTemplates::load(&place.path("model"), Some(&format!("{template}\n")), None);
        let templates = templates.map_err(|error| error.to_string())?;
        let conversation = Conversation { messages: vec![message("user", "hi")], ..Conversation::default() };
        templates.unwrap().render(&conversation, true).map_err(|error| error.to_string())
    };
    let all = hostile();
    assert!(all.len() >= 119, "{}", all.len());
    let (left, said) = (Mutex::new(all.into_iter()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let next = left.lock().unwrap().next();
                    let Some((name, template)) = next else { break };
                    let began = Instant::now();
                    let outcome = rendered(&template);
                    // Two seconds of a CPU, which others use as well.
                    assert!(began.elapsed() < Duration::from_secs(30), "{name}: {:?}", began.elapsed());
                    let words = outcome.map_or_else(|words| words, |text| format!("{} bytes", text.len()));
                    assert!(!words.contains("a defect") && words.len() < 4096, "{name}: {words:.200}");
                    said.lock().unwrap().push((name, words));
                }
            });
        }
    });
    let said = said.into_inner().unwrap();
    for (name, words) in &said {
        println!("{name}: {words:.160}");
    }
    for words in ["takes too much memory", "takes too much time", "is nested too deep"] {
        assert!(said.iter().any(|(_, own)| own.contains(words)), "{words}");
    }
    assert_eq!(rendered("{{ messages[0].content }}").unwrap(), "hi");
}
