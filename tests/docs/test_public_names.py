"""What users have written into scripts, dashboards and clients stays valid."""

from __future__ import annotations

import json

import pytest

from tests.public_names import RECORD, list_public_names

RECORDED: dict[str, list[str]] = json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return list_public_names()


@pytest.mark.parametrize("kind", RECORDED)
def test_no_public_name_is_lost(kind: str, found: dict[str, list[str]]) -> None:
    lost = set(RECORDED[kind]) - set(found[kind])
    assert not lost, "keep these as deprecated aliases"


@pytest.mark.parametrize("kind", RECORDED)
def test_every_public_name_is_recorded(kind: str, found: dict[str, list[str]]) -> None:
    new = set(found[kind]) - set(RECORDED[kind])
    assert not new, "run python -m tests.public_names"
