use super::{Document, Numbering, item_from_json, item_to_json};
use crate::events::RunStatus;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const SAMPLE: &[u8] = include_bytes!("../../../fixtures/sample_payload.json");

fn sample() -> Value {
    serde_json::from_slice(SAMPLE).unwrap()
}

/// Parses the sample with the value at a JSON pointer replaced.
fn parse_with(pointer: &str, value: Value) -> Result<Document, super::DocumentError> {
    let mut payload = sample();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    match payload.pointer_mut(parent).unwrap() {
        Value::Object(map) => {
            map.insert(key.into(), value);
        }
        Value::Array(list) => list[key.parse::<usize>().unwrap()] = value,
        _ => unreachable!("parents are objects or arrays"),
    }
    Document::parse(payload.to_string().as_bytes())
}

fn message(pointer: &str, value: Value) -> String {
    parse_with(pointer, value).expect_err("should be rejected").to_string()
}

#[test]
fn example_of_the_specification_parses() {
    let document = Document::parse(SAMPLE).unwrap();
    assert_eq!(document.request.request_id, "req_abc123");
    assert_eq!(document.request.temperature, Some(0.7));
    assert_eq!(document.events.len(), 4);
    assert_eq!(document.events[1].top_tokens.as_ref().unwrap().get().matches("prob").count(), 2);
    assert_eq!(document.actions[1].logits_shape.as_deref(), Some("[1, 32000]"));
    let kinds: Vec<String> = json_items(&document)
        .iter()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["kind"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(kinds.join(" "), "event mod_call mod_log action event mod_call mod_log action event event");
}

fn json_items(document: &Document) -> Vec<String> {
    let mut numbering = Numbering::default();
    document.items().iter().filter_map(|item| item_to_json(item, &mut numbering)).collect()
}

#[test]
fn items_round_trip_through_json() {
    for line in json_items(&Document::parse(SAMPLE).unwrap()) {
        let item = item_from_json(line.as_bytes()).unwrap();
        let index = serde_json::from_str::<Value>(&line).unwrap()["index"].as_u64().unwrap_or(0) as u32;
        let mut numbering = Numbering { mod_calls: index, mod_logs: index, actions: index };
        assert_eq!(item_to_json(&item, &mut numbering).unwrap(), line);
    }
    insta::assert_snapshot!(item_from_json(br#"{"kind":"evnt"}"#).unwrap_err(), @r#"$.kind: expected "event", "mod_call", "mod_log" or "action", got "evnt""#);
    insta::assert_snapshot!(item_from_json(br#"{"kind":"mod_log"}"#).unwrap_err(), @"$.mod_call_sequence: expected an integer from -2147483648 to 2147483647, got nothing; the field is required");
}

#[test]
fn written_document_parses_to_the_same_document() {
    let document = Document::parse(SAMPLE).unwrap();
    let again = Document::parse(&document.write()).unwrap();
    assert_eq!(document.fingerprint(), again.fingerprint());
    assert_eq!(document.write(), again.write());
}

#[test]
fn fingerprint_ignores_notation_but_no_content() {
    let fingerprint = |payload: &Value| Document::parse(payload.to_string().as_bytes()).unwrap().fingerprint();
    let original = Document::parse(SAMPLE).unwrap().fingerprint();
    assert_eq!(fingerprint(&sample()), original, "white space and spelling of numbers");

    let mut same = sample();
    same["events"].as_array_mut().unwrap().reverse();
    same["request"]["created_at"] = json!(1_764_613_800);
    same["request"]["unknown"] = json!({"a": [1]});
    same["events"][0]["details"] = Value::Null;
    same["mod_logs"][0].as_object_mut().unwrap().remove("log_level");
    same["mod_calls"][0].as_object_mut().unwrap().remove("exception_occurred");
    assert_eq!(fingerprint(&same), original, "order of events, spelling of times, unknown, null and default fields");

    for (pointer, value) in [
        ("/request/temperature", json!(0.75)),
        ("/request/user_api_key", Value::Null),
        ("/events/1/top_tokens/0/prob", json!(0.850_000_1)),
        ("/events/1/details", json!({})),
        ("/mod_logs/1/log_message", json!("")),
        ("/actions/0/mod_call_sequence", json!(1)),
    ] {
        assert_ne!(parse_with(pointer, value).unwrap().fingerprint(), original, "{pointer}");
    }
}

#[test]
fn run_details_are_checked_and_written() {
    let run = json!({
        "status": "cancelled", "finish_reason": "cancelled", "end_cause": "disconnect", "message": "the client\0left", "seed": u32::MAX,
        "metadata": {"session_id": "a"}, "prompt_preview": "Hello", "prompt_tokens": 4, "cached_tokens": 2, "completion_tokens": 1,
        "first_token_us": 1, "prompt_us": 2, "generation_us": 3
    });
    let document = parse_with("/request/thunder_run", run.clone()).unwrap();
    let written: Value = serde_json::from_slice(&document.write()).unwrap();
    let mut expected = run;
    expected["message"] = json!("the client\u{fffd}left");
    assert_eq!(written["request"]["thunder_run"], expected);
    assert_ne!(document.fingerprint(), Document::parse(SAMPLE).unwrap().fingerprint());
    for (status, stored) in [(json!("running"), RunStatus::Interrupted), (Value::Null, RunStatus::Done)] {
        let document = parse_with("/request/thunder_run", json!({"status": status})).unwrap();
        assert_eq!(document.request.extras.status(), stored);
    }
    let error =
        message("/request/thunder_run", json!({"prompt_tokens": 1, "cached_tokens": 2, "completion_tokens": 0}));
    assert_eq!(error, "$.request.thunder_run.cached_tokens: expected at most `prompt_tokens`, which is 1, got 2");
    let document = parse_with("/request/thunder_run", json!({"seed": 7.0, "prompt_us": 1e13})).unwrap();
    let run = document.request.extras.thunder_run.unwrap();
    assert_eq!((run.seed, run.prompt_us), (Some(7), Some(10_000_000_000_000)));
    let mut with_nul = sample();
    with_nul["request"]["thunder_run"] = json!({"metadata": {"a\0": "b\0"}});
    let document = Document::parse(with_nul.to_string().as_bytes()).unwrap();
    assert_eq!(document.request.extras.thunder_run.unwrap().metadata.unwrap()["a\u{fffd}"], "b\u{fffd}");
    with_nul["events"][0]["step"] = json!("x");
    assert_eq!(Document::parse(with_nul.to_string().as_bytes()).unwrap_err().path, "$.events[0].step");
    let many: BTreeMap<String, &str> = (0..33).map(|number| (number.to_string(), "")).collect();
    for (field, value, expected) in [
        ("status", json!("finished"), "\"cancelled\", \"failed\" or \"interrupted\", got \"finished\""),
        ("end_cause", json!(1), "\"decode_failed\" or \"invalid_logits\", got 1"),
        ("seed", json!(4_294_967_296_u64), "an integer from 0 to 4294967295, got 4294967296"),
        ("cached_tokens", json!(2_147_483_648_u32), "an integer from 0 to 2147483647, got 2147483648"),
        ("prompt_us", json!(-1), "an integer from 0 to 10000000000000, got -1"),
        ("generation_us", json!(u64::MAX), "an integer from 0 to 10000000000000, got 18446744073709551615"),
        ("seed", json!(7.5), "an integer from 0 to 4294967295, got 7.5"),
        ("metadata", json!([]), "with keys of 1 to 64 characters, got an array"),
        ("metadata", json!({"": "x"}), "with keys of 1 to 64 characters, got the key \"\""),
        ("metadata", json!(many), "with keys of 1 to 64 characters, got 33 entries"),
        ("metadata[\"a\"]", json!({"a": 1}), "a string of at most 512 characters, got 1"),
        ("metadata[\"a.b\"]", json!({"a.b": "x".repeat(513)}), "xxx…"),
    ] {
        let (name, _) = field.split_once('[').unwrap_or((field, ""));
        let error = message("/request/thunder_run", json!({(name): value}));
        assert!(error.starts_with(&format!("$.request.thunder_run.{field}: ")) && error.ends_with(expected), "{error}");
    }
}

#[test]
fn raw_fields_stay_byte_for_byte() {
    let payload = br#"{"request":{"request_id":"r"},"events":[{"event_type":"ForwardPass","step":0,"sequence_order":0,
        "details": {"b" : 1.50, "a":"\u00e9"} , "top_tokens":[ ]}]}"#;
    let document = Document::parse(payload).unwrap();
    assert_eq!(document.events[0].details.as_ref().unwrap().get(), r#"{"b" : 1.50, "a":"\u00e9"}"#);
    assert_eq!(document.events[0].top_tokens.as_ref().unwrap().get(), "[ ]");
}

#[test]
fn item_with_multi_line_raw_field_is_one_line() {
    let payload = "{\"request\":{\"request_id\":\"r\"},\"events\":[{\"event_type\":\"ForwardPass\",\"step\":0,\
                   \"sequence_order\":0,\"details\":{\r\n  \"a\": \"x\\ny\"\n}}]}";
    let lines = json_items(&Document::parse(payload.as_bytes()).unwrap());
    assert!(!lines[0].contains(['\n', '\r']), "{}", lines[0]);
    assert_eq!(serde_json::from_str::<Value>(&lines[0]).unwrap()["details"], json!({"a": "x\ny"}));
}

#[test]
fn calls_are_numbered_in_the_order_of_events() {
    let mut payload = sample();
    payload["mod_calls"].as_array_mut().unwrap().reverse();
    let lines = json_items(&Document::parse(payload.to_string().as_bytes()).unwrap());
    let items: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let links: Vec<_> = items
        .iter()
        .filter(|item| item["kind"] == "action")
        .map(|item| (item["index"].as_u64().unwrap(), item["mod_call_sequence"].as_u64().unwrap()))
        .collect();
    assert_eq!(links, [(0, 0), (1, 1)]);
}

#[test]
fn actions_of_a_call_are_sorted_by_action_order() {
    let mut payload = sample();
    payload["actions"] = json!([
        {"mod_call_sequence": 1, "action_type": "Noop", "action_order": 2},
        {"mod_call_sequence": 0, "action_type": "ForceTokens", "action_order": 7},
        {"mod_call_sequence": 1, "action_type": "Backtrack", "action_order": 0},
        {"mod_call_sequence": 1, "action_type": "ForceOutput", "action_order": 0},
    ]);
    let document = Document::parse(payload.to_string().as_bytes()).unwrap();
    let items: Vec<Value> = json_items(&document).iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let types: Vec<&str> = items.iter().filter_map(|item| item["action_type"].as_str()).collect();
    assert_eq!(types, ["ForceTokens", "Backtrack", "ForceOutput", "Noop"]);
}

#[test]
fn integers_may_have_a_fraction_of_zero() {
    let mut payload = sample();
    payload["request"]["max_tokens"] = json!(1000.0);
    payload["events"][1]["step"] = json!(1.0);
    payload["events"][2]["sampled_token"] = json!(1234.0);
    payload["events"][3]["added_tokens"] = json!([1234.0]);
    payload["mod_calls"][1]["event_sequence_order"] = json!(1.0);
    payload["actions"][1]["action_order"] = json!(0.0);
    let document = Document::parse(payload.to_string().as_bytes()).unwrap();
    assert_eq!(document.write(), Document::parse(sample().to_string().as_bytes()).unwrap().write());
    let exponent =
        String::from_utf8(SAMPLE.to_vec()).unwrap().replacen("\"max_tokens\": 1000", "\"max_tokens\": 1e3", 1);
    assert_eq!(Document::parse(exponent.as_bytes()).unwrap().request.max_tokens, Some(1000));
    insta::assert_snapshot!(message("/events/2/step", json!(2_147_483_648.0)), @"$.events[2].step: expected an integer from -2147483648 to 2147483647, got 2147483648.0");
}

#[test]
fn own_details_parse_as_measurements() {
    let details = json!({"elapsed_us": 1500, "tokens": [{"token": 7, "text": "a", "logprob": -0.5}]});
    let document = parse_with("/events/3/details", details).unwrap();
    let measured = document.events[3].measured.as_ref().unwrap();
    assert_eq!((measured.elapsed_us, measured.tokens[0].logprob), (Some(1500), Some(-0.5)));
    let foreign = parse_with("/events/3/details", json!({"tokens": "three"})).unwrap();
    assert!(foreign.events[3].measured.is_none());
}

#[test]
fn absent_and_null_lists_are_empty() {
    for payload in [r#"{"request":{"request_id":"r"}}"#, r#"{"request":{"request_id":"r"},"events":null,"actions":[]}"#]
    {
        let document = Document::parse(payload.as_bytes()).unwrap();
        assert!(document.items().is_empty());
    }
}

#[test]
fn type_errors_report_path_expected_and_found() {
    insta::assert_snapshot!(message("/events/2/sampled_token", json!("1234")), @r#"$.events[2].sampled_token: expected an integer from -2147483648 to 2147483647, got "1234""#);
    insta::assert_snapshot!(message("/events/2/sampled_token", json!(1.5)), @"$.events[2].sampled_token: expected an integer from -2147483648 to 2147483647, got 1.5");
    insta::assert_snapshot!(message("/events/2/step", json!(3_000_000_000_u32)), @"$.events[2].step: expected an integer from -2147483648 to 2147483647, got 3000000000");
    insta::assert_snapshot!(message("/events/3/added_tokens", json!([1, "2"])), @r#"$.events[3].added_tokens[1]: expected an integer from -2147483648 to 2147483647, got "2""#);
    insta::assert_snapshot!(message("/events/3/forced", json!("no")), @r#"$.events[3].forced: expected true or false, got "no""#);
    insta::assert_snapshot!(message("/events/0/event_type", json!("Prefill")), @r#"$.events[0].event_type: expected "Prefilled", "ForwardPass", "Sampled" or "Added", got "Prefill""#);
    insta::assert_snapshot!(message("/events/0/step", Value::Null), @"$.events[0].step: expected an integer from -2147483648 to 2147483647, got null");
    insta::assert_snapshot!(message("/events", json!({})), @"$.events: expected an array of objects, got an object");
    insta::assert_snapshot!(message("/events/1", json!(7)), @"$.events[1]: expected an object, got 7");
    insta::assert_snapshot!(message("/request", json!([])), @"$.request: expected an object, got an array");
    insta::assert_snapshot!(message("/request/created_at", json!("now")), @r#"$.request.created_at: expected an RFC 3339 time such as "2025-12-01T18:30:00Z", or seconds since 1970, got "now""#);
    insta::assert_snapshot!(message("/request/temperature", json!("hot")), @r#"$.request.temperature: expected a number, got "hot""#);
    insta::assert_snapshot!(message("/request/request_id", json!("")), @r#"$.request.request_id: expected a string of 1 to 1024 bytes, got """#);
    insta::assert_snapshot!(message("/request/request_id", json!("live")), @r#"$.request.request_id: expected another id, because the API has a route of this name, got "live""#);
    insta::assert_snapshot!(message("/mod_calls/0/mod_name", json!("")), @r#"$.mod_calls[0].mod_name: expected a string that is not empty, got """#);
    insta::assert_snapshot!(message("/mod_logs/0/log_level", json!("info")), @r#"$.mod_logs[0].log_level: expected "DEBUG", "INFO", "WARNING" or "ERROR", got "info""#);
}

#[test]
fn link_and_order_errors_report_the_valid_range() {
    insta::assert_snapshot!(message("/mod_calls/1/event_sequence_order", json!(4)), @"$.mod_calls[1].event_sequence_order: expected the `sequence_order` of one of the events, 0 to 3, got 4");
    insta::assert_snapshot!(message("/mod_logs/1/mod_call_sequence", json!(-1)), @"$.mod_logs[1].mod_call_sequence: expected an index into `mod_calls`, 0 to 1, got -1");
    insta::assert_snapshot!(message("/mod_calls", json!([])), @"$.mod_logs[0].mod_call_sequence: expected an index into `mod_calls`, but there are none, got 0");
    insta::assert_snapshot!(message("/events/2/sequence_order", json!(1)), @"$.events[2].sequence_order: expected a unique number; $.events[1] has the same, got 1");
    insta::assert_snapshot!(message("/events/3/sequence_order", json!(4)), @"$.events[3].sequence_order: expected 0 to 3, each once, since there are 4 events, got 4");
}

#[test]
fn unstorable_exponent_is_rejected() {
    let payload = String::from_utf8(SAMPLE.to_vec()).unwrap().replacen("0.85", "1e99999", 1);
    insta::assert_snapshot!(Document::parse(payload.as_bytes()).unwrap_err(), @"$.events[1].top_tokens: expected numbers with exponents up to 9999, got the exponent 99999");
}

#[test]
fn nul_characters_are_replaced_and_counted() {
    let document = parse_with("/request/model", json!("a\0b\\u0000\0")).unwrap();
    assert_eq!(document.request.model.as_deref(), Some("a\u{fffd}b\\u0000\u{fffd}"));
    assert_eq!(document.request.extras.replaced_nul, 2);
    let again = Document::parse(&document.write()).unwrap();
    assert_eq!((again.fingerprint(), again.request.extras.replaced_nul), (document.fingerprint(), 0));

    let document = parse_with("/events/1/details", json!({"d\0": ["\0"], "e": "\\"})).unwrap();
    let details = document.events[1].details.as_ref().unwrap();
    assert_eq!(serde_json::from_str::<Value>(details.get()).unwrap(), json!({"d\u{fffd}": ["\u{fffd}"], "e": "\\"}));
    for (pointer, value) in [("/mod_calls/0/mod_name", json!("\0")), ("/mod_logs/0/log_message", json!("\0é\0"))] {
        assert!(parse_with(pointer, value).unwrap().request.extras.replaced_nul > 0, "{pointer}");
    }
    assert!(parse_with("/request/request_id", json!("\0".repeat(400))).is_err(), "1200 bytes after replacement");
}

#[test]
fn arrays_are_no_objects() {
    insta::assert_snapshot!(message("/request", json!(["r1"])), @"$.request: expected an object, got an array");
    insta::assert_snapshot!(message("/request/thunder_run", json!(["done"])), @"$.request.thunder_run: expected an object, got an array");
    insta::assert_snapshot!(message("/events/1", json!(["Added", 1, 1])), @"$.events[1]: expected an object, got an array");
    insta::assert_snapshot!(message("/mod_calls/0", json!([0, "m", "Added", 1])), @"$.mod_calls[0]: expected an object, got an array");
    insta::assert_snapshot!(message("/mod_logs/0", json!([0, "m", "text"])), @"$.mod_logs[0]: expected an object, got an array");
    insta::assert_snapshot!(message("/actions/0", json!([0, "Noop", 0])), @"$.actions[0]: expected an object, got an array");
    insta::assert_snapshot!(Document::parse(br#"[{"request_id": "r1"}, [], [], [], []]"#).unwrap_err(), @"$: expected an object, got an array");
    let document = parse_with("/events/0/details", json!([7])).unwrap();
    assert!(document.events[0].measured.is_none(), "the array has no position");
}

#[test]
fn invalid_json_is_rejected() {
    let message = |payload: &[u8]| Document::parse(payload).unwrap_err().to_string();
    insta::assert_snapshot!(message(b""), @"$: expected valid JSON, got a syntax error: EOF while parsing a value at line 1 column 0");
    insta::assert_snapshot!(message(b"{\"request\":\n  NaN}"), @"$: expected valid JSON, got a syntax error: expected value at line 2 column 3");
    insta::assert_snapshot!(message(b"[]"), @"$: expected an object, got an array");
    insta::assert_snapshot!(message(b"{}"), @"$.request: expected an object, got nothing; the field is required");
    insta::assert_snapshot!(message(b"{\"request\xff"), @"$: expected UTF-8 text, got an invalid byte at offset 9");
    insta::assert_snapshot!(message(br#"{"request":{"request_id":"a","request_id":"b"}}"#), @"$.request.request_id: expected the field once, got it twice in one object");
}

/// Returns a JSON value of any kind.
fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Value::from),
        // serde_json may lose the last bit of fractions with many digits, and writes a whole number in a float field as
        // a fraction.
        any::<i64>().prop_map(|number| Value::from(number >> 21)),
        any::<i32>().prop_map(|number| Value::from(f64::from(number) / 1024.0)),
        ".{0,6}".prop_map(Value::from),
        Just(json!([])),
        Just(json!([1, null, "x"])),
        Just(json!({})),
        Just(json!({"a": "\0"})),
        Just(json!("\0")),
    ]
}

/// Appends to `found` the JSON pointer of every value within `value`.
fn pointers(value: &Value, prefix: &str, found: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(index, value)| (index.to_string(), value)).collect(),
        _ => vec![],
    };
    for (key, value) in children {
        let pointer = format!("{prefix}/{key}");
        pointers(value, &pointer, found);
        found.push(pointer);
    }
}

proptest! {
    #[test]
    fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Document::parse(&bytes);
        let _ = item_from_json(&bytes);
    }

    #[test]
    fn damaged_payloads_never_panic(at in 0..SAMPLE.len(), byte: u8, cut in 0..SAMPLE.trim_ascii_end().len()) {
        let mut payload = SAMPLE.to_vec();
        payload[at] = byte;
        let _ = Document::parse(&payload);
        prop_assert!(Document::parse(&SAMPLE[..cut]).is_err());
    }

    /// A value of any type in any place is either accepted or reported at its path.
    #[test]
    fn wrong_values_are_reported_at_their_path(which: prop::sample::Index, value in any_value()) {
        let mut all = Vec::new();
        pointers(&sample(), "", &mut all);
        let pointer = which.get(&all);
        if let Err(error) = parse_with(pointer, value.clone()) {
            let path = pointer.split('/').skip(1).fold("$".to_owned(), |path, key| match key.parse::<usize>() {
                Ok(index) => format!("{path}[{index}]"),
                Err(_) => format!("{path}.{key}"),
            });
            let order = error.path.contains("sequence");
            let inside_raw = path.starts_with(&error.path);
            prop_assert!(order || error.path.starts_with(&path) || inside_raw, "{} for {} = {}", error, path, value);
            prop_assert_ne!(error.path, "$");
        }
    }

    /// A parsed document keeps its fingerprint when written and parsed again.
    #[test]
    fn parsed_documents_round_trip(which: prop::sample::Index, value in any_value()) {
        let mut all = Vec::new();
        pointers(&sample(), "", &mut all);
        if let Ok(document) = parse_with(which.get::<String>(&all), value) {
            let again = Document::parse(&document.write()).unwrap();
            prop_assert_eq!(again.fingerprint(), document.fingerprint());
        }
    }
}
