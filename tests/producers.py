"""DLPack producers of no known library, made by hand from dlpack.h 1.x.

Layouts are written out here and shared with nothing in the library, which they are to test.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _DELETER))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, DESTRUCTOR)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# On a capsule that is being destroyed no reference may be taken: its address is passed.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@DESTRUCTOR  # type: ignore[untyped-decorator]
def _destroy(capsule: int) -> None:
    for name, kind in ((b"dltensor", _Managed), (b"dltensor_versioned", _Versioned)):
        if _is_valid(capsule, name):
            address = _pointer(capsule, name)
            kind.from_address(address).deleter(address)


alive: dict[int, tuple[Any, ...]] = {}  # managed tensors whose deleter has not been called


@_DELETER  # type: ignore[untyped-decorator]
def _delete(address: int) -> None:
    *_, producer = alive.pop(address)  # a second call raises KeyError, which pytest reports
    producer.deleted += 1


class Producer:
    """An array of no known library: it speaks DLPack and nothing else, and keeps count.

    array: CuPy or NumPy memory to export. versioned: DLPack 1.x capsule. null_strides: say nothing
    of strides, as older producers do for compact arrays. byte_offset: give the address so many
    bytes low and the rest as byte_offset. readonly: set the flag. on_export: called with the
    consumer's stream. device: another (DLDeviceType, index). fields: other values of code, bits,
    lanes, major. Counts: `exports`, `deleted`; `streams` holds what consumers passed.
    """

    def __init__(
        self,
        array: Any,
        *,
        versioned: bool = True,
        null_strides: bool = False,
        byte_offset: int = 0,
        readonly: bool = False,
        on_export: Callable[[Any], None] | None = None,
        device: tuple[int, int] | None = None,
        **fields: int,
    ) -> None:
        self.array, self.versioned, self.null_strides = array, versioned, null_strides
        self.byte_offset, self.readonly, self.on_export = byte_offset, readonly, on_export
        on_gpu = not isinstance(array, np.ndarray)
        self.device = (2 if on_gpu else 1, 0) if device is None else device
        self.fields = fields
        self.streams: list[Any] = []
        self.exports = self.deleted = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Any = None,
        dl_device: Any = None,
        copy: Any = None,
    ) -> Any:
        return self._export(stream, self.versioned and max_version is not None)

    def _export(self, stream: Any, versioned: bool) -> Any:
        self.streams.append(stream)
        if self.on_export is not None:
            self.on_export(stream)
        x = self.array
        address = x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x.data.ptr
        axis = ctypes.c_int64 * max(x.ndim, 1)
        shape, strides = axis(*x.shape), axis(*(s // x.itemsize for s in x.strides))
        managed: Any = _Versioned() if versioned else _Managed()
        tensor = managed.tensor
        tensor.data = address - self.byte_offset if x.size else None
        tensor.byte_offset = self.byte_offset if x.size else 0
        (tensor.device_type, tensor.device_id), tensor.ndim = self.device, x.ndim
        codes = {"float": 2, "bfloat": 4, "int": 0, "uint": 1}
        tensor.code = self.fields.get("code", codes[x.dtype.name.rstrip("0123456789")])
        tensor.bits = self.fields.get("bits", 8 * x.itemsize)
        tensor.lanes = self.fields.get("lanes", 1)
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        if not self.null_strides:
            tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        if versioned:
            managed.major, managed.flags = self.fields.get("major", 1), int(self.readonly)
        managed.deleter = _delete
        where = ctypes.addressof(managed)
        alive[where] = (managed, shape, strides, x, self)
        self.exports += 1
        return new_capsule(where, b"dltensor_versioned" if versioned else b"dltensor", _destroy)


class OldProducer(Producer):
    """A producer from before DLPack 1.0: it does not know max_version."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self._export(stream, False)
