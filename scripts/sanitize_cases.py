"""Small problems for compute-sanitizer: every kernel of each stage, every tile, awkward memory.

Each tensor, and each work array, is its own exact allocation, so that a read or write one element
too far is seen. All memory that the library takes is NaN beforehand, and so are padding and rows
that see no key; results are checked against float64, the inputs for being untouched and the gaps
around an output for being left alone. Runs on its own, too: sanitize.sh does so first, which fills
the kernel cache and shows a wrong result without the sanitizer's slowness.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cufa2 import attention, device, flash_attention, flash_attention_backward, launch, plan
from cufa2.dense import (
    plain_attention,
    plain_attention_backward,
    reference64,
    reference64_backward,
)
from cufa2.kernels import KERNELS, SMEM_RESERVE, Kernel, Variant
from cufa2.problem import ITEMSIZES, Options, Problem, UnsupportedError, make_problem
from cufa2.testing import (
    Inputs,
    assert_accurate,
    assert_lse,
    bits,
    gradient_noise,
    make_inputs,
    numpy_dtype,
    to_cupy,
    to_numpy,
)
from cufa2.tiles import Tile

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Small:
    """One problem; D and Dv are `less` and `less_v` below a compiled head dim.

    lying: how q, k, v, o and do lie in memory, see `lay`. few: also for the slowest tools.
    precision: "tf32" is for the kernels alone that have it, and for float32.
    """

    name: str
    shape: tuple[int, int, int, int, int]  # B, Sq, Sk, H, Hk
    options: dict[str, Any] = field(default_factory=dict)
    less: int = 0
    less_v: int = 0
    lying: tuple[str, str, str, str, str] = ("plain", "plain", "plain", "plain", "plain")
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    layout: str = "bshd"
    dlse: bool = False
    few: bool = False
    precision: str | None = None


SMALL = (
    Small("full, tails, GQA", (2, 131, 77, 4, 2), few=True),
    Small("causal, D - 8, dlse", (1, 150, 201, 3, 1), {"causal": True}, 8, 8, dlse=True, few=True),
    Small("causal, rows without keys", (2, 140, 33, 2, 2), {"causal": True}, 3, 5),
    Small(
        "window, softcap, strides",
        (2, 129, 135, 2, 1),
        {"window": (19, 5), "softcap": 3.0},
        lying=("rows", "reversed", "rows", "rows", "broadcast"),
        few=True,
    ),
    Small(
        "left window, lengths, dlse",
        (3, 70, 96, 2, 2),
        {"window": (30, -1)},
        seqlens_q=(70, 0, 13),
        seqlens_k=(96, 40, 0),
        lying=("plain", "rows", "plain", "plain", "rows"),
        dlse=True,
    ),
    Small(
        "top-left, misaligned, Dv < D, negative scale",
        (1, 90, 65, 2, 1),
        {"causal": "top_left", "softmax_scale": -0.3},
        less_v=16,
        lying=("offset", "plain", "offset", "offset", "offset"),
    ),
    Small(
        "bhsd, lengths of both",
        (2, 66, 66, 2, 1),
        less=1,
        seqlens_q=(65, 1),
        seqlens_k=(64, 1),
        layout="bhsd",
    ),
    Small("one query", (2, 1, 193, 8, 1), {"causal": True}),
    Small("one query, one key, flat", (3, 1, 1, 1, 1), layout="flat"),
    Small(
        "TF32, causal, tails, GQA", (2, 131, 77, 4, 2), {"causal": True}, 0, 8, precision="tf32"
    ),
    Small("TF32, softcap", (1, 150, 201, 3, 1), {"softcap": 3.0}, 3, precision="tf32", few=True),
)


def lay(base: Any, how: str, shape: Shape) -> Any:
    """The (B, S, H, D) view of a flat NumPy or CuPy allocation.

    how: plain; offset, one element in, so that no row is aligned; rows, every second row of a
    longer tensor; reversed along S; broadcast, one row for all of S.
    """
    n, (b, s, h, d) = int(np.prod(shape)), shape
    if how == "offset":
        return base[1 : 1 + n].reshape(shape)
    if how == "rows":
        return base.reshape(b, 2 * s, h, d)[:, ::2]
    if how == "broadcast":
        return np.broadcast_to(base.reshape(b, 1, h, d), shape)  # CuPy's for a CuPy array
    view = base.reshape(shape)
    return view[:, ::-1] if how == "reversed" else view


def nan(size: int, dtype: Any) -> np.ndarray:
    """A flat host array with every bit set, which is NaN in each float type."""
    return np.full(size, -1, f"i{np.dtype(dtype).itemsize}").view(dtype)


def allocation(how: str, shape: Shape, dtype: Any) -> np.ndarray:
    """A flat host array of NaN with room for the tensor."""
    n = int(np.prod(shape))
    size = {"offset": n + 1, "rows": 2 * n, "broadcast": n // shape[1]}.get(how, n)
    return nan(size, dtype)


def axes(view: Any, layout: str) -> Any:
    """A (B, S, H, D) view with the axes of `layout`, or back; flat drops H = 1."""
    if layout == "flat":
        return view[:, :, 0] if view.ndim == 4 else view[:, :, None]
    return view.transpose(0, 2, 1, 3) if layout == "bhsd" else view


class Memory:
    """What a call is given on the GPU, and a copy of it to see that it stays as it is."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self._given: list[tuple[str, Any, np.ndarray]] = []

    def tensor(self, name: str, x: np.ndarray, how: str) -> Any:
        """x (B, S, H, D) as a CuPy array in the layout of the problem."""
        base = allocation(how, x.shape, x.dtype)
        if how == "broadcast":
            base[:] = x[:, 0].ravel()
        else:
            lay(base, how, x.shape)[...] = x
        return axes(lay(self._put(name, base), how, x.shape), self.layout)

    def rows(self, name: str, x: np.ndarray | None) -> Any:
        """x (B, H, S), as lse and dlse are, likewise; None stays None."""
        if x is None:
            return None
        array = self._put(name, x)
        return array[:, 0] if self.layout == "flat" else array

    def lengths(self, given: dict[str, np.ndarray]) -> dict[str, Any]:
        """seqlens_q and seqlens_k."""
        return {name: self._put(name, x) for name, x in given.items()}

    def _put(self, name: str, x: np.ndarray) -> Any:
        array = to_cupy(x)
        self._given.append((name, array, x.copy()))
        return array

    def assert_untouched(self) -> None:
        """AssertionError if a kernel has written to an input."""
        for name, array, before in self._given:
            if not np.array_equal(bits(array).get(), bits(before)):
                raise AssertionError(f"{name} is an input and was written")


def make(
    small: Small, dtype: str, dims: tuple[int, int], seed: int
) -> tuple[Inputs, dict[str, np.ndarray]]:
    """q, k, v, do and the lengths of a problem, on the host."""
    b, sq, sk, h, hk = small.shape
    made = make_inputs(
        (b, sq, sk, h, hk, dims[0] - small.less, dims[1] - small.less_v), dtype, seed
    )
    if small.lying[4] == "broadcast":
        made = made._replace(do=np.repeat(made.do[:, :1], sq, axis=1))
    lengths = {
        name: np.array(n, np.int32)
        for name, n in (("seqlens_q", small.seqlens_q), ("seqlens_k", small.seqlens_k))
        if n is not None
    }
    return made, lengths


def hide(lengths: np.ndarray | None, *tensors: np.ndarray) -> None:
    """Fill padding of (B, S, H, D) tensors with NaN: it must never reach a result."""
    for i, n in enumerate(() if lengths is None else lengths):
        for x in tensors:
            x[i, n:] = np.nan


def forward(small: Small, dtype: str, dims: tuple[int, int], seed: int) -> None:
    """Compute o and lse of a problem on the GPU and compare; AssertionError says what is wrong."""
    (q, k, v, _), lengths = make(small, dtype, dims, seed)
    options = {**small.options, **lengths}
    exact = reference64(q, k, v, **options)
    rough = (x.astype(low_dtype(small, dtype)) for x in (q, k, v))
    plain, plain_lse = plain_attention(*rough, **options)
    hide(lengths.get("seqlens_q"), q)
    hide(lengths.get("seqlens_k"), k, v)
    memory = Memory(small.layout)
    named = zip("qkv", (q, k, v), small.lying, strict=False)
    q_, k_, v_ = (memory.tensor(name, x, how) for name, x, how in named)
    o_how, o_shape = small.lying[3], (*q.shape[:3], v.shape[3])
    o_base = to_cupy(allocation(o_how, o_shape, q.dtype))
    lse = to_cupy(nan(exact[1].size, lse_dtype(dtype)).reshape(exact[1].shape))
    flash_attention(
        q_,
        k_,
        v_,
        **small.options,
        **memory.lengths(lengths),
        layout="bhsd" if small.layout == "bhsd" else "bshd",
        precision=small.precision,
        return_lse=True,
        out=axes(lay(o_base, o_how, o_shape), small.layout),
        lse_out=lse[:, 0] if small.layout == "flat" else lse,
    )
    host = to_numpy(o_base)
    o = lay(host, o_how, o_shape)
    assert_accurate(o, exact[0], plain, "o")
    if small.precision is None:
        assert_lse(to_numpy(lse), exact[1], dtype)
    else:
        assert_accurate(to_numpy(lse), exact[1], plain_lse, "lse")
    memory.assert_untouched()
    o[...] = nan(1, q.dtype)  # what is left now must be as it was
    if not np.array_equal(bits(host), bits(nan(host.size, host.dtype))):
        raise AssertionError("memory between the rows of o was written")


def backward(
    small: Small, dtype: str, dims: tuple[int, int], seed: int, deterministic: bool
) -> None:
    """Compute the gradients of a problem on the GPU and compare, likewise."""
    (q, k, v, do), lengths = make(small, dtype, dims, seed)
    options = {**small.options, **lengths}
    o, lse = (
        x.astype(t)
        for x, t in zip(reference64(q, k, v, **options), (q.dtype, lse_dtype(dtype)), strict=True)
    )
    dlse = np.random.default_rng(seed).standard_normal(lse.shape).astype(lse.dtype)
    given_dlse = dlse if small.dlse else None
    exact = reference64_backward(do, q, k, v, dlse=given_dlse, **options)
    rough = (x.astype(low_dtype(small, dtype)) for x in (do, q, k, v))
    plain = plain_attention_backward(*rough, dlse=given_dlse, **options)
    noise = gradient_noise(do, q, k, v, small.options.get("softmax_scale"))
    # Rows that see no key, padding among them, must not reach a gradient either.
    dead = lse == -np.inf
    for x in (q, o) if small.lying[4] == "broadcast" else (q, o, do):
        x[dead.transpose(0, 2, 1)] = np.nan
    dlse[dead] = np.nan
    hide(lengths.get("seqlens_q"), lse.transpose(0, 2, 1))
    hide(lengths.get("seqlens_k"), k, v)
    memory = Memory(small.layout)
    named = zip(("q", "k", "v", "o", "do"), (q, k, v, o, do), small.lying, strict=True)
    q_, k_, v_, o_, do_ = (memory.tensor(name, x, how) for name, x, how in named)
    grads = flash_attention_backward(
        do_,
        q_,
        k_,
        v_,
        o_,
        memory.rows("lse", lse),
        **small.options,
        **memory.lengths(lengths),
        layout="bhsd" if small.layout == "bhsd" else "bshd",
        precision=small.precision,
        dlse=memory.rows("dlse", given_dlse),
        deterministic=deterministic,
    )
    dark = unseen(small, lengths)
    hidden = (dead.transpose(0, 2, 1), dark, dark)
    for name, ours, ref, low, rows in zip(
        ("dq", "dk", "dv"), grads, exact, plain, hidden, strict=True
    ):
        x = axes(to_numpy(ours), small.layout)
        allowed = 0.0 if name == "dv" else noise
        # A gradient that vanishes as a whole shows the difference of two sums of Dv products,
        # which tensor cores round once every 16.
        if np.abs(ref).max(initial=0) < 2**10 * allowed:
            allowed *= -(-v.shape[3] // 16)
        if small.precision == "tf32":
            allowed *= 2.0**13  # the noise of 11 significant bits, not of 24
        assert_accurate(x, ref, low, name, allowed)
        if x[rows].astype(np.float64).any():
            raise AssertionError(f"{name} is not 0 where nothing is seen")
    memory.assert_untouched()


def unseen(small: Small, lengths: dict[str, np.ndarray]) -> np.ndarray:
    """Which key rows (B, Sk, Hk) are padding, or in a batch entry without queries."""
    b, sq, sk, _, hk = small.shape
    lens_q, lens_k = (
        lengths.get(name, np.full(b, n)) for name, n in (("seqlens_q", sq), ("seqlens_k", sk))
    )
    padding = np.arange(sk) >= lens_k[:, None]
    return np.repeat((padding | (lens_q == 0)[:, None])[..., None], hk, axis=2)


def low_dtype(small: Small, dtype: str) -> Any:
    """NumPy's type of the unfused code to compare with: float16, whose significand is as long,
    stands for TF32."""
    return numpy_dtype("float16" if small.precision == "tf32" else dtype)


def lse_dtype(dtype: str) -> Any:
    """NumPy's type of lse and dlse for inputs of `dtype`."""
    return np.float64 if dtype == "float64" else np.float32


# Which kernels, on which tile


@dataclass(frozen=True)
class Target:
    """A kernel row with a tile that it takes on some card for these head dims."""

    row: Kernel
    dim: int
    dim_v: int
    tile: Tile

    @property
    def name(self) -> str:
        """As printed."""
        number, size = self.row.tiles.index(self.tile), (self.tile.block_q, self.tile.block_k)
        dims = f"D={self.dim}, Dv={self.dim_v}"
        return f"{self.row.name}, {dims}, tile {number} of {size[0]} x {size[1]}"

    @property
    def dtypes(self) -> list[str]:
        """What the tile is made for."""
        return [t for t in self.row.dtypes if ITEMSIZES[t] == self.tile.itemsize]

    def dtypes_of(self, small: Small) -> list[str]:
        """Those of them that a problem is for."""
        if small.precision is None:
            return self.dtypes
        return ["float32"] if self.row.tf32 and "float32" in self.dtypes else []

    def choose(self, problem: Problem, info: device.DeviceInfo) -> plan.Plan:
        """plan.choose for this card, with this row and tile in their stage.

        The stage keeps its own tile if this one is not made for the problem's score, or is too
        large for it.
        """
        main = self.row.name if self.row.stage == "main" else None
        chosen = CHOOSE(problem, info, main)
        variants = (
            replace(v, tile=self.tile) if self._serves(v, info) else v for v in chosen.variants
        )
        return replace(chosen, variants=tuple(variants))

    def _serves(self, variant: Variant, info: device.DeviceInfo) -> bool:
        dims, tile = (variant.head_dim, variant.head_dim_v), self.tile
        return (
            variant.kernel is self.row
            and variant.dtype in self.dtypes
            and variant.score in tile.scores
            and max(dims) <= tile.max_head_dim
            and tile.smem_bytes(*dims) <= info.smem_per_block - SMEM_RESERVE
        )

    def modes(self, info: device.DeviceInfo) -> list[bool]:
        """The values of `deterministic` for which the row takes part."""
        if self.row.direction == "forward":
            return [False]
        return [m for m in (False, True) if self.tile_on(info, deterministic=m)]

    def tile_on(self, info: device.DeviceInfo, **options: Any) -> Tile | None:
        """The tile that the row takes on a card for these head dims."""
        return tile_of(self.row, (self.dim, self.dim_v), self.dtypes[0], info, **options)


CHOOSE = plan.choose


def tile_of(
    row: Kernel, dims: tuple[int, int], dtype: str, card: device.DeviceInfo, **options: Any
) -> Tile | None:
    """The tile that `row` takes for D and Dv on a card; None if it takes no part."""
    head, head_v = (SimpleNamespace(shape=(1, 1, 1, n), dtype=dtype) for n in dims)
    problem = make_problem(row.direction, Options.make(**options), head, head, head_v)
    try:
        variants = CHOOSE(problem, card, row.name).variants
    except UnsupportedError:
        return None
    return next((v.tile for v in variants if v.kernel is row), None)


@functools.cache
def targets(info: device.DeviceInfo) -> tuple[Target, ...]:
    """Every (row, head dim, tile) that this card can run, its own and those of other cards."""
    cards = [info, *(device.info_for_arch(arch) for arch in device.ARCHS)]
    cards = [card for card in cards if card.smem_per_block <= info.smem_per_block]
    asked = [
        {"softcap": softcap, "deterministic": deterministic}
        for softcap, deterministic in itertools.product((0.0, 1.0), (False, True))
    ]
    found: dict[Target, None] = {}
    for row in KERNELS:
        pairs = row.pairs or [(dim, dim) for dim in row.head_dims]
        for dims, dtype, card, options in itertools.product(pairs, row.dtypes, cards, asked):
            tile = tile_of(row, dims, dtype, card, **options)
            if tile is not None:
                found[Target(row, *dims, tile)] = None
    return tuple(found)


def needed(info: device.DeviceInfo, few: bool) -> Iterator[int]:
    """Numbers of the targets to run.

    The tiles that this card takes for the other stages run along with the main kernels. few: only
    the largest head dim of each tile.
    """
    found = targets(info)
    for n, t in enumerate(found):
        if t.row.stage != "main" and t.tile in (
            t.tile_on(info, deterministic=m) for m in t.modes(info)
        ):
            continue
        if few and any(t.row is x.row and t.tile == x.tile and t.dim < x.dim for x in found):
            continue
        yield n


@dataclass(frozen=True)
class Job:
    """One problem on one target, in terms that another process understands."""

    target: int
    small: int
    dtype: str
    deterministic: bool

    def run(self) -> str | None:
        """What is wrong, or None."""
        target, small = targets(device.info(0))[self.target], SMALL[self.small]
        dims = (target.dim, target.dim_v)
        attention.launcher.cache_clear()  # and with it work memory of earlier problems
        with mock.patch.object(plan, "choose", side_effect=target.choose) as chooser:
            try:
                if target.row.direction == "forward":
                    forward(small, self.dtype, dims, self.small)
                else:
                    backward(small, self.dtype, dims, self.small, self.deterministic)
            except AssertionError as e:
                mode = ", deterministic" if self.deterministic else ""
                return f"{target.name}, {self.dtype}, {small.name}{mode}: {e}"
        if not chooser.called:
            raise RuntimeError("cufa2 did not ask plan.choose, so no tile was forced")
        return None


def prepare(poison: bool) -> None:
    """Set up this process: exact allocations, each number of which is NaN if `poison`."""
    cupy = device.cupy()

    def allocate(size: int) -> Any:
        memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
        if poison and size:
            memory.memset(0xFF, size)
        return memory

    def take(self: launch.Scratch, wanted: Any) -> list[Any]:
        return [cupy.empty(shape, f"u{itemsize}") for shape, itemsize in wanted]

    cupy.cuda.set_allocator(allocate)
    mock.patch.object(launch.Scratch, "take", take).start()  # not parts of one buffer


def part(text: str) -> tuple[int, int]:
    """Of --part I/N; argparse makes ValueError a message."""
    at, parts = (int(x) for x in text.split("/"))
    if not 1 <= at <= parts:
        raise ValueError
    return at, parts


def main() -> int:
    """Run everything; exit status 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="sanitize_cases.py", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1: this one)")
    parser.add_argument("--direction", choices=("forward", "backward"), help="only this pass")
    parser.add_argument("--kernel", default="*", help="only kernels that this pattern matches")
    parser.add_argument("--head-dim", type=int, action="append", help="only this compiled size")
    parser.add_argument("--few", action="store_true", help="fewer, for the slowest tools")
    parser.add_argument(
        "--part", type=part, default=(1, 1), metavar="I/N", help="every Nth problem, from the Ith"
    )
    parser.add_argument(
        "--no-poison", action="store_true", help="leave new memory as it is, for initcheck"
    )
    args = parser.parse_args()
    if why := device.why_no_cuda():
        print(f"sanitize_cases.py: no GPU to run on: {why}", file=sys.stderr)
        return 1
    info = device.info(0)
    chosen = [
        (n, t)
        for n, t in ((n, targets(info)[n]) for n in needed(info, args.few))
        if t.row.direction == (args.direction or t.row.direction)
        and fnmatch.fnmatchcase(t.row.name, args.kernel)
        and t.dim in (args.head_dim or [t.dim])
    ]
    failures = runs = 0
    pool = None
    if args.jobs > 1:
        pool = ProcessPoolExecutor(
            args.jobs, get_context("spawn"), initializer=prepare, initargs=(not args.no_poison,)
        )
    else:
        prepare(not args.no_poison)
    # Problem by problem, so that processes side by side compile different kernels.
    for number, small in enumerate(SMALL):
        if args.few and not small.few:
            continue
        start = time.perf_counter()
        jobs = [
            Job(n, number, dtypes[at % len(dtypes)], mode)
            for at, (n, t) in enumerate(chosen)
            if (dtypes := t.dtypes_of(small))
            for mode in t.modes(info)
        ][args.part[0] - 1 :: args.part[1]]
        for wrong in pool.map(Job.run, jobs) if pool else map(Job.run, jobs):
            runs += 1
            if wrong:
                failures += 1
                print(f"WRONG: {wrong}", flush=True)
        seconds = time.perf_counter() - start
        print(f"{small.name}: {len(jobs)} runs in {seconds:.1f} s", flush=True)
    if pool:
        pool.shutdown()
    print(f"{runs} problems, {failures} wrong")
    nothing = not runs and args.part[1] == 1
    return 1 if failures or nothing else 0


if __name__ == "__main__":
    sys.exit(main())
