"""What is asked for: options, one legal problem, every validation rule and the error types.

A `Problem` that exists is legal: later rooms never raise ValueError. Nothing here touches memory,
a GPU or an array library; arrays are seen only as objects with `.shape` and `.dtype` (a name).
The meaning of each field is the formula in `cufa2.flash_attention`'s docstring.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DTYPES = tuple(ITEMSIZES)
LAYOUTS = ("bshd", "bhsd")
PRECISIONS = ("tf32",)  # besides None, the accuracy of the dtype

_LARGEST = 1e30  # of softmax_scale and softcap: products with float32 scores stay meaningful

Align = Literal["bottom_right", "top_left"]
Direction = Literal["forward", "backward"]
Shape = tuple[int, ...]


class UnsupportedError(NotImplementedError):
    """A legal call that no kernel here can do; the message lists each kernel and its reason."""


class CompileError(RuntimeError):
    """NVRTC failed, is missing, or does not fit the driver; the message holds its log."""


class Typed(Protocol):
    """All that validation looks at in an array: its shape and the name of its dtype."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Options:
    """Options of a call that do not depend on the arrays; hashable, so launchers are cached by it.

    window_left / window_right: None is unbounded; causal is folded into window_right = 0.
    precision: "tf32" is for float32 arrays only, which `make_problem` checks.
    """

    align: Align = "bottom_right"
    window_left: int | None = None
    window_right: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    layout: str = "bshd"
    precision: str | None = None
    deterministic: bool = False

    @staticmethod
    def make(
        *,
        causal: Any = False,
        window: Any = None,
        softmax_scale: Any = None,
        softcap: Any = 0.0,
        layout: Any = "bshd",
        precision: Any = None,
        deterministic: Any = False,
    ) -> Options:
        """Validate and normalise; NumPy scalars and 0-d arrays count as numbers."""
        align, right = _causal(causal)
        left, window_right = _window(window)
        bounds = [r for r in (right, window_right) if r is not None]
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} is not one of {LAYOUTS}")
        if precision is not None and (
            not isinstance(precision, str) or precision not in PRECISIONS
        ):
            raise ValueError(f"precision={precision!r} is not one of {(None, *PRECISIONS)}")
        scale = None if softmax_scale is None else _number("softmax_scale", softmax_scale)
        cap = _number("softcap", softcap)
        if cap and not 1 / _LARGEST <= cap <= _LARGEST:
            raise ValueError(
                f"softcap={cap} is not within {1 / _LARGEST:g}..{_LARGEST:g}; 0 turns it off"
            )
        if scale is not None and abs(scale) > _LARGEST:
            raise ValueError(f"softmax_scale={scale} is beyond {_LARGEST:g} in magnitude")
        return Options(
            align=align,
            window_left=left,
            window_right=min(bounds) if bounds else None,
            softmax_scale=scale,
            softcap=cap,
            layout=layout,
            precision=precision,
            deterministic=bool(deterministic),
        )


@dataclass(frozen=True)
class Problem:
    """One attention problem: sizes, dtype and options, no pointers, no strides.

    Symbols as in the formula: B batch, Sq/Sk lengths, H/Hk heads, D/Dv head dims. Windows are
    clamped to the sequence lengths, which changes no mask and keeps them small integers.
    precision: "tf32" lets the operands of float32 products be rounded to TF32; None does not.
    """

    direction: Direction
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    softcap: float = 0.0
    align: Align = "bottom_right"
    window_left: int | None = None
    window_right: int | None = None
    has_seqlens_q: bool = False
    has_seqlens_k: bool = False
    precision: str | None = None
    deterministic: bool = False
    tensor_maps: bool = True  # q, k, v and o lie as tensor maps can describe (device.mappable)

    @property
    def group(self) -> int:
        """Query heads per key head (H // Hk)."""
        return self.num_heads // max(self.num_heads_kv, 1)

    def shift(self, seqlen_q: int, seqlen_k: int) -> int:
        """Offset of the diagonal: query i sits at key i + shift."""
        return seqlen_k - seqlen_q if self.align == "bottom_right" else 0


def make_problem(
    direction: Direction,
    options: Options,
    q: Typed,
    k: Typed,
    v: Typed,
    seqlens_q: Typed | None = None,
    seqlens_k: Typed | None = None,
) -> Problem:
    """Check q, k, v (canonical (B, S, H, D) views) against each other and build the Problem."""
    _check_dtypes(q, k, v)
    if options.precision is not None and q.dtype != "float32":
        raise ValueError(
            f"precision={options.precision!r} is for float32 arrays; q, k and v are {q.dtype}"
        )
    (b, sq, h, d), (bk, sk, hk, dk), (bv, sv, hv, dv) = q.shape, k.shape, v.shape
    if not b == bk == bv:
        raise ValueError(f"batch sizes differ: q has {b}, k has {bk}, v has {bv}")
    if sk != sv:
        raise ValueError(f"k has {sk} rows and v has {sv}; keys and values pair up one to one")
    if hk != hv:
        raise ValueError(f"k has {hk} heads and v has {hv}; they must be equal")
    if d != dk:
        raise ValueError(f"head dim of q is {d} and of k is {dk}; they must be equal")
    if (hk == 0) != (h == 0) or (hk and h % hk):
        raise ValueError(f"num_heads={h} is not a multiple of num_heads_kv={hk}")
    if d < 1 or dv < 1:
        raise ValueError(f"head dims must be at least 1, got D={d} and Dv={dv}")
    for name, lens in (("seqlens_q", seqlens_q), ("seqlens_k", seqlens_k)):
        if lens is not None:
            _check_seqlens(name, lens, b)
    longest = max(sq, sk)
    scale = 1.0 / math.sqrt(d) if options.softmax_scale is None else options.softmax_scale
    return Problem(
        direction=direction,
        dtype=q.dtype,
        batch=b,
        seqlen_q=sq,
        seqlen_k=sk,
        num_heads=h,
        num_heads_kv=hk,
        head_dim=d,
        head_dim_v=dv,
        softmax_scale=scale,
        softcap=options.softcap,
        align=options.align,
        window_left=_clamp(options.window_left, longest),
        window_right=_clamp(options.window_right, longest),
        has_seqlens_q=seqlens_q is not None,
        has_seqlens_k=seqlens_k is not None,
        precision=options.precision,
        deterministic=options.deterministic,
    )


def check_ranks(layout: str, *qkv: Typed | None) -> None:
    """Raise unless q, k and v all have four axes or all have three."""
    shapes = [x.shape for x in qkv if x is not None]
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) != len(shapes[0]) or len(shape) not in (3, 4):
            raise ValueError(
                f"{name} has shape {shape}; q, k and v must all be 4-D "
                f"({layout}) or all be 3-D (batch*heads, seqlen, head_dim)"
            )


def check_array(name: str, array: Typed, shape: Shape, dtype: str) -> None:
    """Raise unless `array` has exactly this shape and dtype (do, o, lse, out=, lse_out=, dlse)."""
    if array.dtype != dtype:
        raise TypeError(f"{name} is {array.dtype}; it must be {dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")


def check_lengths(name: str, lengths: Any, longest: int) -> None:
    """Raise unless all host-readable lengths lie in [0, longest] (device lengths are clamped)."""
    for i, n in enumerate(lengths):
        if not 0 <= n <= longest:
            raise ValueError(f"{name}[{i}]={n} is outside 0..{longest}")


def dtype_name(dtype: Any) -> str:
    """'float16' for any spelling: a name, a NumPy, ml_dtypes or JAX type, a torch dtype."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def lse_type(problem: Problem, rank: int) -> tuple[Shape, str]:
    """Shape and dtype of the log-sum-exp: (B, H, Sq), or (B*H, Sq) for flat arrays (rank 3);
    float32, or float64 for float64 inputs."""
    heads = () if rank == 3 else (problem.num_heads,)
    dtype = "float64" if problem.dtype == "float64" else "float32"
    return (problem.batch, *heads, problem.seqlen_q), dtype


def _check_dtypes(q: Typed, k: Typed, v: Typed) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype, got q={q.dtype}, k={k.dtype}, v={v.dtype}"
        )
    if q.dtype not in DTYPES:
        raise TypeError(f"dtype {q.dtype} is not supported; use one of {', '.join(DTYPES)}")


def _check_seqlens(name: str, lens: Typed, batch: int) -> None:
    if lens.dtype != "int32":
        raise TypeError(f"{name} is {lens.dtype}; it must be int32")
    if lens.shape != (batch,):
        raise ValueError(f"{name} has shape {lens.shape}; it must be (B,) = ({batch},)")


def _clamp(bound: int | None, longest: int) -> int | None:
    return None if bound is None else min(bound, longest)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name}={value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:  # an int beyond all floats
        number = math.inf
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name}={value!r} is not a number") from e
    if not math.isfinite(number):
        raise ValueError(f"{name}={number} is not finite")
    return number


def _causal(causal: Any) -> tuple[Align, int | None]:
    if isinstance(causal, str):
        if causal == "bottom_right":
            return "bottom_right", 0
        if causal == "top_left":
            return "top_left", 0
    elif getattr(causal, "shape", ()) == () and causal in (False, True):
        return "bottom_right", 0 if causal else None
    raise ValueError(f"causal={causal!r} is not one of False, True, 'bottom_right', 'top_left'")


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    rule = "window must be None or a pair (left, right) of integers >= 0, -1 or None for unbounded"
    try:
        left, right = window
    except (TypeError, ValueError) as e:
        raise ValueError(f"window={window!r}: {rule}") from e
    bounds: list[int | None] = []
    for side in (left, right):
        try:
            bound = -1 if side is None else operator.index(side)
        except TypeError as e:
            raise TypeError(f"window={window!r}: {rule}") from e
        if bound < -1:
            raise ValueError(f"window={window!r}: {rule}")
        bounds.append(None if bound == -1 else bound)
    return bounds[0], bounds[1]
