"""Formats of calls and thoughts: a row for each."""

from __future__ import annotations

import json
import re

from tangram.types import CallStyle, ThinkingFormat, ToolFormat

_QUOTED = "call:$name{$arguments}"
_DSML = {"deepseek_v32": "function_calls", "deepseek_v4": "tool_calls"}  # what a block is called
# Of formats that one text fits, the first whose spaces are the template's. Without marks: last.
TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>\n", "\n</tool_call>"),
    "qwen3_coder": ToolFormat(
        "<tool_call>\n",
        "\n</tool_call>",
        "<function=$name>\n$arguments</function>",
        CallStyle.TAGGED,
        "<parameter=$key>\n$value\n</parameter>\n",
    ),
    "glm45": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        "$name\n$arguments",
        CallStyle.TAGGED,
        "<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n",
    ),
    "glm47": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        "$name$arguments",
        CallStyle.TAGGED,
        "<arg_key>$key</arg_key><arg_value>$value</arg_value>",
        between="",
    ),
    "seed_oss": ToolFormat(
        "<seed:tool_call>\n",
        "\n</seed:tool_call>",
        "<function=$name>\n$arguments</function>",
        CallStyle.TAGGED,
        "<parameter=$key>$value</parameter>\n",
    ),
    "minimax_m2": ToolFormat(
        "<minimax:tool_call>\n",
        "\n</minimax:tool_call>",
        '<invoke name="$name">\n$arguments</invoke>',
        CallStyle.TAGGED,
        '<parameter name="$key">$value</parameter>\n',
        brackets=("", ""),
    ),
    **{
        name: ToolFormat(
            f"<｜DSML｜{block}>\n",
            f"\n</｜DSML｜{block}>",
            '<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>',
            CallStyle.TAGGED,
            '<｜DSML｜parameter name="$key" string="$string">$value</｜DSML｜parameter>\n',
            brackets=("", ""),
        )
        for name, block in _DSML.items()
    },
    "mistral": ToolFormat("[TOOL_CALLS]", "", between=", ", brackets=("[", "]"), ids="$short"),
    "mistral_named": ToolFormat(
        "[TOOL_CALLS]",
        "",
        "$name$callid[ARGS]$arguments",
        CallStyle.NAMED,
        between="",
        ids="$short",
    ),
    "deepseek_v3": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
        CallStyle.NAMED,
        brackets=("", ""),
    ),
    "deepseek_v31": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
        CallStyle.NAMED,
        between="",
        brackets=("", ""),
    ),
    "kimi_k2": ToolFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.$name:$index<|tool_call_argument_begin|>$arguments"
        "<|tool_call_end|>",
        CallStyle.NAMED,
        between="",
        brackets=("", ""),
        ids="functions.$name:$index",
    ),
    "apertus": ToolFormat(
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        '{"$name": $arguments}',
        CallStyle.NAMED,
        between=", ",
        brackets=("[", "]"),
    ),
    "command": ToolFormat(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        '{"tool_call_id": "$index", "tool_name": "$name", "parameters": $arguments}',
        between=",\n    ",
        brackets=("[\n    ", "\n]"),
    ),
    "nemotron_v2": ToolFormat("<TOOLCALL>", "</TOOLCALL>", between=", ", brackets=("[", "]")),
    "apriel": ToolFormat("<tool_calls>", "</tool_calls>", between=", ", brackets=("[", "]")),
    "phi4_mini": ToolFormat(
        "<|tool_call|>", "<|/tool_call|>", between=", ", brackets=("[", "]"), told="<|/tool_call|>"
    ),
    "granite": ToolFormat(
        "<|tool_call|>", "", between=", ", brackets=("[", "]"), told="<|tool_call|>"
    ),
    "functools": ToolFormat("functools", "", between=", ", brackets=("[", "]"), told="functools["),
    "lfm2": ToolFormat(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "$name($arguments)",
        CallStyle.PYTHON,
        "$key=$value",
        between=", ",
        brackets=("[", "]"),
        told="List of tools: ",
    ),
    "olmo3": ToolFormat(
        "<function_calls>\n",
        "\n</function_calls>",
        "$name($arguments)",
        CallStyle.PYTHON,
        "$key=$value",
        brackets=("", ""),
        told="<function_calls>",
    ),
    "gemma4": ToolFormat(
        "<|tool_call>",
        "<tool_call|>",
        _QUOTED,
        CallStyle.QUOTED,
        "$key:$value",
        '<|"|>',
        between="",
    ),
    "functiongemma": ToolFormat(
        "<start_function_call>",
        "<end_function_call>",
        _QUOTED,
        CallStyle.QUOTED,
        "$key:$value",
        "<escape>",
        between="",
    ),
    "gigachat3": ToolFormat("function call<|role_sep|>\n", "", between=""),
    "gigachat31": ToolFormat("<|function_call|>", "", between=""),
    "harmony": ToolFormat(
        "to=functions.",
        "<|call|>",
        "$name<|channel|>commentary json<|message|>$arguments",
        CallStyle.CHANNEL,
    ),
    "llama3": ToolFormat("", "", '{"name": "$name", "parameters": $arguments}'),
    "pythonic": ToolFormat(
        "",
        "",
        "$name($arguments)",
        CallStyle.PYTHON,
        "$key=$value",
        between=", ",
        brackets=("[", "]"),
    ),
}
# Of formats with the same marks, those with marks around the answer come first.
# GPT-OSS: every message names its channel, and thoughts are those of the channel `analysis`.
THINKING_FORMATS = {
    "ernie": ThinkingFormat("<think>", "</think>", answer=("<response>", "</response>")),
    "think": ThinkingFormat("<think>", "</think>"),
    "thinking": ThinkingFormat("<thinking>", "</thinking>"),
    "thought": ThinkingFormat("<thought>", "</thought>"),
    "reasoning": ThinkingFormat("<reasoning>", "</reasoning>"),
    "apriel": ThinkingFormat(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        answer=("", "[END FINAL RESPONSE]"),
    ),
    "mistral": ThinkingFormat("[THINK]", "[/THINK]"),
    "seed_oss": ThinkingFormat("<seed:think>", "</seed:think>"),
    "command": ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ThinkingFormat("<|channel>thought", "<channel|>"),
    "harmony": ThinkingFormat("<|channel|>analysis<|message|>", "<|end|>", channels=True),
}


def split_shape(shape: str) -> list[str]:
    """The text of a shape at even places, the names of what stands between at odd ones."""
    return re.split(r"\$([a-z]+)", shape)


def split_argument(form: ToolFormat, *, is_text: bool) -> list[str]:
    """What stands before the name of an argument in tags, before its value and after that."""
    return split_shape(form.argument.replace("$string", json.dumps(is_text)))[::2]


def loosen(literal: str) -> str:
    """A pattern of `literal`, whatever its spaces."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", literal)))
