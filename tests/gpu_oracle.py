"""What the GPU tests share: inputs, a naive oracle that runs on the card, and hand-made DLPack.

The oracle is a few small CUDA kernels written from the formulas, one block per query row or key
and one loop per sum. In float64 (for float64 inputs in pairs of them, about 106 bits) it is the
truth; with every step rounded to the inputs' type it is what unfused code computes. It reads
arrays through their strides, and the forward can do chosen rows only, so that tensors of billions
of elements are checked where they lie. CuPy is imported by the functions that need it: collecting
the tests needs no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from cufa2 import (
    attention,
    compiler,
    device,
    flash_attention,
    flash_attention_backward,
    plan,
    testing,
)
from cufa2.kernels import KERNELS, MASKS, SCORES, Kernel, Variant
from cufa2.testing import EPS, assert_accurate, assert_lse, gradient_noise, numpy_dtype
from cufa2.tiles import Tile

bits, host = testing.bits, testing.to_numpy
DTYPES = ("float16", "bfloat16")
# Ways of computing that are no dtype of their own: the dtype and the options that ask for them.
FAST: dict[str, tuple[str, dict[str, Any]]] = {"tf32": ("float32", {"precision": "tf32"})}
MODES = (False, True)  # of the backward pass: deterministic or not
NAN_BITS = 0xFFFF  # a NaN in float16 and in bfloat16
FORWARD = next(row for row in KERNELS if row.name == "fwd_sm80")  # the one of every card

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

# For the backward pass each also in one of its two ways only: deterministic or not.
UNEQUAL_BACKWARD = (
    (64, 32, "float16", False),
    (192, 128, "bfloat16", True),
    (64, 256, "float16", True),
    (128, 96, "bfloat16", False),
    (96, 256, "bfloat16", False),
    (192, 128, "float32", False),
    (64, 256, "float64", True),
)
# One for each mask policy.
MASK_OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (37, None)},
    "local": {"window": (50, 21)},
}

_cards: list[Any] = []  # the array module that stands for CuPy, if another does


def card() -> Any:
    """CuPy, or what the emulated card has in its place."""
    return _cards[-1] if _cards else device.cupy()


def sizes(on_gpu: Any, emulated: Any) -> Any:
    """The former on a real card."""
    return emulated if _cards else on_gpu


@contextmanager
def using(module: Any) -> Iterator[None]:
    """Have another array module stand for CuPy."""
    _cards.append(module)
    try:
        yield
    finally:
        _cards.pop()


@contextmanager
def preferring(name: str) -> Iterator[list[bool]]:
    """Have a row of the table serve every problem that it can; gives whether it took each."""
    row, choose = next(row for row in KERNELS if row.name == name), plan.choose
    asked: list[bool] = []

    def chosen(problem: Any, info: Any, kernel: Any = None) -> Any:
        asked.append(plan.refusal(row, problem, info) is None)
        return choose(problem, info, name if asked[-1] and kernel is None else kernel)

    with mock.patch.object(plan, "choose", chosen):
        yield asked


# Compiled with ELEMENT, the type of the inputs; WIDE, the type in which everything is computed;
# LOW, 1 to round every step to ELEMENT; and TF32, 1 to round the operands of products to TF32.
_SOURCE = r"""
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

// Conversions in integers, so that they depend on no compiler's.
__device__ float widen(f16 x) {
  const u32 sign = (u32)(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // The smallest through an integer: as float32 they would be denormal, which may count as 0.
  const float size = rest < 0x400u ? rest * 0x1p-24f : __uint_as_float(rest << 13) * 0x1p112f;
  return __uint_as_float(sign | __float_as_uint(size));
}
__device__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ float widen(float x) { return x; }
__device__ double widen(double x) { return x; }

__device__ void narrow(float f, f16& x) {
  const u32 sign = __float_as_uint(f) >> 16 & 0x8000u, size = __float_as_uint(f) & 0x7fffffffu;
  u32 rest;
  if (size > 0x7f800000u) {
    x.bits = 0x7fffu;
    return;
  }
  if (size < 0x38800000u) {  // below 2^-14: to multiples of 2^-24
    rest = __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u;
  } else if (size < 0x47800000u) {
    rest = (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13;
  } else {
    rest = 0x7c00u;
  }
  x.bits = (u16)(sign | rest);
}
__device__ void narrow(float f, bf16& x) {
  const u32 size = __float_as_uint(f);
  x.bits = f != f ? 0x7fffu : (u16)((size + 0x7fffu + (size >> 16 & 1u)) >> 16);
}
__device__ void narrow(float f, float& x) { x = f; }
__device__ void narrow(double f, double& x) { x = f; }

// The unevaluated sum of two doubles, of about 106 bits: what float64 is measured against. An
// infinity or a NaN is in hi, with lo = 0. The intrinsics keep the compiler from fusing what must
// be rounded.
struct Two {
  double hi, lo;
  Two() = default;
  __device__ Two(double x) : hi(x), lo(0) {}
  __device__ Two(double x, double y) : hi(x), lo(y) {}
};
__device__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ double times(double a, double b) { return __dmul_rn(a, b); }
__device__ Two joined(double hi, double lo) {  // |hi| >= |lo|
  if (!isfinite(hi)) return Two(hi);
  const double sum = add(hi, lo);
  return Two(sum, add(lo, -add(sum, -hi)));
}
__device__ Two exact_sum(double a, double b) {
  const double sum = add(a, b), part = add(sum, -a);
  if (!isfinite(sum)) return Two(sum);
  return Two(sum, add(add(a, -add(sum, -part)), add(b, -part)));
}
__device__ Two operator-(Two a) { return Two(-a.hi, -a.lo); }
__device__ Two operator+(Two a, Two b) {
  const Two high = exact_sum(a.hi, b.hi), low = exact_sum(a.lo, b.lo);
  const Two sum = joined(high.hi, add(high.lo, low.hi));
  return joined(sum.hi, add(sum.lo, low.lo));
}
__device__ Two operator-(Two a, Two b) { return a + -b; }
__device__ Two operator*(Two a, Two b) {
  const double product = times(a.hi, b.hi);
  if (!isfinite(product)) return Two(product);
  const double cross = add(times(a.hi, b.lo), times(a.lo, b.hi));
  return joined(product, add(fma(a.hi, b.hi, -product), cross));
}
__device__ Two operator/(Two a, Two b) {
  const double first = a.hi / b.hi;
  if (!isfinite(first) || !isfinite(b.hi)) return Two(first);
  const Two rest = a - b * Two(first);
  const double second = rest.hi / b.hi, third = (rest - b * Two(second)).hi / b.hi;
  return joined(first, second) + Two(third);
}
__device__ Two& operator+=(Two& a, Two b) { return a = a + b; }
__device__ bool operator==(Two a, Two b) { return a.hi == b.hi && a.lo == b.lo; }
__device__ bool operator!=(Two a, Two b) { return !(a == b); }
__device__ bool operator>(Two a, Two b) { return a.hi > b.hi || (a.hi == b.hi && a.lo > b.lo); }

__device__ Two exp(Two x) {
  if (!(x.hi <= 709.0)) return Two(exp(x.hi));
  if (x.hi < -745.2) return Two(0);
  const double n = rint(x.hi * 1.4426950408889634);
  const Two log_2(0.6931471805599453, 2.3190468138462996e-17);
  const Two small = (x - log_2 * Two(n)) * Two(0x1p-8);
  Two less_one(0);  // exp(small) - 1 by its series, then squared up
  for (int i = 11; i > 0; --i) less_one = small * (Two(1) + less_one) / Two(i);
  for (int i = 0; i < 8; ++i) less_one = less_one * (less_one + Two(2));
  const Two whole = less_one + Two(1);
  return Two(ldexp(whole.hi, (int)n), ldexp(whole.lo, (int)n));
}
__device__ Two log(Two x) {
  const double y = log(x.hi);
  return isfinite(y) ? Two(y) + (x * exp(Two(-y)) - Two(1)) : Two(y);  // one step of Newton
}
__device__ Two tanh(Two x) {
  if (!(fabs(x.hi) <= 40.0)) return Two(tanh(x.hi));
  if (fabs(x.hi) < 1e-3) {
    const Two y = x * x;
    const Two series = Two(-17) / Two(315) + y * (Two(62) / Two(2835));
    return x + x * y * (Two(-1) / Two(3) + y * (Two(2) / Two(15) + y * series));
  }
  const Two e = exp(x + x);
  return (e - Two(1)) / (e + Two(1));
}

typedef ELEMENT E;
typedef WIDE W;

__device__ double as_double(float x) { return x; }
__device__ double as_double(double x) { return x; }
__device__ double as_double(Two x) { return x.hi; }

// An operand of a product. TF32 keeps 11 significant bits.
template <int TF32_, class Wide> struct Cut {
  static __device__ Wide round(Wide x) { return x; }
};
template <class Wide> struct Cut<1, Wide> {
  static __device__ Wide round(Wide x) {
    return isfinite(x) ? __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u) : x;
  }
};
__device__ W operand(W x) { return Cut<TF32, W>::round(x); }

__device__ W load(const E* x) { return operand((W)widen(*x)); }

template <int LOW_, class Wide> struct Step {
  static __device__ Wide round(Wide x) { return x; }
};
template <class Wide> struct Step<1, Wide> {
  static __device__ Wide round(Wide x) {
    E y;
    narrow(x, y);
    return widen(y);
  }
};
__device__ W rounded(W x) { return Step<LOW, W>::round(x); }

struct Meta {
  i64 q[4], k[4], v[4], g[4];  // element strides of the (batch, row, head, dim) axes; g is dO
  i64 seqlen_q, seqlen_k, heads, group, dim, dim_v, left, right, top_left;
};

// Keys [begin, end) are those that row i sees; rows [begin, end) those that see key i.
struct Range { i64 begin, end; };

__device__ Range seen(i64 at, i64 before, i64 behind, i64 length) {
  Range range = {0, length};
  if (before >= 0 && at - before > 0) range.begin = at - before;
  if (behind >= 0 && at + behind + 1 < length) range.end = at + behind + 1;
  return range;
}

// Lengths of one batch entry; query i sits at key i + shift.
struct Lengths {
  i64 q, k, shift;
  __device__ Lengths(const Meta& m, const int* lens_q, const int* lens_k, i64 b)
      : q(lens_q ? lens_q[b] : m.seqlen_q), k(lens_k ? lens_k[b] : m.seqlen_k),
        shift(m.top_left ? 0 : k - q) {}
  __device__ Range keys(const Meta& m, i64 i) const {
    Range range = seen(i + shift, m.left, m.right, k);
    if (i >= q) range.end = range.begin;
    return range;
  }
  __device__ Range rows(const Meta& m, i64 j) const {
    Range range = seen(j - shift, m.right, m.left, q);
    if (j >= k) range.end = range.begin;
    return range;
  }
};

__device__ W block_sum(W x, W* shared) {
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

__device__ W larger(W a, W b) { return (b != b || b > a) ? b : a; }

__device__ W block_max(W x, W* shared) {
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

__device__ W minus_inf() { return (W)(-__int_as_float(0x7f800000)); }

__device__ W dot(const E* x, i64 x_stride, const E* y, i64 y_stride, i64 n) {
  W sum = 0;
  for (i64 d = 0; d < n; ++d) sum += load(x + d * x_stride) * load(y + d * y_stride);
  return sum;
}

// The same where x is not an operand of a product.
__device__ W dot_as_is(const E* x, i64 x_stride, const E* y, i64 y_stride, i64 n) {
  W sum = 0;
  for (i64 d = 0; d < n; ++d) sum += (W)widen(x[d * x_stride]) * load(y + d * y_stride);
  return sum;
}

// The logit of a product q.k, and in `slope` the derivative of the softcap there.
__device__ W logit(W product, W scale, W softcap, W& slope) {
  const W x = rounded(rounded(product) * scale);
  slope = 1;
  if (!(softcap > 0)) return x;
  const W t = rounded(tanh(rounded(x / softcap)));
  slope = (W)1 - t * t;
  return rounded(t * softcap);
}

extern "C" __global__ void attend(
    const E* q, const E* k, const E* v, double* o, double* lse, W* scores, const int* lens_q,
    const int* lens_k, const i64* rows, const Meta* meta, double scale, double softcap) {
  __shared__ W shared[128];
  const Meta m = *meta;
  const i64 n = blockIdx.x;
  i64 b = n / (m.heads * m.seqlen_q), h = n / m.seqlen_q % m.heads, i = n % m.seqlen_q;
  if (rows) { b = rows[3 * n]; h = rows[3 * n + 1]; i = rows[3 * n + 2]; }
  // Results: (B, Sq, H, Dv) and (B, H, Sq), or in the order of `rows`.
  o += (rows ? n : (b * m.seqlen_q + i) * m.heads + h) * m.dim_v;
  const auto [begin, end] = Lengths(m, lens_q, lens_k, b).keys(m, i);
  q += b * m.q[0] + i * m.q[1] + h * m.q[2];
  k += b * m.k[0] + h / m.group * m.k[2];
  v += b * m.v[0] + h / m.group * m.v[2];
  W* s = scores + n * m.seqlen_k;
  W top = minus_inf(), slope;
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) {
    const W product = dot(q, m.q[3], k + j * m.k[1], m.k[3], m.dim);
    s[j] = logit(product, (W)scale, (W)softcap, slope);
    top = larger(top, s[j]);
  }
  top = block_max(top, shared);
  const bool empty = top == minus_inf();
  W sum = 0;
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) {
    s[j] = exp(s[j] - top);
    sum += s[j];
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) lse[n] = as_double(empty ? top : top + log(sum));
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) s[j] = rounded(s[j] / sum);
  __syncthreads();
  for (i64 d = threadIdx.x; d < m.dim_v; d += blockDim.x) {
    W x = 0;
    if (!empty) {
#pragma unroll 8
      for (i64 j = begin; j < end; ++j) x += operand(s[j]) * load(v + j * m.v[1] + d * m.v[3]);
    }
    o[d] = as_double(rounded(x));
  }
}

// A block per query row: its weights P, its dS times the scale, and dq (B, Sq, H, D). `dead` says
// whether it sees nothing. work: (3, B * H * Sq, Sk).
extern "C" __global__ void gradient_rows(
    const E* q, const E* k, const E* v, const E* g, const double* dlse, double* dq, int* dead,
    W* work, const int* lens_q, const int* lens_k, const Meta* meta, double scale,
    double softcap) {
  __shared__ W shared[128];
  const Meta m = *meta;
  const i64 n = blockIdx.x, whole = gridDim.x * m.seqlen_k;
  const i64 b = n / (m.heads * m.seqlen_q), h = n / m.seqlen_q % m.heads, i = n % m.seqlen_q;
  dq += ((b * m.seqlen_q + i) * m.heads + h) * m.dim;
  const auto [begin, end] = Lengths(m, lens_q, lens_k, b).keys(m, i);
  q += b * m.q[0] + i * m.q[1] + h * m.q[2];
  g += b * m.g[0] + i * m.g[1] + h * m.g[2];
  k += b * m.k[0] + h / m.group * m.k[2];
  v += b * m.v[0] + h / m.group * m.v[2];
  W *p = work + n * m.seqlen_k, *ds = p + whole, *slope = ds + whole;
  W top = minus_inf();
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) {
    const W product = dot(q, m.q[3], k + j * m.k[1], m.k[3], m.dim);
    p[j] = logit(product, (W)scale, (W)softcap, slope[j]);
    ds[j] = rounded(dot(g, m.g[3], v + j * m.v[1], m.v[3], m.dim_v));  // dP, for now
    top = larger(top, p[j]);
  }
  top = block_max(top, shared);
  const bool empty = top == minus_inf();
  if (threadIdx.x == 0) dead[n] = empty;
  if (empty) return;  // dq is zero already
  W sum = 0;
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) sum += exp(p[j] - top);
  sum = block_sum(sum, shared);
  const W lse = top == -minus_inf() ? top : top + log(sum);
  W delta = 0;
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) {
    p[j] = rounded(exp(p[j] - lse));
    // As rowsum(do * o), which is how all fused code has it: TF32 gives it other errors than dP.
    const E* value = v + j * m.v[1];
    delta += TF32 ? operand(p[j]) * dot_as_is(g, m.g[3], value, m.v[3], m.dim_v) : p[j] * ds[j];
  }
  const W shift = (dlse ? (W)dlse[n] : (W)0) - block_sum(delta, shared);
  for (i64 j = begin + threadIdx.x; j < end; j += blockDim.x) {
    const W x = rounded(p[j] * (ds[j] + shift));
    ds[j] = rounded(rounded(x * slope[j]) * (W)scale);
  }
  __syncthreads();
  for (i64 d = threadIdx.x; d < m.dim; d += blockDim.x) {
    W x = 0;
#pragma unroll 8
    for (i64 j = begin; j < end; ++j) x += operand(ds[j]) * load(k + j * m.k[1] + d * m.k[3]);
    dq[d] = as_double(rounded(x));
  }
}

// A block per key, after gradient_rows: dk (B, Sk, Hk, D) and dv (B, Sk, Hk, Dv), summed over the
// heads of a group. `unseen` says whether no row sees the key.
extern "C" __global__ void gradient_keys(
    const E* q, const E* g, double* dk, double* dv, const int* dead, int* unseen, const W* work,
    const int* lens_q, const int* lens_k, const Meta* meta) {
  const Meta m = *meta;
  const i64 n = blockIdx.x, heads = m.heads / m.group;
  const i64 b = n / (m.seqlen_k * heads), j = n / heads % m.seqlen_k, head = n % heads;
  const i64 whole = gridDim.x / heads / m.seqlen_k * m.heads * m.seqlen_q * m.seqlen_k;
  const auto [begin, end] = Lengths(m, lens_q, lens_k, b).rows(m, j);
  bool lit = false;
  for (i64 d = threadIdx.x; d < m.dim || d < m.dim_v; d += blockDim.x) {
    W sum_k = 0, sum_v = 0;
    for (i64 h = head * m.group; h < (head + 1) * m.group; ++h) {
      const i64 row = (b * m.heads + h) * m.seqlen_q;
      const E *q_row = q + b * m.q[0] + h * m.q[2] + d * m.q[3];
      const E *g_row = g + b * m.g[0] + h * m.g[2] + d * m.g[3];
      W x = 0, y = 0;
#pragma unroll 4
      for (i64 i = begin; i < end; ++i) {
        if (dead[row + i]) continue;
        lit = true;
        const i64 at = (row + i) * m.seqlen_k + j;
        if (d < m.dim) x += operand(work[whole + at]) * load(q_row + i * m.q[1]);
        if (d < m.dim_v) y += operand(work[at]) * load(g_row + i * m.g[1]);
      }
      sum_k += rounded(x);
      sum_v += rounded(y);
    }
    if (d < m.dim) dk[n * m.dim + d] = as_double(rounded(sum_k));
    if (d < m.dim_v) dv[n * m.dim_v + d] = as_double(rounded(sum_v));
  }
  if (threadIdx.x == 0) unseen[n] = !lit;
}

__device__ u32 mixed(u32 x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}

// A standard normal number times `scale` from 64 random bits.
template <class T> __device__ void draw(T& x, u32 a, u32 b, double scale) {
  const float u = (a >> 8) * 0x1p-24f + 0x1p-25f, w = (b >> 8) * 0x1p-24f;
  narrow((float)scale * sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * w), x);
}
__device__ void draw(double& x, u32 a, u32 b, double scale) {
  x = scale * sqrt(-2.0 * log((a + 0.5) * 0x1p-32)) * cospi(b * 0x1p-31);
}

// From the element's number and a seed.
extern "C" __global__ void normal(E* x, i64 n, i64 seed, double scale) {
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n; i += step) {
    const u32 a = mixed((u32)i ^ mixed((u32)(i >> 32) + (u32)seed * 0x9e3779b9u));
    const u32 b = mixed(a + 0x68e31da4u);
    draw(x[i], a, b, scale);
  }
}
"""

_SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""

_ELEMENTS = {"float16": "f16", "bfloat16": "bf16", "float32": "float", "float64": "double"}
_WIDER = {"float16": "double", "bfloat16": "double", "float32": "double", "float64": "Two"}
_THREADS = 128


@functools.cache
def _module(card_: Any, dtype: str, low: bool, tf32: bool) -> Any:
    """_SOURCE for inputs of `dtype`: the truth, or with every step rounded to it."""
    wide = _WIDER[dtype] if not low else "double" if dtype == "float64" else "float"
    sizes = {"ELEMENT": _ELEMENTS[dtype], "WIDE": wide, "LOW": int(low), "TF32": int(tf32)}
    options = ("--std=c++17", *(f"-D{key}={value}" for key, value in sizes.items()))
    return card_.RawModule(code=_SOURCE, options=options)


@functools.cache
def _kernel(name: str, dtype: str = "float16", low: bool = True, precision: Any = None) -> Any:
    return _module(card(), dtype, low, low and precision == "tf32").get_function(name)


def _wide_bytes(dtype: str, low: bool) -> int:
    return (8 if dtype == "float64" else 4) if low else 16 if dtype == "float64" else 8


def spin(milliseconds: float) -> None:
    """Keep CuPy's current stream busy."""
    _spin()((1,), (1,), (int(milliseconds * 1e6),))


@functools.cache
def _spin() -> Any:
    return card().RawModule(code=_SPIN).get_function("spin")


def empty(shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised CuPy array, made as bits: CuPy may not know bfloat16."""
    return card().empty(shape, f"u{numpy_dtype(dtype).itemsize}").view(numpy_dtype(dtype))


def normal(shape: tuple[int, ...], dtype: str, seed: int, scale: float = 1.0) -> Any:
    """A CuPy array of normal numbers, the same for the same seed."""
    x = empty(shape, dtype)
    if x.size:
        args = (x.data.ptr, x.size, seed, np.float64(scale))
        _kernel("normal", dtype)((min(4096, -(-x.size // 256)),), (256,), args)
    return x


def copy(x: Any) -> Any:
    """A contiguous copy of a CuPy array, moved as bits."""
    return bits(x).copy().view(x.dtype)


def named(kind: str) -> tuple[str, dict[str, Any]]:
    """The dtype of the inputs and the options for a dtype or one of FAST."""
    return FAST.get(kind, (kind, {}))


def lse_dtype(dtype: str) -> str:
    """The dtype of lse for inputs of `dtype`."""
    return "float64" if dtype == "float64" else "float32"


def to_device(x: Any) -> Any:
    """A NumPy array on the card, moved as bits."""
    return card().asarray(bits(np.ascontiguousarray(x))).view(x.dtype)


def fill_nan(*arrays: Any) -> None:
    """Every bit set: a NaN in each floating type."""
    for x in arrays:
        x.view(f"i{x.itemsize}")[...] = -1


def inputs(
    b: int, sq: int, sk: int, h: int, hk: int, d: int, dv: int, dtype: str, seed: int = 0
) -> tuple[Any, Any, Any]:
    """q (B,Sq,H,D), k (B,Sk,Hk,D) and v (B,Sk,Hk,Dv), standard normal."""
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv))
    q, k, v = (normal(s, dtype, 3 * seed + n) for n, s in enumerate(shapes))
    return q, k, v


def problem(
    b: int, sq: int, sk: int, h: int, hk: int, d: int, dv: int, dtype: str, seed: int = 0
) -> tuple[Any, Any, Any, Any]:
    """do (B,Sq,H,Dv), q, k and v, standard normal."""
    do = normal((b, sq, h, dv), dtype, 10**6 + seed)
    return do, *inputs(b, sq, sk, h, hk, d, dv, dtype, seed)


def four(tensors: Iterable[Any]) -> tuple[Any, Any, Any, Any]:
    """do, q, k and v made from those of a problem, say."""
    do, q, k, v = tensors
    return do, q, k, v


def normal_lse(q: Any, seed: int) -> Any:
    """A gradient of lse: (B, H, Sq)."""
    b, sq, h, _ = q.shape
    return normal((b, h, sq), lse_dtype(q.dtype.name), seed)


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
    precision: str | None = None,
) -> tuple[Any, Any]:
    """o and lse from the formulas, as float64 NumPy arrays.

    q, k, v: CuPy arrays (B, S, H, D), any strides. low: round each step to their dtype, and
    the operands of products as `precision` says.
    rows: (n, 3) integers (batch, head, row); o is then (n, Dv) and lse (n,).
    """
    dtype, (b, sq, h, _), (_, sk, _, dv) = q.dtype.name, q.shape, v.shape
    n = b * h * sq if rows is None else len(rows)
    o = card().zeros((b, sq, h, dv) if rows is None else (n, dv), np.float64)
    lse = card().zeros((b, h, sq) if rows is None else (n,), np.float64)
    if n:
        args = (
            *(x.data.ptr for x in (q, k, v)),
            o,
            lse,
            card().empty(max(n * sk, 1) * _wide_bytes(dtype, low), np.uint8),
            *(0 if x is None else x.data.ptr for x in (seqlens_q, seqlens_k)),
            0 if rows is None else card().asarray(np.ascontiguousarray(rows, np.int64)),
            _meta((q, k, v, v), causal, window),
            *_scales(q, softmax_scale, softcap),
        )
        _kernel("attend", dtype, low, precision)((n,), (_THREADS,), args)
    return o.get(), lse.get()


def dense_backward(
    do: Any, q: Any, k: Any, v: Any, *, low: bool = False, **options: Any
) -> tuple[Any, Any, Any]:
    """dq, dk and dv from the formulas, as float64 NumPy arrays.

    do, q, k, v: CuPy arrays (B, S, H, D), any strides. low: as in `dense`.
    options: causal, window, softmax_scale, softcap, seqlens_q, seqlens_k, precision of
    `flash_attention`, and dlse (B, H, Sq).
    """
    dq, dk, dv, _, _ = _gradients(do, q, k, v, low, **options)
    return dq, dk, dv


def _gradients(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    low: bool,
    *,
    dlse: Any = None,
    causal: bool | str = False,
    window: Any = None,
    softmax_scale: Any = None,
    softcap: float = 0.0,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    precision: str | None = None,
) -> tuple[Any, ...]:
    """dq, dk, dv, and which rows (B, Sq, H) see no key and which keys (B, Sk, Hk) no row sees."""
    dtype, (b, sq, h, _), (_, sk, hk, _) = q.dtype.name, q.shape, k.shape
    dq, dk, dv = (card().zeros(x.shape, np.float64) for x in (q, k, v))
    dead, unseen = card().ones((b, h, sq), np.int32), card().ones((b, sk, hk), np.int32)
    work = card().empty(max(3 * b * h * sq * sk, 1) * _wide_bytes(dtype, low), np.uint8)
    lens = [0 if x is None else x.data.ptr for x in (seqlens_q, seqlens_k)]
    meta = _meta((q, k, v, do), causal, window)
    if dlse is not None:
        dlse = card().ascontiguousarray(dlse, np.float64)
    if dead.size:
        pointers = (x.data.ptr for x in (q, k, v, do))
        args = (*pointers, 0 if dlse is None else dlse, dq, dead, work, *lens, meta)
        scales = _scales(q, softmax_scale, softcap)
        _kernel("gradient_rows", dtype, low, precision)(
            (dead.size,), (_THREADS,), (*args, *scales)
        )
    if unseen.size:
        args = (q.data.ptr, do.data.ptr, dk, dv, dead, unseen, work, *lens, meta)
        _kernel("gradient_keys", dtype, low, precision)((unseen.size,), (_THREADS,), args)
    return (*(x.get() for x in (dq, dk, dv)), dead.get().transpose(0, 2, 1) > 0, unseen.get() > 0)


def _meta(arrays: tuple[Any, ...], causal: bool | str, window: Any) -> Any:
    """The kernels' Meta for q, k, v and do."""
    left, right = (-1 if w is None else int(w) for w in window or (None, None))
    if causal:
        right = 0 if right < 0 else min(right, 0)
    (_, sq, h, d), (_, sk, hk, dv) = arrays[0].shape, arrays[2].shape
    strides = [s // x.itemsize for x in arrays for s in x.strides]
    sizes = [sq, sk, h, h // max(hk, 1), d, dv, left, right, int(causal == "top_left")]
    return card().asarray(np.array(strides + sizes, np.int64))


def _scales(q: Any, softmax_scale: Any, softcap: float) -> tuple[np.float64, np.float64]:
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    return np.float64(scale), np.float64(softcap)


def check(
    o: Any, lse: Any, q: Any, k: Any, v: Any, name: str, rows: Any = None, **options: Any
) -> None:
    """Raise AssertionError unless (o, lse) keep the accuracy rule of the contract.

    o, q, k, v: CuPy arrays (B, S, H, D); lse (B, H, Sq) float32, for float64 inputs float64. With
    rows only those are checked. Rows without a visible key must be exact zeros.
    """
    exact, exact_lse = dense(q, k, v, rows=rows, **options)
    plain, plain_lse = dense(q, k, v, rows=rows, low=True, **options)
    if rows is not None:
        # Gathered slice by slice: an index array may not reach beyond 2^31 elements.
        dtype = o.dtype
        o = card().stack([bits(o)[b, i, h] for b, h, i in rows]).view(dtype)
        lse = card().stack([lse[b, h, i] for b, h, i in rows])
    o, lse = host(o), host(lse)
    assert lse.dtype.name == lse_dtype(o.dtype.name), f"{name}: lse is {lse.dtype}"
    assert_accurate(o, exact, plain, f"{name}: o")
    if options.get("precision") is None:
        assert_lse(lse, exact_lse, o.dtype.name, f"{name}: lse")
    else:  # no better than the scores that went into it
        assert_accurate(lse, exact_lse, plain_lse, f"{name}: lse")
    dark = exact_lse == -np.inf
    if rows is None:
        dark = dark.transpose(0, 2, 1)
    loose = int(np.count_nonzero(bits(o)[dark]))
    assert loose == 0, f"{name}: {loose} values of rows without a visible key are not +0"


class Gradients(NamedTuple):
    """What dq, dk and dv must be."""

    exact: tuple[Any, Any, Any]
    plain: tuple[Any, Any, Any]
    dead: Any  # (B, Sq, H): rows that see no key
    unseen: Any  # (B, Sk, Hk): keys that no row sees
    noise: float  # of dq and dk, see `gradient_noise`
    weight_noise: Any  # (B,): of dv, see `exponent_noise`
    output_noise: tuple[Any, Any]  # (B,) each: of dq and of dk, see `output_noise`
    crowded: Any  # (B,): how many times as much in dk, where many rows see few keys
    vanishing: tuple[float, float]  # how many times as much where dq or dk is 0


def expected_gradients(do: Any, q: Any, k: Any, v: Any, **options: Any) -> Gradients:
    """The truth, what plain code makes of it, and where there is none; see `dense_backward`."""
    *exact, dead, unseen = _gradients(do, q, k, v, False, **options)
    plain = dense_backward(do, q, k, v, low=True, **options)
    on_host = [host(x) for x in (do, q, k, v)]
    grad_o, query, key, value = (np.where(np.isfinite(x), x, x.dtype.type(0)) for x in on_host)
    scale = options.get("softmax_scale")
    scale = None if scale is None else float(scale)
    noise = gradient_noise(grad_o, query, key, value, scale)
    # Where dP - delta vanishes, it is what remains of two sums of Dv products. A tensor core cuts
    # its sums off once every 16 products, and dk adds up the noise of all rows.
    steps, rows = -(-v.shape[3] // 16), max(q.shape[1] * q.shape[2] // max(k.shape[2], 1), 1)
    dq, dk, dv = exact
    vanishing = (steps, steps * math.sqrt(rows))
    # A key that rows see alone adds up the whole noise of each: sqrt(rows) times one row's, of
    # which there are rows / keys to a key.
    seqlens = (options.get(name) for name in ("seqlens_q", "seqlens_k"))
    real_q, real_k = (
        np.full(q.shape[0], x.shape[1]) if n is None else host(n)
        for n, x in zip(seqlens, (q, k), strict=True)
    )
    group = q.shape[2] // max(k.shape[2], 1)
    crowded = np.sqrt(np.maximum(1, group * real_q / np.maximum(real_k, 1)))
    largest = np.nan_to_num(np.abs(dv), posinf=0).max(axis=(1, 2, 3), initial=0)
    weight_noise = exponent_noise(query, key, scale, options.get("softcap", 0.0)) * largest
    options.pop("dlse", None)
    rounded = output_noise(grad_o, dense(q, k, v, **options)[0], query, key, scale)
    return Gradients(
        (dq, dk, dv), plain, dead, unseen, noise, weight_noise, rounded, crowded, vanishing
    )


def exponent_noise(q: Any, k: Any, scale: float | None, softcap: float) -> Any:
    """(B,): what rounding leaves of s - lse, and so of P, relative to P.

    Plain code divides by the sum instead, and where one key outweighs the others gets its P = 1
    exactly, so that the error of plain code says nothing. Three roundings, of half a unit of the
    largest that |s| can be: of s, of lse as it is given, and of lse times log2(e).
    """
    eps = EPS["float64" if q.dtype == np.float64 else "float32"]
    longest = [
        np.linalg.norm(x.astype(np.longdouble), axis=-1).max((1, 2), initial=0) for x in (q, k)
    ]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else abs(scale)
    largest = np.minimum(scale * longest[0] * longest[1], softcap if softcap > 0 else np.inf)
    return (3 * eps / 2 * largest).astype(np.float64)


def output_noise(do: Any, o: Any, q: Any, k: Any, scale: float | None) -> tuple[Any, Any]:
    """(B,) each: what rounding o leaves of delta = rowsum(do * o), and so of dq and dk.

    Autograd of unfused code sums up P dP instead, and never rounds o before. Half a unit of each
    product, which differ in sign.
    """
    products = np.nan_to_num(do.astype(np.float64) * o, posinf=0, neginf=0)
    deltas = np.linalg.norm(products, axis=-1).max((1, 2), initial=0)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else abs(scale)
    per_unit = EPS[q.dtype.name] / 2 * scale * deltas
    largest = (np.abs(x.astype(np.float64)).max((1, 2, 3), initial=0) for x in (k, q))
    of_k, of_q = (per_unit * x for x in largest)
    return of_k, of_q


def assert_gradients(grads: Any, expected: Gradients, name: str) -> None:
    """Raise AssertionError unless dq, dk and dv keep the accuracy rule of the contract.

    grads: CuPy or NumPy arrays. Rows that see no key and keys that no row sees must have exact
    zeros.
    """
    dark = (expected.dead, expected.unseen, expected.unseen)
    noise, vanishing = expected.noise, (*expected.vanishing, 0.0)
    of_dq, of_dk = (noise + x for x in expected.output_noise)
    for which, grad, exact, plain, unlit, entries, times in zip(
        ("dq", "dk", "dv"),
        grads,
        expected.exact,
        expected.plain,
        dark,
        (of_dq, expected.crowded * of_dk, expected.weight_noise),
        vanishing,
        strict=True,
    ):
        assert not np.isnan(entries).any(), f"{name}: no bound for {which}"
        x = grad if isinstance(grad, np.ndarray) else host(grad)
        largest = np.nan_to_num(np.abs(exact), posinf=0).max(initial=0)
        if times and largest < 2**10 * noise:
            assert_accurate(x, exact, plain, f"{name}: {which}", times * noise)
        else:
            # The rule is one of whole tensors; only what dk adds up differs much between entries.
            groups = expected.crowded if which == "dk" else np.ones(len(x))
            for group in np.unique(groups):
                a, b, c = (y[groups == group] for y in (x, exact, plain))
                level = entries[groups == group].max(initial=0)
                assert_accurate(a, b, c, f"{name}: {which}", float(level))
        loose = int(np.count_nonzero(x[unlit].astype(np.float64)))
        assert loose == 0, f"{name}: {loose} values of {which} that nothing sees are not 0"


def check_backward(do: Any, q: Any, k: Any, v: Any, grads: Any, name: str, **options: Any) -> None:
    """`assert_gradients` of (dq, dk, dv) for the inputs of `dense_backward`."""
    assert_gradients(grads, expected_gradients(do, q, k, v, **options), name)


def assert_same(x: Any, y: Any, name: str) -> None:
    """Raise AssertionError unless two CuPy arrays hold the same bits."""
    assert x.shape == y.shape, f"{name}: shapes {x.shape} and {y.shape} differ"
    assert x.dtype == y.dtype, f"{name}: dtypes {x.dtype} and {y.dtype} differ"
    a, b = bits(host(x)), bits(host(y))
    wrong = np.argwhere(a != b)
    assert not len(wrong), f"{name}: {len(wrong)} of {a.size} values differ, first {wrong[0]}"


def poison(q: Any, k: Any, v: Any) -> None:
    """Leave NaN in the memory that the next call takes for its results and its work."""
    attention.launcher.cache_clear()  # and with it the work buffers it keeps
    card().get_default_memory_pool().free_all_blocks()
    b, sq, h, _ = q.shape
    rows = b * h * -(-sq // 64) * 64
    of_lse = numpy_dtype(lse_dtype(q.dtype.name)).itemsize
    sizes = [*(x.nbytes for x in (q, k, v)), of_lse * rows, 4 * rows * q.shape[3], 1 << 23]
    blocks = [card().empty(max(n, 1), np.uint8) for n in sizes]
    blocks.append(card().empty(sum(sizes), np.uint8))
    fill_nan(*blocks)


def forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """o and lse of (B, S, H, D) arrays, with the options of `backward`."""
    options.pop("dlse", None)
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    return o, lse


def backward(
    do: Any, q: Any, k: Any, v: Any, made: Any = None, *, wipe: bool = True, **options: Any
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv) of (B, S, H, D) arrays from memory full of NaN; made: o and lse if known."""
    deterministic = options.pop("deterministic", False)
    o, lse = forward(q, k, v, **options) if made is None else made
    if wipe:
        poison(q, k, v)
    grads = flash_attention_backward(do, q, k, v, o, lse, deterministic=deterministic, **options)
    dq, dk, dv = grads
    for name, x, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        assert (x.shape, x.dtype) == (like.shape, like.dtype), f"{name}: {x.shape}, {x.dtype}"
    return dq, dk, dv


def backward_checked(do: Any, q: Any, k: Any, v: Any, name: str, **options: Any) -> None:
    """Both ways of running, each held to the accuracy rule."""
    made, expected = forward(q, k, v, **options), expected_gradients(do, q, k, v, **options)
    for deterministic in MODES:
        grads = backward(do, q, k, v, made, deterministic=deterministic, **options)
        assert_gradients(grads, expected, f"{name}, deterministic={deterministic}")


def assert_same_gradients(grads: Any, expected: Any, name: str) -> None:
    """Raise AssertionError unless (dq, dk, dv) are the same bits."""
    for which, x, y in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert_same(x, y, f"{name}: {which}")


def filled(shape: tuple[int, ...], like: Any) -> Any:
    """Bits of NaN."""
    x = card().empty(shape, like.dtype)
    fill_nan(x)
    return x


def apart(y: Any, axis: int) -> Any:
    shape = list(y.shape)
    shape[axis] *= 2
    cut = [slice(None)] * y.ndim
    cut[axis] = slice(None, None, 2)
    view = filled(tuple(shape), y)[tuple(cut)]
    view[...] = y
    return view


def wide_rows(y: Any) -> Any:
    view = filled((*y.shape[:-1], y.shape[-1] + 16), y)[..., 8:-8]
    view[...] = y
    return view


def vast(shape: tuple[int, ...], dtype: str) -> Any:
    """An array of gigabytes, to lay others in; NaN on a GPU. The emulated card, which tells when a
    kernel touches what is between them, only takes memory for what is written."""
    if _cards:
        return card().sparse(shape, dtype)
    made = empty(shape, dtype)
    made.data.memset(0xFF, made.nbytes)
    return made


def apart_in(buffer: Any, place: int, y: Any) -> Any:
    """y (B, S, H, D) in the columns of a (B, S, many, D) buffer, a thousand by place."""
    view = buffer[:, :, 1000 * place : 1000 * place + y.shape[2]]
    bits(view)[...] = bits(y)
    return view


def odd_address(y: Any) -> Any:
    view = filled((y.size + 1,), y)[1:].reshape(y.shape)
    view[...] = y
    return view


# Ways in which an array may lie in memory, as functions of its bits.
LAID: dict[str, Callable[[Any], Any]] = {
    "plain": lambda y: y.copy(),
    "every second row": lambda y: apart(y, 1),
    "heads first": lambda y: y.swapaxes(1, 2).copy().swapaxes(1, 2),
    "rows backwards": lambda y: y[:, ::-1].copy()[:, ::-1],
    "wide rows": wide_rows,
    # Those a kernel cannot read in place:
    "odd address": odd_address,
    "columns backwards": lambda y: y[..., ::-1].copy()[..., ::-1],
    "every second column": lambda y: apart(y, -1),
    "transposed": lambda y: y.transpose().copy().transpose(),
}
IN_PLACE = ("plain", "every second row", "heads first", "rows backwards", "wide rows")


def laid(x: Any, kind: str) -> Any:
    """The same values, lying otherwise; NaN between them."""
    return LAID[kind](bits(x)).view(x.dtype)


def lengths(*values: int) -> Any:
    """Sequence lengths on the GPU."""
    return card().asarray(np.array(values, np.int32))


def main_kernels(direction: str) -> tuple[Kernel, ...]:
    """The rows of the table that do the main work of a pass."""
    return tuple(row for row in KERNELS if row.direction == direction and row.stage == "main")


def foreign_tiles(kernel: Kernel = FORWARD) -> list[tuple[Tile, int]]:
    """(tile, head dim) pairs that some architecture uses and this card does not."""
    here = {(v.kernel, v.tile, v.head_dim, v.score) for v in plan.variants(device.info(0))}
    found: dict[tuple[Tile, int], None] = {}
    for arch in device.ARCHS:
        for v in plan.variants(device.info_for_arch(arch)):
            if v.kernel is kernel and (kernel, v.tile, v.head_dim, v.score) not in here:
                found.setdefault((v.tile, v.head_dim))
    return list(found)


def kinds_of(row: Kernel, dtypes: Iterable[str]) -> tuple[str, ...]:
    """Those of `dtypes` that a row takes, and those of FAST that it has for them."""
    mine = tuple(dtype for dtype in dtypes if dtype in row.dtypes)
    return (*mine, *(kind for kind, (t, _) in FAST.items() if row.tf32 and t in mine))


class Cell(NamedTuple):
    """An instance of a backward kernel: a dtype or one of FAST, a head dim and the policies."""

    kind: str
    dim: int
    mask: str
    score: str

    @property
    def options(self) -> dict[str, Any]:
        softcap = 2.5 if self.score == "softcap" else 0.0
        return {**MASK_OPTIONS[self.mask], "softcap": softcap, **named(self.kind)[1]}


@functools.cache
def backward_cells() -> tuple[Cell, ...]:
    """What the tests run of the backward: of 16-bit inputs everything.

    float32 and float64 have all policies at the head dims that tiles end at, and each mask with
    one score at the others, which take the same tiles; TF32 all of them once and each mask at the
    largest head dim.
    """
    found = []
    for row in main_kernels("backward"):
        ends = sorted({tile.max_head_dim for tile in row.tiles})
        for kind, (n, dim) in itertools.product(
            kinds_of(row, row.dtypes), enumerate(row.head_dims)
        ):
            every = kind in DTYPES or dim in (ends[:1] if kind in FAST else ends)
            if kind in FAST and not every and dim != ends[-1]:
                continue
            for m, mask in enumerate(MASKS):
                scores = tuple(SCORES) if every else (tuple(SCORES)[(n + m) % len(SCORES)],)
                found += [Cell(kind, dim, mask, score) for score in scores]
    return tuple(found)


def backward_sizes(kind: str) -> tuple[int, ...]:
    """Head dims of which the tests run every policy."""
    found = {
        (cell.kind, cell.dim)
        for cell in backward_cells()
        if all(cell._replace(mask=m, score=s) in backward_cells() for m in MASKS for s in SCORES)
    }
    return tuple(sorted(dim for t, dim in found if t == kind))


def foreign_cells(row: Kernel) -> list[tuple[Tile, Cell]]:
    """Tiles of a backward row that some architecture uses and this card does not, and what the
    tests run on them: every mask, for float32 and float64 two of them each time."""
    found = []
    for n, (tile, dim) in enumerate(foreign_tiles(row)):
        dtypes = [t for t in row.dtypes if numpy_dtype(t).itemsize == tile.itemsize]
        kinds, wide = kinds_of(row, dtypes), tile.itemsize > 2
        for m, mask in enumerate(MASKS):
            if wide and m % 2 != n % 2:
                continue
            turn = (n + m) // 2 if wide else m
            score = tuple(SCORES)[(turn // 2 + m if wide else m) % len(SCORES)]
            found.append((tile, Cell(kinds[turn % len(kinds)], dim, mask, score)))
    return found


def variants_in_use() -> Iterator[Variant]:
    """The kernels that the tests run most, so that they can be compiled side by side first."""
    info = device.info(0)
    wide = [row for row in main_kernels("backward") if row.dq_in_place]
    dtypes = {dtype for row in wide for dtype in row.dtypes}
    for v in plan.variants(info):
        if v.kernel.direction == "forward" or v.dtype not in dtypes or not v.kernel.policies:
            yield v
    for cell in backward_cells():
        dtype, _ = named(cell.kind)
        if dtype in dtypes:
            for deterministic in MODES:
                options = {**cell.options, "deterministic": deterministic}
                yield from _variants_of("backward", cell.dim, cell.dim, dtype, options)
    policies = [
        {**mask, "softcap": softcap}
        for mask, softcap in itertools.product(MASK_OPTIONS.values(), (0.0, 1.0))
    ]
    for d, dv, dtype in UNEQUAL:
        for options in policies:
            yield from _variants_of("forward", d, dv, dtype, options)
    for d, dv, dtype, deterministic in UNEQUAL_BACKWARD:
        for options in policies:
            mode = {**options, "deterministic": deterministic}
            yield from _variants_of("backward", d, dv, dtype, mode)
    for kernel in main_kernels("forward"):
        for tile, d in foreign_tiles(kernel):
            dtypes_of = [t for t in kernel.dtypes if numpy_dtype(t).itemsize == tile.itemsize]
            kinds = kinds_of(kernel, dtypes_of)
            for (n, mask), (m, kind) in itertools.product(enumerate(MASKS), enumerate(kinds)):
                score = tuple(SCORES)[(n + m) % len(SCORES)]
                tf32 = kind in FAST
                yield Variant(kernel, tile, named(kind)[0], d, d, mask, score, tf32=tf32)
    for kernel in KERNELS:
        if kernel.direction == "backward" and kernel.policies:
            for tile, (kind, d, mask, score) in foreign_cells(kernel):
                dtype, options = named(kind)[0], Cell(kind, d, mask, score).options
                mode = {**options, "deterministic": kernel.stage == "dq"}
                for v in _variants_of("backward", d, d, dtype, mode):
                    yield dataclasses.replace(v, tile=tile) if v.kernel is kernel else v


def _variants_of(
    direction: Any, d: int, dv: int, dtype: str, options: dict[str, Any]
) -> Iterator[Variant]:
    """Every kernel of a pass with these head dims and options."""
    from cufa2.problem import Options, make_problem

    head, head_v = (SimpleNamespace(shape=(1, 1, 1, n), dtype=dtype) for n in (d, dv))
    problem = make_problem(direction, Options.make(**options), head, head, head_v)
    yield from plan.choose(problem, device.info(0)).variants


def forward_variant(dim: int, dtype: str, options: dict[str, Any]) -> Variant:
    """What serves a forward call on this card."""
    return next(_variants_of("forward", dim, dim, dtype, options))


def compile_side_by_side() -> None:
    """Fill the kernel cache with `variants_in_use`, on all cores: NVRTC is slow in one process."""
    keys = [_key(v) for v in dict.fromkeys(variants_in_use())]
    arch, driver = device.info(0).arch, device.driver_cuda()
    workers = min(len(keys), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_compile, key, arch, driver) for key in keys]
        for job in jobs:
            job.result()


def _key(variant: Variant) -> dict[str, Any]:
    """A variant in terms that another process understands: rows of the table are compared by
    identity there."""
    fields = {f.name: getattr(variant, f.name) for f in dataclasses.fields(variant)}
    tile = variant.kernel.tiles.index(variant.tile)
    return {**fields, "kernel": variant.kernel.name, "tile": tile}


def _compile(key: dict[str, Any], arch: str, driver: Any) -> None:
    kernel = next(row for row in KERNELS if row.name == key["kernel"])
    variant = Variant(**{**key, "kernel": kernel, "tile": kernel.tiles[key["tile"]]})
    compiler.build(variant, arch, driver=driver)
