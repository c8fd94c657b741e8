"""Reading DLPack capsules with ctypes alone: any producer, any dtype, versioned or not.

Layouts and rules are those of dlpack.h 1.x. The capsule is kept, not consumed: while it lives the
memory lives, and its own destructor then calls the producer's deleter, once, also after an error.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

CPU, CUDA, HOST, MANAGED = 1, 2, 3, 13  # DLDeviceType: CUDA-pinned host memory is CPU memory

# (DLDataTypeCode, bits) of the dtypes this library knows
_DTYPES = {
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (2, 32): "float32",
    (2, 64): "float64",
    (0, 32): "int32",
}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4}
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}

_READ_ONLY = 1


class _Tensor(ctypes.Structure):
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


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True)
class Tensor:
    """A capsule's content; strides in elements, the address includes byte_offset."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    readonly: bool
    owner: Any


def device_kind(name: str, device_type: int) -> str:
    """'cpu' or 'cuda' for a DLDeviceType; TypeError for any other."""
    if device_type in (CPU, HOST):
        return "cpu"
    if device_type in (CUDA, MANAGED):
        return "cuda"
    raise TypeError(f"{name} is on DLPack device type {device_type}; use CPU or CUDA memory")


def read(array: Any, stream: int | None) -> Tensor:
    """Export `array` for a consumer that works on `stream` (None: the CPU) and read it."""
    capsule = _export(array, stream)
    if type(capsule).__name__ != "PyCapsule":
        raise TypeError(f"__dlpack__ of {type(array).__name__} gave no DLPack capsule")
    name = _get_name(capsule)
    if name == b"dltensor_versioned":
        managed = _Versioned.from_address(_get_pointer(capsule, name))
        if managed.major != 1:
            raise TypeError(f"DLPack {managed.major}.{managed.minor} is not known; 1.x is")
        tensor, readonly = managed.tensor, bool(managed.flags & _READ_ONLY)
    elif name == b"dltensor":
        tensor, readonly = _Tensor.from_address(_get_pointer(capsule, name)), False
    else:
        raise TypeError(f"__dlpack__ of {type(array).__name__} gave no fresh DLPack capsule")
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        lanes = "" if tensor.lanes == 1 else f"x{tensor.lanes}"
        dtype = f"{_CODES.get(tensor.code, f'code {tensor.code} ')}{tensor.bits}{lanes}"
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
    else:  # compact row major, as older producers say it
        steps = [1]
        for extent in shape[:0:-1]:
            steps.append(steps[-1] * extent)
        strides = tuple(reversed(steps)) if shape else ()
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Tensor(pointer, shape, strides, dtype, readonly, (capsule, array))


def _export(array: Any, stream: int | None) -> Any:
    arguments: dict[str, Any] = {} if stream is None else {"stream": stream}
    try:
        return array.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # a producer older than DLPack 1.0 does not know max_version
        return array.__dlpack__(**arguments)


# Prototypes of our own: attributes set on ctypes.pythonapi's functions hold for the whole process.
_get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
