"""The NumPy back end against a naive float64 loop, finite differences, laws and known failures.

Everything else is judged by `cufa2.reference` and `cufa2.testing`, so this file judges both of
them by a loop over single pairs (i, j) in Python floats.
"""

from __future__ import annotations

import itertools
import math
import sys
import tracemalloc
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cufa2 import reference, testing
from cufa2.dense import (
    plain_attention,
    plain_attention_backward,
    reference64,
    reference64_backward,
)
from cufa2.problem import Options, make_problem
from cufa2.testing import (
    CASES,
    EPS,
    assert_accurate,
    assert_lse,
    gradient_noise,
    make_inputs,
    poison,
)

DTYPES = ("float16", "bfloat16", "float32", "float64")
CAUSAL = (False, True, "bottom_right", "top_left")
TILES = ((256, 512, 1 << 19), (4, 3, 200), (1, 1, 1), (6, 16, 2000))
NAN = float("nan")


def tiles(rows: int, keys: int, budget: int) -> Any:
    """Shrink the tiles, so that small shapes cross many of their borders."""
    return patch.multiple(reference, BLOCK_ROWS=rows, BLOCK_KEYS=keys, BUDGET=budget)


def problem_of(
    direction: Any,
    q: Any,
    k: Any,
    v: Any,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    **options: Any,
) -> Any:
    def typed(x: Any) -> Any:
        return None if x is None else SimpleNamespace(shape=x.shape, dtype=x.dtype.name)

    arrays = [typed(x) for x in (q, k, v, seqlens_q, seqlens_k)]
    return make_problem(direction, Options.make(**options), *arrays)


def lengths(*values: Any) -> Any:
    return np.array(values, np.int32)


def fwd(
    q: Any, k: Any, v: Any, seqlens_q: Any = None, seqlens_k: Any = None, **options: Any
) -> Any:
    """(o, lse) of the NumPy back end, written over NaN."""
    problem = problem_of("forward", q, k, v, seqlens_q, seqlens_k, **options)
    o = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse_type = np.float64 if q.dtype == np.float64 else np.float32
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), lse_type)
    poison(o, lse)
    reference.forward(problem, q, k, v, o, lse, seqlens_q, seqlens_k)
    return o, lse


def bwd(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dlse: Any = None,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    **options: Any,
) -> Any:
    """(dq, dk, dv) of the NumPy back end, written over NaN."""
    problem = problem_of("backward", q, k, v, seqlens_q, seqlens_k, **options)
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (q, k, v))
    poison(dq, dk, dv)
    reference.backward(problem, do, q, k, v, o, lse, dq, dk, dv, dlse, seqlens_q, seqlens_k)
    return dq, dk, dv


def both(inputs: Any, dlse: Any = None, **options: Any) -> Any:
    """(o, lse, dq, dk, dv)."""
    q, k, v, do = inputs
    o, lse = fwd(q, k, v, **options)
    return o, lse, *bwd(do, q, k, v, o, lse, dlse, **options)


@np.errstate(all="ignore")
def oracle(
    q: Any,
    k: Any,
    v: Any,
    do: Any = None,
    dlse: Any = None,
    *,
    causal: Any = False,
    window: Any = None,
    softmax_scale: Any = None,
    softcap: Any = 0.0,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
) -> Any:
    """(o, lse, dq, dk, dv) pair by pair in Python floats: the formulas and nothing else."""
    (batch, len_q, heads, d), (_, len_k, heads_kv, dv_) = q.shape, v.shape
    scale = 1 / math.sqrt(d) if softmax_scale is None else softmax_scale
    left, right = (math.inf if x in (None, -1) else x for x in window or (None, None))
    right = min(right, 0) if causal else right
    o, lse = np.zeros((batch, len_q, heads, dv_)), np.full((batch, heads, len_q), -np.inf)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    do = np.zeros(o.shape) if do is None else do
    for b, h in itertools.product(range(batch), range(heads)):
        hk = h // (heads // heads_kv)
        sq = len_q if seqlens_q is None else int(seqlens_q[b])
        sk = len_k if seqlens_k is None else int(seqlens_k[b])
        shift = 0 if causal == "top_left" else sk - sq
        for i in range(sq):
            qi, doi = q[b, i, h].tolist(), do[b, i, h].tolist()
            s, slope = {}, {}
            for j in range(sk):
                if i + shift - left <= j <= i + shift + right:
                    s[j] = scale * dot(qi, k[b, j, hk].tolist())
                    slope[j] = 1.0
                    if softcap > 0:
                        t = math.tanh(s[j] / softcap)
                        s[j], slope[j] = softcap * t, 1 - t * t
            total = log_sum_exp(list(s.values()))
            lse[b, h, i] = total
            if total == -math.inf:
                continue
            p = {j: math.exp(x - total) for j, x in s.items()}
            for j, c in itertools.product(p, range(dv_)):
                o[b, i, h, c] += p[j] * float(v[b, j, hk, c])
            delta = dot(doi, o[b, i, h].tolist())
            delta -= 0.0 if dlse is None else float(dlse[b, h, i])
            for j, w in p.items():
                ds = w * (dot(doi, v[b, j, hk].tolist()) - delta) * slope[j]
                for c in range(d):
                    dq[b, i, h, c] += scale * ds * float(k[b, j, hk, c])
                    dk[b, j, hk, c] += scale * ds * qi[c]
                for c in range(dv_):
                    dv[b, j, hk, c] += w * doi[c]
    return o, lse, dq, dk, dv


def dot(a: Any, b: Any) -> Any:
    return sum((x * y for x, y in zip(a, b, strict=True)), 0.0)


def log_sum_exp(s: Any) -> Any:
    if any(math.isnan(x) for x in s):
        return NAN
    top = max(s, default=-math.inf)
    if math.isinf(top):
        return top
    return top + math.log(sum(math.exp(x - top) for x in s))


@st.composite
def problems(draw: Any, max_len: Any = 9) -> Any:
    """A small problem: inputs in float64 and options."""
    group, heads_kv = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    batch = draw(st.integers(1, 3))
    sq, sk = draw(st.integers(1, max_len)), draw(st.integers(1, max_len))
    d, dv = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    bound = st.one_of(st.none(), st.integers(-1, max_len))
    options: dict[str, Any] = {
        "causal": draw(st.sampled_from(CAUSAL)),
        "window": draw(st.one_of(st.none(), st.tuples(bound, bound))),
        "softmax_scale": draw(st.sampled_from((None, 1.5, 0.0, -0.7))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 0.8, 3.0))),
    }
    for name, longest in (("seqlens_q", sq), ("seqlens_k", sk)):
        if draw(st.booleans()):
            options[name] = lengths(*(draw(st.integers(0, longest)) for _ in range(batch)))
    shape = (batch, sq, sk, group * heads_kv, heads_kv, d, dv)
    return make_inputs(shape, "float64", draw(st.integers(0, 1000))), options


def assert_same(actual: Any, expected: Any, what: Any = "", rtol: Any = 1e-11) -> None:
    assert len(actual) == len(expected)
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), actual, expected, strict=False):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol, err_msg=f"{what} {name}")


# The naive loop and finite differences


@settings(deadline=None, max_examples=150)
@given(problems(), st.sampled_from(TILES), st.booleans())
def test_equals_the_naive_loop(problem: Any, sizes: Any, with_dlse: Any) -> None:
    (q, k, v, do), options = problem
    dlse = do[..., 0].swapaxes(1, 2).copy() if with_dlse else None
    with tiles(*sizes):
        assert_same(both((q, k, v, do), dlse, **options), oracle(q, k, v, do, dlse, **options))


@settings(deadline=None, max_examples=150)
@given(problems(6), st.sampled_from(TILES), st.data())
def test_only_visible_nan_and_inf_propagate(problem: Any, sizes: Any, data: Any) -> None:
    inputs, options = problem
    for _ in range(data.draw(st.integers(1, 3))):
        x = inputs[data.draw(st.integers(0, 3), "array")]
        at = tuple(data.draw(st.integers(0, n - 1)) for n in x.shape)
        x[at] = data.draw(st.sampled_from((NAN, np.inf, -np.inf)))
    q, k, v, do = inputs
    with tiles(*sizes):
        assert_same(both(inputs, **options), oracle(q, k, v, do, **options))


@settings(deadline=None, max_examples=60)
@given(problems(), st.booleans())
def test_dense_truth_equals_the_naive_loop(problem: Any, with_dlse: Any) -> None:
    (q, k, v, do), options = problem
    dlse = do[..., 0].swapaxes(1, 2).copy() if with_dlse else None
    o, lse = reference64(q, k, v, **options)
    grads = reference64_backward(do, q, k, v, dlse=dlse, **options)
    expected = oracle(q, k, v, do, dlse, **options)
    assert_same((o, lse, *grads), expected)
    # In float64 the plain implementation rounds where float64 rounds anyway.
    plain = plain_attention(q, k, v, **options)
    plain_grads = plain_attention_backward(do, q, k, v, dlse=dlse, **options)
    assert_same((*plain, *plain_grads), expected)


def finite_differences(
    inputs: Any, dlse: Any, which: Any, step: Any = 1e-5, **options: Any
) -> Any:
    """Central differences of sum(o * do) + sum(lse * dlse) by q, k or v, by the naive loop."""
    q, k, v, do = (x.astype(np.float64) for x in inputs)
    arrays = [q, k, v]

    def loss() -> Any:
        o, lse, *_ = oracle(*arrays, **options)
        return (o * do).sum() + (np.where(np.isinf(lse), 0, lse) * dlse).sum()

    x = arrays[which]
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        kept = x[at]
        x[at] = kept + step
        up = loss()
        x[at] = kept - step
        out[at] = (up - loss()) / (2 * step)
        x[at] = kept
    return out


GRADIENT_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": "top_left", "window": (1, 0)},
    {"window": (1, 1), "softmax_scale": -0.8},
    {"softcap": 1.5},
    {"softcap": 0.9, "causal": True, "seqlens_q": lengths(3, 2), "seqlens_k": lengths(2, 4)},
)


@pytest.mark.parametrize("options", GRADIENT_OPTIONS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 2, 1, 3, 2), (2, 4, 4, 2, 2, 2, 3)])
def test_gradients_are_finite_differences(shape: Any, options: Any) -> None:
    inputs = make_inputs(shape, "float64", 5)
    dlse = np.random.default_rng(6).standard_normal((shape[0], shape[3], shape[1]))
    with tiles(4, 3, 100):
        grads = both(inputs, dlse, **options)[2:]
    for which, grad in enumerate(grads):
        expected = finite_differences(inputs, dlse, which, **options)
        np.testing.assert_allclose(grad, expected, rtol=1e-8, atol=1e-8, err_msg="qkv"[which])


# Accuracy in every dtype, at sizes that cross the real tiles

ACCURACY_SHAPES = (
    (2, 130, 200, 4, 2, 64, 64),
    (1, 300, 600, 2, 1, 40, 72),
    (1, 600, 515, 1, 1, 128, 16),
    (3, 1, 700, 6, 2, 64, 64),
    (2, 33, 7, 3, 3, 5, 1),
)
ACCURACY_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": "top_left"},
    {"window": (40, 9)},
    {"softcap": 2.0, "window": (64, -1), "softmax_scale": 0.3},
)


def assert_all_accurate(inputs: Any, dtype: Any, vanishing: bool = False, **options: Any) -> None:
    """The accuracy rule for o, lse, dq, dk, dv; vanishing if a gradient may be exactly 0."""
    q, k, v, do = inputs
    o, lse, dq, dk, dv = both(inputs, **options)
    ref, ref_lse = reference64(q, k, v, **options)
    assert_accurate(o, ref, plain_attention(q, k, v, **options)[0], f"o {options}")
    assert_lse(lse, ref_lse, dtype)
    scale = options.get("softmax_scale")
    noise = gradient_noise(do, q, k, v, scale) if vanishing else 0.0
    refs = reference64_backward(do, q, k, v, **options)
    plains = plain_attention_backward(do, q, k, v, **options)
    for name, x, y, z in zip(("dq", "dk", "dv"), (dq, dk, dv), refs, plains, strict=True):
        assert_accurate(x, y, z, f"{name} {options}", noise)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ACCURACY_SHAPES)
@pytest.mark.parametrize("options", ACCURACY_OPTIONS)
def test_accuracy(shape: Any, options: Any, dtype: Any) -> None:
    if dtype == "float64":  # extended precision has no BLAS: keep it small
        shape = (1, min(shape[1], 140), *shape[2:])
    # A lone query under a top-left mask sees one key.
    vanishing = shape[1] == 1 and options.get("causal") == "top_left"
    assert_all_accurate(make_inputs(shape, dtype, 1), dtype, vanishing, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_have_their_dtypes(dtype: Any) -> None:
    results = both(make_inputs((1, 5, 6, 2, 1, 8, 4), dtype))
    wide = "float64" if dtype == "float64" else "float32"
    assert [x.dtype.name for x in results] == [dtype, wide, dtype, dtype, dtype]


def test_rounds_once() -> None:
    """16-bit results are the float32 results on the same inputs, rounded."""
    for dtype in ("float16", "bfloat16"):
        inputs = make_inputs((2, 70, 90, 4, 2, 32, 32), dtype, 3)
        q, k, v, do = (x.astype(np.float32) for x in inputs)
        o, lse = fwd(*inputs[:3], causal=True)
        o32, lse32 = fwd(q, k, v, causal=True)
        np.testing.assert_array_equal(o, o32.astype(o.dtype))
        np.testing.assert_array_equal(lse, lse32)
        grads = bwd(inputs[3], *inputs[:3], o, lse, causal=True)
        grads32 = bwd(do, q, k, v, o.astype(np.float32), lse32, causal=True)
        for x, y in zip(grads, grads32, strict=True):
            np.testing.assert_array_equal(x, y.astype(x.dtype))


def test_lse_may_be_left_out() -> None:
    q, k, v, _ = make_inputs((2, 9, 5, 2, 1, 8, 8), "float32")
    o = np.full(q.shape, NAN, np.float32)
    reference.forward(problem_of("forward", q, k, v, causal=True), q, k, v, o, None)
    np.testing.assert_array_equal(o, fwd(q, k, v, causal=True)[0])


# Laws


@settings(deadline=None, max_examples=40)
@given(problems(40), st.sampled_from(TILES[:2]))
def test_key_order_does_not_matter(problem: Any, sizes: Any) -> None:
    (q, k, v, do), options = problem
    options = {n: x for n, x in options.items() if n in ("softmax_scale", "softcap")}
    order = np.random.default_rng(0).permutation(k.shape[1])
    with tiles(*sizes):
        o, lse, dq, dk, dv = both((q, k, v, do), **options)
        expected = (o, lse, dq, dk[:, order], dv[:, order])
        assert_same(both((q, k[:, order], v[:, order], do), **options), expected)


@settings(deadline=None, max_examples=40)
@given(problems(40), st.integers(1, 40), st.sampled_from(("top_left", True)))
def test_a_causal_prefix_stands_alone(problem: Any, n: Any, causal: Any) -> None:
    (q, k, v, _), options = problem
    cap = options["softcap"]
    n = min(n, q.shape[1], k.shape[1])
    if causal is True:  # the same diagonal needs equal lengths
        q, k, v = q[:, : k.shape[1]], k[:, : q.shape[1]], v[:, : q.shape[1]]
    with tiles(4, 3, 200):
        o, lse = fwd(q, k, v, causal=causal, softcap=cap)
        o_n, lse_n = fwd(q[:, :n], k[:, :n], v[:, :n], causal=causal, softcap=cap)
    np.testing.assert_allclose(o[:, :n], o_n, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse[..., :n], lse_n, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(problems(20), st.sampled_from(TILES))
def test_gqa_is_repeated_heads(problem: Any, sizes: Any) -> None:
    (q, k, v, do), options = problem
    group = q.shape[2] // k.shape[2]
    with tiles(*sizes):
        grouped = both((q, k, v, do), **options)
        k2, v2 = k.repeat(group, axis=2), v.repeat(group, axis=2)
        o, lse, dq, dk, dv = both((q, k2, v2, do), **options)

    def summed(x: Any) -> Any:
        b, s, h, d = x.shape
        return x.reshape(b, s, h // group, group, d).sum(axis=3)

    assert_same(grouped, (o, lse, dq, summed(dk), summed(dv)))


def merge(parts: Any) -> Any:
    """Join results over disjoint keys through their lse (B,H,S)."""
    outs, sums = [p[0] for p in parts], [p[1] for p in parts]
    lse = np.logaddexp.reduce(sums)
    with np.errstate(invalid="ignore"):
        weights = [np.where(lse == -np.inf, 0, np.exp(s - lse)) for s in sums]
    wide = [o.astype(np.float64) for o in outs]
    return sum(w.swapaxes(1, 2)[..., None] * o for w, o in zip(weights, wide, strict=True)), lse


@settings(deadline=None, max_examples=40)
@given(problems(20), st.integers(0, 20))
def test_split_keys_merge_by_lse(problem: Any, n: Any) -> None:
    (q, k, v, _), options = problem
    options = {x: y for x, y in options.items() if x in ("softmax_scale", "softcap")}
    parts = [fwd(q, k[:, a], v[:, a], **options) for a in (slice(0, n), slice(n, None))]
    assert_same((*merge(parts),), (*fwd(q, k, v, **options),), rtol=1e-12)


MATES: tuple[Any, ...] = (
    ((5, 70, 70, 4, 2, 64, 64), {"causal": True}),
    ((3, 300, 700, 2, 1, 32, 48), {"softcap": 1.0}),
    ((7, 1, 130, 6, 3, 64, 64), {}),
    ((4, 3, 2, 2, 2, 1, 1), {"causal": True}),
    ((40, 16, 16, 12, 12, 32, 32), {"window": (5, 0)}),
)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("shape", "options"), MATES)
def test_batch_mates_change_no_bit(shape: Any, options: Any, ragged: Any, dtype: Any) -> None:
    inputs, rng = make_inputs(shape, dtype, 2), np.random.default_rng(3)
    lens: dict[str, Any] = {}
    if ragged:
        lens = {
            "seqlens_q": rng.integers(0, shape[1] + 1, shape[0]).astype(np.int32),
            "seqlens_k": rng.integers(0, shape[2] + 1, shape[0]).astype(np.int32),
        }
    together = both(inputs, **options, **lens)
    for b in range(shape[0]):
        one = slice(b, b + 1)
        alone = both([x[one] for x in inputs], **options, **{n: x[one] for n, x in lens.items()})
        for x, y in zip(together, alone, strict=True):
            np.testing.assert_array_equal(x[one], y)


def test_repeats_bit_for_bit() -> None:
    inputs = make_inputs((2, 300, 520, 4, 2, 64, 64), "float32")
    first, second = both(inputs, causal=True), both(inputs, causal=True)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


# Strides


def spread(x: Any) -> Any:
    """Same values, strides that are not compact: a reversed, transposed, padded buffer."""
    buffer = np.full([2 * n + 1 for n in x.shape], NAN, x.dtype).transpose(0, 2, 1, 3)
    buffer = buffer.swapaxes(1, 2)
    view = buffer[1::2, 1::2, 1::2, 1::2][:, ::-1]
    view[...] = x
    return view


def heads_first(x: Any) -> Any:
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "views", list(itertools.product((spread, heads_first, np.copy), repeat=3))
)
def test_every_array_has_its_own_strides(views: Any, dtype: Any) -> None:
    shape, options = (2, 70, 33, 4, 2, 16, 8), {"causal": True}
    q, k, v, do = make_inputs(shape, dtype)
    expected = both((q, k, v, do), **options)
    q2, k2, v2 = (f(x) for f, x in zip(views, (q, k, v), strict=True))
    outs = [spread(np.ones(x.shape, x.dtype)) for x in (q[..., :8], q, k, v)]
    lse = np.full((2, 70, 4), NAN, np.float32).transpose(0, 2, 1)[..., ::-1]
    o, dq, dk, dv = outs
    reference.forward(problem_of("forward", q2, k2, v2, **options), q2, k2, v2, o, lse)
    problem = problem_of("backward", q2, k2, v2, **options)
    reference.backward(problem, views[0](do), q2, k2, v2, o, lse, dq, dk, dv)
    for x, y in zip((o, lse, dq, dk, dv), expected, strict=True):
        np.testing.assert_array_equal(x, y)
    for x in outs:  # what lies between the rows of a view is not touched
        base = x.base
        while base.base is not None:
            base = base.base
        assert np.isnan(base.astype(np.float32)).sum() == base.size - x.size


def test_broadcast_gradient_and_read_only_inputs() -> None:
    q, k, v, _ = make_inputs((2, 20, 30, 2, 1, 8, 8), "float32")
    o, lse = fwd(q, k, v)
    ones = np.broadcast_to(np.float32(1), o.shape)
    kept = [x.copy() for x in (q, k, v, o, lse)]
    for x in (q, k, v, o, lse):
        x.flags.writeable = False
    grads = bwd(ones, q, k, v, o, lse)
    for x, y in zip(grads, bwd(ones.copy(), q, k, v, o, lse), strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip((q, k, v, o, lse), kept, strict=True):
        np.testing.assert_array_equal(x, y)


# Known failures of other libraries


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("sq", "sk"), [(5, 2), (2, 5), (130, 200), (256, 3), (129, 128)])
@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
def test_causal_with_unequal_lengths(sq: Any, sk: Any, causal: Any, dtype: Any) -> None:
    q, k, v, _ = make_inputs((1, sq, sk, 2, 2, 64, 64), dtype)
    inputs = testing.Inputs(q * q.dtype.type(3), k * k.dtype.type(3), v * v.dtype.type(3), v * 0)
    inputs = inputs._replace(do=np.ones_like(q))
    assert_all_accurate(inputs, dtype, min(sq, sk) < 5, causal=causal)
    o, lse, dq, dk, dv = both(inputs, causal=causal)
    blind = max(0, sq - sk) if causal == "bottom_right" else 0
    assert (o[:, :blind] == 0).all()
    assert (lse[..., :blind] == -np.inf).all()
    assert np.isfinite(lse[..., blind:]).all()
    assert (dq[:, :blind] == 0).all()
    if blind:  # those rows add nothing to dk and dv
        rest = [x[:, blind:] for x in (inputs.q, inputs.k, inputs.v, inputs.do)]
        rest[1:3] = inputs.k, inputs.v
        for x, y in zip((dk, dv), both(rest, causal=causal)[3:], strict=True):
            np.testing.assert_allclose(x.astype(float), y.astype(float), atol=8 * EPS[dtype])


@pytest.mark.parametrize("sizes", TILES)
def test_window_bounds_are_inclusive(sizes: Any) -> None:
    q, k, v, do = make_inputs((2, 7, 7, 2, 1, 8, 8), "float32")
    with tiles(*sizes):
        o, lse = fwd(q, k, v, window=(0, 0))
        np.testing.assert_array_equal(o, v.repeat(2, axis=2))
        own = (q * k.repeat(2, axis=2)).sum(axis=-1) / math.sqrt(8)
        np.testing.assert_allclose(lse, own.swapaxes(1, 2), rtol=1e-5, atol=1e-6)
        causal = both((q, k, v, do), causal=True)
        for window in ((6, 0), (7, 0), (-1, 0), (None, 0), (10**9, 0)):
            for x, y in zip(both((q, k, v, do), window=window), causal, strict=True):
                np.testing.assert_array_equal(x, y)
        k2, v2 = k.copy(), v.copy()
        k2[:, 5:], v2[:, 5:] = NAN, -7.0
        for window in ((2, 0), (0, 2), (1, 1)):
            n = 5 - window[1]
            (a, la), (b, lb) = fwd(q, k, v, window=window), fwd(q, k2, v2, window=window)
            np.testing.assert_array_equal(a[:, :n], b[:, :n])
            np.testing.assert_array_equal(la[..., :n], lb[..., :n])
            assert np.isnan(b[:, n:]).all()
    for window in ((0, 0), (2, 0), (0, 2), (1, 1), (-1, 2)):
        assert_all_accurate((q, k, v, do), "float32", window == (0, 0), window=window)


@pytest.mark.parametrize("sizes", TILES)
def test_a_wholly_masked_row_contributes_nothing(sizes: Any) -> None:
    """Rows 6..9 see no key, keys 4.. of a shorter sequence are seen by none; both hold NaN."""
    q, k, v, do = make_inputs((2, 10, 6, 4, 2, 8, 8), "float32")
    options: dict[str, Any] = {"causal": "top_left", "window": (0, 0)}
    lens = {"seqlens_q": lengths(10, 10), "seqlens_k": lengths(6, 4)}
    clean = both((q, k, v, do), **options, **lens)
    for b, n in enumerate((6, 4)):
        assert (clean[0][b, n:] == 0).all()
        assert (clean[1][b, :, n:] == -np.inf).all()
        assert (clean[2][b, n:] == 0).all()
        assert (clean[3][b, n:] == 0).all()
        q[b, n:], do[b, n:], k[b, n:], v[b, n:] = NAN, np.inf, NAN, NAN
    assert all(np.isfinite(x).all() for x in (clean[0], *clean[2:]))
    with tiles(*sizes):
        for x, y in zip(both((q, k, v, do), **options, **lens), clean, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_row_whose_logits_are_all_minus_inf_sees_nothing() -> None:
    q, k, v, do = make_inputs((1, 4, 5, 1, 1, 2, 2), "float32")
    q[...], k[...] = np.abs(q), np.abs(k)
    q[0, 1, 0] = [-np.inf, 1.0]  # every logit of row 1 is -inf
    k[0, 3, 0] = [-np.inf, 1.0]  # logit -inf elsewhere: key 3 gets weight 0; row 1: +inf
    k[0, 3, 0, 0] = 1.0
    v[0, 2, 0, 1] = NAN
    do[0, 1] = NAN
    o, lse, dq, dk, dv = both((q, k, v, do))
    assert (o[0, 1] == 0).all()
    assert lse[0, 0, 1] == -np.inf
    assert (dq[0, 1] == 0).all()
    assert np.isfinite(dv).all()
    assert np.isnan(o[0, [0, 2, 3], 0, 1]).all()
    assert np.isfinite(o[..., 0]).all()
    assert np.isnan(dk).all()  # the NaN in v is visible to the other rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_running_maximum_starts_below_everything(dtype: Any) -> None:
    sq, sk = 130, 200
    q, k, v, do = make_inputs((1, sq, sk, 2, 2, 64, 64), dtype)
    q[...], k[...] = 0, 0
    q[..., 0], k[..., 0] = 1, -1600
    inputs = testing.Inputs(q, k, v, do)
    o, lse, *_ = both(inputs, causal=True)
    count = np.arange(sq) + sk - sq + 1
    np.testing.assert_allclose(lse, np.broadcast_to(-200 + np.log(count), lse.shape), rtol=1e-6)
    mean = v.astype(np.float64).cumsum(axis=1)[:, sk - sq :] / count[:, None, None]
    assert_accurate(o, mean, plain_attention(q, k, v, causal=True)[0], "o")
    q[..., 0], k[..., 0] = 16, -50000
    logit = 2.0 * float(k[0, 0, 0, 0])  # about -1e5: 50000 has no float16 or bfloat16
    o, lse, *_ = both(inputs)
    np.testing.assert_allclose(lse, logit + math.log(sk), rtol=1e-6)
    mean = np.broadcast_to(v.astype(np.float64).mean(axis=1, keepdims=True), o.shape)
    q[..., 0], k[..., 0] = 1, -1600  # the plain product would overflow float16
    assert_accurate(o, mean, plain_attention(q, k, v)[0], "o")


def test_float16_products_do_not_overflow() -> None:
    q, k, v, do = make_inputs((1, 70, 70, 2, 2, 128, 128), "float16")
    q[...], k[...] = 256, 256
    o, lse, *grads = both((q, k, v, do))
    mean = np.broadcast_to(v.astype(np.float64).mean(axis=1, keepdims=True), o.shape)
    assert_accurate(o, mean, mean.astype(np.float16), "o")
    logit = 256.0 * 256 * 128 / math.sqrt(128)
    np.testing.assert_allclose(lse, logit + math.log(70), rtol=1e-6)
    assert all(np.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("magnitude", [1e5, 1e6])
def test_large_finite_logits(magnitude: Any) -> None:
    q, k, v, do = make_inputs((1, 40, 60, 2, 1, 16, 16), "float32", 4)
    q *= np.float32(magnitude)
    for options in ({}, {"causal": True}):
        o, lse, *grads = both((q, k, v, do), **options)
        ref, ref_lse = reference64(q, k, v, **options)
        assert_lse(lse, ref_lse, "float32")
        # Far apart logits make the softmax pick one key: its value comes back.
        assert np.isfinite(o).all()
        assert np.abs(o - ref).max() < 1e-2
        assert all(np.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("sizes", TILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_reach_only_what_sees_them(sizes: Any, dtype: Any) -> None:
    clean = make_inputs((1, 8, 8, 2, 2, 16, 16), dtype)
    clean.q[...] = np.abs(clean.q)

    def spoiled(name: Any, at: Any, value: Any) -> Any:
        copy = testing.Inputs(*(x.copy() for x in clean))
        getattr(copy, name)[at] = value
        return both(copy, causal=True)

    def check(x: Any, y: Any, bad: Any) -> None:
        """x is NaN where bad, and y to the bit elsewhere."""
        np.testing.assert_array_equal(np.isnan(x.astype(np.float64)), bad)
        np.testing.assert_array_equal(x[~bad], y[~bad])

    with tiles(*sizes):
        base = both(clean, causal=True)
        rows = np.broadcast_to(np.arange(8)[:, None, None], (1, 8, 2, 16))
        for value in (NAN, np.inf):
            o, lse, dq, dk, dv = spoiled("k", (0, 5, slice(None), 0), value)
            check(o, base[0], rows >= 5)
            assert not np.isfinite(lse[..., 5:]).any()
            np.testing.assert_array_equal(lse[..., :5], base[1][..., :5])
            check(dq, base[2], rows >= 5)
            assert np.isnan(dk[:, 5:6].astype(float)).all()
            assert np.isnan(dv[:, 5:6].astype(float)).all()
        o, lse, dq, dk, dv = spoiled("v", (0, 5, slice(None), 3), NAN)
        column = np.arange(16) == 3
        check(o, base[0], (rows >= 5) & column)
        np.testing.assert_array_equal(lse, base[1])
        check(dq, base[2], rows >= 5)
        check(dv, base[4], np.zeros(dv.shape, bool))
        o, lse, dq, dk, dv = spoiled("q", (0, 2), NAN)
        check(o, base[0], rows == 2)
        check(dq, base[2], rows == 2)
        check(dk, base[3], rows <= 2)
        check(dv, base[4], rows <= 2)
        o, lse, dq, dk, dv = spoiled("do", (0, 2), NAN)
        check(dq, base[2], rows == 2)
        check(dk, base[3], rows <= 2)
        check(dv, base[4], rows <= 2)


@pytest.mark.parametrize("heads", [(6, 4), (3, 2), (33, 2), (2, 4), (4, 0), (0, 4)])
def test_head_counts_must_divide(heads: Any) -> None:
    q, k, v, _ = make_inputs((1, 3, 3, *heads, 8, 8), "float32")
    with pytest.raises(ValueError, match=f"num_heads={heads[0]} .* num_heads_kv={heads[1]}"):
        problem_of("forward", q, k, v)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scale_zero_and_negative(causal: Any, softcap: Any) -> None:
    q, k, v, do = make_inputs((2, 30, 30, 4, 2, 16, 16), "float32")
    options: dict[str, Any] = {"causal": causal, "softcap": softcap}
    for zero in (0, 0.0, np.float32(0)):
        o, lse, dq, dk, dv = both((q, k, v, do), softmax_scale=zero, **options)
        count = np.arange(1, 31) if causal else np.full(30, 30)
        mean = v.astype(np.float64).cumsum(axis=1)
        mean = (mean if causal else mean[:, -1:]) / count[:, None, None]
        np.testing.assert_allclose(o, mean.repeat(2, axis=2), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, np.broadcast_to(np.log(count), lse.shape), rtol=1e-6)
        assert (dq == 0).all()
        assert (dk == 0).all()
        assert (dv != 0).all()
    q *= np.float32(30)
    o, lse, dq, dk, dv = both((q, k, v, do), softmax_scale=-0.3, **options)
    expected = both((-q, k, v, do), softmax_scale=0.3, **options)
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    np.testing.assert_array_equal(dq, -expected[2])
    np.testing.assert_array_equal(dk, expected[3])
    np.testing.assert_array_equal(dv, expected[4])
    for bad in (NAN, np.inf):
        with pytest.raises(ValueError, match="softmax_scale"):
            Options.make(softmax_scale=bad)


@pytest.mark.parametrize("sk", [1, 70, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lse_is_natural_and_merges(sk: Any, dtype: Any) -> None:
    q, k, v, _ = make_inputs((2, 50, sk, 4, 2, 32, 32), dtype)
    whole, lse = fwd(q, k, v)
    assert lse.dtype == np.float32
    assert lse.shape == (2, 4, 50)
    logits = np.einsum("bihd,bjhd->bhij", q.astype(float), k.astype(float).repeat(2, axis=2))
    np.testing.assert_allclose(
        lse, np.log(np.exp(logits / math.sqrt(32)).sum(axis=-1)), rtol=1e-5, atol=1e-5
    )
    ref, plain = reference64(q, k, v)[0], plain_attention(q, k, v)[0]
    for n in (sk // 2, sk, 0):
        cuts = (slice(0, n), slice(n, None))
        merged, merged_lse = merge([fwd(q, k[:, a], v[:, a]) for a in cuts])
        assert_accurate(merged.astype(whole.dtype), ref, plain, "merged")
        np.testing.assert_allclose(merged_lse, lse, rtol=2e-6, atol=2e-6)
    empty = fwd(q, k[:, :0], v[:, :0])
    merged, merged_lse = merge([empty, empty])
    assert (merged == 0).all()
    assert (merged_lse == -np.inf).all()


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (0, 3, 4, 2, 1, 8, 4),
        (2, 0, 4, 2, 1, 8, 4),
        (2, 3, 0, 2, 1, 8, 4),
        (2, 0, 0, 2, 1, 8, 4),
        (2, 3, 4, 0, 0, 8, 4),
        (0, 0, 0, 0, 0, 1, 1),
    ],
)
def test_empty_sizes(shape: Any, causal: Any, dtype: Any) -> None:
    b, sq, sk, h, hk, d, dv_ = shape
    inputs = make_inputs(shape, dtype)
    for lens in (
        {},
        {"seqlens_q": np.full(b, sq, np.int32), "seqlens_k": np.full(b, sk, np.int32)},
    ):
        o, lse, dq, dk, dv = both(inputs, causal=causal, **lens)
        assert (o.shape, lse.shape, dq.shape) == ((b, sq, h, dv_), (b, h, sq), (b, sq, h, d))
        assert (dk.shape, dv.shape) == ((b, sk, hk, d), (b, sk, hk, dv_))
        assert all((x == 0).all() for x in (o, dq, dk, dv))
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lens_q", "lens_k"),
    [
        ((0, 5, 0, 4), (3, 0, 7, 2)),
        ((0, 5, 0, 4), (0, 0, 0, 0)),
        ((0, 1, 0, 1), (3, 2, 7, 1)),
    ],
)
def test_zero_length_sequences(lens_q: Any, lens_k: Any, causal: Any, d: Any) -> None:
    inputs = make_inputs((4, 5, 7, 9, 3, d, d), "float32")
    for b in range(4):
        inputs.q[b, lens_q[b] :], inputs.do[b, lens_q[b] :] = NAN, NAN
        inputs.k[b, lens_k[b] :], inputs.v[b, lens_k[b] :] = NAN, NAN
    lens = {"seqlens_q": lengths(*lens_q), "seqlens_k": lengths(*lens_k)}
    o, lse, dq, dk, dv = both(inputs, causal=causal, **lens)
    for b, (n, m) in enumerate(zip(lens_q, lens_k, strict=True)):
        one = [x[b : b + 1, :w] for x, w in zip(inputs, (n, m, m, n), strict=True)]
        alone = both(one, causal=causal)
        for x, y in zip(
            (o[b, :n], lse[b, :, :n], dq[b, :n], dk[b, :m], dv[b, :m]), alone, strict=True
        ):
            np.testing.assert_array_equal(x, y[0])
        for x in (o[b, n:], dq[b, n:], dk[b, m:], dv[b, m:]):
            assert (x == 0).all()
        assert (lse[b, :, n:] == -np.inf).all()
        if m == 0:
            assert (o[b] == 0).all()
            assert (lse[b] == -np.inf).all()
        if n == 0:
            assert (dk[b] == 0).all()
            assert (dv[b] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 3), "softcap": 2.0}])
def test_padding_may_hold_nan(options: Any, dtype: Any) -> None:
    q, k, v, do = make_inputs((4, 70, 90, 4, 2, 16, 8), dtype)
    lens_q, lens_k = lengths(70, 13, 0, 40), lengths(90, 77, 5, 1)
    lens = {"seqlens_q": lens_q, "seqlens_k": lens_k}
    dlse = np.random.default_rng(1).standard_normal((4, 4, 70)).astype(np.float32)
    if dtype == "float64":
        dlse = dlse.astype(np.float64)
    clean = both((q, k, v, do), dlse, **options, **lens)
    o, lse = (x.copy() for x in clean[:2])
    for b in range(4):
        n, m = lens_q[b], lens_k[b]
        for x in (q, do, o):
            x[b, n:] = NAN
        k[b, m:], v[b, m:], dlse[b, :, n:], lse[b, :, n:] = NAN, NAN, NAN, NAN
    padded = fwd(q, k, v, **options, **lens)
    grads = bwd(do, q, k, v, o, lse, dlse, **options, **lens)
    for x, y in zip((*padded, *grads), clean, strict=True):
        assert np.isfinite(y.astype(float)).all() or y is clean[1]
        np.testing.assert_array_equal(x, y)


def test_softcap_comes_before_the_mask() -> None:
    q, k, v, do = make_inputs((1, 4, 4, 1, 1, 8, 8), "float32")
    q[...] = 0
    o, lse = fwd(q, k, v, causal="top_left", window=(1, 0), softcap=2.0)
    np.testing.assert_allclose(o[0, 3], v[0, 2:].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log([1, 2, 2, 2]), rtol=1e-6)
    q = make_inputs((1, 4, 4, 1, 1, 8, 8), "float32", 1).q
    for x, y in zip(both((q, k, v, do), softcap=0), both((q, k, v, do)), strict=True):
        np.testing.assert_array_equal(x, y)


LENGTHS_OR_NOT: tuple[Any, ...] = ({}, {"seqlens_q": lengths(3, 1), "seqlens_k": lengths(2, 4)})


@pytest.mark.parametrize("lens", LENGTHS_OR_NOT)
def test_softcap_gradient(lens: Any) -> None:
    """Logits about 3 under a cap of 1.5, so that the derivative of tanh matters."""
    inputs = make_inputs((2, 3, 4, 2, 2, 3, 3), "float32", 7)
    inputs.q[...] *= np.float32(3)
    options: dict[str, Any] = {"softcap": 1.5, **lens}
    grads = both(inputs, **options)[2:]
    for which, grad in enumerate(grads):
        expected = finite_differences(inputs, np.zeros((2, 2, 3)), which, **options)
        np.testing.assert_allclose(grad, expected, atol=2e-6)
    without = both(inputs, **lens)[2:]
    assert np.abs(without[0] - grads[0]).max() > 0.05


@pytest.mark.parametrize("lens", LENGTHS_OR_NOT)
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_through_lse(lens: Any, causal: Any) -> None:
    """loss = sum(o * w) + 0.3 sum(lse^2); causal 4 x 3 has a row without keys."""
    shape = (2, 4, 3, 2, 1, 3, 3) if causal else (2, 3, 5, 2, 1, 3, 3)
    inputs = make_inputs(shape, "float32", 8)
    options: dict[str, Any] = {"causal": causal, **lens}
    if lens:
        options["seqlens_k"] = lengths(2, 3)
    lse = fwd(*inputs[:3], **options)[1]
    dlse = np.where(np.isinf(lse), 0, 0.6 * lse).astype(np.float32)
    garbage = np.where(np.isinf(lse), NAN, dlse).astype(np.float32)
    grads = both(inputs, garbage, **options)[2:]
    for which, grad in enumerate(grads):
        # The loss is linearised at this lse, which leaves its gradient as it is.
        expected = finite_differences(inputs, dlse, which, **options)
        np.testing.assert_allclose(grad, expected, atol=3e-6)
    without = both(inputs, **options)[2:]
    np.testing.assert_array_equal(grads[2], without[2])
    assert np.abs(grads[0] - without[0]).max() > 0.01


@pytest.mark.parametrize("heads", [(16, 2), (12, 2), (12, 3), (8, 1)])
def test_gqa_gradients_sum_in_float32_and_round_once(heads: Any) -> None:
    inputs = make_inputs((2, 70, 70, *heads, 64, 64), "bfloat16")
    o, lse, dq, dk, dv = both(inputs, causal=True)
    assert dk.shape == (2, 70, heads[1], 64)
    q, k, v, do = (x.astype(np.float32) for x in inputs)
    group = heads[0] // heads[1]
    k2, v2 = k.repeat(group, axis=2), v.repeat(group, axis=2)
    dq2, dk2, dv2 = bwd(do, q, k2, v2, o.astype(np.float32), lse, causal=True)
    for x, y in ((dk, dk2), (dv, dv2)):
        y = y.reshape(2, 70, heads[1], group, 64).sum(axis=3)  # noqa: PLW2901
        # One rounding to bfloat16 at most, beside the noise of float32 sums.
        np.testing.assert_allclose(x.astype(float), y, rtol=EPS["bfloat16"] / 2, atol=1e-5)
    np.testing.assert_allclose(dq.astype(float), dq2, rtol=EPS["bfloat16"] / 2, atol=1e-5)
    assert_all_accurate(inputs, "bfloat16", causal=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sk", [1, 2, 3, 17])
@pytest.mark.parametrize("sq", [1, 2, 3])
def test_one_to_three_tokens(sq: Any, sk: Any, causal: Any, dtype: Any) -> None:
    inputs = make_inputs((1, sq, sk, 2, 1, 4, 4), dtype, sq + sk)
    o, _, dq, dk, dv = both(inputs, causal=causal)
    unit = 4 * EPS[dtype]
    for which, grad in enumerate((dq, dk, dv)):
        zero = np.zeros((1, 2, sq))
        expected = finite_differences(inputs, zero, which, causal=causal)
        bound = unit * max(1.0, float(np.abs(expected).max())) + 1e-8
        assert np.abs(grad.astype(float) - expected).max() <= bound
    if sk == 1:
        seen = sq - 1 if causal else 0
        np.testing.assert_array_equal(o[:, seen:], inputs.v.repeat(2, 2).repeat(sq - seen, 1))
        total = inputs.do[:, seen:].astype(float).sum(axis=(1, 2))
        np.testing.assert_allclose(dv[:, 0, 0].astype(float), total, atol=unit * 4)
        assert np.abs(dq.astype(float)).max() <= unit
        assert np.abs(dk.astype(float)).max() <= unit


# What it costs


def peak_bytes(fn: Any) -> Any:
    tracemalloc.start()
    try:
        fn()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_memory_grows_with_s_not_s_squared(direction: str) -> None:
    peaks = []
    for s in (1024, 2048, 4096):
        q, k, v, do = make_inputs((1, s, s, 1, 1, 16, 16), "float32")
        o, lse = fwd(q, k, v)
        fn, args = (fwd, (q, k, v)) if direction == "forward" else (bwd, (do, q, k, v, o, lse))
        peaks.append(peak_bytes(partial(fn, *args)))
    # A constant for the tiles and as much again for as many rows again.
    assert peaks[2] - peaks[1] < 2.1 * (peaks[1] - peaks[0])
    assert peaks[2] < 4096 * 4096 / 2  # half a byte a pair


def test_shared_heads_are_not_expanded() -> None:
    q, k, v, _ = make_inputs((1, 1, 16384, 32, 1, 64, 64), "float32")
    assert peak_bytes(lambda: fwd(q, k, v)) < k.nbytes  # expanded, k alone is 32 times that


def tile_count(*args: Any, **options: Any) -> Any:
    with patch.object(reference, "_scores", wraps=reference._scores) as scores:
        fwd(*args, **options)
    return scores.call_count


def test_blocks_outside_the_mask_are_skipped() -> None:
    q, k, v, _ = make_inputs((1, 4096, 4096, 1, 1, 8, 8), "float32")
    full = tile_count(q, k, v)
    assert full == 4096 // 256 * (4096 // 512)
    assert tile_count(q, k, v, causal=True) <= 0.6 * full
    assert tile_count(q, k, v, window=(128, 0)) <= 3 * 4096 // 512
    with patch.object(reference, "_stack", wraps=reference._stack) as stack:
        assert tile_count(q[:, :1], k, v, window=(100, 0)) == 1
    assert stack.call_count == 3  # q, and k and v of the one block that is seen


def test_small_heads_share_an_iteration() -> None:
    q, k, v, _ = make_inputs((64, 8, 8, 12, 12, 16, 16), "float32")
    assert tile_count(q, k, v) <= 4
    assert tile_count(q, k, v, seqlens_k=np.full(64, 8, np.int32)) == 64


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_no_floating_point_state_leaks(dtype: Any) -> None:
    """Not even under errstate(all="raise"): overflow, underflow, NaN and log 0 are all legal."""
    q, k, v, do = make_inputs((2, 9, 7, 2, 1, 8, 8), dtype)
    q[0, 2], k[1, 3], v[0, 1, 0, 0] = NAN, np.inf, -np.inf
    q[1, 0] = 60000
    with np.errstate(all="raise"):
        both((q, k, v, do), causal=True, softcap=0.5)
        both((q, k, v, do), window=(1, 1), softmax_scale=1e30)
        assert np.geterr()["over"] == "raise"


# The tools that judge


def test_the_accuracy_rule_can_fail() -> None:
    q, k, v, _ = make_inputs((1, 40, 50, 2, 2, 32, 32), "bfloat16")
    ref, plain = reference64(q, k, v)[0], plain_attention(q, k, v)[0]
    error, bound = assert_accurate(fwd(q, k, v)[0], ref, plain, "o")
    assert 0 < error < bound < 0.05
    assert_accurate(plain, ref, plain, "plain itself")
    wrong = ref.copy()
    wrong[0, 3, 1, 2] += 4 * bound
    with pytest.raises(AssertionError, match="largest error"):
        assert_accurate(wrong.astype(q.dtype), ref, plain, "o")
    with pytest.raises(AssertionError, match="shapes"):
        assert_accurate(wrong[:, 1:].astype(q.dtype), ref, plain, "o")
    for value in (NAN, np.inf):
        wrong[0, 3, 1, 2] = value
        with pytest.raises(AssertionError, match="largest error"):
            assert_accurate(wrong.astype(q.dtype), ref, plain, "o")
        with pytest.raises(AssertionError, match="non-finite"):
            assert_accurate(plain, wrong, plain, "o")
        assert_accurate(wrong.astype(q.dtype), wrong, plain, "o")
        overflown = wrong.astype(q.dtype)
        with pytest.raises(AssertionError, match="largest error"):
            assert_accurate(ref.astype(q.dtype) * 0, ref, overflown, "o")


def test_the_lse_rule_can_fail() -> None:
    q, k, v, _ = make_inputs((1, 9, 5, 2, 2, 8, 8), "float16")
    ref = reference64(q, k, v, causal=True)[1]
    lse = fwd(q, k, v, causal=True)[1]
    assert_lse(lse, ref, "float16")
    for at, value in (((0, 0, 8), ref[0, 0, 8] + 1e-4), ((0, 0, 8), NAN), ((0, 0, 8), -np.inf)):
        wrong = lse.copy()
        wrong[at] = value
        with pytest.raises(AssertionError):
            assert_lse(wrong, ref, "float16")
    wrong = lse.copy()
    wrong[0, 1, 0] = -1e30
    with pytest.raises(AssertionError):
        assert_lse(wrong, ref, "float16")


def test_plain_attention_rounds_every_step() -> None:
    q, k, v, do = make_inputs((1, 60, 60, 2, 1, 64, 64), "bfloat16")
    ref = reference64(q, k, v)[0]
    ours, plain = fwd(q, k, v)[0].astype(float), plain_attention(q, k, v)[0].astype(float)
    assert np.abs(ours - ref).max() < np.abs(plain - ref).max() < 0.03
    refs = reference64_backward(do, q, k, v)
    for x, y in zip(plain_attention_backward(do, q, k, v), refs, strict=True):
        assert 0 < np.abs(x.astype(float) - y).max() < 0.1


def test_inputs_are_seeded_and_rounded() -> None:
    for dtype in DTYPES:
        a, b = (
            make_inputs((1, 20, 30, 4, 2, 8, 6), dtype, 1),
            make_inputs((1, 20, 30, 4, 2, 8, 6), dtype, 1),
        )
        assert [x.shape for x in a] == [(1, 20, 4, 8), (1, 30, 2, 8), (1, 30, 2, 6), (1, 20, 4, 6)]
        for x, y in zip(a, b, strict=True):
            assert x.dtype.name == dtype
            np.testing.assert_array_equal(x, y)
            assert 0.7 < x.astype(float).std() < 1.3
        assert (a.q != make_inputs((1, 20, 30, 4, 2, 8, 6), dtype, 2).q).any()


def test_benchmark_cases() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 18
    for case in CASES:
        assert case.batch * case.seqlen_q == 16384
        assert case.num_heads * case.head_dim == 2048
        s, d = case.seqlen_q, case.head_dim
        square = 4 * case.batch * case.num_heads * s * s * d
        assert case.flops("forward") == (square / 2 if case.causal else square)
        assert case.flops("backward") == 2.5 * case.flops("forward")
        Options.make(**case.options)
    every = [case for cases in testing.SETS.values() for case in cases]
    assert testing.SETS["targets"] == CASES
    assert len(every) == len({case.name for case in every})
    decode = testing.SETS["decode"][1]
    assert (decode.seqlen_q, decode.seqlen_k, decode.num_heads_kv) == (1, 131072, 8)
    assert decode.forward_bytes(2) == 2 * 128 * 2 * (131072 * 8 + 32)
    tiny = testing.Case("tiny", 1, 2, 3, 4, 2, 8, 16)
    assert [x.shape for x in make_inputs(tiny)][2] == (1, 3, 2, 16)


def test_gpu_timer_takes_the_median_and_rotates(monkeypatch: Any) -> None:
    """With a stand-in for CuPy whose clock advances by the call's argument."""
    clock = [0.0]

    class Event:
        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

    cuda = SimpleNamespace(
        Event=Event,
        get_elapsed_time=lambda a, b: b.at - a.at,
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    seen = []

    def work(ms: Any) -> None:
        seen.append(ms)
        clock[0] += ms

    assert testing.time_gpu(work, [(1.0,), (2.0,), (4.0,)], warmup=2, repeats=9) == 2.0
    assert seen == [1.0, 2.0] + [1.0, 2.0, 4.0] * 3
