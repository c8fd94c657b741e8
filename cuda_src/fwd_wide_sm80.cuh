// Forward attention for float32 and float64 on mma.sync tensor cores; compute capability 8.0 up.
//
//   o[i] = sum_j exp(s[i,j] - lse[i]) v[j],   s = softmax_scale q k^T (+ policies)
//
// The loop of fwd_sm80.cuh: a block owns BLOCK_Q query rows and walks over its key blocks from the
// last to the first; S becomes P in registers. What differs comes from the width of the types.
//
// Products: see tile/wide_product.cuh.
//
// Memory: K and V blocks, in PARTS parts of their columns, take turns in a ring of SLOTS slots.
// Each is waited for at its turn, and the barrier that publishes it also frees the slot before it
// for the load that is SLOTS - 1 turns ahead.
//
// SPLIT: where one warp could not hold its rows of O, or not two tiles of rows to share what it
// reads of K and V, SPLIT warps share them. Each multiplies its side of the columns of Q and K;
// the sides' S are summed through shared memory, in one order, so that all SPLIT warps see the
// same P; and each owns its side of the columns of O.
//
// NaN: none leaks from a masked key. As in fwd_sm80.cuh, a tile that meets one in O is done again
// with all that is not finite in V kept out of the products. At float32 accuracy so is a tile that
// meets a score that is not finite, and those are computed anew: see plain_product.
#pragma once
#include "attn/schedule.cuh"
#include "attn/wide.cuh"
#include "tile/wide_product.cuh"

template <class T_, int D_, int DV_, int BLOCK_Q_, int BLOCK_K_, int WARPS_, int SPLIT_,
          int PARTS_, int SLOTS_, bool TF32_>
struct WideTile {
  using T = T_;
  static constexpr bool kTf32 = TF32_, kHalves = is_same<T, float> && !kTf32;
  static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_, WARPS = WARPS_, SPLIT = SPLIT_;
  static constexpr int PARTS = PARTS_, SLOTS = SLOTS_;
  static constexpr int kThreads = 32 * WARPS;
  static constexpr int M_TILES = BLOCK_Q * SPLIT / (16 * WARPS);
  static_assert(BLOCK_Q * SPLIT == 16 * WARPS * M_TILES, "warps split the query rows evenly");
  static_assert(WARPS % SPLIT == 0 && WARPS / SPLIT < 16, "one named barrier per SPLIT warps");
  static_assert(PARTS == 1 || !kHalves, "mend_scores reads whole rows of K");
  static_assert(BLOCK_K % (is_same<T, float> ? 16 : 8) == 0, "a key block is whole fresh sums");

  static constexpr int kPiece = Piece<T>::kSize;
  static constexpr int kStretch = 8 * kPiece;  // columns of 128 bytes
  static constexpr int kGrain = kStretch * SPLIT * PARTS;  // a warp has whole stretches of a part
  static constexpr int D = (D_ + kGrain - 1) / kGrain * kGrain;
  static constexpr int DV = (DV_ + kGrain - 1) / kGrain * kGrain;
  static constexpr int kPartD = D / PARTS, kPartDv = DV / PARTS;      // columns of a part
  static constexpr int kSideD = kPartD / SPLIT, kSideDv = kPartDv / SPLIT;  // of them one warp's
  static constexpr int kStretchesDv = kSideDv / kStretch;

  static constexpr int kUnits = sizeof(T) / 2;  // SmemTile counts 16-bit elements
  using Q = SmemTile<BLOCK_Q, D * kUnits>;
  using K = SmemTile<BLOCK_K, kPartD * kUnits>;
  using V = SmemTile<BLOCK_K, kPartDv * kUnits>;
  using Scores = WideAccumulator<T, M_TILES, BLOCK_K / 8>;
  using Output = WideAccumulator<T, M_TILES, PARTS * kSideDv / 8>;

  static constexpr int kSlotBytes = K::kBytes > V::kBytes ? K::kBytes : V::kBytes;
  static constexpr int kScoreBytes = 16 * M_TILES * BLOCK_K * sizeof(T);  // S or P of a warp
  static constexpr int kBytes =
      Q::kBytes + SLOTS * kSlotBytes + (SPLIT > 1 ? WARPS * kScoreBytes : 0);

  // Which rows (in units of SPLIT warps) and which side of the columns a thread's warp has.
  static CUFA2_DEVICE int team(int thread) { return thread / (32 * SPLIT); }
  static CUFA2_DEVICE int side(int thread) { return thread / 32 % SPLIT; }
  static CUFA2_DEVICE int team_row(int thread) { return team(thread) * 16 * M_TILES; }
};

// Computes the scores that are not finite anew by plain arithmetic, see plain_product.
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
        if (is_finite(score)) continue;
        score = plain_product<typename Tile::Q, typename Tile::K>(
            q_tile, row + Tile::Scores::row(lane, r), k_tile, Tile::Scores::column(lane, n, c),
            head_dim, T(0));
      }
}

// Normalises O and writes this warp's columns of it and, from side 0, the log-sum-exp. Rows
// without a visible key and rows past the sequence become exact zeros.
template <class Tile, class Softmax>
CUFA2_DEVICE void store_output(const FwdParams& p, const Work& work, int seqlen_q,
                               const typename Tile::Output& o, const Softmax& softmax, int q_row) {
  using T = typename Tile::T;
  constexpr int kRows = Tile::Output::kRows, kPiece = Tile::kPiece;
  const int thread = thread_index(), lane = thread % 32, side = Tile::side(thread);
  T inverse[kRows], lse[kRows];
  softmax.finish(inverse, lse);
  T* out = static_cast<T*>(p.o) + work.batch * p.o_stride.batch + work.head * p.o_stride.head;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int i = q_row + Tile::Output::row(lane, r);
    if (i >= p.seqlen_q) continue;
    const bool zero = inverse[r] == T(0) || i >= seqlen_q;
    if (p.lse && lane % 4 == 0 && side == 0) {
      static_cast<T*>(p.lse)[work.batch * p.lse_stride.batch + work.head * p.lse_stride.head +
                             i * p.lse_stride.row] = zero ? T(-inf()) : lse[r];
    }
#pragma unroll
    for (int n = 0; n < Tile::Output::N_TILES; n += kPiece)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int stretch = n / kPiece % Tile::kStretchesDv;
        const int column = n / kPiece / Tile::kStretchesDv * Tile::kPartDv +
                           side * Tile::kSideDv + stretch * Tile::kStretch +
                           pair_chunk<T>(lane % 4, c) * kPiece;
        if (column >= p.head_dim_v) continue;
        Piece<T> piece;
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          const T x = o.at[r >> 1][n + j][2 * (r & 1) + c] * inverse[r];
          piece.at[j] = zero ? T(0) : x;
        }
        *reinterpret_cast<Piece<T>*>(out + i * p.o_stride.row + column) = piece;
      }
  }
}

// What a block knows about its tile, in shared memory as in fwd_sm80.cuh. Pointers, strides and
// head dims count 16-bit units, as SmemTile does.
template <class Tile, class Mask> struct Frame {
  Work work;
  Lengths len;
  Mask mask;
  int first, last;  // key blocks that some row of the tile sees; none: last < first
  int head_dim, head_dim_v;
  i64 q_stride, k_stride, v_stride;  // between rows
  const u16 *q, *k, *v;              // row 0 of the head; q at the tile's first row

  CUFA2_DEVICE Frame(const FwdParams& p, const Work& w)
      : work(w), len(p, w.batch), mask(p, len), first(0), last(-1),
        head_dim(p.head_dim * Tile::kUnits), head_dim_v(p.head_dim_v * Tile::kUnits),
        q_stride(p.q_stride.row * Tile::kUnits), k_stride(p.k_stride.row * Tile::kUnits),
        v_stride(p.v_stride.row * Tile::kUnits),
        q(at(p.q, w.batch * p.q_stride.batch + w.head * p.q_stride.head +
                      w.q_begin * p.q_stride.row)),
        k(at(p.k, w.batch * p.k_stride.batch + w.head / p.group * p.k_stride.head)),
        v(at(p.v, w.batch * p.v_stride.batch + w.head / p.group * p.v_stride.head)) {
    const int q_end = min(w.q_begin + Tile::BLOCK_Q, len.q);
    const KvRange range = mask.kv_range(w.q_begin, q_end);
    if (w.q_begin < q_end && range.begin < range.end) {
      first = range.begin / Tile::BLOCK_K;
      last = (range.end - 1) / Tile::BLOCK_K;
    }
  }
  static CUFA2_DEVICE const u16* at(const void* tensor, i64 element) {
    return static_cast<const u16*>(tensor) + element * Tile::kUnits;
  }
};

// Multiplies the Q tile by 0 or -1, so that the softmax always sees a positive scale.
template <class Tile> CUFA2_DEVICE void apply_sign(u32 q_tile, float sign, int thread) {
  using T = typename Tile::T;
  for (int i = 16 * thread; i < Tile::Q::kBytes; i += 16 * Tile::kThreads) {
    Piece<T> piece = load_piece<T>(q_tile + i);
#pragma unroll
    for (int j = 0; j < Tile::kPiece; ++j) piece.at[j] *= T(sign);
    store_piece(q_tile + i, piece);
  }
}

// Starts loading item `item` of a key block, if the tile has that block: the parts of K, then V.
template <class Tile, class TileFrame>
CUFA2_DEVICE void load_item(const TileFrame& frame, int block, int item, u32 slot) {
  if (block >= frame.first) {
    const int key = block * Tile::BLOCK_K, keys_left = frame.len.k - key;
    const int column = item % Tile::PARTS * Tile::kUnits *
                       (item < Tile::PARTS ? Tile::kPartD : Tile::kPartDv);
    if (item < Tile::PARTS) {
      TileLoader<typename Tile::K, Tile::kThreads>::load(
          slot, frame.k + key * frame.k_stride + column, frame.k_stride, keys_left,
          frame.head_dim - column, thread_index());
    } else {
      TileLoader<typename Tile::V, Tile::kThreads>::load(
          slot, frame.v + key * frame.v_stride + column, frame.v_stride, keys_left,
          frame.head_dim_v - column, thread_index());
    }
  }
  cp_async_commit();
}

// Waits for the item of turn `turn` of a key block and starts the load for SLOTS - 1 turns later.
template <class Tile, class TileFrame>
CUFA2_DEVICE void begin_turn(const TileFrame& frame, int block, int turn, u32 spare) {
  constexpr int kTurns = 2 * Tile::PARTS;
  cp_async_wait<Tile::SLOTS - 2>();
  block_sync();  // what has landed is visible to all; all are done with the turn before
  const int ahead = turn + Tile::SLOTS - 1;
  load_item<Tile>(frame, block - ahead / kTurns, ahead % kTurns, spare);
}

// Computes and stores BLOCK_Q rows from `row` of the frame's tile; returns whether this thread met
// a NaN in O. SAFE: what is not finite enters no product that it could leak from.
template <class Tile, class Score, bool SAFE, class TileFrame>
CUFA2_DEVICE bool attend(const FwdParams& p, const TileFrame& frame, u32 q_tile, int row) {
  using T = typename Tile::T;
  constexpr int BLOCK_K = Tile::BLOCK_K, SLOTS = Tile::SLOTS, PARTS = Tile::PARTS;
  constexpr u32 kSlot = Tile::kSlotBytes;
  const u32 ring = q_tile + Tile::Q::kBytes, scores = ring + SLOTS * kSlot;
  if (frame.last >= frame.first) {
    TileLoader<typename Tile::Q, Tile::kThreads>::load(
        q_tile, frame.q + row * frame.q_stride, frame.q_stride,
        frame.len.q - frame.work.q_begin - row, frame.head_dim, thread_index());
#pragma unroll
    for (int i = 0; i < SLOTS - 1; ++i) {
      load_item<Tile>(frame, frame.last - i / (2 * PARTS), i % (2 * PARTS), ring + i * kSlot);
    }
    if (p.q_sign != 1.0f) {
      cp_async_wait<SLOTS - 2>();
      block_sync();
      apply_sign<Tile>(q_tile, p.q_sign, thread_index());
    }
  }
  typename Tile::Output o;
  WideSoftmax<T, 2 * Tile::M_TILES> softmax;
  o.clear();
  softmax.reset();
  const WideScore<Score, T> score(p);
  u32 slot = 0, spare = (SLOTS - 1) * kSlot;
  auto end_turn = [&] {
    spare = slot;
    slot = slot == (SLOTS - 1) * kSlot ? 0 : slot + kSlot;
  };
  // Where a warp stands is computed anew wherever it is needed: registers are short.
  auto warp_row = [&] { return frame.work.q_begin + row + Tile::team_row(thread_index()); };
  for (int block = frame.last; block >= frame.first; --block) {
    const int key = block * BLOCK_K, q_row = warp_row();
    const KvRange range =
        frame.mask.kv_range(q_row, min(q_row + 16 * Tile::M_TILES, frame.len.q));
    // The rows of one warp see fewer keys than those of the tile.
    const bool seen = q_row < frame.len.q && key < range.end && key + BLOCK_K > range.begin;
    const bool masked = key < range.full_begin || key + BLOCK_K > range.full_end;
    typename Tile::Scores s;
    s.clear();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      begin_turn<Tile>(frame, block, part, ring + spare);
      if (seen) {
        const int thread = thread_index(), lane = thread % 32;
        const u32 column = Tile::side(thread) * Tile::kSideD * sizeof(T);
        const u32 q_rows = q_tile + Tile::team_row(thread) * Tile::Q::kRowBytes;
        multiply_rows<Tile::kTf32, Tile::kSideD>(
            s,
            RowReader<T, typename Tile::Q>::for_a(
                q_rows + part * Tile::kPartD * sizeof(T) + column, lane),
            RowReader<T, typename Tile::K>::for_run(ring + slot + column, lane));
      }
      if (seen && part == PARTS - 1) {
        if constexpr (Tile::SPLIT > 1) sum_sides<Tile>(s, scores);
        T spoilt = T(0);  // NaN reaches O and has the tile done again
        if constexpr (Tile::kHalves) {
          if constexpr (SAFE) mend_scores<Tile>(s, q_tile, ring + slot, p.head_dim);
          else spoilt = s.nan_unless_finite();
        }
        apply_score<Tile, Score>(s, score);
        if (masked) apply_mask<Tile>(s, frame.mask, warp_row(), key);
        s.at[0][0][0] += spoilt;
        softmax.step(s, o, is_same<T, float> ? T(p.scale_log2) : T(p.exact_scale_log2));
      } else if (Tile::SPLIT > 1 && part == PARTS - 1) {
        sync_sides<Tile>();  // for racecheck, which holds a barrier that warps skip for none
      }
      end_turn();
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      begin_turn<Tile>(frame, block, PARTS + part, ring + spare);
      if (seen) {
        const int thread = thread_index(), side = Tile::side(thread);
        const u32 v_tile = ring + slot + side * Tile::kSideDv * sizeof(T);
        const int first = part * Tile::kSideDv / 8;  // tile of O
        multiply_columns<Tile::kTf32, SAFE, false, BLOCK_K, Tile::kStretchesDv>(
            o, first,
            [&](T (&x)[4], int m, int kk) {
#pragma unroll
              for (int e = 0; e < 4; ++e) x[e] = s.at[m][kk][e];
            },
            PairReader<T, typename Tile::V>::at(v_tile, thread % 32),
            p.head_dim_v - part * Tile::kPartDv - side * Tile::kSideDv);
        if constexpr (SAFE) {
          add_nonfinite<typename Tile::V, BLOCK_K, Tile::kStretchesDv>(
              o, first, v_tile, [&](int r, int j) {
                return frame.mask.keep(warp_row() + Tile::Output::row(thread % 32, r), key + j);
              });
        }
      }
      end_turn();
    }
  }
  store_output<Tile>(p, frame.work, frame.len.q, o, softmax, warp_row());
  return o.has_nan();
}

template <class Tile, class Mask, class Score>
CUFA2_DEVICE void fwd_wide_sm80(const FwdParams& p) {
  using TileFrame = Frame<Tile, Mask>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ __align__(16) unsigned char frame_memory[sizeof(TileFrame)];
  auto& frame = *reinterpret_cast<TileFrame*>(frame_memory);
  const Work work = find_work<Tile::BLOCK_Q>(p);
  if (!work.valid) return;
  if (thread_index() == 0) frame = TileFrame(p, work);
  block_sync();
  const u32 memory = shared_address(shared_memory);
  const bool nan = attend<Tile, Score, false>(p, frame, memory, 0);
  if constexpr (Tile::kHalves || Mask::kPerRow) {
    if (!block_any(nan)) return;
    // Rare: the tile again, in parts of one tile of rows per warp, to leave registers. No sum of a
    // row depends on other rows, so what no NaN touches comes out the same to the bit.
    constexpr int kRows = 16 * Tile::WARPS / Tile::SPLIT;
    using Part = WideTile<typename Tile::T, Tile::D, Tile::DV, kRows, Tile::BLOCK_K, Tile::WARPS,
                          Tile::SPLIT, Tile::PARTS, Tile::SLOTS, Tile::kTf32>;
#pragma unroll 1
    for (int row = 0; row < Tile::BLOCK_Q; row += kRows) {
      attend<Part, Score, true>(p, frame, memory, row);
      block_sync();
    }
  }
}
