"""An agent of three tools, as users of each library write it: prints what its model says last.

Where the server is, its key and the model are in the environment, as docs/clients.md says. Runs in
environments that have no Tangram: `task.py LIBRARY TASK`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from task_tools import edit_file, read_file, run_test

MODEL = "my-model"
TOOLS: dict[str, Callable[..., str]] = {t.__name__: t for t in (read_file, edit_file, run_test)}


def describe(tool: Callable[..., str]) -> dict[str, Any]:
    names = list(inspect.signature(tool).parameters)
    parameters = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    return {"name": tool.__name__, "description": tool.__doc__, "parameters": parameters}


def call(name: str, arguments: str) -> str:
    return TOOLS[name](**json.loads(arguments))


def answer_calls(calls: Any) -> list[dict[str, Any]]:
    """The messages with the results of calls of the chat endpoint."""
    return [
        {
            "role": "tool",
            "tool_call_id": made.id,
            "content": call(made.function.name, made.function.arguments),
        }
        for made in calls
    ]


def openai_chat(task: str) -> str | None:
    from openai import OpenAI

    client, messages = OpenAI(), [{"role": "user", "content": task}]
    functions: Any = [{"type": "function", "function": describe(t)} for t in TOOLS.values()]
    while True:
        asked: Any = {"model": MODEL, "messages": messages, "tools": functions}
        with client.chat.completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        messages += answer_calls(message.tool_calls)


def openai_responses(task: str) -> str:
    from openai import OpenAI

    client, items = OpenAI(), [{"role": "user", "content": task}]
    functions: Any = [{"type": "function", **describe(t)} for t in TOOLS.values()]
    while True:
        asked: Any = {"model": MODEL, "input": items, "tools": functions, "store": False}
        with client.responses.stream(**asked) as stream:
            response = stream.get_final_response()
        made = [item for item in response.output if item.type == "function_call"]
        items += response.output
        if not made:
            return response.output_text
        for each in made:
            result = call(each.name, each.arguments)
            items.append(
                {"type": "function_call_output", "call_id": each.call_id, "output": result}
            )


def anthropic(task: str) -> str:
    from anthropic import Anthropic, beta_tool

    runner = Anthropic().beta.messages.tool_runner(
        model=MODEL,
        max_tokens=4000,
        tools=[beta_tool(tool) for tool in TOOLS.values()],
        messages=[{"role": "user", "content": task}],
        stream=True,
    )
    *_, message = [stream.get_final_message() for stream in runner]
    return "".join(block.text for block in message.content if block.type == "text")


def litellm(task: str) -> str | None:
    import litellm as library

    messages: list[Any] = [{"role": "user", "content": task}]
    functions = [{"type": "function", "function": describe(t)} for t in TOOLS.values()]
    while True:
        asked: Any = {"model": f"openai/{MODEL}", "messages": messages, "tools": functions}
        chunks = list(library.completion(**asked, stream=True))
        message = library.stream_chunk_builder(chunks, messages=messages).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        messages += answer_calls(message.tool_calls)


def openai_agents(task: str) -> str:
    import asyncio

    from agents import Agent, Runner, function_tool

    async def work() -> str:
        tools = [function_tool(tool) for tool in TOOLS.values()]
        running = Runner.run_streamed(Agent(name="Mender", model=MODEL, tools=tools), task)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    return asyncio.run(work())


def langgraph(task: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model=MODEL, streaming=True), list(TOOLS.values()))
    *_, last = agent.stream({"messages": [("user", task)]}, stream_mode="values")
    return str(last["messages"][-1].content)


if __name__ == "__main__":
    library, task = sys.argv[1:]
    print(globals()[library](task))
