"""How a model marks its thoughts, found by rendering examples with its chat template."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from tangram.engine.text.formats import THINKING_FORMATS
from tangram.types import ThinkingFormat

if TYPE_CHECKING:
    from tangram.engine.text.templates import ChatTemplate

_THOUGHT, _ANSWER = "tangram_thought", "tangram_answer"
_QUESTION = {"role": "user", "content": "a"}
_REPLY = {"role": "assistant", "content": _ANSWER}
_LATER = {"role": "assistant", "content": "b"}  # some keep what the last message thinks
_FINAL = re.escape(f"<|channel|>final<|message|>{_ANSWER}")
_FUNCTION = {"name": "a", "arguments": {}}
_CALLS = {"tool_calls": [{"id": "call00000", "type": "function", "function": _FUNCTION}]}


def thinking_format(template: ChatTemplate, name: str = "auto") -> ThinkingFormat | None:
    """The marks around thoughts: those called `name`; if that is auto, by the chat template.

    That writes them, opens them in the prompt, or removes them. None if it does none of this: then
    text that looks like a mark is ordinary text.
    """
    if name != "auto":
        named = THINKING_FORMATS[name]
        return _find_written(template, [named]) or named
    answered = template.render_example([_QUESTION, _REPLY])
    forms = [form for form in THINKING_FORMATS.values() if _opens_answer(form, answered)]
    if found := _find_written(template, forms):
        return found
    prompt = template.render_example([_QUESTION], add_generation_prompt=True).rstrip()
    for form in forms:
        if prompt.endswith((form.begin, form.end)):  # some close it where none is wanted
            return form
    tagged = _REPLY | {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}
    past = template.render_example([_QUESTION, tagged, _QUESTION, _LATER, _QUESTION])
    removed = _ANSWER in past and _THOUGHT not in past
    return next((form for form in forms if removed and form.begin == "<think>"), None)


def write_blocks(thought: str, text: str) -> list[dict[str, str]]:
    """The content of a message that says `text` after `thought`."""
    return [{"type": "thinking", "thinking": thought}, {"type": "text", "text": text}]


def _opens_answer(form: ThinkingFormat, answered: str) -> bool:
    """Whether the answer in `answered` begins as `form` says."""
    return not form.answer or bool(re.search(rf"{re.escape(form.answer[0])}\s*{_ANSWER}", answered))


def _find_written(
    template: ChatTemplate, forms: Collection[ThinkingFormat]
) -> ThinkingFormat | None:
    """The one of `forms` in which `template` writes past thoughts; None for none of them."""
    thought = _REPLY | {"reasoning_content": _THOUGHT}
    blocks = _REPLY | {"content": write_blocks(_THOUGHT, _ANSWER)}
    for reply in (thought, thought | _CALLS, blocks):  # some write it before a call only
        written = template.render_example([_QUESTION, reply])
        for form in forms:
            begin, end = map(re.escape, (form.begin, form.end))
            pattern = _FINAL if form.channels else rf"{begin}\s*{_THOUGHT}\s*{end}"
            if re.search(pattern, written):
                return replace(form, blocks=reply is blocks)
    return None
