"""The same question answered twice by one model: a token at a time, and with drafts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.engine.text.answer_text import read_text
from tangram.errors import TangramError
from tangram.model.load import LoadedModel
from tangram.types import DraftedTokens, Event, FinishReason, Request, SamplingParams

METHOD: Mapping[str, str] = MappingProxyType({"method": "suffix"})
QUESTION = "Repeat this text word for word:"
ANSWER = SamplingParams.state_all(temperature=0.0, max_tokens=64)


@dataclass(frozen=True)
class Quotation:
    """A quotation, and how it was decoded; `drafted` is None without drafts."""

    text: str
    tokens_per_s: float
    drafted: DraftedTokens | None


Quotations = tuple[Quotation, Quotation]  # without drafts, with drafts


def quote_twice(loaded: LoadedModel, text: str) -> Quotations:
    """Have `text` repeated, by an engine without speculation and by one with it."""
    return _quote(_engine(loaded, None), text), _quote(_engine(loaded, METHOD), text)


def _engine(loaded: LoadedModel, method: Mapping[str, str] | None) -> Engine:
    config = EngineConfig(
        kv_retention=1.0,
        device="cpu",
        kv_cache_gib=0.1,
        max_num_seqs=1,
        max_model_len=1024,
        max_num_batched_tokens=544,
        speculative_config=method,
    )
    return engine_of(config, loaded)


def _quote(engine: Engine, text: str) -> Quotation:
    prompt = engine.codec.chat_prompt([{"role": "user", "content": f"{QUESTION}\n\n{text}"}])
    timed: list[tuple[float, Event]] = []
    engine.submit(
        Request("quote", prompt, ANSWER, lambda event: timed.append((time.perf_counter(), event)))
    )
    while engine.busy:
        engine.step()
    (first_s, _), (last_s, last) = timed[0], timed[-1]
    if last.finish_reason is FinishReason.ABORT:
        raise TangramError(f"the engine ended a request: {last.error}")
    said = read_text(engine.codec, ANSWER, prompt, [event for _, event in timed])
    speed = (last.usage.completion_tokens - 1) / (last_s - first_s)
    return Quotation(said, speed, last.usage.drafted)
