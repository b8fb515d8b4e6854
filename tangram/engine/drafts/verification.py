"""A step with drafts: the model computes the newest token and all drafts of a sequence in one pass.

What it would have chosen behind each of them says how many are accepted (`speculation.accept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from tangram.cache.step import Step
from tangram.engine.completion import Completion
from tangram.engine.drafts.speculation import Drafting, Speculation, accept, verifiers
from tangram.engine.passes.forward_pass import PlannedStep
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

    def plan(self, step: Step, completions: Sequence[Completion]) -> PlannedStep:
        """`step` with what is drafted for its `completions`, and its passes.

        Drafts are on the device if it drafts, or if samplers need them there. A device that drafts
        does so while the host builds the passes.
        """
        rows, drafter = [row for row in step.rows if row.sample], self.speculation.drafter
        if drafter is None:
            known = np.concatenate([row.tokens[1:] for row in rows if row.drafts])
            remembers = any(completion.sampler.remembers for completion in completions)
            drafted = upload(known, self.device) if remembers else torch.from_numpy(known)
        else:
            self.runner.move(step)
            step = replace(step, moves=())
            drafting = [
                Drafting(completion.sequence, row, completion.sampler)
                for row, completion in zip(rows, completions, strict=True)
                if row.drafts
            ]
            drafted = drafter.draft(drafting)
        return replace(self.runner.plan(step), drafted=drafted)

    def run(
        self, planned: PlannedStep, completions: Sequence[Completion], meanwhile: Callable[[], None]
    ) -> list[list[ChosenToken | None]]:
        """Run `planned` and `meanwhile`; the tokens that each of its `completions` goes on with.

        These are accepted drafts and one more, None where its logits are unsound. Raises
        `IntegrityError` if the step has no drafts or has chosen no token.
        """
        drafted, rows = planned.drafted, [row for row in planned.step.rows if row.sample]
        if drafted is None:
            raise IntegrityError("a step without drafts is verified")
        counts = [row.drafts for row in rows]
        samplers = [
            verifier
            for completion, drafts in zip(completions, torch.split(drafted, counts), strict=True)
            for verifier in verifiers(completion.sampler, drafts)
        ]
        choice = self.runner.run(planned, samplers)
        if choice is None:
            raise IntegrityError("a step with drafts has chosen no token")
        meanwhile()
        with self.runner.meters.waiting():
            tokens, drafts = iter(choice.tokens_on_host()), iter(drafted.tolist())
        return [
            self._settle(completion, list(islice(drafts, count)), list(islice(tokens, count + 1)))
            for completion, count in zip(completions, counts, strict=True)
        ]

    def _settle(
        self, completion: Completion, drafts: Sequence[int], tokens: Sequence[ChosenToken | None]
    ) -> list[ChosenToken | None]:
        taken = accept(drafts, tokens)
        accepted = len(taken) - 1
        self.scheduler.settle(completion.sequence, drafts, accepted)
        self.speculation.settle(completion.sequence, len(drafts), accepted)
        completion.sampler.extend([token.token_id for token in taken if token is not None])
        return taken
