"""What is said of options is derived from one place."""

from __future__ import annotations

from tangram.config import OPTIONS, EngineConfig
from tools.options_page import PAGE, render

from .test_command_line import ALL


def test_the_page_is_what_the_config_says() -> None:
    assert PAGE.read_text() == render(), "run python -m tools.options_page"


def test_every_option_is_one_of_serve() -> None:
    served = {str(param.name).removeprefix("no_") for param in ALL["serve",].params}
    assert set(OPTIONS) <= served


def test_one_profile_may_be_given_as_a_text() -> None:
    assert EngineConfig(profile="a.json").profile == ("a.json",)
    assert EngineConfig(profile=["a.json", "b.json"]).profile == ("a.json", "b.json")
