"""Options and Problem: every spelling that is accepted, every refusal and its message."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cufa2.problem import (
    DTYPES,
    CompileError,
    Options,
    Problem,
    UnsupportedError,
    check_array,
    check_lengths,
    lse_type,
    make_problem,
)

WINDOW_RULE = (
    "window must be None or a pair (left, right) of integers >= 0, -1 or None for unbounded"
)


def exactly(message: str) -> str:
    """A pattern for this message and no other."""
    return f"^{re.escape(message)}$"


def typed(*shape: int, dtype: str = "float16") -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype)


def problem(
    b: int = 2,
    sq: int = 5,
    sk: int = 7,
    h: int = 4,
    hk: int = 2,
    d: int = 16,
    dv: int = 24,
    *,
    direction: Any = "forward",
    dtype: str = "float16",
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    **options: Any,
) -> Problem:
    q, k, v = (typed(*s, dtype=dtype) for s in ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv)))
    return make_problem(direction, Options.make(**options), q, k, v, seqlens_q, seqlens_k)


# error types


def test_error_types() -> None:
    """Each error can be caught by the built-in class that it is a kind of."""
    assert issubclass(UnsupportedError, NotImplementedError)
    assert issubclass(CompileError, RuntimeError)


# spellings of options


@pytest.mark.parametrize(
    "scale",
    [0.125, np.float32(0.125), np.float64(0.125), np.float16(0.125), np.array(0.125)],
    ids=lambda x: type(x).__name__,
)
def test_one_scale_many_spellings(scale: Any) -> None:
    """Every spelling of a number is the same Options, so the same launcher and the same result."""
    made = Options.make(softmax_scale=scale, softcap=scale)
    assert made == Options.make(softmax_scale=0.125, softcap=0.125)
    assert hash(made) == hash(Options.make(softmax_scale=0.125, softcap=0.125))
    assert type(made.softmax_scale) is float
    assert type(made.softcap) is float


@pytest.mark.parametrize("number", [1, 1.0, np.int64(1), np.uint8(1), np.array(1), np.float32(1)])
def test_integers_are_numbers(number: Any) -> None:
    assert Options.make(softmax_scale=number) == Options.make(softmax_scale=1.0)
    assert Options.make(softcap=number) == Options.make(softcap=1.0)


@pytest.mark.parametrize("zero", [0, 0.0, -0.0, np.float32(0), np.array(0.0)])
def test_scale_zero_is_not_the_default(zero: Any) -> None:
    assert problem(softmax_scale=zero).softmax_scale == 0.0


def test_scale_default_and_negative() -> None:
    assert problem(d=16).softmax_scale == 0.25
    assert problem(d=7).softmax_scale == 1 / math.sqrt(7)
    assert problem(softmax_scale=-0.3).softmax_scale == -0.3


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, np.float32("nan"), np.array(np.inf), 10**400],
    ids=["nan", "inf", "-inf", "nan32", "inf0d", "int"],
)
def test_numbers_must_be_finite(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.* is not finite$"):
        Options.make(**{name: value})


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize(
    "value", ["0.5", b"1", [0.5], (1,), {}, 1j, object(), np.ones(2), np.array("x")]
)
def test_numbers_must_be_numbers(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name}=.* is not a number"):
        Options.make(**{name: value})


def test_softcap_must_not_be_none_or_negative() -> None:
    with pytest.raises(TypeError, match=r"^softcap=None is not a number$"):
        Options.make(softcap=None)
    rule = r"is not within 1e-30..1e\+30; 0 turns it off$"
    for cap in (-2.5, 1e-31, 1e31):
        with pytest.raises(ValueError, match=f"^softcap={re.escape(str(cap))} {rule}"):
            Options.make(softcap=cap)
    with pytest.raises(ValueError, match=r"^softmax_scale=-1e\+31 is beyond 1e\+30 in magnitude$"):
        Options.make(softmax_scale=-1e31)


@pytest.mark.parametrize(
    ("spelling", "align", "right"),
    [
        (False, "bottom_right", None),
        (True, "bottom_right", 0),
        (np.False_, "bottom_right", None),
        (np.True_, "bottom_right", 0),
        (np.array(True), "bottom_right", 0),
        (0, "bottom_right", None),
        (1, "bottom_right", 0),
        ("bottom_right", "bottom_right", 0),
        ("top_left", "top_left", 0),
        (np.str_("top_left"), "top_left", 0),
    ],
)
def test_causal_spellings(spelling: Any, align: str, right: int | None) -> None:
    made = Options.make(causal=spelling)
    assert (made.align, made.window_left, made.window_right) == (align, None, right)


@pytest.mark.parametrize(
    "wrong", [None, "", "True", "lower_right", b"top_left", 2, -1, [True], np.array([True, False])]
)
def test_causal_refusals(wrong: Any) -> None:
    with pytest.raises(ValueError, match="is not one of False, True, 'bottom_right', 'top_left'"):
        Options.make(causal=wrong)


@pytest.mark.parametrize(
    ("window", "left", "right"),
    [
        (None, None, None),
        ((None, None), None, None),
        ((-1, -1), None, None),
        ((3, -1), 3, None),
        ((None, 4), None, 4),
        ([2, 0], 2, 0),
        ((np.int64(2), np.int32(5)), 2, 5),
        (np.array([2, 5]), 2, 5),
        ((np.array(6), 0), 6, 0),
        ((0, 0), 0, 0),
        ((10**30, 10**30), 10**30, 10**30),
    ],
)
def test_window_spellings(window: Any, left: int | None, right: int | None) -> None:
    made = Options.make(window=window)
    assert (made.window_left, made.window_right) == (left, right)
    assert all(type(x) in (int, type(None)) for x in (made.window_left, made.window_right))
    hash(made)


@pytest.mark.parametrize("window", [5, (), (1,), (1, 2, 3), (-2, 0), (0, -7), np.int64(3)])
def test_window_refusals(window: Any) -> None:
    with pytest.raises(ValueError, match=exactly(f"window={window!r}: {WINDOW_RULE}")):
        Options.make(window=window)


@pytest.mark.parametrize("window", ["ab", (1.0, 2), (2, "3"), (2, [3]), (np.float32(1), 0)])
def test_window_bounds_must_be_integers(window: Any) -> None:
    with pytest.raises(TypeError, match=exactly(f"window={window!r}: {WINDOW_RULE}")):
        Options.make(window=window)


@pytest.mark.parametrize(
    ("causal", "window", "right"),
    [
        (True, (3, 5), 0),
        (True, (3, 0), 0),
        (True, (3, None), 0),
        ("top_left", (None, 2), 0),
        (False, (3, 5), 5),
    ],
)
def test_causal_and_window_take_the_tighter_bound(causal: Any, window: Any, right: int) -> None:
    made = Options.make(causal=causal, window=window)
    assert (made.window_left, made.window_right) == (window[0], right)


@pytest.mark.parametrize("layout", ["BSHD", "sbhd", "", None, 0, ["bshd"]])
def test_layout_refusals(layout: Any) -> None:
    with pytest.raises(
        ValueError, match=exactly(f"layout={layout!r} is not one of ('bshd', 'bhsd')")
    ):
        Options.make(layout=layout)


@pytest.mark.parametrize("precision", ["TF32", "float32", "", 32, True, ["tf32"], np.zeros(2)])
def test_precision_refusals(precision: Any) -> None:
    with pytest.raises(
        ValueError, match=exactly(f"precision={precision!r} is not one of (None, 'tf32')")
    ):
        Options.make(precision=precision)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tf32_is_for_float32(direction: Any, dtype: str) -> None:
    assert problem(direction=direction, dtype=dtype, precision=None).precision is None
    if dtype == "float32":
        fast = problem(direction=direction, dtype=dtype, precision="tf32")
        assert fast.precision == "tf32"
        assert fast != problem(direction=direction, dtype=dtype)
        return
    message = f"precision='tf32' is for float32 arrays; q, k and v are {dtype}"
    with pytest.raises(ValueError, match=exactly(message)):
        problem(direction=direction, dtype=dtype, precision="tf32")


def test_options_are_keys() -> None:
    """Equal options are one dictionary key; options cannot be changed."""
    a = Options.make(causal=True, window=(5, None), softmax_scale=np.float64(0.5))
    b = Options.make(causal=1, window=[np.int8(5), 0], softmax_scale=0.5)
    assert a == b
    assert len({a: 0, b: 1}) == 1
    assert Options.make(precision=np.str_("tf32")) == Options.make(precision="tf32") != a
    assert len({Options.make(precision="tf32"), Options.make()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.softcap = 1.0  # type: ignore[misc]
    assert Options.make() == Options()


# problems


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_problem_holds_what_was_asked(direction: Any, dtype: str) -> None:
    made = problem(
        direction=direction,
        dtype=dtype,
        causal="top_left",
        window=(3, 9),
        softcap=2,
        layout="bhsd",
    )
    assert dataclasses.asdict(made) == {
        "direction": direction,
        "dtype": dtype,
        "batch": 2,
        "seqlen_q": 5,
        "seqlen_k": 7,
        "num_heads": 4,
        "num_heads_kv": 2,
        "head_dim": 16,
        "head_dim_v": 24,
        "softmax_scale": 0.25,
        "softcap": 2.0,
        "align": "top_left",
        "window_left": 3,
        "window_right": 0,
        "has_seqlens_q": False,
        "has_seqlens_k": False,
        "precision": None,
        "deterministic": False,
        "tensor_maps": True,
    }
    assert made.group == 2
    assert made.shift(5, 7) == 0
    assert problem().shift(5, 7) == 2
    assert problem().shift(9, 7) == -2


def test_problems_are_keys() -> None:
    """Hashable and frozen: a Problem is what plans are cached by."""
    assert problem(causal=True) == problem(causal="bottom_right", window=(None, 0))
    assert len({problem(), problem(), problem(sq=6)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem().batch = 3  # type: ignore[misc]


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
def test_empty_sizes_are_legal(sizes: tuple[int, int, int]) -> None:
    made = problem(*sizes)
    assert (made.batch, made.seqlen_q, made.seqlen_k) == sizes


def test_huge_sizes_are_legal() -> None:
    made = problem(b=2**20, sq=2**40, sk=2**41, h=2**10, hk=2**9, d=10**6, dv=10**7)
    assert made.seqlen_q * made.head_dim > 2**31


@pytest.mark.parametrize(("h", "hk"), [(6, 4), (3, 2), (33, 2), (2, 4), (4, 0), (0, 4), (1, 2)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_head_counts_must_divide(h: int, hk: int, direction: Any) -> None:
    with pytest.raises(
        ValueError, match=exactly(f"num_heads={h} is not a multiple of num_heads_kv={hk}")
    ):
        problem(h=h, hk=hk, direction=direction)


@pytest.mark.parametrize(("h", "hk", "group"), [(0, 0, 0), (1, 1, 1), (33, 3, 11), (8, 1, 8)])
def test_legal_head_counts(h: int, hk: int, group: int) -> None:
    assert problem(h=h, hk=hk).group == group


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 5, 4, 8), (3, 7, 4, 8), (2, 7, 4, 8)), "q has 2, k has 3, v has 2"),
        (((2, 5, 4, 8), (2, 7, 4, 8), (1, 7, 4, 8)), "q has 2, k has 2, v has 1"),
        (((2, 5, 4, 8), (2, 7, 4, 8), (2, 6, 4, 8)), "k has 7 rows and v has 6"),
        (((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 2, 8)), "k has 4 heads and v has 2"),
        (((2, 5, 4, 8), (2, 7, 4, 9), (2, 7, 4, 8)), "head dim of q is 8 and of k is 9"),
        (((2, 5, 4, 0), (2, 7, 4, 0), (2, 7, 4, 8)), "at least 1, got D=0 and Dv=8"),
        (((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 0)), "at least 1, got D=8 and Dv=0"),
    ],
)
def test_shape_refusals(shapes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_problem("forward", Options(), *(typed(*s) for s in shapes))


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float32"),
        ("float64", "float32", "float64"),
        ("int8", "float16", "float16"),
    ],
)
def test_mixed_dtypes_are_refused_by_name(dtypes: tuple[str, str, str]) -> None:
    q, k, v = (typed(1, 2, 1, 8, dtype=t) for t in dtypes)
    with pytest.raises(TypeError) as e:
        make_problem("forward", Options(), q, k, v)
    rule = "q, k and v must have one dtype, got q={}, k={}, v={}"
    assert str(e.value) == rule.format(*dtypes)


@pytest.mark.parametrize("dtype", ["int8", "int32", "complex64", "bool", "float8_e4m3fn"])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(TypeError) as e:
        problem(dtype=dtype)
    assert (
        str(e.value)
        == f"dtype {dtype} is not supported; use one of float16, bfloat16, float32, float64"
    )


# lengths


@pytest.mark.parametrize("name", ["seqlens_q", "seqlens_k"])
@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32", "int16", "bool"])
def test_lengths_are_int32(name: str, dtype: str) -> None:
    with pytest.raises(TypeError, match=exactly(f"{name} is {dtype}; it must be int32")):
        problem(**{name: typed(2, dtype=dtype)})


@pytest.mark.parametrize("name", ["seqlens_q", "seqlens_k"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (0,)])
def test_lengths_are_one_per_batch_entry(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=exactly(f"{name} has shape {shape}; it must be (B,) = (2,)")
    ):
        problem(**{name: typed(*shape, dtype="int32")})


def test_lengths_are_noted() -> None:
    lens = typed(2, dtype="int32")
    assert problem(seqlens_q=lens).has_seqlens_q
    assert not problem(seqlens_q=lens).has_seqlens_k
    assert problem(seqlens_k=lens).has_seqlens_k


@pytest.mark.parametrize(("lengths", "at"), [([0, 10], 1), ([-1, 3], 0), ([2**31 - 1], 0)])
def test_lengths_outside_the_array(lengths: list[int], at: int) -> None:
    with pytest.raises(
        ValueError, match=exactly(f"seqlens_k[{at}]={lengths[at]} is outside 0..9")
    ):
        check_lengths("seqlens_k", lengths, 9)


def test_lengths_inside_the_array() -> None:
    check_lengths("seqlens_q", [0, 9, 4], 9)
    check_lengths("seqlens_q", [], 0)


def test_check_array() -> None:
    check_array("out", typed(2, 3), (2, 3), "float16")
    with pytest.raises(TypeError, match=r"^out is float16; it must be float32$"):
        check_array("out", typed(2, 3), (2, 3), "float32")
    with pytest.raises(ValueError, match=r"^do has shape \(2, 3\); it must be \(3, 2\)$"):
        check_array("do", typed(2, 3), (3, 2), "float16")


def test_lse_type() -> None:
    """float32 for all but float64 inputs; flat arrays have no head axis."""
    assert lse_type(problem(), 4) == ((2, 4, 5), "float32")
    assert lse_type(problem(dtype="float64"), 4) == ((2, 4, 5), "float64")
    assert lse_type(problem(h=1, hk=1, dtype="bfloat16"), 3) == ((2, 5), "float32")


# clamping


def visible(align: str, left: int | None, right: int | None, n: int, m: int) -> Any:
    """Which of m keys each of n queries sees, from the rule as it is written."""
    i = np.arange(n)[:, None] + (m - n if align == "bottom_right" else 0)
    j = np.arange(m)
    keep = np.ones((n, m), bool)
    if left is not None:
        keep &= j >= i - left
    if right is not None:
        keep &= j <= i + right
    return keep


def test_clamped_windows_mask_the_same() -> None:
    """A window is cut to the longer sequence; for no shorter lengths does that move the mask."""
    bounds = (None, 0, 1, 3, 4, 5, 6, 10**12)
    for sq, sk in itertools.product((0, 1, 4), (0, 1, 5)):
        for align, left, right in itertools.product(("bottom_right", "top_left"), bounds, bounds):
            options = Options(align=align, window_left=left, window_right=right)  # type: ignore[arg-type]
            q, k = typed(1, sq, 1, 8), typed(1, sk, 1, 8)
            made = make_problem("forward", options, q, k, k)
            assert made.window_left is None or made.window_left <= max(sq, sk)
            assert made.window_right is None or made.window_right <= max(sq, sk)
            for n, m in itertools.product(range(sq + 1), range(sk + 1)):
                np.testing.assert_array_equal(
                    visible(align, made.window_left, made.window_right, n, m),
                    visible(align, left, right, n, m),
                    f"{align} {left} {right}: {sq} x {sk}, lengths {n} x {m}",
                )


@settings(deadline=None, max_examples=200)
@given(
    sq=st.integers(0, 50),
    sk=st.integers(0, 50),
    left=st.integers(0, 2**63),
    right=st.integers(0, 2**63),
    more=st.integers(1, 2**63),
)
def test_windows_wider_than_the_sequences_are_one_problem(
    sq: int, sk: int, left: int, right: int, more: int
) -> None:
    """Once a window covers both sequences, a still wider one is the same Problem."""
    left, right = left + max(sq, sk), right + max(sq, sk)
    a = problem(sq=sq, sk=sk, window=(left, right))
    assert a == problem(sq=sq, sk=sk, window=(left + more, right + more))
    # None stays None: which mask is compiled never depends on a length.
    assert a.window_left is not None
    assert problem(sq=sq, sk=sk, window=(left, None)).window_right is None
