//! Flags of llama-server without an equivalent here. Flags that would change nothing are accepted and logged. Flags whose
//! effect the user relies on are rejected with a remedy.

/// A flag of llama-server with its spellings.
#[derive(Debug)]
pub(super) struct ForeignFlag {
    /// All spellings.
    pub names: &'static [&'static str],
    /// Values that follow the flag.
    pub values: Values,
    /// llama-server's environment variables for the flag.
    pub variables: &'static [&'static str],
    /// Treatment of the flag.
    pub verdict: Verdict,
}

/// The values that follow a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    /// No value.
    None,
    /// A value, unless the next argument is a flag.
    Perhaps,
    /// One value.
    One,
}

/// The treatment of a flag.
#[derive(Debug, Clone, Copy)]
pub(super) enum Verdict {
    /// Accepted: the behaviour is always so, or has no visible effect.
    Silent,
    /// Accepted and logged, with the reason for having no effect.
    NoEffect(&'static str),
    /// Rejected, with the remedy.
    Refused(&'static str),
}

use Values::{None as Nothing, One, Perhaps};
use Verdict::{NoEffect, Refused, Silent};

const fn foreign(
    names: &'static [&'static str],
    values: Values,
    variables: &'static [&'static str],
    verdict: Verdict,
) -> ForeignFlag {
    ForeignFlag { names, values, variables, verdict }
}

const DOWNLOAD: Verdict = Refused("nothing is downloaded: fetch the GGUF file and give it with --model");
const DRAFT: Verdict = NoEffect("there is no speculative decoding; answers are the same without it");
const BATCH: Verdict =
    NoEffect("prompts and tokens are computed by the same threads, which --poll, --prio and --cpu-mask are for");
const MEDIA: Verdict = NoEffect("only texts are taken");
const AGENT: Verdict =
    Refused("the server runs no tools by itself: clients run those that they offer, and mods can (--mods-dir)");
const CORS: Verdict =
    NoEffect("what a page of another origin may send follows from --cors-origin, for the routes that there are");
const FIT: Verdict =
    NoEffect("layers are fitted into the GPUs' memory by --gpu-layers auto, and the context is never made smaller");
const STATES: Verdict = NoEffect("states of slots are kept as --cache-ram says");
const LINES: Verdict = NoEffect("lines of the log always have their time and level");

pub(super) const FOREIGN_FLAGS: &[ForeignFlag] = &[
    foreign(&["--hf-repo", "-hf", "-hfr"], One, &["LLAMA_ARG_HF_REPO"], DOWNLOAD),
    foreign(&["--hf-file", "-hff"], One, &["LLAMA_ARG_HF_FILE"], DOWNLOAD),
    foreign(&["--model-url", "-mu"], One, &["LLAMA_ARG_MODEL_URL"], DOWNLOAD),
    foreign(&["--docker-repo", "-dr"], One, &["LLAMA_ARG_DOCKER_REPO"], DOWNLOAD),
    foreign(&["--hf-token", "-hft"], One, &[], NoEffect("nothing is downloaded")),
    foreign(&["--offline"], Nothing, &["LLAMA_ARG_OFFLINE"], Silent),
    foreign(
        &[
            "--embd-gemma-default",
            "--fim-qwen-1.5b-default",
            "--fim-qwen-3b-default",
            "--fim-qwen-7b-default",
            "--fim-qwen-7b-spec",
            "--fim-qwen-14b-spec",
            "--fim-qwen-30b-default",
            "--gpt-oss-20b-default",
            "--gpt-oss-120b-default",
            "--vision-gemma-4b-default",
            "--vision-gemma-12b-default",
        ],
        Nothing,
        &[],
        DOWNLOAD,
    ),
    foreign(
        &["--cache-list", "-cl"],
        Nothing,
        &[],
        Refused("nothing is downloaded, so that there is no cache to list"),
    ),
    foreign(
        &["--completion-bash"],
        Nothing,
        &[],
        Refused("there is no completion script; thunder serve --help lists the flags"),
    ),
    foreign(
        &["--rpc"],
        One,
        &["LLAMA_ARG_RPC"],
        Refused("other machines cannot compute parts of a model: leave it out"),
    ),
    foreign(&["--fit", "-fit"], Perhaps, &["LLAMA_ARG_FIT"], FIT),
    foreign(&["--fit-target", "-fitt"], One, &["LLAMA_ARG_FIT_TARGET"], FIT),
    foreign(&["--fit-ctx", "-fitc"], One, &["LLAMA_ARG_FIT_CTX"], FIT),
    foreign(
        &["--lazy-mode", "-lzm"],
        One,
        &["LLAMA_ARG_LAZY_MODE"],
        NoEffect("all weights are loaded at once, by mapping the file unless --no-mmap is given"),
    ),
    foreign(&["--cpu-mask-batch", "-Cb"], One, &[], BATCH),
    foreign(&["--cpu-range-batch", "-Crb"], One, &[], BATCH),
    foreign(&["--cpu-strict-batch", "--prio-batch", "--poll-batch"], One, &[], BATCH),
    foreign(&["--ctx-checkpoints", "-ctxcp", "--swa-checkpoints"], One, &["LLAMA_ARG_CTX_CHECKPOINTS"], STATES),
    foreign(&["--checkpoint-min-step", "-cms"], One, &["LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT"], STATES),
    foreign(&["--cache-idle-slots", "--no-cache-idle-slots"], Nothing, &["LLAMA_ARG_CACHE_IDLE_SLOTS"], STATES),
    foreign(
        &["--kv-unified-per-slot"],
        One,
        &["LLAMA_ARG_KV_UNIFIED_PER_SLOT"],
        NoEffect("each slot has --ctx-size divided by --parallel, with --kv-unified the whole of it"),
    ),
    foreign(&["--swa-full"], Nothing, &["LLAMA_ARG_SWA_FULL"], Silent),
    foreign(&["--jinja"], Nothing, &["LLAMA_ARG_JINJA"], Silent),
    foreign(
        &["--no-jinja"],
        Nothing,
        &[],
        NoEffect("templates are always rendered as Jinja; --chat-template gives another one"),
    ),
    foreign(&["--warmup", "--no-warmup"], Nothing, &[], Silent),
    foreign(&["--cont-batching", "-cb"], Nothing, &["LLAMA_ARG_CONT_BATCHING"], Silent),
    foreign(
        &["--no-cont-batching", "-nocb"],
        Nothing,
        &[],
        NoEffect("runs always join and leave the batch as they come; --parallel 1 has one at a time"),
    ),
    foreign(&["--perf", "--no-perf"], Nothing, &["LLAMA_ARG_PERF"], Silent),
    foreign(&["--escape", "-e", "--no-escape"], Nothing, &[], Silent),
    foreign(&["--ui", "--webui"], Nothing, &["LLAMA_ARG_UI"], Silent),
    foreign(
        &["--threads-http"],
        One,
        &["LLAMA_ARG_THREADS_HTTP"],
        NoEffect("HTTP is served by as many threads as there are cores, none of which waits for a request"),
    ),
    foreign(
        &["--timeout", "-to"],
        One,
        &["LLAMA_ARG_TIMEOUT"],
        NoEffect("an answer may take any time, and a client that has gone is noticed without a limit"),
    ),
    foreign(&["--log-prefix", "--no-log-prefix"], Nothing, &["LLAMA_ARG_LOG_PREFIX"], LINES),
    foreign(&["--log-timestamps", "--no-log-timestamps"], Nothing, &["LLAMA_ARG_LOG_TIMESTAMPS"], LINES),
    foreign(&["--log-jsonl"], Nothing, &["LLAMA_ARG_LOG_JSONL"], NoEffect("the log is written as text")),
    foreign(&["--no-log-jsonl"], Nothing, &[], Silent),
    foreign(
        &["--log-prompts-dir"],
        One,
        &[],
        NoEffect("every prompt is recorded in the database; thunder export writes a run to a file"),
    ),
    foreign(
        &["--special", "-sp"],
        Nothing,
        &[],
        NoEffect("control tokens are not written into texts; \"return_tokens\": true gives their ids"),
    ),
    foreign(
        &["--backend-sampling", "-bs"],
        Nothing,
        &["LLAMA_ARG_BACKEND_SAMPLING"],
        NoEffect("tokens are drawn on the CPU"),
    ),
    foreign(
        &["--skip-chat-parsing"],
        Nothing,
        &["LLAMA_ARG_SKIP_CHAT_PARSING"],
        NoEffect(
            "\"parse_tool_calls\": false and \"reasoning_format\": \"none\" in a request leave its answer as it was written",
        ),
    ),
    foreign(&["--no-skip-chat-parsing"], Nothing, &[], Silent),
    foreign(
        &["--reasoning-preserve", "--no-reasoning-preserve"],
        Nothing,
        &["LLAMA_ARG_REASONING_PRESERVE"],
        NoEffect("thoughts of earlier answers are kept as the chat template says; --chat-template-kwargs can tell it"),
    ),
    foreign(
        &["--models-preset"],
        One,
        &["LLAMA_ARG_MODELS_PRESET"],
        Refused("give a folder of GGUF files with --models-dir"),
    ),
    foreign(&["--media-path"], One, &[], MEDIA),
    foreign(
        &["--mmproj", "-mm"],
        One,
        &["LLAMA_ARG_MMPROJ"],
        Refused("only texts are taken, no images and no sound: leave it out to serve the model's text part"),
    ),
    foreign(&["--mmproj-url", "-mmu"], One, &["LLAMA_ARG_MMPROJ_URL"], DOWNLOAD),
    foreign(&["--mmproj-auto", "--no-mmproj", "--no-mmproj-auto"], Nothing, &["LLAMA_ARG_MMPROJ_AUTO"], Silent),
    foreign(&["--mmproj-offload", "--no-mmproj-offload"], Nothing, &["LLAMA_ARG_MMPROJ_OFFLOAD"], MEDIA),
    foreign(&["--mmproj-device", "-mmdev"], One, &[], MEDIA),
    foreign(&["--image-min-tokens"], One, &["LLAMA_ARG_IMAGE_MIN_TOKENS"], MEDIA),
    foreign(&["--image-max-tokens"], One, &["LLAMA_ARG_IMAGE_MAX_TOKENS"], MEDIA),
    foreign(&["--mtmd-batch-max-tokens"], One, &["LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"], MEDIA),
    foreign(&["--video-fps"], One, &["LLAMA_ARG_VIDEO_FPS"], MEDIA),
    foreign(&["--video-timestamp-interval"], One, &["LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"], MEDIA),
    foreign(&["--video-ffmpeg-dir"], One, &["LLAMA_ARG_VIDEO_FFMPEG_DIR"], MEDIA),
    foreign(
        &["--path"],
        One,
        &["LLAMA_ARG_STATIC_PATH"],
        Refused("no files of yours are served: put a web server before it; --no-ui leaves the dashboard away"),
    ),
    foreign(
        &["--reuse-port"],
        Nothing,
        &["LLAMA_ARG_REUSE_PORT"],
        NoEffect("a port is taken by one server, so that two do not share its requests by mistake"),
    ),
    foreign(&["--cors-methods"], One, &["LLAMA_ARG_CORS_METHODS"], CORS),
    foreign(&["--cors-headers"], One, &["LLAMA_ARG_CORS_HEADERS"], CORS),
    foreign(&["--cors-credentials", "--no-cors-credentials"], Nothing, &["LLAMA_ARG_CORS_CREDENTIALS"], CORS),
    foreign(
        &["--ui-config", "--webui-config"],
        One,
        &["LLAMA_ARG_UI_CONFIG"],
        NoEffect("the dashboard has no settings to give"),
    ),
    foreign(
        &["--ui-config-file", "--webui-config-file"],
        One,
        &["LLAMA_ARG_UI_CONFIG_FILE"],
        NoEffect("the dashboard has no settings to give"),
    ),
    foreign(&["--ui-mcp-proxy", "--webui-mcp-proxy"], Nothing, &["LLAMA_ARG_UI_MCP_PROXY"], AGENT),
    foreign(&["--no-ui-mcp-proxy", "--no-webui-mcp-proxy", "--no-agent", "-no-ag"], Nothing, &[], Silent),
    foreign(&["--agent", "-ag"], Nothing, &["LLAMA_ARG_AGENT"], AGENT),
    foreign(&["--tools"], One, &["LLAMA_ARG_TOOLS"], AGENT),
    foreign(&["--tools-runtime"], One, &["LLAMA_ARG_TOOLS_RUNTIME"], AGENT),
    foreign(&["--mcp-servers-config"], One, &["LLAMA_ARG_MCP_SERVERS_CONFIG"], AGENT),
    foreign(&["--mcp-servers-json"], One, &["LLAMA_ARG_MCP_SERVERS_JSON"], AGENT),
    foreign(&["--lookup-cache-static", "-lcs", "--lookup-cache-dynamic", "-lcd"], One, &[], DRAFT),
    foreign(&["--model-draft", "-md", "--spec-draft-model"], One, &["LLAMA_ARG_SPEC_DRAFT_MODEL"], DRAFT),
    foreign(&["--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft"], One, &["LLAMA_ARG_SPEC_DRAFT_HF_REPO"], DRAFT),
    foreign(&["--draft", "--draft-n", "--draft-max"], One, &["LLAMA_ARG_DRAFT_MAX"], DRAFT),
    foreign(&["--draft-min", "--draft-n-min"], One, &["LLAMA_ARG_DRAFT_MIN"], DRAFT),
    foreign(
        &[
            "--spec-draft-cpu-moe",
            "-cmoed",
            "--cpu-moe-draft",
            "--spec-default",
            "--spec-draft-backend-sampling",
            "--no-spec-draft-backend-sampling",
        ],
        Nothing,
        &["LLAMA_ARG_SPEC_DRAFT_CPU_MOE", "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING"],
        DRAFT,
    ),
    foreign(
        &[
            "--spec-draft-threads",
            "-td",
            "--threads-draft",
            "--spec-draft-threads-batch",
            "-tbd",
            "--threads-batch-draft",
            "--spec-draft-cpu-mask",
            "-Cd",
            "--cpu-mask-draft",
            "--spec-draft-cpu-range",
            "-Crd",
            "--cpu-range-draft",
            "--spec-draft-cpu-strict",
            "--cpu-strict-draft",
            "--spec-draft-prio",
            "--prio-draft",
            "--spec-draft-poll",
            "--poll-draft",
            "--spec-draft-cpu-mask-batch",
            "-Cbd",
            "--cpu-mask-batch-draft",
            "--spec-draft-cpu-strict-batch",
            "--cpu-strict-batch-draft",
            "--spec-draft-prio-batch",
            "--prio-batch-draft",
            "--spec-draft-poll-batch",
            "--poll-batch-draft",
            "--spec-draft-override-tensor",
            "-otd",
            "--override-tensor-draft",
            "--spec-draft-n-cpu-moe",
            "--spec-draft-ncmoe",
            "-ncmoed",
            "--n-cpu-moe-draft",
            "--spec-draft-n-max",
            "--spec-draft-n-min",
            "--spec-synth-len",
            "--spec-synth-rates",
            "--spec-draft-p-split",
            "--draft-p-split",
            "--spec-draft-p-min",
            "--draft-p-min",
            "--spec-draft-device",
            "-devd",
            "--device-draft",
            "--spec-draft-ngl",
            "-ngld",
            "--gpu-layers-draft",
            "--n-gpu-layers-draft",
            "--spec-draft-type-k",
            "-ctkd",
            "--cache-type-k-draft",
            "--spec-draft-type-v",
            "-ctvd",
            "--cache-type-v-draft",
            "--spec-type",
            "--spec-ngram-mod-n-min",
            "--spec-ngram-mod-n-max",
            "--spec-ngram-mod-n-match",
            "--spec-ngram-simple-size-n",
            "--spec-ngram-simple-size-m",
            "--spec-ngram-simple-min-hits",
            "--spec-ngram-map-k-size-n",
            "--spec-ngram-map-k-size-m",
            "--spec-ngram-map-k-min-hits",
            "--spec-ngram-map-k4v-size-n",
            "--spec-ngram-map-k4v-size-m",
            "--spec-ngram-map-k4v-min-hits",
            "--spec-ngram-size-n",
            "--spec-ngram-size-m",
            "--spec-ngram-min-hits",
        ],
        One,
        &[
            "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
            "LLAMA_ARG_SPEC_DRAFT_N_MAX",
            "LLAMA_ARG_SPEC_DRAFT_N_MIN",
            "LLAMA_ARG_SPEC_SYNTH_LEN",
            "LLAMA_ARG_SPEC_SYNTH_RATES",
            "LLAMA_ARG_SPEC_DRAFT_P_SPLIT",
            "LLAMA_ARG_SPEC_DRAFT_P_MIN",
            "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
            "LLAMA_ARG_SPEC_TYPE",
            "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
            "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        ],
        DRAFT,
    ),
];
