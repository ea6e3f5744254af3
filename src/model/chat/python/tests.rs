use crate::model::chat::jinja_syntax::translate;
use crate::model::chat::{ChatTemplate, ChatTemplateError, RenderOptions};
use chrono::DateTime;
use minijinja::Environment;
use serde_json::{Map, Value, json};

fn options(variables: Value) -> RenderOptions {
    let Value::Object(variables) = variables else { panic!("variables are an object") };
    RenderOptions {
        tools: None,
        add_generation_prompt: true,
        continue_final: false,
        variables,
        now: DateTime::UNIX_EPOCH,
    }
}

fn rendered(source: &str, variables: Value) -> Result<String, ChatTemplateError> {
    let template = ChatTemplate::new(Some(source), "<s>", "</s>").unwrap();
    let user = json!([{"role": "user", "content": "Hi"}]);
    template.render(&user, &options(variables)).map(|rendered| rendered.text)
}

#[test]
fn python_constructs_render_like_in_python() {
    for (source, expected) in [
        (
            "{{ none is iterable }} {{ [] is iterable }} {{ 'a' is iterable }} {{ 1 is iterable }}",
            "False True True False",
        ),
        ("{{ 'a' is sequence }} {{ {} is sequence }} {{ none is sequence }}", "True True False"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ '%s and %d' % ('x', 3) }}|{{ '%s' % x }}", "x and 3|[1, 2]"),
        ("{{ x.index(2) }} {{ 'abc'.index('c') }} {{ x.copy() }} {{ d.copy().b }}", "1 2 [1, 2] 2"),
        ("{% set j = joiner('; ') %}{% for i in x %}{{ j() }}{{ i }}{% endfor %}", "1; 2"),
        ("{% set c = cycler('a', 'b') %}{% for i in [1, 2, 3] %}{{ c.next() }}{% endfor %}{{ c.current }}", "abab"),
        ("{{ d | tojson }}", r#"{"b": 2, "a": [1, "é"]}"#),
        ("{{ d | tojson(separators=(',', ':'), sort_keys=true) }}", r#"{"a":[1,"é"],"b":2}"#),
        ("{{ d | tojson(ensure_ascii=true) }}", r#"{"b": 2, "a": [1, "\u00e9"]}"#),
        ("{{ d | tojson(indent=2) }}", "{\n  \"b\": 2,\n  \"a\": [\n    1,\n    \"é\"\n  ]\n}"),
        ("{{ [[], {}] | tojson(indent=1) }}", "[\n []\n,\n {}\n]"),
        ("{{ 'a.b.c'.rsplit('.', 1) | join(' ') }} {{ 'a=b'.partition('=')[2] }}", "a.b c b"),
        ("{{ ' a  b '.rsplit() | tojson }} {{ 'a\n b c'.rsplit(none, 1) | tojson }}", r#"["a", "b"] ["a\n b", "c"]"#),
        (
            "{{ 'a-b'.rsplit('-', 9223372036854775807) | tojson }} {{ 'a-b c'.rsplit(none, -1) | tojson }}",
            r#"["a", "b"] ["a-b", "c"]"#,
        ),
        ("{{ 'a\n\nb\n' | indent(2, first=true) }}|{{ 'a\nb' | indent }}", "  a\n\n  b\n|a\n    b"),
        ("{{ 'abc'.removeprefix('a').removesuffix('c') }}", "b"),
        ("{{ strftime_now('%d %b %Y') }} {{ date_string }} {{ datetime }}", "01 Jan 1970 01 Jan 1970 Jan 01 1970"),
        ("{% if enable_thinking is defined and enable_thinking %}on{% endif %}", "on"),
        ("{{ {'a': {'b': 1}}['a'] | tojson }}", r#"{"b": 1}"#),
    ] {
        let expected = expected.replace("]\n,", "],");
        let text = rendered(source, json!({"x": [1, 2], "d": {"b": 2, "a": [1, "é"]}})).unwrap();
        assert_eq!(text, expected, "{source}");
    }
}

#[test]
fn text_of_a_template_has_a_maximum_length() {
    let source = "{% set s = 'aaaaaaaa' * 1000000 %}{% for i in range(45) %}{{ s }}{% endfor %}";
    let error = rendered(source, json!({})).unwrap_err().to_string();
    assert!(error.contains("more than 67108864 bytes"), "{error}");
}

#[test]
fn operators_calculate_as_in_python() {
    let numbers =
        "{{ 1 + 2 * 3 - 1 }} {{ 7 // 2 * 2 }} {{ 1.5 + 1 }} {{ 2 * 0.5 }} {{ true + 1 }} {{ -x[0] + 2 ** 3 }}";
    let large_numbers = "{{ 9223372036854775807 + 1 }} {{ 4294967296 * 4294967296 }}";
    let repetitions = "{{ 'ab' * 2 }} {{ 2 * 'ab' }} {{ [1] * 2 + x }} {{ (1, 2) + (3,) }} {{ 2 * (1,) }}";
    let slices = "{{ 'abcd'[1:] ~ 'abcd'[-1:] ~ 'abcd'[::-1][:2] }} {{ x[1:] + x[:1] }} {{ (1, 2, 3)[1:] }}";
    let namespace = "{% set n = namespace(t='a', l=[]) %}\
         {% for i in x %}{% set n.t = n.t + 'b' ~ i %}{% set n.l = n.l + [i] %}{% endfor %}{{ n.t }}{{ n.l }}";
    for (source, expected) in [
        (numbers, "6 6 2.5 1.0 2 7"),
        (large_numbers, "9223372036854775808 18446744073709551616"),
        ("{{ 'a' ~ 1 ~ none ~ missing ~ [1] }} {{ 'a' + missing }} {{ missing + 'a' }}", "a1None[1] a a"),
        (repetitions, "abab abab [1, 1, 1, 2] (1, 2, 3) (1, 1)"),
        (slices, "bcdddc [2, 1] (2, 3)"),
        (namespace, "ab1b2[1, 2]"),
    ] {
        assert_eq!(rendered(source, json!({"x": [1, 2]})).unwrap(), expected, "{source}");
    }
    for source in
        ["{{ 1 + x }}", "{{ x + 1 }}", "{{ 'a' * 'b' }}", "{{ x * -1 }}", "{{ missing * 2 }}", "{{ (1,) + [1] }}"]
    {
        assert!(matches!(rendered(source, json!({"x": [1]})), Err(ChatTemplateError::Rejected(_))), "{source}");
    }
}

/// Returns the error of one rendering; a [`ChatTemplate`] renders several times.
fn error_of(source: &str) -> String {
    let mut environment = Environment::new();
    super::install(&mut environment);
    environment.render_str(&translate(source).source, ()).unwrap_err().to_string()
}

#[test]
fn templates_cannot_double_values_without_limit() {
    for change in [
        "{% set n.t = n.t ~ n.t %}",
        "{% set n.t = n.t + n.t %}",
        "{% set n.t = n.t * 2 %}",
        "{% set n.t = 2 * n.t %}",
        "{% set n.l = n.l + n.l %}",
        "{% set n.l = n.l * 2 %}",
        "{% set n.t = double(n.t) %}",
        "{% set t %}{{ n.t }}{{ n.t }}{% endset %}{% set n.t = t %}",
        "{% set n.t = n.t | replace('a', 'aa') %}",
        "{% set n.t = n.t.replace('a', 'aa') %}",
        "{% set n.t = [n.t, n.t] | join %}",
        "{% set n.t = '-'.join([n.t, n.t]) %}",
        "{% set n.t = '%s%s' % (n.t, n.t) %}",
        "{% set n.t = '{0}{0}'.format(n.t) %}",
        "{% set n.t = [n.t, n.t] | string %}",
        "{% set n.l = [n.l, n.l] %}{% set n.t = n.l ~ '' %}",
        "{% set n.l = n.l | chain(n.l) | list %}",
    ] {
        let double = "{% macro double(t) %}{{ t }}{{ t }}{% endmacro %}";
        let start = "{% set n = namespace(t='a', l=[1]) %}{% for i in range(40) %}";
        let error = error_of(&format!("{double}{start}{change}{{% endfor %}}"));
        assert!(error.contains("texts and lists of more than"), "{change}: {error}");
    }
}

#[test]
fn filters_and_methods_cannot_create_large_values() {
    for expression in [
        "{{ t | replace('a', t) }}",
        "{{ (range(10000) | list) | join(t) }}",
        "{{ t.join(range(10000)) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ [1] | batch(1000000000, 2) | length }}",
        "{{ [1] | slice(1000000000) | length }}",
        "{% for i in range(1000) %}{% set n.l = n.l + [t[1:]] %}{% endfor %}",
        "{% for i in range(1000) %}{% set n.l = n.l + [t.strip()] %}{% endfor %}",
        "{% for i in range(1000) %}{% set n.l = n.l + [t | upper] %}{% endfor %}",
    ] {
        let error = error_of(&format!("{{% set t = 'a' * 1000000 %}}{{% set n = namespace(l=[]) %}}{expression}"));
        assert!(error.contains("texts and lists of more than"), "{expression}: {error}");
    }
    let json = error_of("{% set t = 'a' * 11000000 %}{{ [t, t, t, t, t, t, t] | tojson }}");
    assert!(json.contains("the text is too long"), "{json}");
}

#[test]
fn value_in_itself_cannot_become_text() {
    for source in ["{{ n }}", "{{ n ~ '' }}", "{{ n | string }}", "{{ n | tojson }}", "{{ [n] | join }}"] {
        let error = error_of(&format!("{{% set n = namespace() %}}{{% set n.n = n %}}{source}"));
        assert!(error.contains("nested more than 64 levels"), "{source}: {error}");
    }
}

#[test]
fn large_numbers_that_are_no_sizes_do_not_count() {
    for (source, expected) in [
        ("{{ [{'t': 1}, {'t': 1800000000}] | selectattr('t', 'gt', 1700000000) | list | length }}", "1"),
        ("{{ '{\"created\": 1700000000, \"name\": \"%s\"}' % 'x' }}", "{\"created\": 1700000000, \"name\": \"x\"}"),
        ("{{ '**%d**' % 1700000000 }}", "**1700000000**"),
    ] {
        assert_eq!(rendered(source, json!({})).unwrap(), expected);
    }
}

#[test]
fn text_that_is_written_once_does_not_reduce_the_instructions() {
    // As long as the texts of a large template, in many short parts.
    let text = format!("{}{{{{ 1 }}}}", "a".repeat(200)).repeat(40);
    let source = format!("{text}{{% for i in range(60000) %}}{{% endfor %}}");
    assert!(rendered(&source, json!({})).is_ok());
}

#[test]
fn template_cannot_repeat_its_own_text_without_limit() {
    let text = "a".repeat(10_000);
    let source = format!("{{% set t %}}{{% for i in range(100000) %}}{text}{{% endfor %}}{{% endset %}}");
    let error = rendered(&source, json!({})).unwrap_err().to_string();
    assert!(error.contains("out of fuel"), "{error}");
}

#[test]
fn methods_change_lists_in_place() {
    for (source, expected) in [
        (
            "{% set ns = namespace(ids=[]) %}{% set _ = ns.ids.append('a') %}{% set _ = ns.ids.append('b') %}\
          {{ ns.ids.pop(0) }}{{ ns.ids }}{{ ns.ids | length }}",
            "a['b']1",
        ),
        (
            "{% set a = [1, 2] %}{% set b = a.copy() %}{% set _ = b.append(3) %}{{ a }}{{ b }}{{ a + b }}{{ b[-1] }}{{ b[1:] }}",
            "[1, 2][1, 2, 3][1, 2, 1, 2, 3]3[2, 3]",
        ),
        (
            "{% set a = [3] %}{% set _ = a.extend(a) %}{% set _ = a.insert(0, 1) %}{% set _ = a.reverse() %}\
          {% set _ = a.remove(1) %}{% for i in a %}{{ i }},{% endfor %}{{ 3 in a }}{{ a | tojson }}",
            "3,3,True[3, 3]",
        ),
        ("{% set a = [] %}{% set _ = a.append(a) %}{% set _ = a.append([a]) %}{{ a }}", "[[], [[[]]]]"),
    ] {
        assert_eq!(rendered(source, json!({})).unwrap(), expected, "{source}");
    }
}

#[test]
fn lists_have_limits() {
    for source in [
        "{% set a = [1] %}{% for i in range(60) %}{% set _ = a.extend(a) %}{% endfor %}",
        "{% set a = [1] %}{% set n = namespace(l=a) %}{% for i in range(60) %}{% set m = [n.l] %}{% set n.l = m %}{% endfor %}{% set _ = a.pop(5) %}",
        "{% set a = [] %}{{ a.pop() }}",
        "{% set n = namespace() %}{% set n.n = n %}{% set a = [] %}{% set _ = a.append(n) %}",
    ] {
        assert!(matches!(rendered(source, json!({})), Err(ChatTemplateError::Rejected(_))), "{source}");
    }
}

#[test]
fn request_variables_override_server_variables() {
    let given = json!({"enable_thinking": false, "date_string": "today"});
    let source = "{{ enable_thinking }} {{ date_string }}";
    assert_eq!(rendered(source, given).unwrap(), "False today");
    assert_eq!(rendered(source, Value::Object(Map::new())).unwrap(), "True 01 Jan 1970");
}
