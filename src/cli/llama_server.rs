//! A command line and an environment written for llama-server, as clap reads them.

use clap::Command;
use std::ffi::OsString;

/// Flags of one dash and several letters, which clap would read as several flags, and flags that switch something off.
const SPELLINGS: &[(&str, &str)] = &[
    ("-np", "--parallel"),
    ("-ub", "--ubatch-size"),
    ("-ngl", "--gpu-layers"),
    ("-dev", "--device"),
    ("-sm", "--split-mode"),
    ("-ts", "--tensor-split"),
    ("-mg", "--main-gpu"),
    ("-tb", "--threads-batch"),
    ("-fa", "--flash-attn"),
    ("-jf", "--json-schema-file"),
    ("-to", "--timeout"),
    ("-lv", "--verbosity"),
    ("-cb", "--cont-batching"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-sps", "--slot-prompt-similarity"),
    ("-cram", "--cache-ram"),
    ("-dt", "--defrag-thold"),
    ("-kvu", "--kv-unified"),
    ("--no-kv-unified", "--kv-unified=off"),
    ("-no-kvu", "--kv-unified=off"),
    ("--no-context-shift", "--context-shift=off"),
    ("--no-cache-prompt", "--cache-prompt=off"),
    ("--no-slots", "--slots=off"),
    ("--no-models-autoload", "--models-autoload=off"),
    ("--no-prefill-assistant", "--prefill-assistant=off"),
    ("-rea", "--reasoning"),
    ("-e", "--escape"),
    ("-nr", "--no-repack"),
    ("-fit", "--fit"),
    ("-fitt", "--fit-target"),
    ("-fitc", "--fit-ctx"),
    ("-ctxcp", "--ctx-checkpoints"),
    ("-cms", "--checkpoint-min-step"),
];

/// Our flags, and llama-server's variables for them.
const VARIABLES: &[(&str, &str)] = &[
    ("model", "LLAMA_ARG_MODEL"),
    ("alias", "LLAMA_ARG_ALIAS"),
    ("ctx_size", "LLAMA_ARG_CTX_SIZE"),
    ("parallel", "LLAMA_ARG_N_PARALLEL"),
    ("threads", "LLAMA_ARG_THREADS"),
    ("threads_batch", "LLAMA_ARG_THREADS_BATCH"),
    ("batch_size", "LLAMA_ARG_BATCH"),
    ("ubatch_size", "LLAMA_ARG_UBATCH"),
    ("flash_attn", "LLAMA_ARG_FLASH_ATTN"),
    ("gpu_layers", "LLAMA_ARG_N_GPU_LAYERS"),
    ("device", "LLAMA_ARG_DEVICE"),
    ("split_mode", "LLAMA_ARG_SPLIT_MODE"),
    ("tensor_split", "LLAMA_ARG_TENSOR_SPLIT"),
    ("main_gpu", "LLAMA_ARG_MAIN_GPU"),
    ("cache_type_k", "LLAMA_ARG_CACHE_TYPE_K"),
    ("cache_type_v", "LLAMA_ARG_CACHE_TYPE_V"),
    ("cache_ram", "LLAMA_ARG_CACHE_RAM"),
    ("kv_unified", "LLAMA_ARG_KV_UNIFIED"),
    ("context_shift", "LLAMA_ARG_CONTEXT_SHIFT"),
    ("mlock", "LLAMA_ARG_MLOCK"),
    ("chat_template", "LLAMA_ARG_CHAT_TEMPLATE"),
    ("chat_template_file", "LLAMA_ARG_CHAT_TEMPLATE_FILE"),
    ("chat_template_kwargs", "LLAMA_ARG_CHAT_TEMPLATE_KWARGS"),
    ("embedding", "LLAMA_ARG_EMBEDDINGS"),
    ("reranking", "LLAMA_ARG_RERANKING"),
    ("pooling", "LLAMA_ARG_POOLING"),
    ("no_mmap", "LLAMA_ARG_NO_MMAP"),
    ("models_dir", "LLAMA_ARG_MODELS_DIR"),
    ("models_max", "LLAMA_ARG_MODELS_MAX"),
    ("models_autoload", "LLAMA_ARG_MODELS_AUTOLOAD"),
    ("host", "LLAMA_ARG_HOST"),
    ("port", "LLAMA_ARG_PORT"),
    ("api_keys", "LLAMA_API_KEY"),
    ("api_key_file", "LLAMA_ARG_API_KEY_FILE"),
    ("cors_origins", "LLAMA_ARG_CORS_ORIGINS"),
    ("slots", "LLAMA_ARG_ENDPOINT_SLOTS"),
    ("metrics", "LLAMA_ARG_ENDPOINT_METRICS"),
    ("props", "LLAMA_ARG_ENDPOINT_PROPS"),
    ("sse_ping_interval", "LLAMA_ARG_SSE_PING_INTERVAL"),
    ("predict", "LLAMA_ARG_N_PREDICT"),
    ("reasoning", "LLAMA_ARG_REASONING"),
    ("reasoning_effort", "LLAMA_ARG_REASONING_EFFORT"),
    ("reasoning_format", "LLAMA_ARG_THINK"),
    ("prefill_assistant", "LLAMA_ARG_PREFILL_ASSISTANT"),
    ("reasoning_budget", "LLAMA_ARG_THINK_BUDGET"),
    ("reasoning_budget_message", "LLAMA_ARG_THINK_BUDGET_MESSAGE"),
    ("temperature", "LLAMA_ARG_TEMPERATURE"),
    ("top_k", "LLAMA_ARG_TOP_K"),
    ("top_p", "LLAMA_ARG_TOP_P"),
    ("min_p", "LLAMA_ARG_MIN_P"),
    ("repeat_penalty", "LLAMA_ARG_REPEAT_PENALTY"),
    ("presence_penalty", "LLAMA_ARG_PRESENCE_PENALTY"),
    ("frequency_penalty", "LLAMA_ARG_FREQUENCY_PENALTY"),
];

/// The words as clap has to see them.
pub(super) fn spelled_out(words: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut text_follows = false;
    words.map(move |word| {
        text_follows |= word == "--";
        let spelling = SPELLINGS.iter().find(|(short, _)| !text_follows && word == *short);
        spelling.map_or(word, |(_, long)| long.into())
    })
}

/// The command, whose server reads llama-server's variables where ours are not set. `is_set` tells whether a variable is.
pub(super) fn with_environment(command: Command, is_set: impl Fn(&str) -> bool) -> Command {
    command.mut_subcommand("serve", |serve| {
        VARIABLES.iter().filter(|(_, theirs)| is_set(theirs)).fold(serve, |serve, &(id, theirs)| {
            let ours = serve.get_arguments().find(|flag| flag.get_id() == id).map(clap::Arg::get_env);
            match ours {
                Some(ours) if !ours.and_then(|name| name.to_str()).is_some_and(&is_set) => {
                    serve.mut_arg(id, |flag| flag.env(theirs))
                }
                _ => serve,
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use super::{SPELLINGS, VARIABLES, spelled_out, with_environment};
    use clap::{CommandFactory, Parser};

    #[test]
    fn llama_servers_spellings_are_understood() {
        let line = "thunder serve --port 8080 -c 4096 -np 2 -t 1 -b 64 -ub 32 -ngl 9 -fa on --no-slots --metrics --jinja \
                    --temp 0.2 --top-k 1 -n -1 -s 7 --no-warmup --no-webui -lv 2 --samplers top_k;top_p --mirostat 2 -tb 2 -sm row -ts 3,1 -mg 1 --no-models-autoload -a x,y --mlock -rea off --no-prefill-assistant --prio 2 --poll 0 \
                    -fit off -ctxcp 4 --no-mmproj --repack --no-cache-idle-slots -e";
        let parsed = Cli::try_parse_from(spelled_out(line.split_whitespace().map(Into::into)));
        assert!(parsed.is_ok(), "{parsed:?}");
    }

    #[test]
    fn an_unknown_flag_is_told_with_its_neighbour() {
        let error = Cli::try_parse_from(["thunder", "serve", "--metrisc"]).unwrap_err().to_string();
        assert!(error.contains("--metrics"), "{error}");
    }

    #[test]
    fn their_variable_stands_where_ours_is_not_set() {
        let env = |set: &[&str]| {
            let command = with_environment(Cli::command(), |name| set.contains(&name));
            let serve = command.find_subcommand("serve").unwrap().clone();
            let flag = serve.get_arguments().find(|flag| flag.get_id() == "ctx_size").unwrap();
            flag.get_env().unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(env(&[]), "THUNDER_CTX_SIZE");
        assert_eq!(env(&["LLAMA_ARG_CTX_SIZE"]), "LLAMA_ARG_CTX_SIZE");
        assert_eq!(env(&["LLAMA_ARG_CTX_SIZE", "THUNDER_CTX_SIZE"]), "THUNDER_CTX_SIZE");
    }

    #[test]
    fn no_spelling_is_there_twice() {
        let twice = |mut names: Vec<&str>| {
            names.sort_unstable();
            names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0].to_owned())
        };
        assert_eq!(twice(SPELLINGS.iter().map(|(short, _)| *short).collect()), None);
        assert_eq!(twice(VARIABLES.iter().map(|(id, _)| *id).collect()), None);
    }
}
