"""What this machine has: CuPy (imported lazily), its GPUs, its driver, and CUFA2_* settings.

The only room that asks the GPU or the environment. Importing it imports nothing else and creates
no CUDA context, so a process may fork, or set CUDA_VISIBLE_DEVICES, before its first call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALL = (
    'install CuPy and NVRTC with `pip install "cufa2[cuda12]"` (driver for CUDA 12) '
    'or `pip install "cufa2[cuda13]"` (driver for CUDA 13, R580 or newer)'
)

_cuda_process: int | None = None  # the process that holds this library's CUDA context


@dataclass(frozen=True)
class DeviceInfo:
    """The facts about one GPU that a plan depends on."""

    name: str
    cc: tuple[int, int]
    smem_per_block: int  # bytes, with opt-in
    sm_count: int
    l2_bytes: int

    @property
    def arch(self) -> str:
        """NVRTC's name of the architecture, with the suffix that unlocks its own instructions."""
        return arch_of(self.cc)


def arch_of(cc: tuple[int, int]) -> str:
    """sm_80, sm_86, sm_89, sm_90a, sm_100a, ...: arch-specific code exists from 9.0 up."""
    major, minor = cc
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


# What an ahead-of-time build for an architecture may assume (CUDA programming guide, table of
# technical specifications per compute capability).
_SMEM_KB = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99}
_SMEM_KB |= {f"sm_{n}a": 227 for n in (90, 100, 101, 103, 110)}
_SMEM_KB |= {f"sm_{n}a": 99 for n in (120, 121)}
ARCHS = tuple(_SMEM_KB)


def info_for_arch(arch: str) -> DeviceInfo:
    """A DeviceInfo that stands for every card of an architecture such as sm_90a."""
    if arch not in _SMEM_KB:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(ARCHS)}")
    block = 1024 * _SMEM_KB[arch]
    digits = arch.removeprefix("sm_").rstrip("a")
    return DeviceInfo(arch, (int(digits[:-1]), int(digits[-1])), block, 1, 32 << 20)


@functools.cache
def cupy_module() -> Any:
    """CuPy, whether or not there is a GPU; RuntimeError if it cannot be imported.

    Failures are not cached: installing CuPy mends a running process.
    """
    try:
        import cupy
    except Exception as e:  # a broken install raises more than ImportError
        raise RuntimeError(f"CuPy cannot be imported ({type(e).__name__}: {e}); {INSTALL}") from e
    return cupy


def why_no_cuda() -> str | None:
    """None if a GPU can be used, else one sentence with the reason."""
    try:
        module = cupy_module()
    except RuntimeError as e:
        return str(e)
    if module.cuda.is_available():
        return None
    if module.cuda.runtime.driverGetVersion() == 0:
        return "no NVIDIA driver was found (libcuda.so.1 is missing or too old)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    return f"the driver shows no GPU{hint}"


def cuda_available() -> bool:
    """Whether CuPy is installed and sees at least one GPU."""
    return why_no_cuda() is None


def cupy() -> Any:
    """CuPy, ready to use a GPU, or RuntimeError with the reason and what to do."""
    global _cuda_process
    if _cuda_process != os.getpid():
        reason = why_no_cuda()
        if reason is not None:
            raise RuntimeError(f"the CUDA back end is off: {reason}")
        if _cuda_process is not None:
            raise RuntimeError(
                "this process was forked from one that had used the GPU, and CUDA does not "
                "survive a fork; start workers with multiprocessing's 'spawn' or 'forkserver'"
            )
        _cuda_process = os.getpid()
    return cupy_module()


@functools.cache
def info(index: int) -> DeviceInfo:
    """Facts about GPU `index` (CuPy's numbering, after CUDA_VISIBLE_DEVICES)."""
    props = cupy().cuda.runtime.getDeviceProperties(index)
    return DeviceInfo(
        name=props["name"].decode(),
        cc=(props["major"], props["minor"]),
        smem_per_block=props["sharedMemPerBlockOptin"],
        sm_count=props["multiProcessorCount"],
        l2_bytes=props["l2CacheSize"],
    )


@functools.cache
def driver_cuda() -> tuple[int, int]:
    """Newest CUDA version the driver supports, e.g. (13, 0); (0, 0) without a driver."""
    try:
        version = int(cupy_module().cuda.runtime.driverGetVersion())
    except RuntimeError:
        version = 0
    return version // 1000, version % 1000 // 10


# Tensor maps (CUtensorMap): what the copy engine of sm_90 knows of a tensor.

_MAP_TYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_SWIZZLE_128B, _L2_256B = 3, 3
_BOX_COLUMNS = 64  # 128 bytes of 16-bit elements, the most that is swizzled


def mappable(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether a tensor map can describe a (B, S, H, D) tensor, whose rows are aligned to 16 bytes:
    strides in elements, positive where there is more than one element, under 2^40 bytes."""
    pairs = zip(shape[:3], strides[:3], strict=True)
    return all(n <= 1 or 0 < s * itemsize < 2**40 for n, s in pairs)


def tensor_map(
    pointer: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: str,
    rows: int,
    heads: int = 0,
) -> bytes:
    """The CUtensorMap of a (B, S, H, D) tensor (strides in elements), read in boxes of `rows` rows
    and 64 columns, swizzled by 128 bytes: axes (D, S, H, B). Given a number of heads, which then
    are in the box, for every position: axes (D, H, S, B)."""
    axes, box = (1, 2, 0), (rows, 1)
    if heads:
        axes, box = (2, 1, 0), (heads, rows // heads)
    # Axes of one element may have any stride; 16 is legal.
    steps = tuple(2 * strides[a] if shape[a] > 1 else 16 for a in axes)
    extents = (shape[3], *(shape[a] for a in axes))
    return encode_tensor_map(_MAP_TYPES[dtype], pointer, extents, steps, box)


@functools.lru_cache(maxsize=1024)
def encode_tensor_map(
    kind: int,
    pointer: int,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, int],
) -> bytes:
    """cuTensorMapEncodeTiled for four axes; RuntimeError with what it was given if it refuses.

    A map is a function of these numbers alone, which say nothing about who owns the memory.
    """
    words, halves = ctypes.c_uint64 * 4, ctypes.c_uint32 * 4
    memory = (ctypes.c_uint64 * 24)()  # 128 bytes that begin at a multiple of 64
    start = -(-ctypes.addressof(memory) // 64) * 64
    status = _libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start),
        kind,
        4,
        ctypes.c_void_p(pointer),
        words(*extents),
        (ctypes.c_uint64 * 3)(*strides),
        halves(_BOX_COLUMNS, *box, 1),
        halves(1, 1, 1, 1),
        0,
        _SWIZZLE_128B,
        _L2_256B,
        0,
    )
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled failed ({status}): address {pointer:#x}, extents "
            f"{tuple(extents)}, strides {tuple(strides)} bytes, boxes of {box}"
        )
    return ctypes.string_at(start, 128)


@functools.cache
def _libcuda() -> ctypes.CDLL:
    """The driver, which CuPy has loaded."""
    return ctypes.CDLL("libcuda.so.1")


def cache_dir() -> Path:
    """Folder of compiled kernels: CUFA2_CACHE_DIR, else cufa2 in the user's cache folder."""
    chosen = os.environ.get("CUFA2_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "cufa2"
