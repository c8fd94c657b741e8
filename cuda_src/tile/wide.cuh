// Tiles and fragments of float32 and float64.
//
// A tile is a SmemTile over twice or four times as many 16-bit columns: the same bytes, the same
// swizzle, the same loader. Chunk c of row r (16 bytes) lies at chunk c ^ (r % 8) of its 128-byte
// stretch, and every read is one chunk per lane, served eight lanes (two g, four t) at a time:
//   [n][k], Q and K: lane (g, t) takes chunk 2t + odd of row g. Chunks of an even row keep their
//     parity, those of the odd row beside it change it: eight different chunks, no conflict.
//   [k][n], V: lane (g, t) takes chunk g of rows 2t and 2t+1. For even g, g ^ 2t runs over the
//     even chunks, for odd g over the odd ones: no conflict; the same for row 2t+1.
// Which k goes to which slot of a product is free, if A and B agree; so is the order of the
// columns of O. A chunk along k holds slots t and t+4 of one product (float64) or of two in a row
// (float32). P leaves its accumulator as an A operand without a move, slots t and t+4 being keys
// 2t and 2t+1. Column g of tile j of V is element j of chunk g: a lane of O then holds the whole
// chunks 2t and 2t+1 and stores them as they are.
#pragma once
#include "../prim/wide.cuh"
#include "smem.cuh"

// A (16 * M_TILES) x (8 * N_TILES) accumulator of T spread over a warp.
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

// Reads Q or K, [n][k]: piece `step` of rows row + g, `row` being a multiple of 8. A piece feeds
// kSize / 2 products; the pieces of a stretch are its even and its odd chunks.
template <class T, class Smem> struct RowReader {
  u32 even, odd;

  static CUFA2_DEVICE RowReader at(u32 tile, int lane) {
    const int g = lane / 4, t = lane % 4;
    return {tile + Smem::offset(g, 2 * t), tile + Smem::offset(g, 2 * t + 1)};
  }
  CUFA2_DEVICE Piece<T> load(int row, int step) const {
    return load_piece<T>((step % 2 ? odd : even) + row * Smem::kRowBytes + step / 2 * 128);
  }
};

// Reads V, [k][n]: the lane's piece of stretch `stretch` in rows row + 2t and row + 2t + 1.
template <class T, class Smem> struct PairReader {
  u32 first, second;

  static CUFA2_DEVICE PairReader at(u32 tile, int lane) {
    const int g = lane / 4, t = lane % 4;
    return {tile + Smem::offset(2 * t, g), tile + Smem::offset(2 * t + 1, g)};
  }
  CUFA2_DEVICE Piece<T> load(int row, int stretch, int which) const {
    return load_piece<T>((which ? second : first) + row * Smem::kRowBytes + stretch * 128);
  }
};
