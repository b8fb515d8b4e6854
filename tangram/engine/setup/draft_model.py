"""What drafts need: a config that verifies them, and of a second model its own, the same vocabulary
and a share of the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from tangram.cache.layout import Layout
from tangram.config import EngineConfig
from tangram.engine.setup.memory import GIB
from tangram.errors import ConfigError
from tangram.kernels.interface import MOST_QUERIES
from tangram.model.load import LoadedModel
from tangram.speculative_config import NAME, DraftModel

_log = logging.getLogger("tangram")


def draft_config(config: EngineConfig, drafts: DraftModel, max_tokens: int) -> EngineConfig:
    """The config of the model that drafts: nothing is dropped and nothing kept in host memory.

    It has no profile, and so no scales: its cache is no integers, but in the dtype of its weights.
    It reads sequences of up to `max_tokens` tokens.
    """
    return replace(
        config,
        model=drafts.model,
        speculative_config=None,
        max_model_len=max_tokens,
        kv_retention=1.0,
        profile=(),
        scorer=None,
        scope=None,
        gate=None,
        kv_cache_dtype="auto" if config.kv_cache_dtype == "int8" else config.kv_cache_dtype,
        kv_offload_gib=0.0,
        kv_offload_dtype="auto",
        kv_disk_path=None,
        kv_disk_gib=0.0,
        overflow_every=None,
        save_failed_passes=None,
    )


def limit_drafts(config: EngineConfig, group: int) -> EngineConfig:
    """`config` with no more drafts than a GPU verifies in one task, at `group` heads a KV head.

    Raises `ConfigError` if it verifies none.
    """
    drafts, most = config.speculation, MOST_QUERIES // group - 1
    if drafts is None or drafts.num_speculative_tokens <= most:
        return config
    if most < 1:
        raise ConfigError(
            f"{NAME}.num_speculative_tokens is {drafts.num_speculative_tokens}: a GPU verifies at "
            f"most {MOST_QUERIES} queries of a KV head at a time, and here one token has {group}: "
            f"leave {NAME} out"
        )
    _log.warning(
        "%s.num_speculative_tokens is lowered from %d to %d: with %d query heads of a KV head a "
        "GPU verifies no more at a time",
        NAME,
        drafts.num_speculative_tokens,
        most,
        group,
    )
    values = {field.name: getattr(drafts, field.name) for field in fields(drafts)}
    given = {name: value for name, value in values.items() if value is not None}
    lowered = {"method": drafts.method, **given, "num_speculative_tokens": most}
    return replace(config, speculative_config=lowered)


def readable_tokens(drafts: LoadedModel, served: str, max_tokens: int) -> int:
    """Of sequences of up to `max_tokens` tokens, how many the model `drafts` can read."""
    limit = drafts.geometry.max_positions
    if limit < max_tokens:
        _log.warning(
            "%s was made for %d positions: sequences of %s of more tokens, up to %d, go on "
            "without drafts",
            drafts.name,
            limit,
            served,
            max_tokens,
        )
    return min(limit, max_tokens)


def check_vocabulary(
    served: str, numbers: Mapping[str, int], drafts: str, others: Mapping[str, int]
) -> None:
    """Raise `ConfigError` unless each token has the same id in both models, which have names.

    Their end tokens may differ: a drafted end token is verified as others are.
    """
    different = [
        token for token in numbers.keys() | others.keys() if numbers.get(token) != others.get(token)
    ]
    if different:
        token = min(different, key=lambda text: (numbers.get(text, others.get(text)), text))
        raise ConfigError(
            f"{NAME}.model is {drafts}, whose tokenizer is not that of {served}: they "
            f"differ in {len(different)} tokens; {token!r} has number {others.get(token)} in "
            f"{drafts} and {numbers.get(token)} in {served}: choose a draft model of the "
            "same family"
        )


@dataclass(frozen=True)
class PoolShape:
    """The pages of one model: their layout, the bytes of each, and the length of sequences."""

    layout: Layout
    page_bytes: int
    length_tokens: int

    @property
    def sequence_tokens(self) -> int:
        """`length_tokens` in whole chunks, one at least, as `Layout.tokens_in` rounds them."""
        chunk = self.layout.chunk_tokens
        return max(1, self.length_tokens // chunk) * chunk

    @property
    def sequence_pages(self) -> int:
        """Pages that a prompt of `sequence_tokens` is promised."""
        return self.layout.count_promised_pages(self.sequence_tokens, self.sequence_tokens)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of these pages."""
        return self.sequence_pages * self.page_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes of one sequence until its first chunk is sealed."""
        return self.layout.most_pages(self.layout.chunk_tokens) * self.page_bytes


def draft_bytes(total: int, drafts: DraftModel, served: PoolShape, drafting: PoolShape) -> int:
    """Of `total` bytes for KV pages, those of the model that drafts.

    By default both models have pages for as many sequences. Raises `ConfigError` if one of the
    models has none left.
    """
    if drafts.kv_cache_gib is None:
        both = served.sequence_bytes + drafting.sequence_bytes
        share = -(-total * drafting.sequence_bytes // both)
    else:
        share = int(drafts.kv_cache_gib * GIB)
    least, most = drafting.least_bytes, total - served.least_bytes
    if not least <= share <= most:
        raise ConfigError(
            f"{NAME}.kv_cache_gib is {share / GIB:.4g}, it must lie between {least / GIB:.4g} and "
            f"{most / GIB:.4g}: both models share {total / GIB:.4g} GiB, and each needs a chunk: "
            "change it, or raise kv_cache_gib"
        )
    return share


def draft_pages(
    drafts: DraftModel, served_pages: int, served: PoolShape, drafting: PoolShape
) -> int:
    """The pages of the share `draft_bytes` beside `served_pages` of the served model."""
    if drafts.kv_cache_gib is not None:
        share = int(drafts.kv_cache_gib * GIB)
    else:
        alike = served_pages * served.page_bytes * drafting.sequence_bytes
        share = max(alike // served.sequence_bytes, drafting.least_bytes)
    return share // drafting.page_bytes
