"""Options of vLLM and llama.cpp, and the option of Tangram that replaces each, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """The option that replaces another engine's: `ours`, or None if there is none.

    `note` explains it.
    """

    ours: str | None
    note: str


# Tangram's option, a note, the other engines' names.
_INSTEAD = (
    ("--max-model-len", "", "-c --ctx-size"),
    ("--max-num-seqs", "", "-np --parallel"),
    ("--max-num-batched-tokens", "", "-b --batch-size -ub --ubatch-size"),
    ("--max-tokens", "a request to a server has its own max_tokens", "-n --predict --n-predict"),
    ("--page-tokens", "", "--block-size"),
    ("--tensor-parallel-size", "", "-tp"),
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
    (
        "--scheduling",
        "continuous is the default; static turns it off",
        "-cb --cont-batching -nocb --no-cont-batching",
    ),
    ("--enable-prefix-caching", "it is on by default", "--cache-prompt"),
    ("--no-enable-prefix-caching", "", "--no-cache-prompt"),
    ("--device", "choose a GPU with CUDA_VISIBLE_DEVICES", "-dev -mg --main-gpu"),
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
        "--speculative-config",
        "JSON that has the method and all its numbers",
        "--speculative-model --num-speculative-tokens -md --model-draft --draft --draft-max",
    ),
    ("--batch", "", "-i --input-file"),
    ("--output", "", "--output-file"),
)

# Why there is no such option, the other engines' names.
_NONE = (
    (
        "The model is the argument without a name: tangram serve MODEL, where MODEL is an id, a "
        "folder or a GGUF file",
        "-m --model -mu --model-url -hf --hf-repo -hff --hf-file",
    ),
    ("There is none: HF_HOME names the folder for downloads", "--download-dir"),
    ("There is none: set HF_TOKEN", "-hft --hf-token"),
    ("There is none: set HF_HUB_OFFLINE=1", "--offline"),
    ("There is none: give a folder that holds the revision you want", "--revision --code-revision"),
    (
        "There is none: the model's own tokenizer is used",
        "--tokenizer --tokenizer-mode --tokenizer-revision --skip-tokenizer-init",
    ),
    ("There is none: code in a model's folder is never run", "--trust-remote-code"),
    (
        "There is none: edit the model's config.json instead",
        "--hf-overrides --config-format --override-kv --rope-scaling --rope-theta --rope-scale "
        "--rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor "
        "--yarn-beta-slow --yarn-beta-fast",
    ),
    (
        "There is none yet: a model is cut by --tensor-parallel-size alone; for more servers start "
        "one per GPU, with CUDA_VISIBLE_DEVICES",
        "-pp --pipeline-parallel-size -dp --data-parallel-size --enable-expert-parallel "
        "--distributed-executor-backend --disable-custom-all-reduce -sm --split-mode -ts "
        "--tensor-split --rpc",
    ),
    (
        "There is none: the whole model is on --device",
        "-ngl --gpu-layers --n-gpu-layers --cpu-offload-gb -ot --override-tensor -cmoe --cpu-moe "
        "-ncmoe --n-cpu-moe",
    ),
    (
        "There is none: KV pages are on --device, and --kv-offload-gib adds host memory for "
        "evicted chunks",
        "-kvo --kv-offload -nkvo --no-kv-offload",
    ),
    (
        "There is none: prompts are always computed in chunks of --chunk-tokens",
        "--enable-chunked-prefill --no-enable-chunked-prefill --max-num-partial-prefills",
    ),
    (
        "There is none: Tangram has its own attention kernels",
        "-fa --flash-attn --attention-backend --disable-sliding-window --swa-full",
    ),
    (
        "There is none: --enforce-eager turns compilation and CUDA graphs off",
        "-O --compilation-config --cudagraph-capture-sizes --max-seq-len-to-capture",
    ),
    (
        "There is none: the scheduler decides again at each step",
        "--async-scheduling --num-scheduler-steps --scheduler-delay-factor --preemption-mode",
    ),
    (
        "There is none: the operating system places the weights",
        "--mlock --mmap --no-mmap --numa -lm",
    ),
    (
        "There is none: LoRA is not supported",
        "--enable-lora --lora-modules --max-loras --max-lora-rank --lora --lora-scaled",
    ),
    (
        "There is none: images and sound are not supported",
        "--limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path -mm --mmproj "
        "--mmproj-url",
    ),
    (
        "There is none: Tangram generates text only",
        "--task --runner --embedding --embeddings --pooling --rerank --reranking",
    ),
    (
        "There is none: the model's own chat template is used",
        "--chat-template --chat-template-file --jinja --no-jinja --chat-template-content-format",
    ),
    (
        "There is none: the parser of tool calls and reasoning follows from the model",
        "--tool-call-parser --enable-auto-tool-choice --reasoning-parser --enable-reasoning "
        "--reasoning-format",
    ),
    (
        "There is none: each request has its own response_format",
        "--guided-decoding-backend --structured-outputs-config --grammar --grammar-file -j "
        "--json-schema",
    ),
    (
        "There is none: each request to a server has a field of the same name",
        "--top-k --top-p --min-p --presence-penalty --frequency-penalty --logit-bias --ignore-eos",
    ),
    ("There is none: each request to a server has repetition_penalty", "--repeat-penalty"),
    (
        "There is none: sampling has temperature, top_k, top_p and min_p",
        "--mirostat --typical --dry-multiplier --xtc-probability --samplers",
    ),
    (
        "There is none: request fields have the defaults that docs/http.md lists",
        "--generation-config --override-generation-config --max-logprobs",
    ),
    (
        "There is none: put a proxy before the server",
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-key-file --ssl-cert-file --root-path "
        "--api-prefix --uds",
    ),
    (
        "There is none: the metrics count requests, and --log-format json logs them",
        "--disable-log-requests --disable-log-stats --max-log-len --uvicorn-log-level "
        "--log-disable --log-file -v --verbose",
    ),
    ("There is none: the server always has /metrics", "--metrics --slots --props"),
    (
        "There is none: a conversation ends at --max-model-len, and no token is shifted out",
        "--context-shift --no-context-shift --keep --cache-reuse",
    ),
    (
        "There is none: one server shares its KV pages between requests, and saves none to files",
        "--kv-transfer-config --slot-save-path --prompt-cache",
    ),
    (
        "There is none: use the commands chat and generate",
        "-cnv --conversation --interactive -sys --system-prompt",
    ),
    ("There is none: use `tangram chat` in a terminal", "--webui --no-webui --ui --no-ui"),
)


def _table() -> Iterator[tuple[str, Foreign]]:
    for ours, note, names in _INSTEAD:
        yield from ((name, Foreign(ours, note)) for name in names.split())
    for note, names in _NONE:
        yield from ((name, Foreign(None, note)) for name in names.split())


FOREIGN = dict(_table())


def explain(name: str, options: list[str]) -> str | None:
    """The message about the unknown option `name` of a command with these `options`.

    None if no other engine has an option of that name.
    """
    found = FOREIGN.get(name)
    if found is None:
        return None
    if found.ours is None:
        return f"No such option: {name}. {found.note}."
    missing = "" if found.ours in options else ", which this command does not have"
    return (
        f"No such option: {name}. It is {found.ours} in "
        f"Tangram{missing}{found.note and f' ({found.note})'}."
    )
