// Backward attention for float32 and float64 on mma.sync tensor cores: dK and dV, or dQ.
//
//   P = exp(s - lse);  dP = dO V^T;  dS = scale P (dP - delta)
//   dV = P^T dO;  dK = dS^T Q;  dQ = dS K   (policies in s and dS)
//
// The two kernels are one, seen from the keys and from the queries. A block owns rows and walks
// over columns, the other side, in blocks:
//
//                rows (A_D, A_DV)   columns (B_D, B_DV)   leaves
//   key tile     K, V               Q, dO                 dK += dS^T Q, dV += P^T dO
//   query tile   Q, dO              K, V                  dQ += dS K
//
// S = A_D B_D^T and dP = A_DV B_DV^T (of a key tile: transposed), and what a block leaves stays in
// registers until it is written, once. A key tile takes every query head of its group.
//
// ACCUMULATE: key tiles also add up dQ, by atomics and in dq itself, which bwd_delta.cuh has
// cleared. Without it query tiles make dQ: nothing needs atomics and results repeat to the bit,
// but S and dP are computed twice, seven products instead of five.
//
// SPLIT warps share their rows, so that what they read and split of the columns serves two tiles
// of rows: each multiplies its side of the head dims, sums up its share of S and dP through shared
// memory, makes P and dS of it there, and owns its side of the columns of what the block leaves.
//
// STAGES: of B_D and B_DV. 2: a block's are loaded while the one before is worked on. 1: they wait
// for their load. 0: for want of memory they take turns in one place, which serves any head dim.
//
// NaN never leaks from a masked pair: P and dS are selected there, and a tile that meets a NaN in
// what it leaves is done again, as in fwd_wide_sm80.cuh.
#pragma once
#include "attn/wide_grad.cuh"

template <class T_, int D_, int DV_, bool KEYS_, int BLOCK_Q_, int BLOCK_K_, int WARPS_,
          int SPLIT_, int STAGES_, bool ACCUMULATE_, bool TF32_>
struct WideGradTile {
  using T = T_;
  static constexpr bool KEYS = KEYS_, ACCUMULATE = ACCUMULATE_;
  static constexpr bool kTf32 = TF32_, kHalves = is_same<T, float> && !kTf32;
  static constexpr int BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_, WARPS = WARPS_, SPLIT = SPLIT_;
  static constexpr int STAGES = STAGES_, kThreads = 32 * WARPS;
  static constexpr int ROWS = KEYS ? BLOCK_K : BLOCK_Q, COLUMNS = KEYS ? BLOCK_Q : BLOCK_K;
  static constexpr int M_TILES = ROWS * SPLIT / (16 * WARPS), N_TILES = COLUMNS / 8;
  static_assert(ROWS * SPLIT == 16 * WARPS * M_TILES, "warps split the rows evenly");
  static_assert(WARPS % SPLIT == 0 && WARPS / SPLIT < 16, "one named barrier per SPLIT warps");
  static_assert(kWorkRows % COLUMNS == 0, "work arrays hold whole blocks of columns");
  static_assert(STAGES > 0 || !kHalves, "plain arithmetic needs all operands");
  static_assert(!ACCUMULATE || KEYS, "query tiles leave dQ as it is");

  static constexpr int kPiece = Piece<T>::kSize;
  static constexpr int kGrain = 8 * kPiece * SPLIT;  // sides have whole stretches
  static constexpr int D = (D_ + kGrain - 1) / kGrain * kGrain;
  static constexpr int DV = (DV_ + kGrain - 1) / kGrain * kGrain;
  static constexpr int kSideD = D / SPLIT, kSideDv = DV / SPLIT;
  // Whether dQ is summed up over all teams before it is added, see add_dq.
  static constexpr bool kTogether = ACCUMULATE && (D >= 8 * kPiece * WARPS || is_same<T, double>);

  static constexpr int kUnits = sizeof(T) / 2;  // SmemTile counts 16-bit elements
  using RowD = SmemTile<ROWS, D * kUnits>;
  using RowDv = SmemTile<ROWS, DV * kUnits>;
  using ColumnD = SmemTile<COLUMNS, D * kUnits>;
  using ColumnDv = SmemTile<COLUMNS, DV * kUnits>;
  using Scores = WideAccumulator<T, M_TILES, N_TILES>;
  using GradD = WideAccumulator<T, M_TILES, kSideD / 8>;

  // Shared memory: the rows, lse and delta (of a stage, if they belong to columns), the stages,
  // and per warp dS and P.
  static constexpr int kFactBytes = 2 * (KEYS ? COLUMNS : ROWS) * sizeof(T);
  static constexpr int kRowFacts = RowD::kBytes + RowDv::kBytes;
  static constexpr int kColumnDv = STAGES ? ColumnD::kBytes : 0;
  static constexpr int kTurnBytes =
      ColumnD::kBytes > ColumnDv::kBytes ? ColumnD::kBytes : ColumnDv::kBytes;
  static constexpr int kColumnFacts = STAGES ? ColumnD::kBytes + ColumnDv::kBytes : kTurnBytes;
  static constexpr int kStageBytes = kColumnFacts + (KEYS ? kFactBytes : 0);
  static constexpr int kStages = kRowFacts + (KEYS ? 0 : kFactBytes);
  static constexpr int kWeights = kStages + (STAGES == 2 ? 2 : 1) * kStageBytes;
  static constexpr int kScoreBytes = 16 * M_TILES * COLUMNS * sizeof(T);
  static constexpr int kBytes = kWeights + 2 * WARPS * kScoreBytes;

  // Which rows (in units of SPLIT warps) and which side of the columns a thread's warp has.
  static CUFA2_DEVICE int team(int thread) { return thread / (32 * SPLIT); }
  static CUFA2_DEVICE int side(int thread) { return thread / 32 % SPLIT; }
  static CUFA2_DEVICE int team_row(int thread) { return team(thread) * 16 * M_TILES; }
};

template <class T, int D, int DV, int BLOCK_Q, int BLOCK_K, int WARPS, int SPLIT, int STAGES,
          bool ACCUMULATE, bool TF32>
using WideKeyTile =
    WideGradTile<T, D, DV, true, BLOCK_Q, BLOCK_K, WARPS, SPLIT, STAGES, ACCUMULATE, TF32>;
template <class T, int D, int DV, int BLOCK_Q, int BLOCK_K, int WARPS, int SPLIT, int STAGES,
          bool TF32>
using WideQueryTile =
    WideGradTile<T, D, DV, false, BLOCK_Q, BLOCK_K, WARPS, SPLIT, STAGES, false, TF32>;

// Row `row` of a head of a tensor, in 16-bit units.
template <class T>
CUFA2_DEVICE const u16* rows_at(const void* tensor, const Strides& s, i64 batch, int head,
                                int row) {
  return reinterpret_cast<const u16*>(static_cast<const T*>(tensor) + batch * s.batch +
                                      head * s.head + row * s.row);
}

template <class Tile, class Smem>
CUFA2_DEVICE void load_rows(u32 shared, const void* tensor, const Strides& s, i64 batch, int head,
                            int row, int rows, int columns) {
  using T = typename Tile::T;
  TileLoader<Smem, Tile::kThreads>::load(shared, rows_at<T>(tensor, s, batch, head, row),
                                         s.row * Tile::kUnits, rows - row,
                                         columns * Tile::kUnits, thread_index());
}

// Starts loading lse and then delta of COUNT query rows from `row` on; past the work arrays zeros.
template <class Tile, int COUNT>
CUFA2_DEVICE void load_facts(const BwdParams& p, u32 shared, i64 batch, int head, int row) {
  using T = typename Tile::T;
  constexpr int kPieces = COUNT / Piece<T>::kSize;
  const i64 first = (batch * p.num_heads + head) * p.rows + row;
  for (int n = thread_index(); n < 2 * kPieces; n += Tile::kThreads) {
    const int i = n % kPieces * Piece<T>::kSize;
    const void* array = n < kPieces ? p.row_lse : p.delta;
    cp_async_16(shared + 16 * n, static_cast<const T*>(array) + first + i, row + i < p.rows);
  }
}

// Starts the loads for a block of columns: B_D, or B_DV with what else it needs.
template <class Tile, class Frame>
CUFA2_DEVICE void load_d(const BwdParams& p, const Frame& frame, u32 stage, const Step& at) {
  load_rows<Tile, typename Tile::ColumnD>(
      stage, Tile::KEYS ? p.q : p.k, Tile::KEYS ? p.q_stride : p.k_stride, frame.work.batch,
      Frame::column_head(p, at), at.block * Tile::COLUMNS, frame.columns(), p.head_dim);
}
template <class Tile, class Frame>
CUFA2_DEVICE void load_dv(const BwdParams& p, const Frame& frame, u32 stage, const Step& at) {
  load_rows<Tile, typename Tile::ColumnDv>(
      stage + Tile::kColumnDv, Tile::KEYS ? p.grad_o : p.v,
      Tile::KEYS ? p.grad_o_stride : p.v_stride, frame.work.batch, Frame::column_head(p, at),
      at.block * Tile::COLUMNS, frame.columns(), p.head_dim_v);
  if constexpr (Tile::KEYS) {
    load_facts<Tile, Tile::COLUMNS>(p, stage + Tile::kColumnFacts, frame.work.batch, at.head,
                                    at.block * Tile::COLUMNS);
  }
}
template <class Tile, class Frame>
CUFA2_DEVICE void load_stage(const BwdParams& p, const Frame& frame, u32 stage, const Step& at) {
  load_dv<Tile>(p, frame, stage, at);
  if constexpr (Tile::STAGES > 0) load_d<Tile>(p, frame, stage, at);
  cp_async_commit();
}

// This warp's side of the product of its rows with a block of columns, S or dP, goes to where the
// team's scores are, `place` further on.
template <class Tile, class RowSmem, class ColumnSmem>
CUFA2_DEVICE void multiply_scores(u32 memory, u32 rows, u32 columns, u32 place) {
  using T = typename Tile::T;
  constexpr int kSide = ColumnSmem::COLS / Tile::kUnits / Tile::SPLIT;
  const int thread = thread_index(), lane = thread % 32, side = Tile::side(thread);
  const u32 first = side * kSide * sizeof(T);
  typename Tile::Scores s;
  s.clear();
  multiply_rows<Tile::kTf32, kSide>(
      s,
      RowReader<T, RowSmem>::for_a(rows + Tile::team_row(thread) * RowSmem::kRowBytes + first,
                                   lane),
      RowReader<T, ColumnSmem>::for_run(columns + first, lane));
  store_scores(Weights<Tile>(memory, thread).own(side) + place, s);
}

// Adds one product to what the block leaves: the operands that `load_a` gives times this warp's
// side of a tile of columns.
template <class Tile, bool SAFE, class Smem, class Acc, class Frame, class LoadA>
CUFA2_DEVICE void add_product(Acc& d, const Frame& frame, const LoadA& load_a, u32 tile,
                              int columns, int row, int column) {
  using T = typename Tile::T;
  const int thread = thread_index(), lane = thread % 32;
  const int side = Tile::side(thread) * 8 * Acc::N_TILES;  // its first column
  constexpr int kStretches = Acc::N_TILES / Tile::kPiece;
  multiply_columns<Tile::kTf32, SAFE, true, Tile::COLUMNS, kStretches>(
      d, 0, load_a, PairReader<T, Smem>::at(tile + side * sizeof(T), lane), columns - side);
  if constexpr (SAFE) {
    auto keep = [&](int r, int k) {
      const RowRange range = frame.kept(row + Acc::row(lane, r));
      return column + k >= range.begin && column + k < range.end;
    };
    add_nonfinite<Smem, Tile::COLUMNS, kStretches>(d, 0, tile + side * sizeof(T), keep);
  }
}

// Whether this thread finds a NaN or an infinity in its part of K.
template <class Tile> CUFA2_DEVICE bool has_nonfinite(u32 keys) {
  using T = typename Tile::T;
  bool found = false;
  for (int i = 16 * thread_index(); i < Tile::RowD::kBytes; i += 16 * Tile::kThreads) {
    const Piece<T> piece = load_piece<T>(keys + i);
#pragma unroll
    for (int j = 0; j < Tile::kPiece; ++j) found = found || !is_finite(piece.at[j]);
  }
  return found;
}

// Adds to the rows of dq from query `column` on what the keys from `row` on give. What is not
// finite in K enters no product that it could leak from; dS that is not finite is computed anew by
// plain arithmetic.
//
// Where D gives every warp columns the keys of all teams are summed up, and all warps share the
// columns: atomics are slow, those of float64 above all. Elsewhere each team adds what its keys
// give, and its sides share the columns.
template <class Tile, class Score, class Frame>
CUFA2_DEVICE void add_dq(const BwdParams& p, const Frame& frame, u32 memory, u32 stage, int head,
                         int row, int column, bool bad_grads) {
  using T = typename Tile::T;
  using Smem = typename Tile::RowD;
  constexpr bool kTogether = Tile::kTogether;
  constexpr int kPiece = Tile::kPiece, kStretch = 8 * kPiece;
  constexpr int M_TILES = (Tile::N_TILES + 1) / 2;
  constexpr int KEYS = kTogether ? Tile::ROWS : 16 * Tile::M_TILES;
  constexpr int kSharing = kTogether ? Tile::WARPS : Tile::SPLIT;
  // Few rows leave registers for more columns, which then share what is read of dS.
  constexpr int kStretches = M_TILES == 1 && Tile::D % (2 * kStretch * kSharing) == 0 ? 2 : 1;
  constexpr int kColumns = kStretches * kStretch;
#pragma unroll 1
  for (int part = 0; part < Tile::D / kColumns; part += kSharing) {
    const int thread = thread_index(), lane = thread % 32;
    // Its first column of D.
    const int first = kTogether ? (part + thread / 32) * kColumns
                                : Tile::side(thread) * Tile::kSideD + part / kSharing * kColumns;
    if (kTogether && Tile::D % (kSharing * kColumns) != 0 && first >= Tile::D) break;
    const Weights<Tile> weights(memory, kTogether ? lane : thread);
    const int team_row = kTogether ? 0 : Tile::team_row(thread);
    const u32 keys = memory + team_row * Smem::kRowBytes + first * sizeof(T);
    const auto k_rows = PairReader<T, Smem>::at(keys, lane);
    const int columns = kStretches == 1 ? kStretch : p.head_dim - first;
    auto load_grad = [&](T (&x)[4], int n, int kk) { weights.load_grad_transposed(x, n, kk); };
    WideAccumulator<T, M_TILES, kPiece * kStretches> dq;
    dq.clear();
    if (!(Tile::kHalves && bad_grads) && !frame.bad_keys) {
      multiply_columns<Tile::kTf32, false, kTogether, KEYS, kStretches>(dq, 0, load_grad, k_rows,
                                                                        columns);
    } else {
      auto load = [&](T (&x)[4], int n, int kk) {
        if constexpr (Tile::kHalves) {
          if (bad_grads) {
            plain_grads<Tile, Score>(x, p, frame, memory, stage, team_row, row, column, n, kk);
            return;
          }
        }
        load_grad(x, n, kk);
      };
      multiply_columns<Tile::kTf32, true, true, KEYS, kStretches>(dq, 0, load, k_rows, columns);
      add_nonfinite<Smem, KEYS, kStretches>(dq, 0, keys, [&](int r, int k) {
        const RowRange range = frame.kept(row + k);
        const int i = column + dq.row(lane, r);
        return i >= range.begin && i < range.end;
      });
    }
    const int i = column + lane / 4;
    T* out = static_cast<T*>(p.dq) + frame.work.batch * p.dq_stride.batch +
             head * p.dq_stride.head + i * p.dq_stride.row + first;
#pragma unroll
    for (int r = 0; r < Tile::N_TILES; ++r) {
      const bool real = i + 8 * r < frame.len.q;
#pragma unroll
      for (int stretch = 0; stretch < kStretches; ++stretch) {
        const int left = p.head_dim - first - stretch * kStretch;
        add_row<T>(out + stretch * kStretch, dq.at[r >> 1], stretch * kPiece, r & 1,
                   real ? left : 0);
      }
      out += 8 * p.dq_stride.row;
    }
  }
}

// Computes and stores what rows of the frame's tile from `first` on leave; returns whether this
// thread met a NaN in it. SAFE: what is not finite enters no product that it could leak from.
template <class Tile, class Score, bool SAFE, class Frame>
CUFA2_DEVICE bool differentiate(const BwdParams& p, Frame& frame, u32 memory, int first) {
  using T = typename Tile::T;
  constexpr int COLUMNS = Tile::COLUMNS, SPLIT = Tile::SPLIT;
  constexpr bool KEYS = Tile::KEYS;
  typename Tile::GradD grad;
  WideAccumulator<T, Tile::M_TILES, KEYS ? Tile::kSideDv / 8 : 1> grad_v;
  grad.clear();
  grad_v.clear();
  Step at = frame.begin(p);
  if (frame.any()) {
    const int row = frame.row_begin() + first;
    const i64 batch = frame.work.batch;
    load_rows<Tile, typename Tile::RowD>(memory, KEYS ? p.k : p.q,
                                         KEYS ? p.k_stride : p.q_stride, batch, frame.row_head(),
                                         row, frame.rows(), p.head_dim);
    load_rows<Tile, typename Tile::RowDv>(memory + Tile::RowD::kBytes, KEYS ? p.v : p.grad_o,
                                          KEYS ? p.v_stride : p.grad_o_stride, batch,
                                          frame.row_head(), row, frame.rows(), p.head_dim_v);
    if constexpr (!KEYS) {
      load_facts<Tile, Tile::ROWS>(p, memory + Tile::kRowFacts, batch, frame.row_head(), row);
    }
    load_stage<Tile>(p, frame, memory + Tile::kStages, at);
  }
  // Where a warp stands is computed anew wherever it is needed: registers are short.
  auto warp_row = [&] { return frame.row_begin() + first + Tile::team_row(thread_index()); };
  auto take_turns = [&](bool dv) {  // the one place gets the block's B_DV or B_D
    if constexpr (Tile::STAGES == 0) {
      block_sync();
      if (dv) load_dv<Tile>(p, frame, memory + Tile::kStages, at);
      else load_d<Tile>(p, frame, memory + Tile::kStages, at);
      cp_async_commit();
      cp_async_wait<0>();
      block_sync();
    }
  };
  if constexpr (Tile::ACCUMULATE && !SAFE) {
    if (frame.any()) {
      cp_async_wait<0>();
      block_sync();
      const bool bad = block_any(has_nonfinite<Tile>(memory));
      if (thread_index() == 0) frame.bad_keys = bad;
    }
  }
  u32 odd = 0;
  while (frame.any() && frame.within(p, at)) {
    cp_async_wait<0>();
    block_sync();  // this block's columns are visible; all are done with the block before
    const u32 stage = memory + Tile::kStages + odd;
    if (const Step next = frame.next(at); Tile::STAGES == 2 && frame.within(p, next)) {
      odd ^= Tile::kStageBytes;
      load_stage<Tile>(p, frame, memory + Tile::kStages + odd, next);
    }
    const int column = at.block * COLUMNS, row = warp_row();
    const KvRange range = frame.range(row, row + 16 * Tile::M_TILES);
    // The rows of one warp keep fewer columns than those of the tile.
    const bool seen = row < frame.rows() && column < range.end && column + COLUMNS > range.begin;
    if (seen) {
      multiply_scores<Tile, typename Tile::RowDv, typename Tile::ColumnDv>(
          memory, memory + Tile::RowD::kBytes, stage + Tile::kColumnDv, 0);
    }
    take_turns(false);
    bool bad_grads = false;
    if (seen) {
      multiply_scores<Tile, typename Tile::RowD, typename Tile::ColumnD>(
          memory, memory, stage, Weights<Tile>::kScores);
      if (SPLIT > 1) sync_sides<Tile>();
      const bool masked = column < range.full_begin || column + COLUMNS > range.full_end;
      bad_grads = weigh<Tile, Score, SAFE>(p, frame, memory, stage, warp_row(), column, masked);
      const Weights<Tile> weights(memory, thread_index());
      auto load_grad = [&](T (&x)[4], int m, int kk) { weights.load_grad(x, m, kk); };
      add_product<Tile, SAFE, typename Tile::ColumnD>(grad, frame, load_grad, stage, p.head_dim,
                                                      warp_row(), column);
      if constexpr (Tile::ACCUMULATE && !Tile::kTogether && !SAFE) {
        add_dq<Tile, Score>(p, frame, memory, stage, at.head, warp_row(), column, bad_grads);
      }
    } else {
      if (SPLIT > 1) sync_sides<Tile>();  // see fwd_wide_sm80.cuh
      if (Tile::kTogether && !SAFE) Weights<Tile>(memory, thread_index()).clear_grad();
      if (SPLIT > 1) any_side<Tile>(false);
    }
    if constexpr (KEYS) {
      take_turns(true);
      if (seen) {
        const Weights<Tile> weights(memory, thread_index());
        auto load_weight = [&](T (&x)[4], int m, int kk) { weights.load_weight(x, m, kk); };
        add_product<Tile, SAFE, typename Tile::ColumnDv>(grad_v, frame, load_weight,
                                                         stage + Tile::kColumnDv, p.head_dim_v,
                                                         warp_row(), column);
      }
    }
    const int head = at.head;
    at = frame.next(at);
    auto load_next = [&] {
      if (Tile::STAGES < 2 && frame.within(p, at)) {
        load_stage<Tile>(p, frame, memory + Tile::kStages, at);
      }
    };
    if constexpr (Tile::kTogether && !SAFE) {
      bad_grads = block_any(bad_grads);  // dS is visible to all, all are done with the stage
      if (!bad_grads) load_next();
      add_dq<Tile, Score>(p, frame, memory, stage, head, frame.row_begin() + first, column,
                          bad_grads);
      if (bad_grads) {
        block_sync();
        load_next();
      }
    } else if (Tile::STAGES < 2) {
      block_sync();
      load_next();
    }
  }
  const int row = warp_row(), side = Tile::side(thread_index());
  const Strides& stride = KEYS ? p.dk_stride : p.dq_stride;
  T* out = static_cast<T*>(KEYS ? p.dk : p.dq) + frame.work.batch * stride.batch +
           frame.row_head() * stride.head + row * stride.row + side * Tile::kSideD;
  const int rows = (KEYS ? p.seqlen_k : p.seqlen_q) - row, real = frame.rows() - row;
  store_columns(grad, out, stride.row, rows, real, p.head_dim - side * Tile::kSideD);
  if constexpr (KEYS) {
    T* out_v = static_cast<T*>(p.dv) + frame.work.batch * p.dv_stride.batch +
               frame.row_head() * p.dv_stride.head + row * p.dv_stride.row +
               side * Tile::kSideDv;
    store_columns(grad_v, out_v, p.dv_stride.row, rows, real,
                  p.head_dim_v - side * Tile::kSideDv);
  }
  return grad.has_nan() || grad_v.has_nan();
}

template <class Tile, class Mask, class Score, class Place>
CUFA2_DEVICE void bwd_wide(const BwdParams& p, const Place& work) {
  using Frame = Walk<Tile, Mask>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ __align__(16) unsigned char frame_memory[sizeof(Frame)];
  auto& frame = *reinterpret_cast<Frame*>(frame_memory);
  if (!work.valid) return;
  if (thread_index() == 0) frame = Frame(p, work);
  block_sync();
  const u32 memory = shared_address(shared_memory);
  const bool nan = differentiate<Tile, Score, false>(p, frame, memory, 0);
  if constexpr (Tile::kHalves || Mask::kPerRow) {
    if (!block_any(nan)) return;
    // Rare: the tile again, in parts of one tile of rows per warp, to leave registers. No sum of a
    // row depends on other rows, so what no NaN touches comes out the same to the bit.
    constexpr int kRows = 16 * Tile::WARPS / Tile::SPLIT;
    using Part = WideGradTile<typename Tile::T, Tile::D, Tile::DV, Tile::KEYS,
                              Tile::KEYS ? Tile::BLOCK_Q : kRows,
                              Tile::KEYS ? kRows : Tile::BLOCK_K, Tile::WARPS, Tile::SPLIT,
                              Tile::STAGES, Tile::ACCUMULATE, Tile::kTf32>;
#pragma unroll 1
    for (int row = 0; row < Tile::ROWS; row += kRows) {
      differentiate<Part, Score, true>(p, frame, memory, row);
      block_sync();
    }
  }
}

// dK and dV of one tile of keys.
template <class Tile, class Mask, class Score>
CUFA2_DEVICE void bwd_wide_sm80(const BwdParams& p) {
  bwd_wide<Tile, Mask, Score>(p, find_key_work<Tile::BLOCK_K>(p));
}

// dQ of one tile of queries.
template <class Tile, class Mask, class Score>
CUFA2_DEVICE void bwd_dq_wide_sm80(const BwdParams& p) {
  bwd_wide<Tile, Mask, Score>(p, find_work<Tile::BLOCK_Q>(p));
}
