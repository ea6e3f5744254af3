//! Flags of llama-server that Thunder does not have. Flags without a visible effect are accepted silently. Flags whose
//! effect a user can do without are accepted and logged. Flags with an effect that a user may rely on are rejected with a
//! remedy.

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
    pub treatment: FlagTreatment,
}

/// The values that follow a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    /// No value.
    None,
    /// A value, unless the next argument is a flag.
    Optional,
    /// One value.
    One,
}

/// The treatment of a flag.
#[derive(Debug, Clone, Copy)]
pub(super) enum FlagTreatment {
    /// Accepted, because Thunder always behaves like this, or the flag has no visible effect.
    Silent,
    /// Accepted and logged, with the reason for having no effect.
    NoEffect(&'static str),
    /// Rejected, with the remedy.
    Refused(&'static str),
}

use FlagTreatment::{NoEffect, Refused, Silent};
use Values::{None as NoValue, One, Optional};

const fn foreign(
    names: &'static [&'static str],
    values: Values,
    variables: &'static [&'static str],
    treatment: FlagTreatment,
) -> ForeignFlag {
    ForeignFlag { names, values, variables, treatment }
}

const DOWNLOAD: FlagTreatment =
    Refused("download the model with --hf-repo or --model-url, or set --model to the path of its GGUF file");
const DRAFT: FlagTreatment = NoEffect(
    "speculative decoding drafts from the text of the run (--spec-type ngram-simple) or with a draft model \
     (--spec-draft-model), whose other settings are those of the main model; except for rounding, answers do not depend on drafts",
);
const BATCH: FlagTreatment =
    NoEffect("the same threads process prompts and generate tokens; --poll, --prio and --cpu-mask configure them");
const MEDIA: FlagTreatment = NoEffect("clients send images in their requests; sound and video are not supported");
const PROJECTOR: FlagTreatment = NoEffect("images are encoded on the first GPU of the model, and one at a time");
const AGENT: FlagTreatment =
    Refused("the server does not run tools: clients run the tools that they offer, and mods can run some (--mods-dir)");
const CORS: FlagTreatment = NoEffect("--cors-origin alone determines the cross-origin requests that are allowed");
const FIT: FlagTreatment =
    NoEffect("--gpu-layers auto fits the layers into the memory of the GPUs, and the context is never reduced");
const STATES: FlagTreatment = NoEffect("--cache-ram alone determines which slot states are kept");
const LINES: FlagTreatment = NoEffect("log lines always have a time and a level");

pub(super) const FOREIGN_FLAGS: &[ForeignFlag] = &[
    foreign(&["--docker-repo", "-dr"], One, &["LLAMA_ARG_DOCKER_REPO"], DOWNLOAD),
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
        NoValue,
        &[],
        DOWNLOAD,
    ),
    foreign(&["--cache-list", "-cl"], NoValue, &[], Refused("use thunder models list")),
    foreign(&["--completion-bash"], NoValue, &[], Refused("use thunder completions bash")),
    foreign(
        &["--rpc"],
        One,
        &["LLAMA_ARG_RPC"],
        Refused("a model cannot be distributed over several machines: remove the flag"),
    ),
    foreign(&["--fit", "-fit"], Optional, &["LLAMA_ARG_FIT"], FIT),
    foreign(&["--fit-target", "-fitt"], One, &["LLAMA_ARG_FIT_TARGET"], FIT),
    foreign(&["--fit-ctx", "-fitc"], One, &["LLAMA_ARG_FIT_CTX"], FIT),
    foreign(
        &["--lazy-mode", "-lzm"],
        One,
        &["LLAMA_ARG_LAZY_MODE"],
        NoEffect("all weights are loaded at start; the file is mapped unless --no-mmap is set"),
    ),
    foreign(&["--cpu-mask-batch", "-Cb"], One, &[], BATCH),
    foreign(&["--cpu-range-batch", "-Crb"], One, &[], BATCH),
    foreign(&["--cpu-strict-batch", "--prio-batch", "--poll-batch"], One, &[], BATCH),
    foreign(&["--ctx-checkpoints", "-ctxcp", "--swa-checkpoints"], One, &["LLAMA_ARG_CTX_CHECKPOINTS"], STATES),
    foreign(&["--checkpoint-min-step", "-cms"], One, &["LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT"], STATES),
    foreign(&["--cache-idle-slots", "--no-cache-idle-slots"], NoValue, &["LLAMA_ARG_CACHE_IDLE_SLOTS"], STATES),
    foreign(
        &["--kv-unified-per-slot"],
        One,
        &["LLAMA_ARG_KV_UNIFIED_PER_SLOT"],
        NoEffect("each slot has --ctx-size divided by --parallel, or with --kv-unified all of it"),
    ),
    foreign(&["--defrag-thold", "-dt"], One, &["LLAMA_ARG_DEFRAG_THOLD"], Silent),
    foreign(&["--swa-full"], NoValue, &["LLAMA_ARG_SWA_FULL"], Silent),
    foreign(&["--jinja"], NoValue, &["LLAMA_ARG_JINJA"], Silent),
    foreign(
        &["--no-jinja"],
        NoValue,
        &[],
        NoEffect("templates are always rendered as Jinja; --chat-template sets another template"),
    ),
    foreign(&["--warmup", "--no-warmup"], NoValue, &[], Silent),
    foreign(&["--cont-batching", "-cb"], NoValue, &["LLAMA_ARG_CONT_BATCHING"], Silent),
    foreign(
        &["--no-cont-batching", "-nocb"],
        NoValue,
        &[],
        NoEffect("batching is always continuous; --parallel 1 generates one run at a time"),
    ),
    foreign(&["--perf", "--no-perf"], NoValue, &["LLAMA_ARG_PERF"], Silent),
    foreign(&["--escape", "-e", "--no-escape"], NoValue, &[], Silent),
    foreign(&["--ui", "--webui"], NoValue, &["LLAMA_ARG_UI"], Silent),
    foreign(
        &["--threads-http"],
        One,
        &["LLAMA_ARG_THREADS_HTTP"],
        NoEffect("HTTP is served asynchronously, with one thread per core"),
    ),
    foreign(
        &["--timeout", "-to"],
        One,
        &["LLAMA_ARG_TIMEOUT"],
        NoEffect("the duration of a response is not limited, and closed connections are detected without a timeout"),
    ),
    foreign(&["--log-prefix", "--no-log-prefix"], NoValue, &["LLAMA_ARG_LOG_PREFIX"], LINES),
    foreign(&["--log-timestamps", "--no-log-timestamps"], NoValue, &["LLAMA_ARG_LOG_TIMESTAMPS"], LINES),
    foreign(&["--log-jsonl"], NoValue, &["LLAMA_ARG_LOG_JSONL"], NoEffect("use --log-format json")),
    foreign(&["--no-log-jsonl"], NoValue, &[], Silent),
    foreign(
        &["--log-prompts-dir"],
        One,
        &[],
        NoEffect("every prompt is recorded in the database; thunder export writes a run to a file"),
    ),
    foreign(
        &["--special", "-sp"],
        NoValue,
        &[],
        NoEffect("control tokens are not part of texts; \"return_tokens\": true in a request returns their ids"),
    ),
    foreign(
        &["--backend-sampling", "-bs"],
        NoValue,
        &["LLAMA_ARG_BACKEND_SAMPLING"],
        NoEffect("tokens are sampled on the CPU"),
    ),
    foreign(
        &["--skip-chat-parsing"],
        NoValue,
        &["LLAMA_ARG_SKIP_CHAT_PARSING"],
        NoEffect(
            "\"parse_tool_calls\": false and \"reasoning_format\": \"none\" in a request return the answer unparsed",
        ),
    ),
    foreign(&["--no-skip-chat-parsing"], NoValue, &[], Silent),
    foreign(
        &["--reasoning-preserve", "--no-reasoning-preserve"],
        NoValue,
        &["LLAMA_ARG_REASONING_PRESERVE"],
        NoEffect(
            "the chat template determines whether earlier reasoning is kept; --chat-template-kwargs can configure it",
        ),
    ),
    foreign(
        &["--models-preset"],
        One,
        &["LLAMA_ARG_MODELS_PRESET"],
        Refused("set --models-dir to a folder of GGUF files"),
    ),
    foreign(&["--media-path"], One, &[], MEDIA),
    foreign(
        &["--mmproj-url", "-mmu"],
        One,
        &["LLAMA_ARG_MMPROJ_URL"],
        Refused("download the projector, and set --mmproj to the path of its GGUF file"),
    ),
    foreign(&["--mmproj-auto", "--no-mmproj", "--no-mmproj-auto"], NoValue, &["LLAMA_ARG_MMPROJ_AUTO"], Silent),
    foreign(&["--mmproj-device", "-mmdev"], One, &[], PROJECTOR),
    foreign(&["--mtmd-batch-max-tokens"], One, &["LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"], PROJECTOR),
    foreign(&["--video-fps"], One, &["LLAMA_ARG_VIDEO_FPS"], MEDIA),
    foreign(&["--video-timestamp-interval"], One, &["LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"], MEDIA),
    foreign(&["--video-ffmpeg-dir"], One, &["LLAMA_ARG_VIDEO_FFMPEG_DIR"], MEDIA),
    foreign(
        &["--path"],
        One,
        &["LLAMA_ARG_STATIC_PATH"],
        Refused("static files are not served: use a web server in front of Thunder; --no-ui disables the dashboard"),
    ),
    foreign(
        &["--reuse-port"],
        NoValue,
        &["LLAMA_ARG_REUSE_PORT"],
        NoEffect("a port is never shared, so that two servers cannot receive each other's requests by mistake"),
    ),
    foreign(&["--cors-methods"], One, &["LLAMA_ARG_CORS_METHODS"], CORS),
    foreign(&["--cors-headers"], One, &["LLAMA_ARG_CORS_HEADERS"], CORS),
    foreign(&["--cors-credentials", "--no-cors-credentials"], NoValue, &["LLAMA_ARG_CORS_CREDENTIALS"], CORS),
    foreign(
        &["--ui-config", "--webui-config"],
        One,
        &["LLAMA_ARG_UI_CONFIG"],
        NoEffect("the dashboard has no settings"),
    ),
    foreign(
        &["--ui-config-file", "--webui-config-file"],
        One,
        &["LLAMA_ARG_UI_CONFIG_FILE"],
        NoEffect("the dashboard has no settings"),
    ),
    foreign(&["--ui-mcp-proxy", "--webui-mcp-proxy"], NoValue, &["LLAMA_ARG_UI_MCP_PROXY"], AGENT),
    foreign(&["--no-ui-mcp-proxy", "--no-webui-mcp-proxy", "--no-agent", "-no-ag"], NoValue, &[], Silent),
    foreign(&["--agent", "-ag"], NoValue, &["LLAMA_ARG_AGENT"], AGENT),
    foreign(&["--tools"], One, &["LLAMA_ARG_TOOLS"], AGENT),
    foreign(&["--tools-runtime"], One, &["LLAMA_ARG_TOOLS_RUNTIME"], AGENT),
    foreign(&["--mcp-servers-config"], One, &["LLAMA_ARG_MCP_SERVERS_CONFIG"], AGENT),
    foreign(&["--mcp-servers-json"], One, &["LLAMA_ARG_MCP_SERVERS_JSON"], AGENT),
    foreign(
        &["--lookup-cache-static", "-lcs", "--lookup-cache-dynamic", "-lcd"],
        One,
        &["LLAMA_ARG_DRAFT_MAX", "LLAMA_ARG_DRAFT_MIN"],
        DRAFT,
    ),
    foreign(
        &["--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft"],
        One,
        &["LLAMA_ARG_SPEC_DRAFT_HF_REPO"],
        NoEffect("draft models are not downloaded; set --spec-draft-model to the path of a GGUF file"),
    ),
    foreign(
        &[
            "--spec-draft-cpu-moe",
            "-cmoed",
            "--cpu-moe-draft",
            "--spec-draft-backend-sampling",
            "--no-spec-draft-backend-sampling",
        ],
        NoValue,
        &["LLAMA_ARG_SPEC_DRAFT_CPU_MOE", "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING"],
        DRAFT,
    ),
    foreign(
        &[
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
            "--spec-synth-len",
            "--spec-synth-rates",
            "--spec-draft-p-split",
            "--draft-p-split",
            "--spec-draft-device",
            "-devd",
            "--device-draft",
            "--spec-ngram-mod-n-min",
            "--spec-ngram-mod-n-max",
            "--spec-ngram-mod-n-match",
            "--spec-ngram-simple-min-hits",
            "--spec-ngram-map-k-size-n",
            "--spec-ngram-map-k-size-m",
            "--spec-ngram-map-k-min-hits",
            "--spec-ngram-map-k4v-size-n",
            "--spec-ngram-map-k4v-size-m",
            "--spec-ngram-map-k4v-min-hits",
            "--spec-ngram-min-hits",
        ],
        One,
        &[
            "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
            "LLAMA_ARG_SPEC_SYNTH_LEN",
            "LLAMA_ARG_SPEC_SYNTH_RATES",
            "LLAMA_ARG_SPEC_DRAFT_P_SPLIT",
        ],
        DRAFT,
    ),
];
