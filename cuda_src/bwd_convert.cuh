// dq = softmax_scale * (the sums that the key blocks have left in the float32 buffer), rounded.
//
// One block does kWorkRows rows of one head. A thread takes 8 columns of rows g and g + 8 of a
// fragment: 64 neighbouring bytes of the buffer, two 16-byte chunks of dq.
#pragma once
#include "attn/features.cuh"
#include "attn/grad_q.cuh"
#include "prim/barrier.cuh"
#include "prim/copy.cuh"

template <class T_, int D_, int> struct ConvertTile {
  using T = T_;
  static constexpr int D = D_, kThreads = 256;
};

template <class Tile> CUFA2_DEVICE void bwd_convert(const BwdParams& p) {
  using T = typename Tile::T;
  constexpr int kFragments = Tile::D / 8;  // columns of fragments
  const int tiles = p.rows / kWorkRows;
  const i64 block = blockIdx.x + static_cast<i64>(blockIdx.y) * gridDim.x;
  const i64 batch_head = block / tiles;
  if (batch_head >= p.heads_total) return;
  const i64 batch = batch_head / p.num_heads;
  const int head = static_cast<int>(batch_head - batch * p.num_heads);
  const int first = static_cast<int>(block - batch_head * tiles) * kWorkRows;
  const Lengths len(p, batch);
  const float* sum = p.dq_sum + (batch_head * p.rows + first) * Tile::D;
  T* dq = static_cast<T*>(p.dq) + batch * p.dq_stride.batch + head * p.dq_stride.head;
  for (int c = thread_index(); c < kWorkRows / 2 * kFragments; c += Tile::kThreads) {
    const int n = c % kFragments, g = c / kFragments % 8, r = c / (8 * kFragments);
    Chunk lane[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      lane[t] = load_global_16(sum + GradQBuffer<Tile::D>::offset(r, n, 4 * g + t, 0));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = first + 16 * r + 8 * h + g;
      if (i >= p.seqlen_q || 8 * n >= p.head_dim) continue;
      Chunk out;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        // Adding 0 turns the -0 that a negative scale makes of an empty sum into 0.
        const float lo = fmaf(__uint_as_float(lane[t].word[2 * h]), p.scale, 0.0f);
        const float hi = fmaf(__uint_as_float(lane[t].word[2 * h + 1]), p.scale, 0.0f);
        out.word[t] = i < len.q ? pack2<T>(lo, hi) : 0u;
      }
      store_global_16(dq + i * p.dq_stride.row + 8 * n, out);
    }
  }
}
