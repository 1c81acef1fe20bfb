//! Tags of templates: what is rewritten, and what is left.

use super::scan::rewrite;

#[test]
fn generation_tags_are_rewritten_where_they_are_tags() {
    let rewritten = rewrite("a{%- generation -%}b{% endgeneration +%}");
    assert_eq!(
        rewritten.text,
        "a{%- with __marks = __is_marked %}{% filter __generation(__marks) -%}b{% endfilter %}{% endwith +%}"
    );
    assert!(rewritten.has_generation);
    for elsewhere in [
        "{# {% generation %} #}",
        "{% raw %}{% generation %}{%- endraw -%}x",
        "{{ '{% generation %}' }}",
        r#"{{ "a\"{% generation %}" }}"#,
        "{% set generation = {'a': {'b': '%}'}} %}{{ {'a': {}} }}",
        "{{ generation }} {% generation",
        "no tag at all {",
    ] {
        let rewritten = rewrite(elsewhere);
        assert_eq!(rewritten.text, elsewhere);
        assert!(!rewritten.has_generation);
    }
}

#[test]
fn what_minijinja_takes_otherwise_is_rewritten() {
    let text = |tag: &str| rewrite(tag).text;
    assert_eq!(text("{%- for m in messages -%}"), "{%- for m in (messages)|__walked  -%}");
    assert_eq!(text("{% for k, v in d.items() if k != ' in ' %}"), "{% for k, v in (d.items())|__walked if k != ' in ' %}");
    assert_eq!(text("{% for x in [1 if a else 2] recursive %}"), "{% for x in ([1 if a else 2])|__walked recursive %}");
    assert_eq!(text("{% for line in x.if_any %}"), "{% for line in (x.if_any)|__walked  %}");
    assert_eq!(text("{% for nonsense %}"), "{% for nonsense %}");
    assert_eq!(text("{% with a = [1, 2], b = ',' -%}"), "{% with (a, b) = (([1, 2]), (',')) -%}");
    assert_eq!(text("{%- set n.a = 'b=' -%}"), "{%- set n.a = (('b='), n)[0] -%}");
    assert_eq!(text("{% set a = b.c %}"), "{% set a = b.c %}");
    assert_eq!(text("{% with a = (1, 2) %}"), "{% with a = (1, 2) %}");
}
