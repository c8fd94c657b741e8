// Tiles and fragments of float32 and float64.
//
// A tile is a SmemTile over twice or four times as many 16-bit columns: the same bytes, the same
// swizzle, the same loader. Chunk c of row r (16 bytes) lies at chunk c ^ (r % 8) of its 128-byte
// stretch. Shared memory serves eight lanes of 16 bytes at a time; g = lane / 4, t = lane % 4:
//   Q and K, [n][k], float32: ldmatrix; a chunk of each of eight rows, all in different places.
//   Q and K, [n][k], float64: lane (g, t) takes chunk 2t + kk % 2 of row g. Chunks of an even row
//     keep their parity, those of the odd row beside it change it: all in different places.
//   V, [k][n]: lane (g, t) takes one chunk of rows 2t and 2t + 1 (pair_chunk). Of two neighbouring
//     g one takes an even chunk, which mixed with 2t runs over all even ones, the other an odd
//     one, which runs over the odd ones; the same for row 2t + 1.
// So no access has a bank conflict. Which k takes which slot of a product is free where A and B
// agree, and so is the order of the columns of O: the two float64 of a chunk are slots t and t + 4
// of Q and K; P leaves its accumulator as an A operand without a shuffle, slots t and t + 4 being
// keys 2t and 2t + 1; and column g of tile j of V is element j of the chunk that lane (g, t)
// takes, so that a lane of O holds two whole chunks and stores them as they are.
#pragma once
#include "../prim/barrier.cuh"
#include "../prim/wide.cuh"
#include "frag.cuh"

// A (16 * M_TILES) x (8 * N_TILES) accumulator of T spread over a warp: Accumulator for any T.
template <class T, int M_TILES_, int N_TILES_> struct WideAccumulator {
  static constexpr int M_TILES = M_TILES_;
  static constexpr int N_TILES = N_TILES_;
  static constexpr int kRows = 2 * M_TILES;  // rows of which a lane owns elements
  static constexpr int kTileBytes = 128 * sizeof(T);
  T at[M_TILES][N_TILES][4];

  CUFA2_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) at[m][n][e] = T(0);
  }

  // Whether this lane owns a NaN.
  CUFA2_DEVICE bool has_nan() const {
    bool nan = false;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) nan = nan || at[m][n][e] != at[m][n][e];
    return nan;
  }

  // 0 if all that this lane owns is finite, else NaN.
  CUFA2_DEVICE T nan_unless_finite() const {
    T sum = T(0);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum = fma(at[m][n][e], T(0), sum);
    return sum;
  }

  // Row within the warp tile of a lane's r-th row, and column of element e of tile n.
  static CUFA2_DEVICE int row(int lane, int r) { return (r >> 1) * 16 + (r & 1) * 8 + lane / 4; }
  static CUFA2_DEVICE int column(int lane, int n, int e) {
    return n * 8 + 2 * (lane % 4) + (e & 1);
  }
};

// Reads the operands of step kk of a stretch of Q and K, [n][k]: rows 16 * m + {g, g + 8} of Q as
// A, and rows 8 * n + g of K as B of the kRun steps from kk on.
template <class T, class Smem> struct RowReader {
  static_assert(is_same<T, double>, "float has a reader of its own");
  static constexpr int kSteps = 2;  // of a stretch
  static constexpr int kRun = 1;  // steps that are read at once
  u32 even, odd;  // the lane's chunks of row g

  static CUFA2_DEVICE RowReader for_a(u32 tile, int lane) {
    const int g = lane / 4, t = lane % 4;
    return {tile + Smem::offset(g, 2 * t), tile + Smem::offset(g, 2 * t + 1)};
  }
  static CUFA2_DEVICE RowReader for_run(u32 tile, int lane) { return for_a(tile, lane); }

  CUFA2_DEVICE void load_run(double (&b)[1][2], int n, int stretch, int kk) const {
    const u32 row = (kk % 2 ? odd : even) + n * 8 * Smem::kRowBytes;
    const Piece<double> piece = load_piece<double>(row + stretch * 128);
    b[0][0] = piece.at[0];
    b[0][1] = piece.at[1];
  }
  CUFA2_DEVICE void load_a(double (&a)[4], int m, int stretch, int kk) const {
    double rows[2][1][2];
    load_run(rows[0], 2 * m, stretch, kk);
    load_run(rows[1], 2 * m + 1, stretch, kk);
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = rows[e & 1][0][e >> 1];
  }
};

template <class Smem> struct RowReader<float, Smem> {
  static constexpr int kSteps = 4;
  static constexpr int kRun = 2;
  FragmentReader<Smem> reader;

  static CUFA2_DEVICE RowReader for_a(u32 tile, int lane) {
    return {FragmentReader<Smem>::by_row(tile, lane)};
  }
  // Lanes address rows 0-7, one chunk after the other.
  static CUFA2_DEVICE RowReader for_run(u32 tile, int lane) {
    const int row = lane & 7;
    return {{tile + row * Smem::kRowBytes, static_cast<u32>((lane >> 3) ^ Smem::swizzle(row))}};
  }
  CUFA2_DEVICE void load_a(float (&a)[4], int row, int stretch, int kk) const {
    u32 r[4];
    ldmatrix_x4(r, reader.address(row, kk) + stretch * 128);
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = __uint_as_float(r[e]);
  }
  // kk is even.
  CUFA2_DEVICE void load_run(float (&b)[2][2], int n, int stretch, int kk) const {
    u32 r[4];
    ldmatrix_x4(r, reader.address(0, kk) + n * 8 * Smem::kRowBytes + stretch * 128);
#pragma unroll
    for (int e = 0; e < 4; ++e) b[e >> 1][e & 1] = __uint_as_float(r[e]);
  }
};

// The chunk of a stretch of V that is column 2t + c of a product, and of O chunk c of lane (g, t).
// Of float two neighbouring lanes hold 32 bytes, a sector of global memory; of double one lane.
template <class T> CUFA2_DEVICE int pair_chunk(int t, int c) {
  if constexpr (is_same<T, double>) return 2 * t + c;
  return (t % 2 + t / 2 * 4) ^ 3 * c;
}

// Reads V, [k][n]: the lane's chunk of a stretch in rows row + 2t and row + 2t + 1.
template <class T, class Smem> struct PairReader {
  u32 first, second;

  static CUFA2_DEVICE PairReader at(u32 tile, int lane) {
    const int g = lane / 4, t = lane % 4, chunk = pair_chunk<T>(g / 2, g % 2);
    return {tile + Smem::offset(2 * t, chunk), tile + Smem::offset(2 * t + 1, chunk)};
  }
  CUFA2_DEVICE void load(Piece<T> (&rows)[2], int row, int stretch) const {
    rows[0] = load_piece<T>(first + row * Smem::kRowBytes + stretch * 128);
    rows[1] = load_piece<T>(second + row * Smem::kRowBytes + stretch * 128);
  }
};

// Transposes what the four lanes of a quad hold: lane t's x[i] becomes lane i's x[t].
template <class T> CUFA2_DEVICE void quad_transpose(T (&x)[4]) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const T theirs = __shfl_xor_sync(kFullWarp, upper ? x[i] : x[i + step], step);
      x[i] = upper ? theirs : x[i];
      x[i + step] = upper ? x[i + step] : theirs;
    }
  }
}

// A lane's elements of a 16 x 8 tile in shared memory: 16 bytes of each lane in turn, so that it
// finds its own without a conflict. `own` is where its first 16 bytes are.
template <class T> CUFA2_DEVICE void load_tile(T (&x)[4], u32 own) {
#pragma unroll
  for (int e = 0; e < 4; e += Piece<T>::kSize) {
    const Piece<T> piece = load_piece<T>(own + 512 * (e / Piece<T>::kSize));
#pragma unroll
    for (int j = 0; j < Piece<T>::kSize; ++j) x[e + j] = piece.at[j];
  }
}
template <class T> CUFA2_DEVICE void store_tile(u32 own, const T (&x)[4]) {
#pragma unroll
  for (int e = 0; e < 4; e += Piece<T>::kSize) {
    Piece<T> piece;
#pragma unroll
    for (int j = 0; j < Piece<T>::kSize; ++j) piece.at[j] = x[e + j];
    store_piece(own + 512 * (e / Piece<T>::kSize), piece);
  }
}

// How far tile (m, n) of an accumulator is from its first.
template <class Acc> CUFA2_DEVICE u32 tile_offset(int m, int n) {
  return (m * Acc::N_TILES + n) * Acc::kTileBytes;
}

template <class Acc> CUFA2_DEVICE void store_scores(u32 own, const Acc& s) {
#pragma unroll
  for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < Acc::N_TILES; ++n) store_tile(own + tile_offset<Acc>(m, n), s.at[m][n]);
}

// Barrier among the SPLIT warps of a team.
template <class Tile> CUFA2_DEVICE void sync_sides() {
  group_sync(1 + Tile::team(thread_index()), 32 * Tile::SPLIT);
}
// The same, and tells its threads whether any of them raised `flag`.
template <class Tile> CUFA2_DEVICE bool any_side(bool flag) {
  return group_any(1 + Tile::team(thread_index()), 32 * Tile::SPLIT, flag);
}

// Adds up the S of the SPLIT warps of a team, in the same order in each of them.
template <class Tile> CUFA2_DEVICE void sum_sides(typename Tile::Scores& s, u32 memory) {
  using T = typename Tile::T;
  using Scores = typename Tile::Scores;
  const int thread = thread_index();
  const u32 team =
      memory + Tile::team(thread) * Tile::SPLIT * Tile::kScoreBytes + thread % 32 * 16;
  store_scores(team + Tile::side(thread) * Tile::kScoreBytes, s);
  sync_sides<Tile>();
#pragma unroll
  for (int m = 0; m < Scores::M_TILES; ++m)
#pragma unroll
    for (int n = 0; n < Scores::N_TILES; ++n) {
      const u32 tile = team + tile_offset<Scores>(m, n);
      load_tile(s.at[m][n], tile);
#pragma unroll
      for (int side = 1; side < Tile::SPLIT; ++side) {
        T more[4];
        load_tile(more, tile + side * Tile::kScoreBytes);
#pragma unroll
        for (int e = 0; e < 4; ++e) s.at[m][n][e] += more[e];
      }
    }
}
