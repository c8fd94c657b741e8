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

from . import dlpack
from .device import cupy

_PER_THREAD_DEFAULT = 2  # cudaStreamPerThread


@dataclass(frozen=True)
class Place:
    """Where a call runs: 'cpu', or GPU `index` with a CuPy stream."""

    kind: str
    index: int = 0
    stream: Any = None

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
        spelled = ", ".join(f"{n} on {_spell(d)}" for n, d in devices.items())
        raise ValueError(f"all arrays must be on one device, got {spelled}")
    name, (kind, index) = next(iter(devices.items()))
    if kind == "cpu":
        if stream is not None:
            raise ValueError("stream= is for GPU arrays; the arrays are on the CPU")
        return CPU
    return Place(kind, index, _stream(stream, arrays[name], index))


_held: collections.deque[tuple[Any, tuple[Any, ...]]] = collections.deque()


def hold(owners: Sequence[Any], stream: Any) -> None:
    """Keep foreign arrays alive until the work queued on `stream` has used them.

    CuPy and torch reuse memory in the order of the very stream that the work is on; other
    libraries know nothing of it. What has finished is let go at the next call.
    """
    while _held and _held[0][0].done:
        _held.popleft()
    if owners:
        _held.append((stream.record(), tuple(owners)))


def stream_key(stream: Any) -> tuple[int, int]:
    """What tells streams apart: the address, and the thread for its per-thread default stream."""
    per_thread = stream.ptr == _PER_THREAD_DEFAULT
    return stream.ptr, threading.get_ident() if per_thread else 0


def parse_device(spec: str | int | None) -> tuple[str, int] | None:
    """None, ('cpu', 0) or ('cuda', index) for a user's device argument."""
    if spec is None:
        return None
    if spec == "cpu":
        return "cpu", 0
    if isinstance(spec, int) and spec >= 0:
        return "cuda", spec
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


def _spell(device: tuple[str, int]) -> str:
    return "cpu" if device[0] == "cpu" else f"cuda:{device[1]}"


class _Pointer:
    """A bare stream address in the shape of the CUDA stream protocol."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


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
