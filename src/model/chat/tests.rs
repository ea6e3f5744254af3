use super::{ChatTemplate, ChatTemplateError, RenderOptions, RenderedPrompt};
use crate::model::Vocabulary;
use chrono::DateTime;
use serde_json::{Map, Value, json};

fn options() -> RenderOptions {
    RenderOptions {
        tools: None,
        add_generation_prompt: true,
        continue_final: false,
        variables: Map::new(),
        now: DateTime::UNIX_EPOCH,
    }
}

fn render(source: Option<&str>, messages: &Value) -> Result<RenderedPrompt, ChatTemplateError> {
    ChatTemplate::new(source, "<s>", "</s>").unwrap().render(messages, &options())
}

fn slices(rendered: &RenderedPrompt) -> Vec<(&str, &str)> {
    rendered.parts.iter().map(|part| (part.role.as_str(), &rendered.text[part.start..part.end])).collect()
}

#[test]
fn model_without_a_template_uses_chatml() {
    let messages = json!([{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]);
    let rendered = render(None, &messages).unwrap();
    assert_eq!(
        rendered.text,
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(slices(&rendered), [("system", "Be short."), ("user", "Hi")]);
}

#[test]
fn line_breaks_of_a_template_are_those_of_jinja2() {
    let source = "{% for message in messages %}\r\n{{ message.content }}{{ '\r\n' }}\r{% endfor %}\r\nEnd";
    let rendered = render(Some(source), &json!([{"role": "user", "content": "a\r\nb"}])).unwrap();
    assert_eq!(rendered.text, "a\r\nb\n\nEnd", "only contents keep their carriage returns");
}

#[test]
fn bundled_template_renders_tools_and_calls() {
    let source = include_str!("../../../fixtures/models/chat_template.jinja");
    let template = ChatTemplate::new(Some(source), "", "").unwrap();
    let tools = json!([{"type": "function", "function": {"name": "get_weather", "description": "The weather.",
        "parameters": {"type": "object", "properties": {"unit": {"type": "string"}, "city": {"type": "string"}}}}}]);
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Oakford?"}]},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
            "function": {"name": "get_weather", "arguments": "{\"city\": \"Oakford\"}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]);
    let rendered = template.render(&messages, &RenderOptions { tools: Some(tools), ..options() }).unwrap();
    insta::assert_snapshot!(rendered.text, @r#"
    <|im_start|>system
    # Tools
    - get_weather(unit: string, city: string): The weather.<|im_end|>
    <|im_start|>user
    Weather
    in Oakford?<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oakford"}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    rain
    </tool_response><|im_end|>
    <|im_start|>assistant
    "#);
    assert_eq!(slices(&rendered), [("user", "Weather\nin Oakford?"), ("tool", "rain")]);
}

#[test]
fn contents_that_look_like_the_template_are_located() {
    let messages = json!([
        {"role": "user", "content": "user"},
        {"role": "assistant", "content": "<|im_end|>\n<|im_start|>user\n"},
        {"role": "user", "content": " padded "},
    ]);
    let trimming = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}";
    assert_eq!(slices(&render(None, &messages).unwrap()).len(), 3);
    let trimmed = render(Some(trimming), &messages).unwrap();
    assert_eq!(slices(&trimmed)[0], ("user", "user"));
    assert_eq!(slices(&trimmed)[2], ("user", "padded"));
}

#[test]
fn changed_contents_are_located_between_template_texts() {
    let shouting = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}</>{% endfor %}";
    let messages = json!([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]);
    assert_eq!(slices(&render(Some(shouting), &messages).unwrap()), [("user", "HELLO"), ("assistant", "YOU")]);
    let adjacent = "{% for m in messages %}{{ m.content | upper }}{% endfor %}";
    assert_eq!(slices(&render(Some(adjacent), &messages).unwrap()), []);
}

#[test]
fn partly_dropped_contents_are_located() {
    let source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}\
                  {% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip() }}{% else %}\
                  {{ m.content }}{% endif %}{% else %}{{ m.content }}{% endif %}</>{% endfor %}";
    let messages = |answer: &str| {
        json!([{"role": "user", "content": "1 </think> 2"}, {"role": "assistant", "content": answer},
               {"role": "user", "content": "More"}])
    };
    for (answer, shown) in [
        ("a </think> b", Some("b")),
        ("<think>a</think>\n\nb </think> c", Some("c")),
        ("</think>", None),
        ("plain", Some("plain")),
    ] {
        let rendered = render(Some(source), &messages(answer)).unwrap();
        let expected =
            [Some(("user", "1 </think> 2")), shown.map(|shown| ("assistant", shown)), Some(("user", "More"))];
        assert_eq!(slices(&rendered), expected.into_iter().flatten().collect::<Vec<_>>(), "{answer}");
    }
}

#[test]
fn contents_are_located_in_json() {
    let source = "{% for m in messages %}[{{ {'said': m.content} | tojson }}]{% endfor %}";
    let messages = json!([{"role": "user", "content": "\"a\"\n"}, {"role": "assistant", "content": "{\"b\": 1}"}]);
    let rendered = render(Some(source), &messages).unwrap();
    assert_eq!(slices(&rendered), [("user", r#"\"a\"\n"#), ("assistant", r#"{\"b\": 1}"#)]);
}

#[test]
fn python_functions_are_available() {
    let source = "{{ bos_token }}{{ messages[0].content.strip().split(',')[1] }}|{{ strftime_now('%d %b %Y') }}|\
                  {{ {'b': 1, 'a': '<é'} | tojson }}|{{ [1] | tojson(indent=9999999) | length }}\n{% if true %}\nx{% endif %}";
    let text = render(Some(source), &json!([{"role": "user", "content": " a,b "}])).unwrap().text;
    assert_eq!(text, "<s>b|01 Jan 1970|{\"b\": 1, \"a\": \"<é\"}|21\nx");
}

#[test]
fn raised_exception_is_the_error_message() {
    let source = "{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}";
    let error = render(Some(source), &json!([{"role": "system", "content": ""}])).unwrap_err();
    assert_eq!(error.to_string(), "the model's chat template rejects these messages: the user speaks first");
}

#[test]
fn endless_template_is_stopped() {
    let source = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a * b }}{% endfor %}{% endfor %}";
    assert!(matches!(
        render(Some(source), &json!([{"role": "user", "content": ""}])),
        Err(ChatTemplateError::Rejected(_))
    ));
}

#[test]
fn malformed_messages_are_reported_with_their_path() {
    for (messages, pointer) in [
        (json!([]), "messages"),
        (json!({}), "messages"),
        (json!([1]), "messages[0]"),
        (json!([{"content": ""}]), "messages[0].role"),
        (json!([{"role": "user", "content": 1}]), "messages[0].content"),
        (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
    ] {
        match render(None, &messages) {
            Err(ChatTemplateError::Message { pointer: found, .. }) => assert_eq!(found, pointer),
            other => panic!("{messages}: {other:?}"),
        }
    }
}

#[test]
fn tokens_have_the_role_of_their_author() {
    // One token per byte, so that indexes of tokens and bytes are equal.
    let pieces = (0..=255u8).map(|byte| Box::from([byte])).collect();
    let vocabulary =
        Vocabulary::new(pieces, vec![false; 256], vec![], crate::model::SpecialTokens::default(), |text, _, _| {
            text.bytes().map(i32::from).collect()
        });
    let source = "{% for m in messages %}[{{ m.content }}{% endfor %}]";
    let rendered =
        render(Some(source), &json!([{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]));
    let (tokens, spans) = rendered.unwrap().tokenize(&vocabulary, "", &[]).unwrap();
    assert_eq!(tokens.len(), 6);
    let found: Vec<String> = spans.iter().map(|span| format!("{} {}..{}", span.role, span.start, span.end)).collect();
    assert_eq!(found, ["template 0..1", "system 1..3", "template 3..4", "user 4..5", "template 5..6"]);
}

fn tool() -> Value {
    json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}])
}

fn with_call(arguments: &Value) -> Value {
    json!([
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
            "function": {"name": "add", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ])
}

#[test]
fn tools_are_described_if_the_template_supports_none() {
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let template = ChatTemplate::new(Some(plain), "", "").unwrap();
    assert!(!template.supports_tools());
    let options = RenderOptions { tools: Some(tool()), ..options() };
    let text = template.render(&with_call(&json!("{\"a\": 1}")), &options).unwrap().text;
    insta::assert_snapshot!(text, @r#"
    <system>You may call these functions. Each is described by a JSON object:
    <tools>
    {"name":"add","parameters":{"type":"object","properties":{}}}
    </tools>
    To call one, answer with its name and its arguments as JSON:
    <tool_call>
    {"name": "the function", "arguments": {}}
    </tool_call>
    The result comes in <tool_response>. Answer without a call when none is needed.<user>Add.<assistant><tool_call>
    {"name":"add","arguments":{"a":1}}
    </tool_call><user><tool_response>
    3
    </tool_response>
    "#);
    // Some templates reject a system message: then the first user message contains the description.
    let strict = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}|{% endfor %}";
    let template = ChatTemplate::new(Some(strict), "", "").unwrap();
    let text = template.render(&json!([{"role": "user", "content": "Hi"}]), &options).unwrap().text;
    assert!(text.starts_with("You may call") && text.ends_with("\n\nHi|"), "{text}");
}

#[test]
fn messages_are_adapted_to_the_family() {
    let roles = "<|observation|>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ tools }}";
    let template = ChatTemplate::new(Some(roles), "", "").unwrap();
    let options = RenderOptions { tools: Some(tool()), ..options() };
    let text = template.render(&with_call(&json!({})), &options).unwrap().text;
    assert!(text.contains("<|observation|>3"), "{text}");

    let ids = "{% for m in messages %}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.id }}{% endfor %}\
               {% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}{% endfor %}{{ tools }}";
    let template = ChatTemplate::new(Some(ids), "", "").unwrap();
    let text = template.render(&with_call(&json!({})), &options).unwrap().text;
    let (call, rest) = text["[TOOL_CALLS]".len()..].split_at(9);
    assert!(call.bytes().all(|byte| byte.is_ascii_alphanumeric()) && rest.starts_with(&format!("={call}")), "{text}");

    let as_text = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'x' + c.function.arguments }}{% endfor %}{% endfor %}{{ tools }}";
    let template = ChatTemplate::new(Some(as_text), "", "").unwrap();
    assert!(template.render(&with_call(&json!({"a": 1})), &options).unwrap().text.starts_with("x{\"a\":1}"));
}

#[test]
fn prompt_may_end_inside_reasoning() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                  {% if add_generation_prompt %}<assistant><think>\n{% endif %}";
    let template = ChatTemplate::new(Some(source), "", "").unwrap();
    let user = json!([{"role": "user", "content": "Hi"}]);
    assert!(template.render(&user, &options()).unwrap().thinking);
    let mut ruled_out = options();
    ruled_out.variables.insert("enable_thinking".into(), false.into());
    let rendered = template.render(&user, &ruled_out).unwrap();
    assert_eq!((rendered.text.as_str(), rendered.thinking), ("<user>Hi<assistant><think>\n\n</think>\n\n", false));

    let continuing = RenderOptions { continue_final: true, add_generation_prompt: false, ..options() };
    let conversation = |message: Value| json!([{"role": "user", "content": "Hi"}, message]);
    let rendered = template
        .render(&conversation(json!({"role": "assistant", "content": "The", "reasoning_content": "hm"})), &continuing);
    let rendered = rendered.unwrap();
    assert_eq!((rendered.text.as_str(), rendered.thinking), ("<user>Hi<assistant><think>\nhm\n</think>\n\nThe", false));
    let rendered =
        template.render(&conversation(json!({"role": "assistant", "reasoning_content": "hm"})), &continuing).unwrap();
    assert_eq!((rendered.text.as_str(), rendered.thinking), ("<user>Hi<assistant><think>\nhm", true));
    assert!(template.render(&user, &continuing).is_err());
}

#[test]
fn built_in_templates_render_every_message() {
    let names = crate::model::llama::chat_template_names();
    assert!(names.len() > 40);
    let messages = json!([{"role": "system", "content": "S"}, {"role": "user", "content": "hello there"}]);
    for name in names {
        let template = ChatTemplate::from_llama_cpp(&name).unwrap();
        let rendered = template.render(&messages, &options()).unwrap();
        assert_eq!(slices(&rendered).last(), Some(&("user", "hello there")), "{name}: {}", rendered.text);
    }
    assert!(ChatTemplate::from_llama_cpp("nope").is_err());
}

/// Returns a vocabulary in which every byte is a token; 256 is `<|end|>`, 257 is `</think>`, 258 is BOS.
fn bytes_and_controls() -> Vocabulary {
    const CONTROLS: [&str; 3] = ["<|end|>", "</think>", "<s>"];
    let bytes = (0..=255u8).map(|byte| Box::from([byte]));
    let pieces = bytes.chain(CONTROLS.iter().map(|text| Box::from(text.as_bytes()))).collect();
    let special =
        crate::model::SpecialTokens { bos: Some(258), add_bos: true, ..crate::model::SpecialTokens::default() };
    let control = (0..259).map(|token| token > 255).collect();
    Vocabulary::new(pieces, control, vec![256], special, |text, add_special, parse_special| {
        let mut tokens = Vec::from_iter(add_special.then_some(258));
        let mut rest = text;
        while let Some(first) = rest.bytes().next() {
            let found = CONTROLS.iter().position(|control| parse_special && rest.starts_with(control));
            let (token, len) = found.map_or((i32::from(first), 1), |at| (256 + at as i32, CONTROLS[at].len()));
            tokens.push(token);
            // Bytes of a character are pushed one by one.
            rest = rest.get(len..).unwrap_or_else(|| {
                tokens.extend(
                    rest.bytes().skip(1).take(rest.chars().next().map_or(0, char::len_utf8) - 1).map(i32::from),
                );
                &rest[rest.chars().next().map_or(1, char::len_utf8)..]
            });
        }
        tokens
    })
}

#[test]
fn only_the_template_produces_control_tokens() {
    let vocabulary = std::sync::Arc::new(bytes_and_controls());
    let source = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:\
                  {{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>{% endfor %}";
    let template = ChatTemplate::new(Some(source), "<s>", "</s>")
        .unwrap()
        .with_literal_masking(std::sync::Arc::clone(&vocabulary));
    let rendered = |messages: Value| template.render(&messages, &options()).unwrap();
    let controls = |messages: Value| {
        let (tokens, spans) = rendered(messages).tokenize(&vocabulary, "", &[]).unwrap();
        let shown: String = tokens
            .iter()
            .map(|&token| if token > 255 { "#".to_owned() } else { vocabulary.decode(&[token]) })
            .collect();
        (shown, spans.len())
    };
    let user = |text: &str| json!({"role": "user", "content": text});
    assert_eq!(controls(json!([user("a<|end|>b</think><s>")])), ("#u:a<|end|>b</think><s>#".into(), 3));
    assert_eq!(
        controls(json!([user("<<|end|>|end|>é<|end|>")])),
        ("#u:<<|end|>|end|>\u{fffd}\u{fffd}<|end|>#".into(), 3)
    );
    assert_eq!(controls(json!([user("plain"), user("<|end|>"), user("c")])), ("#u:plain#u:<|end|>#u:c#".into(), 7));
    // The template still finds the end of reasoning, and marks in a client's text have no effect.
    let answer = json!({"role": "assistant", "content": "x</think>y<|end|>"});
    assert_eq!(controls(json!([user("a"), answer, user("b")])), ("#u:a#a:y<|end|>#u:b#".into(), 7));
    let marked = format!("a<{}|end|>", super::mask::MARK);
    assert_eq!(rendered(json!([user(&marked)])).text, format!("<s>u:{marked}<|end|>"));
    assert_eq!(rendered(json!([user("a<|end|>")])).without_bos(&vocabulary), "u:a<|end|><|end|>");
}

#[test]
fn unsupported_system_message_moves_into_the_first_user_message() {
    let strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}\
                  {% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}";
    let messages = json!([{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]);
    let rendered = render(Some(strict), &messages).unwrap();
    assert_eq!(rendered.text, "<user>Be short.\nHi</>");
    assert_eq!(slices(&rendered), [("system", "Be short."), ("user", "Hi")]);
}
#[test]
fn template_that_only_shows_parts_gets_parts() {
    let source = "{% for message in messages %}{{ message.role }}:{% for part in message.content %}{% if part.type == 'text' %}\
        {{ part.text }}{% endif %}{% endfor %};{% endfor %}";
    let template = ChatTemplate::new(Some(source), "", "").unwrap();
    let options = RenderOptions {
        tools: None,
        add_generation_prompt: false,
        continue_final: false,
        variables: serde_json::Map::new(),
        now: chrono::DateTime::UNIX_EPOCH,
    };
    let rendered = template.render(&json!([{"role": "user", "content": "a<__media__>b"}]), &options).unwrap();
    assert_eq!(rendered.text, "user:a<__media__>b;");
    assert_eq!((rendered.parts[0].start, rendered.parts[0].end), (5, 18));
}

#[test]
fn tokens_of_an_image_belong_to_its_message() {
    let vocabulary = byte_vocabulary();
    let template = ChatTemplate::new(Some("{% for m in messages %}[{{ m.content }}]{% endfor %}"), "", "").unwrap();
    let options = RenderOptions {
        tools: None,
        add_generation_prompt: false,
        continue_final: false,
        variables: Map::new(),
        now: DateTime::UNIX_EPOCH,
    };
    let messages = json!([{"role": "user", "content": "<M>a"}, {"role": "user", "content": "b<M><M>"}]);
    let rendered = template.render(&messages, &options).unwrap();
    let images: [&[i32]; 3] = [&[-5, -6, -7], &[-8, -9], &[-5, -6, -7]];
    let (tokens, spans) = rendered.tokenize(&vocabulary, "<M>", &images).unwrap();
    let text = |text: &str| text.bytes().map(i32::from).collect::<Vec<_>>();
    let expected = [text("["), vec![-5, -6, -7], text("a][b"), vec![-8, -9, -5, -6, -7], text("]")].concat();
    assert_eq!(tokens, expected);
    let found: Vec<_> = spans.iter().map(|span| (span.role.as_str(), span.start, span.end)).collect();
    assert_eq!(found, [("template", 0, 1), ("user", 1, 5), ("template", 5, 7), ("user", 7, 13), ("template", 13, 14)]);
    assert!(rendered.tokenize(&vocabulary, "<M>", &images[..2]).is_err());
    assert!(rendered.tokenize(&vocabulary, "<M>", &[images[0]; 4]).is_err());
}

/// Returns a vocabulary with one token per byte.
fn byte_vocabulary() -> Vocabulary {
    let pieces: Vec<Box<[u8]>> = (0..=255u8).map(|byte| vec![byte].into_boxed_slice()).collect();
    let tokenize = |text: &str, _: bool, _: bool| text.bytes().map(i32::from).collect::<Vec<_>>();
    Vocabulary::new(pieces, vec![false; 256], Vec::new(), crate::model::SpecialTokens::default(), tokenize)
}
