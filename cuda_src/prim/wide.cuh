// What float32 and float64 elements travel in, and their arithmetic outside the tensor cores.
#pragma once
#include "copy.cuh"
#include "reduce.cuh"

// 16 bytes of elements: what one lane reads or writes at once.
template <class T> struct alignas(16) Piece {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

template <class T> CUFA2_DEVICE Piece<T> load_piece(u32 shared) {
  const Chunk c = load_shared_16(shared);
  return reinterpret_cast<const Piece<T>&>(c);
}
template <class T> CUFA2_DEVICE void store_piece(u32 shared, const Piece<T>& p) {
  store_shared_16(shared, reinterpret_cast<const Chunk&>(p));
}

// One element, and two neighbours at a multiple of their size.
template <class T> CUFA2_DEVICE T load_element(u32 shared) {
  if constexpr (is_same<T, float>) return __uint_as_float(load_shared_4(shared));
  else {
    const Pair x = load_shared_8(shared);
    return __hiloint2double(__float_as_int(x.hi), __float_as_int(x.lo));
  }
}
template <class T> CUFA2_DEVICE void load_two(T& first, T& second, u32 shared) {
  if constexpr (is_same<T, float>) {
    const Pair x = load_shared_8(shared);
    first = x.lo, second = x.hi;
  } else {
    const Piece<T> x = load_piece<T>(shared);
    first = x.at[0], second = x.at[1];
  }
}

template <class T> CUFA2_DEVICE void store_two(u32 shared, T first, T second) {
  if constexpr (is_same<T, float>) store_shared_8(shared, {first, second});
  else store_piece<T>(shared, {{first, second}});
}

template <class T> CUFA2_DEVICE bool is_finite(T x) { return fabs(x) < T(inf()); }

// The larger one; a NaN in b is ignored. fmax(double) would mind a NaN in a as well, at twice the
// instructions.
CUFA2_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
CUFA2_DEVICE double larger(double a, double b) { return b > a ? b : a; }
