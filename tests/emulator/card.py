"""The emulated card: what the tests of the kernels use of CuPy, on arrays of the host.

`array_module` stands where the tests have CuPy; the arrays are NumPy's, with CuPy's `get` and
`data.ptr`. `RawModule` compiles CUDA sources whose blocks get on with one thread, like those of
the tests' oracle: natively, with nothing checked.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gpu_oracle
import numpy as np

from cufa2 import api, device

from . import backend, build


class HostArray(np.ndarray):
    """A NumPy array with what CuPy's have besides."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    def get(self) -> np.ndarray[Any, Any]:
        return np.array(self.view(np.ndarray), order="C")


class RawModule:
    """Kernels of a source, each a function of (grid, block, arguments)."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        entries = re.findall(r'extern "C" __global__ void (\w+)\(\s*(.*?)\) \{', code, re.DOTALL)
        self.parameters = {
            name: [" ".join(p.split()) for p in text.split(",")] for name, text in entries
        }
        runners = ""
        for name, parameters in self.parameters.items():
            names = ", ".join(re.split(r"[ *]", p)[-1] for p in parameters)
            runners += (
                f'extern "C" void run_{name}(long grid, {", ".join(parameters)}) {{\n'
                "  gridDim.x = grid;\n"
                f"  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {name}({names});\n}}\n"
            )
        defines = [o for o in options if o.startswith("-D")]
        self.library = ctypes.CDLL(str(build.native(_PRELUDE + code + runners, defines)))

    def get_function(self, name: str) -> Any:
        entry = getattr(self.library, f"run_{name}")
        kinds = [ctypes.c_double if p.startswith("double ") and "*" not in p else ctypes.c_int64
                 for p in self.parameters[name]]  # fmt: skip

        def call(grid: Any, block: Any, args: Any) -> None:
            values = [kind(_value(x)) for kind, x in zip(kinds, args, strict=True)]
            entry(ctypes.c_long(grid[0]), *values)

        return call


# One thread a block: barriers are passed at once, and sums over threads are its own.
_PRELUDE = """
#include "language.h"
#define __shared__ static
struct Dim3 { long x = 0; };
static Dim3 blockIdx, gridDim;
static const struct { int x = 0; } threadIdx;
static const struct { int x = 1; } blockDim;
inline void __syncthreads() {}
"""


def _value(x: Any) -> Any:
    return x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x


def _wrapped(function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        made = function(*args, **options)
        return made.view(HostArray) if isinstance(made, np.ndarray) else made

    return call


class _Module:
    """These names, and NumPy's functions under theirs."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return _wrapped(getattr(np, name))


def to_card(x: np.ndarray[Any, Any]) -> HostArray:
    """A copy of an array, as one of the card."""
    return np.array(x, order="C").view(HostArray)


_MAP_NORESERVE = 0x4000  # of Linux; mmap names it from Python 3.13 on


def sparse(shape: tuple[int, ...], dtype: str) -> Any:
    """An array of zeros of which only those pages take memory that are written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape).view(HostArray)


array_module = _Module(
    sparse=sparse,
    RawModule=RawModule,
    get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
)


op = backend.Emulated  # the launcher class


@contextmanager
def of(arch: str) -> Iterator[None]:
    """Have `flash_attention` and its gradients run on an emulated card of `arch`, and the tests'
    oracle on the host."""
    info = device.info_for_arch(arch)
    with (
        mock.patch.object(api, "launcher", backend.launcher),
        mock.patch.object(device, "info", return_value=info),
        gpu_oracle.using(array_module),
    ):
        yield
