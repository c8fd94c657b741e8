"""The CUDA forward against a naive float64 oracle on the card: shapes, laws, known failures."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_oracle as oracle
import numpy as np
import pytest
from gpu_oracle import DTYPES, assert_same, bits, check, fill_nan, host, inputs, lengths, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from producers import Producer

from cufa2 import flash_attention, plan
from cufa2.dense import plain_attention, reference64
from cufa2.kernels import MASKS, SCORES
from cufa2.testing import make_inputs, numpy_dtype, time_gpu

FORWARDS = oracle.main_kernels("forward")
KINDS = (*dict.fromkeys(dtype for row in FORWARDS for dtype in row.dtypes), *oracle.FAST)
FIXTURE = Path(__file__).resolve().parent / "data" / "minilm_qkv.npz"


def opts(**options: Any) -> dict[str, Any]:
    return options


MASK_OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": opts(causal=True),
    "left": opts(window=(37, None)),
    "local": opts(window=(50, 21)),
}
EDGES = (1, 2, 3, 31, 63, 64, 65, 95, 96, 97, 127, 128, 129, 131, 191, 192, 193, 255, 257, 300)


def run(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """(o, lse) for (B, S, H, D) arrays, written over NaN."""
    (b, sq, h, _), dv = q.shape, v.shape[3]
    o, lse = (
        oracle.empty((b, sq, h, dv), q.dtype.name),
        oracle.empty((b, h, sq), oracle.lse_dtype(q.dtype.name)),
    )
    fill_nan(o, lse)
    given_back = flash_attention(q, k, v, return_lse=True, out=o, lse_out=lse, **options)
    assert given_back[0] is o
    assert given_back[1] is lse
    return o, lse


def run_checked(q: Any, k: Any, v: Any, name: str, **options: Any) -> tuple[Any, Any]:
    o, lse = run(q, k, v, **options)
    check(o, lse, q, k, v, name, **options)
    return o, lse


def test_oracle_agrees_with_the_dense_formulas_on_the_host(cp: Any) -> None:
    for dtype, (causal, window, softcap, scale) in itertools.product(
        DTYPES,
        ((True, None, 0.0, None), ("top_left", (5, 9), 3.0, -0.4), (False, (2, -1), 0.0, 0)),
    ):
        q, k, v, _ = make_inputs((2, 19, 26, 4, 2, 20, 12), dtype, 5)
        lens = opts(seqlens_q=np.array([19, 4], np.int32), seqlens_k=np.array([0, 26], np.int32))
        options = opts(causal=causal, window=window, softcap=softcap, softmax_scale=scale)
        on_q, on_k, on_v = (oracle.to_device(x) for x in (q, k, v))
        moved = {name: oracle.to_device(x) for name, x in lens.items()}
        o, lse = oracle.dense(on_q, on_k, on_v, **options, **moved)
        exact = reference64(q, k, v, **options, **lens)
        np.testing.assert_allclose(o, exact[0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse, exact[1], rtol=1e-12, atol=1e-13)
        ours, _ = oracle.dense(on_q, on_k, on_v, low=True, **options, **moved)
        plain, _ = plain_attention(q, k, v, **options, **lens)
        errors = [float(np.abs(x.astype(np.float64) - exact[0]).max()) for x in (ours, plain)]
        assert 0.5 < errors[0] / errors[1] < 2, f"{dtype} {options}: plain errors {errors}"


def test_oracle_rounds_the_operands_of_tf32(cp: Any) -> None:
    """Scores are those of inputs with 11 significant bits; P is rounded once more."""
    q, k, v, _ = make_inputs((2, 19, 26, 4, 2, 20, 12), "float32", 5)
    cut = [((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32) for x in (q, k, v)]
    exact, exact_lse = reference64(*cut, causal=True)
    on_device = (oracle.to_device(x) for x in (q, k, v))
    o, lse = oracle.dense(*on_device, causal=True, low=True, precision="tf32")
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-6)
    error = np.abs(o - exact).max()
    assert 1e-5 < error < 2.0**-11 * np.abs(v).max(), f"error of o {error:.1e}"


# Random problems

COMPILED = (0, *oracle.FORWARD.head_dims)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    fast: dict[str, Any] = {}
    if draw(st.integers(0, 4)) == 0:
        d, dv, dtype = draw(st.sampled_from(oracle.UNEQUAL))
        d, dv = (draw(st.sampled_from((n, n - 8, n - 5))) for n in (d, dv))
    else:
        dtype, fast = oracle.named(draw(st.sampled_from(KINDS)))
        size = draw(st.integers(1, len(COMPILED) - 1))
        dims = st.integers(COMPILED[size - 1] + 1, COMPILED[size])
        whole = st.sampled_from((COMPILED[size], COMPILED[size], COMPILED[size] - 8))
        d, dv = draw(st.one_of(whole, dims)), draw(st.one_of(whole, dims))
    length = st.one_of(st.sampled_from(EDGES), st.integers(1, 300))
    sq, sk = draw(length), draw(length)
    layout = draw(st.sampled_from(("bshd", "bshd", "bhsd", "flat")))
    hk, group = (1, 1) if layout == "flat" else (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    b = draw(st.integers(1, 3))
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
        "options": {
            "causal": draw(st.sampled_from((False, False, True, "bottom_right", "top_left"))),
            "window": draw(st.one_of(st.none(), st.tuples(bound, bound))),
            "softcap": draw(st.sampled_from((0.0, 0.0, 1.5, 5.0, 30.0))),
            "softmax_scale": scale and scale / math.sqrt(d),
            **fast,
        },
        "seed": draw(st.integers(0, 1000)),
    }


def axes(x: Any, layout: str) -> Any:
    """(B, S, H, D) seen in a layout, and back."""
    if layout == "flat":
        return x[:, :, 0] if x.ndim == 4 else x[:, :, None]
    return x.transpose(0, 2, 1, 3) if layout == "bhsd" else x


def drawn(shape: tuple[int, ...], layout: str, *args: Any) -> Any:
    """A contiguous array in `layout`, seen as (B, S, H, D)."""
    b, s, h, d = shape
    lying = {"bshd": shape, "bhsd": (b, h, s, d), "flat": (b, s, d)}[layout]
    return axes(normal(lying, *args), layout)


@settings(
    max_examples=260,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=problems())
def test_random_problems(cp: Any, case: dict[str, Any]) -> None:
    b, sq, sk, h, hk, d, dv = case["shape"]
    layout, dtype, options = case["layout"], case["dtype"], case["options"]
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))
    q, k, v = (
        drawn(s, layout, dtype, 3 * case["seed"] + n, case["amplitude"] if n < 2 else 1.0)
        for n, s in enumerate(shapes)
    )
    lens = {name: lengths(*n) for name, n in case["lens"].items() if n is not None}
    for x, name in ((q, "seqlens_q"), (k, "seqlens_k"), (v, "seqlens_k")):
        for i, n in enumerate(case["lens"][name] or ()):
            fill_nan(x[i, n:])
    o = axes(oracle.empty((*axes(q, layout).shape[:-1], dv), dtype), layout)
    lse = oracle.empty((b, h, sq), oracle.lse_dtype(dtype))
    fill_nan(o, lse)
    given_q, given_k, given_v = (axes(x, layout) for x in (q, k, v))
    flash_attention(
        given_q,
        given_k,
        given_v,
        **options,
        **lens,
        layout="bhsd" if layout == "bhsd" else "bshd",
        return_lse=True,
        out=axes(o, layout),
        lse_out=lse[:, 0] if layout == "flat" else lse,
    )
    check(o, lse, q, k, v, str(case), **options, **lens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", oracle.FORWARD.head_dims)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_kernel_of_this_card(cp: Any, mask: str, score: str, dim: int, kind: str) -> None:
    dtype, fast = oracle.named(kind)
    options = {**MASK_OPTIONS[mask], "softcap": 2.5 if score == "softcap" else 0.0, **fast}
    for n, (sq, sk) in enumerate(((200, 333), (129, 64), (97, 97))):
        q, k, v = inputs(2, sq, sk, 4, 2, dim, dim, dtype, n)
        run_checked(q, k, v, f"{kind} d{dim} {mask} {score} {sq}x{sk}", **options)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tf32_is_asked_for(cp: Any, dim: int) -> None:
    """Nobody gets its error unasked, and who asks does not get the same bits slower."""
    q, k, v = inputs(2, 200, 333, 4, 2, dim, dim, "float32")
    for options in (opts(), opts(causal=True)):
        exact = oracle.dense(q, k, v, **options)
        default = run(q, k, v, **options)
        spelled = run(q, k, v, precision=None, **options)
        fast = run(q, k, v, precision="tf32", **options)
        for n, (name, times) in enumerate((("o", 100), ("lse", 5))):
            assert_same(spelled[n], default[n], f"{name} with precision=None")
            errors = [float(np.abs(host(x[n]) - exact[n]).max()) for x in (default, fast)]
            assert times * errors[0] < errors[1], f"{name}, {options}: {errors}"
    for other in ("float16", "float64"):
        with pytest.raises(ValueError, match=r"^precision='tf32' is for float32 arrays; q, k and"):
            flash_attention(*inputs(1, 3, 3, 1, 1, 8, 8, other), precision="tf32")


def force_tile(monkeypatch: pytest.MonkeyPatch, row: Any, tile: Any) -> None:
    """Make the planner take this row and tile, as it does on a card with less shared memory."""
    choose = plan.choose

    def forced(problem: Any, info: Any) -> Any:
        chosen = choose(problem, info, row.name)
        return replace(chosen, variants=(replace(chosen.variant, tile=tile),))

    monkeypatch.setattr(plan, "choose", forced)


@pytest.mark.parametrize(
    "row", [r for r in FORWARDS if r.min_cc == (8, 0)], ids=lambda row: row.name
)
def test_tiles_of_other_cards(cp: Any, monkeypatch: pytest.MonkeyPatch, row: Any) -> None:
    tiles = oracle.foreign_tiles(row)
    assert len(tiles) >= 4, f"only {tiles}: cards with 99 and 163 KB take other tiles than an H200"
    for tile, dim in tiles:
        dtypes = [t for t in row.dtypes if numpy_dtype(t).itemsize == tile.itemsize]
        kinds = [*dtypes, *(f for f, (t, _) in oracle.FAST.items() if row.tf32 and t in dtypes)]
        with monkeypatch.context() as patch:
            force_tile(patch, row, tile)
            for n, (mask, (m, kind)) in enumerate(itertools.product(MASKS, enumerate(kinds))):
                dtype, fast = oracle.named(kind)
                score = tuple(SCORES)[(tuple(MASKS).index(mask) + m) % len(SCORES)]
                softcap = 2.5 if score == "softcap" else 0.0
                options = {"softcap": softcap, **MASK_OPTIONS[mask], **fast}
                for sq, sk in ((150, 201), (129, 64)):
                    q, k, v = inputs(2, sq, sk, 2, 1, dim, dim, dtype, n)
                    what = f"{tile} d{dim} {kind} {mask} {score} {sq}x{sk}"
                    run_checked(q, k, v, what, **options)
                lens = opts(seqlens_q=lengths(150, 3), seqlens_k=lengths(0, 190))
                q, k, v = inputs(2, 150, 201, 2, 1, dim, dim, dtype, n)
                fill_nan(q[1, 3:], k[0], v[0], k[1, 190:], v[1, 190:])
                what = f"{tile} d{dim} {kind} {mask} {score} with lengths"
                run_checked(q, k, v, what, **options, **lens)


@pytest.mark.parametrize("kind", KINDS)
def test_real_activations(cp: Any, kind: str) -> None:
    dtype, fast = oracle.named(kind)
    data = np.load(FIXTURE)
    real, longest = [int(n) for n in data["lengths"]], int(data["lengths"].max())
    for layer in range(len(data["layers"])):
        padded = {}
        for name in "qkv":
            rows = data[name][layer].astype(numpy_dtype(dtype))
            x = np.full((len(real), longest, *rows.shape[1:]), np.nan, rows.dtype)
            for i, (n, end) in enumerate(zip(real, np.cumsum(real), strict=True)):
                x[i, :n] = rows[end - n : end]
            padded[name] = oracle.to_device(x)
        lens = lengths(*real)
        for causal in (False, True):
            options = opts(causal=causal, seqlens_q=lens, seqlens_k=lens, **fast)
            q, k, v = (padded[name] for name in "qkv")
            run_checked(q, k, v, f"layer {layer} causal={causal}", **options)


# Laws


@pytest.mark.parametrize("kind", KINDS)
def test_keys_may_come_in_any_order(cp: Any, kind: str) -> None:
    dtype, fast = oracle.named(kind)
    q, k, v = inputs(2, 130, 333, 4, 2, 64, 64, dtype)
    order = cp.asarray(np.random.default_rng(0).permutation(333))
    mixed_k, mixed_v = (bits(x)[:, order].view(x.dtype) for x in (k, v))
    o, lse = run(q, mixed_k, mixed_v, **fast)
    check(o, lse, q, k, v, "permuted keys", **fast)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_causal_prefix_is_the_whole_truth_of_its_rows(cp: Any, dim: int, kind: str) -> None:
    dtype, fast = oracle.named(kind)
    q, k, v = inputs(2, 400, 400, 2, 1, dim, dim, dtype)
    for masks in (opts(causal=True), opts(causal="top_left", window=(70, 0))):
        options = {**masks, **fast}
        o, lse = run(q, k, v, **options)
        for n in (1, 64, 100, 128, 257, 384):
            part, part_lse = run(q[:, :n], k[:, :n], v[:, :n], **options)
            assert_same(part, o[:, :n], f"{options}: o of the first {n} rows")
            assert_same(part_lse, lse[:, :, :n], f"{options}: lse of the first {n} rows")


@pytest.mark.emulated(heads=[(12, 3)], kind=["float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(16, 2), (12, 2), (12, 3), (8, 1)])
def test_grouped_heads_are_repeated_heads(either: Any, heads: tuple[int, int], kind: str) -> None:
    dtype, fast = oracle.named(kind)
    h, hk = heads
    q, k, v = inputs(oracle.sizes(2, 1), 70, 141, h, hk, 64, 64, dtype)
    wide: Any = [either.repeat(bits(x), h // hk, axis=2).view(x.dtype) for x in (k, v)]
    for options in (opts(**fast), opts(causal=True, **fast)):
        for name, x, y in zip(
            ("o", "lse"), run(q, k, v, **options), run(q, *wide, **options), strict=True
        ):
            assert_same(x, y, f"{name} with {heads} heads, {options}")


@pytest.mark.emulated(seqlen=[70], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen", [1, 70, 128, 300])
def test_split_keys_merge_by_lse(either: Any, seqlen: int, dtype: str) -> None:
    q, k, v = inputs(2, 70, seqlen, 4, 2, 64, 64, dtype)
    whole = run_checked(q, k, v, f"S={seqlen}")
    for cut in {0, seqlen // 2, seqlen}:
        parts = [run(q, x, y) for x, y in ((k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:]))]
        os = [host(o).astype(np.float64) for o, _ in parts]
        ls = [host(lse).astype(np.float64) for _, lse in parts]
        for (o, lse), size in zip(parts, (cut, seqlen - cut), strict=True):
            assert lse.dtype == np.float32, f"lse is {lse.dtype}"
            assert lse.shape == (2, 4, 70), f"lse has shape {lse.shape}"
            if size == 0:
                assert not bits(o).any(), "o of no keys is not zero"
                assert bool((lse == -np.inf).all()), "lse of no keys is not -inf"
        total = np.logaddexp(*ls)
        weights = [np.exp(lse - total).transpose(0, 2, 1)[..., None] for lse in ls]
        merged = sum(w * o for w, o in zip(weights, os, strict=True))
        merged_o = oracle.to_device(np.asarray(merged).astype(numpy_dtype(dtype)))
        merged_lse = oracle.to_device(total.astype(np.float32))
        check(merged_o, merged_lse, q, k, v, f"S={seqlen} cut at {cut}, merged")
        if cut in (0, seqlen):
            assert_same(merged_o, whole[0], f"S={seqlen}: one part empty")
    empty_o, empty_lse = run(q, k[:, :0], v[:, :0])
    assert not bits(empty_o).any(), "o of no keys"
    assert bool((empty_lse == -np.inf).all()), "lse of no keys"


@pytest.mark.emulated(dim=[64], kind=["float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_batch_mates_do_not_matter(either: Any, dim: int, kind: str) -> None:
    b, (dtype, fast) = 5, oracle.named(kind)
    q, k, v = inputs(b, 150, 170, 4, 2, dim, dim, dtype)
    lens_q, lens_k = [150, 3, 0, 128, 77], [170, 0, 33, 64, 170]
    for masks in (opts(), opts(causal=True, softcap=3.0), opts(window=(20, 20))):
        options = {**masks, **fast}
        both = opts(seqlens_q=lengths(*lens_q), seqlens_k=lengths(*lens_k))
        together = run(q, k, v, **options, **both)
        for i in range(b):
            alone = opts(seqlens_q=lengths(lens_q[i]), seqlens_k=lengths(lens_k[i]))
            single = run(q[i : i + 1], k[i : i + 1], v[i : i + 1], **options, **alone)
            cut_q, cut_k = (slice(0, n[i]) for n in (lens_q, lens_k))
            dense = run(q[i : i + 1, cut_q], k[i : i + 1, cut_k], v[i : i + 1, cut_k], **options)
            for n, name in enumerate(("o", "lse")):
                what = f"{name} of sequence {i}, {options}"
                assert_same(together[n][i : i + 1], single[n], f"{what}, alone")
            rows = slice(0, lens_q[i])
            assert_same(together[0][i : i + 1, rows], dense[0], f"o of {i}, {options}, cut")
            assert_same(together[1][i : i + 1, :, rows], dense[1], f"lse of {i}, {options}, cut")
        bad_q, bad_k, bad_v = (oracle.copy(x) for x in (q, k, v))
        for x in (bad_q, bad_k, bad_v):
            fill_nan(x[1:2], x[3:])
        among = run(bad_q, bad_k, bad_v, **options, **both)
        for i in (0, 2):
            assert_same(among[0][i], together[0][i], f"o of {i} among NaN, {options}")
            assert_same(among[1][i], together[1][i], f"lse of {i} among NaN, {options}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fifty_runs_give_the_same_bits(cp: Any, dim: int, kind: str) -> None:
    dtype, fast = oracle.named(kind)
    q, k, v = inputs(2, 1023, 1025, 8, 2, dim, dim, dtype)
    busy = cp.cuda.Stream(non_blocking=True)
    for options in (opts(causal=True, **fast), opts(softcap=5.0, **fast)):
        first, first_lse = run(q, k, v, **options)
        wrong = cp.zeros(1, np.int64)
        for _ in range(50):
            with busy:
                oracle.spin(0.05)
            o, lse = run(q, k, v, **options)
            wrong += (bits(o) != bits(first)).sum() + (bits(lse) != bits(first_lse)).sum()
        assert int(wrong[0]) == 0, (
            f"d{dim} {kind} {options}: {int(wrong[0])} bits of 50 runs moved"
        )


# Known failures of other libraries, by their number in the list of cases


@pytest.mark.emulated(kind=["float16", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_case_01_more_queries_than_keys(either: Any, kind: str) -> None:
    dtype, fast = oracle.named(kind)
    for sq, sk in ((5, 2), (2, 5), (130, 200), (256, 3), (129, 128)):
        q = normal((1, sq, 2, 64), dtype, 1, 3.0)
        k, v = normal((1, sk, 2, 64), dtype, 2), normal((1, sk, 2, 64), dtype, 3)
        o, lse = run_checked(q, k, v, f"{sq}x{sk}", causal=True, **fast)
        dark = max(0, sq - sk)
        assert not bits(o[:, :dark]).any(), f"{sq}x{sk}: rows without keys are not zero"
        assert bool((lse[:, :, :dark] == -np.inf).all()), f"{sq}x{sk}: their lse is not -inf"
        assert bool(either.isfinite(lse[:, :, dark:]).all()), f"{sq}x{sk}: the other rows' lse"
        run_checked(q, k, v, f"{sq}x{sk} top left", causal="top_left", **fast)


@pytest.mark.emulated(dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_02_window_edges(either: Any, dtype: str) -> None:
    q, k, v = inputs(1, 7, 7, 2, 2, 64, 64, dtype)
    causal = run(q, k, v, causal=True)
    for window in ((0, 0), (6, 0), (7, 0), (-1, 0), (2, 0), (0, 2), (1, 1)):
        o, lse = run_checked(q, k, v, f"window {window}", window=window)
        if window in ((6, 0), (7, 0), (-1, 0)):
            assert_same(o, causal[0], f"o of window {window}")
            assert_same(lse, causal[1], f"lse of window {window}")
    o, _ = run(q, k, v, window=(0, 0))
    assert_same(o, v, "window (0, 0) gives v itself")
    before, before_lse = run(q, k, v, window=(2, 0))
    k2, v2 = oracle.copy(k), oracle.copy(v)
    for x, seed in ((k2, 8), (v2, 9)):
        bits(x)[:, 5:] = bits(normal((1, 2, 2, 64), dtype, seed))
    after, after_lse = run(q, k2, v2, window=(2, 0))
    assert_same(after[:, :5], before[:, :5], "rows that may not see keys 5 and 6")
    assert_same(after_lse[:, :, :5], before_lse[:, :, :5], "their lse")


@pytest.mark.emulated(dim=[64], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_case_04_running_maximum_starts_low_enough(either: Any, dim: int, dtype: str) -> None:
    for q0, k0, causal in ((1.0, -1600.0, True), (16.0, -50000.0, False)):
        q = np.zeros((1, 130, 2, dim), numpy_dtype(dtype))
        k = np.zeros((1, 200, 2, dim), numpy_dtype(dtype))
        q[..., 0], k[..., 0] = q0, k0
        on_q, on_k = (oracle.to_device(x) for x in (q, k))
        v = normal((1, 200, 2, dim), dtype, 4)
        name = f"logits of {q0 * k0 / math.sqrt(dim)}"
        o, lse = run_checked(on_q, on_k, v, name, causal=causal)
        assert bits(o).any(axis=-1).all(), f"{name}: a row of zeros"
        logit = float(q[0, 0, 0, 0]) * float(k[0, 0, 0, 0]) / math.sqrt(dim)
        expected = logit + math.log(200)
        np.testing.assert_allclose(host(lse)[0, :, -1], expected, rtol=1e-5, err_msg=name)


def test_case_05_products_beyond_float16(either: Any) -> None:
    for kind in KINDS:
        dtype, fast = oracle.named(kind)
        q = oracle.to_device(np.full((1, 70, 2, 128), 256, numpy_dtype(dtype)))
        v = normal(q.shape, dtype, 1)
        _, lse = run_checked(q, oracle.copy(q), v, kind, **fast)
        expected = 256 * 256 * 128 / math.sqrt(128) + math.log(70)
        np.testing.assert_allclose(host(lse), expected, rtol=1e-5, err_msg=kind)


INF_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}
SHIELDS: dict[str, dict[str, Any]] = {
    "causal": opts(causal=True),
    "causal top left": opts(causal="top_left"),
    "window": opts(window=(3, 2)),
    "left window": opts(window=(3, None)),
    "right window": opts(window=(None, 4)),
    "softcap causal": opts(causal=True, softcap=2.0),
}


def sees(options: dict[str, Any], sq: int, sk: int) -> Any:
    """(Sq, Sk) booleans: which query sees which key."""
    causal, (left, right) = options.get("causal"), options.get("window", (None, None))
    i = np.arange(sq)[:, None] + (0 if causal == "top_left" else sk - sq)
    j = np.arange(sk)[None, :]
    seen = np.ones((sq, sk), bool)
    if causal:
        seen &= j <= i
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


@pytest.mark.emulated(where=["q nan", "v inf"], dim=[64], kind=["float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("where", ["k nan", "v nan", "q nan", "k inf", "v inf"])
def test_case_06_bad_values_reach_who_sees_them(
    either: Any, where: str, dim: int, kind: str
) -> None:
    dtype, fast = oracle.named(kind)
    size = 8 * numpy_dtype(dtype).itemsize
    value = (1 << size) - 1 if where.endswith("nan") else INF_BITS[dtype]
    for (name, shield), (sq, sk, at) in itertools.product(
        SHIELDS.items(), ((8, 8, 5), (150, 170, 77))
    ):
        options = {**shield, **fast}
        q, k, v = inputs(1, sq, sk, 2, 1, dim, dim, dtype)
        if where == "k inf":
            bits(q)[...] &= bits(q).dtype.type((1 << (size - 1)) - 1)  # logits of +inf, not -inf
        clean, clean_lse = run(q, k, v, **options)
        if where[0] == "q":
            bits(q)[:, at] = value
        elif where == "k inf":
            bits(k)[:, at, :, 0] = value
        elif where[0] == "k":
            bits(k)[:, at] = value
        else:
            bits(v)[:, at, :, 3] = value
        if where == "k inf" and "softcap" in options:
            continue  # a capped +inf is an ordinary logit
        what = f"{where} at {at}, {name}, {sq}x{sk} d{dim} {kind}"
        o, lse = run(q, k, v, **options)
        seen = sees(options, sq, sk)
        hit = np.arange(sq) == at if where[0] == "q" else seen[:, at]
        got, expected = host(o).astype(np.float32)[0], host(clean).astype(np.float32)[0]
        same = bits(host(o))[0] == bits(host(clean))[0]
        if where[0] == "v":
            bad = np.isinf if where == "v inf" else np.isnan
            assert bad(got[hit, :, 3]).all(), f"{what}: a row that sees it lacks it"
            assert np.isfinite(got[~hit]).all(), f"{what}: it leaked to other rows"
            rest = np.arange(dim) != 3
            assert same[:, :, rest].all(), f"{what}: other columns changed"
            shielded = ~hit
            assert_same(lse, clean_lse, f"{what}: lse")
        else:
            lit = hit & seen.any(axis=1)
            assert np.isnan(got[lit]).all(), f"{what}: a row that sees it is not NaN"
            assert np.isfinite(got[~lit]).all(), f"{what}: it leaked to other rows"
            shielded = ~lit
            kept = bits(host(lse))[0] == bits(host(clean_lse))[0]
            assert kept[:, ~lit].all(), f"{what}: lse of shielded rows changed"
        moved = np.abs(got - expected)[shielded].max(initial=0)
        changed = np.count_nonzero(~same[shielded])
        assert not changed, f"{what}: {changed} values of shielded rows moved by up to {moved:.1e}"


NAN = oracle.NAN_BITS


@pytest.mark.emulated(dim=[96], dtype=["float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_case_06_padding_may_hold_anything(either: Any, dim: int, dtype: str) -> None:
    lens = opts(seqlens_q=lengths(61, 200, 1), seqlens_k=lengths(130, 1, 201))
    q, k, v = inputs(3, 200, 201, 2, 1, dim, dim, dtype)
    for options in MASK_OPTIONS.values():
        results = []
        for value in (0, NAN, INF_BITS[dtype]):
            a, b, c = (oracle.copy(x) for x in (q, k, v))
            for i, (n, m) in enumerate(zip((61, 200, 1), (130, 1, 201), strict=True)):
                bits(a)[i, n:] = value
                bits(b)[i, m:] = value
                bits(c)[i, m:] = value
            results.append(run(a, b, c, **options, **lens))
        for other in results[1:]:
            assert_same(other[0], results[0][0], f"o with {options}")
            assert_same(other[1], results[0][1], f"lse with {options}")
        o, lse = results[1]
        check(o, lse, q, k, v, f"d{dim} {options}", **options, **lens)


def test_case_09_every_spelling_of_a_number(cp: Any) -> None:
    q, k, v = inputs(1, 40, 50, 2, 2, 64, 64, "float16")
    spellings: dict[str, tuple[Any, ...]] = {
        "softmax_scale": (1.0, 1, np.float32(1), np.float64(1), np.array(1.0), np.array(1)),
        "softcap": (30.0, 30, np.float32(30), np.float64(30), np.array(30.0), np.int64(30)),
        "window": ((5, 3), (np.int64(5), np.int32(3)), [5, 3], np.array([5, 3])),
        "causal": (True, "bottom_right", np.True_),
    }
    for option, values in spellings.items():
        first = run_checked(q, k, v, option, **{option: values[0]})
        for value in values[1:]:
            o, lse = run(q, k, v, **{option: value})
            assert_same(o, first[0], f"o with {option}={value!r}")
            assert_same(lse, first[1], f"lse with {option}={value!r}")


@pytest.mark.emulated(dtype=["float16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_23_scale_zero_and_negative(either: Any, dtype: str) -> None:
    q, k, v = inputs(1, 90, 120, 2, 1, 64, 64, dtype)
    for causal, softcap in itertools.product((False, True), (0.0, 5.0)):
        options = opts(causal=causal, softcap=softcap)
        seen = np.full(90, 120) if not causal else np.arange(31, 121)
        for zero in (0, 0.0, np.float32(0), -0.0):
            _, lse = run_checked(q, k, v, f"{zero!r} {options}", softmax_scale=zero, **options)
            expected = np.broadcast_to(np.log(seen), (1, 2, 90))
            np.testing.assert_allclose(host(lse), expected, rtol=1e-6, err_msg=str(options))
        big = normal(q.shape, dtype, 7, 4.0)
        minus = oracle.to_device(-host(big))
        negative = run_checked(big, k, v, f"-0.3 {options}", softmax_scale=-0.3, **options)
        positive = run(minus, k, v, softmax_scale=0.3, **options)
        assert_same(negative[0], positive[0], f"o {options}")
        assert_same(negative[1], positive[1], f"lse {options}")
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="softmax_scale"):
            flash_attention(q, k, v, softmax_scale=bad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 66])
def test_case_25_empty_sizes(cp: Any, dim: int, dtype: str) -> None:
    shapes = ((0, 5, 7, 2, 1), (2, 0, 7, 2, 1), (2, 5, 0, 2, 1), (0, 0, 0, 2, 1), (2, 5, 7, 0, 0))
    cases: Any = itertools.product(shapes, (False, True, "top_left"))
    for shape, causal in cases:
        b, sq, sk, h, hk = shape
        q, k, v = inputs(b, sq, sk, h, hk, dim, dim, dtype)
        for wrap in (lambda x: x, Producer):
            o, lse = flash_attention(wrap(q), wrap(k), wrap(v), causal=causal, return_lse=True)
            assert (o.shape, lse.shape) == ((b, sq, h, dim), (b, h, sq)), f"{shape}"
            assert (o.dtype.name, lse.dtype.name) == (dtype, "float32"), f"{shape}"
            assert not bits(o).any(), f"{shape}: o of no keys"
            assert bool((lse == -np.inf).all()), f"{shape}: lse of no keys"
    run_checked(*inputs(1, 5, 7, 2, 1, dim, dim, dtype), "a plain call afterwards")


def test_case_26_inputs_are_never_written(cp: Any) -> None:
    q, k, v = inputs(2, 70, 90, 4, 2, 64, 64, "bfloat16")
    lens = lengths(70, 3)
    before = [oracle.copy(x) for x in (q, k, v, lens)]
    for wrap in (lambda x: x, lambda x: Producer(x, readonly=True)):
        for options in (opts(softmax_scale=-0.2), opts(softmax_scale=0.0), opts(causal=True)):
            flash_attention(wrap(q), wrap(k), wrap(v), seqlens_q=lens, **options)
            for x, old, name in zip((q, k, v, lens), before, ("q", "k", "v", "lens"), strict=True):
                assert_same(x, old, f"{name} after {options}")
    one = cp.broadcast_to(bits(k)[:, :1], k.shape).view(k.dtype)
    run_checked(q, one, v, "k of one row, broadcast")


@pytest.mark.emulated(dim=[64], dtype=["float16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 256])
def test_case_31_sequences_of_length_zero(either: Any, dim: int, dtype: str) -> None:
    q, k, v = inputs(4, 5, 7, 9, 3, dim, dim, dtype)
    pairs = (((0, 5, 0, 4), (3, 0, 7, 2)), ((0, 5, 0, 4), (0, 0, 0, 0)), ((0, 1, 0, 1), (7,) * 4))
    for (lens_q, lens_k), causal in itertools.product(pairs, (False, True)):
        lens = opts(seqlens_q=lengths(*lens_q), seqlens_k=lengths(*lens_k))
        a, b, c = (oracle.copy(x) for x in (q, k, v))
        for i in range(4):
            fill_nan(a[i, lens_q[i] :], b[i, lens_k[i] :], c[i, lens_k[i] :])
        what = f"{lens_q} {lens_k} causal={causal}"
        o, lse = run_checked(a, b, c, what, causal=causal, **lens)
        last = slice(0, lens_q[3]), slice(0, lens_k[3])
        alone = run(q[3:, last[0]], k[3:, last[1]], v[3:, last[1]], causal=causal)
        assert_same(o[3:, last[0]], alone[0], f"o of the last, {what}")
        assert_same(lse[3:, :, last[0]], alone[1], f"lse of the last, {what}")


@pytest.mark.emulated(dtype=["float16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_35_softcap_comes_before_the_mask(either: Any, dtype: str) -> None:
    q, k, v = inputs(1, 4, 4, 1, 1, 64, 64, dtype)
    bits(q)[...] = 0
    bits(v)[:, 2:] = bits(oracle.to_device(np.full((1, 2, 1, 64), 3e4, v.dtype)))
    for options in (opts(seqlens_k=lengths(2)), opts(causal="top_left", window=(1, 0))):
        o, _ = run_checked(q, k, v, str(options), softcap=2.0, **options)
        mean = host(v).astype(np.float64)[0, :2, 0].mean(axis=0)
        got = host(o).astype(np.float64)[0, 1, 0]
        np.testing.assert_allclose(got, mean, rtol=2e-2, atol=1e-2, err_msg=str(options))
    off, none = (run(q, k, v, **options) for options in (opts(softcap=0.0), {}))
    assert_same(off[0], none[0], "softcap 0 is off")


@pytest.mark.parametrize("softcap", [0.01, 50.0, 1e4, 1e30])
def test_large_and_small_softcaps(cp: Any, softcap: float) -> None:
    """A cap far above the scores changes nothing, and does not magnify the error of tanh."""
    q, k, v = inputs(2, 200, 300, 4, 2, 64, 64, "bfloat16")
    run_checked(q, k, v, f"softcap={softcap}", softcap=softcap, causal=True)


@pytest.mark.emulated(dim=[64], kind=["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", [t for t in KINDS if t != "float16"])
@pytest.mark.parametrize("dim", [64, 256])
def test_logits_beyond_the_type_they_add_up_in(either: Any, dim: int, kind: str) -> None:
    """Of all mantissas: the halves of a float32 have any signs. -Inf means that no key is seen,
    +Inf that the row has no answer; neither is mistaken for the other or reaches other rows."""
    dtype, fast = oracle.named(kind)
    q, k, v = inputs(1, 130, 90, 2, 1, dim, dim, dtype)
    large = 1e200 if dtype == "float64" else 1e30
    rng = np.random.default_rng(0)
    for sign in (-1, 1):
        a, b = host(q), host(k)
        a[..., 0] = 0
        a[:, :40, :, 0] = large * rng.uniform(1, 2, (1, 40, 2))
        b[..., 0] = sign * large * rng.uniform(1, 2, (1, 90, 1))
        x, y = oracle.to_device(a), oracle.to_device(b)
        o, lse = run(x, y, v, **fast)
        found = host(lse)[:, :, :40]
        if sign < 0:
            assert (found == -np.inf).all(), "a row sees a key"
            assert not host(o)[:, :40].any(), "a row that sees no key is not zero"
        else:
            assert not np.isfinite(found).any(), "an infinite logit was dropped"
            assert not (found == -np.inf).any(), "+Inf was taken for -Inf"
            assert not np.isfinite(host(o)[:, :40].astype(np.float64)).any(), "it has no answer"
        check(o[:, 40:], lse[:, :, 40:], x[:, 40:], y, v, f"other rows, sign {sign}", **fast)


@pytest.mark.emulated(dtype=["float16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_38_one_to_three_tokens(either: Any, dtype: str) -> None:
    for sq, sk, causal in itertools.product((1, 2, 3), (1, 2, 3, 17), (False, True)):
        q, k, v = inputs(2, sq, sk, 4, 2, 64, 64, dtype, sq * 20 + sk)
        o, _ = run_checked(q, k, v, f"{sq}x{sk} causal={causal}", causal=causal)
        if sk == 1 and not causal:
            assert_same(
                o, either.repeat(bits(v), 2, axis=2).repeat(sq, axis=1).view(v.dtype), "Sk=1"
            )


def test_unwritten_results_would_show(cp: Any) -> None:
    """Results that the library allocates: from a pool whose free blocks are full of NaN."""
    q, k, v = inputs(3, 200, 150, 4, 2, 66, 66, "float16")
    lens = opts(seqlens_q=lengths(200, 0, 7), seqlens_k=lengths(0, 150, 20))
    for options in (opts(), opts(causal=True)):
        for _ in range(3):
            blocks = [cp.full(n // 4, np.nan, np.float32) for n in (q.nbytes, 3 * 4 * 200 * 4) * 4]
            del blocks
            o, lse = flash_attention(q, k, v, return_lse=True, **options, **lens)
            check(o, lse, q, k, v, f"poisoned pool, {options}", **options, **lens)


# Blocks outside the mask are skipped


def milliseconds(q: Any, k: Any, v: Any, **options: Any) -> float:
    o = oracle.empty((*q.shape[:3], v.shape[3]), q.dtype.name)

    def call() -> None:
        flash_attention(q, k, v, out=o, **options)

    return time_gpu(call, warmup=3, repeats=7)


def test_skipped_blocks_cost_nothing(cp: Any) -> None:
    q, k, v = inputs(1, 16384, 16384, 16, 16, 128, 128, "bfloat16")
    full = milliseconds(q, k, v)
    for options in (
        opts(window=(256, 0)),
        opts(window=(100, 100)),
        opts(window=(256, None), causal=True),
        opts(seqlens_k=lengths(256)),
        opts(seqlens_q=lengths(256)),
        opts(causal="top_left", seqlens_q=lengths(1024)),
    ):
        narrow = milliseconds(q, k, v, **options)
        assert 3 * narrow < full, f"{options}: {narrow:.3f} ms, without: {full:.3f} ms"
    half = milliseconds(q, k, v, causal=True)
    assert half < 0.75 * full, f"causal: {half:.3f} ms, without: {full:.3f} ms"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_skipped_blocks_are_not_read(cp: Any, dim: int, dtype: str) -> None:
    q, k, v = inputs(1, 64, 1024, 2, 2, dim, dim, dtype)
    for options, seen in (
        (opts(causal="top_left"), slice(0, 64)),
        (opts(window=(100, 30)), slice(1024 - 64 - 100, 1024)),
    ):
        clean = run(q, k, v, **options)
        # fwd_sm90 multiplies whole blocks and mends what NaN in them has reached: right, but
        # rounded otherwise. Blocks that nobody sees move no bit.
        block = oracle.forward_variant(dim, dtype, options).tile.block_k
        whole = slice(seen.start // block * block, -(-seen.stop // block) * block)
        for value in (NAN, INF_BITS[dtype]):
            for part in (whole, seen):
                hurt: Any = []
                for x in (k, v):
                    y = oracle.copy(x)
                    bits(y)[...] = value
                    bits(y)[:, part] = bits(x)[:, part]
                    hurt.append(y)
                o, lse = run(q, *hurt, **options)
                what = f"{options}, {value:#x} outside {part}"
                assert_same(lse, clean[1], f"lse with {what}")
                if part == whole:
                    assert_same(o, clean[0], f"o with {what}")
                check(o, lse, q, k, v, what, **options)


# Sizes


def some_rows(b: int, h: int, s: int, count: int = 120) -> list[tuple[int, int, int]]:
    """First, last and random (batch, head, row) triples."""
    rng = np.random.default_rng(0)
    ends = list(itertools.product({0, b - 1}, {0, h - 1}, {0, s - 1}))
    random = zip(*(rng.integers(0, n, count).tolist() for n in (b, h, s)), strict=True)
    return [*ends, *random]


@pytest.mark.parametrize("batch_and_heads", [(70000, 1), (1, 70000), (7000, 10)])
def test_more_heads_than_a_grid_axis(cp: Any, batch_and_heads: tuple[int, int]) -> None:
    b, h = batch_and_heads
    q, k, v = inputs(b, 17, 19, h, h, 32, 32, "bfloat16")
    o, lse = run(q, k, v, causal=True)
    assert not bool(cp.isnan(lse).any()), "lse was not written everywhere"
    assert not bool((bits(o) == NAN).any()), "o was not written everywhere"
    check(o, lse, q, k, v, f"B={b} H={h}", rows=some_rows(b, h, 17), causal=True)


def test_sequences_longer_than_65535(cp: Any) -> None:
    s = 70001
    q, k, v = inputs(1, s, s, 1, 1, 64, 64, "bfloat16")
    edges = [(0, 0, i) for i in (1, 127, 128, 65534, 65535, 65536, 65537, s - 2)]
    for options in (opts(window=(100, 0)), opts(window=(33, 70), softcap=5.0), opts(causal=True)):
        o, lse = run(q, k, v, **options)
        assert not bool(cp.isnan(lse).any()), f"{options}: lse was not written everywhere"
        rows = some_rows(1, 1, s) + edges
        check(o, lse, q, k, v, f"S={s} {options}", rows=rows, **options)


def give_back_memory(cp: Any) -> None:
    cp.cuda.Device().synchronize()
    cp.get_default_memory_pool().free_all_blocks()


def test_more_than_two_to_the_31_elements_of_q_and_o(cp: Any) -> None:
    b, s = 257, 65536
    base = normal((s, 1, 128), "bfloat16", 1)
    q = oracle.empty((b, s, 1, 128), "bfloat16")
    assert q.size > 2**31
    bits(q)[...] = bits(base)
    k, v = normal((b, 16, 1, 128), "bfloat16", 2), normal((b, 16, 1, 128), "bfloat16", 3)
    o, lse = oracle.empty(q.shape, "bfloat16"), oracle.empty((b, 1, s), "float32")
    o.data.memset(0xFF, o.nbytes)
    lse.data.memset(0xFF, lse.nbytes)
    flash_attention(q, k, v, return_lse=True, out=o, lse_out=lse)
    edges = [(i, 0, j) for i in (127, 128, 255, 256) for j in (0, 1, 32767, s - 1)]
    check(o, lse, q, k, v, "4.3 GB of q", rows=some_rows(b, 1, s) + edges)
    assert not bool(cp.isnan(lse).any()), "lse was not written everywhere"
    del q, o, lse
    give_back_memory(cp)


def test_more_than_two_to_the_31_elements_of_k_and_v(cp: Any) -> None:
    """In strides: rows 65536 elements apart, so that one head spans 2^32, and a batch entry more;
    the memory between them is NaN."""
    b, sk, between = 2, 65536, 512
    wide_k, wide_v = (oracle.empty((b, sk, between, 128), "bfloat16") for _ in "kv")
    for x in (wide_k, wide_v):
        x.data.memset(0xFF, x.nbytes)
    k, v = wide_k[:, :, 509:511], wide_v[:, :, 3:5]
    for x, seed in ((k, 1), (v, 2)):
        for i in range(b):
            bits(x)[i] = bits(normal((sk, 2, 128), "bfloat16", 2 * seed + i))
    assert k.strides[1] // 2 * sk >= 2**32
    q = normal((b, 64, 4, 128), "bfloat16", 9)
    for options in (opts(), opts(causal=True)):
        o, lse = run(q, k, v, **options)
        rows = some_rows(b, 4, 64, 12)
        check(o, lse, q, k, v, f"k and v of 17 GB each, {options}", rows=rows, **options)
    del wide_k, wide_v, k, v
    give_back_memory(cp)


@pytest.mark.parametrize("heads_kv", [8, 1])
def test_case_28_one_query_and_a_million_keys(cp: Any, heads_kv: int) -> None:
    sk = 1 << 20
    q, k, v = inputs(1, 1, sk, 8, heads_kv, 128, 128, "bfloat16")
    for options in (opts(causal=True), opts(window=(5000, 0))):
        o, lse = run(q, k, v, **options)
        rows = [(0, 0, 0), (0, 3, 0), (0, 7, 0)]
        check(o, lse, q, k, v, f"Hk={heads_kv} {options}", rows=rows, **options)
    del k, v
    give_back_memory(cp)
