"""How a model marks its thoughts, found by rendering examples with its chat template."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tangram.engine.text.formats import THINKING_FORMATS
from tangram.types import ThinkingFormat

if TYPE_CHECKING:
    from tangram.engine.text.templates import ChatTemplate

_THOUGHT, _ANSWER = "tangram_thought", "tangram_answer"
_QUESTION = {"role": "user", "content": "a"}
_REPLY = {"role": "assistant", "content": _ANSWER}
_FINAL = f"<|channel|>final<|message|>{_ANSWER}"
_FUNCTION = {"name": "a", "arguments": {}}
_CALLS = {"tool_calls": [{"id": "call00000", "type": "function", "function": _FUNCTION}]}


def thinking_format(template: ChatTemplate, name: str = "auto") -> ThinkingFormat | None:
    """The marks around thoughts: those called `name`; if that is auto, by the chat template.

    That writes them, opens them in the prompt, or removes them. None if it does none of this: then
    text that looks like a mark is ordinary text.
    """
    if name != "auto":
        return THINKING_FORMATS[name]
    thought = _REPLY | {"reasoning_content": _THOUGHT}
    for reply in (thought, thought | _CALLS):  # some write it before a call only
        written = template.render_example([_QUESTION, reply])
        if _FINAL in written:
            return THINKING_FORMATS["harmony"]
        for form in THINKING_FORMATS.values():
            begin, end = map(re.escape, (form.begin, form.end))
            if re.search(rf"{begin}\s*{_THOUGHT}\s*{end}", written):
                return form
    prompt = template.render_example([_QUESTION], add_generation_prompt=True).rstrip()
    for form in THINKING_FORMATS.values():
        if prompt.endswith(form.begin):
            return form
    tagged = _REPLY | {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}
    past = template.render_example([_QUESTION, tagged, _QUESTION])
    return THINKING_FORMATS["think"] if _ANSWER in past and _THOUGHT not in past else None
