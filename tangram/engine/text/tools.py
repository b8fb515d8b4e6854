"""How a model reads tools and writes calls, found by rendering its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tangram.engine.text.formats import TOOL_FORMATS, loosen, split_shape
from tangram.types import CallStyle, Marks, ThinkingFormat, ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tangram.engine.text.templates import ChatTemplate

# Text that no conversation may write where the template does, even if its tokens are not marked
# special.
TOOL_MARK = re.compile(r"</?tool_\w+>")
_NAME = "tangram_probe"
_FUNCTION = {"name": _NAME, "parameters": {"type": "object", "properties": {}}}
_BARE_TOOL = {"type": "function", "function": _FUNCTION}
_TOOL = {"type": "function", "function": _FUNCTION | {"description": "a"}}
_QUESTION = {"role": "user", "content": "a"}
_ARGUMENTS = {"key": 1}
# Ids and arguments that some templates want.
_PLAIN_ID, _KIMI_ID = "call00000", f"functions.{_NAME}:0"
_WAYS = ((_PLAIN_ID, False), (_KIMI_ID, False), (_PLAIN_ID, True))
_JSON = r'\{\s*"key"\s*:\s*1\s*\}'
_HOLES = {
    "name": _NAME,
    "index": r"\d+",
    "callid": r"(?:\[CALL_ID\]\w+)?",
    "key": "key",
    "value": '"?1"?',  # some templates quote every value
    "string": "false",
}
# Control tokens of these forms, and those of them that begin the head of a message.
_HEADS = ("<|start|>", "<|channel|>", "<|constrain|>")
_CHANNEL_MARKS = (*_HEADS, "<|message|>", "<|end|>", "<|call|>", "<|return|>")


def tool_format(template: ChatTemplate, name: str = "auto") -> ToolFormat | None:
    """How calls are written: a row of `TOOL_FORMATS`, that of `name` unless it is auto.

    Spaces are the template's. None if the chat template does not show tools, or writes calls in
    another way than any row says.
    """
    asked = template.render_example([_QUESTION], [_TOOL])
    if _NAME not in asked:
        return None
    forms = TOOL_FORMATS if name == "auto" else {name: TOOL_FORMATS[name]}
    found = find_written_format(template, forms, asked)
    if found is None:
        told = (form for form in TOOL_FORMATS.values() if form.told and form.told in asked)
        found = next(told, None) if name == "auto" else forms[name]
    described = not template.render_example([_QUESTION], [_BARE_TOOL])
    return found and replace(found, described=described)


def find_written_format(
    template: ChatTemplate, forms: Mapping[str, ToolFormat], asked: str
) -> ToolFormat | None:
    """The one of `forms` in which `template` writes calls after `asked`; None for none of them."""
    for number, as_text in _WAYS:
        arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
        function = {"name": _NAME, "arguments": arguments}
        call = {"id": number, "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        answered = template.render_example([_QUESTION, turn], [_TOOL])
        lines = answered[len(asked) :] if asked and answered.startswith(asked) else answered
        found = [form for each in forms.values() for form in _find(each, lines)]
        if found:
            exact = [form for form in found if _example(form) in lines]
            return replace((exact or found)[0], text_arguments=as_text)
    return None


def marks(
    tokenizer: PreTrainedTokenizerBase, tools: ToolFormat | None, thinking: ThinkingFormat | None
) -> Marks:
    """The tokens that delimit the calls of `tools` and the thoughts of `thinking`."""
    texts: list[str] = []
    if tools is not None:
        channels = _CHANNEL_MARKS if tools.style is CallStyle.CHANNEL else ()
        texts += [*tools.list_marks(), *channels]
    if thinking is not None:
        texts += [thinking.begin, thinking.end, *(_CHANNEL_MARKS if thinking.channels else ())]
        texts += thinking.answer or ()
    names: dict[int, str] = {}
    words: dict[int, str] = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        name = str(token)
        if name.strip() and any(name in text for text in texts):
            (names if token.special else words)[number] = name
    heads = frozenset(number for number, name in names.items() if name in _HEADS)
    return Marks(names, heads, words, thinking)


def _find(form: ToolFormat, lines: str) -> Iterator[ToolFormat]:
    """`form` with the spaces that the last call of `lines` has, if it is written so."""
    begin, end = re.escape(form.begin.strip()), re.escape(form.end.strip())
    opening, closing = map(_pattern, form.brackets or ("", ""))
    pattern = rf"(?P<begin>{begin}\s*){opening}{_pattern(form.call, form)}"
    if form.end:  # a list may say more of a call
        pattern += rf".*?{closing}"
    pattern += rf"(?P<end>\s*{end})" if form.end else "(?P<end>)"
    for match in list(re.finditer(pattern, lines, re.DOTALL))[-1:]:
        yield replace(form, begin=match["begin"] if form.begin else "", end=match["end"])


def _pattern(shape: str, form: ToolFormat | None = None) -> str:
    """What finds the example in `shape`, whatever its spaces; of an object its beginning."""
    found = ""
    for at, part in enumerate(split_shape(shape)):
        if not at % 2:
            found += loosen(part)
        elif part == "arguments" and form is not None:
            found += _pattern(form.argument, form) if form.argument else _JSON
            if form.style is CallStyle.OBJECT:
                break
        else:
            found += _HOLES[part]
    return found


def _example(form: ToolFormat) -> str:
    """The example's call, as far as it is the same text in each template."""
    argument = form.argument.replace("$key", "key").replace("$value", "1")
    given = argument.replace("$string", "false") or json.dumps(_ARGUMENTS)
    return form.call.replace("$name", _NAME).replace("$arguments", given)
