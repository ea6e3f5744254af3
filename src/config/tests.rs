use super::flags::{DataFlags, EngineFlags, OnOffAuto, Secret, ServerFlags, default_flags};
use super::{Config, ModSandbox, Rights, SecurityConfig, Size};
use crate::events::{Scope, system};
use clap::Parser;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    server: ServerFlags,
}

fn config(words: &[&str]) -> Result<Config, String> {
    let words = ["thunder", "--data-dir", "/tmp/thunder-config-test"].iter().chain(words);
    let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
    Config::new(line.engine, line.data, &line.server).map_err(|error| error.to_string())
}

#[test]
fn default_flags_give_a_working_configuration() {
    let config = config(&[]).unwrap();
    assert_eq!(config.server.listen, [super::DEFAULT_ADDRESS]);
    assert_eq!(config.engine.parallel, 4);
    assert!(config.engine.attention == OnOffAuto::Auto && config.engine.threads >= 1);
    assert_eq!(config.engine.slot_context(4096), 4096);
    assert_eq!(config.engine.slot_context(131_072), 8192);
}

#[test]
fn default_flags_are_those_of_an_empty_command_line() {
    let flags = (default_flags::<EngineFlags>(), default_flags::<DataFlags>(), default_flags::<ServerFlags>());
    let Line { engine, data, server } = Line::parse_from(["thunder"]);
    assert_eq!(format!("{flags:?}"), format!("{:?}", (engine, data, server)));
    assert_eq!((flags.0.batch_size, flags.2.shutdown_grace, flags.2.limits.max_message), (2048, 10, Size(8 << 20)));
}

#[test]
fn host_and_port_flags_become_an_address() {
    let listen = config(&["--port", "8080"]).unwrap().server.listen;
    assert_eq!(listen, ["127.0.0.1:8080".parse().unwrap()]);
    let both = config(&["--listen", "127.0.0.1:1", "--listen", "[::1]:2"]).unwrap().server.listen;
    assert_eq!(both.len(), 2);
    let vertex = ["--aip-mode", "PREDICTION", "--aip-http-port", "8080", "--api-key", "k"];
    let listen = |words: &[&str]| config(&[&vertex[..], words].concat()).unwrap().server.listen;
    assert_eq!(listen(&["--listen", "0.0.0.0:6767"]), ["0.0.0.0:8080".parse().unwrap()]);
    assert_eq!(listen(&[]), ["127.0.0.1:8080".parse().unwrap()]);
}

#[test]
fn non_loopback_address_requires_key_or_flag() {
    let error = config(&["--listen", "0.0.0.0:6767"]).unwrap_err();
    assert!(error.contains("0.0.0.0:6767") && error.contains("--allow-unauthenticated"), "{error}");
    assert!(config(&["--listen", "0.0.0.0:6767", "--api-key", "s3cret"]).is_ok());
    assert!(config(&["--listen", "0.0.0.0:6767", "--allow-unauthenticated"]).is_ok());
    assert!(config(&["--api-key", ""]).unwrap_err().contains("must not be empty"));
}

#[test]
fn open_ingestion_requires_loopback_addresses() {
    let security =
        config(&["--ingest-open", "--api-key", "a", "--ingest-key", "b"]).unwrap().server.credentials.security;
    assert!(security.ingest_open && security.find_key("b").is_none());
    assert!(security.find_ingest_key("a").is_some() && security.find_ingest_key("b").is_some());
    let words = ["--ingest-open", "--api-key", "a", "--listen", "127.0.0.1:1", "--listen", "0.0.0.0:6767"];
    let error = config(&words).unwrap_err();
    assert!(error.contains("0.0.0.0:6767") && error.contains("--ingest-key"), "{error}");
    assert!(config(&["--ingest-key", ""]).unwrap_err().contains("must not be empty"));
    // A key for traces does not count as an API key.
    assert!(config(&["--ingest-key", "b", "--listen", "0.0.0.0:6767"]).is_err());
}

#[test]
fn debug_output_hides_keys() {
    let config = config(&["--api-key", "s3cret"]).unwrap();
    assert!(!format!("{config:?}").contains("s3cret"));
    assert_eq!(format!("{:?}", Secret("x".into())), "(secret)");
}

#[test]
fn unknown_keys_are_rejected() {
    let security =
        SecurityConfig { keys: vec![super::KeyHash::new("a"), super::KeyHash::new("b")], ..SecurityConfig::default() };
    assert!(security.find_key("a").is_some() && security.find_key("b").is_some());
    assert!(security.find_key("").is_none() && security.find_key("c").is_none());
}

#[test]
fn errors_name_the_flag_and_the_range() {
    for (words, expected) in [
        (["--parallel", "0"], "--parallel must be between 1 and 256, got 0"),
        (["--ctx-size", "8"], "--ctx-size must be at least 16 tokens for each slot (--parallel), got 8"),
        (["--model", "/nowhere.gguf"], "no model file at /nowhere.gguf"),
        (["--host", "/run/thunder.sock"], "Unix sockets are not supported"),
        (["--database-url", "mysql://x"], "postgres://"),
        (["--cors-origin", "example.org"], "scheme and host"),
        (["--max-body", "12Q"], "is not a size"),
        (["--gpu-layers", "many"], "neither a number of layers nor auto or all"),
        (["--split-mode", "tensor"], "[possible values: none, layer, row]"),
        (["--tensor-split", "3,-1"], "expected a proportion for each GPU, e.g. 3,1"),
        (["--tensor-split", "3;1"], "invalid value '3;1' for '--tensor-split"),
        (["--tensor-split", "3,,1"], "expected a proportion"),
        (["--tensor-split", "3,inf"], "expected a proportion"),
        (["--device", "none,CUDA0"], "--device must be names of GPUs or none, got both"),
        (["--models-dir", "/nowhere"], "--models-dir must be a folder of GGUF files"),
    ] {
        let error = config(&words).unwrap_err();
        assert!(error.contains(expected), "{words:?}: {error}");
    }
}

#[test]
fn gpu_and_model_flags_fill_the_configuration() {
    use super::{GpuConfig, GpuLayersFlag, SplitModeFlag, TensorOverride};
    let defaults = config(&[]).unwrap();
    assert_eq!(defaults.engine.gpu, GpuConfig::default());
    assert_eq!(defaults.engine.threads_batch, defaults.engine.threads);
    assert_eq!((defaults.server.models.max_loaded, defaults.server.models.autoload), (Some(4), true));
    let words =
        ["--gpu-layers", "-1", "--split-mode", "row", "--tensor-split", "3,1", "--main-gpu", "1", "--threads", "2"];
    let devices = ["--device", "CUDA1, CUDA0"];
    let further = ["--threads-batch", "4", "--alias", "big, small", "--models-max", "0", "--models-autoload=off"];
    let tensors = ["--override-tensor", r"up=CPU,a=b = CUDA1", "--cpu-moe", "--n-cpu-moe", "3", "--n-cpu-ffn", "4"];
    let parsed = config(&[&words[..], &devices, &further, &tensors].concat()).unwrap();
    let place = |pattern: &str, buffer: &str| TensorOverride { pattern: pattern.into(), buffer: buffer.into() };
    let gpu = GpuConfig {
        layers: GpuLayersFlag::All,
        devices: Some(vec!["CUDA1".into(), "CUDA0".into()]),
        split_mode: SplitModeFlag::Row,
        tensor_split: vec![3.0, 1.0],
        main_gpu: 1,
        tensors: vec![place("up", "CPU"), place("a", "b = CUDA1")],
        cpu_moe: true,
        n_cpu_moe: 3,
        n_cpu_ffn: 4,
    };
    assert_eq!(parsed.engine.gpu, gpu);
    assert_eq!(gpu.gpu_flags(), ["--gpu-layers all", "--split-mode row", "--tensor-split 3,1", "--main-gpu 1"]);
    let shares = |text| config(&["--tensor-split", text]).unwrap().engine.gpu.tensor_split;
    assert_eq!((shares("0.5/ 0/2"), shares("")), (vec![0.5, 0.0, 2.0], Vec::new()));
    let alone = config(&["--device", "none", "--gpu-layers", "0"]).unwrap().engine.gpu;
    assert_eq!((&alone.devices, alone.gpu_flags()), (&Some(Vec::new()), Vec::new()));
    assert_eq!((parsed.engine.threads, parsed.engine.threads_batch), (2, 4));
    assert_eq!(parsed.engine.alias, ["big", "small"]);
    assert_eq!((parsed.server.models.max_loaded, parsed.server.models.autoload), (None, false));
}

#[test]
fn attention_capture_follows_flash_attention() {
    let attention = |words: &[&str]| config(words).map(|config| config.engine.attention);
    for (words, expected) in [
        (&["--flash-attn", "on"][..], OnOffAuto::Auto),
        (&["--flash-attn", "off"], OnOffAuto::On),
        (&["--attention", "on"], OnOffAuto::On),
        (&["--attention", "off", "--flash-attn", "on"], OnOffAuto::Off),
        (&["--cache-type-v", "q8_0"], OnOffAuto::Auto),
    ] {
        assert_eq!(attention(words), Ok(expected), "{words:?}");
    }
    for words in [["--attention", "on", "--flash-attn", "on"], ["--flash-attn", "off", "--cache-type-v", "q8_0"]] {
        assert!(attention(&words).unwrap_err().contains("--attention auto"), "{words:?}");
    }
}

#[test]
fn sizes_parse_with_units() {
    assert_eq!("2G".parse(), Ok(Size(2 << 30)));
    assert_eq!(config(&[]).unwrap().server.max_body_bytes, 256 << 20);
    assert!("0".parse::<Size>().is_err() && "-1".parse::<Size>().is_err() && "M".parse::<Size>().is_err());
}

#[test]
fn mod_flags_reject_values_out_of_range() {
    let mods = config(&["--mod-timeout", "250", "--mod-memory", "1G", "--mod-idle", "0"]).unwrap().engine.mods;
    assert_eq!((mods.timeout.as_millis(), mods.memory_bytes, mods.idle.as_secs(), mods.workers), (250, 1 << 30, 0, 1));
    assert_eq!(mods.sandbox, ModSandbox::Uploaded);
    for invalid in [["--mod-workers", "0"], ["--mod-timeout", "0"], ["--mod-memory", "1M"]] {
        let message = config(&invalid).unwrap_err();
        assert!(message.starts_with(invalid[0]), "{message}");
    }
}

#[test]
fn context_size_zero_is_the_models_context() {
    let flags = EngineFlags { ctx_size: Some(0), parallel: Some(2), batch_size: 1, ubatch_size: 9, ..default_flags() };
    let engine = flags.config().unwrap();
    assert_eq!((engine.ctx_size, engine.ubatch_size), (None, 1));
}

#[test]
fn context_is_divided_among_the_slots() {
    let engine = config(&["--ctx-size", "4096", "--parallel", "4"]).unwrap().engine;
    assert_eq!(engine.slot_context(131_072), 1024);
}

#[test]
fn context_size_without_slots_applies_to_each_slot() {
    for (context, slots) in [("512", 4), ("8192", 4), ("16384", 2), ("20000", 1), ("131072", 1)] {
        for words in [&["--ctx-size", context][..], &["--ctx-size", context, "--parallel", "-1"]] {
            let engine = config(words).unwrap().engine;
            assert_eq!((engine.slot_context(4096).to_string(), engine.parallel), (context.to_owned(), slots));
        }
    }
}

#[test]
fn context_flags_become_request_defaults() {
    let policy = |words: &[&str]| {
        let defaults = config(words).unwrap().server.request_defaults;
        defaults.get("context_policy").map(|policy| policy.as_str().unwrap().to_owned())
    };
    assert_eq!(policy(&[]), None);
    assert_eq!(policy(&["--context-shift"]).as_deref(), Some("shift"));
    assert_eq!(policy(&["--context-shift=off"]), None);
    assert_eq!(policy(&["--context-policy", "evict"]).as_deref(), Some("evict"));
    assert!(config(&["--context-policy", "evict", "--context-shift"]).is_err());
    let cache = config(&["--cache-ram", "5", "--cache-type-k", "q8_0", "--session-memory", "1M"]).unwrap().engine.cache;
    assert_eq!((cache.cache_ram_bytes, cache.type_k.as_str(), cache.max_session_bytes), (5 << 20, "q8_0", 1 << 20));
    assert_eq!(config(&["--cache-ram", "-1"]).unwrap().engine.cache.cache_ram_bytes, usize::MAX);
    let reuse = config(&["--cache-reuse", "64", "--cache-prompt=off"]).unwrap().server.request_defaults;
    assert_eq!((&reuse["n_cache_reuse"], &reuse["cache_prompt"]), (&serde_json::json!(64), &serde_json::json!(false)));
}

#[test]
fn default_of_requests_has_the_flag_that_set_it() {
    let file = std::env::temp_dir().join(format!("thunder-grammar-{:032x}", system::random::<u128>()));
    std::fs::write(&file, "root ::= \"a\"").unwrap();
    let path = file.to_str().unwrap();
    let words = ["--parameter", "temperature=-3", "--sampler-seq", "k", "-n", "-2", "--min-p", "-1", "-l=-5+1"];
    let server = config(&[&words[..], &["--grammar-file", path]].concat()).unwrap().server;
    for (field, flag) in [
        ("temperature", "--parameter"),
        ("samplers", "--sampler-seq"),
        ("n_predict", "--predict"),
        ("min_p", "--min-p"),
        ("logit_bias", "--logit-bias"),
        ("grammar", "--grammar-file"),
    ] {
        assert_eq!(server.request_default_flags.get(field), Some(&flag), "{field}");
        assert!(server.request_defaults.contains_key(field), "{field}");
    }
    // The last of these flags applies.
    let flags =
        [["--grammar", "root ::= \"b\""], ["--grammar-file", path], ["-j", "{}"], ["--json-schema-file", "/nowhere"]];
    for (first, last) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1), (3, 0), (3, 1), (3, 2)] {
        let server = config(&[flags[first], flags[last]].concat()).unwrap().server;
        let set = ["grammar", "json_schema"].map(|field| server.request_defaults.contains_key(field));
        assert_eq!(set, [last < 2, last == 2], "{first} {last}");
    }
    assert!(config(&["-j", "{}", "--json-schema-file", "/nowhere"]).unwrap_err().contains("--json-schema-file"));
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn key_file_line_sets_rights_and_name() {
    let key = |line| super::KeyHash::from_line(line).unwrap();
    assert_eq!(key("secret").rights(), Rights::default());
    assert_eq!(key("secret mods name=ann").rights(), Rights { mods: true, ..Rights::default() });
    assert_eq!(key("secret models props").rights(), Rights { models: true, props: true, ..Rights::default() });
    assert_eq!(key("secret name=ops admin").rights(), Rights::ALL);
    assert_eq!(key("secret name=ann mods").label(), "ann");
    assert_eq!(key("secret").label(), super::KeyHash::new("secret").label());
    for (line, word) in [("secret root", "root"), ("secret name=", "name="), ("secret  Mods", "Mods")] {
        assert_eq!(super::KeyHash::from_line(line).unwrap_err(), word);
    }
}

#[test]
fn key_of_several_sources_has_all_its_rights() {
    for words in [["--admin-key", "--api-key"], ["--api-key", "--admin-key"], ["--mod-key", "--admin-key"]] {
        let security = config(&[words[0], "k", words[1], "k"]).unwrap().server.credentials.security;
        let [key] = &security.keys[..] else { panic!("{words:?}: {:?}", security.keys) };
        assert_eq!(key.rights(), Rights::ALL, "{words:?}");
    }
    let security = with_key_file("k mods\nj\nk name=ops ingest\nk models name=ops\ni ingest\ni ingest\n").unwrap();
    let key = security.find_key("k").unwrap();
    assert_eq!((key.rights(), key.label()), (Rights { mods: true, models: true, ..Rights::default() }, "ops".into()));
    assert_eq!((security.keys.len(), security.ingest_keys.len()), (2, 1));
    let ordinary = with_key_file("k admin ingest\nk\n").unwrap();
    assert_eq!(ordinary.find_key("k").unwrap().rights(), Rights::default(), "`ingest` excludes other rights");
    let error = with_key_file("k name=ann\nk name=eve\n").unwrap_err();
    assert!(error.contains("the same key has the names 'ann' and 'eve'"), "{error}");
}

#[test]
fn whitespace_around_keys_and_host_names_is_ignored() {
    let words = ["--api-key", "a, b", "--admin-key", "c\n", "--trusted-host", "One.example, two.example"];
    let security = config(&words).unwrap().server.credentials.security;
    assert!(["a", "b", "c"].into_iter().all(|key| security.find_key(key).is_some()));
    assert_eq!(security.trusted_hosts, ["one.example", "two.example"]);
    assert!(config(&["--api-key", "a, "]).unwrap_err().contains("must not be empty"));
}

#[test]
fn mod_upload_requires_a_mod_key() {
    assert!(config(&["--allow-mod-upload", "--api-key", "k"]).unwrap_err().contains("--mod-key"));
    let security = config(&["--allow-mod-upload", "--mod-key", "k"]).unwrap().server.credentials.security;
    assert!(security.find_key("k").unwrap().rights().mods);
}

#[test]
fn keys_with_one_name_are_one_tenant() {
    let security = with_key_file("a name=ann\nb name=ann mods\nc\n").unwrap();
    let tenant = |key| security.find_key(key).unwrap().tenant();
    assert_eq!((tenant("a"), tenant("b")), ("ann".into(), "ann".into()));
    // The first 16 bytes of SHA-256 of "c".
    assert_eq!(tenant("c"), "key-2e7d2c03a9507ae265ecf5b5356885a5".into());
    assert_eq!(security.only_tenant(), None);
    let scope = security.scope(security.find_key("a"));
    assert!(scope.includes(Some(&"ann".into())) && !scope.includes(Some(&tenant("c"))) && !scope.includes(None));
}

#[test]
fn only_tenant_owns_runs_without_a_key() {
    let one = config(&["--api-key", "k", "--ingest-key", "i", "--ingest-open"]).unwrap().server.credentials.security;
    let own = one.find_key("k").unwrap().tenant();
    assert_eq!(one.owner(one.find_ingest_key("i")), Some(own.clone()));
    assert_eq!(one.owner(None), Some(own));
    assert!(one.scope(one.find_key("k")).includes(None));
    let two = config(&["--api-key", "k", "--api-key", "l", "--ingest-key", "i"]).unwrap().server.credentials.security;
    assert_eq!(two.owner(two.find_ingest_key("i")), None);
    assert!(!two.scope(two.find_key("k")).includes(None));
    assert!(two.scope(two.find_ingest_key("i")).includes(None), "a repeated document finds its run");
    let named = with_key_file("k name=ann\ni name=ann ingest\nx name=eve ingest\n").unwrap();
    assert!(named.find_key("i").is_none(), "an ingest key permits nothing else");
    assert_eq!(named.owner(named.find_ingest_key("i")), Some("ann".into()));
    assert_eq!(named.owner(named.find_ingest_key("x")), Some("eve".into()));
    let open = config(&[]).unwrap().server.credentials.security;
    assert_eq!((open.owner(None), open.scope(None)), (None, Scope::All));
    let admin = config(&["--admin-key", "a", "--api-key", "k"]).unwrap().server.credentials.security;
    assert_eq!(admin.scope(admin.find_key("a")), Scope::All);
}

/// Returns the access control with a key file, which is removed.
fn with_key_file(text: &str) -> Result<SecurityConfig, String> {
    let path = std::env::temp_dir().join(format!("thunder-keys-{:032x}", system::random::<u128>()));
    std::fs::write(&path, text).unwrap();
    let config = config(&["--api-key-file", path.to_str().unwrap()]);
    std::fs::remove_file(&path).unwrap();
    config.map(|config| config.server.credentials.security)
}
