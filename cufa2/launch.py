"""Cubin -> module -> launch: loaded kernels, their parameters and grids, and work memory.

The only room with pointers. One by-value parameter struct per launch; the shared-memory opt-in
is set once per kernel and device; work memory is kept per stream and grown when needed.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import arrays, compiler, device
from .arrays import ArrayView
from .kernels import FWD_FORMAT, FWD_PARAMS, Variant
from .placement import Place
from .problem import Problem

_LOG2_E = math.log2(math.e)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
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


_loaded: dict[tuple[Variant, int], Loaded] = {}
_loading: dict[tuple[Variant, int], threading.Lock] = {}
_loading_guard = threading.Lock()


def load(variant: Variant, index: int) -> Loaded:
    """The kernel of `variant` on GPU `index`, compiled and loaded at first use by one thread."""
    key = (variant, index)
    if key not in _loaded:
        with _loading_guard:
            lock = _loading.setdefault(key, threading.Lock())
        with lock:
            if key not in _loaded:
                _loaded[key] = _load(variant, index)
    return _loaded[key]


def _load(variant: Variant, index: int) -> Loaded:
    cupy = device.cupy()
    arch, driver = device.info(index).arch, device.driver_cuda()
    cubin = compiler.build(variant, arch, driver=driver, progress=_log.info)
    with cupy.cuda.Device(index):
        function = cupy.RawModule(path=str(cubin.path)).get_function(variant.name)
        function.max_dynamic_shared_size_bytes = variant.smem_bytes
    total = variant.smem_bytes + cubin.shared_memory
    return Loaded(function, variant, KernelRecord(variant.name, cubin.registers, total))


class Scratch:
    """Work memory of one stream. Calls on a stream run in order, so they share one buffer; the
    lock keeps a call's copies and launch together when threads share the stream."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._buffer: Any = None

    def take(self, shapes: list[tuple[int, ...]], itemsize: int) -> list[Any]:
        """Uninitialised arrays of these shapes (16-bit types as uint16)."""
        cupy = device.cupy()
        sizes = [-(-math.prod(s) * itemsize // 256) * 256 for s in shapes]
        if self._buffer is None or self._buffer.nbytes < sum(sizes):
            self._buffer = None  # returned to the pool before the larger one is taken from it
            self._buffer = cupy.empty(sum(sizes), np.uint8)
        made, start = [], 0
        for shape, size in zip(shapes, sizes, strict=True):
            flat = self._buffer[start : start + math.prod(shape) * itemsize].view(f"u{itemsize}")
            made.append(flat.reshape(shape))
            start += size
        return made


def forward(
    kernel: Loaded,
    problem: Problem,
    views: dict[str, ArrayView],
    lse: ArrayView | None,
    lens: Sequence[ArrayView | None],
    at: Place,
    scratch: Scratch,
) -> None:
    """Queue one forward pass over (B, S, H, D) views q, k, v, o; `at` is current.

    A view the kernel cannot use in place is replaced by a work copy in `scratch`.
    """
    unaligned = [n for n, v in views.items() if not arrays.aligned(v)]
    if not unaligned:
        _launch(kernel, problem, views, lse, lens, at)
        return
    with scratch.lock:
        shapes = [arrays.padded_shape(views[n]) for n in unaligned]
        work = dict(zip(unaligned, scratch.take(shapes, views["q"].itemsize), strict=True))
        for name in unaligned:
            if name != "o":
                arrays.copy_in(work[name], views[name])
        placed = {n: arrays.work_view(w, problem.dtype) for n, w in work.items()}
        _launch(kernel, problem, {**views, **placed}, lse, lens, at)
        if "o" in work:
            arrays.copy_out(views["o"], work["o"])


def _launch(
    kernel: Loaded,
    problem: Problem,
    views: dict[str, ArrayView],
    lse: ArrayView | None,
    lens: Sequence[ArrayView | None],
    at: Place,
) -> None:
    tile = kernel.variant.tile
    heads = problem.batch * problem.num_heads
    blocks = heads * -(-problem.seqlen_q // tile.block_q)
    grid_x = min(blocks, 2**31 - 1)
    values = _forward_params(problem, views, lse, lens, device.info(at.index).l2_bytes)
    params = np.void(struct.pack(FWD_FORMAT, *(values[name] for name, _ in FWD_PARAMS)))
    kernel.function(
        (grid_x, -(-blocks // grid_x)),
        (32 * tile.warps,),
        (params,),
        shared_mem=kernel.variant.smem_bytes,
        stream=at.stream,
    )


def _forward_params(
    problem: Problem,
    views: dict[str, ArrayView],
    lse: ArrayView | None,
    lens: Sequence[ArrayView | None],
    l2_bytes: int,
) -> dict[str, Any]:
    """Values of the FwdParams fields (cuda_src/attn/params.cuh) for one launch."""
    p = problem
    scale = abs(p.softmax_scale)
    # The sign of the scale goes into Q, and so does a scale of zero: the exponent's factor, in
    # float32, stays positive.
    sign = math.copysign(1.0, p.softmax_scale) if scale >= 2.0**-126 else 0.0
    exponent = p.softcap if p.softcap else scale if sign else 1.0
    values: dict[str, Any] = {
        "lse": 0 if lse is None else lse.pointer,
        "heads_total": p.batch * p.num_heads,
        "section": _section(p, l2_bytes, views["k"].itemsize),
        "num_heads": p.num_heads,
        "group": p.group,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        "head_dim": views["q"].shape[3],
        "head_dim_v": views["v"].shape[3],
        "window_left": p.window_left or 0,
        "window_right": p.window_right or 0,
        "top_left": int(p.align == "top_left"),
        # Clamped: infinity would turn a score of 0 into NaN.
        "tanh_scale": min(scale / p.softcap, _MAX_FLOAT32) if p.softcap else 0.0,
        "scale_log2": exponent * _LOG2_E,
        "q_sign": sign,
    }
    for name, lengths in zip(("seqlens_q", "seqlens_k"), lens, strict=True):
        values[name] = 0 if lengths is None else lengths.pointer
        values[f"{name}_stride"] = 0 if lengths is None else lengths.strides[0]
    for name in ("q", "k", "v", "o"):
        batch, row, head, _ = views[name].strides
        values[name] = views[name].pointer
        values |= {f"{name}_stride.batch": batch, f"{name}_stride.row": row}
        values[f"{name}_stride.head"] = head
    batch, head, row = _lse_strides(lse)
    values |= {"lse_stride.batch": batch, "lse_stride.row": row, "lse_stride.head": head}
    return values


def _lse_strides(lse: ArrayView | None) -> tuple[int, int, int]:
    if lse is None:
        return 0, 0, 0
    if len(lse.strides) == 2:
        return lse.strides[0], 0, lse.strides[1]
    batch, head, row = lse.strides
    return batch, head, row


def _section(problem: Problem, l2_bytes: int, itemsize: int) -> int:
    """Query heads that run side by side, so that their K and V share the L2 cache.

    About as many as fill 60 % of it, split into sections of about equal size: a small last one
    would start its long causal tiles when the card is about to run dry (a tenth of the time of 16
    heads of 16k keys, measured on an H200).
    """
    p = problem
    per_head = max(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * itemsize)
    at_most = max(1, int(0.6 * l2_bytes) // per_head)
    heads = p.batch * p.num_heads_kv
    sections = max(1, int(heads / at_most + 0.5))
    return -(-heads // sections) * p.group
