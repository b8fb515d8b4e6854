"""The engines that `bench.serving.compare` measures, on random weights of one config.json.

Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tangram_lab.load.asks import Ask
from tangram_lab.load.clock import Patience, TimedAnswer, answer_all

if TYPE_CHECKING:
    import torch

    from tangram.engine.loop import Engine

MODELS = Path(__file__).parents[1] / "models"
MODEL = MODELS / "qwen3-4b"
MOST_REQUESTS = 256


def make_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """The options of `python -m bench.serving.NAME` that say which shape runs, where and how."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.serving.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", choices=sorted(path.name for path in MODELS.iterdir()), default=MODEL.name
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of raw figures")
    return parser


class ServingEngine(Protocol):
    """An engine under load; `options` says how it was started, `vocab_size` what ids it knows.

    `costs` are what the last `answer_all` cost, where that is measured.
    """

    options: dict[str, Any]
    vocab_size: int
    costs: dict[str, Any]

    def clear_cache(self) -> None:
        """Forget every prefix."""
        ...

    def answer_all(
        self, asks: Sequence[Ask], patience: Patience | None = None
    ) -> list[TimedAnswer]:
        """See `tangram_lab.load.clock.answer_all`."""
        ...


class StartedEngine:
    """An engine in this process."""

    def __init__(self, engine: Engine, options: dict[str, Any]) -> None:
        self._engine, self.options, self.costs = engine, options, dict[str, Any]()
        self.vocab_size = engine.geometry.vocab_size

    def clear_cache(self) -> None:
        """See `ServingEngine`."""
        self._engine.clear_cache()

    def answer_all(
        self, asks: Sequence[Ask], patience: Patience | None = None
    ) -> list[TimedAnswer]:
        """See `ServingEngine`."""
        return answer_all(self._engine, asks, patience=patience)


class Tangram(StartedEngine):
    """Tangram on random weights, with the budgets that ship for the model."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        from tangram.config import EngineConfig
        from tangram.engine.setup.build import build_engine
        from tangram.link.collection import keep_uncollected

        if options["load_format"] != "dummy":
            model = save_checkpoint(model)
        with keep_uncollected():  # as `tangram serve` does, and vLLM's engine
            engine = build_engine(EngineConfig(model=str(model), **options))
        stats, config = engine.stats(), engine.config
        started = options | {
            "fits_tokens": stats.capacity_tokens,
            "cache_dtype": stats.cache_dtype,
            "pool_bytes": stats.pool_bytes,
            "page_tokens": config.page_tokens,
            "heads_per_page": config.heads_per_page,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        super().__init__(engine, started)


class Vllm:
    """vLLM's offline engine, stepped here; `options` are those of `vllm.LLM`."""

    def __init__(self, model: Path, **options: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["HF_HUB_OFFLINE"] = "1"
        from vllm import LLM

        self.options, self.vocab_size = options, read_vocab_size(model)
        self.costs = dict[str, Any]()
        self._llm: Any = LLM(
            model=str(model), skip_tokenizer_init=True, disable_log_stats=True, **self.options
        )
        if options.get("load_format") == "dummy":
            self._llm.apply_model(clear_biases)
            self.options |= {"biases": 0}
        config = self._llm.llm_engine.vllm_config
        self.options |= {
            "fits_tokens": (config.cache_config.num_gpu_blocks or 0)
            * config.cache_config.block_size,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }
        self._count = 0

    def clear_cache(self) -> None:
        """See `ServingEngine`."""
        self._llm.reset_prefix_cache()

    def answer_all(
        self, asks: Sequence[Ask], patience: Patience | None = None
    ) -> list[TimedAnswer]:
        """See `ServingEngine`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, begin, look_s = self._llm.llm_engine, time.perf_counter(), 0.0
        answers = [TimedAnswer(ask.at_s, len(ask.tokens)) for ask in asks]
        by_id: dict[str, TimedAnswer] = {}
        waiting = sorted(range(len(asks)), key=lambda number: asks[number].at_s, reverse=True)
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - begin
            while waiting and asks[waiting[-1]].at_s <= now:
                number = waiting.pop()
                self._count += 1
                by_id[str(self._count)] = answers[number]
                engine.add_request(
                    str(self._count),
                    {"prompt_token_ids": list(asks[number].tokens)},
                    SamplingParams(
                        temperature=0.0,
                        max_tokens=asks[number].output_tokens,
                        ignore_eos=True,
                        detokenize=False,
                        output_kind=RequestOutputKind.DELTA,
                    ),
                )
            if patience is not None and now >= look_s:
                look_s = now + patience.every_s
                if patience.ends(answers, now):
                    engine.abort_request(list(by_id))
                    raise patience.give_up(answers, now)
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, asks[waiting[-1]].at_s - (time.perf_counter() - begin)))
                continue
            for output in engine.step():
                # Where ids are made unique, the given one comes first: "7-0a1b".
                answer = by_id[output.request_id.split("-")[0]]
                tokens = output.outputs[0].token_ids
                answer.times_s += [time.perf_counter() - begin] * len(tokens)
                answer.token_ids += tokens
                answer.cached_tokens = output.num_cached_tokens or answer.cached_tokens
        return answers


def clear_biases(model: torch.nn.Module) -> None:
    """Set all biases to 0, so that tokens differ in their experts.

    vLLM draws biases and norms like all weights, within ±0.001. Products are a hundredth of that,
    and biases are the same for all tokens: each layer adds some to what tokens have in common. Soon
    all tokens take the same experts. As Transformers draws them, products are fifty times as large
    as biases.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()


def save_checkpoint(model: Path) -> Path:
    """A folder with random weights of `model`: several devices read theirs from files.

    It ends with the process. The tokenizer is another model's, since prompts are token ids.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from bench.bare_tokenizer import load_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="tangram-random-"))
    atexit.register(shutil.rmtree, folder)
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    with torch.device("cuda"):  # a CPU takes a minute for the random numbers
        made = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
        made.save_pretrained(folder)
    torch.cuda.empty_cache()
    load_tokenizer("smollm2").save_pretrained(folder)
    return folder


def choose_options(
    kv_retention: float,
    chunk_tokens: int,
    most_tokens: int,
    most_requests: int,
    offload_gib: float,
    cache_dtype: Literal["auto", "fp8"],
    ranks: int,
) -> dict[str, Any]:
    """The options of Tangram at one retention ratio."""
    return {
        "load_format": "dummy" if ranks == 1 else "auto",
        "tensor_parallel_size": ranks,
        "dtype": "bfloat16",
        "kv_retention": kv_retention,
        "scorer": "keydiff",
        "scope": "model",
        "chunk_tokens": chunk_tokens,
        "max_model_len": most_tokens,
        "max_num_seqs": most_requests,
        "max_num_batched_tokens": 2 * 8192 + most_requests,
        "kv_offload_gib": offload_gib,
        "kv_cache_dtype": cache_dtype,
    }


def choose_vllm_options(
    most_tokens: int,
    most_requests: int = MOST_REQUESTS,
    offload_gib: float = 0.0,
    ranks: int = 1,
    cache_dtype: Literal["auto", "fp8"] = "auto",
) -> dict[str, Any]:
    """The options of vLLM on random weights, its defaults where none are said."""
    return {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": most_tokens,
        "max_num_seqs": most_requests,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
        "kv_offloading_size": offload_gib or None,
        "tensor_parallel_size": ranks,
        "kv_cache_dtype": cache_dtype,
    }


def choose_plugin_options(kv_retention: float, *, packs: bool) -> dict[str, Any]:
    """What vLLM is told besides `choose_vllm_options` where the plugin of plugins/vllm serves.

    If it `packs`, chunks that rows share are read once, and no step is scheduled ahead.
    It sets the plugin's variable in this process, with the budgets that ship for `MODEL`.
    """
    shipped = f"qwen3-4b-instruct-2507.keydiff.model.c512.r{kv_retention:g}.json"
    wanted = {} if kv_retention == 1 else {"profile": shipped}
    os.environ |= {"TANGRAM_VLLM": json.dumps(wanted), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    ahead = False if packs else None
    return {"attention_backend": "CUSTOM", "block_size": 512, "async_scheduling": ahead}


def read_vocab_size(model: Path) -> int:
    """The vocabulary of a model's config.json."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])
