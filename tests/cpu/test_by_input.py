"""Dynamic methods as they were published: how much a head keeps of a chunk is decided by that
chunk's scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, LlamaConfig, PretrainedConfig

from tangram.compress.scorers import ChunkView, make_scorer
from tangram.compress.select import dynamic_fractions
from tangram.config import Scope
from tangram.engine.loop import Engine
from tangram.errors import ConfigError
from tangram.kernels.triton_kernels import TritonKernels
from tangram.model.load import LoadedModel
from tangram.types import Event, Request, SamplingParams
from tests.small_engines import drain, run, small_engine

SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = LlamaConfig(**SHAPE)
WINDOWS = GptOssConfig(
    **SHAPE,
    num_local_experts=2,
    num_experts_per_tok=1,
    sliding_window=20,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
CHUNK, SINKS, WINDOW = 64, 4, 1
ANSWER = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
PROMPTS = [[3 + (i * i * k) % 9000 for i in range(61 * k)] for k in (1, 2, 4)]
Adopt = Callable[[PretrainedConfig], LoadedModel]


def engine_of(
    loaded: LoadedModel, scope: Scope = "model", retention: float = 0.4, **options: Any
) -> Engine:
    defaults = {
        "kv_retention": retention,
        "scope": scope,
        "reclamation": "by-input",
        "enable_prefix_caching": False,
        "chunk_tokens": CHUNK,
        "page_tokens": 16,
        "max_num_batched_tokens": 192,
        "max_model_len": 400,
        "kv_cache_gib": 0.02,
    }
    return small_engine(loaded, **(defaults | options))


class Masked:
    """Every entry stays where it is; those that are not kept are hidden from what comes later (as
    kvpress does).
    """

    def __init__(self, loaded: LoadedModel, retention: float, scope: Scope) -> None:
        self.loaded, self.retention, self.scope = loaded, retention, scope
        self.keys, self.values = dict[int, Tensor](), dict[int, Tensor]()
        self.scores: list[Tensor] = []
        self.hidden = torch.zeros(
            loaded.geometry.layers, loaded.geometry.kv_heads, 0, dtype=torch.bool
        )

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, **options: Any
    ) -> Tensor:
        """q [T, Q, D], k and v [T, H, D] → [T, Q, D]."""
        layer, tokens = int(module.layer_idx), len(k)  # type: ignore[arg-type]
        self.keys[layer] = torch.cat([*self.keys.get(layer, k[:0]).split(1), k])
        self.values[layer] = torch.cat([*self.values.get(layer, v[:0]).split(1), v])
        past, group = len(self.keys[layer]) - tokens, q.shape[1] // k.shape[1]
        seen = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
        mask = seen & ~torch.nn.functional.pad(self.hidden[layer], (0, tokens))[:, None]
        if len(k) == CHUNK:
            chunk = ChunkView(
                k.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), past, layer, scaling, None
            )
            self.scores.append(make_scorer("keydiff").score(chunk))
        keys, values = (
            x[layer].transpose(0, 1).repeat_interleave(group, 0) for x in (self.keys, self.values)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, mask.repeat_interleave(group, 0), scale=scaling
        )
        return out.transpose(0, 1)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[V] of what follows on `tokens` and all those before."""
        start = self.hidden.shape[2]
        with torch.inference_mode():
            output = self.loaded.model(
                input_ids=torch.tensor([tokens]),
                position_ids=torch.arange(start, start + len(tokens))[None],
                use_cache=False,
                logits_to_keep=1,
                tangram=self,
            )
        dropped = torch.zeros(*self.hidden.shape[:2], len(tokens), dtype=torch.bool)
        if self.scores:
            dropped = ~self.find_kept(torch.stack(self.scores), start)
            self.scores.clear()
        self.hidden = torch.cat([self.hidden, dropped], dim=2)
        return torch.as_tensor(output.logits[0, -1])

    def find_kept(self, scores: Tensor, start: int) -> Tensor:
        """[L, H, C] of scores [L, H, C], by one sort of each pool."""
        forced = scores.clone()
        forced[..., : SINKS if start == 0 else 0] = forced[..., CHUNK - WINDOW :] = torch.inf
        pools = forced.flatten(0, 1)[None] if self.scope == "model" else forced
        kept = torch.zeros_like(pools, dtype=torch.bool)
        for pool, own in zip(pools, kept, strict=True):
            best = pool.flatten().argsort(descending=True)[: round(self.retention * pool.numel())]
            own.view(-1)[best] = True
        return kept.view(scores.shape)


def reference(
    loaded: LoadedModel, prompt: list[int], scope: Scope, count: int
) -> list[tuple[int, float]]:
    """Greedy tokens and their log-probabilities; a chunk is computed as it fills, one token at a
    time after that.
    """
    masked, found = Masked(loaded, 0.4, scope), list[tuple[int, float]]()
    whole = len(prompt) // CHUNK * CHUNK
    for begin in range(0, whole, CHUNK):
        logits = masked.logits(prompt[begin : begin + CHUNK])
    if whole < len(prompt):
        logits = masked.logits(prompt[whole:])
    for _ in range(count):
        values = logits.log_softmax(-1)
        found.append((int(values.argmax()), float(values.max())))
        logits = masked.logits([found[-1][0]])
    return found


def answer(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams
) -> list[list[tuple[int, float]]]:
    events: list[list[Event]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), tuple(prompt), params, events[number].append))
    drain(engine)
    return [
        [(token.token_id, token.logprob) for event in own for token in event.logprobs]
        for own in events
    ]


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_answers_are_those_of_a_cache_in_which_the_dropped_are_hidden(
    adopt_tiny: Adopt, scope: Scope
) -> None:
    loaded = adopt_tiny(LLAMA)
    # No chunk is filled by decode
    few = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)
    found = answer(engine_of(loaded, scope), PROMPTS, few)
    for prompt, own in zip(PROMPTS, found, strict=True):
        expected = reference(loaded, prompt, scope, 2)
        assert [token for token, _ in own] == [token for token, _ in expected]
        assert np.allclose([value for _, value in own], [value for _, value in expected], atol=1e-4)
    scopes = [
        answer(engine_of(loaded, other), PROMPTS[2:], few)[0][0][1] for other in ("layer", "model")
    ]
    assert abs(scopes[0] - scopes[1]) > 1e-6, (
        "the scope makes no difference here: the test would pass without it"
    )


@pytest.mark.parametrize("config", [LLAMA, WINDOWS])
def test_answers_do_not_depend_on_the_batch(adopt_tiny: Adopt, config: PretrainedConfig) -> None:
    """Several chunks, some filled by decode, sequences that end and slots that are used again."""
    loaded = adopt_tiny(config)
    alone = [run(engine_of(loaded), [prompt], ANSWER)[0] for prompt in PROMPTS]
    engine = engine_of(loaded)
    assert run(engine, PROMPTS, ANSWER) == alone
    assert run(engine, PROMPTS[::-1], ANSWER) == alone[::-1]
    engine.clear_cache()
    assert engine.stats().pages_free == engine.stats().pages_total


def test_the_triton_kernels_answer_alike(adopt_tiny: Adopt) -> None:
    loaded = adopt_tiny(LLAMA)
    few = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    found, expected = (
        answer(engine_of(loaded, kernels=kernels), PROMPTS[1:2], few)
        for kernels in (TritonKernels, None)
    )
    assert [token for token, _ in found[0]] == [token for token, _ in expected[0]]
    assert np.allclose(
        [value for _, value in found[0]], [value for _, value in expected[0]], atol=1e-4
    )


def test_heads_keep_what_their_scores_give_them(adopt_tiny: Adopt) -> None:
    """Lengths in the cache are the dynamic counts that calibration measures."""
    loaded = adopt_tiny(LLAMA)
    engine, seen = engine_of(loaded), list[Tensor]()
    reclaim = engine._runner._reclaimer
    assert reclaim is not None
    select = type(reclaim)._select

    def look(self: Any, sealer: Any) -> Tensor:
        seen.append(torch.stack([sealer.deferred[layer] for layer in sorted(sealer.deferred)]))
        return select(self, sealer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(reclaim), "_select", look)
        engine.submit(Request("a", tuple(PROMPTS[2]), ANSWER, lambda event: None))
        while len(seen) < 2:
            engine.step()
    layout, cache = engine.layout, engine._scheduler.cache
    fractions = sum(
        dynamic_fractions(scores, 0.4, "model", SINKS, WINDOW, chunk * CHUNK)
        for chunk, scores in enumerate(seen)
    )
    expected = (
        torch.as_tensor(fractions * CHUNK)
        .round()
        .int()
        .numpy()[tuple(np.transpose([g[0] for g in layout.groups]))]
    )
    (slot,) = cache.sequences
    assert (cache.past_lengths(slot, layout, 2 * CHUNK) == expected).all() and expected.std() > 3
    assert expected.sum() == 2 * round(0.4 * 12 * CHUNK)


@pytest.mark.parametrize(
    "options", [{"enable_prefix_caching": True}, {"kv_retention": 1.0}, {"profile": ("some.json",)}]
)
def test_what_it_cannot_do_is_refused(adopt_tiny: Adopt, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reclamation is 'by-input'"):
        engine_of(adopt_tiny(LLAMA), **options)
