"""A step with drafts: the model computes the newest token and all drafts of a sequence in one pass.

What it would have chosen behind each of them says how many are accepted (`speculation.accept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from tangram.cache.step import Row, Step
from tangram.engine.completion import Completion
from tangram.engine.drafts.speculation import Drafting, Speculation, accept, verifiers
from tangram.engine.passes.runner import Runner
from tangram.engine.schedule.scheduler import Scheduler
from tangram.errors import IntegrityError
from tangram.kernels.transfer import upload
from tangram.types import ChosenToken


@dataclass(frozen=True, eq=False)
class Verifier:
    """Runs the steps with drafts of one engine, and settles what their sequences go on with."""

    scheduler: Scheduler
    runner: Runner
    speculation: Speculation
    device: torch.device

    def run(
        self, step: Step, completions: Sequence[Completion], meanwhile: Callable[[], None]
    ) -> list[list[ChosenToken | None]]:
        """Run `step` and `meanwhile`; the tokens that each of its `completions` goes on with.

        These are accepted drafts and one more, None where its logits are unsound. Raises
        `IntegrityError` if the step has chosen no token.
        """
        rows = [row for row in step.rows if row.sample]
        left, drafted = self._draft(step, rows, completions)
        counts = [row.drafts for row in rows]
        samplers = [
            verifier
            for completion, drafts in zip(completions, torch.split(drafted, counts), strict=True)
            for verifier in verifiers(completion.sampler, drafts)
        ]
        choice = self.runner.run(left, samplers, drafted=drafted)
        if choice is None:
            raise IntegrityError("a step with drafts has chosen no token")
        meanwhile()
        with self.runner.meters.waiting():
            tokens, drafts = iter(choice.tokens_on_host()), iter(drafted.tolist())
        return [
            self._settle(completion, list(islice(drafts, count)), list(islice(tokens, count + 1)))
            for completion, count in zip(completions, counts, strict=True)
        ]

    def _draft(
        self, step: Step, rows: Sequence[Row], completions: Sequence[Completion]
    ) -> tuple[Step, Tensor]:
        """`step` as it is left to run, and the drafts of its `rows`, int64 [drafts].

        They are on the device if it drafts, or if samplers need them there.
        """
        drafter = self.speculation.drafter
        if drafter is None:
            known = np.concatenate([row.tokens[1:] for row in rows if row.drafts])
            if any(completion.sampler.remembers for completion in completions):
                return step, upload(known, self.device)
            return step, torch.from_numpy(known)
        self.runner.move(step)
        drafting = [
            Drafting(completion.sequence, row, completion.sampler)
            for row, completion in zip(rows, completions, strict=True)
            if row.drafts
        ]
        return replace(step, moves=()), drafter.draft(drafting)

    def _settle(
        self, completion: Completion, drafts: Sequence[int], tokens: Sequence[ChosenToken | None]
    ) -> list[ChosenToken | None]:
        taken = accept(drafts, tokens)
        accepted = len(taken) - 1
        self.scheduler.settle(completion.sequence, drafts, accepted)
        self.speculation.settle(completion.sequence, len(drafts), accepted)
        completion.sampler.extend([token.token_id for token in taken if token is not None])
        return taken
