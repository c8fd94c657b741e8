// Integer names, the two 16-bit float types and their packing. No host or CUDA header is included:
// NVRTC finds none by itself, and each would cost 60 to 170 ms of every compilation.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define CUFA2_DEVICE __device__ __forceinline__

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

CUFA2_DEVICE float inf() { return __int_as_float(0x7f800000); }

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;

// Storage types: the bits of one element. Arithmetic happens in float32 only.
struct fp16_t { u16 bits; };
struct bf16_t { u16 bits; };

// Rounds two floats to nearest even and packs them, `lo` in the lower half.
template <class T> CUFA2_DEVICE u32 pack2(float lo, float hi) {
  static_assert(is_same<T, fp16_t> || is_same<T, bf16_t>, "pack2 packs 16-bit floats");
  u32 packed;
  if constexpr (is_same<T, fp16_t>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  }
  return packed;
}

// The two elements of a packed pair, exactly, as floats.
struct Float2 { float lo, hi; };

template <class T> CUFA2_DEVICE Float2 unpack2(u32 packed) {
  if constexpr (is_same<T, fp16_t>) {
    Float2 f;
    asm("{.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;}"
        : "=f"(f.lo), "=f"(f.hi) : "r"(packed));
    return f;
  } else {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  }
}

// Codes of non-finite values, exact in both types; sums of fewer than kNegativeInfCode of them
// still tell which occurred. NaN is both infinities at once, as their sum is.
constexpr int kInfCode = 1, kNegativeInfCode = 128;

CUFA2_DEVICE float nonfinite_code(float x) {
  if (fabsf(x) < inf()) return 0.0f;
  return x != x ? kInfCode + kNegativeInfCode : x > 0.0f ? kInfCode : kNegativeInfCode;
}

// Leaves the finite elements of a packed pair and returns the codes of the others.
template <class T> CUFA2_DEVICE u32 split_nonfinite(u32& packed) {
  const Float2 f = unpack2<T>(packed);
  const float lo = nonfinite_code(f.lo), hi = nonfinite_code(f.hi);
  packed = pack2<T>(lo == 0.0f ? f.lo : 0.0f, hi == 0.0f ? f.hi : 0.0f);
  return pack2<T>(lo, hi);
}

// The sum of the values whose codes add up to `codes`: 0, +Inf, -Inf or NaN.
CUFA2_DEVICE float sum_of_codes(float codes) {
  const int sum = static_cast<int>(codes);
  const float positive = sum % kNegativeInfCode != 0 ? inf() : 0.0f;
  const float negative = sum / kNegativeInfCode != 0 ? inf() : 0.0f;
  return positive - negative;
}
