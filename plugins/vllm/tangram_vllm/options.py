"""What users say to the plugin: one environment variable, a JSON object."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tangram.compress.library import find_shipped_profiles
from tangram.compress.profile import Profile
from tangram.errors import ConfigError

VARIABLE = "TANGRAM_VLLM"


class PluginOptions(BaseModel):
    """The options of the plugin, by the names of `TANGRAM_VLLM`'s JSON object.

    `profile` decides how many entries each head keeps, and by which scorer: a file of `tangram
    calibrate`, or the name of one that ships with Tangram. None keeps everything (ρ 1.0). Chunks
    that decode filled are published to the prefix cache if `publish_decoded` is set: then later
    turns find them, but what they find depends on the batches that decoded them. The scorer
    fastkvzip reads the `gate`, a file; None is the one that ships for the model of the profile.
    `untested_vllm` tries a vLLM of another minor version than the one that is served.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    profile: str | None = Field(default=None, min_length=1)
    publish_decoded: bool = False
    gate: Path | None = Field(default=None, strict=False)
    untested_vllm: bool = False

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        if self.gate is not None and self.profile is None:
            raise ValueError("a gate needs a profile for fastkvzip")
        return self

    @classmethod
    def read(cls) -> PluginOptions:
        """Those of the environment. Raises `ConfigError` naming the field, its value and the fault.

        An empty variable is `{}`.
        """
        try:
            return cls.model_validate_json(os.environ.get(VARIABLE) or "{}")
        except ValidationError as error:
            faults = [_explain(each) for each in error.errors(include_url=False)]
            raise ConfigError(f"{VARIABLE}: {'; '.join(faults)}") from error

    def load_profile(self) -> Profile | None:
        """The profile, if one is named. Raises `ProfileError` if it cannot be read."""
        if self.profile is None:
            return None
        shipped = find_shipped_profiles() / self.profile
        return Profile.load(shipped if shipped.is_file() else Path(self.profile))


def _explain(fault: object) -> str:
    known = ", ".join(PluginOptions.model_fields)
    assert isinstance(fault, dict)
    field = ".".join(map(str, fault["loc"])) or "the value"
    return f"{field} is {fault['input']!r}: {fault['msg']} (options: {known})"


def is_wanted() -> bool:
    """Whether the environment asks for the plugin."""
    return VARIABLE in os.environ
