"""Where a call runs: the device its arrays lie on, and the stream its work is queued on.

The data decides, never an exception caught: CPU data runs on NumPy, CUDA data on its own GPU.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import dlpack
from .device import cupy

_LEGACY_DEFAULT, _PER_THREAD_DEFAULT = 1, 2  # cudaStreamLegacy, cudaStreamPerThread


@dataclass(frozen=True)
class Place:
    """Where a call runs: 'cpu', or GPU `index` with a CuPy stream."""

    kind: str
    index: int = 0
    stream: Any = None
    apart: frozenset[str] = frozenset()  # libraries that reuse memory in another stream's order

    def current(self) -> AbstractContextManager[Any]:
        """Context in which the GPU and its stream are CuPy's current ones; nothing on the CPU."""
        stack = ExitStack()
        if self.kind == "cuda":
            stack.enter_context(cupy().cuda.Device(self.index))
            stack.enter_context(self.stream)
        return stack


CPU = Place("cpu")
_REQUIRED = ("do", "q", "k", "v", "o", "lse")  # the others may be None


def place(arrays: Mapping[str, Any], stream: Any = None) -> Place:
    """The one device all arrays lie on, and the stream to queue work on.

    stream: a CuPy stream, an object with __cuda_stream__ (or torch's .cuda_stream), or an address;
    None takes the current stream of q's library if that is CuPy or torch, else CuPy's.
    Raises ValueError naming every array's device if they differ.
    """
    devices = {n: device_of(n, a) for n, a in arrays.items() if a is not None or n in _REQUIRED}
    if len(set(devices.values())) > 1:
        spelled = ", ".join(f"{n} on {spell(d)}" for n, d in devices.items())
        raise ValueError(f"all arrays must be on one device, got {spelled}")
    name, (kind, index) = next(iter(devices.items()))
    if kind == "cpu":
        if stream is not None:
            raise ValueError("stream= is for GPU arrays; the arrays are on the CPU")
        return CPU
    libraries = {library_of(a) for a in arrays.values() if a is not None}
    with cupy().cuda.Device(index):
        work = _stream(stream, arrays[name], index)
        apart = frozenset(lib for lib in libraries if not _in_order(lib, work, index))
    return Place(kind, index, work, apart)


_held: collections.deque[tuple[Any, tuple[Any, ...]]] = collections.deque()
_held_lock = threading.Lock()


def hold(owners: Sequence[Any], stream: Any) -> None:
    """Keep arrays of `Place.apart` libraries until the work queued on `stream` has used them.

    What has finished is let go at the next call.
    """
    with _held_lock:
        while _held and _held[0][0].done:
            _held.popleft()
        if owners:
            _held.append((stream.record(), tuple(owners)))


def stream_key(stream: Any) -> tuple[int, int]:
    """What tells streams apart: the address, and the thread for its per-thread default stream."""
    per_thread = stream.ptr == _PER_THREAD_DEFAULT
    address = 0 if stream.ptr == _LEGACY_DEFAULT else stream.ptr
    return address, threading.get_ident() if per_thread else 0


def parse_device(spec: str | int | None) -> tuple[str, int] | None:
    """None, ('cpu', 0) or ('cuda', index) for a user's device argument."""
    if spec is None:
        return None
    if spec == "cpu":
        return "cpu", 0
    if isinstance(spec, (int, np.integer)) and spec >= 0:
        return "cuda", int(spec)
    if spec == "cuda":
        return "cuda", int(cupy().cuda.Device().id)
    kind, _, index = str(spec).partition(":")
    if kind == "cuda" and index.isdecimal():
        return "cuda", int(index)
    raise ValueError(f"device={spec!r} is not None, 'cpu', 'cuda', 'cuda:N' or a number")


def library_of(array: Any) -> str:
    for name, kind in (("numpy", "ndarray"), ("cupy", "ndarray"), ("torch", "Tensor")):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, getattr(module, kind, ())):
            return name
    jax = sys.modules.get("jax")
    return "jax" if jax is not None and isinstance(array, getattr(jax, "Array", ())) else "dlpack"


def device_of(name: str, array: Any) -> tuple[str, int]:
    library = library_of(array)
    if library == "numpy":
        return "cpu", 0
    if library == "cupy":
        return "cuda", int(array.device.id)
    if library == "torch":
        kind = array.device.type
        if kind not in ("cpu", "cuda"):
            raise TypeError(f"{name} is on torch device {array.device}; use cpu or cuda")
        return kind, array.device.index or 0
    if hasattr(array, "__dlpack_device__"):
        kind, index = array.__dlpack_device__()
        kind = dlpack.device_kind(name, int(kind))
        return kind, int(index) if kind == "cuda" else 0
    if hasattr(array, "__cuda_array_interface__"):
        return "cuda", int(cupy().asarray(array).device.id)
    raise TypeError(
        f"{name} is a {type(array).__name__}; give a NumPy or CuPy array or one with __dlpack__"
    )


def spell(device: tuple[str, int]) -> str:
    """cpu or cuda:N, as users write it."""
    return "cpu" if device[0] == "cpu" else f"cuda:{device[1]}"


class _Pointer:
    """A bare stream address in the shape of the CUDA stream protocol."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def _in_order(library: str, work: Any, index: int) -> bool:
    """Whether the library's own current stream is the work's; if not, the work waits for it here.

    Other libraries are ordered through DLPack's stream argument when their arrays are read.
    """
    if library == "cupy":
        own = cupy().cuda.get_current_stream()
    elif library == "torch":
        own = _stream(sys.modules["torch"].cuda.current_stream(index), None, index)
    else:
        return False
    if stream_key(own) == stream_key(work):
        return True
    work.wait_event(own.record())
    return False


def _stream(stream: Any, first: Any, index: int) -> Any:
    streams = cupy().cuda.Stream
    if stream is None:
        if library_of(first) != "torch":
            return cupy().cuda.get_current_stream()
        stream = sys.modules["torch"].cuda.current_stream(index)
    if isinstance(stream, (streams, cupy().cuda.ExternalStream)):
        return stream
    address = getattr(stream, "cuda_stream", stream)
    if isinstance(address, int):
        return streams.null if address in (0, 1) else streams.from_external(_Pointer(address))
    if hasattr(stream, "__cuda_stream__"):
        return streams.from_external(stream)
    raise TypeError(f"stream={stream!r} is not a CUDA stream or the address of one")
