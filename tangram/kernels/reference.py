"""The specification of every kernel, in plain torch: any dtype, any device, sums in float32.

The pool is a tensor [N_pages, Hp, S, P, D], keys at [:, :, 0] and values at [:, :, 1]. With S = 1
it holds latents: the first V elements of a key are its value (`PoolKernels`). So (page, column) is
a contiguous single-head block; `page * Hp + column` numbers these *virtual blocks*. `tables` is the
flat int32 array of page ids, `lengths` the flat int32 array of entries per head. A head is
addressed by `table_off`, the offset of its first page in `tables`, and its `column`. Addresses are
integer arrays, NumPy or torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tangram.errors import IntegrityError
from tangram.kernels.interface import AttentionRule
from tangram.kernels.narrow import as_entries, as_numbers
from tangram.plan.form import WorkPlan
from tangram.plan.records import RangeKind

Indices = Tensor | npt.NDArray[np.integer]
Part = tuple[Tensor, Tensor]  # (out, log-sum-exp), float32


def blocks(pool: Tensor) -> Tensor:
    """The pool as virtual blocks [N_pages * Hp, S, P, D], without a copy."""
    return pool.view(-1, *pool.shape[2:])


def gather(
    pool: Tensor, tables: Tensor, table: int, column: int, begin: int, end: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [end - begin, D] of one head's entries [begin, end).

    Only the pages that hold them are read. Latents are both.
    """
    heads_per_page, page_tokens, head_dim = pool.shape[1], pool.shape[3], pool.shape[4]
    first, last = begin // page_tokens, -(-end // page_tokens)
    block = tables[table + first : table + max(first, last)].long() * heads_per_page + column
    inside = slice(begin - first * page_tokens, end - first * page_tokens)
    held = [
        as_numbers(blocks(pool)[block, vector].view(-1, head_dim)[inside])
        for vector in range(pool.shape[2])
    ]
    return held[0], held[-1]


def first_keys(
    pool: Tensor, tables: Tensor, table_off: Indices, column: Indices, count: int
) -> Tensor:
    """[H, count, D]: the first `count` keys of heads at addresses [H]."""
    offset, col = (
        torch.as_tensor(x, device=pool.device).long()[:, None] for x in (table_off, column)
    )
    pages = torch.arange(-(-count // pool.shape[3]), device=pool.device)
    block = tables[offset + pages].long() * pool.shape[1] + col
    return as_numbers(blocks(pool)[block, 0].flatten(1, 2)[:, :count])


def softmax_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scaling: float, softcap: float | None
) -> Part:
    """Attention of q [..., n, D] over k [..., m, D], v [..., m, V] as a mergeable part.

    Returns out [..., n, V] and log-sum-exp [..., n]. `bias` [n, m] is added to the scores (-inf
    hides an entry). Where nothing is visible, out is 0 and the log-sum-exp -inf.
    """
    scores = q.float() @ k.float().transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    lse = (
        torch.logsumexp(scores, -1)
        if k.shape[-2]
        else scores.new_full(scores.shape[:-1], -torch.inf)
    )
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return weights @ v.float(), lse


def merge_parts(parts: Sequence[Part]) -> Part:
    """Merge parts (out [..., D], log-sum-exp [...]) of the same queries by online softmax.

    They are merged in order. EMPTY parts (log-sum-exp −inf) have weight 0, also when all parts are
    empty.
    """
    lse = torch.stack([part[1] for part in parts])
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(total.isinf(), 0.0, total))
    return (weights[..., None] * torch.stack([part[0] for part in parts])).sum(0), total


def apply_sinks(part: Part, sinks: Tensor | None) -> Tensor:
    """The output [..., D] of a part.

    `sinks`, shaped like the log-sum-exp, are extra logits that carry no value (GPT-OSS).
    """
    out, lse = part
    return out if sinks is None else out * torch.sigmoid(lse - sinks.float())[..., None]


def decode(
    q: Tensor,
    pool: Tensor,
    tables: Tensor,
    lengths: Tensor,
    plan: WorkPlan,
    layer: int,
    rule: AttentionRule,
    *,
    counts: Indices | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Execute one layer of a work plan: q [T, Q, D] → [T, Q, V] in q's dtype.

    Values have `value_dim` V elements; None means D. `counts` are the tokens of each row, end to
    end; None means one. `lengths` already count the tokens just appended. A token attends to the
    entries up to its own; the plan knows the windows. A softcap c bounds scores to c · tanh(s / c);
    sinks [Q] add one logit per query head to the softmax denominator.
    """
    queries = q.reshape(len(q), plan.kv_heads, -1, q.shape[-1])
    out = q.new_zeros((*queries.shape[:3], q.shape[-1] if value_dim is None else value_dim))
    sink = None if rule.sinks is None else rule.sinks.reshape(plan.kv_heads, -1)
    rows = _rows(np.ones(len(q), np.int64) if counts is None else np.asarray(counts))
    final, parts = _run_tasks(
        queries, pool, tables, lengths, plan, layer, rule, rows, out.shape[-1]
    )
    for row, head, first_slot, end_slot in plan.segments[plan.merges(layer)].tolist():
        final[row, head] = merge_parts([parts[slot] for slot in range(first_slot, end_slot)])
    for (row, head), part in final.items():
        found = apply_sinks(part, None if sink is None else sink[head]).to(q.dtype)
        out[rows[row], head] = found
    return out.flatten(1, 2)


def _rows(counts: npt.NDArray[np.integer]) -> list[slice]:
    """The tokens of each row."""
    ends = np.cumsum(counts).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def _run_tasks(
    queries: Tensor,
    pool: Tensor,
    tables: Tensor,
    lengths: Tensor,
    plan: WorkPlan,
    layer: int,
    rule: AttentionRule,
    rows: Sequence[slice],
    value_dim: int,
) -> tuple[dict[tuple[int, int], Part], dict[int, Part]]:
    """Run a layer's tasks on queries [T, H, G, D]; row r has the tokens `rows[r]`.

    Returns whole results by (row, head), and partial results by slot.
    """
    final: dict[tuple[int, int], Part] = {}
    parts: dict[int, Part] = {}
    host, inside = lengths.cpu().numpy(), plan.of_layer(layer)
    spans = (bounds.tolist() for bounds in plan.spans(host, inside))
    for task, begin, end in zip(plan.tasks[inside], *spans, strict=True):
        served = plan.entries[task["row_begin"] : task["row_end"]].tolist()
        head, length = int(task["head"]), int(host[task["length_index"]])
        window = int(task["a"]) if task["kind"] == RangeKind.WINDOW else None
        drafts = 0
        if len(served) == 1:
            tokens = rows[served[0][0]]
            drafts = tokens.stop - tokens.start - 1
            end = min(end, length)  # refused drafts may have made it shorter than it was
        begin = begin if window is None else max(begin - drafts, 0)
        place = int(task["table"]), int(task["column"])
        keys, values = gather(pool, tables, *place, begin, max(begin, end))
        bias = None
        if drafts:
            bias = _visible(begin, max(begin, end), length, drafts, window)
            bias = bias.to(queries.device).repeat_interleave(queries.shape[2], 0)
        for row, direct, slot, _ in served:
            asked = queries[rows[row], head].flatten(0, 1)
            found = softmax_part(
                asked, keys, values[:, :value_dim], bias, rule.scaling, rule.softcap
            )
            group = queries.shape[2]
            part = found[0].view(-1, group, value_dim), found[1].view(-1, group)
            if direct:
                final[row, head] = part
            else:
                parts[slot] = part
    return final, parts


def _visible(begin: int, end: int, length: int, drafts: int, window: int | None) -> Tensor:
    """[drafts + 1, end - begin]: 0 for entries that a token sees, else −∞.

    The tokens are the last of `length` entries; each sees those up to its own, or the newest
    `window` of them.
    """
    entries, last = torch.arange(begin, end), torch.arange(length - drafts, length + 1)[:, None]
    seen = entries < last
    if window is not None:
        seen &= entries >= last - window
    return torch.where(seen, 0.0, -torch.inf)


def append(
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    tables: Tensor,
    lengths: Tensor,
    table_off: Indices,
    column: Indices,
    length_index: Indices,
    counts: Indices | None = None,
) -> None:
    """Write the new entries of each (row, head), the last one at index length − 1 of its head.

    k, v are [T, H, D], addresses [R, H]. `counts` [R] are the tokens of each row, end to end; None
    means one.
    """
    offset, col, index = (
        torch.as_tensor(x, device=pool.device).long() for x in (table_off, column, length_index)
    )
    last = lengths[index].long() - 1
    if counts is not None:
        each = torch.as_tensor(counts, device=pool.device).long()
        row = torch.repeat_interleave(torch.arange(len(each), device=pool.device), each)
        behind = each.cumsum(0)[row] - 1 - torch.arange(len(row), device=pool.device)
        offset, col, last = offset[row], col[row], last[row] - behind[:, None]
    _write(k, v, pool, tables, offset, col, last)


def store(
    k: Tensor | Sequence[Tensor],
    v: Tensor | Sequence[Tensor],
    pool: Tensor,
    tables: Tensor,
    table_off: Indices,
    column: Indices,
    first_index: Indices,
) -> None:
    """Write n_h entries of each head h from index first_index[h] on; addresses are [H].

    k, v: [H, n, D], or H tensors [n_h, D] where heads differ in count (sealing).
    """
    counts = torch.tensor([len(keys) for keys in k], device=pool.device)
    offset, col, first = (
        torch.as_tensor(x, device=pool.device).long() for x in (table_off, column, first_index)
    )
    head = torch.repeat_interleave(torch.arange(len(counts), device=pool.device), counts)
    step = torch.arange(len(head), device=pool.device) - (counts.cumsum(0) - counts)[head]
    keys, values = (
        x.flatten(0, 1) if isinstance(x, Tensor) else torch.cat(list(x)) for x in (k, v)
    )
    _write(keys, values, pool, tables, offset[head], col[head], first[head] + step)


def _write(
    k: Tensor, v: Tensor, pool: Tensor, tables: Tensor, table: Tensor, column: Tensor, index: Tensor
) -> None:
    """Scatter entries k, v [..., D] to `index` [...] of the heads at (table, column) [...]."""
    heads_per_page, page_tokens = pool.shape[1], pool.shape[3]
    block = tables[table + index // page_tokens].long() * heads_per_page + column
    for vector, entries in enumerate((k, v)[: pool.shape[2]]):  # latents are keys and values
        blocks(pool)[block, vector, index % page_tokens] = as_entries(entries, pool.dtype)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    tables: Tensor,
    pasts: tuple[Indices, Indices, Indices],
    rule: AttentionRule,
    *,
    past_tokens: int,
) -> Tensor:
    """Attention of n new tokens: q [n, Q, D], k, v [m, H, D] → [n, Q, D] in q's dtype.

    k and v are not yet in the pool. The queries belong to the last n of the m ≥ n new tokens.
    `pasts` locate each head's past entries: table offsets, columns and lengths, each [H].
    `past_tokens` is the position of the first of the m. Past entries of a full layer are all
    visible (compression keeps a subset of earlier positions). In a window layer entry i holds
    position i. The query at position p sees positions (p - W, p], and pages that the first query no
    longer sees are not read. The result depends on this request alone. Raises `IntegrityError` if
    the past lengths of a
    window layer differ from `past_tokens`.
    """
    heads = k.shape[1]
    queries = q.reshape(len(q), heads, -1, q.shape[-1]).permute(1, 2, 0, 3)  # [H, G, n, D]
    address = [np.asarray(x).tolist() for x in pasts]
    window, sinks = rule.window, rule.sinks
    if window is not None:
        refuse_other_pasts(address[2], past_tokens)
    begin = 0 if window is None else max(0, past_tokens - window + 1)
    lead = len(k) - len(q)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    slides = window is not None and window < past_tokens - begin + len(k)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    by_head = out.view(queries.shape[2], heads, *queries.shape[1::2]).permute(1, 2, 0, 3)
    for head, (table, col, length) in enumerate(zip(*address, strict=True)):
        past_k, past_v = (x.to(q.dtype) for x in gather(pool, tables, table, col, begin, length))
        if lead or slides:
            past_k, past_v = (
                torch.cat([past_k, keys[head, :lead]]),
                torch.cat([past_v, values[head, :lead]]),
            )
        past, new = (past_k, past_v), (keys[head, lead:], values[head, lead:])
        attend = _attend_window if slides else _attend_all
        part = attend(queries[head], past, new, rule)
        by_head[head] = apply_sinks(part, None if sinks is None else sinks.view(heads, -1, 1)[head])
    return out


def refuse_other_pasts(past_lengths: Sequence[int], past_tokens: int) -> None:
    """Raise `IntegrityError` unless all heads of a window layer hold all past tokens."""
    if set(past_lengths) != {past_tokens}:
        raise IntegrityError(
            f"past_lengths of a window layer are {past_lengths}, all must be past_tokens, "
            f"{past_tokens}"
        )


def merge_two(first: Part, last: Part) -> Part:
    """`merge_parts` of two parts that are not EMPTY, in one pass."""
    weight = torch.sigmoid(first[1] - last[1])[..., None]
    return torch.lerp(last[0], first[0], weight), torch.logaddexp(first[1], last[1])


def _attend_all(
    q: Tensor, past: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], rule: AttentionRule
) -> Part:
    """Attention of q [G, n, D] over all past [m, D] and, causally, own [n, D] entries."""
    part = _part(q, *new, None, rule, causal=True)
    return merge_two(_part(q, *past, None, rule), part) if len(past[0]) else part


def _attend_window(
    q: Tensor, past: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], rule: AttentionRule
) -> Part:
    """Attention of q [G, n, D] over the newest past [m, D] and own [n, D] entries of its window."""
    n, m = q.shape[1], len(past[0])
    distance = torch.arange(n, device=q.device)[:, None] + m - torch.arange(m + n, device=q.device)
    bias = torch.where((distance >= 0) & (distance < (rule.window or 0)), 0.0, -torch.inf)
    keys, values = (torch.cat(pair) for pair in zip(past, new, strict=True))
    return _part(q, keys, values, bias, rule)


def _part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    rule: AttentionRule,
    *,
    causal: bool = False,
) -> Part:
    """`softmax_part` of q [G, n, D] over k, v [m, D].

    Uses torch's flash kernel where possible (CPU, no softcap).
    """
    if q.device.type == "cpu" and rule.softcap is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = None if bias is None else bias.to(q.dtype)
        shared = (len(q), *k.shape)  # the query heads of a group read the same block: no copy
        out, lse = flash(
            q[None],
            k.expand(shared)[None],
            v.expand(shared)[None],
            0.0,
            causal,
            attn_mask=mask,
            scale=rule.scaling,
        )
        return out[0].float(), lse[0].float()
    if causal:
        bias = torch.full((q.shape[1], k.shape[0]), -torch.inf, device=q.device).triu(1)
    return softmax_part(q, k, v, bias, rule.scaling, rule.softcap)
