// Backward attention on mma.sync tensor cores: dK, dV and, added up over blocks, dQ.
//
//   P = exp(s - lse);  dP = dO V^T;  dS = P (dP - delta)
//   dV = P^T dO;  dK = scale dS^T Q;  dQ = scale dS K   (policies in s and dS)
//
// One block owns BLOCK_K keys of one key head and walks over the query blocks its mask leaves, for
// every query head of the group: dK and dV stay in registers, summed in float32, and are written
// once. Scores are computed transposed, keys down and queries across, so that P^T and dS^T are
// laid out as the A operands of dV and dK. KEY_WARPS warps split the keys; the warps that share
// keys split the queries of S^T and the columns of dK and dV, and exchange P^T and dS^T through
// shared memory. If a warp has its keys to itself nothing but dS^T (for dQ) leaves the registers.
//
// dQ belongs to all key blocks: each adds its part to a float32 buffer by atomics, which
// bwd_convert.cuh rounds. Without ACCUMULATE that is left to bwd_dq_sm80.cuh, which needs none and
// repeats to the bit.
//
// NaN never leaks from a masked pair: P and dS are selected there, and should one still come up
// through 0 * NaN, the product is done again by multiply_kept: dQ's on the spot, dK's and dV's by
// another walk.
#pragma once
#include "attn/grad_q.cuh"
#include "attn/key_walk.cuh"
#include "tile/store.cuh"

template <class T_, int D_, int DV_, int BLOCK_Q_, int BLOCK_K_, int WARPS_, int KEY_WARPS_,
          int Q_STAGES_, int DO_STAGES_, bool ACCUMULATE_>
struct BwdTile {
  using T = T_;
  static constexpr int D = D_, DV = DV_, BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_;
  static constexpr int KEY_WARPS = KEY_WARPS_, Q_STAGES = Q_STAGES_, DO_STAGES = DO_STAGES_;
  static constexpr bool ACCUMULATE = ACCUMULATE_;
  static constexpr int kThreads = 32 * WARPS_;
  static constexpr int M_TILES = BLOCK_K / (16 * KEY_WARPS);
  static constexpr int kSides = WARPS_ / KEY_WARPS;  // warps that share keys
  static constexpr bool kExchange = kSides > 1;
  // Queries of a warp's S^T at a time; the whole block in kParts parts or kSides warps.
  static constexpr int kColumns = kExchange ? BLOCK_Q / kSides : 32;
  static constexpr int kParts = kExchange ? 1 : BLOCK_Q / kColumns;
  static constexpr int kQueries = kExchange ? BLOCK_Q : kColumns;  // of one product into dK, dV
  // Of dQ: two warps split the rows, or four where the columns do not split so far.
  static constexpr int kRowWarps = D % (8 * WARPS_) == 0 ? 2 : 4;
  static constexpr int kColumnWarps = WARPS_ / kRowWarps;
  static_assert(BLOCK_K == 16 * KEY_WARPS * M_TILES, "warps split the keys evenly");
  static_assert(WARPS_ == KEY_WARPS * kSides && kColumns % 16 == 0, "and the queries");
  static_assert(D % (16 * kSides) == 0 && DV % (16 * kSides) == 0, "and the columns");
  static_assert(kWorkRows % BLOCK_Q == 0, "work arrays hold whole query blocks");

  using K = SmemTile<BLOCK_K, D>;
  using V = SmemTile<BLOCK_K, DV>;
  using Q = SmemTile<BLOCK_Q, D>;
  using GradO = SmemTile<BLOCK_Q, DV>;
  using P = SmemTile<BLOCK_K, BLOCK_Q>;  // P^T, dS^T
  using Scores = Accumulator<M_TILES, kColumns / 8>;
  using GradK = Accumulator<M_TILES, D / kSides / 8>;
  using GradV = Accumulator<M_TILES, DV / kSides / 8>;
  using GradQ = Accumulator<BLOCK_Q / (16 * kRowWarps), D / kColumnWarps / 8>;

  // First key of a warp, and which of the warps that share them it is.
  static CUFA2_DEVICE int key_row(int thread) { return thread / 32 / kSides * 16 * M_TILES; }
  static CUFA2_DEVICE int side(int thread) { return thread / 32 % kSides; }
  // Whose turn a warp takes at the rows and columns of dQ.
  static CUFA2_DEVICE int row_side(int thread) { return thread / 32 % kRowWarps; }
  static CUFA2_DEVICE int column_side(int thread) { return thread / 32 / kRowWarps; }

  static constexpr int kRowsBytes = 2 * 4 * BLOCK_Q;  // row_lse and delta of a query block
  static constexpr int kQStage = Q::kBytes + kRowsBytes;
  static constexpr int kV = K::kBytes, kQ = kV + V::kBytes, kGradO = kQ + Q_STAGES * kQStage;
  static constexpr int kP = kGradO + DO_STAGES * GradO::kBytes;
  static constexpr int kS = kP + (kExchange ? P::kBytes : 0);
  // dS^T in two stages: dQ of a block is computed while the next one's scores already come in.
  static constexpr int kSStages = kExchange || ACCUMULATE ? 1 + ACCUMULATE : 0;
  static constexpr int kBytes = kS + kSStages * P::kBytes;
};

// Turns scores into weights. `edit(x, r, n, c)` takes the element of the lane's row r and column c
// of tile n, leaves in x what is still needed of it and returns the weight; both become 0 for the
// pairs of S^T (keys from `key`, queries from `query`) that the mask does not keep. `emit(r, n,
// pair)` gets two neighbouring weights, rounded.
template <class T, bool MASKED, class Scores, class Mask, class Edit, class Emit>
CUFA2_DEVICE void weigh(Scores& s, const Mask& mask, int key, int query, const Edit& edit,
                        const Emit& emit) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int r = 0; r < Scores::kRows; ++r) {
    int begin = 0, end = 0;  // queries that see this key, counted from the lane's first column
    if constexpr (MASKED) {
      const ColumnRange range = mask.column_range(key + Scores::row(lane, r));
      const int origin = query + Scores::column(lane, 0, 0);
      begin = range.begin - origin;
      end = range.end - origin;
    }
#pragma unroll
    for (int n = 0; n < Scores::N_TILES; ++n) {
      float weight[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s.at[r >> 1][n][2 * (r & 1) + c];
        weight[c] = edit(x, r, n, c);
        const int column = Scores::column(0, n, c);
        if (MASKED && (column < begin || column >= end)) weight[c] = x = 0.0f;
      }
      emit(r, n, pack2<T>(weight[0], weight[1]));
    }
  }
}

template <class T, class Scores, class Mask, class Edit, class Emit>
CUFA2_DEVICE void weigh(Scores& s, bool masked, const Mask& mask, int key, int query,
                        const Edit& edit, const Emit& emit) {
  if (masked) {
    weigh<T, true>(s, mask, key, query, edit, emit);
  } else {
    weigh<T, false>(s, mask, key, query, edit, emit);
  }
}

// P^T or dS^T of a block of queries. A warp that has its keys to itself keeps what it needs for dV
// or dK in registers; shared memory holds what other warps need.
template <class Tile> struct Weights {
  using Smem = typename Tile::P;
  static constexpr int kSteps = Tile::kQueries / 16;
  static_assert(Smem::kChunks == Smem::kStretch, "a row is one stretch");
  u32 kept[Tile::kExchange ? 1 : kSteps][Tile::M_TILES][4];

  // Where a lane puts its weights of the warp's queries from `column` on.
  struct Target {
    u32 base;
    int mixed;
  };
  static CUFA2_DEVICE Target target(u32 tile, int column) {
    const int thread = thread_index(), lane = thread % 32;
    const int row = Tile::key_row(thread) + lane / 4;
    return {tile + row * Smem::kRowBytes + 4 * (lane % 4), column / 8 ^ Smem::swizzle(row)};
  }

  // The weights of the lane's row r, tile n. SHARED: other warps need them.
  template <bool SHARED> CUFA2_DEVICE void put(const Target& at, int r, int n, u32 pair) {
    if constexpr (SHARED) {
      store_shared_4(at.base + ((at.mixed ^ n) << 4) + 8 * r * Smem::kRowBytes, pair);
    }
    if constexpr (!Tile::kExchange) kept[n / 2][r / 2][2 * (n % 2) + r % 2] = pair;
  }

  // D += these weights times the rows of Q or dO from `first_row` on. `keep` as multiply_kept has
  // it, if KEPT.
  template <class Rows, bool KEPT, class Acc, class Keep>
  CUFA2_DEVICE void multiply_rows(Acc& d, u32 tile, u32 rows, int first_row, int first_column,
                                  const Keep& keep) const {
    using T = typename Tile::T;
    const int thread = thread_index(), lane = thread % 32;
    const auto weights =
        FragmentReader<Smem>::by_row(tile + Tile::key_row(thread) * Smem::kRowBytes, lane);
    const auto reader = FragmentReader<Rows>::by_row(rows + first_row * Rows::kRowBytes, lane)
                            .template of_side<Tile::kSides>(Tile::side(thread));
    auto load_a = [&](u32 (&a)[4], int m, int kk) {
      if constexpr (Tile::kExchange) {
        weights.load(a, m, kk);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = kept[kk][m][e];
      }
    };
    auto load_b = [&](u32 (&b)[4], int n, int kk) {
      reader.load_trans(b, kk, first_column / 16 + n * Tile::kSides);
    };
    if constexpr (KEPT) {
      multiply_kept<T, kSteps>(d, load_a, load_b, keep);
    } else {
      multiply<T, kSteps>(d, load_a, load_b);
    }
  }
};

// Adds an accumulator to the dQ buffer; `sum` is the lane's place in the first fragment.
template <class Tile, class Acc> CUFA2_DEVICE void add_fragments(float* sum, const Acc& x) {
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < Acc::N_TILES; ++n) {
      const int column = n / 2 * 2 * Tile::kColumnWarps + n % 2;
      reduce_add_4(sum + GradQBuffer<Tile::D>::offset(m * Tile::kRowWarps, column, 0, 0),
                   x.at[m][n]);
    }
}

// One query block's share of dQ, added to the buffer. Where a NaN comes up under a mask it is done
// by the product that lets none reach a row that does not keep its key. The warps take turns at
// the 16-row and the 16-column blocks.
template <class Tile, class Frame>
CUFA2_DEVICE void add_grad_q(const BwdParams& p, const Frame& frame, const Step& at, u32 memory,
                             u32 s_tile) {
  using T = typename Tile::T;
  using GradQ = typename Tile::GradQ;
  const auto s = FragmentReader<typename Tile::P>::by_pair(s_tile, thread_index() % 32)
                     .template of_side<Tile::kRowWarps>(Tile::row_side(thread_index()));
  const auto k = FragmentReader<typename Tile::K>::by_row(memory, thread_index() % 32)
                     .template of_side<Tile::kColumnWarps>(Tile::column_side(thread_index()));
  auto load_a = [&](u32 (&a)[4], int m, int kk) { s.load_trans(a, kk, m * Tile::kRowWarps); };
  auto load_b = [&](u32 (&b)[4], int n, int kk) { k.load_trans(b, kk, n * Tile::kColumnWarps); };
  GradQ dq;
  dq.clear();
  multiply<T, Tile::BLOCK_K / 16>(dq, load_a, load_b);
  warp_sync();  // what follows needs registers of its own
  const int thread = thread_index(), lane = thread % 32;
  const int row = Tile::row_side(thread), column = Tile::column_side(thread);
  const int query = at.block * Tile::BLOCK_Q;
  float* sum = p.dq_sum +
               ((frame.work.batch * p.num_heads + at.head) * p.rows + query) * Tile::D +
               GradQBuffer<Tile::D>::offset(row, 2 * column, lane, 0);
  if constexpr (Frame::kPerRow) {
    if (frame.masked(at) && warp_any(dq.has_nan())) {
      const int i = query + 16 * row + lane / 4, j = frame.work.k_begin + 2 * (lane % 4);
      // Rows of a side lie kRowWarps times as far apart.
      auto keep = [&](int r, int c) {
        return frame.mask.keep(i + r / 16 * 16 * Tile::kRowWarps + r % 16, j + c);
      };
#pragma unroll 1
      for (int n = 0; n < GradQ::N_TILES / 2; ++n) {
        Accumulator<GradQ::M_TILES, 2> part;
        part.clear();
        auto load_part = [&](u32 (&b)[4], int, int kk) { load_b(b, n, kk); };
        multiply_kept<T, Tile::BLOCK_K / 16>(part, load_a, load_part, keep);
        const int columns = 2 * n * Tile::kColumnWarps;
        add_fragments<Tile>(sum + GradQBuffer<Tile::D>::offset(0, columns, 0, 0), part);
      }
      return;
    }
  }
  add_fragments<Tile>(sum, dq);
}

// S^T += A B^T: A holds the keys of K or V, B the queries of Q or dO from `column` on.
template <class Tile, class Keys, class Queries, class Scores>
CUFA2_DEVICE void multiply_transposed(Scores& s, u32 keys, u32 queries, int column) {
  const int thread = thread_index(), lane = thread % 32;
  const auto a =
      FragmentReader<Keys>::by_row(keys + Tile::key_row(thread) * Keys::kRowBytes, lane);
  const auto b = FragmentReader<Queries>::by_pair(queries + column * Queries::kRowBytes, lane);
  multiply<typename Tile::T, Keys::COLS / 16>(
      s, [&](u32 (&x)[4], int m, int kk) { a.load(x, m, kk); },
      [&](u32 (&x)[4], int n, int kk) { b.load(x, n, kk); });
}

// Walks over the query blocks. dk and dv get the columns from `first_column` on, the sides taking
// turns at 16 of them. KEPT: by the product that lets no NaN reach a key that its row does not
// keep; dQ is left alone.
template <class Tile, bool KEPT, class Score, class Frame, class GradK, class GradV>
CUFA2_DEVICE void walk(const BwdParams& p, Frame& frame, const Score& score, u32 memory,
                       GradK& dk, GradV& dv, int first_column) {
  using T = typename Tile::T;
  constexpr int BLOCK_Q = Tile::BLOCK_Q;
  // A pass over part of the columns may go past the smaller of D and Dv: it repeats the last ones.
  const int dk_column = min(first_column, Tile::D - 16 * Tile::kSides);
  const int dv_column = min(first_column, Tile::DV - 16 * Tile::kSides);

  auto load_q = [&](const Step& at, u32 stage) {
    const int row = at.block * BLOCK_Q, thread = thread_index();
    const T* q = static_cast<const T*>(p.q) + frame.work.batch * p.q_stride.batch +
                 at.head * p.q_stride.head + row * p.q_stride.row;
    TileLoader<typename Tile::Q, Tile::kThreads>::load(
        memory + Tile::kQ + stage, q, p.q_stride.row, frame.len.q - row, p.head_dim, thread);
    if (thread < BLOCK_Q / 2) {  // 4 floats a thread: row_lse, then delta
      const i64 work = (frame.work.batch * p.num_heads + at.head) * p.rows + row;
      const auto* rows = static_cast<const float*>(4 * thread < BLOCK_Q ? p.row_lse : p.delta);
      cp_async_16(memory + Tile::kQ + stage + Tile::Q::kBytes + 16 * thread,
                  rows + work + 4 * thread % BLOCK_Q, true);
    }
  };
  auto load_grad_o = [&](const Step& at, u32 stage) {
    const int row = at.block * BLOCK_Q;
    const T* grad_o = static_cast<const T*>(p.grad_o) + frame.work.batch * p.grad_o_stride.batch +
                      at.head * p.grad_o_stride.head + row * p.grad_o_stride.row;
    TileLoader<typename Tile::GradO, Tile::kThreads>::load(
        memory + Tile::kGradO + stage, grad_o, p.grad_o_stride.row, frame.len.q - row,
        p.head_dim_v, thread_index());
  };

  // Loads of a block are issued one block ahead of its scores: right after the barrier that ends
  // the block before, or, where there is no second stage, as soon as nobody reads the first.
  constexpr bool kQAhead = Tile::Q_STAGES > 1, kDoAhead = Tile::DO_STAGES > 1;
  static_assert(kQAhead || !kDoAhead, "dO is not loaded further ahead than Q");
  // Steps in registers are 3 to 6 % faster on an H200, where ptxas then spills none.
  constexpr bool kShared = !Tile::kExchange || !Tile::ACCUMULATE || !Score::kIdentity ||
                           (Tile::kSides > 2 && !Frame::kPerRow);
  Position<kShared, Frame> position(p, frame);
  load_q(position.at(), 0);
  load_grad_o(position.at(), 0);
  cp_async_commit();
  if (const Step next = position.template after<1>(); frame.within(p, next)) {
    if constexpr (kQAhead) load_q(next, Tile::kQStage);
    if constexpr (kDoAhead) load_grad_o(next, Tile::GradO::kBytes);
  }
  cp_async_commit();
  cp_async_wait<1>();
  block_sync();  // the first block is visible
  for (; frame.within(p, position.at()); position.advance()) {
    const u32 parity = position.parity();
    const u32 q_tile = memory + Tile::kQ + (kQAhead ? parity * Tile::kQStage : 0);
    const u32 do_tile = memory + Tile::kGradO + (kDoAhead ? parity * Tile::GradO::kBytes : 0);
    const u32 s_tile = memory + Tile::kS + (Tile::kSStages > 1 ? parity * Tile::P::kBytes : 0);
    // Cheap to find again: kept only where ptxas then needs no more registers than there are.
    constexpr bool kKeep = Tile::ACCUMULATE || !Frame::kPerRow;
    const bool masked_once = kKeep && frame.masked(position.at());
    const int query_once = kKeep ? position.at().block * BLOCK_Q : 0;
    auto masked = [&] { return kKeep ? masked_once : frame.masked(position.at()); };
    auto query = [&] { return kKeep ? query_once : position.at().block * BLOCK_Q; };
    Weights<Tile> of_p, of_s;
#pragma unroll 1
    for (int part = 0; part < Tile::kParts; ++part) {
      const int thread = thread_index(), lane = thread % 32;
      const int column = (Tile::kExchange ? Tile::side(thread) : part) * Tile::kColumns;
      const int key = frame.work.k_begin + Tile::key_row(thread);
      const int first_row = Tile::kExchange ? 0 : part * Tile::kColumns;
      auto rows = [&] {
        return q_tile + Tile::Q::kBytes + 4 * (column + 2 * (thread_index() % 4));
      };
      auto keep = [&](int r, int c) {
        return frame.mask.keep(query() + first_row + 2 * (lane % 4) + c, key + lane / 4 + r);
      };
      typename Tile::Scores s, ds;
      s.clear();
      multiply_transposed<Tile, typename Tile::K, typename Tile::Q>(s, memory, q_tile, column);
      Pair of_row[Tile::Scores::N_TILES];
      u32 at_row = rows();
#pragma unroll
      for (int n = 0; n < Tile::Scores::N_TILES; ++n) of_row[n] = load_shared_8(at_row + 32 * n);
      const auto p_at = Weights<Tile>::target(memory + Tile::kP, column);
      weigh<T>(
          s, masked(), frame.mask, key, query() + column,
          [&](float& x, int, int n, int c) {
            const float logit = score.score(x), lse = c == 0 ? of_row[n].lo : of_row[n].hi;
            const float weight = exp2_approx(fmaf(logit, p.scale_log2, -lse));
            x = Score::kIdentity ? weight : weight * score.grad(logit);
            return weight;
          },
          [&](int r, int n, u32 pair) { of_p.template put<Tile::kExchange>(p_at, r, n, pair); });
      if constexpr (!Tile::kExchange) {
        of_p.template multiply_rows<typename Tile::GradO, KEPT>(dv, 0, do_tile, first_row,
                                                                dv_column, keep);
      }
      ds.clear();
      multiply_transposed<Tile, typename Tile::V, typename Tile::GradO>(ds, memory + Tile::kV,
                                                                        do_tile, column);
#pragma unroll
      for (int n = 0; n < Tile::Scores::N_TILES; ++n) {
        of_row[n] = load_shared_8(at_row + 4 * BLOCK_Q + 32 * n);
      }
      const auto s_at = Weights<Tile>::target(s_tile, column);
      weigh<T>(
          ds, masked(), frame.mask, key, query() + column,
          [&](float& x, int r, int n, int c) {
            const float delta = c == 0 ? of_row[n].lo : of_row[n].hi;
            return s.at[r >> 1][n][2 * (r & 1) + c] * (x - delta);
          },
          [&](int r, int n, u32 pair) {
            of_s.template put<Tile::kExchange || Tile::ACCUMULATE>(s_at, r, n, pair);
          });
      if constexpr (Tile::kExchange) {
        // P^T and dS^T of these keys are complete.
        group_sync(1 + thread_index() / 32 / Tile::kSides, 32 * Tile::kSides);
        of_p.template multiply_rows<typename Tile::GradO, KEPT>(dv, memory + Tile::kP, do_tile, 0,
                                                                dv_column, keep);
      }
      if (!kDoAhead && part == Tile::kParts - 1) {
        block_sync();  // nobody reads dO any more
        const Step next = position.template after<1>();
        if (frame.within(p, next)) load_grad_o(next, 0);
        cp_async_commit();
      }
      of_s.template multiply_rows<typename Tile::Q, KEPT>(dk, s_tile, q_tile, first_row,
                                                          dk_column, keep);
    }
    position.prepare();
    const Step after = position.template after<kQAhead ? 2 : 1>();
    cp_async_wait<0>();
    block_sync();  // dS^T and the next block are visible; nobody reads this block's Q and dO
    if (frame.within(p, after)) {
      if constexpr (kQAhead) load_q(after, parity * Tile::kQStage);
      if constexpr (kDoAhead) load_grad_o(after, parity * Tile::GradO::kBytes);
      if constexpr (!kQAhead) load_q(after, 0);
    }
    cp_async_commit();
    if constexpr (!KEPT && Tile::ACCUMULATE) {
      // The branch keeps ptxas from preparing dQ's addresses before the products above, for which
      // two sides and no mask leave no registers. Elsewhere it only costs time.
      if (Tile::kSides != 2 || Frame::kPerRow || p.dq_sum) {
        add_grad_q<Tile>(p, frame, position.at(), memory, s_tile);
      }
    }
    if constexpr (!kQAhead) {
      cp_async_wait<0>();
      block_sync();
    }
  }
  block_sync();  // every warp is done with the tiles
}

// Writes dK and dV from column `column` on, as many as the accumulators hold. They pass through
// the shared memory of K and V, so that they leave in whole rows.
template <class Tile, class Frame, class GradK, class GradV>
CUFA2_DEVICE void store_grads(const BwdParams& p, const Frame& frame, u32 memory, const GradK& dk,
                              const GradV& dv, int column) {
  using T = typename Tile::T;
  const int row = Tile::key_row(thread_index()), side = Tile::side(thread_index());
  if (column < Tile::D) {
    stage<typename Tile::K, T, Tile::kSides>(memory, dk, p.scale, row, column, side);
  }
  if (column < Tile::DV) {
    stage<typename Tile::V, T, Tile::kSides>(memory + Tile::kV, dv, 1.0f, row, column, side);
  }
  block_sync();
  const KeyWork& work = frame.work;
  T* dk_out = static_cast<T*>(p.dk) + work.batch * p.dk_stride.batch +
              work.head * p.dk_stride.head + work.k_begin * p.dk_stride.row;
  T* dv_out = static_cast<T*>(p.dv) + work.batch * p.dv_stride.batch +
              work.head * p.dv_stride.head + work.k_begin * p.dv_stride.row;
  const int rows = p.seqlen_k - work.k_begin, real = frame.len.k - work.k_begin;
  store_rows<typename Tile::K, Tile::kThreads>(
      memory, dk_out, p.dk_stride.row, rows, real, column,
      min(p.head_dim, column + Tile::kSides * 8 * GradK::N_TILES));
  store_rows<typename Tile::V, Tile::kThreads>(
      memory + Tile::kV, dv_out, p.dv_stride.row, rows, real, column,
      min(p.head_dim_v, column + Tile::kSides * 8 * GradV::N_TILES));
}

template <class Tile, class Mask, class Score> CUFA2_DEVICE void bwd_sm80(const BwdParams& p) {
  using T = typename Tile::T;
  using Frame = KeyFrame<Tile, Mask>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ __align__(16) unsigned char frame_memory[sizeof(Frame)];
  auto& frame = *reinterpret_cast<Frame*>(frame_memory);
  const KeyWork work = find_key_work<Tile::BLOCK_K>(p);
  if (!work.valid) return;
  if (thread_index() == 0) frame = Frame(p, work);
  block_sync();
  const Score score(p);
  const u32 memory = shared_address(shared_memory);

  auto load_kv = [&] {
    const int thread = thread_index(), keys_left = frame.len.k - work.k_begin;
    const T* k = static_cast<const T*>(p.k) + work.batch * p.k_stride.batch +
                 work.head * p.k_stride.head + work.k_begin * p.k_stride.row;
    const T* v = static_cast<const T*>(p.v) + work.batch * p.v_stride.batch +
                 work.head * p.v_stride.head + work.k_begin * p.v_stride.row;
    TileLoader<typename Tile::K, Tile::kThreads>::load(memory, k, p.k_stride.row, keys_left,
                                                       p.head_dim, thread);
    TileLoader<typename Tile::V, Tile::kThreads>::load(memory + Tile::kV, v, p.v_stride.row,
                                                       keys_left, p.head_dim_v, thread);
  };
  typename Tile::GradK dk;
  typename Tile::GradV dv;
  dk.clear();
  dv.clear();
  if (frame.count > 0) {
    load_kv();
    walk<Tile, false>(p, frame, score, memory, dk, dv, 0);
  }
  const bool nan = dk.has_nan() || dv.has_nan();
  store_grads<Tile>(p, frame, memory, dk, dv, 0);
  if constexpr (Mask::kPerRow) {
    if (!block_any(nan)) return;
    // Rare: once more, 16 columns a warp at a time, so that the longer product has registers.
#pragma unroll 1
    for (int column = 0; column < max(Tile::D, Tile::DV); column += 16 * Tile::kSides) {
      block_sync();  // the tiles have been stored
      load_kv();
      Accumulator<Tile::M_TILES, 2> k_part, v_part;
      k_part.clear();
      v_part.clear();
      walk<Tile, true>(p, frame, score, memory, k_part, v_part, column);
      store_grads<Tile>(p, frame, memory, k_part, v_part, column);
    }
  }
}
