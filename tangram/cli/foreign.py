"""Options of vLLM, SGLang and llama.cpp, and what Tangram has instead."""

from __future__ import annotations

from fnmatch import fnmatchcase

# Tangram's option, with a note in brackets where its value is another one; then the other
# engines' names. `*` stands for any letters; a name belongs to the first row that it fits.
INSTEAD = {
    "--max-model-len": "-c --ctx-size --context-length",
    "--max-num-seqs": "-np --parallel --max-running-requests",
    "--max-num-batched-tokens": "-b --batch-size -ub --ubatch-size --max-prefill-tokens",
    "--max-tokens (a request to a server has its own max_tokens)": "-n --predict --n-predict",
    "--page-tokens": "--block-size --page-size",
    "--tensor-parallel-size": "-tp --tp --tp-size",
    "--replicas (an option of tangram deploy)": "-dp --dp --dp-size --data-parallel-size",
    "--api-processes (each tokenizes, too)": "-asc --api-server-count --renderer-num-workers",
    "--chunk-tokens": "--long-prefill-token-threshold --chunked-prefill-size",
    "--prompt-patience (0 is first come, first served)": "--scheduling-policy --schedule-policy",
    "--kv-cache-gib": "--kv-cache-memory* --num-gpu-blocks-override --max-total-tokens",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--kv-offload-gib": "--swap-space --kv-offloading-size -cram --cache-ram --hicache-size",
    "--kv-cache-dtype (keys and values have the same dtype)": "-ctk -ctv --cache-type-*",
    "--quantization (it rounds weights as it loads a model)": "-q",
    "--enable-prefix-caching (it is on by default)": "--cache-prompt",
    "--no-enable-prefix-caching": "--no-cache-prompt --disable-radix-cache",
    "--device (choose GPUs with CUDA_VISIBLE_DEVICES)": "-dev -mg --main-gpu --device-ids",
    "--seed": "-s --random-seed",
    "--served-model-name": "-a --alias",
    "--request-timeout-s": "-to --timeout",
    "--shutdown-grace-s": "--shutdown-timeout",
    "--otlp-endpoint": "--otlp-traces-endpoint",
    "--kv-events (the endpoint; --kv-events-replay and --kv-events-topic are the other fields)": (
        "--kv-events-config"
    ),
    "--log-format (with json the log has a line for each request)": (
        "--enable-log-requests --log-requests --log-jsonl --log-config-file"
    ),
    "--api-key (or set TANGRAM_API_KEY)": "--api-key-file",
    "--temperature": "--temp",
    "--generation-config (a folder with a generation_config.json of your own)": (
        "--override-generation-config --sampling-defaults"
    ),
    "--tool-format": "--tool-call-parser",
    "--thinking-format": "--reasoning-parser --reasoning-format",
    "--speculative-config (JSON that has the method and all its numbers)": (
        "-sc --spec-* --speculative-model --speculative-algo* --speculative-draft* "
        "--speculative-num* --num-speculative-tokens -md --model-draft --draft --draft-max"
    ),
    "--page (it says who may see the page at /)": "--webui --ui",
    "--no-page": "--no-webui --no-ui",
    "--batch": "-i --input-file",
    "--output": "--output-file",
}
# Why there is none, and the other engines' names.
NONE = {
    "the model is the argument without a name: tangram serve MODEL, where MODEL is an id, a folder "
    "or a GGUF file": "-m --model --model-path -mu --model-url -hf -hff --hf-repo --hf-file",
    "HF_HOME, HF_TOKEN and HF_HUB_OFFLINE=1 in the environment do it": (
        "--download-dir --hf-token -hft --offline"
    ),
    "give a folder that holds the revision you want": "--revision --code-revision",
    "the model's own tokenizer is used": "--tokenizer* --skip-tokenizer-init",
    "it made no engine faster, and is gone": "--scheduling --decode-policy",
    "edit the model's config.json instead": (
        "--hf-* --config-format --override-kv --rope-* --yarn-* --json-model-override-args"
    ),
    "weights are read in one way, from safetensors or GGUF files": (
        "--safetensors-* --ignore-patterns --model-loader-* --pt-load-* --use-tqdm-* "
        "--max-parallel-loading-workers"
    ),
    "a checkpoint says how its weights are stored, and --quantization has no settings": (
        "--quantization-* --allow-deprecated-quantization"
    ),
    "the operating system places the weights": "--mlock --mmap --no-mmap --numa* -lm",
    "the whole model is on --device": (
        "-ngl *gpu-layers --offload-* --cpu-offload-* -ot --override-tensor *cpu-moe -cmoe -ncmoe "
        "--enable-sleep-mode --enable-cumem-* --weight-transfer-* --enable-memory-saver"
    ),
    "no code of a model's folder or of a plug-in is run, and models run on the layers of "
    "Transformers": (
        "--trust-remote-code *-plugin --logits-processors --middleware --*-cls --model-impl "
        "--additional-config"
    ),
    "a model is cut by --tensor-parallel-size alone, in one machine": (
        "-pp --pp-size --pipeline-* -pcp -dcp --dcp-* --cp-* *context-parallel-* --nnodes -r "
        "--node-rank --master-* --headless --dist* --cpu-distributed-* --disable-custom-all-reduce "
        "-sm --split-mode -ts --tensor-split --rpc"
    ),
    "replicas behind one port are served by tangram deploy --replicas": (
        "-dp? --data-parallel-* --dp-* *-for-dp-* --aggregate-engine-logging "
        "--prefill-schedule-interval --ray-*"
    ),
    "answers have text, and neither token ids, experts nor a fingerprint": (
        "--return-* --tokens-only --enable-return-* --fingerprint-*"
    ),
    "--tensor-parallel-size cuts experts like other weights": (
        "-ep --ep-size *expert* *eplb* --all2all-backend *-ep *-ep-* *-dbo --dbo-*"
    ),
    "KV pages are on --device, and --kv-offload-gib adds host memory for evicted chunks": (
        "-kvo -nkvo --kv-offload --no-kv-offload --kv-offloading-backend --*hicache*"
    ),
    "one server shares its KV pages between requests, and saves none to files": (
        "--kv-transfer-config --slot-save-path --prompt-cache --disaggregation-*"
    ),
    "all layers have --kv-cache-dtype, and scales are in profiles": (
        "--calculate-kv-scales --kv-cache-dtype-skip-layers"
    ),
    "prefixes are always found by SHA-256": "--prefix-caching-hash-algo",
    "layers with windows always hold their windows alone": (
        "--disable-hybrid-kv-* --disable-sliding-window --swa-*"
    ),
    "a conversation ends at --max-model-len, and no token is shifted out": (
        "*context-shift --keep --cache-reuse"
    ),
    "recurrent layers and layers that share entries need no option": (
        "*mamba* --gdn-* --kv-sharing-*"
    ),
    "prompts are always computed in chunks of --chunk-tokens": "*chunked-prefill *-prefills",
    "the scheduler decides again at each step, and tokens are sent after each": (
        "-cb --cont-batching -nocb --no-cont-batching --async-scheduling --num-scheduler-steps "
        "--scheduler-delay-* --preemption-mode --stream-interval"
    ),
    "pages are promised chunk by chunk, so that none is missing within one": (
        "--scheduler-reserve-* --watermark"
    ),
    "LoRA is not supported": "*lora*",
    "images and sound are not supported": (
        "-mm --mm-* --mmproj* *-mm-* *media* *multimodal --video-* --language-model-only "
        "--ec-transfer-config"
    ),
    "Tangram generates text only, token after token": (
        "--task --runner --convert *embedding* --pool* --rerank* *late-interaction -dc "
        "--diffusion-*"
    ),
    "each request has chat_template_kwargs": (
        "*chat-template-* --trust-request-chat-template --jinja --no-jinja --response-role"
    ),
    "a prompt is a text, messages or token ids": "--enable-prompt-embeds",
    "calls and thoughts are found without it": "--enable-auto-tool-choice *reasoning*",
    "clients run tools, and with tool_choice none the model is not shown them": (
        "--tool-server --exclude-tools-*"
    ),
    "each request has its own response_format": (
        "--guided-* --structured-* *grammar* -j --json-schema"
    ),
    "each request to a server has a field for it": (
        "--top-? --min-p *-penalty --logit-bias --ignore-eos"
    ),
    "sampling has temperature, top_k, top_p and min_p": (
        "--mirostat* --typical* --dry-* --xtc-* --samplers --use-fp64-gumbel"
    ),
    "log-probabilities are the model's own, before any filter, of at most 20 tokens": (
        "--max-logprobs --logprobs-mode"
    ),
    "answers always have it": (
        "--enable-prompt-tokens-details --enable-request-id-headers --enable-cache-report"
    ),
    "a stream has its usage if stream_options.include_usage asks for it": (
        "--enable-force-include-usage"
    ),
    "the server speaks HTTP at a port: put a proxy before it": (
        "*ssl* --root-path --api-prefix --uds --grpc*"
    ),
    "--allowed-origins is enough, and no cookies are used": (
        "--allow-credentials --allowed-headers --allowed-methods"
    ),
    "the bounds are in docs/http.md, and --max-body-mb changes that of a body": "--h11-*",
    "options are given on the command line": "--config --fail-on-environ-validation",
    "/docs is always there, and asks no other host for anything": "*fastapi-docs *offline-docs",
    "/tokenize and /detokenize are the endpoints of the tokenizer": "*tokenizer-info-endpoint",
    "the metrics count requests, and --log-format json logs them": (
        "--*-log --*-log-* --enable-logging-* --log-disable --log-file --log-level* --log-error-* "
        "-v --verbose --jit-monitor-*"
    ),
    "/metrics is always there, and docs/observability.md lists all metrics and spans": (
        "--metrics --?*-metrics* --enable-server-load-tracking --slots --props "
        "--collect-detailed-traces *-tracing --profiler-config"
    ),
    "--enforce-eager turns compilation and CUDA graphs off; on a CPU --compile-decode turns "
    "compilation on": (
        "-O -cc --compilation-config *cudagraph* *cuda-graph* *-to-capture --optimization-level "
        "--performance-mode --enable-torch-compile"
    ),
    "Tangram has its own attention kernels, and PyTorch's for the rest": (
        "-fa -ac *-attn *attention* *flashinfer* --ir-op-* --kernel-config *-backend"
    ),
    "use the commands chat and generate": "-cnv --conversation --interactive -sys --system-prompt",
}


def explain(name: str, options: list[str]) -> str | None:
    """The message about the unknown option `name` of a command with these `options`.

    None if no other engine has an option of that name.
    """
    for instead, theirs in INSTEAD.items():
        if _names(theirs, name):
            ours, _, note = instead.partition(" ")
            missing = "" if ours in options else ", which this command does not have"
            return f"No such option: {name}. It is {ours} in Tangram{missing}{note and ' '}{note}."
    reason = next((reason for reason, theirs in NONE.items() if _names(theirs, name)), None)
    return None if reason is None else f"No such option: {name}. There is none: {reason}."


def _names(patterns: str, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())
