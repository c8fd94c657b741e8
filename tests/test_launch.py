"""What a launch tells the kernels, checked without a GPU: parameters, work memory, order."""

from __future__ import annotations

import itertools
import math
import struct
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa2 import device, launch, plan
from cufa2 import params as layouts
from cufa2.arrays import ArrayView
from cufa2.kernels import Variant
from cufa2.params import BWD_PARAMS, FORMATS, FWD_PARAMS, PARAMS, WORK_ROWS
from cufa2.problem import DTYPES, ITEMSIZES, Problem

PROBLEM = Problem(
    direction="forward",
    dtype="float16",
    batch=2,
    seqlen_q=100,
    seqlen_k=120,
    num_heads=6,
    num_heads_kv=2,
    head_dim=64,
    head_dim_v=32,
    softmax_scale=0.125,
)
L2 = 50 << 20


def view(pointer: int, *shape: int) -> ArrayView:
    """A contiguous fp16 view at an address that nobody reads."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return ArrayView(pointer, shape, strides, "float16", ("cuda", 0), "cupy", False, None)


VIEWS = {
    "q": view(16, 2, 100, 6, 64),
    "k": view(32, 2, 120, 2, 64),
    "v": view(48, 2, 120, 2, 32),
    "o": view(64, 2, 100, 6, 32),
}


GRADS = {
    "grad_o": replace(view(128, 2, 100, 6, 32), strides=(0, 0, 0, 1)),
    "dq": view(144, 2, 100, 6, 64),
    "dk": view(160, 2, 120, 2, 64),
    "dv": view(176, 2, 120, 2, 32),
}
LSE = replace(view(112, 2, 6, 100), dtype="float32")
LENS: Any = {"seqlens_q": view(80, 2), "seqlens_k": replace(view(96, 2), strides=(3,))}
WORK = {"row_lse": 256, "delta": 512, "dq_sum": 1024}


def params(problem: Problem, **rows: Any) -> dict[str, Any]:
    rows = {"lse": None, "seqlens_q": None, "seqlens_k": None} | rows
    return layouts.forward_values(problem, {**VIEWS, **rows}, L2)


def backward(problem: Problem, work: Any = WORK, **rows: Any) -> dict[str, Any]:
    rows = {"lse": LSE, "dlse": None, "seqlens_q": None, "seqlens_k": None} | rows
    views = {**VIEWS, **GRADS, **rows}
    return layouts.backward_values(replace(problem, direction="backward"), views, work, L2)


def unpack(name: str, values: dict[str, Any]) -> dict[str, Any]:
    fields = [n for n, _ in PARAMS[name]]
    return dict(zip(fields, struct.unpack(FORMATS[name], layouts.pack(name, values)), strict=True))


def test_every_backward_field_is_filled_and_packs() -> None:
    values = backward(PROBLEM, dlse=replace(LSE, pointer=208, strides=(7, 5, 3)), **LENS)
    assert values.keys() == {name for name, _ in BWD_PARAMS}
    unpacked = unpack("BwdParams", values)
    assert (unpacked["q"], unpacked["grad_o"], unpacked["dv"]) == (16, 128, 176)
    assert (unpacked["row_lse"], unpacked["delta"], unpacked["dq_sum"]) == (256, 512, 1024)
    for axis, stride in zip(("batch", "head", "row"), (7, 5, 3), strict=True):
        assert unpacked[f"dlse_stride.{axis}"] == stride
        assert unpacked[f"grad_o_stride.{axis}"] == 0
    assert unpacked["rows"] == 128, "100 rows in whole tiles"
    assert unpacked["rows"] % WORK_ROWS == 0
    assert (unpacked["heads_total"], unpacked["heads_total_kv"]) == (12, 4)
    assert backward(PROBLEM)["dlse"] == 0


@pytest.mark.parametrize(("scale", "softcap"), [(0.5, 0.0), (-0.5, 0.0), (0.0, 0.0), (-0.25, 5.0)])
def test_backward_scales(scale: float, softcap: float) -> None:
    """P = exp2(scale_log2 tanh(tanh_scale s) - lse): no maximum is taken, so signs stay."""
    values = backward(replace(PROBLEM, softmax_scale=scale, softcap=softcap))
    assert values["scale_log2"] == pytest.approx((softcap or scale) / math.log(2))
    assert values["tanh_scale"] == (scale / softcap if softcap else 0)
    assert values["scale"] == values["exact_scale"] == scale


def test_sections_of_the_backward_count_what_its_blocks_share() -> None:
    """Q, dO and the float32 sums of dQ of a group; less of them without the sums."""
    long = replace(PROBLEM, batch=40, seqlen_q=20000)
    with_sums, without = backward(long), backward(long, {**WORK, "dq_sum": 0})
    for values, row in ((with_sums, 96 * 2 + 64 * 4), (without, 96 * 2)):
        used = values["section_kv"] * 3 * 20000 * row
        assert values["section_kv"] == 1 or used <= 0.95 * L2
    assert with_sums["section_kv"] <= without["section_kv"]


class FakeScratch:
    """Notes what it is asked for; the addresses are 256, 512 and so on, or 0 for nothing."""

    lock = nullcontext()

    def __init__(self) -> None:
        self.wanted: list[tuple[tuple[int, ...], int]] = []

    def take(self, wanted: Any) -> list[Any]:
        self.wanted += wanted
        sizes = [math.prod(shape) for shape, _ in wanted]
        return [
            SimpleNamespace(size=size, data=SimpleNamespace(ptr=256 * (n + 1)))
            for n, size in enumerate(sizes)
        ]


class FakeKernel:
    """Notes each launch in `calls`."""

    def __init__(self, variant: Variant, info: device.DeviceInfo, calls: list[Any]) -> None:
        self.variant, self.info, self.calls = variant, info, calls

    def function(self, grid: Any, block: Any, args: Any, **more: Any) -> None:
        self.calls.append((self.variant, (grid, block, args, more)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_work_memory_and_order_of_a_backward(dtype: str, deterministic: bool) -> None:
    """Two numbers of lse's type a query row; float32 sums of dq only where atomics make them, of
    16-bit inputs. Of wider ones they add to dq itself."""
    info = device.info_for_arch("sm_90a")
    for d, dv, sq in itertools.product((64, 72, 256), (32, 200), (1, 100, 129)):
        problem = replace(
            PROBLEM,
            direction="backward",
            dtype=dtype,
            seqlen_q=sq,
            head_dim=d,
            head_dim_v=dv,
            deterministic=deterministic,
        )
        calls: list[Any] = []
        kernels = [FakeKernel(v, info, calls) for v in plan.choose(problem, info).variants]
        wide = dtype == "float64"
        views = {
            name: replace(v, dtype=dtype, shape=(*v.shape[:3], d if name[-1] in "qk" else dv))
            for name, v in (VIEWS | GRADS).items()
        }
        lse = replace(LSE, dtype="float64" if wide else "float32")
        scratch, stream = FakeScratch(), object()
        launch.backward(
            cast(Any, kernels),
            problem,
            {**views, "lse": lse, "dlse": None, "seqlens_q": None, "seqlens_k": None},
            cast(Any, SimpleNamespace(index=0, stream=stream)),
            cast(Any, scratch),
        )
        rows = problem.batch * problem.num_heads * -(-sq // WORK_ROWS) * WORK_ROWS
        summed = ITEMSIZES[dtype] == 2 and not deterministic
        in_place = ITEMSIZES[dtype] > 2 and not deterministic
        of_lse = 8 if wide else 4
        sums = rows * kernels[1].variant.head_dim if summed else 0
        assert scratch.wanted == [((rows,), of_lse), ((rows,), of_lse), ((sums,), 4)]
        assert [v.kernel.stage for v, _ in calls] == ["delta", "main", "dq"][: 3 - in_place]
        for variant, (grid, block, (packed,), more) in calls:
            blocks = variant.kernel.blocks(variant.tile, problem)
            assert (grid, block) == ((blocks, 1), (32 * variant.tile.warps,))
            assert more == {"shared_mem": variant.smem_bytes, "stream": stream}
            fields = struct.unpack(FORMATS["BwdParams"], packed.tobytes())
            got = dict(zip((name for name, _ in BWD_PARAMS), fields, strict=True))
            assert (got["row_lse"], got["delta"]) == (256, 512)
            assert got["dq_sum"] == (768 if summed else got["dq"] if in_place else 0)


def test_every_field_is_filled_and_packs() -> None:
    values = params(PROBLEM, lse=LSE, **LENS)
    assert values.keys() == {name for name, _ in FWD_PARAMS}
    unpacked = unpack("FwdParams", values)
    assert (unpacked["q"], unpacked["lse"], unpacked["seqlens_k"]) == (16, 112, 96)
    assert (unpacked["seqlens_q_stride"], unpacked["seqlens_k_stride"]) == (1, 3)
    assert [unpacked[f"k_stride.{a}"] for a in ("batch", "row", "head")] == [120 * 128, 128, 64]
    assert [unpacked[f"lse_stride.{a}"] for a in ("batch", "row", "head")] == [600, 1, 100]
    assert (unpacked["head_dim"], unpacked["head_dim_v"], unpacked["group"]) == (64, 32, 3)


@pytest.mark.parametrize(
    ("scale", "sign", "exponent"),
    [(0.5, 1, 0.5), (-0.5, -1, 0.5), (0.0, 0, 1.0), (-0.0, 0, 1.0), (1e-45, 0, 1.0)],
)
def test_the_exponent_stays_positive(scale: float, sign: float, exponent: float) -> None:
    """The sign of the scale, and a scale of zero, go into Q."""
    values = params(replace(PROBLEM, softmax_scale=scale))
    assert values["q_sign"] == sign
    assert values["scale_log2"] == pytest.approx(exponent / math.log(2))


def test_softcap_scales() -> None:
    """s -> cap tanh(scale s / cap): tanh in the kernel, the cap in the exponent's factor."""
    values = params(replace(PROBLEM, softmax_scale=-0.25, softcap=5.0))
    assert values["tanh_scale"] == pytest.approx(0.25 / 5.0)
    assert values["scale_log2"] == pytest.approx(5.0 / math.log(2))
    assert values["q_sign"] == -1


def test_huge_scales_stay_finite() -> None:
    """At the limits that Options allows."""
    for softcap in (0.0, 1e-30, 1e30):
        values = params(replace(PROBLEM, softmax_scale=1e30, softcap=softcap))
        for name in ("scale_log2", "tanh_scale"):
            assert struct.unpack("f", struct.pack("f", values[name]))[0] < math.inf
        assert values["scale_log2"] > 1e-37, "a normal float32"


@given(
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 200_000),
    st.integers(1, 256),
)
def test_sections_are_whole_groups_of_about_equal_size(
    batch: int, heads_kv: int, group: int, seqlen_k: int, dim: int
) -> None:
    problem = replace(
        PROBLEM,
        batch=batch,
        num_heads=heads_kv * group,
        num_heads_kv=heads_kv,
        seqlen_k=seqlen_k,
        head_dim=dim,
        head_dim_v=dim,
    )
    section = params(problem)["section"]
    total = batch * heads_kv * group
    assert section % group == 0
    assert 0 < section <= total
    used = section // group * seqlen_k * dim * 4
    assert section == group or used <= 0.95 * L2
    sections = -(-total // section)
    if sections > 1:
        last = total - (sections - 1) * section
        assert last >= section - sections * group, "the last section lacks at most a group each"


def test_work_memory_is_given_back_before_it_grows() -> None:
    class Watched(launch.Scratch):
        def _empty(self, size: int) -> Any:
            assert self._buffer is None, "the smaller buffer is still held"
            return np.empty(size, np.uint8)

    scratch = Watched()
    small = scratch.take([((3, 100), 4)])
    assert [x.nbytes for x in small] == [1200]
    del small
    large = scratch.take([((3, 100), 4), ((5000,), 8)])
    assert [x.nbytes for x in large] == [1200, 40000]
    again = scratch.take([((7,), 2)])
    assert np.shares_memory(again[0], large[0]), "what is large enough is used again"
