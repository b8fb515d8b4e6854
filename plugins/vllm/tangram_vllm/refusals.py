"""What the plugin does not serve: one table, read at the start, of names, reasons and tests.

A wish that is not served stops the engine before weights are loaded, instead of giving other
answers than were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm import __version__
from vllm.config import CompilationMode, VllmConfig

from tangram.compress.profile import Profile
from tangram.compress.scorers import SCORERS
from tangram.errors import ConfigError

SERVED_VLLM = "0.32"
SERVED_SCORERS = [name for name, each in SCORERS.items() if "reconstruction" not in each.needs]
SERVED_DRAFTS = ("ngram", "ngram_gpu", "suffix")


@dataclass(frozen=True)
class LayerWish:
    """What a layer of the model asks of attention."""

    sliding_window: int | None = None
    alibi: bool = False
    attention: str = "decoder"
    shares_cache: bool = False
    others: tuple[str, ...] = ()  # names of arguments that only other backends know
    rotates_halves: bool = True
    has_hidden: bool = True


@dataclass(frozen=True)
class EngineWish:
    """What the engine was asked for: vLLM's config, one layer, and the profile, if there is one.

    `untested_vllm` is the option.
    """

    config: VllmConfig
    layer: LayerWish
    profile: Profile | None
    untested_vllm: bool = False


@dataclass(frozen=True)
class RefusedWish:
    """A row: the `name` of what is refused, whether it is `asked` for, and why it is refused."""

    name: str
    asked: Callable[[EngineWish], bool]
    reason: str


def _chunk_tokens(asked: EngineWish) -> int:
    return 0 if asked.profile is None else asked.profile.chunk_tokens


def _scorer(asked: EngineWish) -> str | None:
    return None if asked.profile is None else asked.profile.scorer.name


def _needs(asked: EngineWish, what: str) -> bool:
    scorer = _scorer(asked)
    return scorer in SCORERS and what in SCORERS[scorer].needs


REFUSALS: Sequence[RefusedWish] = (
    RefusedWish(
        "another minor version of vLLM",
        lambda asked: not (__version__.startswith(f"{SERVED_VLLM}.") or asked.untested_vllm),
        f"the interfaces that the plugin extends change: install vLLM {SERVED_VLLM}",
    ),
    RefusedWish(
        "options in --additional-config",
        lambda asked: "tangram" in asked.config.additional_config,
        "vLLM asks for the form of the cache without its config: set the variable TANGRAM_VLLM",
    ),
    RefusedWish(
        "a block size that is not the profile's chunk",
        lambda asked: (
            asked.profile is not None
            and asked.config.cache_config.block_size != _chunk_tokens(asked)
        ),
        "a block holds one chunk: give --block-size with the profile's chunk_tokens",
    ),
    RefusedWish(
        "a block size that is no multiple of 16",
        lambda asked: asked.config.cache_config.block_size % 16 != 0,
        "a block consists of pages of 16 tokens: give --block-size 512",
    ),
    RefusedWish(
        "a scorer with a second pass",
        lambda asked: _scorer(asked) not in (None, *SERVED_SCORERS),
        f"vLLM computes a token once: calibrate with {', '.join(SERVED_SCORERS)}",
    ),
    RefusedWish(
        "a scorer of hidden states in a compiled model",
        lambda asked: (
            _needs(asked, "hidden") and asked.config.compilation_config.mode != CompilationMode.NONE
        ),
        "what torch.compile makes of a model calls no hook between layers: give --enforce-eager",
    ),
    RefusedWish(
        "hidden states of this model",
        lambda asked: _needs(asked, "hidden") and not asked.layer.has_hidden,
        "its attention modules are called otherwise than with hidden_states: choose keydiff",
    ),
    RefusedWish(
        "a scorer that undoes the rotation of this model",
        lambda asked: _needs(asked, "rotary") and not asked.layer.rotates_halves,
        "it is not one of halves by positions in the text: choose keydiff",
    ),
    RefusedWish(
        "latents (MLA)",
        lambda asked: asked.config.model_config.use_mla,
        "the kernels for latents were not tried under vLLM: unset TANGRAM_VLLM",
    ),
    RefusedWish(
        "sliding windows",
        lambda asked: asked.layer.sliding_window is not None,
        "chunks that leave a window are not freed yet: unset TANGRAM_VLLM",
    ),
    RefusedWish(
        "layers of another kind than attention",
        lambda asked: asked.config.model_config.is_hybrid,
        "one group of blocks holds all layers: unset TANGRAM_VLLM",
    ),
    RefusedWish(
        "ALiBi", lambda asked: asked.layer.alibi, "the kernels know no ALiBi: unset TANGRAM_VLLM"
    ),
    RefusedWish(
        "attention of an encoder",
        lambda asked: asked.layer.attention != "decoder",
        "chunks are sealed behind causal attention: unset TANGRAM_VLLM",
    ),
    RefusedWish(
        "layers that share their cache",
        lambda asked: asked.layer.shares_cache,
        "every layer has its own part of a block: unset TANGRAM_VLLM",
    ),
    RefusedWish(
        "arguments that the kernels do not know",
        lambda asked: bool(asked.layer.others) and not asked.config.model_config.use_mla,
        "this model's attention is of another form: unset TANGRAM_VLLM",
    ),
    RefusedWish(
        "a KV cache of another dtype than the model",
        lambda asked: asked.config.cache_config.cache_dtype != "auto",
        "entries have the dtype of the model: leave --kv-cache-dtype out",
    ),
    RefusedWish(
        "KV connectors and offload",
        lambda asked: (
            asked.config.kv_transfer_config is not None
            or bool(asked.config.cache_config.kv_offloading_size)
        ),
        "they find blocks by position, and a chunk has several: leave them out",
    ),
    RefusedWish(
        "several devices",
        lambda asked: asked.config.parallel_config.world_size > 1,
        "heads are not dealt to ranks yet: leave the parallel sizes at 1",
    ),
    RefusedWish(
        "drafts that have a KV cache",
        lambda asked: (
            asked.config.speculative_config is not None
            and asked.config.speculative_config.method not in SERVED_DRAFTS
        ),
        f"their layers would share the blocks of the model's: choose {', '.join(SERVED_DRAFTS)}",
    ),
    RefusedWish(
        "drafts with async scheduling",
        lambda asked: (
            asked.config.speculative_config is not None
            and bool(asked.config.scheduler_config.async_scheduling)
        ),
        "lengths are then known on the device alone: give --no-async-scheduling",
    ),
    RefusedWish(
        "model runner V2",
        lambda asked: asked.config.use_v2_model_runner,
        "its block tables lie on the device: set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
)


def refuse_unserved(asked: EngineWish) -> None:
    """Raise `ConfigError` that names every row of `REFUSALS` that is asked for."""
    found = [f"{row.name}: {row.reason}" for row in REFUSALS if row.asked(asked)]
    if found:
        raise ConfigError(f"tangram-vllm does not serve {'; nor '.join(found)}")
