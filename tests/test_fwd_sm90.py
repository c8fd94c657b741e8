"""fwd_sm90, asked for by name: the same tests on the emulated card and on a Hopper one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import gpu_oracle as oracle
import numpy as np
import pytest
from test_gpu_forward import run, run_checked
from test_kernels import Cell, arrays_of, for_problems, name_of, options_of

from cufa2 import device, flash_attention, params
from cufa2.kernels import KERNELS, MASKS, SCORES
from cufa2.testing import Backend

ROW = next(row for row in KERNELS if row.name == "fwd_sm90")
HALVES = ("float16", "bfloat16")
CELLS = [
    Cell("sm_90a", dtype, dim, mask, score)
    for score in SCORES
    for mask in MASKS
    for dim in ROW.head_dims
    for dtype in HALVES
]


@pytest.fixture(autouse=True)
def hopper(card: Backend) -> Iterator[None]:
    """An emulated Hopper card or a real one; what fwd_sm90 can take, it does."""
    with card.of("sm_90a"):
        if device.info(0).cc != (9, 0):
            pytest.skip("needs a Hopper card")
        with oracle.preferring(ROW.name) as asked:
            yield
    assert any(asked), "fwd_sm90 took none of the problems"


@pytest.mark.parametrize("cell", CELLS[::9], ids=name_of)
def test_problems(cell: Cell) -> None:
    def check(case: dict[str, Any]) -> None:
        (_, q, k, v), lens = arrays_of(cell, case)
        run_checked(q, k, v, f"{cell} {case}", **options_of(cell, case, q.shape[3]), **lens)

    for_problems(cell, 4, check, longest=500)


@pytest.mark.parametrize("dims", [(192, 128), (136, 100), (64, 40), (40, 64)])
def test_dims_of_their_own(dims: tuple[int, int]) -> None:
    q, k, v = oracle.inputs(1, 70, 300, 2, 1, *dims, "bfloat16")
    run_checked(q, k, v, f"{dims}", causal=True)


def rising(k: Any, most: float) -> Any:
    """Keys whose norms rise along the walk, which is from the last key to the first."""
    factor = np.linspace(most, 1, k.shape[1])[:, None, None]
    return oracle.to_device((oracle.host(k).astype(np.float64) * factor).astype(k.dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("most", [8.0, 300.0])
def test_scores_that_rise_beyond_the_exponent_range(dtype: str, most: float) -> None:
    """Blocks taken without maxima go wrong, and are taken again."""
    for causal in (False, True):
        q, k, v = oracle.inputs(1, 150, 700, 2, 1, 64, 64, dtype)
        run_checked(q, rising(k, most), v, f"{dtype} {most} {causal}", causal=causal)


def test_an_attention_sink() -> None:
    q, k, v = oracle.inputs(1, 150, 700, 2, 1, 64, 64, "float16")
    strong = oracle.host(k).copy()
    strong[:, 0] *= 30
    run_checked(q, oracle.to_device(strong), v, "sink", causal=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_nan_and_inf_reach_the_rows_that_see_them(dtype: str) -> None:
    """In V; the other rows are summed up as ever, to the accuracy of the rest."""
    _, q, k, v = oracle.problem(1, 200, 300, 1, 1, 64, 64, dtype)
    clean, lse = run(q, k, v, causal=True)
    spoilt = oracle.host(v).copy()
    spoilt[0, 200, 0, 3], spoilt[0, 210, 0, 5], spoilt[0, 220, 0, 5] = np.nan, np.inf, -np.inf
    o, lse_again = run(q, k, oracle.to_device(spoilt), causal=True)
    oracle.assert_same(lse_again, lse, "lse")
    o, clean = (oracle.host(x)[0, :, 0].astype(np.float64) for x in (o, clean))
    rest = np.delete(np.arange(64), (3, 5))
    np.testing.assert_array_equal(o[:, rest], clean[:, rest])  # not a bit moves there
    seen = np.arange(200)[:, None] + 100 >= np.array([200, 210, 220])
    expected = clean.copy()
    expected[seen[:, 0], 3] = np.nan
    expected[seen[:, 1], 5] = np.inf
    expected[seen[:, 2], 5] = np.nan
    np.testing.assert_array_equal(np.isfinite(o), np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(o[finite], expected[finite], atol=2**-7, rtol=0)
    np.testing.assert_array_equal(o[~finite], expected[~finite])


@pytest.mark.parametrize("scale", [None, -0.1])
def test_nan_does_not_leak_among_tiles_of_a_block(scale: float | None) -> None:
    """Blocks have several tiles: each is begun while the one before, which NaN reaches, ends."""
    heads = device.info(0).sm_count + 1
    q, k, v = oracle.inputs(1, 256, 256, heads, 1, 128, 128, "bfloat16")
    options = {"causal": True, "softmax_scale": scale}
    clean, lse = run_checked(q, k, v, f"{heads} heads, {scale}", **options)
    spoilt = oracle.host(v).copy()
    spoilt[0, 130, 0, 3] = np.nan
    o, lse_again = run(q, k, oracle.to_device(spoilt), **options)
    oracle.assert_same(lse_again, lse, "lse")
    got, expected = (oracle.host(x)[0].astype(np.float32) for x in (o, clean))
    # Summed up again, in another order: to a rounding of the result.
    np.testing.assert_allclose(got[:130, :, 3], expected[:130, :, 3], rtol=2**-7, atol=1e-6)
    expected[130:, :, 3], expected[:130, :, 3] = np.nan, got[:130, :, 3]
    np.testing.assert_array_equal(got, expected)  # not a bit moves elsewhere


def test_an_output_that_no_map_describes() -> None:
    """Rows in reverse: another kernel writes them."""
    q, k, v = oracle.inputs(1, 70, 90, 2, 1, 64, 64, "bfloat16")
    for step in (1, -1):
        o = oracle.empty(q.shape, "bfloat16")[:, ::step]
        _, lse = flash_attention(q, k, v, causal=True, return_lse=True, out=o)
        oracle.check(o, lse, q, k, v, f"every {step}", causal=True)


def test_the_order_of_threads_changes_no_bit() -> None:
    q, k, v = oracle.inputs(1, 200, 400, 4, 2, 64, 64, "bfloat16")
    o, lse = run(q, k, v, causal=True)
    for _ in range(3):
        again, lse_again = run(q, k, v, causal=True)
        oracle.assert_same(again, o, "o")
        oracle.assert_same(lse_again, lse, "lse")


PACKED = [(8, 2), (12, 3), (3, 1), (64, 2)]


@pytest.mark.parametrize("heads", PACKED)
@pytest.mark.parametrize("seqlen", [2, 20])
def test_query_heads_share_tiles(card: Backend, heads: tuple[int, int], seqlen: int) -> None:
    """Few queries: those of several heads are rows of one tile."""
    lens = {"seqlens_q": oracle.lengths(seqlen, 1), "seqlens_k": oracle.lengths(150, 97)}
    for options in ({"causal": True}, {"window": (40, 3), "softcap": 3.0}):
        q, k, v = oracle.inputs(2, seqlen, 150, *heads, 64, 64, "float16")
        run_checked(q, k, v, f"{heads} {seqlen} {options}", **options)
        run_checked(q, k, v, f"{heads} {seqlen} {options}, lengths", **options, **lens)


@pytest.mark.parametrize(
    ("dims", "dtype", "masks"),
    [
        ((64, 64), "float16", tuple(oracle.MASK_OPTIONS)),
        ((128, 72), "bfloat16", ("causal",)),
        ((256, 256), "float16", ("local",)),
    ],
)
def test_keys_are_split(
    card: Backend, dims: tuple[int, int], dtype: str, masks: tuple[str, ...]
) -> None:
    """Among tiles, and merged: all masks, lengths that leave parts empty, rows without keys."""
    with mock.patch.object(params, "SPLIT_KEYS", 128), many_multiprocessors():
        for heads, seqlen in (((4, 1), 1), ((2, 2), 5), ((2, 1), 37)):
            q, k, v = oracle.inputs(3, seqlen, 500, *heads, *dims, dtype)
            lens = {"seqlens_k": oracle.lengths(500, 3, 290)}
            for options in (oracle.MASK_OPTIONS[mask] for mask in masks):
                run_checked(q, k, v, f"{heads} {options}", **options)
                run_checked(q, k, v, f"{heads} {options}, lengths", **options, **lens)
            # A row's result does not depend on the batch.
            together, lse = run(q, k, v, causal=True)
            alone, lse_alone = run(q[1:2], k[1:2], v[1:2], causal=True)
            oracle.assert_same(alone, together[1:2], "o")
            oracle.assert_same(lse_alone, lse[1:2], "lse")


def test_more_parts_than_lanes() -> None:
    with mock.patch.object(params, "SPLIT_KEYS", 128), many_multiprocessors(20):
        q, k, v = oracle.inputs(3, 1, 40 * 128, 4, 1, 64, 64, "bfloat16")
        run_checked(q, k, v, "40 parts")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_values_in_split_keys(card: Backend, value: float) -> None:
    with mock.patch.object(params, "SPLIT_KEYS", 128), many_multiprocessors():
        q, k, v = oracle.inputs(1, 6, 500, 4, 2, 64, 64, "bfloat16")
        clean, lse = run(q, k, v, causal=True)
        spoilt = oracle.host(v).copy()
        spoilt[0, 497, :, 3] = value  # seen by the last three rows
        o, lse_again = run(q, k, oracle.to_device(spoilt), causal=True)
        oracle.assert_same(lse_again, lse, "lse")
        got, expected = (oracle.host(x).astype(np.float32)[0] for x in (o, clean))
        expected[3:, :, 3] = value
        np.testing.assert_array_equal(got, expected)


@contextmanager
def many_multiprocessors(least: int = 8) -> Iterator[None]:
    """A card of at least so many, so that keys are split for them."""
    info = device.info(0)
    more = replace(info, sm_count=max(info.sm_count, least))
    with mock.patch.object(device, "info", return_value=more):
        yield
