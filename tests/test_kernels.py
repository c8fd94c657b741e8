"""The kernels of cuda_src, the same tests on the emulated card (no GPU) and on a real one.

Problems are small: each is one of the cells below, which spread over kernels, tiles of every
architecture, policies and types, with sizes, layouts, lengths and options drawn by hypothesis.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import gpu_oracle as oracle
import numpy as np
import pytest
from gpu_oracle import LAID, MASK_OPTIONS, assert_same, fill_nan, laid, lengths
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from test_gpu_forward import KINDS, run, run_checked

from cufa2 import flash_attention
from cufa2.kernels import MASKS, SCORES
from cufa2.testing import Backend

DIMS = oracle.FORWARD.head_dims
# One of each kind: 163, 99, 227 KB of shared memory, and both of those after Hopper.
ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a")


class Cell(NamedTuple):
    """What is compiled: an architecture, a dtype or one of FAST, a size, the policies."""

    arch: str
    kind: str
    dim: int
    mask: str
    score: str
    deterministic: bool = False


def spread(step: int, modes: tuple[bool, ...] = (False,)) -> list[Cell]:
    """Every `step`-th of all cells; a step prime to the number of values of each axis meets all
    pairs of them sooner or later."""
    axes = (ARCHS, KINDS, DIMS, MASKS, SCORES, modes)
    return [Cell(*values) for values in list(itertools.product(*axes))[::step]]


def name_of(cell: Cell) -> str:
    return "-".join(str(x) for x in cell)


@st.composite
def problems(draw: st.DrawFn, longest: int) -> dict[str, Any]:
    """Sizes and options that compile nothing: those of the cell are filled in later."""
    length = st.one_of(st.sampled_from((1, 16, 63, 64, 65, 128)), st.integers(1, longest))
    sq, sk = draw(length), draw(length)
    heads = draw(st.sampled_from(((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))))
    # The rule compares two largest errors: there must be enough values to draw them from.
    b = max(draw(st.integers(1, 2)), -(-48 // (heads[1] * min(sq, sk))))
    return {
        "sizes": (b, sq, sk),
        "heads": heads,
        "less": (draw(st.sampled_from((0, 0, 8, 3))), draw(st.sampled_from((0, 0, 8, 5)))),
        "lens": {
            name: draw(
                st.one_of(
                    st.none(),
                    st.lists(st.sampled_from((n // 2, n)), min_size=b, max_size=b),
                    st.just([0, *[n] * (b - 1)]),
                )
            )
            for name, n in (("seqlens_q", sq), ("seqlens_k", sk))
        },
        "bounds": (draw(st.integers(0, 70)), draw(st.integers(0, 70))),
        "align": draw(st.sampled_from(("bottom_right", "top_left"))),
        "softcap": draw(st.sampled_from((1.5, 5.0, 30.0))),
        "scale": draw(st.sampled_from((None, None, None, 0.0, -1.0, 2.0))),
        "lying": [draw(st.sampled_from(list(LAID))) for _ in range(4)],
        "dlse": draw(st.booleans()),
        "seed": draw(st.integers(0, 10**6)),
    }


def options_of(cell: Cell, case: dict[str, Any], dim: int) -> dict[str, Any]:
    left, right = case["bounds"]
    masks: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"causal": case["align"]},
        "left": {"window": (left, None)},
        "local": {"window": (left, right)},
    }
    assert masks.keys() == MASK_OPTIONS.keys() == MASKS.keys(), "every mask policy"
    scale = case["scale"]
    return {
        **masks[cell.mask],
        "softcap": case["softcap"] if cell.score == "softcap" else 0.0,
        "softmax_scale": None if scale is None else scale / math.sqrt(dim),
        **oracle.named(cell.kind)[1],
    }


def arrays_of(cell: Cell, case: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """do, q, k and v, lying as drawn and NaN in their padding, and the lengths."""
    (b, sq, sk), (h, hk) = case["sizes"], case["heads"]
    d, dv = (cell.dim - n for n in case["less"])
    dtype = oracle.named(cell.kind)[0]
    made = [
        laid(x, kind)
        for x, kind in zip(
            oracle.problem(b, sq, sk, h, hk, d, dv, dtype, case["seed"]),
            case["lying"],
            strict=True,
        )
    ]
    do, q, k, v = made
    for x, name in ((do, "seqlens_q"), (q, "seqlens_q"), (k, "seqlens_k"), (v, "seqlens_k")):
        for i, n in enumerate(case["lens"][name] or ()):
            fill_nan(x[i, n:])
    return made, {name: lengths(*n) for name, n in case["lens"].items() if n is not None}


def for_problems(
    cell: Cell, count: int, check: Callable[[dict[str, Any]], None], longest: int = 150
) -> None:
    """Check `count` problems that are this cell's own, and the same in every run; `longest` is
    the greatest length of a sequence."""
    run_all = given(case=problems(longest))(check)
    chosen = settings(
        max_examples=count,
        phases=[Phase.generate],  # problems are small as they are, and shrinking takes minutes
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(run_all)
    seed(zlib.crc32(name_of(cell).encode()))(chosen)()


@pytest.mark.parametrize("cell", spread(23), ids=name_of)
def test_forward(card: Backend, cell: Cell) -> None:
    def check(case: dict[str, Any]) -> None:
        (_, q, k, v), lens = arrays_of(cell, case)
        run_checked(q, k, v, f"{cell} {case}", **options_of(cell, case, q.shape[3]), **lens)

    with card.of(cell.arch):
        for_problems(cell, 5, check)


@pytest.mark.parametrize("cell", spread(61, oracle.MODES), ids=name_of)
def test_backward(card: Backend, cell: Cell) -> None:
    def check(case: dict[str, Any]) -> None:
        (do, q, k, v), lens = arrays_of(cell, case)
        options = options_of(cell, case, q.shape[3]) | lens
        if case["dlse"]:
            options["dlse"] = oracle.normal_lse(q, case["seed"])
        grads = oracle.backward(do, q, k, v, deterministic=cell.deterministic, **options)
        oracle.check_backward(do, q, k, v, grads, f"{cell} {case}", **options)

    with card.of(cell.arch):
        for_problems(cell, 4, check)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_threads_changes_no_bit(card: Backend, kind: str) -> None:
    """Forward, and backward if asked: on the emulated card each launch has an order of its own."""
    dtype, fast = oracle.named(kind)
    with card.of("sm_90a"):
        do, q, k, v = oracle.problem(1, 70, 90, 2, 1, 64, 64, dtype)
        o, lse = run(q, k, v, causal=True, **fast)
        first = oracle.backward(do, q, k, v, (o, lse), deterministic=True, causal=True, **fast)
        for _ in range(4):
            again, lse_again = run(q, k, v, causal=True, **fast)
            assert_same(again, o, "o")
            assert_same(lse_again, lse, "lse")
            more = oracle.backward(do, q, k, v, (o, lse), deterministic=True, causal=True, **fast)
            oracle.assert_same_gradients(more, first, "gradients")


@pytest.mark.parametrize("kind", KINDS)
def test_keys_may_come_in_any_order(card: Backend, kind: str) -> None:
    dtype, fast = oracle.named(kind)
    with card.of("sm_80"):
        _, q, k, v = oracle.problem(1, 40, 110, 2, 1, 64, 64, dtype)
        order = np.random.default_rng(0).permutation(110)
        mixed = [oracle.to_device(oracle.host(x)[:, order]) for x in (k, v)]
        o, lse = run(q, *mixed, **fast)
        oracle.check(o, lse, q, k, v, "permuted keys", **fast)


FAR = [("float16", "fwd_sm90"), ("float16", "fwd_sm80"), ("float32", ""), ("float64", "")]


@pytest.mark.parametrize(("kind", "kernel"), FAR)
def test_more_than_two_to_the_31_elements_between_rows(
    card: Backend, kind: str, kernel: str
) -> None:
    """In strides: all tensors in one buffer, rows 34 million elements apart."""
    s, between, d = 80, 2**19, 64
    with card.of("sm_90a"), oracle.preferring(kernel) if kernel else nullcontext():
        buffer = oracle.vast((1, s, between, d), kind)
        sources = oracle.problem(1, s, s, 2, 1, d, d, kind)
        o = oracle.apart_in(buffer, 0, sources[1])
        lse = oracle.empty((1, 2, s), oracle.lse_dtype(kind))
        far = (oracle.apart_in(buffer, n + 1, x) for n, x in enumerate(sources))
        do, q, k, v = far
        assert o.strides[1] // o.itemsize * (s - 1) > 2**31
        flash_attention(q, k, v, causal=True, return_lse=True, out=o, lse_out=lse)
        oracle.check(o, lse, *sources[1:], kind, causal=True)
        for deterministic in oracle.MODES:
            options = {"causal": True, "deterministic": deterministic}
            grads = oracle.backward(do, q, k, v, (o, lse), **options)
            oracle.check_backward(*sources, grads, f"{kind}, {options}", causal=True)
        del buffer, o, do, q, k, v, grads
        oracle.card().get_default_memory_pool().free_all_blocks()
