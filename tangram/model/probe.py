"""What a model asks of attention: which tokens see which, with what options, and of what else a
token's queries, keys, values and logits are functions.

Two forward passes of a few tokens tell, so nothing that config.json says has to be believed or can
be overlooked. In both a token attends to itself alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from tangram.errors import ModelError
from tangram.kernels.reference import apply_sinks, softmax_part
from tangram.model.latent import LatentHeads, join_entries, latent_heads
from tangram.model.recurrent import (
    PassStates,
    StateShape,
    begin_rows,
    continue_row,
    read_state_shapes,
)

# The implementation of attention of the first pass. It has masks; that of serving has none.
IMPLEMENTATION = "tangram-probe"
# What attention serves, and what it may ignore: positions are in queries and keys already.
_SERVED = {"scaling", "softcap", "s_aux", "sliding_window"}
_IGNORED = {"position_ids", "use_cache", "logits_to_keep", "is_causal"}
_TOKENS = 16  # of the comparison with a layer's own attention
# The standard deviation of their scores: with 8 a softcap of 50 changes weights. Latents have no
# caps and are compared in the dtype of their matrix: bfloat16 rounds large scores by much.
_SCORES, _LATENT_SCORES = 8.0, 1.0
_ROUNDING = 1e-3  # of the largest element, and twenty times as much in 16 bits
_SIMILAR = 0.1  # of the norm on a GPU; tiny models that drop a state are 0.33 to 1.9 apart


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: q [T, Q, D], k and v [T, H, D], or of latents as in `latent.py`."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]

    @property
    def heads(self) -> LatentHeads | None:
        """The heads of a layer with latents."""
        return latent_heads(self.module)

    @property
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as pages would hold them."""
        if self.heads is None:
            return self.q, self.k, self.v
        return self.heads.absorb(self.q), *join_entries(self.k, self.v)


@dataclass
class AttentionListener:
    """The context of a pass: notes the calls of attention, in which a token sees itself alone."""

    calls: list[AttentionCall] = field(default_factory=list)
    decodes_only = False

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See `AttentionContext`."""
        return self.hear(AttentionCall(module, q, k, v, None, options))

    def hear(self, call: AttentionCall) -> Tensor:
        """Note the call; returns the output [T, Q, V]."""
        self.calls.append(call)
        queries = call.q.shape[1]
        if call.heads is None:
            return call.v.repeat_interleave(queries // call.v.shape[1], 1)
        return call.heads.read_values(call.k.expand(-1, queries, -1))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tangram: AttentionListener | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if tangram is None:
        raise ModelError(
            "layers do not hand the keyword arguments of the call to attention, by which it is "
            "told of a step"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return tangram.hear(AttentionCall(module, q, k, v, attention_mask, options))[None], None


def _seen_tokens(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    config: Any,
    device: torch.device,
    **others: Any,
) -> Tensor:
    """A mask [1, 1, q, kv], filled with the number of newest tokens that a token sees, itself too.

    Negative: it sees those before it in its chunk of so many. 0 = it sees others. Transformers'
    function of a mask is asked for whole rows of the longest context.
    """
    length = int(config.get_text_config().max_position_embeddings)
    zero, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(length).to(device)
    places = [length - 1, max(length - 2, 0), length // 2]

    def row_of(place: int) -> Tensor:
        return mask_function(zero, zero, zero + place, keys).expand(length)

    def begins(oldest: Callable[[int], int]) -> bool:
        seen = ((keys <= place) & (keys >= oldest(place)) for place in places)
        return all(map(torch.equal, map(row_of, places), seen))

    seen = int(row_of(length - 1).sum())
    if begins(lambda place: place - seen + 1):
        found = seen
    else:
        # The last chunk may be cut short by the context's end: that before it is whole.
        places += [max(length - seen - 1, 0), length - seen]
        chunk = int(row_of(places[-2]).sum())
        found = -chunk if chunk and begins(lambda place: place // chunk * chunk) else 0
    return torch.full((1, 1, q_length, kv_length), found, device=device)


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _seen_tokens)


def window_of(call: AttentionCall, longest: int) -> tuple[int | None, bool]:
    """The window of a layer, None if it sees the whole context of `longest` tokens; and whether it
    is a chunk instead of sliding.

    The mask that Transformers gives the layer says so: options are for kernels without masks.
    Raises `ModelError` if a token sees other tokens.
    """
    mask = call.mask
    if mask is None:
        raise ModelError("a token sees those after it, too: attention gets no mask")
    if mask.is_floating_point() or mask.dtype is torch.bool or (mask != mask.flatten()[0]).any():
        raise ModelError("its attention mask is not by positions alone")
    found = int(mask.flatten()[0])
    if not found:
        raise ModelError("a token sees others than itself and the newest ones before it")
    seen = abs(found)
    window = None if seen >= longest else seen
    named = call.options.get("sliding_window")
    if named is not None and (None if named >= longest else int(named)) != window:
        raise ModelError(f"its window is {window} by its mask, but {named} by its options")
    return window, window is not None and found < 0


def check_cache(config: PretrainedConfig, windows: Mapping[int, int | None], longest: int) -> None:
    """Raise `ModelError` if Transformers' own cache drops what a layer's mask shows.

    Then Transformers answers otherwise with its cache than without it. `windows` are those of the
    layers with attention.
    """
    try:
        held = DynamicCache(config=config).layers
    except Exception as error:
        raise ModelError(f"Transformers makes no cache of its config: {describe(error)}") from error
    for layer, window in windows.items():
        kept = getattr(held[layer], "sliding_window", None) or longest
        if kept < (window or longest):
            raise ModelError(
                f"layer {layer}: its mask shows {'all' if window is None else window} tokens, but "
                f"Transformers' own cache keeps the newest {kept}: the config contradicts the model"
            )


def check_options(call: AttentionCall) -> None:
    """Raise `ModelError` if a layer wants of attention what is not served."""
    wanted = {
        name
        for name, value in call.options.items()
        if name not in _SERVED | _IGNORED and (isinstance(value, Tensor) or value)
    }
    if wanted:
        raise ModelError(f"attention has no option {', '.join(sorted(wanted))}")
    if call.options.get("is_causal") is False:
        raise ModelError("a token sees those after it, too: is_causal is False")
    if not isinstance(call.options.get("scaling"), float | int):
        raise ModelError(f"attention gets no scaling: {call.options.get('scaling')}")
    if call.heads is not None:
        for name in ("softcap", "s_aux"):
            if call.options.get(name) is not None:
                raise ModelError(f"it has latents and {name}")


def check_computation(call: AttentionCall) -> None:
    """Compare what attention serves with the layer's own eager attention, on random inputs.

    Raises `ModelError` if they differ: its own attention then has a part that no option names.
    """
    eager = getattr(sys.modules[type(call.module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ModelError("its module has no eager attention to compare with")
    random, dtype, spread = torch.Generator().manual_seed(0), torch.float32, _SCORES
    if call.heads is not None:
        dtype, spread = call.q.dtype, _LATENT_SCORES
    q, k, v = (
        torch.randn((_TOKENS, *x.shape[1:]), generator=random).to(x.device, dtype)
        for x in (call.q, call.k, call.v)
    )
    q = q * (spread / (abs(call.options["scaling"]) * q.shape[-1] ** 0.5))
    hidden = torch.full((_TOKENS, _TOKENS), torch.finfo(q.dtype).min).triu(1).to(q)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if call.heads is not None:
        keys, values = call.heads.expand(join_entries(k, v)[0][:, 0])
    try:
        theirs = eager(
            call.module,
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            hidden[None, None],
            **call.options,
        )[0][0]
    except Exception as error:
        raise ModelError(f"its eager attention cannot be compared with: {error}") from error
    ours = _serve(AttentionCall(call.module, q, k, v, None, call.options))
    if not _near(ours, theirs):
        raise ModelError("its eager attention computes something else than its options say")


def _serve(call: AttentionCall) -> Tensor:
    """Causal attention of a call [T, Q, V], as this engine computes it."""
    q, k, v = call.entries
    tokens, group = len(q), q.shape[1] // k.shape[1]
    bias = torch.full((tokens, tokens), -torch.inf, device=q.device).triu(1)
    keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    softcap, sinks = call.options.get("softcap"), call.options.get("s_aux")
    part = softmax_part(q.transpose(0, 1), keys, values, bias, call.options["scaling"], softcap)
    out = apply_sinks(part, None if sinks is None else sinks[:, None].expand(-1, tokens))
    out = out.transpose(0, 1).to(q.dtype)
    return out if call.heads is None else call.heads.read_values(out)


def _near(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    rounding = _ROUNDING * (1 if ours.dtype is torch.float32 else 20)
    return not bool((ours - theirs).abs().max() > rounding * theirs.abs().max())


def _similar(ours: Tensor, theirs: Tensor) -> bool:
    """Whether they differ by no more than what kernels of a GPU round, which is not float32."""
    apart, size = (torch.linalg.vector_norm(x.float()) for x in (ours - theirs, theirs))
    return bool(apart <= _SIMILAR * size)


def asked_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """The calls of attention for token 0 and then token 1, each with the mask that it got.

    Raises `ModelError` if the model does not run.
    """
    serving: str = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        return listen(model, [0, 1], [0, 1], [1])[0]
    finally:
        model.set_attn_implementation(serving)


def find_shared(calls: Sequence[AttentionCall]) -> dict[int, int]:
    """The calls of a pass that get the same tensors as an earlier one, each with the first such."""
    first = dict[object, int]()
    found = (
        first.setdefault(tuple((x.data_ptr(), x.shape, x.stride()) for x in (call.k, call.v)), at)
        for at, call in enumerate(calls)
    )
    return {at: earlier for at, earlier in enumerate(found) if earlier != at}


def find_states(model: PreTrainedModel) -> tuple[StateShape, ...]:
    """What recurrent layers keep of a sequence. Raises `ModelError` if the model does not run."""
    serving: str = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        return read_state_shapes(model, tangram=AttentionListener())
    except Exception as error:
        raise ModelError(f"its states cannot be found: {describe(error)}") from error
    finally:
        model.set_attn_implementation(serving)


def check_rows(
    model: PreTrainedModel, alone: AttentionCall, longest: int, shapes: Sequence[StateShape] = ()
) -> None:
    """Run the model as a step does: tokens 1, 0, 0, 1 in one pass, those that are equal at the same
    positions. Each is a row, and the states of `shapes` begin with it.

    `alone` is the first call of attention in `asked_calls`. Raises `ModelError` if something of a
    token depends on its place in the batch or on other tokens: a convolution or a recurrent layer
    without such states, positions that are counted, frequencies by the longest position.
    """
    tokens = [1, 0, 0, 1]
    states = begin_rows(shapes, len(tokens), model.device) if shapes else None
    places = [1, longest - 1, longest - 1, 1]
    calls, logits = listen(model, tokens, places, [0, 3, 2], states)
    if logits.shape[:2] != (1, 3):
        raise ModelError(f"it gives logits {list(logits.shape)} where those of 3 tokens are asked")
    for call in calls:
        for part in (call.q, call.k, call.v):
            if not _near(part[:2], part[[3, 2]]):
                raise ModelError(
                    "queries, keys or values of a token depend on other tokens of the batch or on "
                    "its place there, not on its position alone"
                )
    if not _near(logits[0, 0], logits[0, 1]):
        raise ModelError("the logits of a token depend on other tokens but by attention")
    if states is not None:  # they carry something from the token before
        return
    for first, again in ((alone.q[1], calls[0].q[0]), (alone.k[1], calls[0].k[0])):
        if not _near(first, again):
            raise ModelError("keys of a token depend on the longest position in the batch")


def check_states(model: PreTrainedModel, shapes: Sequence[StateShape]) -> None:
    """Run a sequence in one row, and again in two, the second of which begins with a state.

    Raises `ModelError` if the answers differ: its layers drop their states, or some are unknown.
    """
    if not shapes:
        return
    numbers, last = list(range(_TOKENS)), torch.zeros(1, dtype=torch.int64, device=model.device)
    ends = list[list[Tensor]]()
    for counts in ([_TOKENS], [_TOKENS // 2] * 2):
        states = continue_row(shapes, counts, model.device)
        _, logits = listen(model, numbers, numbers, numbers, states)
        ends.append([logits, *(states.memory.read(shape.name, last) for shape in shapes)])
    alike = _near if model.device.type == "cpu" else _similar
    if not all(map(alike, *ends)):
        raise ModelError("its recurrent layers go on otherwise from a state than without a break")


def listen(
    model: PreTrainedModel,
    tokens: list[int],
    positions: list[int],
    wanted: list[int],
    states: PassStates | None = None,
) -> tuple[list[AttentionCall], Tensor]:
    """The calls of attention and the logits of a pass, as `Passes.forward` runs it."""
    listener = AttentionListener()
    ids, places, kept = (
        torch.tensor(numbers, device=model.device) for numbers in (tokens, positions, wanted)
    )
    try:
        output = model(
            input_ids=ids[None],
            position_ids=places[None],
            past_key_values=states,
            use_cache=False,
            logits_to_keep=kept,
            tangram=listener,
        )
        return listener.calls, output.logits
    except ModelError:
        raise
    except Exception as error:  # the model's own code, which may raise anything
        raise ModelError(f"it does not run: {describe(error)}") from error


def describe(error: Exception) -> str:
    """An error of foreign code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
