"""How a model is shown tools and writes their calls, learnt from what its chat template makes of a made-up tool."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tangram.types import ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Text that no conversation should be able to write where the template does, also if its tokens are not called special.
TOOL_MARK = re.compile(r"</?tool_\w+>")
_NAME = "tangram_probe"
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "a", "parameters": {"type": "object", "properties": {}}},
}
_QUESTION = {"role": "user", "content": "a"}
_CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {"key": 1}}}],
}  # fmt: skip
_WRITTEN = re.compile(r"(<tool_call>\s*)?(\{.*\})(\s*</tool_call>)?")


def tool_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    """How calls are written in the two forms known here: Hermes' (Qwen too) and the JSON of Llama 3.1.

    None if the chat template does not show tools, or writes calls in another way.
    """
    try:
        asked = _rendered(tokenizer, [_QUESTION])
        answered = _rendered(tokenizer, [_QUESTION, _CALL])
    except Exception:  # a template is a program that may raise anything
        return None
    if _NAME not in asked:
        return None
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    lines = answered[len(asked) :] if answered.startswith(asked) else answered
    found = [form for match in _WRITTEN.finditer(lines) if (form := _form(match)) is not None]
    return found[-1] if found and found[-1].begin.strip() not in special else None


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=[_TOOL], tokenize=False))


def _form(match: re.Match[str]) -> ToolFormat | None:
    begin, call, end = match.groups(default="")
    try:
        data = json.loads(call)
    except ValueError:
        return None
    if bool(begin) != bool(end) or not isinstance(data, dict) or data.get("name") != _NAME:
        return None
    arguments = "arguments" if begin else "parameters"
    return ToolFormat(begin, end, arguments) if data.get(arguments) == {"key": 1} else None
