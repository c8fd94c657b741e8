"""The op this library grew from, as its formulas state it, and every back end held to them.

Its kernels take one query row (forward, dq) or one key row (dk and dv) of flat (BH, S, D) arrays
and walk over the other side row by row. Here they are as loops, in the precision of the arrays
given: in the inputs' own they are what a back end may be as wrong as twice, in a wider one they
are the truth.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from cufa2.dense import (
    plain_attention,
    plain_attention_backward,
    reference64,
    reference64_backward,
)
from cufa2.problem import DTYPES
from cufa2.testing import (
    Backend,
    assert_accurate,
    assert_lse,
    gradient_noise,
    make_inputs,
    numpy_dtype,
)


class Rows(NamedTuple):
    """What the op returns for flat arrays: o (BH,Sq,D), lse (BH,Sq), dq, dk, dv like q, k, v."""

    o: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


def seed_forward(q: Any, k: Any, v: Any, scale: Any) -> tuple[Any, Any]:
    """o and lse: the online softmax, one query row at a time."""
    o, lse = np.empty_like(q), np.empty(q.shape[:2], q.dtype)
    for bh, i in np.ndindex(q.shape[:2]):
        acc = np.zeros_like(q[bh, i])
        m_i, l_i = q.dtype.type(-np.inf), q.dtype.type(0)
        for k_row, v_row in zip(k[bh], v[bh], strict=True):
            qk = (q[bh, i] * k_row).sum() * scale
            m_new = np.maximum(m_i, qk)
            exp_diff = np.exp(m_i - m_new)
            p = np.exp(qk - m_new)
            l_i = exp_diff * l_i + p
            acc = exp_diff * acc + p * v_row
            m_i = m_new
        o[bh, i] = acc / l_i
        lse[bh, i] = m_i + np.log(l_i)
    return o, lse


def seed_backward_dq(q: Any, k: Any, v: Any, o: Any, do: Any, lse: Any, scale: Any) -> Any:
    """dq: the weights anew from lse, D_q = sum(o do), dS = p (do.v - D_q), dq += dS k scale."""
    dq = np.zeros_like(q)
    for bh, i in np.ndindex(q.shape[:2]):
        d_q = (o[bh, i] * do[bh, i]).sum()
        for k_row, v_row in zip(k[bh], v[bh], strict=True):
            qk = (q[bh, i] * k_row).sum() * scale
            p = np.exp(qk - lse[bh, i])
            ds = p * ((do[bh, i] * v_row).sum() - d_q)
            dq[bh, i] += ds * k_row * scale
    return dq


def seed_backward_dkv(
    q: Any, k: Any, v: Any, o: Any, do: Any, lse: Any, scale: Any
) -> tuple[Any, Any]:
    """dk and dv of a key row: dv += p do, dk += dS q scale, over all query rows."""
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for bh, j in np.ndindex(k.shape[:2]):
        for q_row, o_row, do_row, l_m in zip(q[bh], o[bh], do[bh], lse[bh], strict=True):
            d_m = (o_row * do_row).sum()
            qk = (q_row * k[bh, j]).sum() * scale
            p = np.exp(qk - l_m)
            dv[bh, j] += p * do_row
            ds = p * ((do_row * v[bh, j]).sum() - d_m)
            dk[bh, j] += ds * q_row * scale
    return dk, dv


def seed(q: Any, k: Any, v: Any, do: Any, scale: float) -> Rows:
    """Forward, then backward with what the forward has saved, in the dtype of q."""
    factor = q.dtype.type(scale)
    o, lse = seed_forward(q, k, v, factor)
    dq = seed_backward_dq(q, k, v, o, do, lse, factor)
    return Rows(o, lse, dq, *seed_backward_dkv(q, k, v, o, do, lse, factor))


WIDER: dict[str, Any] = {
    "float16": np.float64,
    "bfloat16": np.float64,
    "float32": np.float64,
    "float64": np.longdouble,
}
# (BH, Sq, Sk, D, softmax_scale): D is a power of two there, and the scale an argument.
SHAPES = ((3, 17, 23, 32, None), (2, 70, 140, 64, None), (2, 40, 9, 128, -0.05))


@functools.cache
def expected(shape: tuple[Any, ...], dtype: str) -> tuple[Any, float, Rows, Rows]:
    """Inputs q, k, v, do and the scale; the truth; and what the inputs' precision makes of it."""
    bh, sq, sk, d, scale = shape
    q, k, v, do = (x[:, :, 0] for x in make_inputs((bh, sq, sk, 1, 1, d, d), dtype, 4))
    inputs, scale = (q, k, v, do), 1 / math.sqrt(d) if scale is None else scale
    wide_q, wide_k, wide_v, wide_do = (x.astype(WIDER[dtype]) for x in inputs)
    exact = seed(wide_q, wide_k, wide_v, wide_do, scale)
    if dtype in ("float32", "float64"):
        return inputs, scale, exact, seed(q, k, v, do, scale)
    q, k, v, do = (x[:, :, None] for x in inputs)
    o, lse = plain_attention(q, k, v, softmax_scale=scale)
    grads = plain_attention_backward(do, q, k, v, softmax_scale=scale)
    return inputs, scale, exact, Rows(o[:, :, 0], lse[:, 0], *(x[:, :, 0] for x in grads))


def hold(place: Backend, shape: tuple[Any, ...], dtype: str, deterministic: bool) -> None:
    """Run the launcher of a back end and hold what it returns to the op's."""
    inputs, scale, exact, plain = expected(shape, dtype)
    q, k, v, do = (place.to(x) for x in inputs)
    with place.of("sm_90a"):
        op = place.op(shape[3], dtype, softmax_scale=shape[4], deterministic=deterministic)
        o, lse = op.forward(q, k, v)
        grads = op.backward(do, q, k, v, o, lse)
    ours = Rows(*(place.back(x) for x in (o, lse, *grads)))
    host_q, host_k, host_v, host_do = inputs
    noise = gradient_noise(host_do, host_q, host_k, host_v, scale)
    for name in ("o", "dq", "dk", "dv"):
        x, ref, low = (getattr(rows, name) for rows in (ours, exact, plain))
        assert x.dtype == numpy_dtype(dtype), f"{name} is {x.dtype}"
        extra = noise if name in ("dq", "dk") else 0.0
        assert_accurate(x, ref, low, f"{shape} {dtype}: {name}", extra)
    assert_lse(ours.lse, exact.lse, dtype, f"{shape} {dtype}: lse")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loops_state_the_contract(shape: tuple[Any, ...]) -> None:
    """They are the dense formulas, for one head a row and without a mask."""
    inputs, scale, exact, _ = expected(shape, "float32")
    q, k, v, do = (x[:, :, None] for x in inputs)
    o, lse = reference64(q, k, v, softmax_scale=scale)
    grads = reference64_backward(do, q, k, v, softmax_scale=scale)
    for name, x, y in zip(Rows._fields, exact, (o, lse, *grads), strict=True):
        dense = y[:, 0] if name == "lse" else y[:, :, 0]
        np.testing.assert_allclose(x, dense, rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "deterministic"), list(zip(SHAPES, (False, True, False), strict=True))
)
def test_every_back_end_does_what_the_op_does(
    backend: Backend, shape: tuple[Any, ...], deterministic: bool, dtype: str
) -> None:
    hold(backend, shape, dtype, deterministic)
