// What the backward pass needs of every query row, before it starts:
//
//   delta[i] = sum_d dO[i,d] O[i,d] - dlse[i],   row_lse[i] = lse[i] (/ ln 2 for 16-bit inputs)
//
// in the type of lse, and a cleared dQ, or buffer for its sums, where key tiles add it up. Rows
// that see no key, and the rows that fill up the last tile, get row_lse = +inf and delta = 0: P =
// exp(s - inf) is 0 there, whatever memory holds.
//
// One block does kWorkRows rows of one head; eight neighbouring lanes share a row.
#pragma once
#include "attn/features.cuh"
#include "prim/barrier.cuh"
#include "prim/wide.cuh"

template <class T> struct SumOf { using Type = float; };
template <> struct SumOf<double> { using Type = double; };

template <class T_, int D_, int> struct DeltaTile {
  using T = T_;
  using Sum = typename SumOf<T>::Type;
  static constexpr int D = D_;  // of the dQ buffer
  static constexpr int kThreads = 256, kLanes = 8;
  // Scores of 16-bit inputs meet lse in base 2. Those of wider ones meet it as it is: it would
  // lose an error of its own.
  static constexpr Sum kLseScale = sizeof(T) == 2 ? ::kLog2E : 1;
};

template <class T>
CUFA2_DEVICE typename SumOf<T>::Type dot_chunk(const Chunk& a, const Chunk& b) {
  typename SumOf<T>::Type sum = 0;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const Float2 x = unpack2<T>(a.word[w]), y = unpack2<T>(b.word[w]);
      sum = fmaf(x.lo, y.lo, fmaf(x.hi, y.hi, sum));
    }
  } else {
    const auto& x = reinterpret_cast<const Piece<T>&>(a);
    const auto& y = reinterpret_cast<const Piece<T>&>(b);
#pragma unroll
    for (int i = 0; i < Piece<T>::kSize; ++i) sum = fma(x.at[i], y.at[i], sum);
  }
  return sum;
}

// Clears kWorkRows rows of dq from `first` on, where key tiles add it up in place.
template <class T, int THREADS>
CUFA2_DEVICE void clear_dq(const BwdParams& p, i64 batch, int head, int first) {
  constexpr int kChunk = 16 / sizeof(T);
  T* dq = static_cast<T*>(p.dq) + batch * p.dq_stride.batch + head * p.dq_stride.head;
  const int chunks = p.head_dim / kChunk;
  for (int c = thread_index(); c < kWorkRows * chunks; c += THREADS) {
    const int i = first + c / chunks;
    if (i < p.seqlen_q) {
      store_global_16(dq + i * p.dq_stride.row + c % chunks * kChunk, {{0u, 0u, 0u, 0u}});
    }
  }
}

template <class Tile> CUFA2_DEVICE void bwd_delta(const BwdParams& p) {
  using T = typename Tile::T;
  using Sum = typename Tile::Sum;
  constexpr int kChunk = 16 / sizeof(T);
  const int tiles = p.rows / kWorkRows, thread = thread_index();
  const i64 block = blockIdx.x + static_cast<i64>(blockIdx.y) * gridDim.x;
  const i64 batch_head = block / tiles;
  if (batch_head >= p.heads_total) return;
  const i64 batch = batch_head / p.num_heads;
  const int head = static_cast<int>(batch_head - batch * p.num_heads);
  const int first = static_cast<int>(block - batch_head * tiles) * kWorkRows;
  const Lengths len(p, batch);
  const i64 work = batch_head * p.rows + first;  // first row in the work arrays

  if constexpr (sizeof(T) > 2) {
    if (p.dq_sum) clear_dq<T, Tile::kThreads>(p, batch, head, first);
  } else if (p.dq_sum) {
    float* sum = p.dq_sum + work * Tile::D;
    for (int c = thread; c < kWorkRows * Tile::D / 4; c += Tile::kThreads) {
      store_global_16(sum + 4 * c, {{0u, 0u, 0u, 0u}});
    }
  }

  const T* o = static_cast<const T*>(p.o) + batch * p.o_stride.batch + head * p.o_stride.head;
  const T* grad_o = static_cast<const T*>(p.grad_o) + batch * p.grad_o_stride.batch +
                    head * p.grad_o_stride.head;
  const auto* lse = static_cast<const Sum*>(p.lse) + batch * p.lse_stride.batch +
                    head * p.lse_stride.head;
  const auto* dlse = static_cast<const Sum*>(p.dlse) + batch * p.dlse_stride.batch +
                     head * p.dlse_stride.head;
  const int lane = thread % Tile::kLanes;
#pragma unroll
  for (int row = thread / Tile::kLanes; row < kWorkRows; row += Tile::kThreads / Tile::kLanes) {
    const int i = first + row;
    const Sum log_sum = i < len.q ? lse[i * p.lse_stride.row] : Sum(-inf());
    const bool empty = log_sum == Sum(-inf());
    Sum delta = 0;
    if (!empty) {
      for (int c = lane; c * kChunk < p.head_dim_v; c += Tile::kLanes) {
        delta += dot_chunk<T>(load_global_16(grad_o + i * p.grad_o_stride.row + kChunk * c),
                              load_global_16(o + i * p.o_stride.row + kChunk * c));
      }
    }
    delta = eighth_sum(delta);
    if (lane == 0) {
      if (!empty && p.dlse) delta -= dlse[i * p.dlse_stride.row];
      static_cast<Sum*>(p.delta)[work + row] = delta;
      static_cast<Sum*>(p.row_lse)[work + row] = empty ? Sum(inf()) : log_sum * Tile::kLseScale;
    }
  }
}
