"""The emulated GPU: what the launcher needs of one, on the arrays and in the memory of the host.

`Emulated` is the product's own launcher with kernels that run on the CPU: the problem, the plan,
the parameters, the grids, the work memory and the copies of what a kernel cannot use in place are
all the product's. Every array is registered with the machine before a launch, byte by byte of its
elements: what lies between them may not be touched, inputs may not be written, and results must be
written before they are read, and all of them in the end.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cufa2 import arrays, device, launch, plan
from cufa2.arrays import ArrayView
from cufa2.attention import FlashAttention2
from cufa2.launch import KernelRecord, Loaded, Scratch
from cufa2.problem import Options, Problem

from . import build

_READABLE, _WRITABLE, _RESULT = 1, 2, 4
_FAR = 1 << 28  # bytes from the first element to the last
_MESSAGE_BYTES, _STACK_DEPTH = 1 << 16, 64
_STREAM: Any = SimpleNamespace(
    stream=None
)  # the place of all calls, as far as launches look at it
_seeds = itertools.count()


class EmulatorError(AssertionError):
    """A fault that the machine found, with the kernel's lines that led to it."""


class Function:
    """A kernel, called as CuPy's functions are."""

    def __init__(self, name: str, path: Path, seeds: Iterator[int]) -> None:
        self.machine = build.machine()
        self.name, self.path, self.seeds = name, path, seeds
        self.entry = ctypes.CDLL(str(path)).emulated

    def __call__(
        self, grid: Any, block: Any, args: Any, *, shared_mem: int, stream: Any = None
    ) -> None:
        (params,) = args
        memory = ctypes.create_string_buffer(params.nbytes + 64)
        packed = ctypes.c_void_p(-(-ctypes.addressof(memory) // 64) * 64)  # as parameters are
        ctypes.memmove(packed, params.tobytes(), params.nbytes)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        stack, depth = (ctypes.c_void_p * _STACK_DEPTH)(), ctypes.c_int(_STACK_DEPTH)
        seed = next(self.seeds)
        failed = self.machine.emulator_launch(
            self.entry,
            packed,
            *(ctypes.c_uint(n) for n in grid),
            ctypes.c_int(block[0]),
            ctypes.c_uint(shared_mem),
            ctypes.c_uint(seed),
            message,
            _MESSAGE_BYTES,
            stack,
            ctypes.byref(depth),
        )
        if failed:
            text = message.value.decode()
            raise EmulatorError(
                f"{self.name}, seed {seed}: {self._placed(text)}"
                f"{self._stack(list(stack)[: depth.value])}"
            )

    def _placed(self, text: str) -> str:
        """Lists of addresses in a message, which stand between two marks, as places."""
        said, *rest = text.split("\x01")
        for part in rest:
            frames, after = part.split("\x02")
            said += self._stack([int(x, 16) for x in frames.split()]) + after
        return said

    def _stack(self, frames: list[int | None]) -> str:
        base, end = _mapped(str(self.path))
        mine = [frame for frame in frames if frame and base <= frame < end]
        found = build.places(mine, self.path, base)
        return "".join(f"\n      {place}" for place in found if " in emulated" not in place)


def _mapped(path: str) -> tuple[int, int]:
    """Where a library lies in memory."""
    with open("/proc/self/maps") as maps:
        lines = [line.split()[0] for line in maps if line.rstrip().endswith(path)]
    ends = [tuple(int(x, 16) for x in line.split("-")) for line in lines]
    return min(low for low, _ in ends), max(high for _, high in ends)


class HostScratch(Scratch):
    """Work memory that the host lends, full of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Any] = []

    def take(self, wanted: Any) -> list[Any]:
        self._buffer = None
        self.taken = super().take(wanted)
        return self.taken

    def _empty(self, size: int) -> Any:
        raw = np.full(size + 256, 0xFF, np.uint8)
        return raw[-raw.ctypes.data % 256 :][:size]

    def _zeros(self, size: int) -> Any:
        return np.zeros(size, np.uint32)


def encode_tensor_map(
    kind: int, pointer: int, extents: Any, strides: Any, box: tuple[int, int]
) -> bytes:
    """What stands for the driver's maps: EmulatedMap of runtime.h."""
    for s in strides:
        if not 0 < s < 2**40 or s % 16:
            raise EmulatorError(f"a tensor map with a stride of {s} bytes")
    if not all(0 < n <= 2**32 for n in extents) or not 0 < math.prod(box) <= 256 or pointer % 16:
        raise EmulatorError(f"a tensor map of {extents} at {pointer:#x} with boxes of {box}")
    return struct.pack("8Q3I", pointer, *extents, *strides, kind, *box).ljust(128, b"\0")


class Emulated(FlashAttention2):
    """The launcher on an emulated GPU, the one that `device.info` tells of: takes NumPy arrays.
    Each launch draws the order in which threads run from a seed of its own."""

    def _loaded(self, problem: Problem) -> list[Loaded]:
        info = device.info(0)
        return [
            Loaded(
                Function(v.name, build.library(v, info.arch), _seeds),
                v,
                KernelRecord(v.name, 0, v.smem_bytes),
                info,
            )
            for v in plan.choose(problem, info).variants
        ]

    def _run_forward(
        self, problem: Problem, call: Any, o: ArrayView, lse: ArrayView | None, at: Any
    ) -> None:
        tensors, rows = ("q", "k", "v", "o"), ("lse", "seqlens_q", "seqlens_k")
        (kernel,) = self._loaded(problem)
        views = self._launch_views({**call, "o": o, "lse": lse}, tensors, rows)
        scratch = HostScratch()
        loaded = replace(
            kernel, function=_registering(kernel.function, views, ("o", "lse"), scratch)
        )
        with mock.patch.object(device, "encode_tensor_map", encode_tensor_map):
            launch.forward(loaded, problem, views, _STREAM, scratch)
        check_written(loaded.variant.name)

    def _run_backward(self, problem: Problem, kernels: list[Loaded], call: Any, at: Any) -> None:
        tensors = ("q", "k", "v", "o", "grad_o", "dq", "dk", "dv")
        rows = ("lse", "dlse", "seqlens_q", "seqlens_k")
        views = self._launch_views({**call, "grad_o": call["do"]}, tensors, rows)
        scratch, written = HostScratch(), ("dq", "dk", "dv")
        loaded = self._loaded(problem)
        first = _registering(loaded[0].function, views, written, scratch)
        loaded[0] = replace(loaded[0], function=first)
        launch.backward(loaded, problem, views, _STREAM, scratch)
        check_written(loaded[0].variant.name)


def _registering(
    function: Any, views: Mapping[str, ArrayView | None], written: Any, scratch: HostScratch
) -> Any:
    """A function that first tells the machine of all memory there is."""

    def call(*args: Any, **options: Any) -> None:
        known = []
        for name, view in views.items():
            if view is None or not view.size:
                continue
            if view.shape[3:] and not arrays.aligned(view):
                continue  # its copy among the work arrays stands for it
            flags = _WRITABLE | _RESULT if name in written else _READABLE
            strides = tuple(s * view.itemsize for s in view.strides)
            known.append((name, view.pointer, view.shape, strides, view.itemsize, flags))
        for n, work in enumerate(scratch.taken):
            if work.size:
                # What is not flat is a copy of an array, filled before the launch.
                flags = _WRITABLE | (_READABLE if work.ndim > 1 else 0)
                place = (work.ctypes.data, work.shape, work.strides, work.itemsize)
                known.append((f"work array {n}", *place, flags))
        if scratch._counter is not None:
            place = (scratch._counter.ctypes.data, scratch._counter.shape, (4,), 4)
            known.append(("the counter of claims", *place, _READABLE | _WRITABLE))
        register(known)
        function(*args, **options)
        if scratch._counter is not None and scratch._counter.any():
            raise EmulatorError("claims of work are left behind")

    return call


def check_written(name: str) -> None:
    """Raise unless every element of every result has been written. Of results that lie so that a
    kernel cannot write them, the copy is written in whole rows and full of NaN before."""
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    if build.machine().emulator_unwritten(message, _MESSAGE_BYTES):
        raise EmulatorError(f"{name}: nobody wrote {message.value.decode()}")


def register(known: list[Any]) -> None:
    """Tell the machine of arrays (name, address, shape, strides in bytes, itemsize, flags)."""
    machine = build.machine()
    machine.emulator_forget_memory()
    known = [piece for array in known for piece in _pieces(*array)]
    ranges = []
    for _, pointer, shape, strides, itemsize, _ in known:
        far = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        low = pointer + sum(f for f in far if f < 0)
        ranges.append((low & ~15, (pointer + sum(f for f in far if f > 0) + itemsize + 15) & ~15))
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    for low, high in merged:
        machine.emulator_add_region(ctypes.c_size_t(low), ctypes.c_size_t(high))
    for name, pointer, shape, strides, itemsize, flags in known:
        longs = ctypes.c_long * len(shape)
        machine.emulator_add_array(
            name.encode(),
            ctypes.c_size_t(pointer),
            len(shape),
            longs(*shape),
            longs(*strides),
            itemsize,
            flags,
        )


def _pieces(
    name: str, pointer: int, shape: Any, strides: Any, itemsize: int, flags: int
) -> Iterator[Any]:
    """An array, in parts if it lies far apart: what is in between then takes no memory."""
    spans = [(n - 1) * abs(s) for n, s in zip(shape, strides, strict=True)]
    if sum(spans) < _FAR:
        yield name, pointer, shape, strides, itemsize, flags
        return
    axis = spans.index(max(spans))
    for i in range(shape[axis]):
        part = (*shape[:axis], 1, *shape[axis + 1 :])
        yield from _pieces(
            f"{name}, {i} of axis {axis}",
            pointer + i * strides[axis],
            part,
            strides,
            itemsize,
            flags,
        )


@functools.cache
def launcher(options: Options) -> FlashAttention2:
    """What stands for `cufa2.attention.launcher` where calls run on the emulated card."""
    return Emulated.for_options(options)
