"""Writes docs/from-vllm.md from the commands and metrics: `python -m tools.vllm_page`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from textwrap import fill
from typing import Any

from prometheus_client import Histogram
from prometheus_client.core import Metric

from tangram.cli.foreign import INSTEAD, NONE
from tangram.metrics import EngineStats, SpeculationStats
from tangram.serve.observability.exposition import ServerMetrics
from tangram.serve.observability.vllm_names import VllmNames

PAGE = Path(__file__).parents[1] / "docs" / "from-vllm.md"
# Options of vLLM and of `tangram serve` with one name.
SAME = (
    "--allowed-origins",
    "--api-key",
    "--chat-template",
    "--dtype",
    "--enable-prefix-caching",
    "--enforce-eager",
    "--generation-config",
    "--gpu-memory-utilization",
    "--host",
    "--kv-cache-dtype",
    "--load-format",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--no-enable-prefix-caching",
    "--port",
    "--quantization",
    "--seed",
    "--served-model-name",
    "--speculative-config",
    "--tensor-parallel-size",
)
COMPOSED = {
    "vllm:kv_cache_usage_perc": '`tangram_kv_pages{state="held"}` / `tangram_kv_pages_total`',
    "vllm:cache_config_info": "`--chunk-tokens`, and `tangram_kv_capacity_tokens` over it",
}
HEAD = """# Coming from vLLM

This page lists options and metrics of vLLM and their counterparts in Tangram. It also covers the
options of SGLang and llama.cpp. `tangram serve` prints the same notes when it is started with such
an option. A `*` stands for any letters.
This page is written by `python -m tools.vllm_page`.

## What is different

- **The cache is compressed.** Each attention head keeps a share of its KV entries, half of them by
  default. `--kv-retention 1.0` drops nothing, as in vLLM ([choosing](choose.md)).
- **Prompts are computed in whole chunks**, of `--chunk-tokens`. There is nothing to switch on.
- **Unknown request fields are errors.** vLLM ignores them. With `--unknown-fields warn` this server
  does, too, with a line in the log and a count in the metrics ([HTTP](http.md#request-fields)).
- **A schema is `response_format`**, as in the OpenAI API. `guided_json` and `structured_outputs`
  are refused by name.
- **[Speculation](speculation.md) has four methods**: `ngram`, `suffix` and `draft_model` as in
  vLLM, and `compressed_kv`. Other methods are refused at the start.
- **One server uses one device**, or cuts a model by `--tensor-parallel-size`
  ([several devices](scale.md#one-model-over-several-devices)). `tangram deploy` serves
  [replicas](scale.md#replicas).

## Options with the same name

"""
OPTIONS_HEAD = """
These have the meaning that vLLM gives them, with three exceptions:

- `--quantization` rounds weights as it loads a model. vLLM's also names the form in which a
  checkpoint is stored; here the checkpoint says that by itself.
- `--allowed-origins` is repeated for each origin and has none by default. vLLM's takes a JSON list
  and has all.
- `--generation-config none` is vLLM's `vllm`. The file's `max_new_tokens` holds where a request has
  no `max_tokens`; in vLLM no request gets more ([sampling defaults](http.md#sampling-defaults)).

[Options](options.md) lists their values and defaults here, which may differ.

## Options with another name

| vLLM, SGLang, llama.cpp | Tangram | note |
|---|---|---|
"""
NONE_HEAD = """
## Options that Tangram does not have

Together with the options above these are all of `vllm serve` 0.24. Its switches `--x` have a second
name `--no-x`, which is not listed. Each row says what to do instead, or what always holds. An
option belongs to the first row that it fits.

| vLLM, SGLang, llama.cpp | Tangram |
|---|---|
"""
METRICS_HEAD = """
## Metrics

With `--metrics-aliases vllm` the server shows its metrics under vLLM's names, too, with the labels
`model_name` (the served name) and `engine` (0). As in vLLM, a page that is only cached counts as
free; a block is a chunk. The buckets of histograms are Tangram's. Dashboards and autoscalers that
know vLLM then work unchanged. [Watching a server](observability.md#metrics) says what they mean.

| vLLM | type | Tangram |
|---|---|---|
"""
FOOT = """
vLLM's metrics of adapters, transfers between servers and request parameters have no counterpart.
Those of `spec_decode` are there if the server speculates.
"""


def render() -> str:
    """The page: every option that a command explains, and every metric that has an alias."""
    same = fill(", ".join(f"`{name}`" for name in SAME), 100, break_on_hyphens=False)
    metrics = "".join(_metric_rows())
    renamed, missing = "".join(_renamed_rows()), "".join(_missing_rows())
    return (
        f"{HEAD}{same}.\n{OPTIONS_HEAD}{renamed}{NONE_HEAD}{missing}{METRICS_HEAD}{metrics}{FOOT}"
    )


def _renamed_rows() -> Iterator[str]:
    for instead, theirs in INSTEAD.items():
        ours, _, note = instead.partition(" ")
        yield f"| {_list_names(theirs)} | `{ours}` | {_as_sentence(note.strip('()'))} |\n"


def _missing_rows() -> Iterator[str]:
    for reason, theirs in NONE.items():
        yield f"| {_list_names(theirs)} | {_as_sentence(reason)} |\n"


def _list_names(patterns: str) -> str:
    return " ".join(f"`{pattern}`" for pattern in patterns.split())


def _as_sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _metric_rows() -> Iterator[str]:
    """A row for each alias; Tangram's name is that of the metric with equal samples."""
    metrics = make_distinct_metrics()
    own = {
        _samples(family): f"`{_describe_family(family)}`" for family in metrics.registry.collect()
    }
    for family in VllmNames(metrics, "model").collect():
        ours = COMPOSED.get(family.name) or own[_samples(family)]
        name = _describe_family(family)
        yield f"| `{name}` | {family.type} | {ours} |\n"


def make_distinct_metrics() -> ServerMetrics:
    """Metrics of a server of which no two have the same value."""
    numbers = count(101)  # no count, and no 1 that every server shows
    fields = dataclasses.fields(EngineStats)
    drafted = SpeculationStats(next(numbers), next(numbers), next(numbers), (next(numbers),))
    others: dict[str, Any] = {
        "cache_dtype": "float32",
        "plans": {},
        "overflow": (),
        "speculation": drafted,
    }
    stats = EngineStats(**{one.name: others.get(one.name, next(numbers)) for one in fields})
    metrics = ServerMetrics(lambda: stats)
    metrics.completions.labels(finish_reason="stop").inc(next(numbers))
    for histogram in vars(metrics).values():
        if isinstance(histogram, Histogram):
            histogram.observe(next(numbers))
    return metrics


def _samples(family: Metric) -> tuple[str, tuple[tuple[str, float], ...]]:
    """The common samples of a metric's two names, without creation times."""
    suffixes: Iterable[tuple[str, float]] = (
        (one.name.removeprefix(family.name), one.value) for one in family.samples
    )
    return family.type, tuple(one for one in suffixes if one[0] != "_created")


def _describe_family(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


if __name__ == "__main__":
    PAGE.write_text(render())
