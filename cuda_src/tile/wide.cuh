// Tiles and fragments of float32 and float64.
//
// A tile is a SmemTile over twice or four times as many 16-bit columns: the same bytes, the same
// swizzle, the same loader. Chunk c of row r (16 bytes) lies at chunk c ^ (r % 8) of its 128-byte
// stretch. Shared memory serves eight lanes of 16 bytes at a time; g = lane / 4, t = lane % 4:
//   Q and K, [n][k], float32: ldmatrix; a chunk of each of eight rows, all in different places.
//   Q and K, [n][k], float64: lane (g, t) takes chunk 2t + kk % 2 of row g. Chunks of an even row
//     keep their parity, those of the odd row beside it change it: all in different places.
//   V, [k][n]: lane (g, t) takes chunk g of rows 2t and 2t + 1. For even g, g ^ 2t runs over the
//     even chunks, for odd g over the odd ones; the same for row 2t + 1.
// So no access has a bank conflict. Which k takes which slot of a product is free where A and B
// agree, and so is the order of the columns of O: the two float64 of a chunk are slots t and t + 4
// of Q and K; P leaves its accumulator as an A operand without a shuffle, slots t and t + 4 being
// keys 2t and 2t + 1; and column g of tile j of V is element j of chunk g, so that a lane of O
// holds the whole chunks 2t and 2t + 1 and stores them as they are.
#pragma once
#include "../prim/barrier.cuh"
#include "../prim/wide.cuh"
#include "frag.cuh"

// A (16 * M_TILES) x (8 * N_TILES) accumulator of T spread over a warp: Accumulator for any T.
template <class T, int M_TILES_, int N_TILES_> struct WideAccumulator {
  static constexpr int M_TILES = M_TILES_;
  static constexpr int N_TILES = N_TILES_;
  static constexpr int kRows = 2 * M_TILES;  // rows of which a lane owns elements
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

  // Row within the warp tile of a lane's r-th row, and column of element e of tile n.
  static CUFA2_DEVICE int row(int lane, int r) { return (r >> 1) * 16 + (r & 1) * 8 + lane / 4; }
  static CUFA2_DEVICE int column(int lane, int n, int e) {
    return n * 8 + 2 * (lane % 4) + (e & 1);
  }
};

// Reads the operands of step kk of a stretch of Q and K, [n][k]: rows 16 * m + {g, g + 8} of Q as
// A, and rows 8 * n + g of K as B: that of the kTiles products from n = kTiles * i on, by `for_b`
// and `load_b`, or of product n in the kRun steps from step kk on, by `for_run` and `load_run`.
template <class T, class Smem> struct RowReader {
  static_assert(is_same<T, double>, "float has a reader of its own");
  static constexpr int kSteps = 2;  // of a stretch
  static constexpr int kTiles = 1, kRun = 1;
  u32 even, odd;  // the lane's chunks of row g

  static CUFA2_DEVICE RowReader for_a(u32 tile, int lane) {
    const int g = lane / 4, t = lane % 4;
    return {tile + Smem::offset(g, 2 * t), tile + Smem::offset(g, 2 * t + 1)};
  }
  static CUFA2_DEVICE RowReader for_b(u32 tile, int lane) { return for_a(tile, lane); }
  static CUFA2_DEVICE RowReader for_run(u32 tile, int lane) { return for_a(tile, lane); }

  CUFA2_DEVICE void load_b(double (&b)[1][2], int i, int stretch, int kk) const {
    const u32 row = (kk % 2 ? odd : even) + i * 8 * Smem::kRowBytes;
    const Piece<double> piece = load_piece<double>(row + stretch * 128);
    b[0][0] = piece.at[0];
    b[0][1] = piece.at[1];
  }
  CUFA2_DEVICE void load_run(double (&b)[1][2], int n, int stretch, int kk) const {
    load_b(b, n, stretch, kk);
  }
  CUFA2_DEVICE void load_a(double (&a)[4], int m, int stretch, int kk) const {
    double rows[2][1][2];
    load_b(rows[0], 2 * m, stretch, kk);
    load_b(rows[1], 2 * m + 1, stretch, kk);
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = rows[e & 1][0][e >> 1];
  }
};

template <class Smem> struct RowReader<float, Smem> {
  static constexpr int kSteps = 4;
  static constexpr int kTiles = 2, kRun = 2;
  FragmentReader<Smem> reader;

  static CUFA2_DEVICE RowReader for_a(u32 tile, int lane) {
    return {FragmentReader<Smem>::by_row(tile, lane)};
  }
  static CUFA2_DEVICE RowReader for_b(u32 tile, int lane) {
    return {FragmentReader<Smem>::by_pair(tile, lane)};
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
  CUFA2_DEVICE void load_b(float (&b)[2][2], int i, int stretch, int kk) const {
    float r[4];
    load_a(r, i, stretch, kk);
#pragma unroll
    for (int e = 0; e < 4; ++e) b[e >> 1][e & 1] = r[e];
  }
  // kk is even.
  CUFA2_DEVICE void load_run(float (&b)[2][2], int n, int stretch, int kk) const {
    u32 r[4];
    ldmatrix_x4(r, reader.address(0, kk) + n * 8 * Smem::kRowBytes + stretch * 128);
#pragma unroll
    for (int e = 0; e < 4; ++e) b[e >> 1][e & 1] = __uint_as_float(r[e]);
  }
};

// Reads V, [k][n]: the lane's chunk of a stretch in rows row + 2t and row + 2t + 1.
template <class T, class Smem> struct PairReader {
  u32 first, second;

  static CUFA2_DEVICE PairReader at(u32 tile, int lane) {
    const int g = lane / 4, t = lane % 4;
    return {tile + Smem::offset(2 * t, g), tile + Smem::offset(2 * t + 1, g)};
  }
  CUFA2_DEVICE void load(Piece<T> (&rows)[2], int row, int stretch) const {
    rows[0] = load_piece<T>(first + row * Smem::kRowBytes + stretch * 128);
    rows[1] = load_piece<T>(second + row * Smem::kRowBytes + stretch * 128);
  }
};

// Where a lane keeps its scores in `memory`: tile by tile, 16 bytes of each lane in turn, so that
// it finds its own elements without a conflict.
template <class Tile> CUFA2_DEVICE u32 own_scores(u32 memory) {
  const int thread = thread_index();
  return memory + thread / 32 * Tile::kScoreBytes + thread % 32 * 16;
}

template <class Tile> CUFA2_DEVICE void store_scores(u32 own, const typename Tile::Scores& s) {
  constexpr int kPiece = Tile::kPiece, N_TILES = Tile::Scores::N_TILES;
#pragma unroll
  for (int i = 0; i < Tile::kScoreBytes / 512; ++i) {
    const int tile = i * kPiece / 4, e = i * kPiece % 4;
    Piece<typename Tile::T> piece;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) piece.at[j] = s.at[tile / N_TILES][tile % N_TILES][e + j];
    store_piece(own + 512 * i, piece);
  }
}

// Adds up the S of the SPLIT warps of a team, in the same order in each of them.
template <class Tile> CUFA2_DEVICE void sum_sides(typename Tile::Scores& s, u32 memory) {
  using T = typename Tile::T;
  constexpr int kPiece = Tile::kPiece, N_TILES = Tile::Scores::N_TILES;
  const u32 own = own_scores<Tile>(memory);
  store_scores<Tile>(own, s);
  const int thread = thread_index();
  group_sync(1 + Tile::team(thread), 32 * Tile::SPLIT);
  const u32 team = own - Tile::side(thread) * Tile::kScoreBytes;
#pragma unroll
  for (int i = 0; i < Tile::kScoreBytes / 512; ++i) {
    const int tile = i * kPiece / 4, e = i * kPiece % 4;
    Piece<T> sum = load_piece<T>(team + 512 * i);
#pragma unroll
    for (int side = 1; side < Tile::SPLIT; ++side) {
      const Piece<T> other = load_piece<T>(team + side * Tile::kScoreBytes + 512 * i);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) sum.at[j] += other.at[j];
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) s.at[tile / N_TILES][tile % N_TILES][e + j] = sum.at[j];
  }
}
