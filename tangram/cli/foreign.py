"""Options of vLLM and llama.cpp, and the option of Tangram that replaces each, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """The option that replaces another engine's: `ours`, or None if there is none.

    `note` explains it. `subject` is what options without a replacement are about.
    """

    ours: str | None
    note: str
    subject: str = ""


# Tangram's option, a note, the other engines' names.
_INSTEAD = (
    ("--max-model-len", "", "-c --ctx-size"),
    ("--max-num-seqs", "", "-np --parallel"),
    ("--max-num-batched-tokens", "", "-b --batch-size -ub --ubatch-size"),
    ("--max-tokens", "a request to a server has its own max_tokens", "--predict --n-predict"),
    ("--max-tokens", "that of llama.cpp; vLLM's -n is --nnodes: a model is in one machine", "-n"),
    ("--page-tokens", "", "--block-size"),
    ("--tensor-parallel-size", "", "-tp"),
    ("--replicas", "an option of tangram deploy", "-dp --data-parallel-size"),
    ("--chunk-tokens", "", "--long-prefill-token-threshold"),
    ("--prompt-patience", "0 is first come, first served", "--scheduling-policy"),
    ("--kv-cache-gib", "", "--kv-cache-memory-bytes --kv-cache-memory --num-gpu-blocks-override"),
    ("--kv-offload-gib", "", "--swap-space --kv-offloading-size -cram --cache-ram"),
    (
        "--kv-cache-dtype",
        "keys and values have the same dtype",
        "-ctk --cache-type-k -ctv --cache-type-v",
    ),
    ("--quantization", "it rounds weights as it loads a model", "-q"),
    ("--enable-prefix-caching", "it is on by default", "--cache-prompt"),
    ("--no-enable-prefix-caching", "", "--no-cache-prompt"),
    ("--device", "choose GPUs with CUDA_VISIBLE_DEVICES", "-dev -mg --main-gpu --device-ids"),
    ("--seed", "", "-s"),
    ("--served-model-name", "", "-a --alias"),
    ("--request-timeout-s", "", "-to --timeout"),
    ("--shutdown-grace-s", "", "--shutdown-timeout"),
    ("--otlp-endpoint", "", "--otlp-traces-endpoint"),
    (
        "--kv-events",
        "the endpoint; --kv-events-replay and --kv-events-topic are the other fields",
        "--kv-events-config",
    ),
    (
        "--log-format",
        "with json the log has a line for each request",
        "--enable-log-requests --log-jsonl --log-config-file",
    ),
    ("--api-key", "or set TANGRAM_API_KEY", "--api-key-file"),
    ("--temperature", "", "--temp"),
    (
        "--generation-config",
        "a folder with a generation_config.json of your own",
        "--override-generation-config",
    ),
    (
        "--speculative-config",
        "JSON that has the method and all its numbers",
        "-sc --spec-method --spec-model --spec-tokens --speculative-model "
        "--num-speculative-tokens -md --model-draft --draft --draft-max",
    ),
    ("--page", "it says who may see the page at /", "--webui --ui"),
    ("--no-page", "", "--no-webui --no-ui"),
    ("--batch", "", "-i --input-file"),
    ("--output", "", "--output-file"),
)

# What options are about, why there are none here, the other engines' names.
_NONE = {
    "the model's files": (
        (
            "the model is the argument without a name: tangram serve MODEL, where MODEL is an id, "
            "a folder or a GGUF file",
            "-m --model -mu --model-url -hf --hf-repo -hff --hf-file",
        ),
        ("HF_HOME names the folder for downloads", "--download-dir"),
        ("set HF_TOKEN", "--hf-token -hft"),
        ("set HF_HUB_OFFLINE=1", "--offline"),
        ("give a folder that holds the revision you want", "--revision --code-revision"),
        (
            "the model's own tokenizer is used",
            "--tokenizer --tokenizer-mode --tokenizer-revision --skip-tokenizer-init",
        ),
        (
            "edit the model's config.json instead",
            "--hf-overrides --hf-config-path --config-format --override-kv --rope-scaling "
            "--rope-theta --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
            "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
        ),
    ),
    "weights": (
        (
            "weights are read in one way, from safetensors or GGUF files",
            "--safetensors-load-strategy --safetensors-prefetch-block-size "
            "--safetensors-prefetch-num-threads --ignore-patterns --model-loader-extra-config "
            "--pt-load-map-location --use-tqdm-on-load --max-parallel-loading-workers",
        ),
        (
            "the forms of --quantization have no settings, and a checkpoint says by itself how "
            "its weights are stored",
            "--quantization-config --allow-deprecated-quantization",
        ),
        (
            "the whole model is on --device",
            "-ngl --gpu-layers --n-gpu-layers --offload-backend --cpu-offload-gb "
            "--cpu-offload-params --offload-group-size --offload-num-in-group --offload-params "
            "--offload-prefetch-step -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe",
        ),
        (
            "weights stay on the device as they were loaded",
            "--enable-sleep-mode --enable-cumem-allocator --weight-transfer-config",
        ),
        (
            "the operating system places the weights",
            "--mlock --mmap --no-mmap --numa --numa-bind --numa-bind-nodes --numa-bind-cpus -lm",
        ),
    ),
    "plug-ins": (
        ("code in a model's folder is never run", "--trust-remote-code"),
        (
            "the server loads no code by name",
            "--io-processor-plugin --logits-processors --middleware --reasoning-parser-plugin "
            "--scheduler-cls --tool-parser-plugin --worker-cls --worker-extension-cls",
        ),
        ("models run on the layers of Transformers", "--model-impl --additional-config"),
    ),
    "several devices": (
        (
            "a model is cut by --tensor-parallel-size alone, in one machine",
            "-pp --pipeline-parallel-size -pcp --prefill-context-parallel-size -dcp "
            "--decode-context-parallel-size --dcp-comm-backend --dcp-kv-cache-interleave-size "
            "--cp-kv-cache-interleave-size --nnodes -r --node-rank --master-addr --master-port "
            "--headless --distributed-executor-backend --distributed-timeout-seconds "
            "--cpu-distributed-timeout-seconds --disable-custom-all-reduce -sm --split-mode -ts "
            "--tensor-split --rpc",
        ),
        (
            "replicas behind one port are served by tangram deploy --replicas",
            "-asc --api-server-count --aggregate-engine-logging -dpa --data-parallel-address -dpb "
            "--data-parallel-backend -dpe --data-parallel-external-lb -dph "
            "--data-parallel-hybrid-lb -dpl --data-parallel-size-local -dpm "
            "--data-parallel-multi-port-external-lb -dpn --data-parallel-rank -dpp "
            "--data-parallel-rpc-port -dpr --data-parallel-start-rank "
            "--data-parallel-supervisor-port --disable-nccl-for-dp-synchronization "
            "--dp-supervisor-probe-failure-threshold --dp-supervisor-probe-interval-s "
            "--dp-supervisor-probe-timeout-s --prefill-schedule-interval --ray-workers-use-nsight",
        ),
        (
            "--tensor-parallel-size cuts experts like other weights",
            "-ep --enable-expert-parallel --all2all-backend --enable-eplb --eplb-config "
            "--expert-placement-strategy --enable-elastic-ep --enable-ep-weight-filter "
            "--enable-dbo --dbo-decode-token-threshold --dbo-prefill-token-threshold",
        ),
    ),
    "the KV cache": (
        (
            "KV pages are on --device, and --kv-offload-gib adds host memory for evicted chunks",
            "-kvo --kv-offload -nkvo --no-kv-offload --kv-offloading-backend",
        ),
        (
            "one server shares its KV pages between requests, and saves none to files",
            "--kv-transfer-config --slot-save-path --prompt-cache",
        ),
        (
            "all layers have --kv-cache-dtype, and scales are in profiles",
            "--calculate-kv-scales --kv-cache-dtype-skip-layers",
        ),
        ("prefixes are always found by SHA-256", "--prefix-caching-hash-algo"),
        (
            "layers with windows always hold their windows alone",
            "--disable-hybrid-kv-cache-manager --disable-sliding-window --swa-full",
        ),
        (
            "a conversation ends at --max-model-len, and no token is shifted out",
            "--context-shift --no-context-shift --keep --cache-reuse",
        ),
        (
            "models with state-space, linear-attention or shared layers are not served",
            "--enable-mamba-cache-stochastic-rounding --gdn-prefill-backend "
            "--kv-sharing-fast-prefill --mamba-backend --mamba-block-size --mamba-cache-dtype "
            "--mamba-cache-mode --mamba-cache-philox-rounds --mamba-ssm-cache-dtype",
        ),
    ),
    "kernels and compilation": (
        (
            "Tangram has its own attention kernels, and PyTorch's for the rest",
            "-fa --flash-attn --attention-backend -ac --attention-config --disable-cascade-attn "
            "--enable-flashinfer-autotune --ir-op-priority --kernel-config --linear-backend "
            "--moe-backend --override-attention-dtype",
        ),
        (
            "--enforce-eager turns compilation and CUDA graphs off; on a CPU --compile-decode "
            "turns compilation on",
            "-O -cc --compilation-config --cudagraph-capture-sizes --max-cudagraph-capture-size "
            "--max-seq-len-to-capture --optimization-level --performance-mode",
        ),
    ),
    "scheduling": (
        (
            "prompts are always computed in chunks of --chunk-tokens",
            "--enable-chunked-prefill --no-enable-chunked-prefill --max-num-partial-prefills "
            "--max-long-partial-prefills",
        ),
        (
            "the scheduler decides again at each step",
            "--async-scheduling --num-scheduler-steps --scheduler-delay-factor --preemption-mode "
            "-cb --cont-batching -nocb --no-cont-batching",
        ),
        (
            "pages are promised chunk by chunk, so that none is missing within one",
            "--scheduler-reserve-full-isl --watermark",
        ),
        ("tokens are sent after each step", "--stream-interval"),
    ),
    "adapters": (
        (
            "LoRA is not supported",
            "--enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras "
            "--lora-dtype --lora-target-modules --default-mm-loras --enable-mixed-moe-lora-format "
            "--enable-tower-connector-lora --fully-sharded-loras --specialize-active-lora --lora "
            "--lora-scaled",
        ),
    ),
    "images and sound": (
        (
            "images and sound are not supported",
            "--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb "
            "--mm-processor-cache-type --mm-shm-cache-max-object-size-mb --mm-encoder-only "
            "--mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype "
            "--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path "
            "--mm-encoder-fp8-scale-save-margin --mm-tensor-ipc --enable-mm-embeds "
            "--interleave-mm-strings --language-model-only --media-io-kwargs --skip-mm-profiling "
            "--video-pruning-rate --disable-chunked-mm-input --ec-transfer-config "
            "--allowed-local-media-path --allowed-media-domains -mm --mmproj --mmproj-url",
        ),
    ),
    "other tasks": (
        (
            "Tangram generates text only, token after token",
            "--task --runner --convert --embedding --embeddings --pooling --pooler-config "
            "--rerank --reranking --enable-flash-late-interaction -dc --diffusion-config",
        ),
    ),
    "prompts": (
        (
            "the model's own chat template is used",
            "--chat-template --chat-template-file --jinja --no-jinja "
            "--chat-template-content-format --trust-request-chat-template --response-role",
        ),
        ("each request has its own chat_template_kwargs", "--default-chat-template-kwargs"),
        ("a prompt is a text, messages or token ids", "--enable-prompt-embeds"),
        ("prompts are tokenized on a thread of its own", "--renderer-num-workers"),
    ),
    "tools and thoughts": (
        (
            "the parser of tool calls and reasoning follows from the model",
            "--tool-call-parser --enable-auto-tool-choice --reasoning-parser --reasoning-config "
            "--enable-reasoning --reasoning-format",
        ),
        (
            "with tool_choice none the model is never shown the tools",
            "--exclude-tools-when-tool-choice-none",
        ),
        ("the server runs no tools; clients do", "--tool-server"),
    ),
    "answers": (
        (
            "each request has its own response_format",
            "--guided-decoding-backend --structured-outputs-config --grammar --grammar-file -j "
            "--json-schema",
        ),
        (
            "each request to a server has a field of the same name",
            "--top-k --top-p --min-p --presence-penalty --frequency-penalty --logit-bias "
            "--ignore-eos",
        ),
        ("each request to a server has repetition_penalty", "--repeat-penalty"),
        (
            "sampling has temperature, top_k, top_p and min_p",
            "--mirostat --typical --dry-multiplier --xtc-probability --samplers --use-fp64-gumbel",
        ),
        ("at most 20 alternatives a token", "--max-logprobs"),
        (
            "log-probabilities are the model's own, before temperature and penalties",
            "--logprobs-mode",
        ),
        ("answers always have it", "--enable-prompt-tokens-details --enable-request-id-headers"),
        (
            "a stream has its usage if stream_options.include_usage asks for it",
            "--enable-force-include-usage",
        ),
        (
            "answers have text, and neither token ids, experts nor a fingerprint",
            "--return-tokens-as-token-ids --tokens-only --enable-return-routed-experts "
            "--fingerprint-mode --fingerprint-value",
        ),
    ),
    "the server": (
        (
            "put a proxy before the server",
            "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers "
            "--enable-ssl-refresh --ssl-key-file --ssl-cert-file --root-path --api-prefix --uds",
        ),
        (
            "--allowed-origins is enough, and no cookies are used",
            "--allow-credentials --allowed-headers --allowed-methods",
        ),
        (
            "the bounds are in docs/http.md, and --max-body-mb changes that of a body",
            "--h11-max-header-count --h11-max-incomplete-event-size",
        ),
        ("the server speaks HTTP only", "--grpc"),
        ("options are given on the command line", "--config --fail-on-environ-validation"),
        (
            "/docs is always there, and asks no other host for anything",
            "--disable-fastapi-docs --enable-offline-docs",
        ),
        (
            "/tokenize and /detokenize are the endpoints of the tokenizer",
            "--enable-tokenizer-info-endpoint",
        ),
    ),
    "logs and metrics": (
        (
            "the metrics count requests, and --log-format json logs them",
            "--disable-log-requests --disable-log-stats --disable-uvicorn-access-log "
            "--disable-access-log-for-endpoints --enable-log-outputs --enable-log-deltas "
            "--enable-logging-iteration-details --jit-monitor-verbose --log-error-stack "
            "--max-log-len --uvicorn-log-level --log-disable --log-file -v --verbose",
        ),
        (
            "the server always has /metrics",
            "--enable-server-load-tracking --kv-cache-metrics --metrics --slots --props",
        ),
        (
            "the metrics and spans that there are stand in docs/observability.md",
            "--collect-detailed-traces --cudagraph-metrics --enable-layerwise-nvtx-tracing "
            "--enable-mfu-metrics --kv-cache-metrics-sample --profiler-config "
            "--show-hidden-metrics-for-version",
        ),
    ),
    "conversations in a terminal": (
        (
            "use the commands chat and generate",
            "-cnv --conversation --interactive -sys --system-prompt",
        ),
    ),
}


def _table() -> Iterator[tuple[str, Foreign]]:
    for ours, note, names in _INSTEAD:
        yield from ((name, Foreign(ours, note)) for name in names.split())
    for subject, notes in _NONE.items():
        for note, names in notes:
            yield from ((name, Foreign(None, note, subject)) for name in names.split())


FOREIGN = dict(_table())


def explain(name: str, options: list[str]) -> str | None:
    """The message about the unknown option `name` of a command with these `options`.

    None if no other engine has an option of that name.
    """
    found = FOREIGN.get(name)
    if found is None:
        return None
    if found.ours is None:
        return f"No such option: {name}. There is none: {found.note}."
    missing = "" if found.ours in options else ", which this command does not have"
    return (
        f"No such option: {name}. It is {found.ours} in "
        f"Tangram{missing}{found.note and f' ({found.note})'}."
    )
