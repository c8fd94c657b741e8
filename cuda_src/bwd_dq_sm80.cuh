// dQ on mma.sync tensor cores without atomics, for calls that must repeat to the bit.
//
//   P = exp(s - lse);  dP = dO V^T;  dS = P (dP - delta);  dQ = scale dS K   (policies in s, dS)
//
// One block owns BLOCK_Q query rows of one head and walks over the key blocks its mask leaves, as
// the forward does: a warp's scores stay in its registers, dS is the A operand of dQ += dS K, and
// K and V are double-buffered. S and dP are computed a second time (bwd_sm80.cuh has done so for
// dK and dV): seven products in all instead of five.
//
// NaN never leaks from a masked pair: dS is selected there, and should one still come up through
// 0 * NaN, the tile is done again by multiply_kept.
#pragma once
#include "attn/query_walk.cuh"
#include "tile/store.cuh"

template <class T_, int D_, int DV_, int BLOCK_Q_, int BLOCK_K_, int WARPS_> struct DqTile {
  using T = T_;
  static constexpr int D = D_, DV = DV_, BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_;
  static constexpr int kThreads = 32 * WARPS_;
  static constexpr int M_TILES = BLOCK_Q / (16 * WARPS_);
  static_assert(BLOCK_Q == 16 * WARPS_ * M_TILES, "warps split the query rows evenly");

  using Q = SmemTile<BLOCK_Q, D>;
  using GradO = SmemTile<BLOCK_Q, DV>;
  using K = SmemTile<BLOCK_K, D>;
  using V = SmemTile<BLOCK_K, DV>;
  using Scores = Accumulator<M_TILES, BLOCK_K / 8>;
  using GradQ = Accumulator<M_TILES, D / 8>;

  // First row of a thread's warp within the tile.
  static CUFA2_DEVICE int warp_row(int thread) { return thread / 32 * 16 * M_TILES; }

  static constexpr int kGradO = Q::kBytes, kRows = kGradO + GradO::kBytes;
  static constexpr int kK = kRows + 2 * 4 * BLOCK_Q;  // after row_lse and delta of the rows
  static constexpr int kStage = K::kBytes + V::kBytes;
  static constexpr int kBytes = kK + 2 * kStage;
};

// Walks over the key blocks and leaves in dq the columns from `column` on. KEPT: masked blocks
// take the product that lets no NaN reach a row that does not keep its key.
template <class Tile, bool KEPT, class Score, class Frame, class GradQ>
CUFA2_DEVICE void walk(const BwdParams& p, const Frame& frame, const Score& score, u32 memory,
                       GradQ& dq, int column) {
  using T = typename Tile::T;
  using Scores = typename Tile::Scores;
  constexpr int BLOCK_K = Tile::BLOCK_K, M_TILES = Tile::M_TILES;
  const Work& work = frame.work;

  auto load_kv = [&](int block, u32 stage) {
    const int key = block * BLOCK_K, keys_left = frame.len.k - key, thread = thread_index();
    const int head = work.head / p.group;
    const T* k = static_cast<const T*>(p.k) + work.batch * p.k_stride.batch +
                 head * p.k_stride.head + key * p.k_stride.row;
    const T* v = static_cast<const T*>(p.v) + work.batch * p.v_stride.batch +
                 head * p.v_stride.head + key * p.v_stride.row;
    TileLoader<typename Tile::K, Tile::kThreads>::load(memory + Tile::kK + stage, k,
                                                       p.k_stride.row, keys_left, p.head_dim,
                                                       thread);
    TileLoader<typename Tile::V, Tile::kThreads>::load(
        memory + Tile::kK + stage + Tile::K::kBytes, v, p.v_stride.row, keys_left, p.head_dim_v,
        thread);
    cp_async_commit();
  };

  if (frame.last >= frame.first) {
    const int thread = thread_index(), rows_left = frame.len.q - work.q_begin;
    const T* q = static_cast<const T*>(p.q) + work.batch * p.q_stride.batch +
                 work.head * p.q_stride.head + work.q_begin * p.q_stride.row;
    const T* grad_o = static_cast<const T*>(p.grad_o) + work.batch * p.grad_o_stride.batch +
                      work.head * p.grad_o_stride.head + work.q_begin * p.grad_o_stride.row;
    TileLoader<typename Tile::Q, Tile::kThreads>::load(memory, q, p.q_stride.row, rows_left,
                                                       p.head_dim, thread);
    TileLoader<typename Tile::GradO, Tile::kThreads>::load(
        memory + Tile::kGradO, grad_o, p.grad_o_stride.row, rows_left, p.head_dim_v, thread);
    load_kv(frame.last, 0);
  }
  // The work arrays end with the last whole tile of kWorkRows, this tile may not.
  for (int n = thread_index(); n < Tile::BLOCK_Q; n += Tile::kThreads) {
    const bool real = work.q_begin + n < frame.len.q;
    const i64 i = (work.batch * p.num_heads + work.head) * p.rows + work.q_begin + n;
    const float lse = real ? static_cast<const float*>(p.row_lse)[i] : inf();
    const float delta = real ? static_cast<const float*>(p.delta)[i] : 0.0f;
    store_shared_8(memory + Tile::kRows + 8 * n, {lse, delta});
  }
  u32 stage = 0;
  for (int block = frame.last; block >= frame.first; --block) {
    cp_async_wait<0>();
    block_sync();  // this block's K and V are visible; the other buffer is free
    if (block > frame.first) load_kv(block - 1, stage ^ Tile::kStage);
    const u32 k_tile = memory + Tile::kK + stage, v_tile = k_tile + Tile::K::kBytes;
    const int thread = thread_index(), lane = thread % 32, row = Tile::warp_row(thread);
    const auto q = FragmentReader<typename Tile::Q>::by_row(memory + row * Tile::Q::kRowBytes,
                                                            lane);
    const auto grad_o = FragmentReader<typename Tile::GradO>::by_row(
        memory + Tile::kGradO + row * Tile::GradO::kRowBytes, lane);
    const auto k = FragmentReader<typename Tile::K>::by_pair(k_tile, lane);
    const auto v = FragmentReader<typename Tile::V>::by_pair(v_tile, lane);
    Scores s, ds;
    s.clear();
    multiply<T, Tile::D / 16>(
        s, [&](u32 (&a)[4], int m, int kk) { q.load(a, m, kk); },
        [&](u32 (&b)[4], int n, int kk) { k.load(b, n, kk); });
    ds.clear();
    multiply<T, Tile::DV / 16>(
        ds, [&](u32 (&a)[4], int m, int kk) { grad_o.load(a, m, kk); },
        [&](u32 (&b)[4], int n, int kk) { v.load(b, n, kk); });
    const bool masked = block < frame.full_first || block >= frame.full_beyond;
    u32 weights[BLOCK_K / 16][M_TILES][4];
#pragma unroll
    for (int r = 0; r < Scores::kRows; ++r) {
      const Pair lse_delta =
          load_shared_8(memory + Tile::kRows + 8 * (row + Scores::row(lane, r)));
      int begin = 0, end = BLOCK_K;  // visible columns, counted from the lane's first
      if (masked) {
        const int i = work.q_begin + row + Scores::row(lane, r);
        const RowRange range = frame.mask.row_range(i);
        const int origin = block * BLOCK_K + Scores::column(lane, 0, 0);
        begin = range.begin - origin;
        end = range.end - origin;
      }
#pragma unroll
      for (int n = 0; n < Scores::N_TILES; ++n) {
        float weight[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int e = 2 * (r & 1) + c, at = Scores::column(0, n, c);
          const float logit = score.score(s.at[r >> 1][n][e]);
          float x = exp2_approx(fmaf(logit, p.scale_log2, -lse_delta.lo));
          if constexpr (!Score::kIdentity) x *= score.grad(logit);
          x *= ds.at[r >> 1][n][e] - lse_delta.hi;
          weight[c] = masked && (at < begin || at >= end) ? 0.0f : x;
        }
        weights[n / 2][r / 2][2 * (n % 2) + r % 2] = pack2<T>(weight[0], weight[1]);
      }
    }
    const auto k_rows = FragmentReader<typename Tile::K>::by_row(k_tile, thread_index() % 32);
    auto load_a = [&](u32 (&a)[4], int m, int kk) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = weights[kk][m][e];
    };
    auto load_b = [&](u32 (&b)[4], int n, int kk) { k_rows.load_trans(b, kk, column / 16 + n); };
    if (KEPT && masked) {
      const int i = work.q_begin + row + lane / 4, j = block * BLOCK_K + 2 * (lane % 4);
      multiply_kept<T, BLOCK_K / 16>(dq, load_a, load_b,
                                     [&](int r, int c) { return frame.mask.keep(i + r, j + c); });
    } else {
      multiply<T, BLOCK_K / 16>(dq, load_a, load_b);
    }
    stage ^= Tile::kStage;
  }
  block_sync();  // every warp is done with the tiles
}

template <class Tile, class Mask, class Score> CUFA2_DEVICE void bwd_dq_sm80(const BwdParams& p) {
  using T = typename Tile::T;
  using Frame = QueryFrame<Tile, Mask>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ __align__(16) unsigned char frame_memory[sizeof(Frame)];
  auto& frame = *reinterpret_cast<Frame*>(frame_memory);
  const Work work = find_work<Tile::BLOCK_Q>(p);
  if (!work.valid) return;
  if (thread_index() == 0) frame = Frame(p, work);
  block_sync();
  const Score score(p);
  const u32 memory = shared_address(shared_memory);

  T* out = static_cast<T*>(p.dq) + work.batch * p.dq_stride.batch +
           work.head * p.dq_stride.head + work.q_begin * p.dq_stride.row;
  const int rows = p.seqlen_q - work.q_begin, real = frame.len.q - work.q_begin;
  typename Tile::GradQ dq;
  dq.clear();
  walk<Tile, false>(p, frame, score, memory, dq, 0);
  const bool nan = dq.has_nan();
  stage<typename Tile::Q, T, 1>(memory, dq, p.scale, Tile::warp_row(thread_index()), 0, 0);
  block_sync();
  store_rows<typename Tile::Q, Tile::kThreads>(memory, out, p.dq_stride.row, rows, real, 0,
                                               p.head_dim);
  if constexpr (Mask::kPerRow) {
    if (!block_any(nan)) return;
    // Rare: once more, 32 columns at a time, so that the longer product has registers.
#pragma unroll 1
    for (int column = 0; column < Tile::D; column += 32) {
      block_sync();  // the tile has been stored
      Accumulator<Tile::M_TILES, 4> part;
      part.clear();
      walk<Tile, true>(p, frame, score, memory, part, column);
      stage<typename Tile::Q, T, 1>(memory, part, p.scale, Tile::warp_row(thread_index()), column,
                                    0);
      block_sync();
      store_rows<typename Tile::Q, Tile::kThreads>(memory, out, p.dq_stride.row, rows, real,
                                                   column, min(p.head_dim, column + 32));
    }
  }
}
