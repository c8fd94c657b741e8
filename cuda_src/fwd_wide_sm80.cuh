// Forward attention for float32 and float64 on mma.sync tensor cores; compute capability 8.0 up.
//
//   o[i] = sum_j exp(s[i,j] - lse[i]) v[j],   s = softmax_scale q k^T (+ policies)
//
// The loop of fwd_sm80.cuh: a block owns BLOCK_Q query rows and walks over its key blocks from the
// last to the first, S and P stay in registers. What differs comes from the width of the types.
//
// Products: float64 has its own tensor-core product. A float32 one is three TF32 products of the
// operands' halves (prim/wide.cuh), or one if precision="tf32" asks for it. The tensor core cuts
// where an addition should round, always towards zero, so that thousands of additions to one
// accumulator would drift: float32 sums start fresh with every 16 columns of S and every 8 keys of
// O, and are added to the rest by an ordinary, rounding addition.
//
// Memory: K and V blocks take turns in a ring of SLOTS slots. Each is waited for when its turn
// comes, and the barrier that publishes it also frees the slot before it for the next load. Two
// slots are enough where one product outlasts a load, and leave room for large Q.
//
// SPLIT: where a warp could not hold its rows of O, or not two tiles of them to share each piece
// of K and V, SPLIT warps share 16 * M_TILES rows. Each multiplies its part of the columns of Q
// and K; the partial S are summed through shared memory, in the same order in all SPLIT warps, so
// that they see the same P; each then owns its part of the columns of O.
//
// NaN: as in fwd_sm80.cuh none leaks from a masked key, a tile with NaN in O is done again by the
// path that keeps V's non-finite values out of the products. At float32 accuracy the halves of a
// non-finite or huge operand make NaN of any product, whatever it should be, so there the tile is
// done again under every mask, and scores that are NaN are computed anew, one by one.
#pragma once
#include "attn/features.cuh"
#include "attn/schedule.cuh"
#include "prim/barrier.cuh"
#include "tile/wide.cuh"

template <class T_, bool TF32_, int D_, int DV_, int BLOCK_Q_, int BLOCK_K_, int WARPS_, int SPLIT_,
          int SLOTS_>
struct WideTile {
  using T = T_;
  static constexpr bool kTf32 = TF32_, kHalves = is_same<T, float> && !kTf32;
  static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_, WARPS = WARPS_;
  static constexpr int SPLIT = SPLIT_, SLOTS = SLOTS_;
  static constexpr int kThreads = 32 * WARPS;
  static constexpr int M_TILES = BLOCK_Q * SPLIT / (16 * WARPS);
  static_assert(BLOCK_Q * SPLIT == 16 * WARPS * M_TILES, "warps split the query rows evenly");
  static_assert(WARPS % SPLIT == 0 && WARPS / SPLIT < 16, "one named barrier per SPLIT warps");
  static_assert(SLOTS >= 2 && SLOTS <= 4, "the loop looks at most two key blocks ahead");

  static constexpr int kPiece = Piece<T>::kSize;
  static constexpr int kStretch = 8 * kPiece;  // columns of 128 bytes
  static constexpr int whole(int columns) {    // every one of SPLIT warps gets whole stretches
    return (columns + kStretch * SPLIT - 1) / (kStretch * SPLIT) * (kStretch * SPLIT);
  }
  static constexpr int D = whole(D_), DV = whole(DV_);
  static constexpr int kColumnsD = D / SPLIT, kColumnsDv = DV / SPLIT;  // of one warp
  // Key steps (of 8) whose products share a fresh sum. One TF32 product is too cheap for a fresh
  // sum of its own.
  static constexpr int kSteps = kTf32 ? (BLOCK_K < 32 ? BLOCK_K / 8 : 4) : 1;

  static constexpr int kUnits = sizeof(T) / 2;  // SmemTile counts 16-bit elements
  using Q = SmemTile<BLOCK_Q, D * kUnits>;
  using K = SmemTile<BLOCK_K, D * kUnits>;
  using V = SmemTile<BLOCK_K, DV * kUnits>;
  using Scores = WideAccumulator<T, M_TILES, BLOCK_K / 8>;
  using Output = WideAccumulator<T, M_TILES, kColumnsDv / 8>;
  static_assert(BLOCK_K % (8 * kSteps) == 0, "a key block is whole steps");

  static constexpr int kSlotBytes = K::kBytes > V::kBytes ? K::kBytes : V::kBytes;
  static constexpr int kPartBytes = 16 * M_TILES * BLOCK_K * sizeof(T);  // S of one warp
  static constexpr int kBytes =
      Q::kBytes + SLOTS * kSlotBytes + (SPLIT > 1 ? WARPS * kPartBytes : 0);

  // Which rows (in units of SPLIT warps) and which part of the columns a thread's warp has.
  static CUFA2_DEVICE int team(int thread) { return thread / (32 * SPLIT); }
  static CUFA2_DEVICE int part(int thread) { return thread / 32 % SPLIT; }
  static CUFA2_DEVICE int team_row(int thread) { return team(thread) * 16 * M_TILES; }
};

// acc += sum of a[i] b[i]; FRESH: as a sum of its own, added by a rounding addition.
template <bool FRESH, class T, int STEPS, class A, class B>
CUFA2_DEVICE void accumulate(T (&acc)[4], const A (&a)[STEPS], const B (&b)[STEPS]) {
  if constexpr (FRESH) {
    T fresh[4] = {T(0), T(0), T(0), T(0)};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) multiply_add(fresh, a[i], b[i]);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] += fresh[e];
  } else {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) multiply_add(acc, a[i], b[i]);
  }
}

// S = Q K^T for one key block, over this warp's columns.
template <class Tile, class QReader, class KReader>
CUFA2_DEVICE void multiply_qk(typename Tile::Scores& s, const QReader& q, const KReader& k) {
  using T = typename Tile::T;
  constexpr int kProducts = Tile::kPiece / 2;  // that one piece feeds
  s.clear();
#pragma unroll
  for (int step = 0; step < Tile::kColumnsD / (4 * Tile::kPiece); ++step) {
    Operand<T, Tile::kTf32, 4> a[Tile::M_TILES][kProducts];
#pragma unroll
    for (int m = 0; m < Tile::M_TILES; ++m) {
      const Piece<T> top = q.load(16 * m, step), bottom = q.load(16 * m + 8, step);
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          a[m][i].set(e, (e & 1 ? bottom : top).at[2 * i + (e >> 1)]);
        }
    }
#pragma unroll
    for (int n = 0; n < Tile::Scores::N_TILES; ++n) {
      const Piece<T> keys = k.load(8 * n, step);
      Operand<T, Tile::kTf32, 2> b[kProducts];
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) b[i].set(e, keys.at[2 * i + e]);
#pragma unroll
      for (int m = 0; m < Tile::M_TILES; ++m) accumulate<Tile::kHalves>(s.at[m][n], a[m], b);
    }
  }
}

// Adds up the partial S of the SPLIT warps of a team; `memory` has room for all warps' parts.
template <class Tile> CUFA2_DEVICE void sum_parts(typename Tile::Scores& s, u32 memory) {
  using T = typename Tile::T;
  constexpr int kPiece = Tile::kPiece, kPieces = 4 / kPiece;
  const int thread = thread_index(), lane = thread % 32;
  const u32 team = memory + Tile::team(thread) * Tile::SPLIT * Tile::kPartBytes + 16 * lane;
  const u32 own = team + Tile::part(thread) * Tile::kPartBytes;
  auto each = [&](auto action) {
#pragma unroll
    for (int m = 0; m < Tile::M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < Tile::Scores::N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          action(&s.at[m][n][kPiece * i],
                 512u * (kPieces * (Tile::Scores::N_TILES * m + n) + i));
        }
  };
  each([&](const T* from, u32 offset) {
    Piece<T> piece;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) piece.at[j] = from[j];
    store_piece(own + offset, piece);
  });
  named_sync(1 + Tile::team(thread), 32 * Tile::SPLIT);
  each([&](T* to, u32 offset) {
    Piece<T> sum = load_piece<T>(team + offset);
#pragma unroll
    for (int part = 1; part < Tile::SPLIT; ++part) {
      const Piece<T> other = load_piece<T>(team + part * Tile::kPartBytes + offset);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) sum.at[j] += other.at[j];
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) to[j] = sum.at[j];
  });
}

// O += P V for one key block, over this warp's columns. SAFE: of V only what is finite.
template <class Tile, bool SAFE, class VReader>
CUFA2_DEVICE void multiply_pv(typename Tile::Output& o, const typename Tile::Scores& p,
                              const VReader& v) {
  using T = typename Tile::T;
  constexpr int kSteps = Tile::kSteps, kPiece = Tile::kPiece;
#pragma unroll
  for (int first = 0; first < Tile::BLOCK_K / 8; first += kSteps) {
    Operand<T, Tile::kTf32, 4> a[Tile::M_TILES][kSteps];
#pragma unroll
    for (int m = 0; m < Tile::M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          a[m][i].set(e, p.at[m][first + i][2 * (e & 1) + (e >> 1)]);
        }
#pragma unroll
    for (int stretch = 0; stretch < Tile::kColumnsDv / Tile::kStretch; ++stretch) {
      Operand<T, Tile::kTf32, 2> b[kPiece][kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Piece<T> piece = v.load(8 * (first + i), stretch, e);
#pragma unroll
          for (int j = 0; j < kPiece; ++j) {
            const T x = piece.at[j];
            if constexpr (SAFE) b[j][i].set_finite(e, is_finite(x) ? x : T(0));
            else b[j][i].set(e, x);
          }
        }
#pragma unroll
      for (int j = 0; j < kPiece; ++j)
#pragma unroll
        for (int m = 0; m < Tile::M_TILES; ++m) {
          accumulate<is_same<T, float>>(o.at[m][kPiece * stretch + j], a[m], b[j]);
        }
    }
  }
}

// Adds the NaN and Inf of V to the rows that keep their keys: what multiply_pv<SAFE> left out.
template <class Tile, class Mask>
CUFA2_DEVICE void add_nonfinite(typename Tile::Output& o, u32 v_tile, const Mask& mask, int q_row,
                                int key) {
  using T = typename Tile::T;
  const int lane = thread_index() % 32;
#pragma unroll 1
  for (int j = 0; j < Tile::BLOCK_K; ++j)
#pragma unroll
    for (int stretch = 0; stretch < Tile::kColumnsDv / Tile::kStretch; ++stretch)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Piece<T> piece =
            load_piece<T>(v_tile + 128 * stretch + Tile::V::offset(j, 2 * (lane % 4) + c));
#pragma unroll
        for (int i = 0; i < Tile::kPiece; ++i) {
          if (is_finite(piece.at[i])) continue;
#pragma unroll
          for (int r = 0; r < Tile::Output::kRows; ++r) {
            if (mask.keep(q_row + Tile::Output::row(lane, r), key + j)) {
              o.at[r >> 1][Tile::kPiece * stretch + i][2 * (r & 1) + c] += piece.at[i];
            }
          }
        }
      }
}

// Computes the scores that are NaN anew by plain arithmetic: halves of Inf, or of a value that
// rounds to it, make NaN whatever the score should be. A score that is NaN stays one.
template <class Tile>
CUFA2_DEVICE void mend_scores(typename Tile::Scores& s, u32 q_tile, u32 k_tile, int head_dim) {
  using T = typename Tile::T;
  const int lane = thread_index() % 32, row = Tile::team_row(thread_index());
#pragma unroll
  for (int r = 0; r < Tile::Scores::kRows; ++r)
#pragma unroll
    for (int n = 0; n < Tile::Scores::N_TILES; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        T& score = s.at[r >> 1][n][2 * (r & 1) + c];
        if (score == score) continue;
        score = T(0);
#pragma unroll 1
        for (int d = 0; d < head_dim / Tile::kPiece && score == score; ++d) {
          const auto q = load_piece<T>(q_tile + Tile::Q::offset(row + Tile::Scores::row(lane, r), d));
          const auto k = load_piece<T>(k_tile + Tile::K::offset(Tile::Scores::column(lane, n, c), d));
#pragma unroll
          for (int i = 0; i < Tile::kPiece; ++i) score = fmaf(q.at[i], k.at[i], score);
        }
      }
}
