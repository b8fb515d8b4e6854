"""How well the embedded model calls tools: `python -m bench.embedded_tools`.

Ten questions for the weather of a city and three sums, each with `required` and with `auto`, are
answered by `tangram generate --batch` at the model's own sampling. A call is right if it names the
right function with the right arguments.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CITIES = ("Paris", "Tokyo", "Rome", "Berlin", "London", "Madrid", "Oslo", "Vienna", "Cairo", "Lima")
SUMS = ((2, 3), (17, 25), (100, 1))


def _tool(name: str, text: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("get_weather", "The weather of a city now.", city="string"),
    _tool("add", "Add two numbers.", a="integer", b="integer"),
]


def list_questions() -> dict[str, tuple[str, dict[str, Any]]]:
    """Questions, with the function and the arguments that answer them."""
    weather = {f"What is the weather in {one}?": ("get_weather", {"city": one}) for one in CITIES}
    sums = {f"What is {a} plus {b}?": ("add", {"a": a, "b": b}) for a, b in SUMS}
    return weather | sums


def main() -> None:
    """Print how many calls there were, and how many were right."""
    questions = list_questions()
    lines = [
        {
            "custom_id": f"{choice}: {question}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "smollm2",
                "messages": [{"role": "user", "content": question}],
                "tools": TOOLS,
                "tool_choice": choice,
                "parallel_tool_calls": False,
                "max_tokens": 80,
            },
        }
        for choice in ("required", "auto")
        for question in questions
    ]
    with TemporaryDirectory() as folder:
        asked, answers = Path(folder, "asked.jsonl"), Path(folder, "answers.jsonl")
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-m", "tangram", "generate", "smollm2"]
        subprocess.run([*command, "--batch", str(asked), "-o", str(answers)], check=True)
        records = [json.loads(line) for line in answers.read_text().splitlines()]
    for choice in ("required", "auto"):
        found = [one for one in records if one["custom_id"].startswith(choice)]
        calls = [one for one in found if _calls(one)]
        right = sum(_calls(one) == [questions[one["custom_id"].split(": ", 1)[1]]] for one in found)
        print(f"{choice}: {len(calls)} of {len(found)} called, {right} as they should")


def _calls(record: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    message = record["response"]["body"]["choices"][0]["message"]
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]


if __name__ == "__main__":
    main()
