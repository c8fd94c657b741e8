"""The formulas, dense and plain: what tests and scripts hold every back end to.

Two implementations in one, independent of `reference` and both O(Sq * Sk) in memory: `reference64`
is the truth, `plain_attention` what a framework's unfused code does in the input's own precision.

Arrays are q, do (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv), lse (B,H,Sq), as NumPy arrays of
float16, bfloat16 (ml_dtypes), float32 or float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .problem import Options

Array = NDArray[Any]


def reference64(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Dense o and lse from the formulas, in float64 (extended precision for float64 inputs).

    Options: causal, window, softmax_scale, softcap, seqlens_q, seqlens_k of `flash_attention`.
    """
    o, lse = _dense(q, k, v, False, **options)
    return o, lse


def reference64_backward(
    do: Array, q: Array, k: Array, v: Array, **options: Any
) -> tuple[Array, Array, Array]:
    """Dense dq, dk, dv like `reference64`; one more option, dlse."""
    dq, dk, dv = _dense(q, k, v, False, do, **options)
    return dq, dk, dv


def plain_attention(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """o (in q's dtype) and lse the way unfused code of a framework computes them in q's dtype.

    Every operation rounds its result to q's dtype: the product q k^T (accumulated in float32),
    the scaling, each step of the softcap, the softmax (float32 inside) and the product P v.
    lse stays in the accumulation type.
    """
    o, lse = _dense(q, k, v, True, **options)
    return o.astype(q.dtype), lse


def plain_attention_backward(
    do: Array, q: Array, k: Array, v: Array, **options: Any
) -> tuple[Array, Array, Array]:
    """dq, dk, dv in q's dtype as a framework's autograd of `plain_attention` gets them."""
    dq, dk, dv = _dense(q, k, v, True, do, **options)
    return dq.astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)


@np.errstate(all="ignore")
def _dense(
    q: Array, k: Array, v: Array, low: bool, do: Any = None, dlse: Any = None, **options: Any
) -> tuple[Array, ...]:
    """(o, lse), or (dq, dk, dv) where do is given; low rounds every step to q's dtype."""
    seqlens_q, seqlens_k = options.pop("seqlens_q", None), options.pop("seqlens_k", None)
    opt = Options.make(**options)
    types: tuple[Any, ...] = (np.float32, np.float64, np.longdouble)
    wide = types[(not low) + (q.dtype == np.float64)]
    scale = 1 / math.sqrt(q.shape[3]) if opt.softmax_scale is None else opt.softmax_scale

    def rnd(x: Array) -> Array:
        return x.astype(q.dtype).astype(wide) if low else x

    dq, dk, dv = (np.zeros(x.shape, wide) for x in (q, k, v))
    o = np.zeros((*q.shape[:3], v.shape[3]), wide)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf, wide)
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        n = q.shape[1] if seqlens_q is None else int(seqlens_q[b])
        m = k.shape[1] if seqlens_k is None else int(seqlens_k[b])
        kh = (b, slice(m), h // (q.shape[2] // k.shape[2]))
        q1, k1, v1 = (x.astype(wide) for x in (q[b, :n, h], k[kh], v[kh]))
        s, slope = rnd(rnd(q1 @ k1.T) * wide(scale)), np.ones((n, m), wide)
        if opt.softcap > 0:
            t = rnd(np.tanh(rnd(s / wide(opt.softcap))))
            s, slope = rnd(t * wide(opt.softcap)), 1 - t * t
        i = np.arange(n)[:, None] + (m - n if opt.align == "bottom_right" else 0)
        j, keep = np.arange(m), np.ones((n, m), bool)
        if opt.window_left is not None:
            keep &= j >= i - opt.window_left
        if opt.window_right is not None:
            keep &= j <= i + opt.window_right
        top = np.where(keep, s, -np.inf).max(axis=1, initial=-np.inf)
        keep &= top[:, None] > -np.inf
        e = np.where(keep, np.exp(s - np.where(top == -np.inf, 0, top)[:, None]), 0)
        total = e.sum(axis=1)
        lse[b, h, :n] = np.where(np.isinf(top), top, top + np.log(total))
        if do is None:
            p = rnd(np.where(keep, e / total[:, None], 0))
            o[b, :n, h] = rnd(_kept(p, v1, keep))
        else:
            p = rnd(np.where(keep, np.exp(s - lse[b, h, :n, None]), 0))
            do1 = do[b, :n, h].astype(wide)
            dp = rnd(np.where(keep, do1 @ v1.T, 0))
            minus_delta = 0 if dlse is None else dlse[b, h, :n].astype(wide)
            minus_delta = minus_delta - (p * dp).sum(axis=1)
            ds = rnd(np.where(keep, p * (dp + minus_delta[:, None]), 0))
            ds = rnd(rnd(ds * slope) * wide(scale))
            dq[b, :n, h] = rnd(_kept(ds, k1, keep))
            dk[kh] += rnd(_kept(ds.T, q1, keep.T))
            dv[kh] += rnd(_kept(p.T, do1, keep.T))
    return (o, lse) if do is None else (dq, dk, dv)


def _kept(a: Array, x: Array, keep: Array) -> Array:
    """a @ x over kept pairs; pair by pair if x holds NaN or Inf, since 0 * NaN is NaN."""
    if np.isfinite(x).all():
        return np.asarray(a @ x)
    return np.asarray(np.where(keep[..., None], a[..., None] * x, 0).sum(axis=1))
