// Products of float32 and float64 fragments over shared tiles, and accumulators on their way out.
//
// float64 has its own tensor-core product. A float32 one is three TF32 products of the operands'
// halves (prim/wide_mma.cuh), or one where precision="tf32" asks for it. The tensor core cuts
// where an addition should round, always towards zero, so that over thousands of terms one sum
// would drift. Sums of float32 start afresh with every 16 terms, the small products first, so that
// only two products meet a large sum, and are added to the rest by an ordinary addition: errors
// stay at those of a plain float32 loop or below (with 32 terms they would be up to half as large
// again). Sums of float64 over rows start afresh for the length's sake: one chain of thousands of
// additions would round ten times as far off as the blocked sums of a matrix library.
#pragma once
#include "../prim/wide_mma.cuh"
#include "wide.cuh"

// D += A B^T over COLUMNS columns of two [row][column] tiles. With one TF32 product per element D
// is a single sum: its few steps lose nothing that the rounding of the operands has not. Products
// of halves are many: where they stand in one piece of code, ptxas keeps more of them in flight
// than there are registers, so they come in a loop that is not unrolled.
template <bool TF32, int COLUMNS, class T, int M_TILES, int N_TILES, class A, class B>
CUFA2_DEVICE void multiply_rows(WideAccumulator<T, M_TILES, N_TILES>& d, const A& a_rows,
                                const B& b_rows) {
  constexpr bool kHalves = is_same<T, float> && !TF32;
  constexpr int kSteps = B::kRun, kTurns = B::kSteps / kSteps;  // of a stretch
#pragma unroll (kHalves ? 1 : kTurns)
  for (int turn = 0; turn < COLUMNS / (8 * kSteps); ++turn) {
    const int stretch = turn / kTurns, step = turn % kTurns * kSteps;
    Operand<T, TF32, 4> a[M_TILES][kSteps];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        T x[4];
        a_rows.load_a(x, m, stretch, step + i);
#pragma unroll
        for (int e = 0; e < 4; ++e) a[m][i].set(e, x[e]);
      }
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      T x[kSteps][2];
      b_rows.load_run(x, n, stretch, step);
      Operand<T, TF32, 2> b[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) b[i].set(e, x[i][e]);
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) accumulate<kHalves>(d.at[m][n], a[m], b);
    }
  }
}

// D += A B over K rows of STRETCHES stretches of a [row][column] tile, of which `columns` columns
// are real, into the tiles of D from `first` on. `load_a(x, m, kk)` gives a lane's elements of the
// 16 x 8 accumulator tile (m, kk) that is the A operand; from registers it can only where the loop
// over K is not ROLLED. SAFE: of B only what is finite.
template <bool TF32, bool SAFE, bool ROLLED, int K, int STRETCHES, class T, int M_TILES,
          int N_TILES, class LoadA, class B>
CUFA2_DEVICE void multiply_columns(WideAccumulator<T, M_TILES, N_TILES>& d, int first,
                                   const LoadA& load_a, const B& b_rows, int columns) {
  constexpr int kPiece = Piece<T>::kSize, kStretch = 8 * kPiece;
  // Steps of 8 rows in a fresh sum.
  constexpr int kMost = is_same<T, float> || ROLLED ? 2 : 4;
  constexpr int kSteps = K % (8 * kMost) == 0 ? kMost : K % 16 == 0 ? 2 : 1;
  constexpr int kTurns = K / (8 * kSteps);
#pragma unroll (ROLLED ? 1 : kTurns)
  for (int turn = 0; turn < kTurns; ++turn) {
    Operand<T, TF32, 4> a[M_TILES][kSteps];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        T x[4];
        load_a(x, m, turn * kSteps + i);
#pragma unroll
        for (int e = 0; e < 4; ++e) a[m][i].set(e, x[2 * (e & 1) + (e >> 1)]);
      }
#pragma unroll
    for (int stretch = 0; stretch < STRETCHES; ++stretch) {
      if (stretch * kStretch >= columns) break;
      Piece<T> rows[kSteps][2];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) b_rows.load(rows[i], 8 * (turn * kSteps + i), stretch);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        Operand<T, TF32, 2> b[kSteps];
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const T x = rows[i][e].at[j];
            if constexpr (SAFE) b[i].set_finite(e, is_finite(x) ? x : T(0));
            else b[i].set(e, x);
          }
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          accumulate<true>(d.at[m][first + kPiece * stretch + j], a[m], b);
        }
      }
    }
  }
}

// Adds what multiply_columns<SAFE> left out: the NaN and Inf of the K rows at `tile`, to the rows
// of D that keep them. `keep(r, k)`: whether the lane's r-th row keeps row k.
template <class Smem, int K, int STRETCHES, class T, int M_TILES, int N_TILES, class Keep>
CUFA2_DEVICE void add_nonfinite(WideAccumulator<T, M_TILES, N_TILES>& d, int first, u32 tile,
                                const Keep& keep) {
  constexpr int kPiece = Piece<T>::kSize;
  const int lane = thread_index() % 32;
#pragma unroll 1
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int stretch = 0; stretch < STRETCHES; ++stretch)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Piece<T> piece = load_piece<T>(tile + 128 * stretch +
                                             Smem::offset(k, pair_chunk<T>(lane % 4, c)));
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          if (is_finite(piece.at[i])) continue;
#pragma unroll
          for (int r = 0; r < 2 * M_TILES; ++r) {
            const int n = first + kPiece * stretch + i;
            if (keep(r, k)) d.at[r >> 1][n][2 * (r & 1) + c] += piece.at[i];
          }
        }
      }
}

// The product of row i of one tile and row j of another, by plain arithmetic. Products of halves
// that are not finite may be wrong: the halves of Inf, or of a value that rounds to it, make NaN
// of any product, and where products overflow a small one of the other sign may do so first.
template <class A, class B, class T>
CUFA2_DEVICE T plain_product(u32 a_tile, int i, u32 b_tile, int j, int columns, T sum) {
#pragma unroll 1
  for (int c = 0; c < columns / Piece<T>::kSize && sum == sum; ++c) {
    const Piece<T> a = load_piece<T>(a_tile + A::offset(i, c));
    const Piece<T> b = load_piece<T>(b_tile + B::offset(j, c));
#pragma unroll
    for (int e = 0; e < Piece<T>::kSize; ++e) sum = fma(a.at[e], b.at[e], sum);
  }
  return sum;
}

// Adds the real `columns` columns of a stretch of D to a row at `out` (its first column),
// in no defined order: of the D tiles from `first` on the lane's row `h`.
template <class T, int N_TILES>
CUFA2_DEVICE void add_row(T* out, const T (&d)[N_TILES][4], int first, int h, int columns) {
  constexpr int kPiece = Piece<T>::kSize;
  const int t = thread_index() % 4;
  if constexpr (is_same<T, float>) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = pair_chunk<T>(t, c) * kPiece;
      T piece[kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) piece[j] = d[first + j][2 * h + c];
      reduce_add_4(out + column, piece, column < columns);
    }
  } else {
    // A lane has four columns side by side. L2 takes a sector, all four, no faster for one of
    // them: each instruction adds whole sectors.
    T x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = d[first + e % 2][2 * h + e / 2];
    quad_transpose(x);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      reduce_add(out + 4 * e + t, x[e], 4 * e + t < columns);
    }
  }
}

// Writes the real `columns` columns of D to a tensor whose element (row 0 of the warp, column 0 of
// D) is at `out`. Rows at or past `rows` are left alone, those from `real` on get
// zeros.
template <class T, int M_TILES, int N_TILES>
CUFA2_DEVICE void store_columns(const WideAccumulator<T, M_TILES, N_TILES>& d, T* out,
                                i64 row_stride, int rows, int real, int columns) {
  constexpr int kPiece = Piece<T>::kSize;
  const int lane = thread_index() % 32;
#pragma unroll
  for (int r = 0; r < 2 * M_TILES; ++r) {
    const int i = WideAccumulator<T, M_TILES, N_TILES>::row(lane, r);
    if (i >= rows) continue;
#pragma unroll
    for (int n = 0; n < N_TILES; n += kPiece)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * n + pair_chunk<T>(lane % 4, c) * kPiece;
        if (column >= columns) continue;
        Piece<T> piece;
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          // Adding 0 turns the -0 of an empty sum of negative zeros into 0.
          piece.at[j] = i < real ? d.at[r >> 1][n + j][2 * (r & 1) + c] + T(0) : T(0);
        }
        *reinterpret_cast<Piece<T>*>(out + i * row_stride + column) = piece;
      }
  }
}
