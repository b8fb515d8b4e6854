"""The one variable: errors name the field, the value and what is allowed."""

from __future__ import annotations

import pytest

from tangram.errors import ConfigError, ProfileError
from tangram_vllm.options import VARIABLE, PluginOptions


def read(monkeypatch: pytest.MonkeyPatch, text: str) -> PluginOptions:
    monkeypatch.setenv(VARIABLE, text)
    return PluginOptions.read()


def test_nothing_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "{}"):
        assert read(monkeypatch, text) == PluginOptions(profile=None, publish_decoded=False)
    assert read(monkeypatch, "{}").load_profile() is None


def test_shipped_profiles_go_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    options = read(monkeypatch, '{"profile": "smollm2.keydiff.model.c512.r0.5.json"}')
    profile = options.load_profile()
    assert profile is not None and profile.kv_retention == 0.5
    with pytest.raises(ProfileError, match=r"nowhere\.json"):
        read(monkeypatch, '{"profile": "nowhere.json"}').load_profile()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"kv_retention": 0.5}', r"kv_retention is 0.5: Extra inputs .*options: profile, publ"),
        ('{"profile": ["a", "b"]}', r"profile is \['a', 'b'\]: Input should be a valid string"),
        ('{"publish_decoded": 1}', r"publish_decoded is 1: Input should be a valid boolean"),
        ('{"gate": "a.safetensors"}', r"the value is .*: Value error, a gate needs a profile"),
        ("yes", r"the value is 'yes': Invalid JSON"),
    ],
)
def test_errors_name_field_and_value(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE}: {said}"):
        read(monkeypatch, text)
