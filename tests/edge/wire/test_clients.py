"""Programs of other people against the real server. `make clients` brings those with dependencies
of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tangram.model.load import resolve_source

from .conftest import CHAT, COMPLETIONS, run_real_server

ROOT = Path(__file__).parents[3]
SCRIPTS, ENVIRONMENT, NODE = (
    ROOT / "tests/clients",
    ROOT / "build/clients-venv",
    ROOT / "build/clients-node",
)
LM_EVAL = ROOT / "build/load-venv/bin/lm_eval"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
with_node = pytest.mark.skipif(
    not (shutil.which("node") and (NODE / ".ready").exists()),
    reason="make clients brings OpenAI's client for Node",
)
with_clients = pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").exists(), reason="make clients brings LiteLLM and llm"
)

with_lm_eval = pytest.mark.skipif(
    not LM_EVAL.exists(), reason="make load brings lm-evaluation-harness"
)


def run(
    *command: str | Path, folder: Path = ROOT, script: str | None = None, **variables: str
) -> str:
    """What a program prints that must end well. It sees no package of this project."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=inherited | variables,
        input=script or "",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended.stdout


@with_node
def test_the_official_client_for_node(server_url: str) -> None:
    script = (SCRIPTS / "ask.mjs").read_text()
    command = ("node", "--input-type=module", "-", f"{server_url}/v1", "none", "smollm2")
    found = json.loads(run(*command, folder=NODE, script=script))
    assert found["models"] == ["smollm2"]
    assert (
        found["text"]
        == found["finished"]
        == found["response"]
        == found["streamed"]["text"]
        == ANSWER
    )
    assert found["usage"]["completion_tokens"] <= 8 and found["usage"]["prompt_tokens"] > 0
    assert found["streamed"]["chunks"] > 2
    assert found["streamed"]["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"]
    assert (
        found["requestId"].startswith("req-") and found["tier"] == "default" and found["completion"]
    )
    if found["shaped"]["finish_reason"] == "stop":
        assert isinstance(json.loads(found["shaped"]["message"]["content"])["n"], int)
    wrong = found["badField"]
    assert (wrong["kind"], wrong["status"], wrong["param"]) == (
        "BadRequestError",
        400,
        "temprature",
    )
    assert (found["badModel"]["kind"], found["badModel"]["code"]) == (
        "NotFoundError",
        "model_not_found",
    )
    assert found["embeddings"]["status"] == 404 and "embeddings" in found["embeddings"]["message"]


@with_clients
def test_litellm_and_aider_through_it(server_url: str) -> None:
    printed = run(
        ENVIRONMENT / "bin/python",
        SCRIPTS / "litellm_calls.py",
        f"{server_url}/v1",
        "smollm2",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    found = json.loads(printed.splitlines()[-1])
    assert found["text"] == found["streamed"]["text"] == ANSWER
    assert (
        found["usage"]["total_tokens"]
        == found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"]
    )
    assert found["streamed"]["prompt_tokens"] == found["usage"]["prompt_tokens"]
    assert found["streamed"]["finish_reason"] in ("stop", "length") and found["labelled"] in (
        "stop",
        "length",
    )
    streamed, whole = found["aider"]
    assert streamed == whole != ""
    assert (
        found["effort"]["kind"] == "BadRequestError"
        and "reasoning_effort" in found["effort"]["message"]
    )
    assert (
        found["bad_field"]["kind"] == "BadRequestError"
        and "temprature" in found["bad_field"]["message"]
    )
    assert found["bad_model"]["kind"] == "NotFoundError"


@pytest.fixture
def llm(server_url: str, tmp_path: Path) -> Callable[..., str]:
    """The command `llm`, told of the server as its manual says (Other models: adding more OpenAI
    models).
    """
    card = {
        "model_id": "local",
        "model_name": "smollm2",
        "api_base": f"{server_url}/v1",
        "supports_schema": True,
    }
    tmp_path.joinpath("extra-openai-models.yaml").write_text(json.dumps([card]))  # JSON is YAML

    def ask(*arguments: str) -> str:
        options = ("-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "40")
        printed = run(ENVIRONMENT / "bin/llm", *arguments, *options, LLM_USER_PATH=str(tmp_path))
        return printed.strip()

    return ask


@with_clients
def test_llm_answers_goes_on_and_follows_a_schema(llm: Callable[..., str]) -> None:
    assert llm(QUESTION) == llm(QUESTION, "--no-stream") == ANSWER
    assert llm("And of Italy?", "--continue")
    age = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {
        "type": "object",
        "properties": {"age": age},
        "required": ["age"],
        "additionalProperties": False,
    }
    assert 0 <= json.loads(llm("A dog", "--schema", json.dumps(schema)))["age"] <= 99


@with_lm_eval
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("local-completions", COMPLETIONS),
        pytest.param("local-chat-completions", CHAT, marks=pytest.mark.nightly),
    ],
)
def test_lm_evaluation_harness_scores_a_task_of_its_own(
    kind: str, path: str, server_url: str, tmp_path: Path
) -> None:
    """Its prompts are token ids or chats, two at a time; each is answered as if asked alone."""
    # What needles in essays need. These hide in noise, but it would be fetched all the same.
    (tmp_path / "nltk/tokenizers/punkt_tab").mkdir(parents=True)
    url, chats = server_url + path, path == CHAT
    server = f"base_url={url},model=smollm2,tokenizer={resolve_source('smollm2')},num_concurrent=2"
    command: list[str | Path] = [LM_EVAL, "run", "--model", kind]
    command += ["--model_args", server, "--tasks", "niah_single_1"]
    command += ["--metadata", '{"max_seq_lengths": [1024]}']
    command += ["--limit", "2", "--log_samples", "--output_path", tmp_path]
    command += ["--apply_chat_template"] if chats else []
    run(*command, HF_HUB_OFFLINE="1", NLTK_DATA=str(tmp_path / "nltk"))
    (results,) = tmp_path.rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["niah_single_1"]["1024,none"] > 0
    (samples,) = tmp_path.rglob("samples_*.jsonl")
    lines = samples.read_text().splitlines()
    assert len(lines) == 2
    for sample in map(json.loads, lines):
        asked = sample["arguments"]["gen_args_0"]["arg_0"]
        prompt = {"messages": json.loads(asked[0])} if chats else {"prompt": asked}
        body = {"model": "smollm2", "temperature": 0, "max_tokens": 128, **prompt}
        (alone,) = httpx.post(url, json=body, timeout=120).json()["choices"]
        assert sample["resps"] == [[alone["message"]["content"] if chats else alone["text"]]]


@with_lm_eval
@pytest.mark.nightly
def test_lm_evaluation_harness_scores_choices_as_it_does_with_transformers(
    python: list[str], tmp_path: Path
) -> None:
    """The log-likelihood of each choice, whether it is what the model would say, and the scores."""
    source = resolve_source("smollm2")

    def score(kind: str, *given: str) -> tuple[dict[str, float], list[tuple[float, bool]]]:
        out = tmp_path / kind
        command = [LM_EVAL, "run", "--model", kind, "--model_args", ",".join(given)]
        command += ["--tasks", "capitals", "--include_path", SCRIPTS / "evaluation"]
        command += ["--batch_size", "4", "--log_samples", "--output_path", out]
        run(*command, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
        (results,), (samples,) = out.rglob("results_*.json"), out.rglob("samples_*.jsonl")
        scores = json.loads(results.read_text())["results"]["capitals"]
        lines = sorted(
            map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"]
        )
        choices = [choice for line in lines for choice in line["filtered_resps"]]
        named = {name: scores[f"{name},none"] for name in ("acc", "acc_norm")}
        return named, [(float(sum_of), str(greedy) == "True") for sum_of, greedy in choices]

    with run_real_server("--dtype", "float32", python=python) as url:
        asked = f"base_url={url}{COMPLETIONS}", "model=smollm2", f"tokenizer={source}"
        served = score("local-completions", *asked)
    expected = score("hf", f"pretrained={source}", "dtype=float32")
    assert served[0] == expected[0] and 0 < served[0]["acc"] < 1
    assert [greedy for _, greedy in served[1]] == [greedy for _, greedy in expected[1]]
    assert {greedy for _, greedy in served[1]} == {True, False}
    for (found, _), (right, _) in zip(served[1], expected[1], strict=True):
        assert found == pytest.approx(right, abs=5e-3)


# Open WebUI asks as in open-webui/open-webui, backend/open_webui/routers/openai.py
# (get_headers_and_cookies, get_all_models_responses, generate_chat_completion, embeddings) and
# utils/payload.py (apply_model_params_to_body_openai).
WEBUI_HEADERS = {
    "Content-Type": "application/json",
    "Authorization": "Bearer none",
    "X-OpenWebUI-User-Name": "Ann%20Lee",
    "X-OpenWebUI-User-Id": "7",
    "X-OpenWebUI-User-Email": "ann@example.com",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c5b6",
}
WEBUI_PARAMETERS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.9,
    "max_tokens": 8,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": 42,
    "stop": ["\n\n\n"],
    "logit_bias": {"5": -100},
    "response_format": {"type": "text"},
}


@pytest.fixture
def webui(server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_url, headers=WEBUI_HEADERS, timeout=120) as client:
        yield client


def test_open_webui_lists_the_models(webui: httpx.Client) -> None:
    listed = webui.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["smollm2"]
    assert all(model.get("name", "absent") is not None for model in listed["data"])


def test_open_webui_streams_an_answer_with_its_usage(webui: httpx.Client) -> None:
    history = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ]
    body = {
        "model": "smollm2",
        "messages": history,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with webui.stream("POST", CHAT, content=json.dumps(body | WEBUI_PARAMETERS)) as answer:
        assert "text/event-stream" in answer.headers["content-type"]
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["prompt_tokens"] > 0


def test_open_webui_asks_for_a_title(webui: httpx.Client) -> None:
    messages = [
        {"role": "user", "content": "### Task: Generate a concise title. ### Chat History: Paris"}
    ]
    body = {"model": "smollm2", "messages": messages, "stream": False, "max_completion_tokens": 10}
    assert webui.post(CHAT, content=json.dumps(body)).json()["choices"][0]["message"]["content"]


def test_open_webui_is_told_in_json_what_is_wrong(webui: httpx.Client) -> None:
    refused = webui.post("/v1/embeddings", content=json.dumps({"model": "smollm2", "input": ["a"]}))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "endpoint_not_supported")
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "a"}],
        "reasoning_effort": "medium",
    }
    wrong = webui.post(CHAT, content=json.dumps(body))
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reasoning_effort")
