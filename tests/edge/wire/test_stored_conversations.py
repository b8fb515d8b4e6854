"""Stored conversations on the real server: several processes, its prefix cache, and its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

from .conftest import run_real_server

LONG = (Path(__file__).parents[3] / "docs/architecture.md").read_text()[:4000]


def client_of(url: str) -> openai.OpenAI:
    """One without connections, so that any API process may answer."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(url: str, **fields: Any) -> Any:
    body = {"model": "smollm2", "temperature": 0, "max_output_tokens": 4, **fields}
    with client_of(url) as client:
        return client.responses.create(**body)


def test_every_process_finds_what_another_has_stored_and_a_restart_too(
    tmp_path: Path, python: list[str]
) -> None:
    path = tmp_path / "store"
    options = ("--store-path", str(path), "--kv-cache-gib", "0.25", "--chunk-tokens", "512")
    with run_real_server(*options, "--api-processes", "3", python=python) as url:
        first = ask(url, input=LONG, instructions="Be brief.")
        answers = [ask(url, input="And?", previous_response_id=first.id) for _ in range(8)]
        assert len({answer.output_text for answer in answers}) == 1
        sent = [{"role": "user", "content": LONG}, *first.output]
        whole = ask(url, input=[*sent, {"role": "user", "content": "And?"}], store=False)
        assert whole.usage.input_tokens == answers[-1].usage.input_tokens
        assert whole.output_text == answers[-1].output_text
        cached = answers[-1].usage.input_tokens_details.cached_tokens
        assert cached >= 512 and cached == whole.usage.input_tokens_details.cached_tokens
        begun = [ask(url, input=LONG, background=True, max_output_tokens=2000) for _ in range(3)]
        with client_of(url) as client:
            for response in begun:
                assert client.responses.cancel(response.id).status == "cancelled"
        assert ask(url, input="Well?").status in ("completed", "incomplete")
        left = ask(url, input="Tell a long story.", background=True, max_output_tokens=60)
    with run_real_server(*options, python=python) as url, client_of(url) as client:
        found = client.responses.retrieve(answers[0].id)
        assert found.to_dict() == answers[0].to_dict()
        # The server has waited for it.
        assert client.responses.retrieve(left.id).status in ("completed", "incomplete")
        third = ask(url, input="So?", previous_response_id=found.id)
        assert third.usage.input_tokens > whole.usage.input_tokens
