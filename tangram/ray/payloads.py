"""What travels between the ingress and the replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from tangram.config import EngineConfig
from tangram.engine.admission import Admission
from tangram.engine.grammar import CompiledGrammar
from tangram.metrics import EngineStats
from tangram.types import Event, Grammar, Int32, Int64, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A callback stays where it is; tokens travel as an array, a grammar as its text.
_CHANGED = ("prompt_token_ids", "on_event", "grammar")


@dataclass(frozen=True)
class EngineFacts:
    """What the ingress must know of an engine: the checks of requests, and text to tokens."""

    config: EngineConfig
    admission: Admission
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class StatsReport:
    """The statistics of the replica `replica_id`."""

    replica_id: str
    stats: EngineStats


@dataclass(frozen=True, eq=False)
class SentRequest:
    """A request on its way to a replica.

    `tokens` int32 [n] are its prompt. `chain` has the keys of the prompt's whole chunks, parents
    first: the router reads it. `grammar` is the text of one and the field that has it.
    """

    tokens: Int32
    chain: tuple[bytes, ...]
    grammar: tuple[str, str] | None
    options: Mapping[str, Any]

    @classmethod
    def of(cls, request: Request, tokens: Int64, chain: tuple[bytes, ...]) -> SentRequest:
        """`request` without what cannot travel; `tokens` int64 [n] are its prompt."""
        compiled = request.grammar
        return cls(
            tokens.astype(np.int32),
            chain,
            (compiled.source, compiled.field) if isinstance(compiled, CompiledGrammar) else None,
            {
                entry.name: getattr(request, entry.name)
                for entry in fields(Request)
                if entry.name not in _CHANGED
            },
        )

    def request(self, on_event: Callable[[Event], None], grammar: Grammar | None) -> Request:
        """The request where it arrives; `grammar` is compiled there."""
        return Request(
            prompt_token_ids=tuple(self.tokens.tolist()),
            on_event=on_event,
            grammar=grammar,
            **self.options,
        )
