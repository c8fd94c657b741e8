"""What a benchmarked result is checked against: some of its rows, in float64.

All of a 16k case in float64 would keep the host busy for minutes. But a row of o needs no other
query: with all keys it is a small problem of its own. And of the other rows a row of dq, dk or dv
needs only lse and delta = rowsum(do * o), which the GPU computes in float64, chunk by chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from peers import Contestant, Inputs, to_host

from cufa2 import device
from cufa2.dense import plain_attention, reference64
from cufa2.testing import Case, assert_accurate, gradient_noise, to_numpy

SAME = 0.01  # share of the largest value that rounding may cost a peer
CHUNK = 2048  # queries at a time against all keys: 256 MiB of float64 scores at 16k keys

Array = np.ndarray[Any, Any]
Dtype = np.dtype[Any]


@dataclass(frozen=True)
class Truth:
    """Rows of one head of one result, (rows, D): in float64, and from unfused low precision code.

    place: of the result among those that a contestant returns: o, or dq, dk, dv.
    noise: as `assert_accurate` takes it.
    """

    result: str
    place: int
    batch: int
    head: int
    rows: slice
    exact: Array
    plain: Array
    noise: float = 0.0


def truths(case: Case, inputs: Inputs, low: Dtype) -> list[Truth]:
    """Rows at the start, in the middle and at the end of the first and the last head.

    case: with Sq = Sk if causal; windows and softcap are not among the benchmarks.
    inputs: q, k, v, and do for the backward pass, as CuPy arrays (B, S, H, D).
    low: dtype of the unfused code, the inputs' own; or float16 to stand for TF32, whose
        significand is as long.
    """
    find = forward_rows if len(inputs) == 3 else backward_rows
    heads = ((0, 0), (case.batch - 1, case.num_heads - 1))
    return [t for b, h in heads for t in find(case, inputs, b, h, low)]


def checked_rows(length: int, dtype: Dtype) -> list[slice]:
    """16 rows at each of three places; 2 of float64, whose truth has no fast matrix product."""
    count = min(length, 2 if dtype == np.float64 else 16)
    places = sorted({0, (length - count) // 2, length - count})
    return [slice(i, i + count) for i in places]


def forward_rows(case: Case, inputs: Inputs, batch: int, head: int, low: Dtype) -> Iterator[Truth]:
    """Truths of o for one head.

    Under a causal mask rows that end before row `end` are a problem of their own with `end` keys,
    since the mask is aligned to the last key.
    """
    kv = head // (case.num_heads // case.num_heads_kv)
    q, k, v = (
        to_host(x[batch : batch + 1, :, i : i + 1])
        for x, i in zip(inputs, (head, kv, kv), strict=True)
    )
    for rows in checked_rows(case.seqlen_q, q.dtype):
        keys = rows.stop if case.causal else case.seqlen_k
        part = q[:, rows], k[:, :keys], v[:, :keys]
        exact, _ = reference64(*part, **case.options)
        plain, _ = plain_attention(*(x.astype(low) for x in part), **case.options)
        yield Truth("o", 0, batch, head, rows, exact[0, :, 0], plain[0, :, 0])


class Head(NamedTuple):
    """One query head: q, do (Sq, D), its k, v (Sk, D), and lse, delta (Sq,) in float64."""

    q: Array
    k: Array
    v: Array
    do: Array
    lse: Array
    delta: Array
    scale: float
    causal: bool


def backward_rows(
    case: Case, inputs: Inputs, batch: int, head: int, low: Dtype
) -> Iterator[Truth]:
    """Truths of dq for one head, and of dk and dv for its key head."""
    group = case.num_heads // case.num_heads_kv
    kv = head // group
    scale = 1 / math.sqrt(case.head_dim) if case.softmax_scale is None else case.softmax_scale
    heads = []  # those that share the key head
    for h in range(kv * group, (kv + 1) * group):
        q, k, v, do = (
            to_host(x[batch, :, i]) for x, i in zip(inputs, (h, kv, kv, h), strict=True)
        )
        lse, delta = statistics(q, k, v, do, scale, bool(case.causal))
        heads.append(Head(q, k, v, do, lse, delta, scale, bool(case.causal)))
    mine = heads[head - kv * group]
    queries, keys = (checked_rows(n, q.dtype) for n in (case.seqlen_q, case.seqlen_k))
    both: list[tuple[Array, ...]] = []
    for dtype in (None, low):
        dq = query_gradient(mine, positions(queries), dtype)
        pairs = [key_gradients(one, positions(keys), dtype) for one in heads]
        both.append((dq, *(np.sum(grads, axis=0) for grads in zip(*pairs, strict=True))))
    for place, (name, h, blocks) in enumerate(
        (("dq", head, queries), ("dk", kv, keys), ("dv", kv, keys))
    ):
        exact, plain = (np.split(grads[place], len(blocks)) for grads in both)
        for n, rows in enumerate(blocks):
            noise = 0.0
            if name == "dq" and case.causal and rows.start == 0:  # the first query sees one key
                do, q, k, v = (x[: rows.stop] for x in (mine.do, mine.q, mine.k, mine.v))
                noise = gradient_noise(do, q, k, v, scale)
            yield Truth(name, place, batch, h, rows, exact[n], plain[n].astype(low), noise)


def positions(blocks: list[slice]) -> Array:
    """The row numbers of all blocks."""
    return np.concatenate([np.arange(x.start, x.stop) for x in blocks])


def query_gradient(head: Head, rows: Array, low: Dtype | None) -> Array:
    """dq = dS k of some queries, which needs all keys."""
    _, ds, part = derivatives(head, rows, np.arange(len(head.k)), low)
    return rounded(ds @ part.k, low)


def key_gradients(head: Head, keys: Array, low: Dtype | None) -> tuple[Array, Array]:
    """dk = dS^T q and dv = P^T do of some keys, which need all queries."""
    p, ds, part = derivatives(head, np.arange(len(head.q)), keys, low)
    return rounded(ds.T @ part.q, low), rounded(p.T @ part.do, low)


def derivatives(
    head: Head, rows: Array, keys: Array, low: Dtype | None
) -> tuple[Array, Array, Head]:
    """P and scale dS, (rows, keys), and the inputs they were computed from.

        P = exp(scale q k^T - lse);  dS = P * (do v^T - delta)

    low: round the inputs and each step to this dtype; None computes in float64, or in extended
        precision from float64 inputs. lse and delta are not rounded to it, so that the bound
        which unfused code sets is tighter than its own would be.
    """
    types: tuple[Any, ...] = (np.float32, np.float64, np.longdouble)
    wide = types[(low is None) + (head.q.dtype == np.float64)]
    q, k, v, do = (
        rounded(x[at].astype(wide), low)
        for x, at in zip(head[:4], (rows, keys, keys, rows), strict=True)
    )
    lse, delta = (x[rows, None].astype(wide) for x in (head.lse, head.delta))
    s = rounded(rounded(q @ k.T, low) * wide(head.scale), low)
    keep = keys <= rows[:, None] if head.causal else np.True_
    p = rounded(np.where(keep, np.exp(np.where(keep, s - lse, 0)), 0), low)
    ds = rounded(p * (rounded(do @ v.T, low) - delta), low)
    part = head._replace(q=q, k=k, v=v, do=do)
    return p, rounded(ds * wide(head.scale), low), part


def rounded(x: Array, low: Dtype | None) -> Array:
    """x, or if low is given its nearest numbers in that dtype, in the dtype of x."""
    return x if low is None else x.astype(low).astype(x.dtype)


def statistics(
    q: Array, k: Array, v: Array, do: Array, scale: float, causal: bool
) -> tuple[Array, Array]:
    """lse and delta = rowsum(do * o), (S,) in float64, of one head's q, k, v, do (S, D)."""
    xp = multiplier()
    k64, v64 = (xp.asarray(x.astype(np.float64)) for x in (k, v))
    lse, delta = [], []
    for start in range(0, len(q), CHUNK):
        rows = slice(start, min(start + CHUNK, len(q)))
        seen = rows.stop if causal else len(k)
        q64, do64 = (xp.asarray(x[rows].astype(np.float64)) for x in (q, do))
        s = q64 @ k64[:seen].T
        s *= scale
        if causal:
            s = xp.where(xp.arange(rows.start, rows.stop)[:, None] < xp.arange(seen), -np.inf, s)
        top = s.max(axis=1)
        s -= top[:, None]
        xp.exp(s, out=s)
        total = s.sum(axis=1)
        lse.append(to_numpy(top + xp.log(total)))
        delta.append(to_numpy((do64 * (s @ v64[:seen])).sum(axis=1) / total))
    return np.concatenate(lse), np.concatenate(delta)


@functools.cache
def multiplier() -> Any:
    """CuPy if it can multiply matrices here, which takes cuBLAS; else NumPy: the same, slower."""
    cupy = device.cupy()
    try:
        one = cupy.ones((1, 1))
        (one @ one).get()
    except (ImportError, OSError, RuntimeError) as e:
        print(f"note: checks of gradients run on the CPU, since CuPy has no cuBLAS ({e})")
        return np
    return cupy


def plain_error(expected: list[Truth]) -> float:
    """Largest error of the unfused code on the host, where it is finite."""
    errors = (np.abs(t.plain.astype(t.exact.dtype) - t.exact) for t in expected)
    return max(float(x[np.isfinite(x)].max(initial=0)) for x in errors)


def check(
    expected: list[Truth], who: Contestant, output: Any, strict: bool
) -> tuple[float, list[str]]:
    """Largest error of a contestant's results, and where they break the accuracy rule.

    AssertionError: they break it although `strict`, or are so far off that they are not the same
    results.
    """
    results = output if isinstance(output, tuple) else (output,)
    errors, complaints = [], []
    for t in expected:
        rows = who.rows(results[t.place], t.batch, t.head)[t.rows]
        name = f"{who.name}, {t.result}, head {t.head} of batch {t.batch}, rows {t.rows.start}.."
        errors.append(float(np.abs(rows.astype(t.exact.dtype) - t.exact).max()))
        try:
            assert_accurate(rows, t.exact, t.plain, name, t.noise)
        except AssertionError as e:
            if strict or not errors[-1] <= SAME * np.abs(t.exact).max():
                raise
            complaints.append(str(e))
    return max(errors), complaints
