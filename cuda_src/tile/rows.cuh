// Accumulators straight to global memory: a warp's 16 rows, in 16-byte chunks.
#pragma once
#include "../prim/barrier.cuh"
#include "../prim/convert.cuh"
#include "../prim/copy.cuh"
#include "../prim/exchange.cuh"

// The two of a warp's rows that a lane has a part in.
template <class T> struct OutputRows {
  T* at[2];  // column 0
  float factor[2];
  bool zero[2];    // zeros, whatever was summed up
  bool inside[2];  // otherwise nothing is written
};

// `chunk` with what stands in `other` where it has NaN.
template <class T> CUFA2_DEVICE Chunk where_nan(Chunk chunk, const Chunk& other) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const Float2 f = unpack2<T>(chunk.word[w]);
    const u32 nan = (f.lo != f.lo ? 0xffffu : 0u) | (f.hi != f.hi ? 0xffff0000u : 0u);
    chunk.word[w] = (chunk.word[w] & ~nan) | (other.word[w] & nan);
  }
  return chunk;
}

// Writes factor * x, 8 N columns from `column` on as far as there are `columns`. The lanes of a
// quad exchange elements so that each writes whole chunks. MEND: only where NaN was written
// before, by the same threads.
template <bool MEND, class T, int N>
CUFA2_DEVICE void store_columns(const OutputRows<T>& rows, const float (&x)[N][4], int column,
                                int columns) {
  static_assert(N % 4 == 0, "a quad has four chunks to write");
  const int t = thread_index() % 4;
  // Columns 2 t.. of tiles n; wanted: all columns of tile t of every four.
  u32 words[N / 2][4];
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Adding 0 turns the -0 that a negative factor makes of an empty sum into 0.
      const float lo = fmaf(x[n][2 * r], rows.factor[r], 0.0f);
      const float hi = fmaf(x[n][2 * r + 1], rows.factor[r], 0.0f);
      const u32 rounded = pack2<T>(lo, hi);
      words[n / 4 * 2 + r][n % 4] = rows.zero[r] ? 0u : rounded;
    }
  quad_transpose(words, t);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int first = column + i / 2 * 32 + 8 * t;
    if (!rows.inside[i % 2] || first >= columns) continue;
    Chunk chunk{{words[i][0], words[i][1], words[i][2], words[i][3]}};
    T* const at = rows.at[i % 2] + first;
    if constexpr (MEND) chunk = where_nan<T>(load_global_16(at), chunk);
    store_global_16(at, chunk);
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
