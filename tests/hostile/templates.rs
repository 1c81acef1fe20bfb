//! Chat templates that loop, explode, or ask for what a template must not have.

use super::case::{Case, hold};
use super::ground::Ground;

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
