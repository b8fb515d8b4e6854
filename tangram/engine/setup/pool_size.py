"""Sizes of an engine: pages on the device and behind it, and the longest sequence."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tangram.engine.ranks.ranks import agree_on_least
from tangram.engine.setup.blueprint import Blueprint
from tangram.engine.setup.draft_model import PoolShape, draft_bytes, draft_pages
from tangram.engine.setup.memory import (
    GRAPH_BYTES,
    host_page_bytes,
    kv_bytes,
    offload_bytes,
    table_bytes,
)
from tangram.errors import ConfigError
from tangram.model.recurrent import count_state_bytes
from tangram.speculative_config import DraftModel

_log = logging.getLogger("tangram")


@dataclass(frozen=True)
class PoolSize:
    """`pages` on the device, `host_pages` of so many bytes behind it; at most `max_tokens` each."""

    pages: int
    host_pages: int
    host_page_bytes: int
    max_tokens: int


def size_pool(blueprint: Blueprint) -> PoolSize:
    """The pages that the memory holds; a GPU's is measured by a run of the largest step.

    Raises `ConfigError` if they hold no sequence of the configured length.
    """
    config, layout = blueprint.config, blueprint.served.retentions[0].layout
    pages = _count_bytes(blueprint) // blueprint.page_bytes
    host_bytes = host_page_bytes(config, blueprint.loaded, layout)
    host_pages = offload_bytes(config, layout.span_pages * host_bytes) // host_bytes
    return PoolSize(pages, host_pages, host_bytes, _fit_length(blueprint, pages))


def size_draft_pool(
    drafts: DraftModel, blueprint: Blueprint, drafting: Blueprint, pages: int
) -> int:
    """The pages of `drafting`, the model that drafts, beside `pages` of the served model."""
    return draft_pages(drafts, pages, *_shapes(blueprint, drafting))


def _shapes(blueprint: Blueprint, drafting: Blueprint) -> tuple[PoolShape, PoolShape]:
    """Their pages, for sequences of one length."""
    served, other = (
        PoolShape(drawn.served.retentions[0].layout, drawn.page_bytes, blueprint.max_tokens)
        for drawn in (blueprint, drafting)
    )
    return served, other


def _count_bytes(blueprint: Blueprint) -> int:
    """Bytes of the served model's KV pages."""
    config, loaded, drafting = blueprint.config, blueprint.loaded, blueprint.drafting
    fixed = table_bytes(config, [retention.layout for retention in blueprint.served.retentions])
    fixed += count_state_bytes(loaded.states, config.max_num_seqs)
    if blueprint.shares is not None:  # the fullest device decides
        return agree_on_least(kv_bytes(config, loaded, fixed), loaded.device)
    drafts = config.speculation
    if drafting is None or not isinstance(drafts, DraftModel):
        return kv_bytes(config, loaded, fixed)
    served, other = _shapes(blueprint, drafting)
    beside = table_bytes(drafting.config, [other.layout]) + GRAPH_BYTES
    total = kv_bytes(config, loaded, fixed + beside)
    return total - draft_bytes(total, drafts, served, other)


def _fit_length(blueprint: Blueprint, pages: int) -> int:
    """The most tokens of a sequence; without a configured limit no more than `pages` hold."""
    wanted, layout = blueprint.max_tokens, blueprint.served.retentions[0].layout
    if layout.most_pages(wanted) <= pages:
        return wanted
    fits = max(
        (n for n in range(0, wanted, layout.page_tokens) if layout.most_pages(n) <= pages),
        default=0,
    )
    if blueprint.config.max_model_len is not None or fits == 0:
        raise ConfigError(
            f"max_model_len {wanted} needs {layout.most_pages(wanted)} KV pages in one sequence, "
            f"kv_cache_gib gives {pages}, which hold {fits} tokens: raise kv_cache_gib or lower "
            "max_model_len"
        )
    _log.warning(
        "max_model_len is lowered from %d to %d: the KV cache holds no more in one sequence",
        wanted,
        fits,
    )
    return fits
