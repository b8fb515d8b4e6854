"""How a model reads tools and writes calls, found by rendering its chat template."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tangram.types import CallStyle, Marks, ThinkingFormat, ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tangram.engine.text.templates import ChatTemplate

# Text that no conversation may write where the template does, even if its tokens are not marked
# special.
TOOL_MARK = re.compile(r"</?tool_\w+>")
_NAME = "tangram_probe"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "a",
        "parameters": {"type": "object", "properties": {}},
    },
}
_QUESTION = {"role": "user", "content": "a"}
_ARGUMENTS = {"key": 1}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": _NAME, "arguments": _ARGUMENTS},
        }
    ],
}
_OBJECT = re.compile(r"(<tool_call>\s*)?(\{.*\})(\s*</tool_call>)?")
_LIST = re.compile(rf'\[TOOL_CALLS\]\s?\[\s*\{{"name": "{_NAME}", "arguments": \{{"key": 1\}}')
_NAMED = re.compile(rf'\[TOOL_CALLS\]{_NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]\{{"key": 1\}}')
_TAGGED = re.compile(
    rf"<tool_call>\s*<function={_NAME}>\s*<parameter=key>\s*1\s*</parameter>\s*</function>\s*"
    "</tool_call>"
)
_CHANNEL = re.compile(
    rf'to=functions\.{_NAME}<\|channel\|>commentary .*<\|message\|>\{{"key": 1\}}'
)
_STYLES = {
    _LIST: ToolFormat("[TOOL_CALLS]", "", "arguments", CallStyle.LIST),
    _NAMED: ToolFormat("[TOOL_CALLS]", "", "[ARGS]", CallStyle.NAMED),
    _TAGGED: ToolFormat("<tool_call>\n", "\n</tool_call>", "parameter", CallStyle.TAGGED),
    _CHANNEL: ToolFormat("to=functions.", "<|call|>", "<|message|>", CallStyle.CHANNEL),
}
# Control tokens of these forms, and those of them that begin the head of a message.
_HEADS = ("<|start|>", "<|channel|>", "<|constrain|>")
_CHANNEL_MARKS = (*_HEADS, "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_CALL_MARKS = {CallStyle.NAMED: ("[CALL_ID]",), CallStyle.CHANNEL: _CHANNEL_MARKS}


def tool_format(template: ChatTemplate) -> ToolFormat | None:
    """How calls are written: Hermes (Qwen too), Llama 3.1, Qwen3-Coder, Mistral's two, GPT-OSS.

    None if the chat template does not show tools, or writes calls in another way.
    """
    asked = template.render_example([_QUESTION], [_TOOL])
    answered = template.render_example([_QUESTION, _CALL], [_TOOL])
    if _NAME not in asked:
        return None
    lines = answered[len(asked) :] if answered.startswith(asked) else answered
    styled = [form for pattern, form in _STYLES.items() if pattern.search(lines)]
    objects = [form for match in _OBJECT.finditer(lines) if (form := _object(match)) is not None]
    found = styled or objects[-1:]
    return found[0] if found else None


def marks(
    tokenizer: PreTrainedTokenizerBase, tools: ToolFormat | None, thinking: ThinkingFormat | None
) -> Marks:
    """The tokens that delimit the calls of `tools` and the thoughts of `thinking`."""
    texts: list[str] = []
    if tools is not None:
        texts += [tools.begin, tools.end, tools.arguments, *_CALL_MARKS.get(tools.style, ())]
    if thinking is not None:
        texts += [thinking.begin, thinking.end, *(_CHANNEL_MARKS if thinking.channels else ())]
    names: dict[int, str] = {}
    words: dict[int, str] = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        name = str(token)
        if name.strip() and any(name in text for text in texts):
            (names if token.special else words)[number] = name
    heads = frozenset(number for number, name in names.items() if name in _HEADS)
    return Marks(names, heads, words, thinking)


def _object(match: re.Match[str]) -> ToolFormat | None:
    begin, call, end = match.groups(default="")
    try:
        data = json.loads(call)
    except ValueError:
        return None
    if bool(begin) != bool(end) or not isinstance(data, dict) or data.get("name") != _NAME:
        return None
    arguments = "arguments" if begin else "parameters"
    return ToolFormat(begin, end, arguments) if data.get(arguments) == _ARGUMENTS else None
