"""The options of a server and of replicas, as commands and Ray take them."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.errors import ConfigError
from tangram.serve.options import FleetOptions

from .test_command_line import ALL


@pytest.mark.parametrize("text", ["3", "[]", "{", ""])
def test_autoscaling_that_is_no_object_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="autoscaling is "):
        FleetOptions(autoscaling=text)  # type: ignore[arg-type]


def test_a_file_of_responses_without_responses_is_refused_by_both_names() -> None:
    with pytest.raises(ConfigError, match=r"store_path is 'a' .*store_responses"):
        FleetOptions(store_path="a", store_responses=0)
    assert FleetOptions(store_responses=0).store_path is None


def test_every_number_of_a_server_has_bounds() -> None:
    for name, field in FleetOptions.model_fields.items():
        extra: Any = field.json_schema_extra
        is_number = field.annotation in (int, float, float | None)
        assert is_number == (extra["option"].bounds is not None), name


def test_the_commands_have_the_defaults_of_the_description() -> None:
    """() is None there: an option that may be repeated."""
    for command in ("serve", "deploy"):
        params = {param.name: param for param in ALL[command,].params}
        for name, field in FleetOptions.model_fields.items():
            if name in params:
                assert (params[name].default or field.default) == field.default, name
