"""What is said of options is derived from one place."""

from __future__ import annotations

from typing import Any, get_args

from tangram.config import CHOICES, OPTIONS, EngineConfig
from tests.edge.host.test_command_line import ALL
from tools.options_page import PAGE, render


def test_the_page_is_what_the_config_says() -> None:
    assert PAGE.read_text() == render(), "run python -m tools.options_page"


def test_every_option_is_one_of_serve() -> None:
    served = {str(param.name).removeprefix("no_") for param in ALL["serve",].params}
    assert set(OPTIONS) <= served


# Nobody else sends requests, nothing is scraped, and who sees an error can run the command again.
_QUEUE = {"max_queue", "overflow_every", "save_failed_passes"}
_STEPS = {"max_num_seqs", "max_num_batched_tokens"}
_POOL = {"kv_cache_gib", "gpu_memory_utilization", "kv_cache_dtype"}
_OF_CHATS = {"chat_template", "tool_format", "thinking_format"}
# What changes how fast a server answers many clients, or what their requests choose among.
_OF_SERVING = {
    *("profile", "prompt_patience", "max_model_len"),
    *("enable_prefix_caching", "kv_offload_dtype", "kv_offload_gib", "speculative_config"),
    *("kv_disk_path", "kv_disk_gib"),
    *("tensor_parallel_size", "generation_config"),
} | _OF_CHATS
# The options of the engine that a command does not take, and why. `serve` and `deploy` take all.
LEFT_OUT = {
    "chat": _QUEUE,
    "generate": _QUEUE,
    **dict.fromkeys(
        (f"bench serving {load}" for load in ("throughput", "multi-turn", "trace", "ablation")),
        _QUEUE
        | {"generation_config"}
        | _OF_CHATS,  # its requests are tokens and state all sampling
    ),
    # It makes its profiles and engines by method, and asks for scores, not for speed.
    "eval": _QUEUE | _OF_SERVING | {"compile_decode"},
    # It makes profiles, and runs prompts without an engine.
    "calibrate": _QUEUE | _OF_SERVING | _STEPS | _POOL | {"enforce_eager", "compile_decode"},
    # It counts bytes, and loads nothing.
    "size": (_QUEUE | _OF_SERVING | _STEPS | _POOL | {"enforce_eager", "compile_decode"})
    - {"kv_cache_dtype"}
    | {"device", "threads", "seed", "load_format", "scorer", "scope", "gate"},
    # Transformers' own cache, which has none of this.
    "bench naive": set(OPTIONS) - {"model", "dtype", "load_format", "device", "threads"},
}


def test_commands_leave_out_what_they_have_no_use_for() -> None:
    taken: dict[str, set[str]] = {}
    for command, name, _ in OF_ENGINE:
        taken.setdefault(command, set()).add(name.removeprefix("no_"))
    left_out = {command: set(OPTIONS) - names for command, names in taken.items()}
    assert left_out == {"serve": set(), "deploy": set()} | LEFT_OUT


# A command's own default, where it is another one than the engine's, and why.
OWN_DEFAULTS = {
    ("serve", "max_queue"): 1024,  # clients are many, and none sees the queue
    ("deploy", "max_queue"): 1024,
    ("eval", "kv_retention"): None,  # a list of several, which depends on --quick
    ("eval", "chunk_tokens"): "512",  # a list
    ("size", "model"): None,  # no size without a model
    ("bench naive", "dtype"): "float32",  # 16 bits may change a token
}
OWN_CHOICES = {
    ("eval", "scope"),  # a list
    ("size", "dtype"),  # of the sizes that it prints, with other names
}
OF_ENGINE = [
    (" ".join(path), str(param.name), param)
    for path, command in ALL.items()
    for param in command.params
    if str(param.name).removeprefix("no_") in OPTIONS
]


def texts_of(kind: Any) -> tuple[str, ...]:
    """The texts that a type allows; () if it allows any."""
    inner = [text for part in get_args(kind) for text in texts_of(part)]
    return tuple(inner) or tuple(part for part in get_args(kind) if isinstance(part, str))


def default_of(name: str) -> object:
    """What a command has as its default for an option of the engine."""
    positive = name.removeprefix("no_")
    value = getattr(EngineConfig, positive)
    return (not value if positive != name else value) if value != () else None


def test_commands_have_the_defaults_of_the_engine() -> None:
    assert OF_ENGINE
    own = {
        (command, name): param.default
        for command, name, param in OF_ENGINE
        if param.default != default_of(name)
    }
    assert own == OWN_DEFAULTS


def test_commands_have_the_choices_of_the_engine() -> None:
    own = {
        (command, name)
        for command, name, param in OF_ENGINE
        if texts_of(param.type_descriptor.annotation) != CHOICES.get(name, ())
    }
    assert own == OWN_CHOICES


def test_one_profile_may_be_given_as_a_text() -> None:
    assert EngineConfig(profile="a.json").profile == ("a.json",)
    assert EngineConfig(profile=["a.json", "b.json"]).profile == ("a.json", "b.json")
