"""`tangram chat`: talk to a model in the terminal."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

from tangram.cli.answering import (
    Interrupts,
    TerminalAnswer,
    answer_prompt,
    describe_memory,
    escape_controls,
)
from tangram.cli.chat_history import ChatHistory
from tangram.cli.console import messages, tell, tell_error, waiting
from tangram.cli.options import Temperature, number, with_config
from tangram.cli.telemetry import warnings_as_text
from tangram.cli.terminal import entry, history, read_typed_line
from tangram.config import EngineConfig
from tangram.errors import TangramError
from tangram.limits import TOKEN_COUNT
from tangram.types import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from tangram.engine.loop import Engine

_PROMPT = "you  "


@with_config
def chat(
    config: EngineConfig,
    max_tokens: Annotated[int, number(TOKEN_COUNT, "maximum tokens of an answer")] = 512,
    temperature: Temperature = None,
) -> None:
    """Talk to MODEL in the terminal. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    with warnings_as_text(), history():
        _grey(f"loading {config.model}")
        from tangram.engine.setup.build import build_engine

        talk = ChatSession(build_engine(config), sampling)
        _grey("/help lists commands, Ctrl-C stops an answer, Ctrl-D ends")
        talk.run()


class ChatSession:
    """A chat in the terminal: questions typed, answers shown."""

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine, self._sampling = engine, sampling
        most = engine.max_model_len
        self._conversation = ChatHistory(
            count=lambda text: len(engine.codec.encode(text)),
            check=self._check_retention,
            most_tokens=most,
            most_bytes=most * engine.codec.longest_token_bytes,
            default_retention=1.0 if engine.layout.keeps_everything else engine.config.kv_retention,
        )

    def run(self) -> None:
        """Run until the input ends, or until two Ctrl-C in a row."""
        with suppress(KeyboardInterrupt):  # the second one may come before the prompt is back
            self._take_turns()
        _grey("")

    def _take_turns(self) -> None:
        interrupted = False
        while True:
            try:
                line = entry(read_typed_line, _PROMPT)
            except EOFError:
                return
            except TangramError as error:
                tell_error(error)
                continue
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                _grey("\nCtrl-C again ends, /help lists commands")
                continue
            try:
                interrupted = self._turn(line)
            except EOFError:
                return

    def _turn(self, line: str) -> bool:
        """Run one entry. Returns True if Ctrl-C stopped its answer."""
        try:
            message = self._conversation.command(line)
            if message is not None:
                _grey(message)
            elif line:
                return self._answer(line)
            else:
                _grey("Ctrl-D ends, /help lists commands")
        except TangramError as error:
            tell_error(error)
        return False

    def _answer(self, question: str) -> bool:
        talk, engine = self._conversation, self._engine
        prompt = engine.codec.chat_prompt(talk.add_question(question))
        left = max(1, engine.max_model_len - len(prompt))
        sampling = SamplingParams(
            max_tokens=min(self._sampling.max_tokens or left, left),
            temperature=self._sampling.temperature,
        )
        with Interrupts() as interrupts, ExitStack() as reading:
            if messages().is_terminal:
                reading.enter_context(waiting(f"reading {len(prompt):,} tokens"))

            def write(text: str) -> None:
                reading.close()
                sys.stdout.write(escape_controls(text))
                sys.stdout.flush()

            answer = answer_prompt(
                engine,
                prompt,
                sampling,
                write,
                kv_retention=talk.kv_retention,
                kv_scorer=talk.kv_scorer,
                stopped=lambda: interrupts.noted,
            )
        if not answer.text:
            _grey(
                "stopped before the answer began: your question is not kept"
                if interrupts.noted
                else "no answer"
            )
            return interrupts.noted
        sys.stdout.write("\n")
        sys.stdout.flush()
        talk.enter(question, answer.text)
        self._tell(answer)
        return interrupts.noted

    def _tell(self, answer: TerminalAnswer) -> None:
        """The grey line below an answer."""
        if answer.usage is None:
            return
        ends = {
            FinishReason.ABORT: "stopped",
            FinishReason.LENGTH: f"cut at {answer.usage.completion_tokens} tokens",
        }
        parts = [
            *([ends[answer.reason]] if answer.reason in ends else []),
            f"reused {answer.usage.cached_tokens:,} of {answer.usage.prompt_tokens:,} tokens",
            answer.speed,
            describe_memory(
                answer.usage, self._conversation.retention, self._engine.config.chunk_tokens
            ),
        ]
        _grey(" · ".join(parts))

    def _check_retention(self, ratio: float, scorer: str | None) -> None:
        least = SamplingParams(max_tokens=1)
        self._engine.check(Request("", (0,), least, kv_retention=ratio, kv_scorer=scorer))


def _grey(text: str) -> None:
    tell(text, "dim")
