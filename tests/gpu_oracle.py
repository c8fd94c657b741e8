"""What the GPU tests share: inputs, a naive oracle that runs on the card, and hand-made DLPack.

The oracle is one small CUDA kernel written from the formulas, one block per query row and one
loop per sum. In float64 it is the truth; with every step rounded to the inputs' type it is what
unfused 16-bit code computes. It reads arrays through their strides and can do chosen rows only,
so that tensors of billions of elements are checked where they lie. CuPy is imported by the
functions that need it: collecting the tests needs no GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import numpy as np

from cufa2 import compiler, device, plan
from cufa2.kernels import KERNELS, MASKS, SCORES, Tile, Variant
from cufa2.testing import assert_accurate, assert_lse, numpy_dtype

DTYPES = ("float16", "bfloat16")
NAN_BITS = 0xFFFF  # a NaN in float16 and in bfloat16
FORWARD = next(row for row in KERNELS if row.direction == "forward")

# Head dims (D, Dv) that compile to two different sizes, each with the one dtype it is tested in.
UNEQUAL = (
    (64, 32, "float16"),
    (32, 64, "bfloat16"),
    (128, 64, "bfloat16"),
    (96, 128, "float16"),
    (192, 128, "bfloat16"),
    (64, 256, "float16"),
    (256, 192, "bfloat16"),
)

_SOURCE = r"""
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

struct Meta {
  i64 q[4], k[4], v[4];  // element strides of the (batch, row, head, dim) axes
  i64 seqlen_q, seqlen_k, heads, group, dim, dim_v, left, right, top_left, bfloat;
};

__device__ float widen(u16 bits, bool bfloat) {
  if (bfloat) return __uint_as_float((u32)bits << 16);
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}

__device__ u16 narrow(float f, bool bfloat) {
  u16 bits;
  if (bfloat) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  return bits;
}

template <class W> struct Step;
template <> struct Step<double> {
  static __device__ double round(double x, bool) { return x; }
};
template <> struct Step<float> {
  static __device__ float round(float x, bool bfloat) { return widen(narrow(x, bfloat), bfloat); }
};

template <class W> __device__ W block_sum(W x, W* shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  for (int n = blockDim.x / 2; n > 0; n /= 2) {
    if (threadIdx.x < n) shared[threadIdx.x] += shared[threadIdx.x + n];
    __syncthreads();
  }
  const W total = shared[0];
  __syncthreads();
  return total;
}

template <class W> __device__ W larger(W a, W b) { return (b != b || b > a) ? b : a; }

template <class W> __device__ W block_max(W x, W* shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  for (int n = blockDim.x / 2; n > 0; n /= 2) {
    W& mine = shared[threadIdx.x];
    if (threadIdx.x < n) mine = larger(mine, shared[threadIdx.x + n]);
    __syncthreads();
  }
  const W top = shared[0];
  __syncthreads();
  return top;
}

template <class W>
__device__ void attend(const u16* q, const u16* k, const u16* v, double* o, double* lse, W* scores,
                       const int* lens_q, const int* lens_k, const i64* rows, const Meta* meta,
                       double scale, double softcap) {
  __shared__ W shared[128];
  const Meta m = *meta;
  const i64 n = blockIdx.x;
  i64 b = n / (m.heads * m.seqlen_q), h = n / m.seqlen_q % m.heads, i = n % m.seqlen_q;
  if (rows) { b = rows[3 * n]; h = rows[3 * n + 1]; i = rows[3 * n + 2]; }
  // Results: (B, Sq, H, Dv) and (B, H, Sq), or in the order of `rows`.
  o += (rows ? n : (b * m.seqlen_q + i) * m.heads + h) * m.dim_v;
  const i64 lq = lens_q ? lens_q[b] : m.seqlen_q, lk = lens_k ? lens_k[b] : m.seqlen_k;
  const i64 at = i + (m.top_left ? 0 : lk - lq);
  i64 begin = 0, end = lk;
  if (m.left >= 0 && at - m.left > begin) begin = at - m.left;
  if (m.right >= 0 && at + m.right + 1 < end) end = at + m.right + 1;
  if (i >= lq) end = begin;
  q += b * m.q[0] + i * m.q[1] + h * m.q[2];
  k += b * m.k[0] + h / m.group * m.k[2];
  v += b * m.v[0] + h / m.group * m.v[2];
  W* s = scores + n * m.seqlen_k;
  W top = -__int_as_float(0x7f800000);
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) {
    W x = 0;
    for (i64 d = 0; d < m.dim; ++d)
      x += (W)widen(q[d * m.q[3]], m.bfloat) * (W)widen(k[j * m.k[1] + d * m.k[3]], m.bfloat);
    x = Step<W>::round(Step<W>::round(x, m.bfloat) * (W)scale, m.bfloat);
    if (softcap > 0) {
      x = Step<W>::round(tanh(Step<W>::round(x / (W)softcap, m.bfloat)), m.bfloat);
      x = Step<W>::round(x * (W)softcap, m.bfloat);
    }
    s[j] = x;
    top = larger(top, x);
  }
  top = block_max(top, shared);
  const bool empty = top == -__int_as_float(0x7f800000);
  W sum = 0;
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) {
    s[j] = exp(s[j] - top);
    sum += s[j];
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) lse[n] = empty ? (double)top : (double)(top + log(sum));
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x)
    s[j] = Step<W>::round(s[j] / sum, m.bfloat);
  __syncthreads();
  for (i64 d = threadIdx.x; d < m.dim_v; d += blockDim.x) {
    W x = 0;
    if (!empty) {
#pragma unroll 8
      for (i64 j = begin; j < end; ++j)
        x += s[j] * (W)widen(v[j * m.v[1] + d * m.v[3]], m.bfloat);
    }
    o[d] = Step<W>::round(x, m.bfloat);
  }
}

extern "C" __global__ void attend_truth(
    const u16* q, const u16* k, const u16* v, double* o, double* lse, double* scores,
    const int* lens_q, const int* lens_k, const i64* rows, const Meta* meta, double scale,
    double softcap) {
  attend<double>(q, k, v, o, lse, scores, lens_q, lens_k, rows, meta, scale, softcap);
}

extern "C" __global__ void attend_plain(
    const u16* q, const u16* k, const u16* v, double* o, double* lse, float* scores,
    const int* lens_q, const int* lens_k, const i64* rows, const Meta* meta, double scale,
    double softcap) {
  attend<float>(q, k, v, o, lse, scores, lens_q, lens_k, rows, meta, scale, softcap);
}

__device__ u32 mixed(u32 x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}

// Standard normal numbers times `scale`, from the element's number and a seed.
extern "C" __global__ void normal(u16* x, i64 n, i64 seed, double scale, i64 bfloat) {
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n; i += step) {
    const u32 a = mixed((u32)i ^ mixed((u32)(i >> 32) + (u32)seed * 0x9e3779b9u));
    const u32 b = mixed(a + 0x68e31da4u);
    const float u = (a >> 8) * 0x1p-24f + 0x1p-25f, w = (b >> 8) * 0x1p-24f;
    x[i] = narrow((float)scale * sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * w), bfloat);
  }
}

extern "C" __global__ void spin(i64 nanoseconds) {
  i64 start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""


@functools.cache
def _kernel(name: str) -> Any:
    import cupy

    return cupy.RawModule(code=_SOURCE, options=("--std=c++17",)).get_function(name)


def spin(milliseconds: float) -> None:
    """Keep CuPy's current stream busy."""
    _kernel("spin")((1,), (1,), (int(milliseconds * 1e6),))


def empty(shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised CuPy array; 16-bit types are made as bits."""
    import cupy

    return cupy.empty(shape, f"u{numpy_dtype(dtype).itemsize}").view(numpy_dtype(dtype))


def normal(shape: tuple[int, ...], dtype: str, seed: int, scale: float = 1.0) -> Any:
    """A CuPy array of normal numbers in float16 or bfloat16, the same for the same seed."""
    x = empty(shape, dtype)
    if x.size:
        args = (x.data.ptr, x.size, seed, np.float64(scale), int(dtype == "bfloat16"))
        _kernel("normal")((min(4096, -(-x.size // 256)),), (256,), args)
    return x


def bits(x: Any) -> Any:
    """A CuPy array seen as unsigned integers, whatever its dtype."""
    return x.view(f"u{x.itemsize}")


def copy(x: Any) -> Any:
    """A contiguous copy of a CuPy array, moved as bits."""
    return bits(x).copy().view(x.dtype)


def host(x: Any) -> Any:
    """A CuPy array on the host, moved as bits."""
    return bits(x).get().view(x.dtype)


def to_device(x: Any) -> Any:
    """A NumPy array on the GPU, moved as bits."""
    import cupy

    return cupy.asarray(np.ascontiguousarray(x).view(f"u{x.itemsize}")).view(x.dtype)


def fill_nan(*arrays: Any) -> None:
    """Every bit set: a NaN in each floating type."""
    for x in arrays:
        bits(x)[...] = (1 << (8 * x.itemsize)) - 1


def inputs(
    b: int, sq: int, sk: int, h: int, hk: int, d: int, dv: int, dtype: str, seed: int = 0
) -> tuple[Any, Any, Any]:
    """q (B,Sq,H,D), k (B,Sk,Hk,D) and v (B,Sk,Hk,Dv), standard normal."""
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))
    q, k, v = (normal(s, dtype, 3 * seed + n) for n, s in enumerate(shapes))
    return q, k, v


def dense(
    q: Any,
    k: Any,
    v: Any,
    *,
    low: bool = False,
    rows: Any = None,
    causal: bool | str = False,
    window: Any = None,
    softmax_scale: Any = None,
    softcap: float = 0.0,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
) -> tuple[Any, Any]:
    """o and lse from the formulas, as float64 NumPy arrays.

    q, k, v: CuPy arrays (B, S, H, D), any strides. low: round each step to their dtype.
    rows: (n, 3) integers (batch, head, row); o is then (n, Dv) and lse (n,).
    """
    import cupy

    left, right = (-1 if w is None else int(w) for w in window or (None, None))
    if causal:
        right = 0 if right < 0 else min(right, 0)
    (b, sq, h, d), (_, sk, hk, dv) = q.shape, v.shape
    strides = [s // x.itemsize for x in (q, k, v) for s in x.strides]
    top_left, bfloat = int(causal == "top_left"), int(q.dtype.name == "bfloat16")
    meta = [*strides, sq, sk, h, h // max(hk, 1), d, dv, left, right, top_left, bfloat]
    n = b * h * sq if rows is None else len(rows)
    o = cupy.zeros((b, sq, h, dv) if rows is None else (n, dv), np.float64)
    lse = cupy.zeros((b, h, sq) if rows is None else (n,), np.float64)
    if n:
        name, wide = ("attend_plain", np.float32) if low else ("attend_truth", np.float64)
        scale = 1 / math.sqrt(d) if softmax_scale is None else float(softmax_scale)
        args = (
            *(x.data.ptr for x in (q, k, v)),
            o,
            lse,
            cupy.empty((n, max(sk, 1)), wide),
            *(0 if x is None else x.data.ptr for x in (seqlens_q, seqlens_k)),
            0 if rows is None else cupy.asarray(np.ascontiguousarray(rows, np.int64)),
            cupy.asarray(np.array(meta, np.int64)),
            np.float64(scale),
            np.float64(softcap),
        )
        _kernel(name)((n,), (128,), args)
    return o.get(), lse.get()


def check(
    o: Any, lse: Any, q: Any, k: Any, v: Any, name: str, rows: Any = None, **options: Any
) -> None:
    """Raise AssertionError unless (o, lse) keep the accuracy rule of the contract.

    o, q, k, v: CuPy arrays (B, S, H, D); lse (B, H, Sq) float32. With rows only those are checked.
    Rows without a visible key must be exact zeros.
    """
    exact, exact_lse = dense(q, k, v, rows=rows, **options)
    plain, _ = dense(q, k, v, rows=rows, low=True, **options)
    if rows is not None:
        import cupy  # gathered slice by slice: an index array may not reach beyond 2^31 elements

        dtype = o.dtype
        o = cupy.stack([bits(o)[b, i, h] for b, h, i in rows]).view(dtype)
        lse = cupy.stack([lse[b, h, i] for b, h, i in rows])
    o, lse = host(o), host(lse)
    assert lse.dtype == np.float32, f"{name}: lse is {lse.dtype}"
    assert_accurate(o, exact, plain, f"{name}: o")
    assert_lse(lse, exact_lse, o.dtype.name, f"{name}: lse")
    dark = exact_lse == -np.inf
    if rows is None:
        dark = dark.transpose(0, 2, 1)
    loose = int(np.count_nonzero(o.view(np.uint16)[dark]))
    assert loose == 0, f"{name}: {loose} values of rows without a visible key are not +0"


def assert_same(x: Any, y: Any, name: str) -> None:
    """Raise AssertionError unless two CuPy arrays hold the same bits."""
    assert x.shape == y.shape, f"{name}: shapes {x.shape} and {y.shape} differ"
    assert x.dtype == y.dtype, f"{name}: dtypes {x.dtype} and {y.dtype} differ"
    a, b = bits(x).get(), bits(y).get()
    wrong = np.argwhere(a != b)
    assert not len(wrong), f"{name}: {len(wrong)} of {a.size} values differ, first {wrong[0]}"


def lengths(*values: int) -> Any:
    """Sequence lengths on the GPU."""
    import cupy

    return cupy.asarray(np.array(values, np.int32))


def foreign_tiles() -> list[tuple[Tile, int]]:
    """(tile, head dim) pairs that some architecture uses and this card does not."""
    here = {(v.tile, v.head_dim, v.score) for v in plan.variants(device.info(0))}
    found: dict[tuple[Tile, int], None] = {}
    for arch in device.ARCHS:
        for v in plan.variants(device.info_for_arch(arch)):
            if v.kernel is FORWARD and (v.tile, v.head_dim, v.score) not in here:
                found.setdefault((v.tile, v.head_dim))
    return list(found)


def variants_in_use() -> Iterator[Variant]:
    """The kernels that the tests run most, so that they can be compiled side by side first."""
    info = device.info(0)
    yield from (v for v in plan.variants(info) if v.kernel is FORWARD)
    for d, dv, dtype in UNEQUAL:
        head = SimpleNamespace(shape=(1, 1, 1, d), dtype=dtype)
        head_v = SimpleNamespace(shape=(1, 1, 1, dv), dtype=dtype)
        problem = plan_problem(head, head_v)
        base = plan.choose(problem, info).variant
        for mask, score in itertools.product(MASKS, SCORES):
            yield Variant(base.kernel, base.tile, dtype, d, dv, mask, score)
    for tile, d in foreign_tiles():
        for n, mask in enumerate(MASKS):
            for m, dtype in enumerate(DTYPES):
                score = tuple(SCORES)[(n + m) % len(SCORES)]
                yield Variant(FORWARD, tile, dtype, d, d, mask, score)


def plan_problem(q: Any, v: Any) -> Any:
    """A plain forward Problem for the head dims and dtype of q and v."""
    from cufa2.problem import Options, make_problem

    return make_problem("forward", Options(), q, q, v)


def compile_side_by_side() -> None:
    """Fill the kernel cache with `variants_in_use`, on all cores: NVRTC is slow in one process."""
    tiles = FORWARD.tiles
    keys = [
        (tiles.index(v.tile), v.dtype, v.head_dim, v.head_dim_v, v.mask, v.score)
        for v in variants_in_use()
    ]
    arch, driver = device.info(0).arch, device.driver_cuda()
    workers = min(len(keys), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_compile, key, arch, driver) for key in keys]
        for job in jobs:
            job.result()


def _compile(key: tuple[Any, ...], arch: str, driver: Any) -> None:
    tile, *rest = key
    compiler.build(Variant(FORWARD, FORWARD.tiles[tile], *rest), arch, driver=driver)
