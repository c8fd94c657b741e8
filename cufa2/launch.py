"""Cubin -> module -> launch: loaded kernels, their grids, and work memory.

The only room with pointers. One by-value parameter struct per launch; the shared-memory opt-in
is set once per kernel and device; work memory is kept per stream and grown when needed.
"""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import arrays, compiler, device, params, plan, selfcheck
from .arrays import ArrayView
from .device import DeviceInfo
from .kernels import Variant
from .placement import Place
from .problem import ITEMSIZES, Problem
from .selfcheck import MiscompiledError

_log = logging.getLogger("cufa2")  # says what is being compiled, at level INFO


@dataclass(frozen=True)
class KernelRecord:
    """A loaded kernel: entry name, registers per thread, shared memory per block in bytes."""

    name: str
    registers: int
    shared_memory: int


@dataclass(frozen=True)
class Loaded:
    function: Any
    variant: Variant
    record: KernelRecord
    info: DeviceInfo


_loaded: dict[tuple[Variant, int], Loaded] = {}
_miscompiled: dict[tuple[Variant, int], MiscompiledError] = {}
_loading: dict[tuple[Variant, int], threading.Lock] = {}
_loading_guard = threading.Lock()


def load(variant: Variant, index: int) -> Loaded:
    """The kernel of `variant` on GPU `index`, compiled and loaded at first use by one thread."""
    key = (variant, index)
    if key not in _loaded:
        with _loading_guard:
            lock = _loading.setdefault(key, threading.Lock())
        with lock:
            if key in _miscompiled:
                raise _miscompiled[key]
            if key not in _loaded:
                try:
                    _loaded[key] = _load(variant, index)
                except MiscompiledError as e:
                    _miscompiled[key] = e
                    raise
    return _loaded[key]


def load_all(problem: Problem, index: int) -> list[Loaded]:
    """The kernels that serve a problem on GPU `index`. A row whose kernel turns out to be
    miscompiled is passed over, with a warning."""
    without: dict[str, Any] = {}
    while True:
        chosen = plan.choose(problem, device.info(index), **without).variants
        try:
            return [load(v, index) for v in chosen]
        except MiscompiledError as e:
            warnings.warn(f"{e}. Another kernel serves instead.", RuntimeWarning, stacklevel=2)
            without = {"without": (*without.get("without", ()), e.row)}


def _load(variant: Variant, index: int) -> Loaded:
    cupy = device.cupy()
    info, driver = device.info(index), device.driver_cuda()
    cubin = compiler.build(variant, info.arch, driver=driver, progress=_log.info)
    with cupy.cuda.Device(index):
        function = cupy.RawModule(path=str(cubin.path)).get_function(variant.name)
        function.max_dynamic_shared_size_bytes = variant.smem_bytes
    total = variant.smem_bytes + cubin.shared_memory
    record = KernelRecord(variant.name, cubin.registers, total)
    loaded = Loaded(function, variant, record, info)
    if not selfcheck.trusted(cubin, variant):
        with cupy.cuda.Device(index), cupy.cuda.Stream(non_blocking=True) as stream:
            here = Place("cuda", index, stream)
            selfcheck.check(cubin, variant, lambda p, x: forward(loaded, p, x, here, Scratch()))
    return loaded


class Scratch:
    """Work memory of one stream. Calls on a stream run in order, so they share one buffer; the
    lock keeps a call's copies and launch together when threads share the stream."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._buffer: Any = None
        self._counter: Any = None

    def take(self, wanted: Sequence[tuple[tuple[int, ...], int]]) -> list[Any]:
        """Uninitialised arrays of these (shape, itemsize), as unsigned integers."""
        sizes = [-(-math.prod(shape) * itemsize // 256) * 256 for shape, itemsize in wanted]
        if self._buffer is None or self._buffer.nbytes < sum(sizes):
            self._buffer = None  # returned to the pool before the larger one is taken from it
            self._buffer = self._empty(sum(sizes))
        made, start = [], 0
        for (shape, itemsize), size in zip(wanted, sizes, strict=True):
            flat = self._buffer[start : start + math.prod(shape) * itemsize].view(f"u{itemsize}")
            made.append(flat.reshape(shape))
            start += size
        return made

    def counter(self, size: int) -> int:
        """Address of 32-bit zeros, for kernels that claim their work; they leave zeros behind."""
        if self._counter is None or self._counter.size < size:
            self._counter = self._zeros(size)
        return arrays.address(self._counter)

    def _empty(self, size: int) -> Any:
        return device.cupy().empty(size, np.uint8)

    def _zeros(self, size: int) -> Any:
        return device.cupy().zeros(size, np.uint32)


def forward(
    kernel: Loaded,
    problem: Problem,
    views: Mapping[str, ArrayView | None],
    at: Place,
    scratch: Scratch,
) -> None:
    """Queue one forward pass; `at` is current.

    views: q, k, v, o (B, S, H, D), lse, seqlens_q, seqlens_k (the last three may be None). One
    the kernel cannot use in place is replaced by a work copy in `scratch`.
    """
    variant = kernel.variant
    blocks = variant.kernel.blocks(variant.tile, problem)
    if not variant.kernel.persistent or not blocks:
        with _in_place(problem, views, ("q", "k", "v"), ("o",), (), scratch) as (placed, _):
            values = params.forward_values(problem, placed, kernel.info.l2_bytes)
            _launch(kernel, blocks, values, at)
        return
    shared = params.sharing(
        problem, variant.tile.block_q, variant.tile.block_k, kernel.info.sm_count
    )
    groups = problem.batch * problem.num_heads >> shared["pack"]
    parts = arriving = 0
    if shared["split_blocks"]:
        parts = problem.batch * problem.num_heads * problem.seqlen_q * shared["tiles"]
        arriving = groups * variant.tile.block_q // 64
    extra = [((n,), 4) for n in (parts * variant.head_dim_v, parts) if n]
    with _in_place(problem, views, ("q", "k", "v"), ("o",), extra, scratch) as (placed, made):
        counter = scratch.counter(2 + arriving)
        part_o, part_lse = map(arrays.address, made) if made else (0, 0)
        values = params.forward_values(problem, placed, kernel.info.l2_bytes)
        values |= shared | _maps(variant, problem, placed, 1 << shared["pack"])
        values |= {"counter": counter, "arrived": counter + 8}
        values |= {"part_o": part_o, "part_lse": part_lse}
        _launch(kernel, groups * shared["tiles"], values, at)


def mappable(view: ArrayView) -> bool:
    """Whether a tensor map can describe a (B, S, H, D) view, or the copy that stands for it."""
    return not arrays.aligned(view) or device.mappable(view.shape, view.strides, view.itemsize)


def described(problem: Problem, *views: ArrayView) -> Problem:
    """The problem, knowing whether tensor maps can describe these (B, S, H, D) views as well."""
    return replace(problem, tensor_maps=problem.tensor_maps and all(map(mappable, views)))


def _maps(
    variant: Variant, problem: Problem, views: Mapping[str, Any], heads: int
) -> dict[str, bytes]:
    """Tensor maps of q, k and v with boxes of the tile's rows, of q for so many heads, and of o
    with boxes of a warp's rows; one of q where there are no keys, as no map describes nothing and
    none of k and v is read."""
    tile, rows = variant.tile, params.STORED_ROWS
    boxes = {"q": (tile.block_q, heads), "k": (tile.block_k, 0), "v": (tile.block_k, 0)}
    made = {}
    for name, box in {**boxes, "o": (rows, min(heads, rows))}.items():
        x = views[name if problem.seqlen_k or name == "o" else "q"]
        made[f"{name}_map"] = device.tensor_map(x.pointer, x.shape, x.strides, problem.dtype, *box)
    return made


def backward(
    kernels: Sequence[Loaded],
    problem: Problem,
    views: Mapping[str, ArrayView | None],
    at: Place,
    scratch: Scratch,
) -> None:
    """Queue one backward pass, kernel after kernel; `at` is current.

    views: q, k, v, o, grad_o, dq, dk, dv (B, S, H, D), lse; dlse, seqlens_q, seqlens_k or None.
    Work memory: two numbers of lse's type a query row and, where atomics add up dq of 16-bit
    inputs, a float32 dq. Wider types have it added up in place.
    """
    rows = problem.batch * problem.num_heads * params.work_rows(problem)
    main = next(k.variant for k in kernels if k.variant.kernel.stage == "main")
    sums = rows * main.head_dim if main.adds_dq and not main.completes_dq else 0
    itemsize = max(ITEMSIZES[problem.dtype], 4)
    extra = [((rows,), itemsize), ((rows,), itemsize), ((sums,), 4)]
    inputs, outputs = ("q", "k", "v", "o", "grad_o"), ("dq", "dk", "dv")
    with _in_place(problem, views, inputs, outputs, extra, scratch) as (placed, work):
        pointers = [arrays.address(w) for w in work]
        named = dict(zip(("row_lse", "delta", "dq_sum"), pointers, strict=True))
        if main.completes_dq:
            dq = placed["dq"]
            assert dq is not None, "dq is given"
            named["dq_sum"] = dq.pointer
        values = params.backward_values(problem, placed, named, kernels[0].info.l2_bytes)
        for kernel in kernels:
            blocks = kernel.variant.kernel.blocks(kernel.variant.tile, problem)
            _launch(kernel, blocks, values, at)


@contextmanager
def _in_place(
    problem: Problem,
    views: Mapping[str, ArrayView | None],
    inputs: Sequence[str],
    outputs: Sequence[str],
    extra: Sequence[tuple[tuple[int, ...], int]],
    scratch: Scratch,
) -> Iterator[tuple[Mapping[str, ArrayView | None], list[Any]]]:
    """Views that kernels can use in place, and the `extra` work arrays.

    What they cannot use is copied into work memory before and, if written, back afterwards.
    """
    known = {n: v for n in (*inputs, *outputs) if (v := views[n]) is not None}
    unaligned = [n for n, v in known.items() if not arrays.aligned(v)]
    wanted = [(arrays.padded_shape(known[n]), known[n].itemsize) for n in unaligned]
    with scratch.lock:
        made = scratch.take([*wanted, *extra]) if unaligned or extra else []
        work = dict(zip(unaligned, made, strict=False))
        for name in unaligned:
            if name in inputs:
                arrays.copy_in(work[name], known[name])
        placed = {n: arrays.work_view(w, problem.dtype) for n, w in work.items()}
        yield {**views, **placed}, made[len(unaligned) :]
        for name in unaligned:
            if name in outputs:
                arrays.copy_out(known[name], work[name])


def _launch(kernel: Loaded, blocks: int, values: Mapping[str, Any], at: Place) -> None:
    row, tile = kernel.variant.kernel, kernel.variant.tile
    if not blocks:
        return
    most = kernel.info.sm_count if row.persistent else 2**31 - 1
    grid_x = min(blocks, most)
    if row.persistent:
        blocks = grid_x
    packed = np.void(params.pack(row.params, values))
    kernel.function(
        (grid_x, -(-blocks // grid_x)),
        (32 * tile.warps,),
        (packed,),
        shared_mem=kernel.variant.smem_bytes,
        stream=at.stream,
    )
