"""The NumPy back end and the meaning of every option: exact attention, forward and backward.

    s = softmax_scale * q k^T;  s = softcap * tanh(s / softcap);  s = -inf where masked
    lse = log sum_j exp(s);     o = exp(s - lse) v

Key blocks are walked once. For each, every query tile that can see it updates a running maximum,
a running sum of exponentials and an unnormalised output (the online softmax), so nothing of size
Sq x Sk is ever held: memory is O(S). The query heads that share a key head are stacked as rows
of one matrix, row = i * group + g, so each tile is one BLAS product and K, V are never repeated.

Arrays are canonical views with any strides: q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv),
o (B,Sq,H,Dv), lse (B,H,Sq). float16, bfloat16 and float32 are computed in float32, float64 in
float64; results are rounded once, when they are written.

A pair (i, j) that is masked never contributes, whatever its memory holds: tiles that need a mask
take care of non-finite numbers, since 0 * NaN is NaN. Visible ones propagate as IEEE says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .problem import Problem

Array = NDArray[Any]
Lengths = Any  # a (B,) integer array, or None
Chunk = tuple[slice, slice, int, int]

# Tile sizes are fixed: a row's result may not depend on its batch mates, down to the bit.
BLOCK_ROWS = 256  # rows of a tile: queries times query heads per key head
BLOCK_KEYS = 512
BUDGET = 1 << 19  # numbers worked on at once; many small heads share one Python iteration


def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array | None,
    seqlens_q: Lengths = None,
    seqlens_k: Lengths = None,
) -> None:
    """Write o = softmax(mask(scale q k^T)) v, and lse unless it is None.

    A row without a visible key, or whose visible logits are all -inf, gets o = 0 and lse = -inf.
    A visible logit of +inf makes its row of o NaN and its lse +inf.
    """
    work = _work_type(problem)
    with np.errstate(all="ignore"):
        for batch, heads, sq, sk in _chunks(problem, seqlens_q, seqlens_k):
            q_heads = _query_heads(problem, heads)
            query = _stack(q[batch, :sq, q_heads], problem.group, work)
            rows = query.shape[:3]
            top = np.full(rows, -np.inf, work)  # running maximum
            total = np.zeros(rows, work)  # running sum of exp(s - top)
            acc = np.zeros((*rows, problem.head_dim_v), work)
            for j0 in range(0, sk, BLOCK_KEYS):
                j1 = min(j0 + BLOCK_KEYS, sk)
                tiles = list(_tiles(problem, sq, sk, j0, j1))
                if not tiles:
                    continue
                key = _stack(k[batch, j0:j1, heads], 1, work)
                value = _stack(v[batch, j0:j1, heads], 1, work)
                for r, c, keep in tiles:
                    s, _ = _scores(problem, query[..., r, :], key[..., c, :])
                    if keep is not None:
                        np.copyto(s, -np.inf, where=~keep)
                    new_top = np.maximum(top[..., r], s.max(axis=-1))
                    # While a row has seen only -inf, any finite base gives exp(-inf) = 0.
                    base = np.where(new_top == -np.inf, work.type(0), new_top)
                    s -= base[..., None]
                    p = np.exp(s, out=s)
                    alpha = np.exp(top[..., r] - base)
                    total[..., r] = total[..., r] * alpha + p.sum(axis=-1)
                    acc[..., r, :] *= alpha[..., None]
                    acc[..., r, :] += _product(p, value[..., c, :], keep)
                    top[..., r] = new_top
            # total is 0 exactly when no finite logit was visible.
            acc /= total[..., None]
            np.copyto(acc, 0, where=(total == 0)[..., None])
            o[batch, :sq, q_heads] = _unstack(acc, problem.group)
            o[batch, sq:, q_heads] = 0
            if lse is not None:
                log_sum = np.where(np.isinf(top), top, top + np.log(total))
                lse[batch, q_heads, :sq] = _unstack_rows(log_sum, problem.group)
                lse[batch, q_heads, sq:] = -np.inf


def backward(
    problem: Problem,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    dlse: Array | None = None,
    seqlens_q: Lengths = None,
    seqlens_k: Lengths = None,
) -> None:
    """Write dq, dk, dv for the loss gradients do (like o) and dlse (like lse, or None).

        P = exp(s - lse);  dP = do v^T;  delta = rowsum(do * o) - dlse;  dS = P * (dP - delta)
        dS *= 1 - tanh(s / softcap)^2;  dq = scale dS k;  dk = scale dS^T q;  dv = P^T do

    Rows with lse = -inf contribute nothing; dk and dv are summed over the heads of a group.
    """
    work, group = _work_type(problem), problem.group
    with np.errstate(all="ignore"):
        for batch, heads, sq, sk in _chunks(problem, seqlens_q, seqlens_k):
            q_heads = _query_heads(problem, heads)
            query = _stack(q[batch, :sq, q_heads], group, work)
            grad = _stack(do[batch, :sq, q_heads], group, work)
            delta = (grad * _stack(o[batch, :sq, q_heads], group, work)).sum(axis=-1)
            if dlse is not None:
                delta -= _stack_rows(dlse[batch, q_heads, :sq], group, work)
            log_sum = _stack_rows(lse[batch, q_heads, :sq], group, work)
            alive = log_sum != -np.inf
            acc_q = np.zeros_like(query)
            for j0 in range(0, sk, BLOCK_KEYS):
                j1 = min(j0 + BLOCK_KEYS, sk)
                tiles = list(_tiles(problem, sq, sk, j0, j1))
                if not tiles:
                    dk[batch, j0:j1, heads] = 0
                    dv[batch, j0:j1, heads] = 0
                    continue
                key = _stack(k[batch, j0:j1, heads], 1, work)
                value = _stack(v[batch, j0:j1, heads], 1, work)
                acc_k, acc_v = np.zeros_like(key), np.zeros_like(value)
                for r, c, mask in tiles:
                    p, slope = _scores(problem, query[..., r, :], key[..., c, :])
                    keep = _and_alive(mask, alive[..., r], p.shape)
                    p -= log_sum[..., r, None]
                    np.exp(p, out=p)
                    ds = grad[..., r, :] @ value[..., c, :].swapaxes(-1, -2)
                    ds -= delta[..., r, None]
                    ds *= p
                    if slope is not None:
                        ds *= slope
                    keep_t = None
                    if keep is not None:
                        np.copyto(p, 0, where=~keep)
                        np.copyto(ds, 0, where=~keep)
                        keep_t = keep.swapaxes(-1, -2)
                    acc_v[..., c, :] += _product(p.swapaxes(-1, -2), grad[..., r, :], keep_t)
                    acc_k[..., c, :] += _product(ds.swapaxes(-1, -2), query[..., r, :], keep_t)
                    acc_q[..., r, :] += _product(ds, key[..., c, :], keep)
                acc_k *= problem.softmax_scale
                dk[batch, j0:j1, heads] = _unstack(acc_k, 1)
                dv[batch, j0:j1, heads] = _unstack(acc_v, 1)
            acc_q *= problem.softmax_scale
            dq[batch, :sq, q_heads] = _unstack(acc_q, group)
            dq[batch, sq:, q_heads] = 0
            dk[batch, sk:, heads] = 0
            dv[batch, sk:, heads] = 0


def _work_type(problem: Problem) -> np.dtype[Any]:
    return np.dtype(np.float64 if problem.dtype == "float64" else np.float32)


def _chunks(problem: Problem, seqlens_q: Lengths, seqlens_k: Lengths) -> Iterator[Chunk]:
    """Yield (batch entries, key heads, Sq, Sk) covering the problem, each about BUDGET of work.

    With lengths each batch entry is a problem of its own; without, entries and heads that fit
    the budget together are worked on together.
    """
    ragged = seqlens_q is not None or seqlens_k is not None
    lens_q = [problem.seqlen_q] * problem.batch if seqlens_q is None else seqlens_q
    lens_k = [problem.seqlen_k] * problem.batch if seqlens_k is None else seqlens_k
    heads = problem.num_heads_kv
    b0 = 0
    while b0 < problem.batch:
        sq, sk = int(lens_q[b0]), int(lens_k[b0])
        rows, keys = sq * problem.group, min(BLOCK_KEYS, sk)
        dims = problem.head_dim + problem.head_dim_v
        fit = max(1, BUDGET // max(1, min(BLOCK_ROWS, rows) * keys + (rows + keys) * dims))
        b1 = b0 + 1 if ragged else min(problem.batch, b0 + max(1, fit // max(heads, 1)))
        for h0 in range(0, heads, fit):
            yield slice(b0, b1), slice(h0, min(h0 + fit, heads)), sq, sk
        b0 = b1


def _query_heads(problem: Problem, heads: slice) -> slice:
    """The query heads that read these key heads."""
    return slice(heads.start * problem.group, heads.stop * problem.group)


def _stack(x: Array, group: int, work: np.dtype[Any]) -> Array:
    """Copy (b, S, h*group, D) to a compact (b, h, S*group, D) in the working type."""
    b, s, h, d = x.shape
    out = np.empty((b, h // group, s, group, d), work)
    np.copyto(out, x.reshape(b, s, h // group, group, d).swapaxes(1, 2))
    return out.reshape(b, h // group, s * group, d)


def _stack_rows(x: Array, group: int, work: np.dtype[Any]) -> Array:
    """Copy (b, h*group, S) to a compact (b, h, S*group)."""
    return _stack(x.swapaxes(1, 2)[..., None], group, work)[..., 0]


def _unstack(x: Array, group: int) -> Array:
    """Undo `_stack`: (b, h, S*group, D) to (b, S, h*group, D)."""
    b, h, rows, d = x.shape
    s = rows // group
    return np.asarray(x.reshape(b, h, s, group, d).swapaxes(1, 2).reshape(b, s, h * group, d))


def _unstack_rows(x: Array, group: int) -> Array:
    """Undo `_stack_rows`: (b, h, S*group) to (b, h*group, S)."""
    return np.asarray(_unstack(x[..., None], group)[..., 0].swapaxes(1, 2))


def _tiles(
    problem: Problem, sq: int, sk: int, j0: int, j1: int
) -> Iterator[tuple[slice, slice, Array | None]]:
    """Yield (rows, keys of this block, keep) for the query tiles that see keys j0..j1-1.

    Key j is visible to query i iff i + shift - left <= j <= i + shift + right. keep is a
    (rows, keys) mask, or None where every pair of the tile is visible.
    """
    shift = problem.shift(sq, sk)
    # An unbounded side reaches over everything.
    left = sq + sk if problem.window_left is None else problem.window_left
    right = sq + sk if problem.window_right is None else problem.window_right
    step = max(1, BLOCK_ROWS // max(problem.group, 1))
    first, last = max(0, j0 - shift - right), min(sq, j1 - shift + left)
    for i0 in range(first, last, step):
        i1 = min(i0 + step, last)
        a, b = max(j0, i0 + shift - left), min(j1, i1 + shift + right)
        if a >= b:
            continue
        keep = None
        if a < i1 - 1 + shift - left or b - 1 > i0 + shift + right:
            i = np.arange(i0, i1).repeat(problem.group)[:, None] + shift
            j = np.arange(a, b)
            keep = (j >= i - left) & (j <= i + right)
        yield slice(i0 * problem.group, i1 * problem.group), slice(a - j0, b - j0), keep


def _scores(problem: Problem, q: Array, k: Array) -> tuple[Array, Array | None]:
    """Unmasked logits s of a tile, and ds/d(scale q.k) of the softcap (None without one)."""
    s = q @ k.swapaxes(-1, -2)
    s *= problem.softmax_scale
    if problem.softcap == 0:
        return s, None
    s /= problem.softcap
    np.tanh(s, out=s)
    slope = 1 - s * s
    s *= problem.softcap
    return s, slope


def _and_alive(mask: Array | None, alive: Array, shape: tuple[int, ...]) -> Array | None:
    """Drop the rows without a visible key from a tile's mask."""
    if alive.all():
        return mask
    live = np.broadcast_to(alive[..., None], shape)
    return live if mask is None else live & mask


def _product(a: Array, x: Array, keep: Array | None) -> Array:
    """a @ x over the kept pairs only: a (..., M, T) is 0 where keep (..., M, T) is False.

    The finite part is one matrix product; the rare non-finite entries of x (..., T, C) are added
    pair by pair, because the product would multiply them by the zeros of a.
    """
    if keep is None:
        return np.asarray(a @ x)
    finite = np.isfinite(x)
    if finite.all():
        return np.asarray(a @ x)
    out = np.asarray(a @ np.where(finite, x, x.dtype.type(0)))
    for t in np.flatnonzero(~finite.all(axis=(0, 1, 3))):
        pairs = keep[..., t, None] & ~finite[..., t, None, :]
        out += np.where(pairs, a[..., t, None] * x[..., t, None, :], x.dtype.type(0))
    return out
