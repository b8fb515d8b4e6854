"""A step with drafts: the model computes the newest token and all drafts of a sequence in one pass.

What it would have chosen behind each of them says how many are accepted (`speculation.accept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from tangram.cache.step import Step
from tangram.engine.completion import Completion
from tangram.engine.runner import Runner
from tangram.engine.sampling import SampleRow
from tangram.engine.scheduler import Scheduler
from tangram.engine.speculation import Drafting, Speculation, accept, verifiers
from tangram.errors import IntegrityError
from tangram.kernels.transfer import place
from tangram.types import ChosenToken

# A completion, and the tokens that its sequence goes on with; None for unsound logits.
Verified = tuple[Completion, list[ChosenToken | None]]


class Verifier:
    """Runs the steps with drafts of one engine, and settles what their sequences go on with."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, speculation: Speculation, device: torch.device
    ) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._speculation, self._device = speculation, device

    def run(
        self, step: Step, sampled: Sequence[Completion], meanwhile: Callable[[], None]
    ) -> list[Verified]:
        """Run `step` and `meanwhile`; what each of `sampled`, its completions, goes on with.

        Raises `IntegrityError` if the step has chosen no token.
        """
        left, drafted = self._draft(step, sampled)
        choice = self._runner.run(left, _samplers(step, sampled, drafted), drafted=drafted)
        if choice is None:
            raise IntegrityError("a step with drafts has chosen no token")
        meanwhile()
        with self._runner.meters.waiting():
            tokens = choice.tokens_on_host()
            drafts = iter(drafted.tolist())
        verified, at = list[Verified](), 0
        rows = (row for row in step.rows if row.sample)
        for row, completion in zip(rows, sampled, strict=True):
            own = list(islice(drafts, row.drafts))
            found = tokens[at : at + 1 + row.drafts]
            verified.append((completion, self._settle(completion, own, found)))
            at += 1 + row.drafts
        return verified

    def _draft(self, step: Step, sampled: Sequence[Completion]) -> tuple[Step, Tensor]:
        """`step` as it is left to run, and its drafts, int64 [drafts].

        They are on the device if it drafts, or if samplers need them there.
        """
        drafter = self._speculation.drafter
        if drafter is None:
            known = np.concatenate([row.tokens[1:] for row in step.rows if row.drafts])
            if any(completion.sampler.remembers for completion in sampled):
                return step, place(known, self._device)
            return step, torch.from_numpy(known)
        self._runner.move(step)
        rows = (row for row in step.rows if row.sample)
        drafting = [
            Drafting(completion.sequence, row, completion.sampler)
            for row, completion in zip(rows, sampled, strict=True)
            if row.drafts
        ]
        return replace(step, moves=()), drafter.draft(drafting)

    def _settle(
        self, completion: Completion, drafts: Sequence[int], tokens: Sequence[ChosenToken | None]
    ) -> list[ChosenToken | None]:
        """The tokens that a sequence goes on with: accepted drafts and one more."""
        taken = accept(drafts, tokens)
        accepted = len(taken) - 1
        self._scheduler.settle(completion.sequence, drafts, accepted)
        self._speculation.settle(completion.sequence, len(drafts), accepted)
        return taken


def _samplers(step: Step, sampled: Sequence[Completion], drafted: Tensor) -> list[SampleRow]:
    """What chooses each token of a step: behind drafts, as if these were accepted."""
    samplers, begin = list[SampleRow](), 0
    rows = (row for row in step.rows if row.sample)
    for row, completion in zip(rows, sampled, strict=True):
        samplers += verifiers(completion.sampler, drafted[begin : begin + row.drafts])
        begin += row.drafts
    return samplers
