#include "numerics.h"

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

float cut(double x) {  // toward zero
  float f = static_cast<float>(x);
  if (std::fabs(static_cast<double>(f)) > std::fabs(x)) f = std::nextafterf(f, 0.0f);
  return f;
}

// What a tensor core sees of a TF32 operand.
float cut_to_tf32(std::uint32_t bits) { return bits_of<float>(bits & 0xffffe000u); }

// One element of D. Products of 16-bit floats and of TF32 are exact.
template <int K> float dot(const float* a, const float* b, float sum) {
  double total = 0;
  for (int k = 0; k < K; ++k) total += static_cast<double>(a[k]) * b[k];
  return cut(total + sum);
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
template <int K, class Element, class Sum, class Place>
void multiply(const Operands<Element, Sum>* in, Four<Sum>* out, Place place) {
  Sum a[16][K], b[8][K];
  for (int lane = 0; lane < 32; ++lane) place(in[lane], lane / 4, lane % 4, a, b);
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + 8 * (e >> 1), column = 2 * (lane % 4) + (e & 1);
      out[lane].at[e] = dot<K>(a[row], b[column], in[lane].d[e]);
    }
}

template <float (*widen)(std::uint32_t)>
void multiply_halves(const Operands<std::uint32_t, float>* in, Four<float>* out) {
  multiply<16>(in, out, [](const auto& x, int g, int t, auto& a, auto& b) {
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

template <class Element, class Sum, Sum (*widen)(Element)>
void multiply_wide(const Operands<Element, Sum>* in, Four<Sum>* out) {
  multiply<8>(in, out, [](const auto& x, int g, int t, auto& a, auto& b) {
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

std::uint16_t to_fp16(float x) { return bits_of<std::uint16_t>(static_cast<_Float16>(x)); }

std::uint16_t to_bf16(float x) {
  const auto bits = bits_of<std::uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_fp16(std::uint32_t bits) {
  return static_cast<float>(bits_of<_Float16>(static_cast<std::uint16_t>(bits)));
}

float from_bf16(std::uint32_t bits) { return bits_of<float>(bits << 16); }

std::uint32_t to_tf32(float x) {
  const auto bits = bits_of<std::uint32_t>(x);
  if (!std::isfinite(x)) return x != x ? 0x7fffffffu : bits;
  return (bits + 0xfffu + (bits >> 13 & 1)) & 0xffffe000u;
}

float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

float reciprocal_approx(float x) { return 1.0f / x; }

void add_product_of_fp16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  add_product("product of fp16", d, a, b, multiply_halves<from_fp16>);
}
void add_product_of_bf16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  add_product("product of bf16", d, a, b, multiply_halves<from_bf16>);
}
void add_product_of_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  add_product("product of TF32", d, a, b, multiply_wide<std::uint32_t, float, cut_to_tf32>);
}
void add_product_of_float64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  add_product("product of float64", d, a, b, multiply_wide<double, double, as_it_is>);
}

}  // namespace emulator
