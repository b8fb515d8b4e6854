"""Log messages at a start: how long a calibration takes and why, and how many tokens fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tangram.calibrate.measure import ScoreSource, check_lengths
from tangram.config import EngineConfig
from tangram.engine.admission import Admission
from tangram.engine.setup.memory import GIB
from tangram.model.load import LoadedModel
from tangram.speculative_config import CompressedKv

_log = logging.getLogger("tangram")


def foretell_calibration(
    source: ScoreSource, samples: Sequence[Sequence[int]], chunk_tokens: int
) -> None:
    """Log how long it takes to score `samples` (token ids), from the time of one chunk.

    `source` scores the chunk. Raises `ConfigError` if a sample is shorter than a chunk.
    """
    check_lengths(samples, chunk_tokens)
    chunks = sum(len(sample) // chunk_tokens for sample in samples)
    for _ in range(2):  # the first time may compile something
        begin_s = time.perf_counter()
        for _ in source(samples[0][:chunk_tokens]):
            pass
        chunk_s = time.perf_counter() - begin_s
    _log.warning(
        "the calibration takes about %s: %s tokens, of which this machine reads %.0f a second",
        in_words(chunks * chunk_s),
        f"{chunks * chunk_tokens:,}",
        chunk_tokens / chunk_s,
    )


def in_words(seconds: float) -> str:
    """A rough duration: "5 s", "40 s", "12 minutes"."""
    return (
        f"{max(5, 5 * round(seconds / 5))} s" if seconds < 90 else f"{round(seconds / 60)} minutes"
    )


def announce(
    config: EngineConfig, loaded: LoadedModel, admission: Admission, host_pages: int
) -> None:
    """Log how many tokens fit, and how many would without compression (`Layout.tokens_in`).

    It also logs what holds where requests state nothing. Sequences are as long as `max_model_len`.
    `config` names scorer and scope.
    """
    default = admission.retentions[0]
    pages, length = admission.total_pages, admission.max_model_len
    compressed = default.layout.tokens_in(pages, length)
    uncompressed = admission.uncompressed.tokens_in(pages, length)
    page_gib = default.layout.page_bytes(admission.element_bytes) / GIB
    everything = default.layout.keeps_everything
    method = "nothing dropped" if everything else f"{config.scorer}, scope {config.scope}"
    _log.info(
        "%s on %s, %s, weights %.2f GiB; KV cache in %s, %.2f GiB = %d pages; %s tokens fit at "
        "kv_retention %s (%s), %s would without compression; max_model_len %d, chunk %d tokens",
        config.model,
        loaded.device,
        config.quantization or str(loaded.dtype).removeprefix("torch."),
        loaded.weight_bytes / GIB,
        admission.cache_dtype,
        pages * page_gib,
        pages,
        f"{compressed:,}",
        default.kv_retention,
        method,
        f"{uncompressed:,}",
        admission.max_model_len,
        default.layout.chunk_tokens,
    )
    _log.info(
        "where a request states nothing: %s; --generation-config changes that",
        loaded.defaults.describe(),
    )
    if state_bytes := loaded.geometry.state_bytes:
        _log.info(
            "recurrent states: %.2f MiB each, two of each of %d sequences beside the KV cache",
            state_bytes / (1 << 20),
            config.max_num_seqs,
        )
    if host_pages:
        _log.info(
            "host memory behind it: %.2f GiB = %d pages; %s more tokens fit there at kv_retention "
            "%s, in %s",
            host_pages * admission.host_page_bytes / GIB,
            host_pages,
            # Every chunk goes there with its window's pages.
            f"{default.layout.tokens_in(host_pages, default.layout.chunk_tokens):,}",
            default.kv_retention,
            admission.cache_dtype if config.kv_offload_dtype == "auto" else config.kv_offload_dtype,
        )


def announce_speculation(config: EngineConfig) -> None:
    """Log what drafts, if anything does, and what that costs in memory.

    `config` names scorer and scope.
    """
    drafts = config.speculation
    if drafts is None:
        return
    _log.info(
        "speculation: %s, at most %d drafted tokens of a sequence in a step",
        drafts.method,
        drafts.num_speculative_tokens,
    )
    if isinstance(drafts, CompressedKv):
        _log.info(
            "drafts read %s of the KV entries (%s, scope %s), verification reads all of them: "
            "nothing is dropped, no entry is held twice, and memory is that of kv_retention 1.0",
            drafts.kv_retention,
            config.scorer,
            config.scope,
        )
