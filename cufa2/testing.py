"""What tests/ and scripts/ share: benchmark CASES, inputs, the accuracy rule, back ends, timers.

The accuracy rule compares with both implementations of `dense`:

    max|ours - ref| <= 2 * max|plain - ref| + atol

Arrays are q, do (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv), lse (B,H,Sq), as NumPy arrays of
float16, bfloat16 (ml_dtypes), float32 or float64.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import device
from .attention import FlashAttention2
from .problem import Direction

Array = NDArray[Any]
BACKENDS = ("numpy", "emulated", "cuda")
Calls = Sequence[Sequence[Any]]  # argument lists, used in turn

# Spacing of numbers just above 1, half of it is the error of one rounding; smallest normal number.
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
TINY = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
# Largest error of lse, relative to max(1, |lse|). Scores of 16-bit inputs accumulate in float32.
LSE_TOLERANCE = {"float16": 1e-5, "bfloat16": 1e-5, "float32": 5e-6, "float64": 1e-14}


@dataclass(frozen=True)
class Case:
    """A named shape with its options and where it comes from."""

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool | str = False
    window: tuple[int, int] | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    source: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `cufa2.flash_attention` for this case."""
        return {
            "causal": self.causal,
            "window": self.window,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
        }

    def flops(self, direction: Direction) -> float:
        """Operations of the matrix products, as attention papers count them.

        Forward 2 * B * H * Sq * Sk * (D + Dv), which is 4 * B * H * S * S * D for equal dims;
        backward 2 * B * H * Sq * Sk * (3 D + 2 Dv), 2.5 times as many. Half of it if causal.
        """
        d, dv = self.head_dim, self.head_dim_v
        dims = d + dv if direction == "forward" else 3 * d + 2 * dv
        full = 2.0 * self.batch * self.num_heads * self.seqlen_q * self.seqlen_k * dims
        return full / 2 if self.causal else full

    def forward_bytes(self, itemsize: int) -> int:
        """Bytes of q, k, v and o: what a forward pass moves at least."""
        queries = self.batch * self.seqlen_q * self.num_heads
        keys = self.batch * self.seqlen_k * self.num_heads_kv
        return (queries + keys) * (self.head_dim + self.head_dim_v) * itemsize


MODES = (False, True)


def _benchmark_cases() -> Iterator[Case]:
    source = "FlashAttention benchmarks: B * S = 16384 tokens, H * D = 2048"
    for d, causal, s in itertools.product((64, 128, 256), MODES, (1024, 4096, 16384)):
        name = f"d{d}_s{s // 1024}k{'_causal' if causal else ''}"
        h = 2048 // d
        yield Case(name, 16384 // s, s, s, h, h, d, d, causal=causal, source=source)


def _shapes_of_use() -> Iterator[tuple[str, Case]]:
    """(set, case): what models run, beside the shapes that benchmarks compare."""
    source = "long prompts of a language model, 8 query heads a key head"
    for s in (2048, 4096, 8192, 16384, 32768):
        name = f"llm_s{s // 1024}k"
        yield "llm", Case(name, 1, s, s, 64, 8, 128, 128, causal=True, source=source)
    source = "head dims between those of the benchmarks"
    for (d, dv), causal in itertools.product(((72, 72), (80, 80), (96, 96), (192, 128)), MODES):
        name = f"dims_{d}_{dv}{'_causal' if causal else ''}"
        yield "dims", Case(name, 4, 4096, 4096, 16, 16, d, dv, causal=causal, source=source)
    source = "decoding: one query a head against a cache of keys"
    for b, s, h, hk in ((64, 8192, 32, 8), (1, 131072, 32, 8), (16, 32768, 8, 1)):
        yield "decode", Case(f"decode_b{b}_s{s // 1024}k", b, 1, s, h, hk, 128, 128, source=source)


CASES = tuple(_benchmark_cases())
# Benchmarks by the set that they belong to.
SETS = {"targets": CASES} | {
    name: tuple(case for of, case in _shapes_of_use() if of == name)
    for name in ("llm", "dims", "decode")
}


class Inputs(NamedTuple):
    """q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv) and an output gradient do (B,Sq,H,Dv)."""

    q: Array
    k: Array
    v: Array
    do: Array


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401  (registers the name with NumPy)
    return np.dtype(name)


def make_inputs(case: Case | Sequence[int], dtype: str = "float32", seed: int = 0) -> Inputs:
    """Draw standard normal inputs, rounded to dtype; case may be (B, Sq, Sk, H, Hk, D, Dv)."""
    if isinstance(case, Case):
        b, sq, sk = case.batch, case.seqlen_q, case.seqlen_k
        h, hk, d, dv = case.num_heads, case.num_heads_kv, case.head_dim, case.head_dim_v
    else:
        b, sq, sk, h, hk, d, dv = case
    rng, draw = np.random.default_rng(seed), np.float64 if dtype == "float64" else np.float32
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv), (b, sq, h, dv))
    return Inputs(*(rng.standard_normal(s, draw).astype(numpy_dtype(dtype)) for s in shapes))


def to_numpy(x: Any) -> Array:
    """Copy a CuPy array to the host, as bits; anything else goes through np.asarray."""
    return np.asarray(bits(x).get().view(x.dtype) if hasattr(x, "get") else x)


def to_cupy(x: Array) -> Any:
    """A contiguous copy of a host array on the GPU, as bits: CuPy may not know bfloat16."""
    return device.cupy().asarray(bits(np.ascontiguousarray(x))).view(x.dtype)


def bits(x: Any) -> Any:
    """A NumPy or CuPy array seen as unsigned integers."""
    return x.view(f"u{x.itemsize}")


@dataclass(frozen=True)
class Backend:
    """Where the calls of a test run.

    to, back: a host array as one that is served there, and the way back. op: the launcher class
    there. of: calls within `of("sm_80")` are served there; an emulated card is then of this
    architecture, a real one stays what it is.
    """

    name: str
    to: Callable[[Array], Any]
    back: Callable[[Any], Array]
    op: Callable[..., FlashAttention2]
    of: Callable[[str], AbstractContextManager[None]]


def backend(name: str) -> Backend:
    """The back end "numpy", "cuda", or "emulated": the CUDA kernels, run by the CPU.

    RuntimeError: there is no GPU, or no emulator: it is in the tests/ of a checkout, which has to
    be on the module path.
    """

    def as_it_is(arch: str) -> AbstractContextManager[None]:
        return nullcontext()

    if name == "numpy":
        return Backend(name, np.asarray, np.asarray, FlashAttention2, as_it_is)
    if name == "cuda":
        device.cupy()
        return Backend(name, to_cupy, to_numpy, FlashAttention2, as_it_is)
    if name != "emulated":
        raise ValueError(f"backend={name!r} is not one of {BACKENDS}")
    try:
        card = importlib.import_module("emulator.card")
    except ModuleNotFoundError as e:
        raise RuntimeError("the emulated card is in tests/ of a checkout") from e
    return Backend(name, card.to_card, to_numpy, card.op, card.of)


def gradient_noise(do: Array, q: Array, k: Array, v: Array, scale: float | None = None) -> float:
    """Noise of dq and dk in the accumulation type where dP - delta cancels to 0, as in a row that
    sees one key: 2 eps |scale| max|do row| max|v row| / sqrt(Dv) max(|q|, |k|)."""
    eps = EPS["float64" if q.dtype == np.float64 else "float32"]
    rows = [np.linalg.norm(x.astype(np.float64), axis=-1).max(initial=0) for x in (do, v)]
    top = max(np.abs(x.astype(np.float64)).max(initial=0) for x in (q, k))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    return float(2 * eps * scale * rows[0] * rows[1] / math.sqrt(v.shape[-1]) * top)


def assert_accurate(
    ours: Any, ref64: Array, plain: Any, name: str, noise: float = 0.0
) -> tuple[float, float]:
    """Raise AssertionError unless max|ours - ref64| <= 2 * max|plain - ref64| + atol.

    atol is 2 rounding units (eps / 2) of ours' dtype at the largest magnitude in ref64, 16 for
    float32 and float64 (the order of summation shows), at least at the smallest normal number;
    plus `noise` (see `gradient_noise`; for gradients that vanish). NaN and infinities must stand
    where ref64 has them; a plain that is not finite allows nothing. Returns (error, bound).
    """
    ours, plain = to_numpy(ours), to_numpy(plain)
    if not ours.shape == ref64.shape == plain.shape:
        raise AssertionError(f"{name}: shapes {ours.shape}, {ref64.shape}, {plain.shape} differ")
    finite = np.isfinite(ref64)
    np.testing.assert_array_equal(
        ours[~finite].astype(ref64.dtype), ref64[~finite], f"{name}: non-finite values differ"
    )
    x, p, ref = (y[finite].astype(ref64.dtype) for y in (ours, plain, ref64))
    units, least = 2 if ours.dtype.itemsize == 2 else 16, TINY[ours.dtype.name]
    atol = units / 2 * EPS[ours.dtype.name] * float(np.abs(ref).max(initial=least)) + noise
    error = float(np.abs(x - ref).max(initial=0))
    bound = 2 * float(np.abs(p - ref)[np.isfinite(p)].max(initial=0)) + atol
    if not error <= bound:  # NaN included
        raise AssertionError(
            f"{name}: largest error {error:.3e} is above {bound:.3e}"
            f" = 2 * {(bound - atol) / 2:.3e} (plain {ours.dtype.name}) + {atol:.3e}"
        )
    return error, bound


def assert_lse(ours: Any, ref64: Array, dtype: str, name: str = "lse") -> None:
    """Raise AssertionError unless lse of inputs in `dtype` is as accurate as LSE_TOLERANCE.

    -inf must stand exactly where ref64 has it. A row that sees NaN or a logit of +inf has no
    meaningful lse: NaN and +inf are both taken there, and nowhere else.
    """
    x = to_numpy(ours).astype(ref64.dtype)
    np.testing.assert_array_equal(x == -np.inf, ref64 == -np.inf, f"{name}: -inf pattern differs")
    bad, ours_bad = (np.isnan(y) | (y == np.inf) for y in (ref64, x))
    np.testing.assert_array_equal(ours_bad, bad, f"{name}: NaN or +inf pattern differs")
    finite = np.isfinite(ref64)
    error = np.abs(x[finite] - ref64[finite]) / np.maximum(1, np.abs(ref64[finite]))
    if error.max(initial=0) > LSE_TOLERANCE[dtype]:
        raise AssertionError(
            f"{name}: relative error {error.max():.3e} is above {LSE_TOLERANCE[dtype]:.0e}"
        )


def poison(*arrays: Any) -> None:
    """Fill outputs (NumPy or CuPy) with NaN, so that anything left unwritten shows."""
    for x in arrays:
        x.fill(float("nan"))


def time_gpu(
    fn: Callable[..., object], inputs: Calls = ((),), *, warmup: int = 5, repeats: int = 30
) -> float:
    """Median time in milliseconds of fn(*inputs[i % len(inputs)]) on CuPy's current stream.

    Each call lies between two CUDA events and nothing waits in between, so launches queue up
    and host time hides behind the GPU's. Several input sets keep the L2 cache cold.
    """
    import cupy

    events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(repeats)]
    for i in range(warmup):
        fn(*inputs[i % len(inputs)])
    cupy.cuda.get_current_stream().synchronize()
    for i, (start, stop) in enumerate(events):
        start.record()
        fn(*inputs[i % len(inputs)])
        stop.record()
    events[-1][1].synchronize()
    return float(np.median([cupy.cuda.get_elapsed_time(a, b) for a, b in events]))
