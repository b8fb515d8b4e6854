"""Steps without vLLM: attention over blocks is that over the entries that stay."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from engines import fork
from tangram_vllm.refusals import SERVED_SCORERS


def check(name: str, *known: object) -> None:
    done = fork(lambda: getattr(import_module("step_checks"), name)(*known), {})
    assert done.succeeded, done.log


@pytest.mark.parametrize("seed", range(2))
def test_steps_may_end_anywhere(seed: int, tmp_path: Path) -> None:
    check("check_cuts", seed, tmp_path, SERVED_SCORERS)


def test_plans_are_kept_while_rows_grow() -> None:
    check("check_plans")


def test_steps_without_sharing_reserve_their_buffers() -> None:
    check("check_reserved")


def test_shared_chunks_are_read_once() -> None:
    check("check_sharing")
