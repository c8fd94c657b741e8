#include "numerics.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime.h"

namespace emulator {
namespace {

template <class To, class From> To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are kept");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Toward zero, which is never the negative one; infinity from 2^128 on.
float cut(double x) {
  float f = static_cast<float>(x);
  const double magnitude = std::fabs(x);
  if (magnitude < 0x1p128 && std::fabs(static_cast<double>(f)) > magnitude) {
    f = std::nextafterf(f, 0.0f);
  }
  return f == 0 ? 0 : f;
}

double power_of_2(int exponent) {
  return bits_of<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

constexpr std::uint32_t kNan = 0x7fffffff;  // what float instructions make of any NaN
constexpr int kNone = -10000;  // exponent of zero

// An operand of a tensor core. SMALLEST: the exponent that subnormal numbers have.
struct Number { float x; int exponent; };
template <int SMALLEST> Number number(float x) {
  if (x == 0 || !std::isfinite(x)) return {x, kNone};
  const int exponent = static_cast<int>(bits_of<std::uint32_t>(x) >> 23 & 0xff) - 127;
  return {x, exponent < SMALLEST ? SMALLEST : exponent};
}
Number number_of_fp16(std::uint32_t bits) { return number<-14>(from_fp16(bits)); }
Number number_of_bf16(std::uint32_t bits) { return number<-126>(from_bf16(bits)); }
// A tensor core sees no more of a TF32 operand.
Number number_of_tf32(std::uint32_t bits) { return number<-126>(bits_of<float>(bits & 0xffffe000u)); }

// One element of D on Hopper, found by fitting what an H200 returns, to the last bit. Products are
// exact. They and the old element are aligned to the largest exponent among them (that of a
// product is the sum of its operands', whatever their significands), cut toward zero 25 places
// behind its point, added exactly, and the sum is cut to a float.
template <int K> float dot(const Number* a, const Number* b, float sum) {
  constexpr int kPlaces = 25;
  double product[K];
  bool finite = std::isfinite(sum);
  int largest = number<-126>(sum).exponent;
  for (int k = 0; k < K; ++k) {
    product[k] = static_cast<double>(a[k].x) * b[k].x;
    finite &= std::isfinite(product[k]);
    if (product[k] != 0) largest = std::max(largest, a[k].exponent + b[k].exponent);
  }
  if (!finite) {
    double total = sum;
    for (double p : product) total += p;
    return total == total ? static_cast<float>(total) : bits_of<float>(kNan);
  }
  if (largest <= kNone) return 0;
  const double scale = power_of_2(kPlaces - largest);
  auto total = static_cast<std::int64_t>(sum * scale);
  for (double p : product) total += static_cast<std::int64_t>(p * scale);
  return cut(static_cast<double>(total) * power_of_2(largest - kPlaces));
}
template <int K> double dot(const double* a, const double* b, double sum) {
  for (int k = 0; k < K; ++k) sum = std::fma(a[k], b[k], sum);
  return sum;
}

template <class Element, class Sum> struct Operands {
  Element a[4], b[2];
  Sum d[4];
};
template <class Sum> struct Four { Sum at[4]; };

// D (16 x 8) += A (16 x K) B (K x 8): `place` puts a lane's fragments into rows of A and columns
// of B.
template <int K, class Factor, class Element, class Sum, class Place>
void multiply(const Operands<Element, Sum>* in, Four<Sum>* out, Place place) {
  Factor a[16][K], b[8][K];
  for (int lane = 0; lane < 32; ++lane) place(in[lane], lane / 4, lane % 4, a, b);
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + 8 * (e >> 1), column = 2 * (lane % 4) + (e & 1);
      out[lane].at[e] = dot<K>(a[row], b[column], in[lane].d[e]);
    }
}

template <Number (*widen)(std::uint32_t)>
void multiply_halves(const Operands<std::uint32_t, float>* in, Four<float>* out) {
  multiply<16, Number>(in, out, [](const auto& x, int g, int t, auto& a, auto& b) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) {
        a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + half] = widen(x.a[i] >> 16 * half & 0xffffu);
      }
      for (int i = 0; i < 2; ++i) {
        b[g][2 * t + 8 * i + half] = widen(x.b[i] >> 16 * half & 0xffffu);
      }
    }
  });
}

template <class Factor, class Element, class Sum, Factor (*widen)(Element)>
void multiply_wide(const Operands<Element, Sum>* in, Four<Sum>* out) {
  multiply<8, Factor>(in, out, [](const auto& x, int g, int t, auto& a, auto& b) {
    for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][t + 4 * (i / 2)] = widen(x.a[i]);
    for (int i = 0; i < 2; ++i) b[g][t + 4 * i] = widen(x.b[i]);
  });
}

double as_it_is(double x) { return x; }

template <class Element, class Sum>
void add_product(const char* name, Sum (&d)[4], const Element (&a)[4], const Element (&b)[2],
                 void (*function)(const Operands<Element, Sum>*, Four<Sum>*)) {
  Operands<Element, Sum> mine;
  std::memcpy(mine.a, a, sizeof a);
  std::memcpy(mine.b, b, sizeof b);
  std::memcpy(mine.d, d, sizeof d);
  Four<Sum> sums;
  collective(name, mine, sums, function);
  std::memcpy(d, sums.at, sizeof d);
}

}  // namespace

std::uint16_t to_fp16(float x) {
  return x == x ? bits_of<std::uint16_t>(static_cast<_Float16>(x)) : 0x7fff;
}

std::uint16_t to_bf16(float x) {
  const auto bits = bits_of<std::uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_fp16(std::uint32_t bits) {
  const auto x = static_cast<float>(bits_of<_Float16>(static_cast<std::uint16_t>(bits)));
  return x == x ? x : bits_of<float>(kNan);
}

float from_bf16(std::uint32_t bits) { return bits_of<float>(bits << 16); }

std::uint32_t to_tf32(float x) {
  const auto bits = bits_of<std::uint32_t>(x);
  if (!std::isfinite(x)) return x != x ? 0x7fffe000u : bits;
  return (bits + 0xfffu + (bits >> 13 & 1)) & 0xffffe000u;
}

namespace {
// Subnormal numbers become zeros of their sign.
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
}  // namespace

float exp2_approx(float x) { return x == x ? flushed(std::exp2(x)) : bits_of<float>(kNan); }
float reciprocal_approx(float x) {
  return x == x ? flushed(1.0f / flushed(x)) : bits_of<float>(kNan);
}

void add_product_of_fp16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  add_product("product of fp16", d, a, b, multiply_halves<number_of_fp16>);
}
void add_product_of_bf16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  add_product("product of bf16", d, a, b, multiply_halves<number_of_bf16>);
}
void add_product_of_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  add_product("product of TF32", d, a, b, multiply_wide<Number, std::uint32_t, float, number_of_tf32>);
}
void add_product_of_float64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  add_product("product of float64", d, a, b, multiply_wide<double, double, double, as_it_is>);
}

float dot_of_halves(bool fp16, const std::uint16_t* a, const std::uint16_t* b, float sum) {
  Number left[16], right[16];
  for (int k = 0; k < 16; ++k) {
    left[k] = fp16 ? number_of_fp16(a[k]) : number_of_bf16(a[k]);
    right[k] = fp16 ? number_of_fp16(b[k]) : number_of_bf16(b[k]);
  }
  return dot<16>(left, right, sum);
}

}  // namespace emulator
