"""The conversation: one engine, one document, the same questions at ρ 1.0 and at a smaller one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.demo.kept_tokens import KeptEntries
from bench.logbook import LOGBOOK
from tangram.cache.layout import Layout
from tangram.config import EngineConfig
from tangram.engine.loop import Engine
from tangram.engine.setup.build import engine_of
from tangram.engine.text.answer_text import read_text
from tangram.errors import TangramError
from tangram.model.load import load_model
from tangram.types import Event, FinishReason, Request, SamplingParams, Usage

MODEL = "smollm2"
FULL, SMALL = 1.0, 0.25
# A model of 135 M parameters answers well in one sentence and badly in the second.
ANSWER = SamplingParams.state_all(temperature=0.0, max_tokens=32, stop=(". ", "\n"))
ONE_TOKEN = SamplingParams.state_all(temperature=0.0, max_tokens=1)

# Called after each step of the engine with the number of tokens sealed in it.
Advance = Callable[[int], object]


@dataclass(frozen=True)
class DemoQuestion:
    """A question; an answer that has the words `expected` is right."""

    text: str
    expected: str


# The model answers all of them at ρ 1.0.
QUESTIONS = (
    DemoQuestion("Who is the head keeper?", "Ingrid Solheim"),
    DemoQuestion("How high is the hill?", "640"),
    DemoQuestion("Who drove the sledge?", "Nils Aker"),
    DemoQuestion("Where was the lens ground?", "Antwerp"),
    DemoQuestion("How often does the comet come back?", "eighty-four years"),
    DemoQuestion("What is the name of the second telescope?", "Young Margaret"),
)


@dataclass(frozen=True)
class DemoAnswer:
    """An answer at ρ `kv_retention`, and the engine's figures about it."""

    question: DemoQuestion
    kv_retention: float
    text: str
    usage: Usage
    first_token_s: float
    decode_s: float

    @property
    def right(self) -> bool:
        """Whether it has the expected words."""
        return self.question.expected.casefold() in self.text.casefold()

    @property
    def held_tokens(self) -> int:
        """The tokens that the cache represented at the end, without the last one generated."""
        return self.usage.prompt_tokens + self.usage.completion_tokens - 1


Pair = tuple[DemoAnswer, DemoAnswer]  # to one question, at ρ FULL and at ρ SMALL


def _nobody(tokens: int) -> None:
    pass


class DemoConversation:
    """One engine that serves both ratios with one set of weights, and the document.

    Raises the errors of `tangram.errors` if the engine cannot be built.
    """

    def __init__(self, model: str = MODEL) -> None:
        self.loaded = load_model(model, dtype="auto", device="cpu", load_format="auto")
        # A chunk a step, so that a progress bar moves.
        config = EngineConfig(
            model=model,
            kv_retention=SMALL,
            device="cpu",
            max_num_seqs=1,
            max_num_batched_tokens=544,
        )
        self.kept = KeptEntries()
        self.engine: Engine = engine_of(config, self.loaded, self.kept.kernels)
        self.document = LOGBOOK.read_text()

    def prompt(self, question: DemoQuestion) -> tuple[int, ...]:
        """The tokens of the document and `question`."""
        content = f"{self.document}\n\n{question.text}"
        return self.engine.codec.chat_prompt([{"role": "user", "content": content}])

    def layout(self, kv_retention: float) -> Layout:
        """The layout of entries at one of the two ratios."""
        served, config = self.engine.layout, self.engine.config
        if kv_retention == config.kv_retention:
            return served
        return Layout.lay_out_uncompressed(
            served.geometry,
            chunk_tokens=served.chunk_tokens,
            page_tokens=served.page_tokens,
            heads_per_page=served.heads_per_page,
            max_tokens=served.max_tokens,
        )

    def pieces(self, question: DemoQuestion) -> list[str]:
        """The text of each token of `prompt`."""
        return [self.engine.codec.verbatim([token], "prompt") for token in self.prompt(question)]

    def tokens_per_s(self) -> float:
        """The speed of prefill here, measured on a chunk of the document that is not reused."""
        prompt = self.prompt(QUESTIONS[0])[: self.engine.layout.chunk_tokens]
        for salt in ("warm-up", "trial"):
            events = self._run(prompt, ONE_TOKEN, SMALL, salt=salt)
        self.engine.clear_cache()
        return len(prompt) / events[0][0]

    def ask(
        self, question: DemoQuestion, kv_retention: float, advance: Advance = _nobody
    ) -> DemoAnswer:
        """Ask `question` about the document; the cached part of the prompt is not computed."""
        prompt = self.prompt(question)
        timed = self._run(prompt, ANSWER, kv_retention, advance=advance)
        (first_s, _), (last_s, last) = timed[0], timed[-1]
        said = read_text(self.engine.codec, ANSWER, prompt, [event for _, event in timed])
        text = said.strip().removesuffix(".") + "."
        return DemoAnswer(question, kv_retention, text, last.usage, first_s, last_s - first_s)

    def _run(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        kv_retention: float,
        *,
        salt: str = "",
        advance: Advance = _nobody,
    ) -> list[tuple[float, Event]]:
        """The events of a request, each with the seconds from its submission."""
        timed: list[tuple[float, Event]] = []
        start_s = time.perf_counter()

        def note(event: Event) -> None:
            timed.append((time.perf_counter() - start_s, event))

        self.engine.submit(
            Request("demo", prompt, sampling, note, kv_retention=kv_retention, cache_salt=salt)
        )
        sealed = self.engine.stats().sealed_chunks
        while self.engine.busy:
            self.engine.step()
            before, sealed = sealed, self.engine.stats().sealed_chunks
            advance((sealed - before) * self.engine.layout.chunk_tokens)
        if timed[-1][1].finish_reason is FinishReason.ABORT:
            raise TangramError(f"the engine ended a request: {timed[-1][1].error}")
        return timed
