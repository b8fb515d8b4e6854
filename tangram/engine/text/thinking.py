"""How a model marks its thoughts, found by rendering an example with its chat template."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tangram.types import ThinkingFormat

if TYPE_CHECKING:
    from tangram.engine.text.templates import ChatTemplate

_THOUGHT, _ANSWER = "tangram_thought", "tangram_answer"
_QUESTION = {"role": "user", "content": "a"}
_REPLY = {"role": "assistant", "content": _ANSWER}
_THINK = ThinkingFormat("<think>", "</think>")
# GPT-OSS: every message names its channel, and thoughts are those of the channel `analysis`.
_CHANNELS = ThinkingFormat("<|channel|>analysis<|message|>", "<|end|>", channels=True)
_FINAL = f"<|channel|>final<|message|>{_ANSWER}"
_TAG = r"(?:seed:)?think(?:ing)?|thought|reasoning"
_WRITTEN = re.compile(
    rf"(?:<(?P<tag>{_TAG})>|\[(?P<name>THINK)\])\s*{_THOUGHT}\s*(?:</(?P=tag)>|\[/(?P=name)\])"
)
_OPENED = re.compile(rf"<({_TAG})>\s*")


def thinking_format(template: ChatTemplate) -> ThinkingFormat | None:
    """The marks around thoughts that the chat template writes, opens in the prompt, or removes.

    None if it does none of this: then text that looks like a mark is ordinary text.
    """
    reply = _REPLY | {"reasoning_content": _THOUGHT}
    written = template.render_example([_QUESTION, reply])
    if _FINAL in written:
        return _CHANNELS
    if found := _WRITTEN.search(written):
        tag = found["tag"]
        return (
            ThinkingFormat(f"<{tag}>", f"</{tag}>")
            if tag
            else ThinkingFormat("[THINK]", "[/THINK]")
        )
    prompt = template.render_example([_QUESTION], add_generation_prompt=True)
    if opened := _OPENED.search(prompt[prompt.rfind("<") :]):
        return ThinkingFormat(f"<{opened[1]}>", f"</{opened[1]}>")
    tagged = _REPLY | {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}
    past = template.render_example([_QUESTION, tagged, _QUESTION])
    return _THINK if _ANSWER in past and _THOUGHT not in past else None
