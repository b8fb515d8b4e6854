"""What travels between the ingress and the replicas."""

from __future__ import annotations

import hashlib
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
class Origin:
    """The deployment of an engine, or of the facts by which a request was read.

    Each deploy has another `version`. Where `vocabulary` is equal, tokens mean the same to the same
    model.
    """

    version: str
    vocabulary: str

    @classmethod
    def of(cls, version: str, model: str, tokenizer: PreTrainedTokenizerBase) -> Origin:
        """The origin of an engine of the model named `model`."""
        tokens = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        return cls(version, hashlib.sha256(repr((model, tokens)).encode()).hexdigest())


@dataclass(frozen=True)
class FactsQuestion:
    """Asks for the facts of the deployment `version`. The router reads it."""

    version: str


@dataclass(frozen=True)
class EngineFacts:
    """What the ingress must know of an engine: the checks of requests, and text to tokens."""

    origin: Origin
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

    It was checked, and cut into chunks, by the facts of `origin`. `tokens` int32 [n] are its
    prompt. `chain` has the keys of the prompt's whole chunks, parents first: the router reads it.
    `grammar` is the text of one and the field that has it.
    """

    origin: Origin
    tokens: Int32
    chain: tuple[bytes, ...]
    grammar: tuple[str, str] | None
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls, origin: Origin, request: Request, tokens: Int64, chain: tuple[bytes, ...]
    ) -> SentRequest:
        """`request` without what cannot travel; `tokens` int64 [n] are its prompt."""
        compiled = request.grammar
        return cls(
            origin,
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
