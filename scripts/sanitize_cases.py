"""Small forward problems for compute-sanitizer: every kernel row, every tile, awkward memory.

Each tensor is its own exact allocation (CuPy's pool is off), so that a read or write one element
too far is seen. Outputs and padding hold NaN beforehand; results are checked against float64, and
so is the memory around an output that has gaps. Runs on its own, too: sanitize.sh does so first,
which fills the kernel cache and shows a wrong result without the sanitizer's slowness.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from cufa2 import device, flash_attention, plan
from cufa2.kernels import KERNELS, Kernel, Tile
from cufa2.problem import Options, Problem, make_problem
from cufa2.testing import assert_accurate, assert_lse, make_inputs, plain_attention, reference64

NAN_BITS = 0xFFFF  # a NaN in float16 and in bfloat16


@dataclass(frozen=True)
class Small:
    """One problem; D and Dv are `less` and `less_v` below a compiled head dim."""

    name: str
    shape: tuple[int, int, int, int, int]  # B, Sq, Sk, H, Hk
    options: dict[str, Any] = field(default_factory=dict)
    less: int = 0
    less_v: int = 0
    lying: tuple[str, str, str, str] = ("plain", "plain", "plain", "plain")  # q, k, v, o
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    layout: str = "bshd"


SMALL = (
    Small("full, tails, GQA", (2, 131, 77, 4, 2)),
    Small("causal, D - 8", (1, 150, 201, 3, 1), {"causal": True}, 8, 8),
    Small("causal, rows without keys", (2, 140, 33, 2, 2), {"causal": True}, 3, 5),
    Small(
        "window, softcap, strides",
        (2, 129, 135, 2, 1),
        {"window": (19, 5), "softcap": 3.0},
        lying=("rows", "reversed", "rows", "rows"),
    ),
    Small(
        "left window, lengths",
        (3, 70, 96, 2, 2),
        {"window": (30, -1)},
        seqlens_q=(70, 0, 13),
        seqlens_k=(96, 40, 0),
        lying=("plain", "rows", "plain", "plain"),
    ),
    Small(
        "top-left, misaligned, Dv < D, negative scale",
        (1, 90, 65, 2, 1),
        {"causal": "top_left", "softmax_scale": -0.3},
        less_v=16,
        lying=("offset", "plain", "offset", "offset"),
    ),
    Small(
        "bhsd, lengths of both",
        (2, 66, 66, 2, 1),
        less=1,
        seqlens_q=(65, 1),
        seqlens_k=(1, 64),
        layout="bhsd",
    ),
    Small("one query", (2, 1, 193, 8, 1), {"causal": True}),
    Small("one query, one key, flat", (3, 1, 1, 1, 1), layout="flat"),
)


def lay(base: Any, how: str, shape: tuple[int, int, int, int]) -> Any:
    """The (B, S, H, D) view of a flat NumPy or CuPy allocation.

    how: plain; offset, one element in, so that no row is aligned; rows, every second row of a
    longer tensor; reversed along S.
    """
    n, (b, s, h, d) = int(np.prod(shape)), shape
    if how == "offset":
        return base[1 : 1 + n].reshape(shape)
    if how == "rows":
        return base.reshape(b, 2 * s, h, d)[:, ::2]
    view = base.reshape(shape)
    return view[:, ::-1] if how == "reversed" else view


def allocation(how: str, shape: tuple[int, int, int, int], dtype: Any) -> np.ndarray:
    """A flat host array of NaN with room for the tensor."""
    n = int(np.prod(shape))
    size = {"offset": n + 1, "rows": 2 * n}.get(how, n)
    return np.full(size, NAN_BITS, np.uint16).view(dtype)


def to_device(x: np.ndarray) -> Any:
    """A copy on the GPU, moved as raw bits."""
    bits = x.view(f"u{x.itemsize}")
    return device.cupy().asarray(bits).view(x.dtype)


def axes(view: Any, layout: str) -> Any:
    """A (B, S, H, D) view with the axes of `layout`; flat drops H = 1."""
    if layout == "flat":
        return view[:, :, 0]
    return view.transpose(0, 2, 1, 3) if layout == "bhsd" else view


def run(small: Small, dtype: str, dim: int, seed: int) -> None:
    """Compute one problem on the GPU and compare; AssertionError says what is wrong."""
    b, sq, sk, h, hk = small.shape
    d, dv = dim - small.less, dim - small.less_v
    q, k, v, _ = make_inputs((b, sq, sk, h, hk, d, dv), dtype, seed)
    lengths: dict[str, Any] = {
        name: np.array(n, np.int32)
        for name, n in (("seqlens_q", small.seqlens_q), ("seqlens_k", small.seqlens_k))
        if n is not None
    }
    exact = reference64(q, k, v, **small.options, **lengths)
    plain, _ = plain_attention(q, k, v, **small.options, **lengths)
    for x, name in ((q, "seqlens_q"), (k, "seqlens_k"), (v, "seqlens_k")):
        for i, n in enumerate(lengths.get(name, ())):
            x[i, n:] = np.nan  # padding must never reach a result
    views: list[Any] = []
    for x, how in zip((q, k, v), small.lying, strict=False):
        base = allocation(how, x.shape, x.dtype)
        lay(base, how, x.shape)[...] = x
        views.append(axes(lay(to_device(base), how, x.shape), small.layout))
    o_how, o_shape = small.lying[3], (b, sq, h, dv)
    o_base = to_device(allocation(o_how, o_shape, q.dtype))
    lse = to_device(np.full((b, h, sq), np.nan, np.float32))
    flash_attention(
        views[0],
        views[1],
        views[2],
        **small.options,
        **{name: to_device(x) for name, x in lengths.items()},
        layout="bhsd" if small.layout == "bhsd" else "bshd",
        return_lse=True,
        out=axes(lay(o_base, o_how, o_shape), small.layout),
        lse_out=lse[:, 0] if small.layout == "flat" else lse,
    )
    host = o_base.view(np.uint16).get().view(q.dtype)
    o = lay(host, o_how, o_shape)
    assert_accurate(o, exact[0], plain, "o")
    assert_lse(lse.get(), exact[1], dtype)
    o[...] = np.array(NAN_BITS, np.uint16).view(q.dtype)  # what is left now must be untouched
    if not (host.view(np.uint16) == NAN_BITS).all():
        raise AssertionError("memory between the rows of o was written")


def problem_of(dtype: str, dim: int) -> Problem:
    """A plain forward problem with D = Dv = dim."""
    head = Head((1, 1, 1, dim), dtype)
    return make_problem("forward", Options(), head, head, head)


@dataclass(frozen=True)
class Head:
    """All that make_problem wants to know of an array."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Target:
    """A kernel row, a compiled head dim, and a card on which the plan takes `tile` for it."""

    row: Kernel
    dim: int
    card: device.DeviceInfo
    tile: Tile

    def choose(self, problem: Problem, _: device.DeviceInfo) -> plan.Plan:
        """plan.choose, held to this row and as if for that card."""
        return CHOOSE(problem, self.card, self.row.name)


CHOOSE = plan.choose


def targets(info: device.DeviceInfo) -> list[Target]:
    """Every (row, head dim, tile) that this card can run, its own and those of other cards."""
    cards = [info, *(device.info_for_arch(arch) for arch in device.ARCHS)]
    found: dict[tuple[str, int, Tile], Target] = {}
    for row in KERNELS:
        for dim in row.head_dims if row.direction == "forward" else ():
            for card in (c for c in cards if c.smem_per_block <= info.smem_per_block):
                if plan.refusal(row, problem_of(row.dtypes[0], dim), card) is None:
                    tile = CHOOSE(problem_of(row.dtypes[0], dim), card, row.name).variant.tile
                    found.setdefault((row.name, dim, tile), Target(row, dim, card, tile))
    return list(found.values())


def main() -> int:
    """Run everything; exit status 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="sanitize_cases.py", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="problems at a time (default 1)")
    parser.add_argument("--head-dim", type=int, action="append", help="only this compiled size")
    args = parser.parse_args()
    if why := device.why_no_cuda():
        print(f"sanitize_cases.py: no GPU to run on: {why}", file=sys.stderr)
        return 1
    device.cupy().cuda.set_allocator(None)
    chosen = [t for t in targets(device.info(0)) if not args.head_dim or t.dim in args.head_dim]
    failures = runs = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for number, target in enumerate(chosen):
            start, tile = time.perf_counter(), target.tile
            what = f"{target.row.name} head dim {target.dim}, tile {tile.block_q} x {tile.block_k}"
            with mock.patch.object(plan, "choose", target.choose):
                jobs = {}
                for i, small in enumerate(SMALL):
                    dtype = target.row.dtypes[(number + i) % len(target.row.dtypes)]
                    job = pool.submit(run, small, dtype, target.dim, seed=i)
                    jobs[f"{what}, {dtype}, {small.name}"] = job
                for name, job in jobs.items():
                    runs += 1
                    try:
                        job.result()
                    except AssertionError as e:
                        failures += 1
                        print(f"WRONG: {name}: {e}", flush=True)
            seconds = time.perf_counter() - start
            print(f"[{number + 1}/{len(chosen)}] {what}: {seconds:.1f} s", flush=True)
    print(f"{runs} problems, {failures} wrong")
    return 1 if failures or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
