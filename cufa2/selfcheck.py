"""Does a freshly compiled kernel compute what it should? A tiny problem, beside NumPy.

Some versions of NVRTC are reported to miscompile warpgroup products whose operands are registers,
which neither the compiler's log nor a crash would tell. A Hopper kernel that one of them has made
is run once, when it is loaded first, before it serves anyone; that it passed is noted beside its
cubin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import arrays, device, reference
from .cache import Cubin
from .kernels import Variant
from .problem import CompileError, Options, Problem, make_problem

SUSPECTS = ("12.8", "12.9", "13.0")  # NVRTC versions
Run = Callable[[Problem, Mapping[str, arrays.ArrayView | None]], None]


class MiscompiledError(CompileError):
    """A kernel computes wrong values; `row` is the name of its row of KERNELS."""

    def __init__(self, message: str, row: str) -> None:
        super().__init__(message)
        self.row = row


def trusted(cubin: Cubin, variant: Variant) -> bool:
    """Whether this cubin needs no check, or has passed it."""
    if not variant.kernel.persistent or cubin.nvrtc not in SUSPECTS:
        return True
    try:
        return cubin.path.with_suffix(".checked").read_text() == _hash(cubin)
    except OSError:
        return False


def check(cubin: Cubin, variant: Variant, run: Run) -> None:
    """Run the kernel on the current GPU and note that it passed; MiscompiledError if it fails.

    run(problem, views): queue one forward pass on CuPy's current stream.
    """
    error = _largest_error(variant, run)
    if not error <= 1.0:
        raise MiscompiledError(
            f"{variant.name}, compiled by NVRTC {cubin.nvrtc}, computes wrong values ({error:.3g} "
            f"times what rounding explains): {cubin.path}",
            variant.kernel.name,
        )
    try:
        cubin.path.with_suffix(".checked").write_text(_hash(cubin))
    except OSError:
        return  # a folder that cannot be written: checked in each process


def _hash(cubin: Cubin) -> str:
    return hashlib.sha256(cubin.path.read_bytes()).hexdigest()


def problem_of(variant: Variant) -> tuple[Problem, list[Any]]:
    """A problem for this variant and its q, k, v in float32: over a tile of queries, some three
    blocks of keys, none of them whole tiles."""
    tile, (d, dv) = variant.tile, (variant.head_dim, variant.head_dim_v)
    sq, sk = tile.block_q + 9, 3 * tile.block_k - 7
    masks: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"causal": True},
        "left": {"window": (tile.block_k, None)},
        "local": {"window": (tile.block_k, 5)},
    }
    options = masks[variant.mask]
    options["softcap"] = 5.0 if variant.score == "softcap" else 0.0
    random = np.random.default_rng(0)
    made = [
        random.standard_normal((1, s, h, n)) for s, h, n in ((sq, 2, d), (sk, 1, d), (sk, 1, dv))
    ]
    halves = [_halves(x.astype(np.float32), variant.dtype) for x in made]
    like = [SimpleNamespace(shape=x.shape, dtype=variant.dtype) for x in made]
    problem = make_problem("forward", Options.make(**options), *like)
    return problem, [_widened(x, variant.dtype) for x in halves]


def _largest_error(variant: Variant, run: Run) -> float:
    """Of o and lse, in terms of what rounding P and O may do; NaN where a value is."""
    cupy = device.cupy()
    problem, (q, k, v) = problem_of(variant)
    o = np.empty((*q.shape[:3], v.shape[3]), np.float32)
    lse = np.empty((1, 2, q.shape[1]), np.float32)
    reference.forward(problem, q, k, v, o, lse)
    bits = [cupy.asarray(_halves(x, variant.dtype)) for x in (q, k, v, np.full_like(o, np.nan))]
    rows = cupy.asarray(np.full_like(lse, np.nan).view(np.uint32))
    views = [arrays.work_view(x, variant.dtype) for x in bits]
    named: dict[str, arrays.ArrayView | None] = dict(zip("qkvo", views, strict=True))
    named |= {"lse": arrays.work_view(rows, "float32"), "seqlens_q": None, "seqlens_k": None}
    run(problem, named)
    got, got_lse = _widened(cupy.asnumpy(bits[3]), variant.dtype), cupy.asnumpy(rows)
    step = 2.0**-8 if variant.dtype == "bfloat16" else 2.0**-11
    of_o = np.abs(got - o).max() / (4 * step * np.abs(o).max())
    of_lse = np.abs(got_lse.view(np.float32) - lse).max() / 1e-3
    return float(np.maximum(of_o, of_lse))


def _halves(x: Any, dtype: str) -> Any:
    """The bits of float32 numbers, rounded to a 16-bit type; needs no ml_dtypes."""
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    wide = x.view(np.uint32).astype(np.uint64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def _widened(bits: Any, dtype: str) -> Any:
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
