// NaN and infinities of 16-bit operands, kept out of products and added up apart.
#pragma once
#include "convert.cuh"

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
