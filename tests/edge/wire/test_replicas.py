"""Three replicas on a real Ray cluster, asked over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.edge.wire.ray_cluster import PATIENCE_S, Cluster, ray_cluster, wait_patiently

pytestmark = pytest.mark.nightly
CHUNK_TOKENS = 256
TEXT = "The river carries sand from the mountains to the sea, and the sea returns rain. "


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as cluster:
        cluster.deploy("--replicas", "3")
        yield cluster


def make_prompt(topic: int, words: int = 40) -> str:
    return f"Letter {topic}. " + f"{topic} {TEXT}" * (words // 2)


def test_each_turn_finds_the_prefix_of_its_conversation(cluster: Cluster) -> None:
    histories = {topic: make_prompt(topic) for topic in range(6)}
    known = dict.fromkeys(histories, 0)
    for _ in range(3):
        for topic, history in histories.items():
            answer = cluster.complete(history)
            usage = answer["usage"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            assert found >= known[topic] // CHUNK_TOKENS * CHUNK_TOKENS
            known[topic] = usage["prompt_tokens"] - 2  # the last may be others in a longer text
            histories[topic] = history + answer["choices"][0]["text"] + make_prompt(topic + 10, 16)
    time.sleep(2.5)  # a report comes every second
    admitted = cluster.metrics("tangram_replica_prompt_tokens")
    assert len(admitted) == 3
    assert all(admitted.values()), "a replica was never asked"
    assert sum(admitted.values()) == cluster.metrics("tangram_prompt_tokens_total")[""]


def test_prompts_of_one_request_go_each_to_its_replica(cluster: Cluster) -> None:
    prompts = [make_prompt(topic) for topic in range(20, 24)]
    alone = [cluster.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    together = cluster.complete(prompts)
    texts = {choice["index"]: choice["text"] for choice in together["choices"]}
    assert [texts[at] for at in range(4)] == alone
    assert together["usage"]["prompt_tokens_details"]["cached_tokens"] >= 4 * CHUNK_TOKENS


def test_a_killed_replica_ends_its_answers_and_the_conversation_goes_on(cluster: Cluster) -> None:
    prompt = make_prompt(50)
    before = cluster.complete(prompt, 12)["choices"][0]["text"]
    engines, frames = cluster.engines(), list[str]()
    assert len(engines) == 3
    body = {
        **{"model": "smollm2", "prompt": prompt, "stream": True, "temperature": 0},
        **{"max_tokens": 2000, "ignore_eos": True},
    }
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE_S
    ) as answer:
        for line in answer.iter_lines():
            frames.append(line)
            if len(frames) == 40:
                find_busiest(engines).kill()
    assert frames[-2:] == ["data: [DONE]", ""]
    failure = json.loads([line for line in frames if line][-2].removeprefix("data: "))
    assert failure["error"]["type"] == "server_error"
    assert "replica" in failure["error"]["message"]
    assert cluster.complete(prompt, 12)["choices"][0]["text"] == before
    wait_patiently(lambda: len(cluster.engines()) == 3, "a new replica")


def find_busiest(processes: list[psutil.Process]) -> psutil.Process:
    """The process that computes most for two seconds."""
    before = [sum(one.cpu_times()[:2]) for one in processes]
    time.sleep(2)
    spent = [sum(one.cpu_times()[:2]) - at for one, at in zip(processes, before, strict=True)]
    return processes[spent.index(max(spent))]


# Other chunks with other keys; what is shorter than a chunk is answered as before.
REDEPLOYED = (
    *("--kv-retention", "0.5", "--chunk-tokens", "512"),
    *("--max-num-batched-tokens", "1024", "--max-num-seqs", "16"),
)


def check_repeated_prompts_are_found(cluster: Cluster) -> None:
    """The ingress computes the keys of the engines that there are now."""
    prompts = [make_prompt(topic, 60) for topic in range(200, 206)]
    for prompt in prompts:
        cluster.complete(prompt)
    time.sleep(2.5)  # a report comes every second
    for prompt in prompts:
        usage = cluster.complete(prompt)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 512, usage


def test_a_redeploy_and_a_change_of_scale_lose_no_request(cluster: Cluster) -> None:
    prompts = [make_prompt(topic, 8) for topic in range(100, 104)]
    expected = [cluster.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    ended, wrong, answered = threading.Event(), list[str](), list[float]()

    def ask() -> None:
        while not ended.is_set():
            for prompt, text in zip(prompts, expected, strict=True):
                try:
                    got = cluster.complete(prompt)["choices"][0]["text"]
                    wrong.extend([got] if got != text else [])
                except (AssertionError, httpx.HTTPError) as error:
                    wrong.append(repr(error))
                answered.append(time.monotonic())

    client = threading.Thread(target=ask)
    client.start()
    try:
        old = {one.pid for one in cluster.engines()}
        cluster.deploy("--replicas", "3", *REDEPLOYED)
        assert old.isdisjoint(one.pid for one in cluster.engines())
        check_repeated_prompts_are_found(cluster)
        for replicas in (1, 3):
            cluster.deploy("--replicas", str(replicas), *REDEPLOYED)
            wait_patiently(
                lambda wanted=replicas: cluster.metrics("tangram_replicas") == {"": wanted},
                f"{replicas} replicas",
            )
    finally:
        ended.set()
        client.join()
    assert wrong == []
    assert len(answered) > 10
