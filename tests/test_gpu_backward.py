"""The CUDA backward against a naive float64 oracle on the card: shapes, laws, known failures."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gpu_oracle as oracle
import numpy as np
import pytest
from gpu_oracle import (
    MASK_OPTIONS,
    assert_gradients,
    assert_same,
    bits,
    check_backward,
    dense_backward,
    expected_gradients,
    fill_nan,
    host,
    inputs,
    lengths,
    normal,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from producers import Producer
from test_gpu_arrays import same_bits, torch_host, torch_of
from test_gpu_forward import EDGES, SHIELDS, axes, drawn, give_back_memory, opts, sees

from cufa2 import (
    FlashAttention2,
    UnsupportedError,
    arrays,
    attention,
    flash_attention,
    flash_attention_backward,
    launch,
    plan,
)
from cufa2.kernels import MASKS, SCORES
from cufa2.problem import DTYPES as ALL_DTYPES
from cufa2.testing import (
    EPS,
    assert_accurate,
    gradient_noise,
    make_inputs,
    numpy_dtype,
    plain_attention_backward,
    reference64,
    reference64_backward,
    time_gpu,
)

pytestmark = pytest.mark.gpu

ROWS = oracle.main_kernels("backward")
CELLS = tuple(dict.fromkeys((t, d) for row in ROWS for t in row.dtypes for d in row.head_dims))
DTYPES = tuple(dict.fromkeys(dtype for dtype, _ in CELLS))
HALVES = tuple(dtype for dtype in DTYPES if dtype in oracle.DTYPES)
MODES = (False, True)  # deterministic
INF = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}
SIZES = (64, 128, 256)


def problem(
    b: int, sq: int, sk: int, h: int, hk: int, d: int, dv: int, dtype: str, seed: int = 0
) -> tuple[Any, Any, Any, Any]:
    """do (B,Sq,H,Dv), q, k and v, standard normal."""
    return normal((b, sq, h, dv), dtype, 10**6 + seed), *inputs(b, sq, sk, h, hk, d, dv, dtype, seed)


def normal_lse(q: Any, seed: int) -> Any:
    """A gradient of lse: (B, H, Sq)."""
    b, sq, h, _ = q.shape
    return normal((b, h, sq), oracle.lse_dtype(q.dtype.name), seed)


def poison(q: Any, k: Any, v: Any) -> None:
    """Leave NaN in the memory that the next call takes for its results and its work."""
    import cupy

    attention.launcher.cache_clear()  # and with it the work buffers it keeps
    cupy.get_default_memory_pool().free_all_blocks()
    b, sq, h, _ = q.shape
    rows = b * h * -(-sq // 64) * 64
    sizes = [*(x.nbytes for x in (q, k, v)), 4 * rows, 4 * rows * q.shape[3], 1 << 23]
    blocks = [cupy.empty(max(n, 1), np.uint8) for n in sizes]
    blocks.append(cupy.empty(sum(sizes), np.uint8))
    fill_nan(*blocks)


def forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    options.pop("dlse", None)
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    return o, lse


def run(
    do: Any, q: Any, k: Any, v: Any, made: Any = None, *, wipe: bool = True, **options: Any
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of (B, S, H, D) arrays from memory full of NaN; made: o and lse if known."""
    deterministic = options.pop("deterministic", False)
    o, lse = forward(q, k, v, **options) if made is None else made
    if wipe:
        poison(q, k, v)
    grads = flash_attention_backward(
        do, q, k, v, o, lse, deterministic=deterministic, **options
    )
    dq, dk, dv = grads
    for name, x, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        assert (x.shape, x.dtype) == (like.shape, like.dtype), f"{name}: {x.shape}, {x.dtype}"
    return dq, dk, dv


def run_checked(do: Any, q: Any, k: Any, v: Any, name: str, **options: Any) -> None:
    """Both ways of running, each held to the accuracy rule."""
    made, expected = forward(q, k, v, **options), expected_gradients(do, q, k, v, **options)
    for deterministic in MODES:
        grads = run(do, q, k, v, made, deterministic=deterministic, **options)
        assert_gradients(grads, expected, f"{name}, deterministic={deterministic}")


def assert_same_grads(grads: Any, expected: Any, name: str) -> None:
    for which, x, y in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert_same(x, y, f"{name}: {which}")


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_oracle_agrees_with_the_dense_formulas_on_the_host(cp: Any, dtype: str) -> None:
    """The truth to float64's accuracy, and plain code as wrong as the host's plain code."""
    for (causal, window, softcap, scale), with_dlse, ragged in (
        ((True, None, 0.0, None), False, False),
        (("top_left", (5, 9), 3.0, -0.4), True, True),
        ((False, (2, -1), 0.0, 0), True, True),
        ((False, None, 1e30, 2.0), True, False),
    ):
        q, k, v, do = make_inputs((2, 19, 26, 4, 2, 20, 12), dtype, 5)
        options = opts(causal=causal, window=window, softcap=softcap, softmax_scale=scale)
        more: dict[str, Any] = {}
        if with_dlse:
            draw = np.random.default_rng(6).standard_normal((2, 4, 19))
            more["dlse"] = draw.astype(oracle.lse_dtype(dtype))
        if ragged:
            more["seqlens_q"] = np.array([19, 4], np.int32)
            more["seqlens_k"] = np.array([0, 26], np.int32)
        on_card = [oracle.to_device(x) for x in (do, q, k, v)]
        moved = {name: oracle.to_device(x) for name, x in more.items()}
        truth = reference64_backward(do, q, k, v, **options, **more)
        plain = plain_attention_backward(do, q, k, v, **options, **more)
        ours = dense_backward(*on_card, **options, **moved)
        low = dense_backward(*on_card, low=True, **options, **moved)
        exact = 2e-16 if dtype == "float64" else 1e-13
        for which, x, y, a, b in zip(("dq", "dk", "dv"), ours, truth, low, plain, strict=True):
            what = f"{dtype} {options} {which}"
            top = float(np.abs(y).max())
            np.testing.assert_allclose(x, y, rtol=exact, atol=exact * top, err_msg=what)
            errors = [float(np.abs(e.astype(y.dtype) - y).max()) for e in (a, b)]
            assert errors[0] <= 2.5 * errors[1] + EPS[dtype] * top, f"{what}: plain {errors}"
            assert errors[1] <= 2.5 * errors[0] + EPS[dtype] * top, f"{what}: plain {errors}"
        made = reference64(q, k, v, **options, **{n: x for n, x in more.items() if n != "dlse"})
        *_, dead, unseen = oracle._gradients(*on_card, False, **options, **moved)
        assert (dead == (made[1] == -np.inf).transpose(0, 2, 1)).all(), f"{dtype} {options}: dead"
        none = ~np.array(truth[2]).any(axis=-1)
        assert (unseen == none).all(), f"{dtype} {options}: keys that no row sees"


def test_the_gradient_check_can_fail(cp: Any) -> None:
    """One wrong value, one NaN, one gradient where nothing is seen."""
    do, q, k, v = problem(1, 40, 30, 2, 1, 32, 32, DTYPES[0])
    options = opts(causal=True)
    good = run(do, q, k, v, **options)
    check_backward(do, q, k, v, good, "good", **options)
    for which, (at, value) in itertools.product(
        range(3), (((0, 20, 0, 3), 0x1234), ((0, 20, 0, 3), 0xFFFF), ((0, 3, 0, 3), 0x0400))
    ):
        if which > 0 and at[1] == 3:
            continue  # key 3 is seen
        bad = [oracle.copy(x) for x in good]
        bits(bad[which])[at] = value << (8 * bad[which].itemsize - 16)
        with pytest.raises(AssertionError):
            check_backward(do, q, k, v, bad, "bad", **options)


# Random problems


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.integers(0, 4)) == 0:
        d, dv, dtype, deterministic = draw(st.sampled_from(oracle.UNEQUAL_BACKWARD))
        d, dv = (draw(st.sampled_from((n, n - 8, n - 5))) for n in (d, dv))
    else:
        deterministic = draw(st.booleans())
        dtype = draw(st.sampled_from(DTYPES))
        compiled = [0, *sorted({d for t, d in CELLS if t == dtype})]
        size = draw(st.integers(1, len(compiled) - 1))
        dims = st.integers(compiled[size - 1] + 1, compiled[size])
        whole = st.sampled_from((compiled[size], compiled[size], compiled[size] - 8))
        d, dv = draw(st.one_of(whole, dims)), draw(st.one_of(whole, dims))
    length = st.one_of(st.sampled_from(EDGES), st.integers(1, 300))
    sq, sk = draw(length), draw(length)
    layout = draw(st.sampled_from(("bshd", "bshd", "bhsd", "flat")))
    hk, group = (1, 1) if layout == "flat" else (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    # The rule compares two largest errors: there must be enough values to draw them from.
    b = max(draw(st.integers(1, 3)), -(-48 // (hk * min(sq, sk))))
    bound = st.one_of(st.sampled_from((None, -1, 0, 10**9)), st.integers(0, 150))
    real = {
        name: draw(
            st.one_of(
                st.none(),
                st.lists(
                    st.one_of(st.sampled_from((0, longest)), st.integers(0, longest)),
                    min_size=b,
                    max_size=b,
                ),
            )
        )
        for name, longest in (("seqlens_q", sq), ("seqlens_k", sk))
    }
    scale = draw(st.sampled_from((None, None, None, 0.0, -1.0, 2.0, 1e-3, 1e-42)))
    return {
        "shape": (b, sq, sk, hk * group, hk, d, dv),
        "dtype": dtype,
        "layout": layout,
        "lens": real,
        "amplitude": draw(st.sampled_from((1.0, 2.0))),
        "dlse": draw(st.booleans()),
        "deterministic": deterministic,
        "options": {
            "causal": draw(st.sampled_from((False, False, True, "bottom_right", "top_left"))),
            "window": draw(st.one_of(st.none(), st.tuples(bound, bound))),
            "softcap": draw(st.sampled_from((0.0, 0.0, 1.5, 5.0, 30.0))),
            "softmax_scale": scale and scale / math.sqrt(d),
        },
        "seed": draw(st.integers(0, 1000)),
    }


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=problems())
def test_random_problems(cp: Any, case: dict[str, Any]) -> None:
    b, sq, sk, h, hk, d, dv = case["shape"]
    layout, dtype, options = case["layout"], case["dtype"], case["options"]
    shapes = ((b, sq, h, dv), (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))
    do, q, k, v = (
        drawn(s, layout, dtype, 4 * case["seed"] + n, case["amplitude"] if n in (1, 2) else 1.0)
        for n, s in enumerate(shapes)
    )
    lens = {name: lengths(*n) for name, n in case["lens"].items() if n is not None}
    dlse = normal_lse(q, case["seed"]) if case["dlse"] else None
    padded: list[tuple[Any, str]] = [(q, "seqlens_q"), (k, "seqlens_k"), (v, "seqlens_k")]
    for x, name in padded:
        for i, n in enumerate(case["lens"][name] or ()):
            fill_nan(x[i, n:])
    as_given: list[Any] = [axes(x, layout) for x in (do, q, k, v)]
    call = {**options, **lens, "layout": "bhsd" if layout == "bhsd" else "bshd"}
    o, lse = flash_attention(*as_given[1:], return_lse=True, **call)
    for i, n in enumerate(case["lens"]["seqlens_q"] or ()):
        fill_nan(do[i, n:], axes(o, layout)[i, n:])
        for x in (lse, dlse):
            if x is not None:
                fill_nan(x[i, ..., n:])
    poison(q, k, v)
    given_dlse = dlse[:, 0] if layout == "flat" and dlse is not None else dlse
    grads = flash_attention_backward(
        *as_given, o, lse, dlse=given_dlse, deterministic=case["deterministic"], **call
    )
    for x, like, name in zip(grads, as_given[1:], "qkv", strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype), f"d{name}: {x.shape}, {x.dtype}"
    grads = [axes(x, layout) for x in grads]
    check_backward(do, q, k, v, grads, str(case), dlse=dlse, **options, **lens)


@pytest.mark.parametrize(("dtype", "dim"), CELLS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_kernel_of_this_card(cp: Any, mask: str, score: str, dtype: str, dim: int) -> None:
    options = {**MASK_OPTIONS[mask], "softcap": 2.5 if score == "softcap" else 0.0}
    for n, (sq, sk) in enumerate(((200, 333), (129, 64), (97, 97))):
        do, q, k, v = problem(2, sq, sk, 4, 2, dim, dim, dtype, n)
        run_checked(do, q, k, v, f"{dtype} d{dim} {mask} {score} {sq}x{sk}", **options)


def force_tile(monkeypatch: pytest.MonkeyPatch, tile: Any) -> None:
    """Make the planner take this tile for the row that has it, as it does on other cards."""
    choose = plan.choose

    def forced(*args: Any) -> Any:
        chosen = choose(*args)
        variants = (
            replace(v, tile=tile) if tile in v.kernel.tiles and v.kernel.stage != "delta" else v
            for v in chosen.variants
        )
        return replace(chosen, variants=tuple(variants))

    monkeypatch.setattr(plan, "choose", forced)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_hundred_seeds(cp: Any, dtype: str) -> None:
    """The default, whose sums come in any order, keeps the rule every time."""
    for seed in range(200):
        do, q, k, v = problem(1, 150, 190, 4, 2, 64, 64, dtype, seed)
        grads = run(do, q, k, v, causal=True, wipe=seed < 5)
        check_backward(do, q, k, v, grads, f"seed {seed}", causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", SIZES)
def test_case_30_deterministic_repeats_to_the_bit(cp: Any, dim: int, dtype: str) -> None:
    busy = cp.cuda.Stream(non_blocking=True)
    noise = cp.zeros(1 << 24, np.uint8)
    short = opts(seqlens_q=lengths(1025, 0, 700), seqlens_k=lengths(900, 1023, 1))
    for (b, sq, sk), options in (
        ((2, 2049, 2049), opts(causal=True)),
        ((3, 1025, 1023), opts(causal=True, softcap=5.0, **short)),
        ((3, 513, 700), opts(window=(300, 40))),
    ):
        do, q, k, v = problem(b, sq, sk, 8, 2, dim, dim, dtype)
        dlse = normal_lse(q, 1)
        made = forward(q, k, v, **options)
        call = opts(dlse=dlse, deterministic=True, **options)
        first = run(do, q, k, v, made, **call)
        wrong = cp.zeros(1, np.int64)
        for n in range(200):
            with busy:
                oracle.spin(0.05)
                noise[...] = n
            grads = run(do, q, k, v, made, wipe=False, **call)
            for x, y in zip(grads, first, strict=True):
                wrong += (bits(x) != bits(y)).sum()
        moved = int(wrong[0])
        assert moved == 0, f"d{dim} {dtype} {options}: {moved} values of 200 runs moved"
        if sq < 1000:
            expected = expected_gradients(do, q, k, v, dlse=dlse, **options)
            assert_gradients(first, expected, f"d{dim} {dtype} {options}")
            for n in range(30):
                with busy:
                    noise[...] = n
                grads = run(do, q, k, v, made, wipe=False, dlse=dlse, **options)
                assert_gradients(grads, expected, f"d{dim} {dtype} {options}, run {n}")


# Laws


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_may_come_in_any_order(cp: Any, dtype: str) -> None:
    do, q, k, v = problem(2, 130, 333, 4, 2, 64, 64, dtype)
    order = np.random.default_rng(0).permutation(333)
    back = cp.asarray(np.argsort(order))
    mixed: Any = [bits(x)[:, cp.asarray(order)].view(x.dtype) for x in (k, v)]
    for deterministic in MODES:
        dq, *moved = run(do, q, *mixed, deterministic=deterministic)
        dk, dv = (bits(x)[:, back].view(x.dtype) for x in moved)
        check_backward(do, q, k, v, (dq, dk, dv), f"permuted, deterministic={deterministic}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(16, 2), (12, 2), (12, 3), (8, 1)])
def test_grouped_heads_are_repeated_heads_summed(
    cp: Any, heads: tuple[int, int], dtype: str
) -> None:
    """Case 37 too: the gradients of repeated keys, summed over the group in float64."""
    h, hk = heads
    do, q, k, v = problem(2, 70, 141, h, hk, 64, 64, dtype)
    wide: Any = [cp.repeat(bits(x), h // hk, axis=2).view(x.dtype) for x in (k, v)]
    for options in (opts(), opts(causal=True)):
        expected = expected_gradients(do, q, k, v, **options)
        for deterministic in MODES:
            what = f"{heads} heads, {options}, deterministic={deterministic}"
            call = opts(deterministic=deterministic, **options)
            assert_gradients(run(do, q, k, v, **call), expected, what)
            dq, *parts = run(do, q, *wide, **call)
            shape = (2, 141, hk, h // hk, 64)
            dk, dv = (host(x).astype(np.float64).reshape(shape).sum(axis=3) for x in parts)
            summed = [dq, *(oracle.to_device(x.astype(q.dtype)) for x in (dk, dv))]
            assert_gradients(summed, expected, f"{what}, repeated")


@pytest.mark.parametrize("dtype", HALVES)
def test_case_37_groups_are_rounded_once(cp: Any, dtype: str) -> None:
    """With one key dv is the sum of do. Rounding a head's part, or each sum, would show."""
    one = 2 / EPS[dtype]  # where a unit is 2: 2049 for float16, 257 for bfloat16 cannot be written
    for group, rows in ((8, 2), (2, 2), (6, 5)):
        shape = (1, rows, group, 64)
        values = np.full(shape, 1.0)
        values[:, 0] = one + 2  # a head's sum lies halfway between two numbers, or near it
        do = oracle.to_device(values.astype(numpy_dtype(dtype)))
        q, k, v = inputs(1, rows, 1, group, 1, 64, 64, dtype)
        bits(q)[...] = 0
        total = np.float32(host(do).astype(np.float64).sum(axis=(1, 2)))
        expected = total.astype(numpy_dtype(dtype)).astype(np.float64)
        for deterministic in MODES:
            dv = host(run(do, q, k, v, deterministic=deterministic)[2]).astype(np.float64)
            what = f"{group} heads of {rows} rows, deterministic={deterministic}"
            np.testing.assert_array_equal(dv[:, 0, 0], expected[:, :], what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seqlen", "cut"), [(2, 1), (128, 64), (300, 100), (300, 1)])
def test_split_keys_merge_through_lse(cp: Any, seqlen: int, cut: int, dtype: str) -> None:
    """o = w o' + w' o'' with w = exp(lse' - lse): the parts get do' = w do and, through lse',
    dlse' = w do.(o' - o). Their gradients together are those of the whole."""
    do, q, k, v = problem(4, 70, seqlen, 4, 2, 64, 64, dtype)
    parts = [(k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:])]
    made = [forward(q, *part) for part in parts]
    os, ls = ([host(x[n]).astype(np.float64) for x in made] for n in range(2))
    total = np.logaddexp(*ls)
    weights = [np.exp(lse - total).transpose(0, 2, 1)[..., None] for lse in ls]
    merged = sum(w * o for w, o in zip(weights, os, strict=True))
    do64, grads, plain = host(do).astype(np.float64), [], []
    for part, results, w, o in zip(parts, made, weights, os, strict=True):
        grad_o = oracle.to_device((w * do64).astype(do.dtype))
        grad_lse = (do64 * w * (o - merged)).sum(axis=-1).transpose(0, 2, 1)
        dlse = oracle.to_device(grad_lse.astype(oracle.lse_dtype(dtype)))
        grads.append(run(grad_o, q, *part, results, dlse=dlse))
        check_backward(grad_o, q, *part, grads[-1], f"cut at {cut}, a part", dlse=dlse)
        plain.append(dense_backward(grad_o, q, *part, low=True, dlse=dlse))
    exact = dense_backward(do, q, k, v)
    noise = gradient_noise(*(host(x) for x in (do, q, k, v)))
    whole = [joined([tuple(host(x) for x in g) for g in grads]), joined(plain)]
    for name, x, y, ref in zip(("dq", "dk", "dv"), *whole, exact, strict=True):
        what = f"S={seqlen} cut at {cut}, merged: {name}"
        assert_accurate(x.astype(do.dtype), ref, y, what, noise if name != "dv" else 0.0)


def joined(parts: Any) -> tuple[Any, Any, Any]:
    """Gradients of parts of the keys: dq adds up, dk and dv lie side by side. In float64."""
    dq, dk, dv = ([np.asarray(g, np.float64) for g in x] for x in zip(*parts, strict=True))
    return sum(dq), np.concatenate(dk, axis=1), np.concatenate(dv, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_keys_under_the_lse_of_all(cp: Any, dtype: str) -> None:
    """With o and lse of the whole a part's dk and dv are the whole's, and dq adds up."""
    do, q, k, v = problem(2, 130, 333, 4, 2, 64, 64, dtype)
    made = forward(q, k, v)
    grads = []
    for cut in (slice(0, 100), slice(100, 333)):
        results = run(do, q, k[:, cut], v[:, cut], made, deterministic=cut.start == 0)
        grads.append(tuple(host(x) for x in results))
    whole = [oracle.to_device(x.astype(do.dtype)) for x in joined(grads)]
    check_backward(do, q, k, v, whole, "two parts of the keys")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", SIZES)
def test_batch_mates_do_not_matter(cp: Any, dim: int, dtype: str) -> None:
    do, q, k, v = problem(5, 150, 170, 4, 2, dim, dim, dtype)
    lens_q, lens_k = [150, 3, 0, 128, 77], [170, 0, 33, 64, 170]
    bad: Any = [oracle.copy(x) for x in (do, q, k, v)]
    for x in bad:
        fill_nan(x[1:2], x[3:])
    for options in (opts(), opts(causal=True, softcap=3.0), opts(window=(20, 20))):
        both = opts(seqlens_q=lengths(*lens_q), seqlens_k=lengths(*lens_k))
        together = run(do, q, k, v, deterministic=True, **options, **both)
        among = run(*bad, deterministic=True, **options, **both)
        for i in range(5):
            one: Any = [x[i : i + 1] for x in (do, q, k, v)]
            lens = opts(seqlens_q=lengths(lens_q[i]), seqlens_k=lengths(lens_k[i]))
            alone = run(*one, deterministic=True, **options, **lens)
            mine = [x[i : i + 1] for x in together]
            assert_same_grads(mine, alone, f"sequence {i} alone, {options}")
            check_backward(*one, mine, f"sequence {i}, {options}", **options, **lens)
            if i in (0, 2):
                assert_same_grads([x[i : i + 1] for x in among], mine, f"{i} among NaN, {options}")
            n, m = lens_q[i], lens_k[i]
            cut: Any = [one[0][:, :n], one[1][:, :n], one[2][:, :m], one[3][:, :m]]
            grads = run(*cut, **options)
            check_backward(*cut, grads, f"sequence {i} cut, {options}", **options)


# Memory layouts

LAID: dict[str, Callable[[Any], Any]] = {
    "plain": lambda y: y.copy(),
    "every second row": lambda y: apart(y, 1),
    "heads first": lambda y: y.swapaxes(1, 2).copy().swapaxes(1, 2),
    "rows backwards": lambda y: y[:, ::-1].copy()[:, ::-1],
    "wide rows": lambda y: wide_rows(y),
    # Those a kernel cannot read in place:
    "odd address": lambda y: odd_address(y),
    "columns backwards": lambda y: y[..., ::-1].copy()[..., ::-1],
    "every second column": lambda y: apart(y, -1),
    "transposed": lambda y: y.transpose().copy().transpose(),
}
IN_PLACE = ("plain", "every second row", "heads first", "rows backwards", "wide rows")


def filled(shape: tuple[int, ...], like: Any) -> Any:
    """Bits of NaN."""
    import cupy

    x = cupy.empty(shape, like.dtype)
    fill_nan(x)
    return x


def apart(y: Any, axis: int) -> Any:
    shape = list(y.shape)
    shape[axis] *= 2
    cut = [slice(None)] * y.ndim
    cut[axis] = slice(None, None, 2)
    view = filled(tuple(shape), y)[tuple(cut)]
    view[...] = y
    return view


def wide_rows(y: Any) -> Any:
    view = filled((*y.shape[:-1], y.shape[-1] + 16), y)[..., 8:-8]
    view[...] = y
    return view


def odd_address(y: Any) -> Any:
    view = filled((y.size + 1,), y)[1:].reshape(y.shape)
    view[...] = y
    return view


def laid(x: Any, kind: str) -> Any:
    """The same values, lying otherwise; NaN between them."""
    return LAID[kind](bits(x)).view(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 66])
def test_every_tensor_has_its_own_strides(cp: Any, dim: int, dtype: str) -> None:
    do, q, k, v = problem(2, 70, 90, 4, 2, dim, dim, dtype)
    options = opts(causal=True)
    o, lse = forward(q, k, v, **options)
    dlse = normal_lse(q, 3)
    tensors = (do, q, k, v, o, lse, dlse)
    expected = expected_gradients(do, q, k, v, dlse=dlse, **options)
    first = run(do, q, k, v, (o, lse), dlse=dlse, deterministic=True, **options)
    assert_gradients(first, expected, "contiguous")
    kinds = list(LAID)
    for n in range(2 * len(kinds)):
        chosen = [kinds[(n + (2 * t + 1) * (n // len(kinds)) + t) % len(kinds)] for t in range(7)]
        a, b, c, d, e, f, g = (laid(x, kind) for x, kind in zip(tensors, chosen, strict=True))
        grads = run(a, b, c, d, (e, f), dlse=g, deterministic=True, **options)
        assert_same_grads(grads, first, f"{chosen}")
        grads = run(a, b, c, d, (e, f), dlse=g, **options)
        assert_gradients(grads, expected, f"{chosen}, default")
    for kind in kinds:
        moved: Any = [laid(x, kind) for x in tensors]
        a, b, c, d, e, f, g = moved
        before = arrays.copy_count()
        grads = run(a, b, c, d, (e, f), dlse=g, deterministic=True, **options)
        copies = arrays.copy_count() - before
        assert_same_grads(grads, first, f"all {kind}")
        if dim % 8 == 0:
            assert (copies == 0) == (kind in IN_PLACE), f"all {kind}: {copies} copies"
        for x, y, name in zip(moved, tensors, "do q k v o lse dlse".split(), strict=True):
            assert_same(x, y, f"{name} after the call")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_that_is_one_number(cp: Any, dtype: str) -> None:
    """do with all strides 0, as the gradient of a sum is."""
    _, q, k, v = problem(2, 70, 90, 4, 2, 64, 64, dtype)
    for shape in ((), (64,), (1, 70, 1, 1)):
        few = normal((1, *shape), dtype, 5)[0]
        do = cp.broadcast_to(bits(few), q.shape).view(q.dtype)
        assert 0 in do.strides
        full = oracle.to_device(host(do))
        made = forward(q, k, v)
        grads = run(do, q, k, v, made, deterministic=True)
        assert_same_grads(grads, run(full, q, k, v, made, deterministic=True), f"do {shape}")
        check_backward(full, q, k, v, run(do, q, k, v, made), f"do {shape}")


# Known failures of other libraries, by their number in the list of cases


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_01_more_queries_than_keys(cp: Any, dtype: str) -> None:
    for sq, sk in ((5, 2), (2, 5), (130, 200), (256, 3), (129, 128)):
        q = normal((3, sq, 2, 64), dtype, 1, 3.0)
        k, v = normal((3, sk, 2, 64), dtype, 2), normal((3, sk, 2, 64), dtype, 3)
        ones = oracle.to_device(np.ones(q.shape, q.dtype))
        for do, causal in itertools.product(
            (ones, normal(q.shape, dtype, 4)), (True, "top_left")
        ):
            run_checked(do, q, k, v, f"{sq}x{sk} causal={causal}", causal=causal)
        dark, made = max(0, sq - sk), forward(q, k, v, causal=True)
        for deterministic in MODES:
            call = opts(causal=True, deterministic=deterministic)
            clean = run(ones, q, k, v, made, **call)
            assert not bits(clean[0][:, :dark]).any(), f"{sq}x{sk}: dq of rows without keys"
            hurt = [oracle.copy(x) for x in (ones, q)]
            fill_nan(*(x[:, :dark] for x in hurt))
            grads = run(*hurt, k, v, made, **call)
            for x, y in zip(grads, clean, strict=True):
                near = np.abs(host(x).astype(np.float64) - host(y).astype(np.float64)).max()
                assert near < 0.1, f"{sq}x{sk}: NaN of rows without keys leaks ({near})"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", SIZES)
def test_case_04_large_equal_logits(cp: Any, dim: int, dtype: str) -> None:
    """dv is then the mean of the gradients of the rows that see the key."""
    for q0, k0, causal in ((1.0, -1600.0, True), (16.0, -50000.0, False)):
        q = np.zeros((1, 130, 2, dim), numpy_dtype(dtype))
        k = np.zeros((1, 200, 2, dim), numpy_dtype(dtype))
        q[..., 0], k[..., 0] = q0, k0
        on_q, on_k = (oracle.to_device(x) for x in (q, k))
        do, v = normal(q.shape, dtype, 5), normal(k.shape, dtype, 4)
        seen = sees(opts(causal=causal), 130, 200)
        weights = seen / seen.sum(axis=1, keepdims=True)
        expected = np.einsum("ij,ihd->jhd", weights, host(do).astype(np.float64)[0])
        # lse in float32 is exact to half a unit at its own size.
        logit = q0 * k0 / math.sqrt(dim)
        unit = EPS[oracle.lse_dtype(dtype)] * abs(logit) * 2
        for deterministic in MODES:
            name = f"logits of {logit}, deterministic={deterministic}"
            grads = run(do, on_q, on_k, v, causal=causal, deterministic=deterministic)
            assert all(bool(cp.isfinite(x.astype("float32")).all()) for x in grads), name
            dv = host(grads[2]).astype(np.float64)[0]
            bound = (unit + EPS[dtype]) * np.abs(expected).max()
            assert np.abs(dv - expected).max() <= bound, f"{name}: {np.abs(dv - expected).max()}"


def test_case_05_products_beyond_float16(cp: Any) -> None:
    for dtype, deterministic in itertools.product(DTYPES, MODES):
        q = oracle.to_device(np.full((1, 70, 2, 128), 256, numpy_dtype(dtype)))
        do, v = normal(q.shape, dtype, 2), normal(q.shape, dtype, 1)
        grads = run(do, q, oracle.copy(q), v, deterministic=deterministic)
        for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
            assert np.isfinite(host(x).astype(np.float64)).all(), f"{dtype}: {name}"
        mean = host(do).astype(np.float64).sum(axis=1, keepdims=True) / 70
        error = np.abs(host(grads[2]).astype(np.float64) - mean).max()
        assert error < 0.1 * np.abs(mean).max(), f"{dtype}: dv is off by {error}"  # lse is 741455


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize(
    "where", ["q nan", "k nan", "v nan", "do nan", "q inf", "k inf", "v inf", "do inf"]
)
def test_case_06_bad_values_reach_who_sees_them(
    cp: Any, where: str, dim: int, dtype: str
) -> None:
    """NaN is exactly where the formulas have it. What becomes of an infinity is left open, but
    not who gets it."""
    name, kind = where.split()
    for (mask, options), (sq, sk, at) in itertools.product(
        SHIELDS.items(), ((8, 8, 2), (150, 170, 77))
    ):
        tensors = dict(zip(("do", "q", "k", "v"), problem(1, sq, sk, 2, 1, dim, dim, dtype)))
        value = INF[dtype] if kind == "inf" else (1 << 8 * tensors["q"].itemsize) - 1
        bits(tensors[name])[:, at, :, 3 if kind == "inf" else slice(None)] = value
        do, q, k, v = tensors.values()
        seen = sees(options, sq, sk)
        hit = np.arange(sq) == at if name in ("do", "q") else seen[:, at]
        reached = seen[hit].any(axis=0)  # keys that a hit row sees
        with np.errstate(all="ignore"):
            expected = expected_gradients(do, q, k, v, **options)
        made = forward(q, k, v, **options)
        for deterministic in MODES:
            what = f"{where} at {at}, {mask}, {sq}x{sk}, deterministic={deterministic}"
            grads = run(do, q, k, v, made, deterministic=deterministic, **options)
            if kind == "nan":
                assert_gradients(grads, expected, what)
                lit = hit & seen.any(axis=1)
                if lit.any():
                    assert np.isnan(host(grads[0]).astype(np.float32)[0, lit]).all(), what
                continue
            shielded = []
            for x, dark in zip(grads, (hit, reached, reached), strict=True):
                y = oracle.copy(x)
                bits(y)[:, cp.asarray(np.flatnonzero(dark))] = 0
                shielded.append(y)
            rest = [
                [np.where(dark[None, :, None, None], 0, x) for x, dark in zip(g, darks)]
                for g, darks in (
                    (expected.exact, (hit, reached, reached)),
                    (expected.plain, (hit, reached, reached)),
                )
            ]
            limited = expected._replace(exact=tuple(rest[0]), plain=tuple(rest[1]))
            assert_gradients(shielded, limited, what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_case_06_padding_may_hold_anything(cp: Any, dim: int, dtype: str) -> None:
    real_q, real_k = (61, 200, 1), (130, 1, 201)
    lens = opts(seqlens_q=lengths(*real_q), seqlens_k=lengths(*real_k))
    do, q, k, v = problem(3, 200, 201, 2, 1, dim, dim, dtype)
    nan = (1 << 8 * q.itemsize) - 1
    for options in MASK_OPTIONS.values():
        o, lse = forward(q, k, v, **options, **lens)
        dlse, results = normal_lse(q, 2), []
        for value in (0, nan, INF[dtype]):
            a, b, c, d, e, f, g = (oracle.copy(x) for x in (do, q, k, v, o, lse, dlse))
            for i, (n, m) in enumerate(zip(real_q, real_k, strict=True)):
                for x in (a, b, e):
                    bits(x)[i, n:] = value
                for x in (c, d):
                    bits(x)[i, m:] = value
                fill_nan(*(x[i, :, n:] for x in (f, g) if value))
            call = opts(dlse=g, deterministic=True, **options, **lens)
            results.append(run(a, b, c, d, (e, f), **call))
            rough = run(a, b, c, d, (e, f), dlse=g, **options, **lens)
            what = f"d{dim} {options}, {value:#x} in the padding"
            check_backward(do, q, k, v, rough, what, dlse=dlse, **options, **lens)
        for other in results[1:]:
            assert_same_grads(other, results[0], f"d{dim} {options}")
        check_backward(
            do, q, k, v, results[0], f"d{dim} {options}", dlse=dlse, **options, **lens
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_22_head_counts(cp: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*args: Any) -> Any:
        raise AssertionError("a kernel was loaded for a call that is wrong")

    monkeypatch.setattr(launch, "load", launched)
    for h, hk in ((6, 4), (3, 2), (33, 2), (2, 4), (4, 0), (0, 4)):
        do, q, k, v = problem(1, 5, 7, h, hk, 64, 64, dtype)
        with pytest.raises(ValueError, match=rf"num_heads={h} .*num_heads_kv={hk}"):
            flash_attention_backward(do, q, k, v, do, normal_lse(q, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_23_scale_zero_and_negative(cp: Any, dtype: str) -> None:
    do, q, k, v = problem(2, 90, 120, 2, 1, 64, 64, dtype)
    for causal, softcap in itertools.product((False, True), (0.0, 5.0)):
        options = opts(causal=causal, softcap=softcap)
        for zero in (0, -0.0, np.float32(0)):
            run_checked(do, q, k, v, f"{zero!r} {options}", softmax_scale=zero, **options)
            for deterministic in MODES:
                call = opts(softmax_scale=zero, deterministic=deterministic, **options)
                dq, dk, dv = (host(x).astype(np.float32) for x in run(do, q, k, v, **call))
                assert not dq.any(), f"{zero!r} {options}: dq"
                assert not dk.any(), f"{zero!r} {options}: dk"
                assert dv.any(), f"{zero!r} {options}: dv"
        big = normal(q.shape, dtype, 7, 4.0)
        run_checked(do, big, k, v, f"-0.3 {options}", softmax_scale=-0.3, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 66])
def test_case_25_empty_sizes(cp: Any, dim: int, dtype: str) -> None:
    shapes = ((0, 5, 7, 2, 1), (2, 0, 7, 2, 1), (2, 5, 0, 2, 1), (0, 0, 0, 2, 1), (2, 5, 7, 0, 0))
    for shape, causal, deterministic in itertools.product(
        shapes, (False, True, "top_left"), MODES
    ):
        b, sq, sk, h, hk = shape
        do, q, k, v = problem(b, sq, sk, h, hk, dim, dim, dtype)
        call: dict[str, Any] = opts(causal=causal)
        grads = run(do, q, k, v, deterministic=deterministic, **call)
        made = forward(q, k, v, **call)
        wrapped: Any = [Producer(x) for x in (do, q, k, v, *made)]
        for results in (grads, flash_attention_backward(*wrapped, **call)):
            for x, like in zip(results, (q, k, v), strict=True):
                assert (x.shape, x.dtype) == (like.shape, like.dtype), f"{shape}"
                assert not bits(x).any(), f"{shape}: a gradient of nothing"
    do, q, k, v = problem(2, 50, 70, 2, 1, dim, dim, dtype)
    run_checked(do, q, k, v, "a plain call afterwards")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 256])
def test_case_31_sequences_of_length_zero(cp: Any, dim: int, dtype: str) -> None:
    do, q, k, v = problem(4, 5, 7, 9, 3, dim, dim, dtype)
    pairs = (((0, 5, 0, 4), (3, 0, 7, 2)), ((0, 5, 0, 4), (0, 0, 0, 0)), ((0, 1, 0, 1), (7,) * 4))
    for (lens_q, lens_k), causal, deterministic in itertools.product(pairs, (False, True), MODES):
        lens = opts(seqlens_q=lengths(*lens_q), seqlens_k=lengths(*lens_k), causal=causal)
        a, b, c, d = (oracle.copy(x) for x in (do, q, k, v))
        for i in range(4):
            fill_nan(*(x[i, lens_q[i] :] for x in (a, b)), *(x[i, lens_k[i] :] for x in (c, d)))
        what = f"{lens_q} {lens_k} causal={causal} deterministic={deterministic}"
        grads = run(a, b, c, d, deterministic=deterministic, **lens)
        check_backward(a, b, c, d, grads, what, **lens)
        rows, keys = slice(0, lens_q[3]), slice(0, lens_k[3])
        last: Any = (do[3:, rows], q[3:, rows], k[3:, keys], v[3:, keys])
        mine = (grads[0][3:, rows], grads[1][3:, keys], grads[2][3:, keys])
        check_backward(*last, mine, f"the last of {what}", causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_35_softcap_comes_before_the_mask(cp: Any, dtype: str) -> None:
    do, q, k, v = problem(4, 4, 4, 2, 2, 64, 64, dtype)
    bits(q)[...] = 0
    bits(v)[:, 2:] = bits(oracle.to_device(np.full((1, 2, 1, 64), 3e4, v.dtype)))
    for options in (opts(seqlens_k=lengths(2, 2, 2, 2)), opts(causal="top_left", window=(1, 0))):
        run_checked(do, q, k, v, str(options), softcap=2.0, **options)
    do, q, k, v = problem(2, 90, 120, 4, 2, 64, 64, dtype)
    bits(q)[...] = bits(normal(q.shape, dtype, 1, 3.0))  # logits of about 3
    for options in (opts(), opts(seqlens_q=lengths(90, 20), seqlens_k=lengths(50, 120))):
        run_checked(do, q, k, v, f"softcap 1.5 {options}", softcap=1.5, **options)
    made = forward(q, k, v)
    off, none = (run(do, q, k, v, made, deterministic=True, **x) for x in ({"softcap": 0}, {}))
    assert_same_grads(off, none, "softcap 0 is off")
    for softcap in (0.01, 50.0, 1e4, 1e30):
        run_checked(do, q, k, v, f"softcap={softcap}", softcap=softcap, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_36_gradient_through_lse(cp: Any, dtype: str) -> None:
    for (sq, sk), options in (
        ((3, 5), opts()),
        ((90, 60), opts(causal=True)),  # with empty rows
        ((90, 120), opts(seqlens_q=lengths(0, 90, 7, 50), seqlens_k=lengths(9, 0, 120, 77))),
    ):
        do, q, k, v = problem(4, sq, sk, 4, 2, 64, 64, dtype)
        made, dlse = forward(q, k, v, **options), normal_lse(q, 8)
        run_checked(do, q, k, v, f"{sq}x{sk} {options}", dlse=dlse, **options)
        hurt = oracle.copy(dlse)
        bits(hurt)[made[1] == -np.inf] = (1 << 8 * dlse.itemsize) - 1
        for deterministic in MODES:
            call = opts(deterministic=deterministic, **options)
            grads = run(do, q, k, v, made, dlse=hurt, **call)
            what = f"{sq}x{sk} {options}: NaN for rows without keys"
            check_backward(do, q, k, v, grads, what, dlse=dlse, **options)
            without = run(do, q, k, v, made, **call)
            zeros = run(do, q, k, v, made, dlse=cp.zeros_like(dlse), **call)
            assert_same(grads[2], without[2], f"{sq}x{sk} {options}: dv does not depend on dlse")
            if deterministic:
                assert_same_grads(zeros, without, f"{sq}x{sk} {options}: dlse = 0")


def finite_differences(tensors: Any, dlse: Any, which: int, **options: Any) -> Any:
    """Central differences of sum(o do) + sum(lse dlse) by q, k or v, in float64."""
    q, k, v, do = (x.astype(np.float64) for x in tensors)
    x, step = (q, k, v)[which], 1e-5

    def loss() -> Any:
        o, lse = reference64(q, k, v, **options)
        return (o * do).sum() + (np.where(np.isinf(lse), 0, lse) * dlse).sum()

    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        kept = x[at]
        x[at] = kept + step
        up = loss()
        x[at] = kept - step
        out[at] = (up - loss()) / (2 * step)
        x[at] = kept
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, opts(causal=True), opts(softcap=1.5), opts(window=(1, 1), softmax_scale=-0.8)]
)
def test_case_38_one_to_five_tokens(cp: Any, options: Any, dtype: str) -> None:
    unit = 4 * EPS[dtype]
    for n, (sq, sk) in enumerate(((1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (3, 17), (5, 5))):
        tensors = make_inputs((1, sq, sk, 2, 1, 4, 4), dtype, n)
        q, k, v, do = (oracle.to_device(x) for x in tensors)
        draw = np.random.default_rng(n).standard_normal((1, 2, sq)) * (n % 2)
        dlse = oracle.to_device(draw.astype(oracle.lse_dtype(dtype)))
        truth = [
            finite_differences(tensors, host(dlse).astype(np.float64), which, **options)
            for which in range(3)
        ]
        for deterministic in MODES:
            grads = run(do, q, k, v, dlse=dlse, deterministic=deterministic, **options)
            for name, x, expected in zip(("dq", "dk", "dv"), grads, truth, strict=True):
                bound = unit * max(1.0, float(np.abs(expected).max())) + 1e-7
                error = float(np.abs(host(x).astype(np.float64) - expected).max())
                what = f"{sq}x{sk} {options} deterministic={deterministic}: {name}"
                assert error <= bound, f"{what} is off by {error:.2e}, {bound:.2e} allowed"


# Blocks outside the mask are skipped


@pytest.mark.parametrize("deterministic", MODES)
def test_skipped_blocks_cost_nothing(cp: Any, deterministic: bool) -> None:
    do, q, k, v = problem(1, 8192, 8192, 16, 16, 128, 128, "bfloat16")

    def milliseconds(**options: Any) -> float:
        made = forward(q, k, v, **options)
        call = opts(deterministic=deterministic, **options)
        return time_gpu(
            lambda: flash_attention_backward(do, q, k, v, *made, **call), warmup=3, repeats=7
        )

    full = milliseconds()
    for options in (
        opts(window=(256, 0)),
        opts(window=(100, 100)),
        opts(window=(256, None), causal=True),
        opts(seqlens_k=lengths(256)),
        opts(seqlens_q=lengths(256)),
        opts(causal="top_left", seqlens_q=lengths(512)),
    ):
        narrow = milliseconds(**options)
        assert 3 * narrow < full, f"{options}: {narrow:.3f} ms, without: {full:.3f} ms"
    half = milliseconds(causal=True)
    assert half < 0.75 * full, f"causal: {half:.3f} ms, without: {full:.3f} ms"


# Sizes


@pytest.mark.parametrize("batch_and_heads", [(70000, 1, 1), (1, 70000, 35000), (7000, 10, 10)])
def test_more_heads_than_a_grid_axis(cp: Any, batch_and_heads: tuple[int, int, int]) -> None:
    b, h, hk = batch_and_heads
    do, q, k, v = problem(b, 17, 19, h, hk, 32, 32, "bfloat16")
    made, group = forward(q, k, v, causal=True), h // hk
    for deterministic in MODES:
        grads = run(do, q, k, v, made, causal=True, deterministic=deterministic)
        for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
            assert not bool((bits(x) == 0xFFFF).any()), f"{name} was not written everywhere"
        few, heads = min(b, 20), min(hk, 20)
        for batch, head in itertools.product({0, b - few}, {0, hk - heads}):
            one, all_ = slice(batch, batch + few), slice(head * group, (head + heads) * group)
            mine = slice(head, head + heads)
            part: Any = (do[one, :, all_], q[one, :, all_], k[one, :, mine], v[one, :, mine])
            got = (grads[0][one, :, all_], grads[1][one, :, mine], grads[2][one, :, mine])
            what = f"B={b} H={h}, from {batch} and {head}, deterministic={deterministic}"
            check_backward(*part, got, what, causal=True)


@pytest.mark.parametrize("deterministic", MODES)
def test_sequences_longer_than_65535(cp: Any, deterministic: bool) -> None:
    """Gradients depend on a window's width to both sides: parts are checked as problems."""
    s, width = 70001, 100
    do, q, k, v = problem(1, s, s, 1, 1, 64, 64, "bfloat16")
    options = opts(window=(width, 0))
    grads = run(do, q, k, v, deterministic=deterministic, **options)
    for x in grads:
        assert not bool((bits(x) == 0xFFFF).any()), "a gradient was not written everywhere"
    for begin in (0, 65300, s - 600):
        cut = slice(begin, begin + 600)
        part: Any = [x[:, cut] for x in (do, q, k, v)]
        expected = expected_gradients(*part, **options)
        inner_q = slice(0 if begin == 0 else width, 600)
        # Rows near the beginning lack keys, and so their own lse; keys there and near the end
        # lack rows.
        inner_k = slice(inner_q.start, 600 if begin == s - 600 else 600 - width)
        parts = (inner_q, inner_k, inner_k)
        limited = expected._replace(
            exact=tuple(x[:, y] for x, y in zip(expected.exact, parts, strict=True)),
            plain=tuple(x[:, y] for x, y in zip(expected.plain, parts, strict=True)),
            dead=expected.dead[:, inner_q],
            unseen=expected.unseen[:, inner_k],
        )
        got = [x[:, cut][:, y] for x, y in zip(grads, parts, strict=True)]
        assert_gradients(got, limited, f"rows from {begin}, deterministic={deterministic}")


@pytest.mark.parametrize("deterministic", MODES)
def test_more_than_two_to_the_31_elements_of_gradients(cp: Any, deterministic: bool) -> None:
    """Every batch entry is the same memory, so that only the gradients take room."""
    b, s, d = 2**18 + 1, 64, 128
    assert b * s * d > 2**31
    do, q, k, v = problem(1, s, s, 1, 1, d, d, "float16")
    made = forward(q, k, v, causal=True)

    def many(x: Any) -> Any:
        return cp.broadcast_to(bits(x), (b, *x.shape[1:])).view(x.dtype)

    give_back_memory(cp)
    args: Any = [many(x) for x in (do, q, k, v, *made)]
    call = opts(causal=True, deterministic=deterministic)
    grads = flash_attention_backward(*args, **call)
    expected = expected_gradients(do, q, k, v, causal=True)
    single = run(do, q, k, v, made, **call)
    for i in (0, 2**17 - 1, 2**17, 2**18 - 1, 2**18):
        got = [x[i : i + 1] for x in grads]
        assert_gradients(got, expected, f"entry {i}, deterministic={deterministic}")
        if deterministic:
            assert_same_grads(got, single, f"entry {i}")
    for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
        for part in np.array_split(np.arange(b), 9):
            mine = x[int(part[0]) : int(part[-1]) + 1]
            assert not bool((bits(mine) == 0xFFFF).any()), f"{name} was not written everywhere"
    del grads, x, mine, got
    attention.launcher.cache_clear()
    give_back_memory(cp)


@pytest.mark.parametrize("dtype", HALVES[:1])
def test_more_than_two_to_the_31_elements_between_rows(cp: Any, dtype: str) -> None:
    """In strides: all inputs in one buffer whose rows are 7 million elements apart, NaN between."""
    s, between = 300, 57344
    buffer = oracle.empty((1, s, between, 128), dtype)
    buffer.data.memset(0xFF, buffer.nbytes)
    sources = problem(1, s, s, 4, 2, 128, 128, dtype)
    made = forward(*sources[1:], causal=True)
    views = []
    for n, x in enumerate((*sources, made[0])):
        view = buffer[:, :, 11000 * (n + 1) : 11000 * (n + 1) + x.shape[2]]
        bits(view)[...] = bits(x)
        views.append(view)
    assert views[0].strides[1] // views[0].itemsize * (s - 1) > 2**31
    do, q, k, v, o = views
    for deterministic in MODES:
        grads = run(do, q, k, v, (o, made[1]), causal=True, deterministic=deterministic)
        check_backward(*sources, grads, f"deterministic={deterministic}", causal=True)
    del buffer, views, view, do, q, k, v, o
    give_back_memory(cp)


# Libraries


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(cp: Any, torch: Any, dtype: str) -> None:
    do, q, k, v = problem(2, 70, 70, 4, 2, 64, 64, dtype)
    made = forward(q, k, v, causal=True)
    dlse = normal_lse(q, 2)
    call = opts(causal=True, deterministic=True)
    expected = run(do, q, k, v, made, dlse=dlse, **call)
    args = [torch_of(torch, x) for x in (do, q, k, v, *made)]
    given_dlse = torch_of(torch, dlse)
    grads = flash_attention_backward(*args, dlse=given_dlse, **call)
    swapped = [x.transpose(1, 2) for x in args[:5]]
    other = flash_attention_backward(*swapped, args[5], dlse=given_dlse, layout="bhsd", **call)
    for name, x, y, z in zip(("dq", "dk", "dv"), grads, other, expected, strict=True):
        assert isinstance(x, torch.Tensor), f"{name}: got {type(x)}"
        assert x.is_cuda, f"{name}: result on {x.device}"
        assert x.dtype is getattr(torch, dtype), f"{name}: got {x.dtype}"
        same_bits(torch_host(torch, x), z, name)
        same_bits(torch_host(torch, y.transpose(1, 2).contiguous()), z, f"{name}, bhsd")


def test_torch_autograd_agrees(cp: Any, torch: Any) -> None:
    """The formulas of the oracle, and so ours, are what autograd makes of torch's attention."""
    do, q, k, v = problem(2, 90, 90, 4, 2, 64, 64, HALVES[-1])
    leaves = [torch.from_numpy(host(x).astype(np.float64)).cuda() for x in (q, k, v)]
    for x in leaves:
        x.requires_grad_()
    tq, tk, tv = (x.transpose(1, 2) for x in leaves)
    wide = (x.repeat_interleave(2, dim=1) for x in (tk, tv))
    o = torch.nn.functional.scaled_dot_product_attention(tq, *wide, is_causal=True)
    o.backward(torch.from_numpy(host(do).astype(np.float64)).cuda().transpose(1, 2))
    exact = dense_backward(do, q, k, v, causal=True)
    for name, x, y in zip(("dq", "dk", "dv"), leaves, exact, strict=True):
        np.testing.assert_allclose(y, x.grad.cpu().numpy(), rtol=0, atol=1e-12, err_msg=name)
    run_checked(do, q, k, v, "as autograd", causal=True)


def test_torch_needs_no_graph(cp: Any, torch: Any) -> None:
    do, q, k, v = problem(1, 20, 20, 2, 2, 64, 64, DTYPES[0])
    args = [torch_of(torch, x) for x in (do, q, k, v, *forward(q, k, v))]
    for n, name in enumerate(("do", "q", "k", "v", "o", "lse")):
        args[n].requires_grad_()
        with pytest.raises(ValueError, match=rf"{name} requires grad.*{name}\.detach\(\)"):
            flash_attention_backward(*args)
        args[n].requires_grad_(False)


@pytest.mark.parametrize("dtype", HALVES)
def test_jax(cp: Any, jax: Any, dtype: str) -> None:
    do, q, k, v = problem(2, 70, 90, 4, 2, 64, 64, dtype)
    made, call = forward(q, k, v, causal=True), opts(causal=True, deterministic=True)
    expected = run(do, q, k, v, made, **call)
    args = [jax.numpy.asarray(host(x)) for x in (do, q, k, v, *made)]
    grads = flash_attention_backward(*args, **call)
    for name, x, y in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert isinstance(x, jax.Array), f"{name}: got {type(x)}"
        assert next(iter(x.devices())).platform == "gpu", f"{name}: result on {x.devices()}"
        assert x.dtype.name == dtype, f"{name}: got {x.dtype}"
        same_bits(np.asarray(x).view(np.uint16), y, name)
    again = flash_attention_backward(*args[:1], *grads, *args[4:], **call)  # results go in again
    assert len(again) == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_producers_and_flat_arrays(cp: Any, dtype: str) -> None:
    do, q, k, v = problem(6, 70, 90, 1, 1, 64, 64, dtype)
    made, dlse = forward(q, k, v), normal_lse(q, 1)
    expected = run(do, q, k, v, made, dlse=dlse, deterministic=True)
    flat: Any = [x[:, :, 0] for x in (do, q, k, v, made[0])]
    args: Any = [Producer(x, readonly=True) for x in (*flat, made[1][:, 0])]
    launcher = FlashAttention2(64, dtype, deterministic=True, device="cuda")
    for grads in (
        flash_attention_backward(*args, dlse=Producer(dlse[:, 0]), deterministic=True),
        launcher.backward(*flat, made[1][:, 0], dlse=dlse[:, 0]),
    ):
        assert all(isinstance(x, cp.ndarray) for x in grads)
        assert_same_grads([x[:, :, None] for x in grads], expected, "flat arrays")
    cp.cuda.Device().synchronize()
    assert all(x.exports == x.deleted for x in args), "a capsule's deleter was not called"


# Streams


def test_work_is_queued_on_the_stream_asked_for(cp: Any) -> None:
    do, q, k, v = problem(2, 150, 200, 4, 2, 64, 64, HALVES[-1])
    made = forward(q, k, v)
    expected = {}
    for mode in MODES:
        expected[mode] = run(do, q, k, v, made, deterministic=mode)
        check_backward(do, q, k, v, expected[mode], f"deterministic={mode}")
    late = [oracle.copy(x) for x in (do, q)]
    stream = cp.cuda.Stream(non_blocking=True)
    for mode, spelled in itertools.product(MODES, (stream, stream.ptr, None)):
        for again in (False, True):  # the first fills CuPy's pool and the work buffers
            fill_nan(*late)
            cp.cuda.Device().synchronize()
            with stream:
                oracle.spin(100 if again else 0)
                for x, y in zip(late, (do, q), strict=True):
                    bits(x)[...] = bits(y)
                if spelled is None:
                    start = time.perf_counter()
                    grads = flash_attention_backward(*late, k, v, *made, deterministic=mode)
                    took = time.perf_counter() - start
            if spelled is not None:
                start = time.perf_counter()
                grads = flash_attention_backward(
                    *late, k, v, *made, deterministic=mode, stream=spelled
                )
                took = time.perf_counter() - start
            if again:
                assert not stream.done, f"{spelled}: the call waited for its stream"
                assert took < 0.05, f"{spelled}: the call took {took:.3f} s behind 0.1 s of work"
            stream.synchronize()
            if mode:
                assert_same_grads(grads, expected[mode], f"stream={spelled!r}")
            else:
                check_backward(do, q, k, v, grads, f"stream={spelled!r}")


@pytest.mark.parametrize("dim", [64, 66])
@pytest.mark.parametrize("deterministic", MODES)
def test_case_14_graph_capture(cp: Any, deterministic: bool, dim: int) -> None:
    """Forward and backward in one graph; replays read what the inputs then hold."""
    dtype = HALVES[-1]
    tensors: Any = problem(2, 150, 200, 4, 2, dim, dim, dtype)
    do, q, k, v = tensors
    lens = lengths(200, 77)
    o, lse = oracle.empty(q.shape, dtype), oracle.empty((2, 4, 150), "float32")
    launcher = FlashAttention2(dim, dtype, causal=True, deterministic=deterministic)

    def step() -> Any:
        launcher.forward(q, k, v, seqlens_k=lens, out=o, lse_out=lse)
        return launcher.backward(do, q, k, v, o, lse, seqlens_k=lens)

    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        for _ in range(2):
            step()  # warm up: compile, load, work buffers; the results go back to the pool
        stream.synchronize()
        stream.begin_capture()
        try:
            grads = step()
        finally:
            graph = stream.end_capture()
    for seed, real in itertools.product((5, 6), (200, 3)):
        for x, y in zip(tensors, problem(2, 150, 200, 4, 2, dim, dim, dtype, seed), strict=True):
            bits(x)[...] = bits(y)
        lens[1] = real
        fill_nan(o, lse, *grads)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        what = f"replay {seed}, {real} keys"
        check_backward(do, q, k, v, grads, what, seqlens_k=lens, causal=True)


# Memory


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("heads", [1, 2])
def test_memory_of_a_long_call(cp: Any, heads: int, deterministic: bool) -> None:
    """Results, two float32 for each row, and by default a float32 dq: nothing else."""
    from cupy.cuda import memory_hook

    class Peak(memory_hook.MemoryHook):  # type: ignore[misc]
        name = "Peak"
        live: dict[int, int] = {}  # noqa: RUF012
        top = 0

        def malloc_postprocess(self, **kwargs: Any) -> None:
            self.live[kwargs["mem_ptr"]] = kwargs["mem_size"]
            self.top = max(self.top, sum(self.live.values()))

        def free_postprocess(self, **kwargs: Any) -> None:
            self.live.pop(kwargs["mem_ptr"], None)

    s, d = 65536, 128
    do, q, k, v = problem(1, s, s, heads, heads, d, d, HALVES[-1])
    call = opts(causal=True, deterministic=deterministic)
    few = [x[:, :64] for x in (do, q, k, v)]
    run(*few, **call)  # everything is loaded
    made = forward(q, k, v, causal=True)
    attention.launcher.cache_clear()
    give_back_memory(cp)
    pool = cp.get_default_memory_pool()
    before, free = pool.total_bytes(), cp.cuda.runtime.memGetInfo()[0]
    with Peak() as peak:
        grads = flash_attention_backward(do, q, k, v, *made, **call)
        cp.cuda.Device().synchronize()
    rows = heads * -(-s // 64) * 64
    formula = sum(x.nbytes for x in (q, k, v)) + 2 * 4 * rows
    if not deterministic:
        formula += 4 * rows * d
    assert 0.99 * formula < peak.top < 1.01 * formula, f"{peak.top} bytes, {formula} documented"
    grown = pool.total_bytes() - before
    assert grown <= 1.01 * formula, f"CuPy's pool grew by {grown} bytes, {formula} documented"
    taken = free - cp.cuda.runtime.memGetInfo()[0]
    assert taken <= 1.01 * formula + (4 << 20), f"the card lost {taken} bytes"
    # The first rows of a causal problem are a problem of their own.
    part = [x[:, :300] for x in (do, q, k, v)]
    exact, plain = (dense_backward(*part, causal=True, low=low)[0] for low in (False, True))
    assert_accurate(host(grads[0][:, :300]), exact, plain, f"dq of the first rows, S={s}")


def test_case_15_a_thousand_steps_keep_nothing(cp: Any) -> None:
    pool = cp.get_default_memory_pool()
    plain = problem(1, 40, 50, 2, 1, 64, 64, HALVES[-1])
    odd = problem(1, 40, 50, 2, 1, 66, 66, HALVES[0])
    lens = lengths(33)
    marks = []
    for n in range(1000):
        for do, q, k, v in (plain, odd):
            options = opts(causal=bool(n % 3), seqlens_k=lens)
            o, lse = flash_attention(q, k, v, return_lse=True, **options)
            mode = opts(deterministic=bool(n % 2))
            flash_attention_backward(do, q, k, v, o, lse, dlse=lse, **mode, **options)
        flash_attention_backward(do[:, :0], q[:, :0], k, v, o[:, :0], lse[..., :0])
        with pytest.raises(ValueError, match="lse has shape"):
            flash_attention_backward(do, q, k, v, o, lse[..., :7])
        if n % 100 == 99:
            cp.cuda.Device().synchronize()
            gc.collect()
            free = cp.cuda.runtime.memGetInfo()[0]
            marks.append((pool.used_bytes(), pool.total_bytes(), free, len(gc.get_objects())))
    early, late = marks[1], marks[-1]
    assert late[0] <= early[0], f"CuPy's pool holds {late[0] - early[0]} bytes more: {marks}"
    assert late[1] <= early[1], f"CuPy's pool grew by {late[1] - early[1]} bytes: {marks}"
    assert early[2] - late[2] < 8 << 20, f"the card has {early[2] - late[2]} bytes less: {marks}"
    assert late[3] - early[3] < 500, f"{late[3] - early[3]} Python objects more: {marks}"


# Errors


def test_what_no_kernel_does_is_refused(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dtype and head dim beyond the table, before anything is loaded or allocated."""

    def launched(*args: Any) -> Any:
        raise AssertionError("a kernel was loaded for a call that is refused")

    monkeypatch.setattr(launch, "load", launched)
    refused = 0
    for dtype, (d, dv) in itertools.product(ALL_DTYPES, ((64, 64), (64, 257), (264, 64))):
        if any(dtype in row.dtypes and max(d, dv) <= row.max_head_dim for row in ROWS):
            continue
        do, q, k, v = problem(1, 20, 20, 2, 2, d, dv, dtype)
        o, lse = oracle.copy(do), normal_lse(q, 0)
        before = cp.get_default_memory_pool().used_bytes()
        for call in (flash_attention_backward, FlashAttention2(d, dtype, head_dim_v=dv).backward):
            with pytest.raises(UnsupportedError, match=f"(?s)backward.*{dtype}"):
                call(do, q, k, v, o, lse)
        assert cp.get_default_memory_pool().used_bytes() == before, "a refused call keeps memory"
        refused += 1
    assert refused >= 2, "the table has no end"


def test_a_wrong_call_changes_nothing(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = HALVES[0]
    do, q, k, v = problem(1, 20, 30, 2, 1, 64, 64, dtype)
    made, dlse = forward(q, k, v), normal_lse(q, 1)
    expected = run(do, q, k, v, made, dlse=dlse, deterministic=True)
    good: dict[str, Any] = dict(zip(("do", "q", "k", "v", "o", "lse"), (do, q, k, v, *made)))
    before = {name: oracle.copy(x) for name, x in good.items()}
    other = "float16" if dtype != "float16" else "bfloat16"
    foreign = oracle.to_device(host(q).astype(numpy_dtype(other)))
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"do": do[:, :7]}, ValueError, "do has shape"),
        ({"do": do[..., :32]}, ValueError, "do has shape"),
        ({"do": foreign}, TypeError, "do is"),
        ({"do": host(do)}, ValueError, "one device"),
        ({"o": made[0][:, :7]}, ValueError, "o has shape"),
        ({"o": foreign}, TypeError, "o is"),
        ({"lse": made[1][:, :1]}, ValueError, "lse has shape"),
        ({"lse": made[1].astype(np.float64)}, TypeError, "lse is"),
        ({"dlse": dlse[..., :7]}, ValueError, "dlse has shape"),
        ({"dlse": dlse.astype(np.float64)}, TypeError, "dlse is"),
        ({"dlse": host(dlse)}, ValueError, "one device"),
        ({"k": k[:, :7]}, ValueError, "rows"),
        ({"q": foreign}, TypeError, "one dtype"),
        ({"seqlens_q": lengths(20, 20)}, ValueError, "seqlens_q has shape"),
        ({"seqlens_k": lengths(30).astype(np.int64)}, TypeError, "seqlens_k is int64"),
        ({"do": None}, TypeError, "do"),
    ]

    def launched(*args: Any) -> Any:
        raise AssertionError("a kernel was loaded for a call that is wrong")

    with monkeypatch.context() as patch:
        patch.setattr(launch, "load", launched)
        for change, error, match in wrong:
            with pytest.raises(error, match=match):
                flash_attention_backward(**{**good, **change})
    for name, x in good.items():
        assert_same(x, before[name], f"{name} after wrong calls")
    grads = run(do, q, k, v, made, dlse=dlse, deterministic=True)
    assert_same_grads(grads, expected, "a good call after wrong ones")
