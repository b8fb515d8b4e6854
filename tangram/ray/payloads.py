"""What travels between the ingress and the replicas."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tangram.config import EngineConfig
from tangram.engine.admission import Admission
from tangram.engine.text.codec import TextCodec
from tangram.engine.text.grammar import GrammarCompiler
from tangram.link.protocol import RequestMessage
from tangram.metrics import EngineStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """What the ingress must know of an engine: the checks of requests, and text to tokens.

    Codec and grammars travel as what they are made of.
    """

    origin: Origin
    config: EngineConfig
    admission: Admission
    codec: TextCodec
    grammars: GrammarCompiler


@dataclass(frozen=True)
class StatsReport:
    """The statistics of the replica `replica_id`."""

    replica_id: str
    stats: EngineStats


@dataclass(frozen=True)
class SentRequest:
    """A request on its way to a replica.

    It was checked, and cut into chunks, by the facts of `origin`. `chain` has the keys of the
    prompt's whole chunks, parents first: the router reads it.
    """

    origin: Origin
    chain: tuple[bytes, ...]
    message: RequestMessage
