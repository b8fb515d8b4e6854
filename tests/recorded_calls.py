"""Answers with two calls, in every format that a row of `TOOL_FORMATS` describes.

All are written by hand; none is an answer of a model. `TEMPLATE`: a test finds the format in a real
template of such a model (`real_templates.py`). `CHECKED`: no package has one; by hand a public
template, by the model's maker or vLLM, was rendered, and its calls were read back. `UNPROVEN`:
after public descriptions, or only as the format is known. For both of these `cut_down_template`
repeats what was seen or believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tangram.serve.formats.calls import ArgumentText, Call, CallReader

Part = str | tuple[str, object]
CITY = 'São "Paulo"\nand \\ more'
ARGUMENTS = {"city": CITY, "deep": {"list": [1, None, True], "text": "é, ]}) '"}}
_CITY = '"São \\"Paulo\\"\\nand \\\\ more"'
_DEEP = '{"list": [1, null, true], "text": "é, ]}) \'"}'
_BOTH = f'{{"city": {_CITY}, "deep": {_DEEP}}}'
_PYTHON = f"look(city={_CITY}, deep={_DEEP})"
TEMPLATE, UNPROVEN = "real template", "unproven"
CHECKED = "checked by hand against the public template, 2026-11-30"


def join_parts(parts: Iterable[object]) -> list[Any]:
    """Text that follows on text as one, calls by name and the text of their arguments."""
    found: list[Any] = []
    for part in parts:
        if isinstance(part, Call):
            found.append((part.name, ""))
        elif isinstance(part, ArgumentText):
            name, before = found.pop()
            found.append((name, before + part.text))
        elif isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part:
            found.append(part)
    return found


def read_parts(reader: CallReader, pieces: Sequence[str]) -> list[Part]:
    """As `join_parts`, with the arguments as JSON, or as they are if a limit has cut them."""
    said = [*(part for piece in pieces for part in reader.push([piece])), *reader.finish()]
    return [
        part if isinstance(part, str) else (part[0], read_arguments(part[1]))
        for part in join_parts(said)
    ]


def read_arguments(text: str) -> object:
    """The arguments; their text if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Recorded:
    """Two calls, of `look` with `ARGUMENTS` and of `stop` without any, and where they are from."""

    source: str
    calls: str


def _write_tagged(begin: str, end: str, call: str, argument: str, *, shared: bool = False) -> str:
    given = "".join(
        argument.replace("KEY", key).replace("VALUE", value).replace("STRING", is_text)
        for key, value, is_text in (("city", CITY, "true"), ("deep", _DEEP, "false"))
    )
    both = [call.replace("NAME", "look").replace("GIVEN", given)]
    both.append(call.replace("NAME", "stop").replace("GIVEN", ""))
    return f"{begin}{''.join(both)}{end}" if shared else "\n".join(f"{begin}{c}{end}" for c in both)


_HERMES = (
    f'<tool_call>\n{{"name": "look", "arguments": {_BOTH}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
_DSML = {
    name: (
        f"<｜DSML｜{block}>\n",
        f"</｜DSML｜{block}>",
        '<｜DSML｜invoke name="NAME">\nGIVEN</｜DSML｜invoke>\n',
        '<｜DSML｜parameter name="KEY" string="STRING">VALUE</｜DSML｜parameter>\n',
    )
    for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
}
_LISTED = f'[{{"name": "look", "arguments": {_BOTH}}}, {{"name": "stop", "arguments": {{}}}}]'
RECORDED = {
    "hermes": Recorded(TEMPLATE, _HERMES),  # Granite 4: checked by hand; ERNIE 4.5: unproven
    "qwen3_coder": Recorded(
        TEMPLATE,
        _write_tagged(
            "<tool_call>\n",
            "\n</tool_call>",
            "<function=NAME>\nGIVEN</function>",
            "<parameter=KEY>\nVALUE\n</parameter>\n",
        ),
    ),
    "glm45": Recorded(
        TEMPLATE,
        _write_tagged(
            "<tool_call>",
            "</tool_call>",
            "NAME\nGIVEN",
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        ),
    ),
    "glm47": Recorded(
        CHECKED,
        _write_tagged(
            "<tool_call>",
            "</tool_call>",
            "NAMEGIVEN",
            "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
        ).replace(">\n<tool_call", "><tool_call"),
    ),
    # Its template writes nested values as Python does, which is read too.
    "seed_oss": Recorded(
        CHECKED,
        _write_tagged(
            "<seed:tool_call>\n",
            "\n</seed:tool_call>",
            "<function=NAME>\nGIVEN</function>",
            "<parameter=KEY>VALUE</parameter>\n",
        ),
    ),
    "minimax_m2": Recorded(
        CHECKED,
        _write_tagged(
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            '<invoke name="NAME">\nGIVEN</invoke>\n',
            '<parameter name="KEY">VALUE</parameter>\n',
            shared=True,
        ),
    ),
    "deepseek_v32": Recorded(TEMPLATE, _write_tagged(*_DSML["deepseek_v32"], shared=True)),
    "deepseek_v4": Recorded(CHECKED, _write_tagged(*_DSML["deepseek_v4"], shared=True)),
    "mistral": Recorded(TEMPLATE, f"[TOOL_CALLS]{_LISTED}"),
    "mistral_named": Recorded(CHECKED, f"[TOOL_CALLS]look[ARGS]{_BOTH}[TOOL_CALLS]stop[ARGS]{{}}"),
    "deepseek_v3": Recorded(
        TEMPLATE,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{_BOTH}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Recorded(
        CHECKED,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{_BOTH}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": Recorded(
        CHECKED,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        f"<|tool_call_argument_begin|>{_BOTH}<|tool_call_end|><|tool_call_begin|>functions.stop:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "command": Recorded(
        CHECKED,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": '
        f'{_BOTH}}},\n    {{"tool_call_id": "1", "tool_name": "stop", "parameters": {{}}}}\n]'
        "<|END_ACTION|>",
    ),
    "apertus": Recorded(
        TEMPLATE, f'<|tools_prefix|>[{{"look": {_BOTH}}}, {{"stop": {{}}}}]<|tools_suffix|>'
    ),
    "nemotron_v2": Recorded(CHECKED, f"<TOOLCALL>{_LISTED}</TOOLCALL>"),
    "apriel": Recorded(TEMPLATE, f"<tool_calls>{_LISTED}</tool_calls>"),
    # Their templates write one call a message.
    "gigachat3": Recorded(
        TEMPLATE,
        f'function call<|role_sep|>\n{{"name": "look", "arguments": {_BOTH}}}'
        'function call<|role_sep|>\n{"name": "stop", "arguments": {}}',
    ),
    "gigachat31": Recorded(
        CHECKED,
        f'<|function_call|>{{"name": "look", "arguments": {_BOTH}}}'
        '<|function_call|>{"name": "stop", "arguments": {}}',
    ),
    # llama.cpp's template asks for single calls between these marks, which is read too.
    "phi4_mini": Recorded(UNPROVEN, f"<|tool_call|>{_LISTED}<|/tool_call|>"),
    # Granite 3.3's template asks for this mark and "a JSON list"; it writes no past calls.
    "granite": Recorded(UNPROVEN, f"<|tool_call|>{_LISTED}"),
    # vLLM's template for Phi-4-mini asks for this; it writes past calls without the mark.
    "functools": Recorded(UNPROVEN, f"functools{_LISTED}"),
    "lfm2": Recorded(TEMPLATE, f"<|tool_call_start|>[{_PYTHON}, stop()]<|tool_call_end|>"),
    "olmo3": Recorded(CHECKED, f"<function_calls>\n{_PYTHON}\nstop()\n</function_calls>"),
    "gemma4": Recorded(
        TEMPLATE,
        f'<|tool_call>call:look{{city:<|"|>{CITY}<|"|>,deep:{{list:[1,null,true],'
        'text:<|"|>é, ]}) \'<|"|>}}<tool_call|><|tool_call>call:stop{}<tool_call|>',
    ),
    "functiongemma": Recorded(
        UNPROVEN,
        f"<start_function_call>call:look{{city:<escape>{CITY}<escape>,deep:{{list:[1,null,true],"
        "text:<escape>é, ]}) '<escape>}}<end_function_call>"
        "<start_function_call>call:stop{}<end_function_call>",
    ),
    "llama3": Recorded(
        TEMPLATE,
        f'{{"name": "look", "parameters": {_BOTH}}}; {{"name": "stop", "parameters": {{}}}}',
    ),
    # Plain values only: vLLM's template for Llama 4 escapes no quotes, and quotes nested values.
    "pythonic": Recorded(CHECKED, f"[{_PYTHON}, stop()]"),
}


_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_WRITTEN = {
    "glm47": "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n'
    '{% for k, v in f.arguments.items() %}<parameter name="{{ k }}">{{ v }}</parameter>\n'
    "{% endfor %}</invoke>\n</minimax:tool_call>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{{ f.name }}">\n'
    "{% for k, v in f.arguments.items() %}"
    '<｜DSML｜parameter name="{{ k }}" string="{{ (v is string) | tojson }}">{{ v }}'
    "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>"
    "{{ '' + f.arguments }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ f.name }}", '
    '"parameters": {{ f.arguments | tojson }}}\n]<|END_ACTION|>',
    "phi4_mini": '<|tool_call|>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]'
    "<|/tool_call|>",
    "granite": '<|tool_call|>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]',
    "functools": 'functools[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]',
    "olmo3": "<function_calls>\n{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
    "{{ v | tojson }}{% endfor %})\n</function_calls>",
    "nemotron_v2": f"<TOOLCALL>[{_CALL}]</TOOLCALL>",
    "gigachat31": f"<|function_call|>{_CALL}<|message_sep|>",
    "functiongemma": "<start_function_call>call:{{ f.name + '{' }}"
    "{% for k, v in f.arguments.items() %}{{ k }}:{{ v }}{% endfor %}}<end_function_call>",
    "pythonic": "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% endfor %})]",
}
CUT_DOWN = list(_WRITTEN)


def cut_down_template(name: str) -> str:
    """A template that shows tools, and writes one call as documented for the format `name`."""
    return (
        "{%- if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        f"{_WRITTEN[name]}{{% endfor %}}\n{{%- endfor %}}"
    )
