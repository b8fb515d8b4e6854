"""Every causal language model of Transformers: served with its tokens, or refused by name.

`python -m tests.families` writes the list into docs/hardware.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tangram.errors import ConfigError, ModelError
from tangram.model.load import LoadedModel, load_model
from tangram.sizing.kv_shape import read_shape
from tangram.types import SamplingParams
from tests.small_engines import run, small_engine
from tests.tiny_configs import VOCABULARY, has_field, model_types, tiny_config

PAGE = Path(__file__).parents[1] / "docs" / "hardware.md"
SERVED = "served"
_BEGIN, _END = "### Every model type of Transformers\n", "\n## Versions\n"
_INTRODUCTION = """\
`python -m tests.families` writes this table, and a test holds each row. They make a tiny random
model of every type that `AutoModelForCausalLM` of Transformers {} takes: its default config, with
fewer and smaller layers. Where `use_sliding_window` switches windows on, a second row has them.

*Served* means that answers at ρ 1.0 are those of Transformers' own `generate`. It decodes greedily
in float32, with eager attention, behind prompts that are longer than every window. The other types
are refused at load, in one line that names the type and this reason.
"""
_HEAD = "| model types | what happens |\n|---|---|\n"
_SWITCH = "use_sliding_window"
# The longer one passes every window, chunk and index of `tiny_configs`.
PROMPTS = [[5, 9, 17, 3], [(7 * place) % (VOCABULARY - 6) + 3 for place in range(150)]]
TOKENS = 12


@dataclass(frozen=True)
class Family:
    """A model type, with `changes` of its config that switch something on."""

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.model_type, *self.changes])


def families() -> list[Family]:
    """All types that `AutoModelForCausalLM` takes; with windows, too, where a switch has them."""
    types = model_types()
    windowed = [name for name in types if has_field(name, _SWITCH)]
    return [Family(name) for name in types] + [Family(name, {_SWITCH: True}) for name in windowed]


def save_tiny(family: Family, folder: Path) -> None:
    """Write config.json of a tiny model of the family."""
    tiny_config(family.model_type, **family.changes).save_pretrained(folder)


def judge(folder: Path) -> str:
    """`SERVED`, or the reason why the model of a config is refused, without the model's name.

    Raises `AssertionError` if it is served with other tokens than Transformers', or with another
    cache than `tangram size` says.
    """
    try:
        loaded = load_model(str(folder), load_format="dummy", dtype="float32", device="cpu")
    except ModelError as error:
        return str(error).partition(": ")[2]
    spread_weights(loaded.model)
    check_size(folder, loaded)
    expected, lead = continuations(loaded.model, PROMPTS)
    assert lead > 1e-4, "a near-tie decides nothing: choose another seed"
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    assert run(small_engine(loaded), PROMPTS, params) == expected
    return SERVED


@torch.inference_mode()
def spread_weights(model: PreTrainedModel) -> None:
    """Weights that make attention anything but uniform, which would hide a wrong mask."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def check_size(folder: Path, loaded: LoadedModel) -> None:
    """`tangram size` counts the cache that the engine has, or refuses the config."""
    try:
        shape = read_shape(folder)
    except ConfigError:
        return
    geometry = loaded.geometry
    counted = shape.kv_heads, shape.head_dim, shape.value_dim, shape.windows
    assert counted == (geometry.kv_heads, geometry.head_dim, geometry.value_dim, geometry.windows)
    others = [one and one[::2] for one in (shape.window_heads, geometry.window_heads)]
    assert others[0] == others[1]


def continuations(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], tokens: int = TOKENS
) -> tuple[list[list[int]], float]:
    """Greedy `tokens` behind each prompt by Transformers' own eager attention and cache, and the
    smallest lead of a choice.
    """
    serving: str = model.config._attn_implementation
    found, lead = list[list[int]](), float("inf")
    model.set_attn_implementation("eager")
    for prompt in prompts:
        made: Any = model.generate(  # type: ignore[operator]
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        found.append(made.sequences[0, len(prompt) :].tolist())
        for logits in made.logits:
            best = logits[0].topk(2).values
            lead = min(lead, float(best[0] - best[1]))
    model.set_attn_implementation(serving)
    return found, lead


def check_answers(loaded: LoadedModel, prompts: list[list[int]], **options: Any) -> None:
    """Answers of 12 tokens are Transformers': together, again with prefix hits, and alone."""
    expected, lead = continuations(loaded.model, prompts)
    assert lead > 1e-4, "a near-tie decides nothing: choose another seed"
    answer = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine = small_engine(loaded, **options)
    assert run(engine, prompts, answer) == expected
    assert run(engine, prompts, answer) == expected
    assert engine.stats().cached_tokens > 1500
    for prompt, tokens in list(zip(prompts, expected, strict=True))[::2]:
        assert run(small_engine(loaded, **options), [prompt], answer) == [tokens]


def judge_all() -> dict[str, str]:
    """`judge` of every family, by its name."""
    verdicts = dict[str, str]()
    for family in families():
        with tempfile.TemporaryDirectory() as name:
            save_tiny(family, Path(name))
            verdicts[str(family)] = judge(Path(name))
    return verdicts


def read_verdicts() -> dict[str, str]:
    """What the page says of every family, by its name."""
    part = PAGE.read_text("utf-8").partition(_BEGIN)[2].partition(_END)[0]
    rows = [line.split("|")[1:3] for line in part.splitlines() if line.startswith("| `")]
    return {
        name: verdict.strip() for names, verdict in rows for name in names.strip(" `").split("`, `")
    }


def render(verdicts: Mapping[str, str]) -> str:
    """The part of the page: those that are served, then the others by the reason."""
    groups = dict[str, list[str]]()
    for name, verdict in sorted(verdicts.items()):
        groups.setdefault(verdict, []).append(f"`{name}`")
    rows = [
        f"| {', '.join(names)} | {verdict} |\n"
        for verdict, names in sorted(groups.items(), key=lambda group: (group[0] != SERVED, group))
    ]
    return f"{_BEGIN}\n{_INTRODUCTION.format(transformers.__version__)}\n{_HEAD}{''.join(rows)}"


def write_page(verdicts: Mapping[str, str]) -> None:
    """Replace the part of the page."""
    before, _, rest = PAGE.read_text("utf-8").partition(_BEGIN)
    PAGE.write_text(before + render(verdicts) + _END + rest.partition(_END)[2], "utf-8")


if __name__ == "__main__":
    write_page(judge_all())
