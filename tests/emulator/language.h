// What CUDA C++ has and C++ lacks: keywords, and the names of its arithmetic.
#pragma once
#include <cmath>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

using std::exp;
using std::fabs;
using std::fma;
using std::isfinite;
using std::ldexp;
using std::log;
using std::rint;
using std::tanh;

template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }

// The larger of 0 and -0 is 0, which std::fmax leaves open.
inline float fmaxf(float a, float b) {
  return a == b ? (std::signbit(a) ? b : a) : std::fmax(a, b);
}

template <class To, class From> inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are kept");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline int __double2loint(double x) {
  return static_cast<int>(same_bits<unsigned long long>(x) & 0xffffffffu);
}
inline double __hiloint2double(int hi, int lo) {
  return same_bits<double>(static_cast<unsigned long long>(static_cast<unsigned>(hi)) << 32 |
                           static_cast<unsigned>(lo));
}
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double cospi(double x) { return std::cos(3.141592653589793 * x); }
