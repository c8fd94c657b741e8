"""Arrays of any library in and out: NumPy, CuPy, PyTorch, JAX, and whatever speaks DLPack.

An `ArrayView` is what the rest of the library sees: an address, a shape, strides and a device.
Reading one never casts, and copies only a NumPy record field whose strides are no whole elements.
This is the only room that may copy: `copy_in` and `copy_out`, counted by `copy_count`, serve a
kernel that cannot use a tensor as it lies.

No framework is imported here: one that is not in sys.modules cannot have made the caller's array.
Streams: a producer is handed the work's stream through DLPack and orders itself before it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import dlpack
from .device import cupy
from .placement import Place, device_of, library_of

Shape = tuple[int, ...]

_NEED_ML_DTYPES = "bfloat16 arrays outside their framework need `pip install ml_dtypes`"


@dataclass(frozen=True)
class ArrayView:
    """An array as the kernels see it; strides are in elements."""

    pointer: int
    shape: Shape
    strides: Shape
    dtype: str
    device: tuple[str, int]
    library: str  # numpy, cupy, torch, jax or dlpack
    readonly: bool
    owner: Any  # keeps the memory alive

    @property
    def itemsize(self) -> int:
        return dlpack.ITEMSIZE[self.dtype]

    @property
    def size(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    def canonical(self, layout: str) -> ArrayView:
        """The same memory with axes (B, S, H, D); 3-D arrays are (B*H, S, D), one head a row."""
        if len(self.shape) == 3:
            (b, s, d), (sb, ss, sd) = self.shape, self.strides
            return replace(self, shape=(b, s, 1, d), strides=(sb, ss, 0, sd))
        if layout == "bshd":
            return self
        (b, h, s, d), (sb, sh, ss, sd) = self.shape, self.strides
        return replace(self, shape=(b, s, h, d), strides=(sb, ss, sh, sd))

    def byte_range(self) -> tuple[int, int]:
        """First byte and one past the last byte that the elements occupy."""
        if self.size == 0:
            return self.pointer, self.pointer
        ends = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = sum(e for e in ends if e < 0)
        high = sum(e for e in ends if e > 0) + 1
        return self.pointer + low * self.itemsize, self.pointer + high * self.itemsize

    def numpy(self) -> np.ndarray[Any, Any]:
        """CPU memory as a NumPy array, without a copy."""
        return np.asarray(_ArrayInterface(self)).view(_numpy_dtype(self.dtype))

    def bits(self) -> Any:
        """The memory as an array of unsigned integers, CuPy's on a GPU, without a copy: for moving
        data, which must neither convert it nor need a dtype that CuPy may lack (bfloat16)."""
        if self.device[0] == "cpu":
            return self.numpy().view(f"u{self.itemsize}")
        memory = cupy().cuda
        low, high = self.byte_range()
        block = memory.UnownedMemory(low, max(high - low, 1), self.owner, self.device[1])
        return cupy().ndarray(
            self.shape,
            f"u{self.itemsize}",
            memory.MemoryPointer(block, self.pointer - low),
            tuple(s * self.itemsize for s in self.strides),
        )


class _ArrayInterface:
    """What NumPy needs to see foreign CPU memory; NumPy keeps it, and with it the owner."""

    def __init__(self, view: ArrayView) -> None:
        self.owner = view.owner
        self.__array_interface__ = {
            "version": 3,
            "data": (view.pointer or 1, view.readonly),
            "shape": view.shape,
            "strides": tuple(s * view.itemsize for s in view.strides),
            "typestr": np.dtype("u2" if view.dtype == "bfloat16" else view.dtype).str,
        }


def view(name: str, array: Any, at: Place) -> ArrayView:
    """Read an array's address, shape, strides and dtype; its producer is ordered before `at`."""
    library = library_of(array)
    if library == "numpy":
        return _view_numpy(name, array)
    if library == "cupy":
        strides = tuple(s // array.itemsize for s in array.strides)
        if any(s % array.itemsize for s in array.strides):
            raise ValueError(f"{name} has strides {array.strides}: not whole elements")
        dtype = _supported(name, array.dtype.name)
        device = ("cuda", int(array.device.id))
        return ArrayView(
            array.data.ptr, array.shape, strides, dtype, device, library, False, array
        )
    if library == "torch":
        if array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, and torch's autograd would not see this call; "
                f"pass {name}.detach() or call under torch.no_grad()"
            )
        if array.is_neg():
            raise ValueError(f"{name} is a negated view in torch; pass {name}.resolve_neg()")
        device = device_of(name, array)
        dtype = _supported(name, str(array.dtype).removeprefix("torch."))
        shape, strides = tuple(array.shape), tuple(array.stride())
        return ArrayView(array.data_ptr(), shape, strides, dtype, device, library, False, array)
    if not hasattr(array, "__dlpack__"):
        # __cuda_array_interface__, as Numba's
        return replace(view(name, cupy().asarray(array), at), library="dlpack")
    pointer_stream = None if at.kind == "cpu" else (at.stream.ptr or 1)
    tensor = dlpack.read(array, pointer_stream)
    return ArrayView(
        tensor.pointer,
        tensor.shape,
        tensor.strides,
        _supported(name, tensor.dtype),
        device_of(name, array),
        library,
        tensor.readonly or library == "jax",  # immutable, which its capsules may not say
        tensor.owner,
    )


def check_writable(name: str, out: ArrayView, inputs: Mapping[str, ArrayView | None]) -> None:
    """Raise unless `out` may be written: not read-only, no element twice, apart from inputs."""
    if out.readonly:
        raise ValueError(f"{name} is read-only, or its strides are not whole elements")
    axes = sorted((abs(s), n) for n, s in zip(out.shape, out.strides, strict=True) if n > 1)
    reach = 0
    for stride, extent in axes:
        if stride <= reach and out.size:
            raise ValueError(f"{name} has elements that share memory (strides {out.strides})")
        reach += stride * (extent - 1)
    low, high = out.byte_range()
    for other, view_ in inputs.items():
        if view_ is None or view_.device != out.device:
            continue
        other_low, other_high = view_.byte_range()
        if low < other_high and other_low < high and _share(out, view_):
            raise ValueError(
                f"{name} overlaps {other} in memory; inputs are never written, results kept apart"
            )


def _share(a: ArrayView, b: ArrayView) -> bool:
    """Whether two views whose ranges cross have a byte in common, as q and o interleaved in one
    buffer have not. NumPy decides from the addresses alone, wherever the memory is."""
    exact: Any = np.shares_memory  # its stubs know two values of max_work, NumPy takes any
    try:
        return bool(exact(*(np.asarray(_ArrayInterface(x)) for x in (a, b)), max_work=10_000))
    except np.exceptions.TooHardError:
        return True


def empty(shape: Shape, dtype: str, like: ArrayView, at: Place) -> Any:
    """A new array for results, made by the caller's library where it can give memory to write."""
    if like.library == "torch":
        torch = sys.modules["torch"]
        kind = getattr(torch, dtype)
        if at.kind == "cpu":
            return torch.empty(shape, dtype=kind, device="cpu")  # whatever torch's default is
        # torch's allocator reuses a block in the order of the stream it was taken on.
        with torch.cuda.stream(torch.cuda.ExternalStream(at.stream.ptr, at.index)):
            return torch.empty(shape, dtype=kind, device=torch.device("cuda", at.index))
    if at.kind == "cpu":
        return np.empty(shape, _numpy_dtype(dtype))
    return cupy().empty(shape, _numpy_dtype(dtype))


def export(array: Any, like: ArrayView, at: Place) -> Any:
    """Hand a result from `empty` to the caller's library (called with `at.stream` current)."""
    if like.library != "jax":
        return array
    jax = sys.modules["jax"]
    return jax.numpy.asarray(array) if at.kind == "cpu" else jax.dlpack.from_dlpack(array)


_copies = 0


def copy_count() -> int:
    """How many tensors were copied so far because a kernel could not use them in place."""
    return _copies


def aligned(source: ArrayView) -> bool:
    """Whether the GPU kernels can use this (B, S, H, D) view in place: contiguous last axis,
    16-byte aligned rows, and a head dim of whole 16-byte chunks."""
    per_chunk = 16 // source.itemsize
    *outer, last = zip(source.shape, source.strides, strict=True)
    return (
        source.pointer % 16 == 0
        and last[0] % per_chunk == 0
        and last[1] == 1
        and all(n <= 1 or s % per_chunk == 0 for n, s in outer)
    )


def padded_shape(source: ArrayView) -> Shape:
    """Shape of a work copy: the head dim rounded up to whole 16-byte chunks."""
    per_chunk = 16 // source.itemsize
    *outer, d = source.shape
    return (*outer, -(-d // per_chunk) * per_chunk)


def work_view(work: Any, dtype: str) -> ArrayView:
    """A work buffer (CuPy or NumPy, contiguous) as a view of `dtype`."""
    strides = tuple(s // work.itemsize for s in work.strides)
    host = isinstance(work, np.ndarray)
    device = ("cpu", 0) if host else ("cuda", int(work.device.id))
    library = "numpy" if host else "cupy"
    return ArrayView(address(work), work.shape, strides, dtype, device, library, False, work)


def address(work: Any) -> int:
    """Where a work buffer starts; 0 if it is empty."""
    if not work.size:
        return 0
    return int(work.ctypes.data if isinstance(work, np.ndarray) else work.data.ptr)


def copy_in(target: Any, source: ArrayView) -> None:
    """Fill a work copy, zeros in the padding columns."""
    global _copies
    _copies += 1
    d = source.shape[-1]
    target[..., d:] = 0
    target[..., :d] = source.bits()


def copy_out(target: ArrayView, source: Any) -> None:
    """Copy a work buffer's real columns to the caller's array."""
    global _copies
    _copies += 1
    target.bits()[...] = source[..., : target.shape[-1]]


def _view_numpy(name: str, array: Any) -> ArrayView:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; its mask would be ignored, pass a plain array")
    if not array.dtype.isnative:
        raise TypeError(f"{name} has dtype {array.dtype.str}, which is not in native byte order")
    dtype = _supported(name, array.dtype.name)
    readonly = not array.flags.writeable
    if any(s % array.itemsize for s in array.strides):
        # A field of a record: whole elements, odd strides. What is written to a copy is lost.
        array, readonly = np.ascontiguousarray(array), True
    strides = tuple(s // array.itemsize for s in array.strides)
    pointer = array.__array_interface__["data"][0]
    return ArrayView(pointer, array.shape, strides, dtype, ("cpu", 0), "numpy", readonly, array)


def _supported(name: str, dtype: str) -> str:
    if dtype not in dlpack.ITEMSIZE:
        raise TypeError(
            f"{name} has dtype {dtype}; use float16, bfloat16, float32 or float64 "
            "(int32 for sequence lengths)"
        )
    return dtype


def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    if dtype != "bfloat16":
        return np.dtype(dtype)
    try:
        import ml_dtypes
    except ImportError as e:
        raise TypeError(_NEED_ML_DTYPES) from e
    dtype_: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype_
