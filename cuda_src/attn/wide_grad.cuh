// Gradients of float32 and float64 scores: a walk's rows and columns, and what turns S and dP of a
// block into P and dS, at the accuracy of the type.
#pragma once
#include "../tile/wide_product.cuh"
#include "key_walk.cuh"
#include "query_walk.cuh"
#include "wide.cuh"

// A walk's view of the problem: positions and tensors as rows and columns.
template <class Tile, class Mask, bool KEYS = Tile::KEYS> struct Walk : KeyFrame<Tile, Mask> {
  using Base = KeyFrame<Tile, Mask>;
  bool bad_keys = false;  // whether K of the tile holds a NaN or an infinity
  CUFA2_DEVICE Walk(const BwdParams& p, const KeyWork& w) : Base(p, w) {}
  CUFA2_DEVICE bool any() const { return this->count > 0; }
  CUFA2_DEVICE int row_begin() const { return this->work.k_begin; }
  CUFA2_DEVICE int rows() const { return this->len.k; }
  CUFA2_DEVICE int columns() const { return this->len.q; }
  // Columns that some and that all of these rows keep. Those past the last have P = 0: unmasked.
  CUFA2_DEVICE KvRange range(int begin, int end) const {
    KvRange r = this->mask.q_range(begin, end);
    if (r.full_end >= columns()) r.full_end = 0x7fffffff;
    return r;
  }
  CUFA2_DEVICE RowRange kept(int row) const { return this->mask.column_range(row); }
  CUFA2_DEVICE int row_head() const { return this->work.head; }
  static CUFA2_DEVICE int column_head(const BwdParams&, const Step& at) { return at.head; }
};

template <class Tile, class Mask> struct Walk<Tile, Mask, false> : QueryFrame<Tile, Mask> {
  using Base = QueryFrame<Tile, Mask>;
  CUFA2_DEVICE Walk(const BwdParams& p, const Work& w) : Base(p, w) {}
  CUFA2_DEVICE bool any() const { return this->first <= this->last; }
  CUFA2_DEVICE Step begin(const BwdParams&) const { return {this->work.head, this->last}; }
  CUFA2_DEVICE Step next(const Step& at) const { return {at.head, at.block - 1}; }
  CUFA2_DEVICE bool within(const BwdParams&, const Step& at) const {
    return at.block >= this->first;
  }
  CUFA2_DEVICE int row_begin() const { return this->work.q_begin; }
  CUFA2_DEVICE int rows() const { return this->len.q; }
  CUFA2_DEVICE int columns() const { return this->len.k; }
  CUFA2_DEVICE KvRange range(int begin, int end) const {
    return this->mask.kv_range(begin, min(end, rows()));
  }
  CUFA2_DEVICE RowRange kept(int row) const { return this->mask.row_range(row); }
  CUFA2_DEVICE int row_head() const { return this->work.head; }
  static CUFA2_DEVICE int column_head(const BwdParams& p, const Step& at) {
    return at.head / p.group;
  }
};

// Where a team keeps dP, then dS, of a block of columns, tile by tile of 16 rows and 8 columns; S,
// then P, lie kScores further on. Before they are summed up each side has its own, a lane's
// elements by themselves (store_scores); afterwards side n % SPLIT has the tiles of columns n.
//
// A tile of dS serves two products: dK (dQ) takes it as rows of pairs of columns, as the
// accumulator has it, and the dQ that a key tile adds up takes single elements, lane (g, t) those
// of column g in rows 2t and 2t + 1. Its 16-byte chunks lie so that neither has a bank conflict.
template <class Tile> struct Weights {
  using T = typename Tile::T;
  static constexpr int kPiece = Piece<T>::kSize, kChunks = 8 / kPiece;  // of a row of a tile
  static constexpr u32 kScores = Tile::WARPS * Tile::kScoreBytes;
  u32 team;  // the team's first side
  int side, lane;

  CUFA2_DEVICE Weights(u32 memory, int thread)
      : team(memory + Tile::kWeights + Tile::team(thread) * Tile::SPLIT * Tile::kScoreBytes),
        side(Tile::side(thread)), lane(thread % 32) {}

  // Where the lane's own share of a side begins, and how far tile (m, n) is.
  CUFA2_DEVICE u32 own(int of_side) const {
    return team + of_side * Tile::kScoreBytes + 16 * lane;
  }
  static CUFA2_DEVICE u32 tile(int m, int n) { return tile_offset<typename Tile::Scores>(m, n); }

  // Where element (row, column) of a tile of dS lies in it.
  static CUFA2_DEVICE u32 element(int row, int column) {
    constexpr int kRows = 8 / kChunks;  // of 128 bytes
    const int mixed = (row % kRows * kChunks + column / kPiece) ^ (row / kRows % kChunks * 2);
    return row / kRows * 128 + mixed * 16 + column % kPiece * sizeof(T);
  }
  // The next 8 rows of a tile are mixed as the first.
  static constexpr u32 kHalf = 64 * sizeof(T);

  // dS of tile (m, n), summed up, as the accumulator's elements of this lane.
  CUFA2_DEVICE u32 grad(int m, int n) const {
    return team + n % Tile::SPLIT * Tile::kScoreBytes + tile(m, n) +
           element(lane / 4, 2 * (lane % 4));
  }
  CUFA2_DEVICE void load_grad(T (&x)[4], int m, int n) const {
    load_two<T>(x[0], x[1], grad(m, n));
    load_two<T>(x[2], x[3], grad(m, n) + kHalf);
  }
  // dS seen from the columns: an operand with columns 16 n.. as rows, rows 8 kk.. as columns; kk
  // counts on into the teams after this one. Columns past the last are 0.
  CUFA2_DEVICE void load_grad_transposed(T (&x)[4], int n, int kk) const {
    const int row = lane % 4 * 2, column = lane / 4;
    const u32 first = element(row, column), second = element(row + 1, column);
    const int m = kk / 2 % Tile::M_TILES, further = kk / 2 / Tile::M_TILES;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[2 * h] = x[2 * h + 1] = T(0);
      if (2 * n + h >= Tile::N_TILES) continue;
      const u32 at = team +
                     (further * Tile::SPLIT + (2 * n + h) % Tile::SPLIT) * Tile::kScoreBytes +
                     tile(m, 2 * n + h) + kk % 2 * kHalf;
      x[2 * h] = load_element<T>(at + first);
      x[2 * h + 1] = load_element<T>(at + second);
    }
  }
  // Sets dS of the team to 0, every side its share.
  CUFA2_DEVICE void clear_grad() const {
    for (u32 at = 0; at < Tile::kScoreBytes; at += 512) {
      store_shared_16(own(side) + at, {{0u, 0u, 0u, 0u}});
    }
  }
  CUFA2_DEVICE void load_weight(T (&x)[4], int m, int n) const {
    load_tile(x, own(n % Tile::SPLIT) + kScores + tile(m, n));
  }
};

// What becomes of one element: S and dP -> P and dS.
template <class Tile, class Score> struct PairGrad {
  using T = typename Tile::T;
  WideScore<Score, T> score;
  T scale, outer;  // what S is multiplied by in the exponent, and dS
  // Natural exponents: scale_log2 and lse / ln 2 would add roundings that a plain loop has not.
  CUFA2_DEVICE explicit PairGrad(const BwdParams& p)
      : score(p),
        scale(T(Score::kIdentity ? p.exact_scale : p.exact_scale_log2 * 0.69314718055994531)),
        outer(T(p.exact_scale)) {}
  CUFA2_DEVICE void operator()(T& s, T& dp, T lse, T delta) const {
    constexpr T kLog2 = 1.4426950408889634;
    const T logit = score.score(s), weight = power_of_2(fma(logit, scale, -lse) * kLog2);
    T grad = weight * (dp - delta) * outer;
    if constexpr (!Score::kIdentity) grad *= score.grad(logit);
    s = weight;
    dp = grad;
  }
};

// S and dP of row i and column j of the tiles in shared memory, by plain arithmetic.
template <class Tile>
CUFA2_DEVICE typename Tile::T plain_score(const BwdParams& p, u32 memory, u32 stage, int i,
                                          int j) {
  using T = typename Tile::T;
  return plain_product<typename Tile::RowD, typename Tile::ColumnD>(memory, i, stage, j,
                                                                    p.head_dim, T(0));
}
template <class Tile>
CUFA2_DEVICE typename Tile::T plain_dp(const BwdParams& p, u32 memory, u32 stage, int i, int j) {
  using T = typename Tile::T;
  return plain_product<typename Tile::RowDv, typename Tile::ColumnDv>(
      memory + Tile::RowD::kBytes, i, stage + Tile::kColumnDv, j, p.head_dim_v, T(0));
}

// dS of a key tile by plain arithmetic, laid out as load_grad_transposed gives it. `row` and
// `column` are the positions of the first key, row `team_row` of the tile, and the first query.
template <class Tile, class Score, class Frame>
CUFA2_DEVICE void plain_grads(typename Tile::T (&x)[4], const BwdParams& p, const Frame& frame,
                              u32 memory, u32 stage, int team_row, int row, int column, int n,
                              int kk) {
  using T = typename Tile::T;
  const PairGrad<Tile, Score> pair(p);
  const int lane = thread_index() % 32;
#pragma unroll 1
  for (int e = 0; e < 4; ++e) {
    const int i = 8 * kk + lane % 4 * 2 + e % 2, j = 16 * n + 8 * (e / 2) + lane / 4;
    const RowRange range = frame.kept(row + i);
    T grad = T(0);
    if (column + j >= range.begin && column + j < range.end) {
      const u32 facts = stage + Tile::kColumnFacts + j * sizeof(T);
      T s = plain_score<Tile>(p, memory, stage, team_row + i, j);
      grad = plain_dp<Tile>(p, memory, stage, team_row + i, j);
      pair(s, grad, load_element<T>(facts), load_element<T>(facts + Tile::kFactBytes / 2));
    }
#pragma unroll
    for (int at = 0; at < 4; ++at) x[at] = at == e ? grad : x[at];
  }
}

// S and dP of a block of columns -> P and dS. `row` and `column` are the positions of the warp's
// first row and the block's first column.
//
// At float32 accuracy S and dP that are not finite may be wrong (plain_product): SAFE computes
// them anew, otherwise a NaN in dS has the tile done again. Returns whether the team has met one.
template <class Tile, class Score, bool SAFE, class Frame>
CUFA2_DEVICE bool weigh(const BwdParams& p, const Frame& frame, u32 memory, u32 stage, int row,
                        int column, bool masked) {
  using T = typename Tile::T;
  using Layout = Weights<Tile>;
  constexpr int SPLIT = Tile::SPLIT;
  T spoilt = T(0);  // or NaN
  const PairGrad<Tile, Score> pair(p);
  const int thread = thread_index(), lane = thread % 32;
  const Layout at(memory, thread);
  const u32 facts = Tile::KEYS ? stage + Tile::kColumnFacts : memory + Tile::kRowFacts;
  constexpr u32 kDelta = Tile::kFactBytes / 2;
#pragma unroll
  for (int m = 0; m < Tile::M_TILES; ++m) {
    int begin[2] = {0, 0}, end[2] = {Tile::COLUMNS, Tile::COLUMNS};
    T lse[4], delta[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = Tile::Scores::row(lane, 2 * m + h);
      if (masked) {
        // Kept columns of this row, counted from the lane's first column.
        const RowRange range = frame.kept(row + r);
        const int origin = column + Tile::Scores::column(lane, 0, 0) + 8 * at.side;
        begin[h] = range.begin - origin;
        end[h] = range.end - origin;
      }
      if constexpr (!Tile::KEYS) {
        const u32 fact = facts + (Tile::team_row(thread) + r) * sizeof(T);
        lse[2 * h] = lse[2 * h + 1] = load_element<T>(fact);
        delta[2 * h] = delta[2 * h + 1] = load_element<T>(fact + kDelta);
      }
    }
#pragma unroll
    for (int n = 0; n < Tile::N_TILES; n += SPLIT) {  // and at.side further on
      if (Tile::N_TILES % SPLIT != 0 && n + at.side >= Tile::N_TILES) continue;
      if constexpr (Tile::KEYS) {
        const u32 fact = facts + Tile::Scores::column(lane, n + at.side, 0) * sizeof(T);
        load_two<T>(lse[0], lse[1], fact);
        load_two<T>(delta[0], delta[1], fact + kDelta);
        lse[2] = lse[0], lse[3] = lse[1], delta[2] = delta[0], delta[3] = delta[1];
      }
      const u32 place = Layout::tile(m, n) + at.side * Layout::tile(0, 1);
      T x[4], y[4];
      load_tile(x, at.own(0) + Layout::kScores + place);
      load_tile(y, at.own(0) + place);
#pragma unroll
      for (int side = 1; side < SPLIT; ++side) {
        T more[4], more_y[4];
        load_tile(more, at.own(side) + Layout::kScores + place);
        load_tile(more_y, at.own(side) + place);
#pragma unroll
        for (int e = 0; e < 4; ++e) { x[e] += more[e]; y[e] += more_y[e]; }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (SAFE && Tile::kHalves) {
          const int i = Tile::team_row(thread) + Tile::Scores::row(lane, 2 * m + (e >> 1));
          const int j = Tile::Scores::column(lane, n + at.side, e);
          if (!is_finite(x[e])) x[e] = plain_score<Tile>(p, memory, stage, i, j);
          if (!is_finite(y[e])) y[e] = plain_dp<Tile>(p, memory, stage, i, j);
        }
        if constexpr (Tile::kHalves && !SAFE) spoilt = fma(x[e], T(0), fma(y[e], T(0), spoilt));
        pair(x[e], y[e], lse[e], delta[e]);
        const int c = Tile::Scores::column(0, n, e);
        const bool drop = (c < begin[e >> 1]) | (c >= end[e >> 1]);
        x[e] = drop ? T(0) : x[e];
        y[e] = drop ? T(0) : y[e];
      }
      if constexpr (Tile::kHalves && !SAFE) y[3] += spoilt;
      const u32 grad = at.grad(m, n) + at.side * (Tile::kScoreBytes + Layout::tile(0, 1));
      warp_sync();  // the lanes have read the tile
      store_two<T>(grad, y[0], y[1]);
      store_two<T>(grad + Layout::kHalf, y[2], y[3]);
      if (Tile::KEYS) store_tile(at.own(at.side) + Layout::kScores + place, x);
    }
  }
  // Lanes and sides read dS of others.
  const bool bad = spoilt != spoilt;
  if constexpr (SPLIT > 1) return any_side<Tile>(bad);
  warp_sync();
  return warp_any(bad);
}
