// Accumulators straight to global memory: 16 rows of a warp.
#pragma once
#include "../prim/barrier.cuh"
#include "../prim/convert.cuh"
#include "../prim/copy.cuh"
#include "../prim/exchange.cuh"
#include "../prim/reduce.cuh"

// The two of a warp's rows that a lane has a part in.
template <class T> struct OutputRows {
  T* at[2];  // column 0
  float factor[2];
  bool zero[2];    // zeros, whatever was summed up
  bool inside[2];  // otherwise nothing is written
};

// `words` with what stands in `other` where an element, of 16 or 32 bits, is NaN.
template <class T> CUFA2_DEVICE Words where_nan(Words words, const Words& other) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    u32 nan;
    if constexpr (is_same<T, float>) {
      const float f = __uint_as_float(words.word[w]);
      nan = f != f ? 0xffffffffu : 0u;
    } else {
      const Float2 f = unpack2<T>(words.word[w]);
      nan = (f.lo != f.lo ? 0xffffu : 0u) | (f.hi != f.hi ? 0xffff0000u : 0u);
    }
    words.word[w] = (words.word[w] & ~nan) | (other.word[w] & nan);
  }
  return words;
}

// Makes zeros of rows that are to be zeros: NaN times their factor is none. Rare, and so a branch.
template <class Acc, class T> CUFA2_DEVICE void clear_rows(Acc& x, const OutputRows<T>& rows) {
  if (!warp_any(rows.zero[0] || rows.zero[1])) return;
#pragma unroll
  for (int n = 0; n < Acc::N_TILES; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (rows.zero[e >> 1]) x.at[0][n][e] = 0.0f;
    }
}

// Writes factor * x, 8 N columns from `column` on as far as there are `columns`. Two lanes
// exchange words so that each writes 8 bytes: code that runs once a tile costs by its length.
// MEND: only where NaN was written before, by the same threads.
template <bool MEND, class T, int N>
CUFA2_DEVICE void store_columns(const OutputRows<T>& rows, const float (&x)[N][4], int column,
                                int columns) {
  static_assert(N % 2 == 0, "two lanes have two words each");
  const int t = thread_index() % 4, odd = t % 2;
  Words words[2][N / 2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      // Adding 0 turns the -0 that a negative factor makes of an empty sum into 0.
      const float lo = fmaf(x[n][2 * r], rows.factor[r], 0.0f);
      const float hi = fmaf(x[n][2 * r + 1], rows.factor[r], 0.0f);
      words[r][n / 2].word[n % 2] = pack2<T>(lo, hi);
    }
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < N / 2; ++n) pair_exchange(words[r][n].word, odd);
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      const int tile = column + 16 * n + 8 * odd;
      if (!rows.inside[r] || tile >= columns) continue;
      T* const at = rows.at[r] + tile + 2 * (t - odd);
      if constexpr (MEND) words[r][n] = where_nan<T>(load_global_8(at), words[r][n]);
      store_global_8(at, words[r][n]);
    }
}

// All columns of an accumulator, as many at once as registers allow.
template <class T, class Acc>
CUFA2_DEVICE void store_rows(const OutputRows<T>& rows, const Acc& x, int columns) {
  constexpr int kTiles = Acc::N_TILES % 8 ? 4 : 8;
#pragma unroll
  for (int n = 0; n < Acc::N_TILES; n += kTiles) {
    const auto& part = reinterpret_cast<const float(&)[kTiles][4]>(x.at[0][n]);
    store_columns<false>(rows, part, 8 * n, columns);
  }
}
