"""fwd_sm90, asked for by name: the same tests on the emulated card and on a Hopper one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gpu_oracle as oracle
import numpy as np
import pytest
from test_gpu_forward import run, run_checked
from test_kernels import Cell, arrays_of, for_problems, name_of, options_of

from cufa2 import device
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
    seen = np.arange(200)[:, None] + 100 >= np.array([200, 210, 220])
    expected = clean.copy()
    expected[seen[:, 0], 3] = np.nan
    expected[seen[:, 1], 5] = np.inf
    expected[seen[:, 2], 5] = np.nan
    np.testing.assert_array_equal(np.isfinite(o), np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(o[finite], expected[finite], atol=2**-7, rtol=0)
    np.testing.assert_array_equal(o[~finite], expected[~finite])


def test_the_order_of_threads_changes_no_bit() -> None:
    q, k, v = oracle.inputs(1, 200, 400, 4, 2, 64, 64, "bfloat16")
    o, lse = run(q, k, v, causal=True)
    for _ in range(3):
        again, lse_again = run(q, k, v, causal=True)
        oracle.assert_same(again, o, "o")
        oracle.assert_same(lse_again, lse, "lse")
