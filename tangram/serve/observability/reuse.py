"""Say why a prefix of a prompt was not reused: in numbers, and both texts around the place."""

from __future__ import annotations

from collections.abc import Sequence

from tangram.engine.text.codec import TextCodec
from tangram.serve.bodies.body import Json
from tangram.serve.observability.record import Generation
from tangram.types import MOST_SHOWN, LossReason, LostPrefix

_BEFORE = 16


def describe_loss(lost: LostPrefix | None, prompt: Sequence[int], codec: TextCodec) -> Json:
    """What the tokens `prompt` have `lost`; some texts if they have diverged."""
    if lost is None:
        return {"reason": "none", "lost_tokens": 0}
    told: Json = {"reason": lost.reason.value, "lost_tokens": lost.tokens}
    if lost.reason is LossReason.DIVERGED:
        at = lost.at
        told |= {
            "at_token": at,
            "before": codec.spell(prompt[max(0, at - _BEFORE) : at]),
            "earlier": codec.spell(lost.known),
            "now": codec.spell(prompt[at : at + MOST_SHOWN]),
        }
    return told


def explain_reuse(generation: Generation, codec: TextCodec) -> Json:
    """The same of the prompt that has lost most."""
    if generation.lost is None:
        return describe_loss(None, (), codec)
    request, lost = generation.lost
    return describe_loss(lost, request.prompt_token_ids, codec)
