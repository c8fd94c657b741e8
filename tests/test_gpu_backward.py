"""The CUDA backward against a naive float64 oracle on the card: shapes, laws, known failures."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import gpu_oracle as oracle
import numpy as np
import pytest
from gpu_oracle import (
    MASK_OPTIONS,
    MODES,
    assert_gradients,
    assert_same,
    assert_same_gradients,
    backward,
    backward_checked,
    bits,
    check_backward,
    dense_backward,
    expected_gradients,
    fill_nan,
    forward,
    four,
    host,
    inputs,
    lengths,
    normal,
    normal_lse,
    poison,
    problem,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from producers import Producer
from test_gpu_forward import EDGES, SHIELDS, axes, drawn, give_back_memory, opts, sees

from cufa2 import attention, flash_attention, flash_attention_backward, launch, plan
from cufa2.dense import plain_attention_backward, reference64, reference64_backward
from cufa2.kernels import KERNELS
from cufa2.problem import DTYPES as ALL_DTYPES
from cufa2.testing import EPS, assert_accurate, gradient_noise, make_inputs, numpy_dtype, time_gpu

ROWS = oracle.main_kernels("backward")
CELLS = oracle.backward_cells()
KINDS = tuple(dict.fromkeys(cell.kind for cell in CELLS))
DTYPES = tuple(kind for kind in KINDS if kind not in oracle.FAST)
HALVES = tuple(dtype for dtype in DTYPES if dtype in oracle.DTYPES)
FILLED = {n: 2 ** (8 * n) - 1 for n in (2, 4)}  # what fill_nan leaves, by item size
INF = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}
SIZES = (64, 128, 256)
# The slower tests' dtypes and head dims: of float32 and float64 the smallest and the largest.
FEW_SIZES = tuple((t, d) for t in DTYPES for d in SIZES if t in HALVES or d in (64, 256))


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
        on_card = four(oracle.to_device(x) for x in (do, q, k, v))
        moved = {name: oracle.to_device(x) for name, x in more.items()}
        truth = reference64_backward(do, q, k, v, **options, **more)
        plain = plain_attention_backward(do, q, k, v, **options, **more)
        call = {**options, **moved}
        ours, low = (dense_backward(*on_card, low=low, **call) for low in (False, True))
        exact = 2e-16 if dtype == "float64" else 1e-13
        for which, x, y, a, b in zip(("dq", "dk", "dv"), ours, truth, low, plain, strict=True):
            what = f"{dtype} {options} {which}"
            top = float(np.abs(y).max())
            np.testing.assert_allclose(x, y, rtol=exact, atol=exact * top, err_msg=what)
            errors = [float(np.abs(e.astype(y.dtype) - y).max()) for e in (a, b)]
            assert errors[0] <= 2.5 * errors[1] + EPS[dtype] * top, f"{what}: plain {errors}"
            assert errors[1] <= 2.5 * errors[0] + EPS[dtype] * top, f"{what}: plain {errors}"
        made = reference64(q, k, v, **options, **{n: x for n, x in more.items() if n != "dlse"})
        *_, dead, unseen = oracle._gradients(*on_card, False, **call)
        assert (dead == (made[1] == -np.inf).transpose(0, 2, 1)).all(), f"{dtype} {options}: dead"
        none = ~np.array(truth[2]).any(axis=-1)
        assert (unseen == none).all(), f"{dtype} {options}: keys that no row sees"


def test_the_gradient_check_can_fail(cp: Any) -> None:
    """One wrong value, one NaN, one gradient where nothing is seen."""
    do, q, k, v = problem(1, 40, 30, 2, 1, 32, 32, DTYPES[0])
    options = opts(causal=True)
    good = backward(do, q, k, v, **options)
    check_backward(do, q, k, v, good, "good", **options)
    for which, value, row in (
        *itertools.product(range(3), (4.0, math.nan), (20,)),
        (0, 1e-6, 3),  # a row that sees no key
    ):
        bad = [host(x) for x in good]
        bad[which][0, row, 0, 3] = value
        with pytest.raises(AssertionError):
            check_backward(do, q, k, v, bad, "bad", **options)


# Random problems


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    fast: dict[str, Any] = {}
    if draw(st.integers(0, 4)) == 0:
        d, dv, dtype, deterministic = draw(st.sampled_from(oracle.UNEQUAL_BACKWARD))
        d, dv = (draw(st.sampled_from((n, n - 8, n - 5))) for n in (d, dv))
    else:
        deterministic = draw(st.booleans())
        kind = draw(st.sampled_from(KINDS))
        dtype, fast = oracle.named(kind)
        compiled = [0, *ROWS[0].head_dims]
        size = compiled.index(draw(st.sampled_from(oracle.backward_sizes(kind))))
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
            **fast,
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
    given_do, given_q, given_k, given_v = (axes(x, layout) for x in (do, q, k, v))
    call = {**options, **lens, "layout": "bhsd" if layout == "bhsd" else "bshd"}
    o, lse = flash_attention(given_q, given_k, given_v, return_lse=True, **call)
    for i, n in enumerate(case["lens"]["seqlens_q"] or ()):
        fill_nan(do[i, n:], axes(o, layout)[i, n:])
        for x in (lse, dlse):
            if x is not None:
                fill_nan(x[i, ..., n:])
    poison(q, k, v)
    given_dlse = dlse[:, 0] if layout == "flat" and dlse is not None else dlse
    call["deterministic"] = case["deterministic"]
    results = flash_attention_backward(
        given_do, given_q, given_k, given_v, o, lse, dlse=given_dlse, **call
    )
    for x, like, name in zip(results, (given_q, given_k, given_v), "qkv", strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype), f"d{name}: {x.shape}, {x.dtype}"
    grads = [axes(x, layout) for x in results]
    check_backward(do, q, k, v, grads, str(case), dlse=dlse, **options, **lens)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_every_kernel_of_this_card(cp: Any, cell: Any) -> None:
    dtype, _ = oracle.named(cell.kind)
    for n, (sq, sk) in enumerate(((200, 333), (129, 64), (97, 97))):
        do, q, k, v = problem(2, sq, sk, 4, 2, cell.dim, cell.dim, dtype, n)
        backward_checked(do, q, k, v, f"{cell} {sq}x{sk}", **cell.options)


@pytest.mark.parametrize("dim", oracle.backward_sizes("tf32"))
def test_tf32_is_asked_for(cp: Any, dim: int) -> None:
    """Nobody gets its error unasked, and who asks does not get the same bits slower."""
    do, q, k, v = problem(2, 200, 333, 4, 2, dim, dim, "float32")
    made = forward(q, k, v)
    exact = dense_backward(do, q, k, v)
    default, spelled, fast = (
        backward(do, q, k, v, made, deterministic=True, **options)
        for options in (opts(), opts(precision=None), opts(precision="tf32"))
    )
    assert_same_gradients(spelled, default, "precision=None")
    for name, x, y, ref in zip(("dq", "dk", "dv"), default, fast, exact, strict=True):
        errors = [float(np.abs(host(z) - ref).max()) for z in (x, y)]
        assert 50 * errors[0] < errors[1], f"{name}: {errors}"
    for other in ("float16", "float64"):
        tensors = problem(1, 3, 3, 1, 1, 8, 8, other)
        made = forward(*tensors[1:])
        with pytest.raises(ValueError, match=r"^precision='tf32' is for float32 arrays; q, k and"):
            flash_attention_backward(*tensors, *made, precision="tf32")


def force_tile(monkeypatch: pytest.MonkeyPatch, kernel: Any, tile: Any) -> None:
    """Make the planner take this tile, as it does on a card with less shared memory."""
    choose = plan.choose

    def forced(*args: Any) -> Any:
        chosen = choose(*args)
        variants = (replace(v, tile=tile) if v.kernel is kernel else v for v in chosen.variants)
        return replace(chosen, variants=tuple(variants))

    monkeypatch.setattr(plan, "choose", forced)


@pytest.mark.parametrize(
    "row",
    [row for row in KERNELS if row.direction == "backward" and row.policies],
    ids=lambda row: row.name,
)
def test_tiles_of_other_cards(cp: Any, monkeypatch: pytest.MonkeyPatch, row: Any) -> None:
    found = oracle.foreign_cells(row)
    tiles = {tile for tile, _ in found}
    assert len(tiles) >= 2, f"only {tiles}: cards with 99 and 163 KB take other tiles"
    for n, (tile, cell) in enumerate(found):
        dtype, options = oracle.named(cell.kind)[0], cell.options
        with monkeypatch.context() as patch:
            force_tile(patch, row, tile)
            for sq, sk, lens in (
                (150, 201, {}),
                (129, 64, {}),
                (150, 201, opts(seqlens_q=lengths(150, 3), seqlens_k=lengths(0, 190))),
            ):
                do, q, k, v = problem(2, sq, sk, 2, 1, cell.dim, cell.dim, dtype, n)
                if lens:
                    fill_nan(do[1, 3:], q[1, 3:], k[0], v[0], k[1, 190:], v[1, 190:])
                call = {**options, **lens}
                grads = backward(do, q, k, v, deterministic=row.stage == "dq", **call)
                check_backward(do, q, k, v, grads, f"{tile} {cell} {sq}x{sk} {lens}", **call)


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("keys", [1, 2, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits(cp: Any, dtype: str, keys: int, deterministic: bool) -> None:
    """One key outweighs the others: its P is 1, but for what rounding leaves of s - lse."""
    for seed in range(6):
        do, q, k, v = problem(48, 1, keys, 1, 1, 128, 128, dtype, seed)
        q, k = 2 * q, 2 * k
        grads = backward(do, q, k, v, deterministic=deterministic)
        check_backward(do, q, k, v, grads, f"seed {seed}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_hundred_seeds(cp: Any, dtype: str) -> None:
    """The default, whose sums come in any order, keeps the rule every time."""
    for seed in range(200):
        do, q, k, v = problem(1, 150, 190, 4, 2, 64, 64, dtype, seed)
        grads = backward(do, q, k, v, causal=True, wipe=seed < 5)
        check_backward(do, q, k, v, grads, f"seed {seed}", causal=True)


@pytest.mark.parametrize(("dtype", "dim"), FEW_SIZES)
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
        first = backward(do, q, k, v, made, **call)
        wrong = cp.zeros(1, np.int64)
        for n in range(200):
            with busy:
                oracle.spin(0.05)
                noise[...] = n
            grads = backward(do, q, k, v, made, wipe=False, **call)
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
                grads = backward(do, q, k, v, made, wipe=False, dlse=dlse, **options)
                assert_gradients(grads, expected, f"d{dim} {dtype} {options}, run {n}")


# Laws


@pytest.mark.parametrize("kind", KINDS)
def test_keys_may_come_in_any_order(cp: Any, kind: str) -> None:
    dtype, fast = oracle.named(kind)
    do, q, k, v = problem(2, 130, 333, 4, 2, 64, 64, dtype)
    order = np.random.default_rng(0).permutation(333)
    back = cp.asarray(np.argsort(order))
    mixed: Any = [bits(x)[:, cp.asarray(order)].view(x.dtype) for x in (k, v)]
    for deterministic in MODES:
        dq, *moved = backward(do, q, *mixed, deterministic=deterministic, **fast)
        dk, dv = (bits(x)[:, back].view(x.dtype) for x in moved)
        what = f"permuted, deterministic={deterministic}"
        check_backward(do, q, k, v, (dq, dk, dv), what, **fast)


@pytest.mark.emulated(heads=[(4, 2)], dtype=["float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(16, 2), (12, 2), (12, 3), (8, 1), (4, 2)])
def test_grouped_heads_are_repeated_heads_summed(
    either: Any, heads: tuple[int, int], dtype: str
) -> None:
    """Case 37 too: the gradients of repeated keys, summed over the group in float64."""
    h, hk = heads
    do, q, k, v = problem(2, 70, 141, h, hk, 64, 64, dtype)
    wide: Any = [either.repeat(bits(x), h // hk, axis=2).view(x.dtype) for x in (k, v)]
    for options in (opts(), opts(causal=True)):
        expected = expected_gradients(do, q, k, v, **options)
        for deterministic in MODES:
            what = f"{heads} heads, {options}, deterministic={deterministic}"
            call = opts(deterministic=deterministic, **options)
            assert_gradients(backward(do, q, k, v, **call), expected, what)
            dq, *parts = backward(do, q, *wide, **call)
            shape = (2, 141, hk, h // hk, 64)
            dk, dv = (host(x).astype(np.float64).reshape(shape).sum(axis=3) for x in parts)
            summed = [dq, *(x.astype(q.dtype) for x in (dk, dv))]
            assert_gradients(summed, expected, f"{what}, repeated")


@pytest.mark.emulated(dtype=["float16"])
@pytest.mark.parametrize("dtype", HALVES)
def test_case_37_groups_are_rounded_once(either: Any, dtype: str) -> None:
    """With one key dv is the sum of do. Rounding each head's part, or as it adds up, would show:
    3 heads of 2048 + 3 are 6152 in float16, not 3 * 2052, and not 3 * 2048."""
    large = 2 / EPS[dtype]  # from here on numbers are 2 apart
    for group, rows in ((3, 4), (5, 2), (7, 2)):
        values = np.ones((1, rows, group, 64))
        values[:, 0] = large
        do = oracle.to_device(values.astype(numpy_dtype(dtype)))
        q, k, v = inputs(1, rows, 1, group, 1, 64, 64, dtype)
        bits(q)[...] = 0
        expected = values.sum(axis=(1, 2)).astype(numpy_dtype(dtype)).astype(np.float64)
        for deterministic in MODES:
            dv = host(backward(do, q, k, v, deterministic=deterministic)[2]).astype(np.float64)
            what = f"{group} heads of {rows} rows, deterministic={deterministic}"
            np.testing.assert_array_equal(dv[:, 0, 0], expected, what)


@pytest.mark.emulated(seqlen=[128], dtype=["float16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seqlen", "cut"), [(2, 1), (128, 64), (300, 100), (300, 1)])
def test_split_keys_merge_through_lse(either: Any, seqlen: int, cut: int, dtype: str) -> None:
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
        grads.append(backward(grad_o, q, *part, results, dlse=dlse))
        check_backward(grad_o, q, *part, grads[-1], f"cut at {cut}, a part", dlse=dlse)
        plain.append(dense_backward(grad_o, q, *part, low=True, dlse=dlse))
    exact = dense_backward(do, q, k, v)
    noise = gradient_noise(host(do), host(q), host(k), host(v))
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
        results = backward(do, q, k[:, cut], v[:, cut], made, deterministic=cut.start == 0)
        grads.append(tuple(host(x) for x in results))
    whole = [x.astype(do.dtype) for x in joined(grads)]
    check_backward(do, q, k, v, whole, "two parts of the keys")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", SIZES)
def test_batch_mates_do_not_matter(cp: Any, dim: int, dtype: str) -> None:
    do, q, k, v = problem(5, 150, 170, 4, 2, dim, dim, dtype)
    lens_q, lens_k = [150, 3, 0, 128, 77], [170, 0, 33, 64, 170]
    bad = four(oracle.copy(x) for x in (do, q, k, v))
    for x in bad:
        fill_nan(x[1:2], x[3:])
    for options in (opts(), opts(causal=True, softcap=3.0), opts(window=(20, 20))):
        both = opts(seqlens_q=lengths(*lens_q), seqlens_k=lengths(*lens_k))
        together = backward(do, q, k, v, deterministic=True, **options, **both)
        among = backward(*bad, deterministic=True, **{**options, **both})
        for i in range(5):
            one = four(x[i : i + 1] for x in (do, q, k, v))
            lens = opts(seqlens_q=lengths(lens_q[i]), seqlens_k=lengths(lens_k[i]))
            call = {**options, **lens}
            alone = backward(*one, deterministic=True, **call)
            mine = [x[i : i + 1] for x in together]
            assert_same_gradients(mine, alone, f"sequence {i} alone, {options}")
            check_backward(*one, mine, f"sequence {i}, {options}", **call)
            if i in (0, 2):
                assert_same_gradients(
                    [x[i : i + 1] for x in among], mine, f"{i} among NaN, {options}"
                )
            n, m = lens_q[i], lens_k[i]
            cut = one[0][:, :n], one[1][:, :n], one[2][:, :m], one[3][:, :m]
            grads = backward(*cut, **options)
            check_backward(*cut, grads, f"sequence {i} cut, {options}", **options)


# Known failures of other libraries, by their number in the list of cases


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_01_more_queries_than_keys(cp: Any, dtype: str) -> None:
    for sq, sk in ((5, 2), (2, 5), (130, 200), (256, 3), (129, 128)):
        b = 24 if min(sq, sk) < 10 else 2  # the rule needs values to draw its largest error from
        q = normal((b, sq, 2, 64), dtype, 1, 3.0)
        k, v = normal((b, sk, 2, 64), dtype, 2), normal((b, sk, 2, 64), dtype, 3)
        ones = oracle.to_device(np.ones(q.shape, q.dtype))
        for do, causal in itertools.product((ones, normal(q.shape, dtype, 4)), (True, "top_left")):
            backward_checked(do, q, k, v, f"{sq}x{sk} causal={causal}", causal=causal)
        dark, made = max(0, sq - sk), forward(q, k, v, causal=True)
        for deterministic in MODES:
            call = opts(causal=True, deterministic=deterministic)
            clean = backward(ones, q, k, v, made, **call)
            assert not bits(clean[0][:, :dark]).any(), f"{sq}x{sk}: dq of rows without keys"
            hurt_do, hurt_q = (oracle.copy(x) for x in (ones, q))
            fill_nan(hurt_do[:, :dark], hurt_q[:, :dark])
            grads = backward(hurt_do, hurt_q, k, v, made, **call)
            for x, y in zip(grads, clean, strict=True):
                near = np.abs(host(x).astype(np.float64) - host(y).astype(np.float64)).max()
                assert near < 0.1, f"{sq}x{sk}: NaN of rows without keys leaks ({near})"


@pytest.mark.emulated(dim=[64], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", SIZES)
def test_case_04_large_equal_logits(either: Any, dim: int, dtype: str) -> None:
    """dv is then the mean of the gradients of the rows that see the key."""
    for sq, sk, q0, k0, causal in (
        (130, 200, 1.0, -1600.0, True),
        (200, 130, 1.0, -1600.0, "top_left"),  # whole blocks of rows see the last block of keys
        (130, 200, 16.0, -50000.0, False),
    ):
        q = np.zeros((1, sq, 2, dim), numpy_dtype(dtype))
        k = np.zeros((1, sk, 2, dim), numpy_dtype(dtype))
        q[..., 0], k[..., 0] = q0, k0
        on_q, on_k = (oracle.to_device(x) for x in (q, k))
        do, v = normal(q.shape, dtype, 5), normal(k.shape, dtype, 4)
        seen = sees(opts(causal=causal), sq, sk)
        weights = seen / seen.sum(axis=1, keepdims=True)
        expected = np.einsum("ij,ihd->jhd", weights, host(do).astype(np.float64)[0])
        # lse in float32 is exact to half a unit at its own size.
        logit = q0 * k0 / math.sqrt(dim)
        unit = EPS[oracle.lse_dtype(dtype)] * abs(logit) * 2
        for deterministic in MODES:
            name = f"logits of {logit}, deterministic={deterministic}"
            grads = backward(do, on_q, on_k, v, causal=causal, deterministic=deterministic)
            for x in grads:
                assert np.isfinite(host(x).astype(np.float64)).all(), name
            dv = host(grads[2]).astype(np.float64)[0]
            bound = (unit + EPS[dtype]) * np.abs(expected).max()
            assert np.abs(dv - expected).max() <= bound, f"{name}: {np.abs(dv - expected).max()}"


def test_case_05_products_beyond_float16(either: Any) -> None:
    for dtype, deterministic in itertools.product(DTYPES, MODES):
        q = oracle.to_device(np.full((1, 70, 2, 128), 256, numpy_dtype(dtype)))
        do, v = normal(q.shape, dtype, 2), normal(q.shape, dtype, 1)
        grads = backward(do, q, oracle.copy(q), v, deterministic=deterministic)
        for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
            assert np.isfinite(host(x).astype(np.float64)).all(), f"{dtype}: {name}"
        mean = host(do).astype(np.float64).sum(axis=1, keepdims=True) / 70
        error = np.abs(host(grads[2]).astype(np.float64) - mean).max()
        # lse is 741455, and float32 numbers are 1/16 apart there.
        assert error < 0.15 * np.abs(mean).max(), f"{dtype}: dv is off by {error}"


@pytest.mark.emulated(dtype=["bfloat16", "float64"])
@pytest.mark.parametrize("dtype", [t for t in DTYPES if t != "float16"])
def test_rows_whose_logits_are_all_minus_infinity(either: Any, dtype: str) -> None:
    """Products beyond the type they add up in: lse is -inf, and the row has no part in any
    gradient."""
    large = 1e200 if dtype == "float64" else 1e30
    do, q, k, v = problem(2, 130, 90, 4, 2, 64, 64, dtype)
    on_host = host(q)
    on_host[..., 0] = 0
    on_host[:, :20, :, 0] = large
    q = oracle.to_device(on_host)
    bits(k)[..., 0] = bits(oracle.to_device(np.full(1, -large, k.dtype)))[0]
    o, lse = forward(q, k, v)
    assert bool((lse[:, :, :20] == -np.inf).all()), "the products did not overflow"
    rest = (do[:, 20:], q[:, 20:], k, v)
    expected = expected_gradients(*rest)._replace(noise=0.0)  # it would be that of `large`
    for deterministic in MODES:
        dq, dk, dv = backward(do, q, k, v, (o, lse), deterministic=deterministic)
        what = f"deterministic={deterministic}"
        assert not host(dq[:, :20]).astype(np.float32).any(), f"{what}: dq of those rows"
        assert_gradients((dq[:, 20:], dk, dv), expected, what)


# An infinity meets tensor cores the same way at all head dims: in wide types it is tried at one.
BAD = [
    (f"{name} {kind}", dtype, dim)
    for dtype, dim in itertools.product(DTYPES, SIZES)
    for kind in ("nan", "inf")
    for name in ("q", "k", "v", "do")
    if kind == "nan" or dtype in HALVES or dim == 64
]


@pytest.mark.emulated(where=["v nan"], dim=[64], dtype=["float32"])
@pytest.mark.parametrize(("where", "dtype", "dim"), BAD)
def test_case_06_bad_values_reach_who_sees_them(
    either: Any, where: str, dim: int, dtype: str
) -> None:
    """NaN is exactly where the formulas have it. What becomes of an infinity is left open, but
    not who gets it."""
    name, kind = where.split()
    for (mask, options), (b, sq, sk, at) in itertools.product(
        SHIELDS.items(), ((24, 8, 8, 2), oracle.sizes((1, 150, 170, 77), (1, 70, 90, 40)))
    ):
        do, q, k, v = problem(b, sq, sk, 2, 1, dim, dim, dtype)
        hurt = {"do": do, "q": q, "k": k, "v": v}[name]
        if kind == "nan":
            fill_nan(hurt[:, at])
        else:
            bits(hurt)[:, at, :, 3] = INF[dtype]
        seen = sees(options, sq, sk)
        hit = np.arange(sq) == at if name in ("do", "q") else seen[:, at]
        reached = seen[hit].any(axis=0)  # keys that a hit row sees
        expected, made = expected_gradients(do, q, k, v, **options), forward(q, k, v, **options)
        for deterministic in MODES:
            what = f"{where} at {at}, {mask}, {sq}x{sk}, deterministic={deterministic}"
            results = backward(do, q, k, v, made, deterministic=deterministic, **options)
            grads = [host(x) for x in results]
            if kind == "inf":
                for x in (grads, expected.exact, expected.plain):
                    for y, dark in zip(x, (hit, reached, reached), strict=True):
                        y[:, dark] = 0
            else:
                lit = hit & seen.any(axis=1)
                assert np.isnan(grads[0][:, lit].astype(np.float32)).all(), f"{what}: no NaN in dq"
            assert_gradients(grads, expected, what)


@pytest.mark.emulated(dim=[64], dtype=["bfloat16"])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(t, d) for t in DTYPES for d in oracle.backward_sizes(t)]
)
def test_case_06_padding_may_hold_anything(either: Any, dim: int, dtype: str) -> None:
    real_q, real_k = (61, 200, 1), (130, 1, 201)
    lens = opts(seqlens_q=lengths(*real_q), seqlens_k=lengths(*real_k))
    do, q, k, v = problem(3, 200, 201, 2, 1, dim, dim, dtype)
    for options in MASK_OPTIONS.values():
        o, lse = forward(q, k, v, **options, **lens)
        dlse, results = normal_lse(q, 2), []
        for value in (0, -1, INF[dtype]):  # -1: all bits set, a NaN
            a, b, c, d, e, f, g = (oracle.copy(x) for x in (do, q, k, v, o, lse, dlse))
            for i, (n, m) in enumerate(zip(real_q, real_k, strict=True)):
                for x, real in ((a, n), (b, n), (c, m), (d, m), (e, n)):
                    x.view(f"i{x.itemsize}")[i, real:] = value
                if value:
                    fill_nan(f[i, :, n:], g[i, :, n:])
            call = opts(dlse=g, deterministic=True, **options, **lens)
            results.append(backward(a, b, c, d, (e, f), **call))
            rough = backward(a, b, c, d, (e, f), dlse=g, **options, **lens)
            what = f"d{dim} {options}, bits {value} in the padding"
            check_backward(do, q, k, v, rough, what, dlse=dlse, **options, **lens)
        for other in results[1:]:
            assert_same_gradients(other, results[0], f"d{dim} {options}")
        check_backward(do, q, k, v, results[0], f"d{dim} {options}", dlse=dlse, **options, **lens)


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
            backward_checked(do, q, k, v, f"{zero!r} {options}", softmax_scale=zero, **options)
            for deterministic in MODES:
                call = opts(softmax_scale=zero, deterministic=deterministic, **options)
                dq, dk, dv = (host(x).astype(np.float32) for x in backward(do, q, k, v, **call))
                assert not dq.any(), f"{zero!r} {options}: dq"
                assert not dk.any(), f"{zero!r} {options}: dk"
                assert dv.any(), f"{zero!r} {options}: dv"
        big = normal(q.shape, dtype, 7, 4.0)
        backward_checked(do, big, k, v, f"-0.3 {options}", softmax_scale=-0.3, **options)


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
        grads = backward(do, q, k, v, deterministic=deterministic, **call)
        made = forward(q, k, v, **call)
        wrapped: Any = [Producer(x) for x in (do, q, k, v, *made)]
        for results in (grads, flash_attention_backward(*wrapped, **call)):
            for x, like in zip(results, (q, k, v), strict=True):
                assert (x.shape, x.dtype) == (like.shape, like.dtype), f"{shape}"
                assert not bits(x).any(), f"{shape}: a gradient of nothing"
    do, q, k, v = problem(2, 50, 70, 2, 1, dim, dim, dtype)
    backward_checked(do, q, k, v, "a plain call afterwards")


@pytest.mark.emulated(dim=[64], dtype=["float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 256])
def test_case_31_sequences_of_length_zero(either: Any, dim: int, dtype: str) -> None:
    do, q, k, v = problem(4, 5, 7, 9, 3, dim, dim, dtype)
    pairs = (((0, 5, 0, 4), (3, 0, 7, 2)), ((0, 5, 0, 4), (0, 0, 0, 0)), ((0, 1, 0, 1), (7,) * 4))
    for (lens_q, lens_k), causal, deterministic in itertools.product(pairs, (False, True), MODES):
        lens = opts(seqlens_q=lengths(*lens_q), seqlens_k=lengths(*lens_k), causal=causal)
        a, b, c, d = (oracle.copy(x) for x in (do, q, k, v))
        for i in range(4):
            fill_nan(*(x[i, lens_q[i] :] for x in (a, b)), *(x[i, lens_k[i] :] for x in (c, d)))
        what = f"{lens_q} {lens_k} causal={causal} deterministic={deterministic}"
        grads = backward(a, b, c, d, deterministic=deterministic, **lens)
        check_backward(a, b, c, d, grads, what, **lens)
        rows, keys = slice(0, lens_q[3]), slice(0, lens_k[3])
        last = (do[3:, rows], q[3:, rows], k[3:, keys], v[3:, keys])
        mine = (grads[0][3:, rows], grads[1][3:, keys], grads[2][3:, keys])
        check_backward(*last, mine, f"the last of {what}", causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_35_softcap_comes_before_the_mask(cp: Any, dtype: str) -> None:
    do, q, k, v = problem(4, 4, 4, 2, 2, 64, 64, dtype)
    bits(q)[...] = 0
    bits(v)[:, 2:] = bits(oracle.to_device(np.full((1, 2, 1, 64), 100, v.dtype)))
    for options in (opts(seqlens_k=lengths(2, 2, 2, 2)), opts(causal="top_left", window=(1, 0))):
        backward_checked(do, q, k, v, str(options), softcap=2.0, **options)
    do, q, k, v = problem(2, 90, 120, 4, 2, 64, 64, dtype)
    bits(q)[...] = bits(normal(q.shape, dtype, 1, 3.0))  # logits of about 3
    for options in (opts(), opts(seqlens_q=lengths(90, 20), seqlens_k=lengths(50, 120))):
        backward_checked(do, q, k, v, f"softcap 1.5 {options}", softcap=1.5, **options)
    made = forward(q, k, v)
    off = backward(do, q, k, v, made, deterministic=True, softcap=0.0)
    none = backward(do, q, k, v, made, deterministic=True)
    assert_same_gradients(off, none, "softcap 0 is off")
    for softcap in (0.01, 50.0, 1e4, 1e30):
        backward_checked(do, q, k, v, f"softcap={softcap}", softcap=softcap, causal=True)


@pytest.mark.emulated(dtype=["float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_36_gradient_through_lse(either: Any, dtype: str) -> None:
    for (sq, sk), options in (
        ((3, 5), opts()),
        ((90, 60), opts(causal=True)),  # with empty rows
        ((90, 120), opts(seqlens_q=lengths(0, 90, 7, 50), seqlens_k=lengths(9, 0, 120, 77))),
    ):
        do, q, k, v = problem(4, sq, sk, 4, 2, 64, 64, dtype)
        made, dlse = forward(q, k, v, **options), normal_lse(q, 8)
        backward_checked(do, q, k, v, f"{sq}x{sk} {options}", dlse=dlse, **options)
        hurt = oracle.copy(dlse)
        hurt.view(f"i{hurt.itemsize}")[made[1] == -np.inf] = -1
        for deterministic in MODES:
            call = opts(deterministic=deterministic, **options)
            grads = backward(do, q, k, v, made, dlse=hurt, **call)
            what = f"{sq}x{sk} {options}: NaN for rows without keys"
            check_backward(do, q, k, v, grads, what, dlse=dlse, **options)
            without = backward(do, q, k, v, made, **call)
            zeros = backward(do, q, k, v, made, dlse=either.zeros_like(dlse), **call)
            assert_same(grads[2], without[2], f"{sq}x{sk} {options}: dv does not depend on dlse")
            if deterministic:
                assert_same_gradients(zeros, without, f"{sq}x{sk} {options}: dlse = 0")


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


@pytest.mark.emulated(dtype=["float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, opts(causal=True), opts(softcap=1.5), opts(window=(1, 1), softmax_scale=-0.8)]
)
def test_case_38_one_to_five_tokens(either: Any, options: Any, dtype: str) -> None:
    unit = (4 if dtype in HALVES else 16) * EPS[dtype]  # in wide types the order of sums shows
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
            grads = backward(do, q, k, v, dlse=dlse, deterministic=deterministic, **options)
            for name, x, expected in zip(("dq", "dk", "dv"), grads, truth, strict=True):
                bound = unit * max(1.0, float(np.abs(expected).max())) + 1e-7
                error = float(np.abs(host(x).astype(np.float64) - expected).max())
                what = f"{sq}x{sk} {options} deterministic={deterministic}: {name}"
                assert error <= bound, f"{what} is off by {error:.2e}, {bound:.2e} allowed"


# Blocks outside the mask are skipped


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_skipped_blocks_cost_nothing(cp: Any, dtype: str, deterministic: bool) -> None:
    do, q, k, v = problem(1, 8192, 8192, 16, 16, 128, 128, dtype)

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


@pytest.mark.parametrize(
    ("b", "h", "hk", "dtype"),
    [
        (70000, 1, 1, "bfloat16"),
        (1, 70000, 35000, "bfloat16"),
        (7000, 10, 10, "bfloat16"),
        (1, 70000, 35000, "float32"),
    ],
)
def test_more_heads_than_a_grid_axis(cp: Any, b: int, h: int, hk: int, dtype: str) -> None:
    do, q, k, v = problem(b, 17, 19, h, hk, 64, 64, dtype)
    made, group = forward(q, k, v, causal=True), h // hk
    for deterministic in MODES:
        grads = backward(do, q, k, v, made, causal=True, deterministic=deterministic)
        for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
            assert not bool((bits(x) == FILLED[x.itemsize]).any()), (
                f"{name} was not written everywhere"
            )
        few, heads = min(b, 20), min(hk, 20)
        for batch, head in itertools.product({0, b - few}, {0, hk - heads}):
            one, all_ = slice(batch, batch + few), slice(head * group, (head + heads) * group)
            mine = slice(head, head + heads)
            part = (do[one, :, all_], q[one, :, all_], k[one, :, mine], v[one, :, mine])
            got = (grads[0][one, :, all_], grads[1][one, :, mine], grads[2][one, :, mine])
            what = f"B={b} H={h}, from {batch} and {head}, deterministic={deterministic}"
            check_backward(*part, got, what, causal=True)


@pytest.mark.parametrize("deterministic", MODES)
def test_sequences_longer_than_65535(cp: Any, deterministic: bool) -> None:
    """Gradients depend on a window's width to both sides: parts are checked as problems."""
    s, width = 70001, 100
    do, q, k, v = problem(1, s, s, 1, 1, 64, 64, "bfloat16")
    options = opts(window=(width, 0))
    grads = backward(do, q, k, v, deterministic=deterministic, **options)
    for x in grads:
        assert not bool((bits(x) == FILLED[x.itemsize]).any()), (
            "a gradient was not written everywhere"
        )
    for begin in (0, 65300, s - 600):
        cut = slice(begin, begin + 600)
        part = four(x[:, cut] for x in (do, q, k, v))
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


@pytest.mark.parametrize(
    ("dtype", "deterministic"), [("float16", False), ("float16", True), ("float32", False)]
)
def test_more_than_two_to_the_31_elements_of_gradients(
    cp: Any, dtype: str, deterministic: bool
) -> None:
    """Every batch entry is the same memory, so that only the gradients take room."""
    b, s, d = 2**18 + 1, 64, 128
    assert b * s * d > 2**31
    do, q, k, v = problem(1, s, s, 1, 1, d, d, dtype)
    made = forward(q, k, v, causal=True)

    def many(x: Any) -> Any:
        return cp.broadcast_to(bits(x), (b, *x.shape[1:])).view(x.dtype)

    give_back_memory(cp)
    sums = 4 if dtype == "float16" and not deterministic else 0
    block = cp.empty(b * s * (d * (3 * q.itemsize + sums) + 16), np.uint8)
    block.data.memset(0xFF, block.nbytes)
    del block  # from which the call takes its memory
    args: Any = [many(x) for x in (do, q, k, v, *made)]
    call = opts(causal=True, deterministic=deterministic)
    grads = flash_attention_backward(*args, **call)
    expected = expected_gradients(do, q, k, v, causal=True)
    single = backward(do, q, k, v, made, **call)
    for i in (0, 2**17 - 1, 2**17, 2**18 - 1, 2**18):
        got = [x[i : i + 1] for x in grads]
        assert_gradients(got, expected, f"entry {i}, deterministic={deterministic}")
        if deterministic:
            assert_same_gradients(got, single, f"entry {i}")
    for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
        for part in np.array_split(np.arange(b), 9):
            mine = x[int(part[0]) : int(part[-1]) + 1]
            assert not bool((bits(mine) == FILLED[x.itemsize]).any()), (
                f"{name} was not written everywhere"
            )
    del grads, x, mine, got
    attention.launcher.cache_clear()
    give_back_memory(cp)
