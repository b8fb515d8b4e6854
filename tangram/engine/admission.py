"""Check requests before they are queued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as shortened

from tangram.cache.layout import Layout
from tangram.cache.retention import Retention
from tangram.compress.between import STEP
from tangram.engine.derived import DerivedRetentions
from tangram.engine.sampling.sampler import check_tokens
from tangram.errors import RequestError
from tangram.types import OPENAI_SAMPLING, Request, SamplingValues


@dataclass(frozen=True)
class Admission:
    """The served ways to keep KV entries, and the pool of `total_pages` pages.

    The first of `retentions` is the default. `cache_dtype` is the name of the KV cache's dtype,
    `element_bytes` the size of one of its elements, `host_page_bytes` of a page in host memory.
    `speculates` says whether anything is drafted. `sampling` holds where a request states nothing.
    `derived`, if set, makes retentions of ratios that are not among them.
    """

    retentions: Sequence[Retention]
    total_pages: int
    cache_dtype: str
    element_bytes: int
    max_model_len: int
    host_page_bytes: int
    speculates: bool = False
    sampling: SamplingValues = OPENAI_SAMPLING
    derived: DerivedRetentions | None = None

    def check(self, request: Request) -> tuple[Retention, int]:
        """The retention of `request`, and how many tokens it may generate.

        Raises `RequestError` if it is malformed or can never fit.
        """
        retention = self.retention_for(request)
        self.check_drafts(request)
        check_tokens(request.sampling, self.vocab_size)
        thinking = request.marks.thinking
        if request.sampling.thinking_token_budget is not None and thinking and thinking.channels:
            message = "thinking_token_budget: this model thinks on a channel, without a budget"
            raise RequestError(f"{message}: leave it out", "thinking_token_budget")
        return retention, self.max_tokens_for(request, retention)

    def retention_for(self, request: Request) -> Retention:
        """The retention that serves `request`.

        Without a scorer it is the first of its ρ. Raises `RequestError` if no profile here has its
        ρ and its scorer, and none can be derived.
        """
        ratio, scorer = request.kv_retention, request.kv_scorer
        if ratio is None:
            ratio = self.retentions[0].kv_retention
        if scorer is not None:
            field = "kv_scorer" if request.kv_retention is None else "kv_retention"
            return self._retention_of(scorer, ratio, field)
        for retention in self.retentions:
            if retention.kv_retention == ratio:
                return retention
        if (derived := self._derive(None, ratio)) is not None:
            return derived
        served = sorted({retention.kv_retention for retention in self.retentions})
        raise RequestError(
            f"kv_retention is {ratio}, this server has {', '.join(map(str, served))}"
            f"{self._say_derivable()}: choose one, or {self._say_calibration(ratio)}",
            "kv_retention",
        )

    @property
    def known_retentions(self) -> Sequence[Retention]:
        """The served retentions, and those that were derived for requests."""
        return [*self.retentions, *(() if self.derived is None else self.derived.made)]

    def _derive(self, scorer: str | None, ratio: float) -> Retention | None:
        """The retention of `ratio` for the first profile of `scorer`, or of any; None if none is
        derived.

        Raises `RequestError` if it cannot be met.
        """
        served = self._first_scored(scorer)
        if served is None or self.derived is None:
            return None
        return self.derived.find(served, ratio)

    def _first_scored(self, scorer: str | None) -> Retention | None:
        scored = (entry for entry in self.retentions if entry.scorer is not None)
        return next((entry for entry in scored if scorer in (None, entry.scorer)), None)

    def _say_derivable(self) -> str:
        return "" if self.derived is None else f" and the multiples of {STEP}"

    def _say_calibration(self, ratio: float) -> str:
        """What makes a profile for `ratio`, in words."""
        chunk_tokens = self.retentions[0].layout.chunk_tokens
        served = self._first_scored(None)
        scorer = "" if served is None else f" --scorer {served.scorer}"
        return (
            f"make a profile for it (tangram calibrate MODEL -o FILE --kv-retention {ratio}{scorer}"
            f" --chunk-tokens {chunk_tokens}) and start the server with --profile FILE"
        )

    def _retention_of(self, scorer: str, ratio: float, field: str) -> Retention:
        """Raises `RequestError` unless `scorer` serves the ρ `ratio`, which is that of `field`."""
        served = dict[str, list[float]]()
        for retention in self.retentions:
            if retention.scorer == scorer and retention.kv_retention == ratio:
                return retention
            if retention.scorer is not None:
                served.setdefault(retention.scorer, []).append(retention.kv_retention)
        if scorer in served and (derived := self._derive(scorer, ratio)) is not None:
            return derived
        shown = shortened(scorer)
        if not served:
            raise RequestError(
                f"kv_scorer is {shown}, this server has no profiles: leave it out, or start the "
                "server with --profile",
                "kv_scorer",
            )
        listed = "; ".join(
            f"{name} at kv_retention {', '.join(map(str, sorted(ratios)))}"
            for name, ratios in served.items()
        )
        raise RequestError(
            f"kv_scorer is {shown} and kv_retention {ratio}, this server has {listed}"
            f"{self._say_derivable()}: choose one of these, leave kv_scorer out, or start the "
            "server with another --profile",
            field if scorer in served else "kv_scorer",
        )

    def check_drafts(self, request: Request) -> None:
        """Raise `RequestError` if `request` asks for drafts and nothing is drafted here."""
        if request.speculative and not self.speculates:
            raise RequestError(
                "speculative is true, this server drafts nothing: leave it out, or start the "
                "server with --speculative-config",
                "speculative",
            )

    def max_tokens_for(self, request: Request, retention: Retention) -> int:
        """How many tokens `request` may generate.

        Raises `RequestError` if it is malformed or can never fit.
        """
        prompt = request.prompt_token_ids
        if not prompt:
            raise RequestError(
                lambda field: f"{field} is empty, it must have at least one token", "prompt"
            )
        highest, lowest = max(prompt), min(prompt)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = shortened(lowest if lowest < 0 else highest)
            raise RequestError(
                lambda field: (
                    f"{field} has token {wrong}, it must lie in [0, {self.vocab_size - 1}]"
                ),
                "prompt",
            )
        request.check_length(self.max_model_len)
        most_tokens = self.max_model_len - len(prompt)
        stated = request.sampling.max_tokens
        if stated is not None and stated > most_tokens:
            raise RequestError(
                lambda field: (
                    f"{field} is {stated}, but after {len(prompt)} prompt tokens {most_tokens} "
                    f"of max_model_len {self.max_model_len} are left: lower {field} or shorten the "
                    "prompt"
                ),
                "max_tokens",
            )
        wanted = self.sampling.with_stated(request.sampling).max_tokens
        # A prompt alone is computed as if a token came behind it.
        granted = most_tokens if wanted is None else max(1, min(wanted, most_tokens))
        needed = retention.layout.most_pages(len(prompt) + granted - 1)
        if needed > self.total_pages:
            raise RequestError(
                lambda field: (
                    f"the request needs up to {needed} KV pages at kv_retention "
                    f"{retention.kv_retention}, the pool has {self.total_pages}: shorten the "
                    f"prompt, lower {field}, or raise kv_cache_gib"
                ),
                "max_tokens",
            )
        return granted

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self.retentions[0].layout.geometry.vocab_size

    @property
    def uncompressed(self) -> Layout:
        """The layout of ρ = 1.0."""
        return next(entry.layout for entry in self.retentions if entry.layout.keeps_everything)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's entries in all layers, with nothing dropped."""
        return self.retentions[0].layout.count_uncompressed_entries(1) * self.entry_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page; those of all retentions have one shape."""
        return self.retentions[0].layout.page_bytes(self.element_bytes)

    @cached_property
    def entry_bytes(self) -> int:
        """Bytes of one KV entry."""
        return self.retentions[0].layout.geometry.entry_elements * self.element_bytes
