"""The simulated fleet: what it counts, and what its balancers do with a small trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from tangram.cli import app
from tangram.errors import ConfigError
from tangram_lab.cli.fleet import Balancing
from tangram_lab.fleet.arrivals import Arrival, count_ideal_hits, read_arrivals
from tangram_lab.fleet.costs import EngineCosts
from tangram_lab.fleet.policies import BALANCERS
from tangram_lab.fleet.simulated_replica import SimulatedReplica, Visit
from tangram_lab.fleet.simulation import IDEAL, FleetRun, Loss, SimulatedFleet

CONVERSATIONS, TURNS = 24, 4
COSTS = EngineCosts(decode_step_ms=[(1, 10.0), (11, 20.0)], prefill_tokens_per_s=51_200.0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations that begin with one block of the system, and grow by three blocks a turn."""
    lines = [
        {
            "timestamp": 1000 * (turn * 10 + conversation / CONVERSATIONS * 7),
            "input_length": 512 * (1 + 3 * (turn + 1)) + 1,
            "output_length": 20,
            "hash_ids": [0, *(1000 * conversation + block for block in range(1, 3 * turn + 4)), 9],
        }
        for turn in range(TURNS)
        for conversation in range(CONVERSATIONS)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(trace: Path, balancer: str, replicas: int = 5, loss: Loss | None = None) -> FleetRun:
    arrivals = read_arrivals(trace, seconds=100, copies=1)
    return SimulatedFleet(balancer, replicas, COSTS).replay(arrivals, loss)


def test_an_infinite_cache_finds_what_came_before(trace: Path) -> None:
    arrivals = read_arrivals(trace, seconds=100, copies=1)
    later_turns = sum(1 + 3 * turn for turn in range(1, TURNS))
    assert count_ideal_hits(arrivals) == CONVERSATIONS * later_turns + CONVERSATIONS - 1
    copied = read_arrivals(trace, seconds=100, copies=3)
    assert count_ideal_hits(copied) == 3 * CONVERSATIONS * (later_turns + 1) - 1
    assert [arrival.at_s for arrival in copied] == sorted(arrival.at_s for arrival in copied)


@pytest.mark.parametrize("balancer", [*BALANCERS, IDEAL])
def test_every_request_is_answered_once_and_none_finds_more_than_there_is(
    trace: Path, balancer: str
) -> None:
    run = replay(trace, balancer)
    arrivals = read_arrivals(trace, seconds=100, copies=1)
    assert sorted(visit.arrival.at_s for visit in run.visits) == [one.at_s for one in arrivals]
    assert all(visit.first_s is not None and visit.first_s > visit.at_s for visit in run.visits)
    computed = sum(visit.arrival.prompt_tokens - 512 * visit.hits for visit in run.visits)
    assert sum(replica.computed_tokens for replica in run.work) == computed
    figures = run.figures(count_ideal_hits(arrivals))
    assert 0 < figures["of_ideal"] <= 1
    assert min(figures["most_over_mean"].values()) >= 1


def test_routing_finds_nearly_all_and_keeps_the_balance(trace: Path) -> None:
    ideal = count_ideal_hits(read_arrivals(trace, seconds=100, copies=1))
    figures = {name: replay(trace, name).figures(ideal) for name in BALANCERS}
    assert figures["routing"]["of_ideal"] >= 0.95
    assert figures["routing"]["most_over_mean"]["computed_tokens"] <= 1.3
    assert figures["round-robin"]["of_ideal"] < 0.6
    # All prompts begin with the same chunk, so its hash sends all of them to one replica.
    assert figures["hash-first"]["most_over_mean"]["requests"] == 5


@pytest.mark.parametrize("balancer", list(BALANCERS))
def test_requests_of_a_lost_replica_are_answered_elsewhere(trace: Path, balancer: str) -> None:
    run = replay(trace, balancer, loss=Loss(at_s=2.0, gone_s=2.0))
    assert len(run.visits) == CONVERSATIONS * TURNS
    assert all(visit.first_s is not None for visit in run.visits)
    assert len(run.work) == 6
    assert run.work[-1].requests > 0 or balancer == "hash-first"


def test_a_replica_takes_the_time_of_its_steps() -> None:
    replica = SimulatedReplica(COSTS)
    visits = [Visit(Arrival(0, (bytes([n]) * 8,), 513, 11), 0.0) for n in range(2)]
    for visit in visits:
        replica.take(visit)
    replica.advance(100.0)
    # Both prompts fit into one step; then 10 steps give both the rest of their answers.
    first_s = 2 * 513 / 51_200
    assert [visit.first_s for visit in visits] == [pytest.approx(first_s)] * 2
    assert replica.busy_s == pytest.approx(first_s + 10 * 0.011)
    assert replica.ended == visits
    again = Visit(Arrival(100, (bytes(8),), 513, 1), 100.0)
    replica.take(again)
    replica.advance(101.0)
    assert again.hits == 1 and again.first_s == pytest.approx(100 + 1 / 51_200)


def test_a_full_cache_drops_what_was_used_least_recently() -> None:
    replica = SimulatedReplica(COSTS.model_copy(update={"cached_chunks": 3}))

    def ask(*names: bytes) -> int:
        visit = Visit(Arrival(replica.now_s, names, 512 * len(names) + 1, 1), replica.now_s)
        replica.take(visit)
        replica.advance(replica.now_s + 1)
        return visit.hits

    assert ask(b"a", b"b") == 0
    assert ask(b"c") == 0
    assert ask(b"a", b"b") == 2
    assert ask(b"d", b"e") == 0
    assert ask(b"a", b"b") == 1, "the end of a chain goes before its beginning"


def test_costs_of_a_file_are_checked_by_name(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(COSTS.model_dump_json())
    assert EngineCosts.read(path) == COSTS
    assert [COSTS.decode_s(batch) for batch in (0, 1, 6, 21)] == [0, 0.01, 0.015, 0.03]
    for text, said in (
        ('{"step_tokens": 0}', "step_tokens: Input should be greater than or equal to 1"),
        ('{"speed": 1}', "speed: Extra inputs are not permitted"),
        ('{"decode_step_ms": [[8, 1.0], [8, 2.0]]}', r"batches \[8, 8\]: let them rise"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            EngineCosts.read(path)


def test_the_command_shows_a_line_for_each_replay(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = typer.main.get_command(app)
    given = ["bench", "fleet", str(trace), "--replicas", "1,3", "--balancer", "routing"]
    command.main(given, standalone_mode=False)
    assert capsys.readouterr().out.count("routing") == 2
    command.main([*given[:4], "1,x"], standalone_mode=False)
    assert "replicas is '1,x'" in capsys.readouterr().err


def test_the_command_knows_every_balancer() -> None:
    assert {one.value for one in Balancing} == {*BALANCERS, IDEAL}
