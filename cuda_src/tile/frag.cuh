// Register fragments: a warp's accumulator tile, and the loads that feed mma_m16n8k16 from a
// swizzled shared tile. Element owners are those of prim/mma.cuh.
#pragma once
#include "../prim/mma.cuh"
#include "../prim/nonfinite.cuh"
#include "smem.cuh"

// A (16 * M_TILES) x (8 * N_TILES) float32 accumulator spread over a warp.
template <int M_TILES_, int N_TILES_> struct Accumulator {
  static constexpr int M_TILES = M_TILES_;
  static constexpr int N_TILES = N_TILES_;
  static constexpr int kRows = 2 * M_TILES;  // rows of which a lane owns elements
  float at[M_TILES][N_TILES][4];

  CUFA2_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) at[m][n][e] = 0.0f;
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

// Reads operands by ldmatrix.x4 from a SmemTile. The swizzle depends on the lane alone because
// fragment rows advance in steps of 8 or 16; the lane's part is computed once.
template <class Smem> struct FragmentReader {
  u32 base;   // byte address of the lane's row 0
  u32 mixed;  // the lane's share of the chunk number, swizzled

  // Lanes address rows 0-15 of a 16 x 16 block, then rows 0-15 of its right half: registers 0..3
  // are an A operand, or through the transposing load two B operands stored [k][n]: (r0, r1) for
  // n 0-7 and (r2, r3) for n 8-15.
  static CUFA2_DEVICE FragmentReader by_row(u32 tile, int lane) {
    const int row = lane & 15;
    return {tile + row * Smem::kRowBytes, static_cast<u32>((lane >> 4) ^ Smem::swizzle(row))};
  }

  // Lanes address rows 0-7, left then right half, then rows 8-15: two B operands stored [n][k],
  // again (r0, r1) and (r2, r3). A B operand must be a pair of neighbouring registers; the order
  // above would cost a move per product.
  static CUFA2_DEVICE FragmentReader by_pair(u32 tile, int lane) {
    const int row = (lane & 7) + ((lane >> 4) << 3);
    return {tile + row * Smem::kRowBytes,
            static_cast<u32>(((lane >> 3) & 1) ^ Smem::swizzle(row))};
  }

  // The same tile seen by one of SIDES neighbours that take turns at the 16-column blocks: block n
  // of the side is block n * SIDES + side, which `address` must be given as n * SIDES. Mixed in
  // once, a side that is only known at run time leaves all else constant.
  template <int SIDES> CUFA2_DEVICE FragmentReader of_side(int side) const {
    static_assert(SIDES == 1 || SIDES == 2 || (SIDES == 4 && Smem::kStretch == 8),
                  "the sides are bits of the block's number within a stretch");
    return {base, mixed ^ static_cast<u32>(2 * side)};
  }

  // Address for the 16 x 16 block at row 16 * block_row, column 16 * block_column.
  // Only the chunk bits that take part in the swizzle are mixed; the rest is a constant offset.
  CUFA2_DEVICE u32 address(int block_row, int block_column) const {
    constexpr int kMixed = Smem::kStretch / 2;  // 16-column blocks of a stretch
    const u32 within = ((2 * (block_column % kMixed)) ^ mixed) << 4;
    return base + within + block_row * 16 * Smem::kRowBytes + block_column / kMixed * kMixed * 32;
  }

  CUFA2_DEVICE void load(u32 (&r)[4], int block_row, int block_column) const {
    ldmatrix_x4(r, address(block_row, block_column));
  }
  CUFA2_DEVICE void load_trans(u32 (&r)[4], int block_row, int block_column) const {
    ldmatrix_x4_trans(r, address(block_row, block_column));
  }
};

// D += A B over K16 steps of 16: `load_a(a, m, kk)` fills the operand of rows 16 m.., and
// `load_b(b, n, kk)` those of columns 16 n.. as (b0, b1) and (b2, b3).
template <class T, int K16, class Acc, class LoadA, class LoadB>
CUFA2_DEVICE void multiply(Acc& d, const LoadA& load_a, const LoadB& load_b) {
  static_assert(Acc::N_TILES % 2 == 0, "B operands come in pairs");
#pragma unroll
  for (int kk = 0; kk < K16; ++kk) {
    u32 a[Acc::M_TILES][4];
#pragma unroll
    for (int m = 0; m < Acc::M_TILES; ++m) load_a(a[m], m, kk);
#pragma unroll
    for (int n = 0; n < Acc::N_TILES / 2; ++n) {
      u32 b[4];
      load_b(b, n, kk);
#pragma unroll
      for (int m = 0; m < Acc::M_TILES; ++m) {
        mma_m16n8k16<T>(d.at[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<T>(d.at[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The same where B may hold NaN or Inf in rows that not every row of A keeps: there 0 * NaN would
// leak. The finite part of B is multiplied as ever, in the same order, so what keeps no such row
// comes out the same to the bit. What the others get is counted by a second product, of kept
// (0 or 1: `keep(row, k)`, counted from the lane's first of both) with the codes of
// prim/types.cuh, and added as +Inf, -Inf or NaN.
template <class T, int K16, class Acc, class LoadA, class LoadB, class Keep>
CUFA2_DEVICE void multiply_kept(Acc& d, const LoadA& load_a, const LoadB& load_b,
                                const Keep& keep) {
  static_assert(16 < kNegativeInfCode, "counts of one code must not reach the next");
  constexpr int kUnroll = K16 <= 2 ? K16 : 1;  // few steps may come from registers
#pragma unroll kUnroll
  for (int kk = 0; kk < K16; ++kk) {
    Acc codes;
    codes.clear();
#pragma unroll
    for (int n = 0; n < Acc::N_TILES / 2; ++n) {
      u32 finite[4], code[4];
      load_b(finite, n, kk);
#pragma unroll
      for (int e = 0; e < 4; ++e) code[e] = split_nonfinite<T>(finite[e]);
#pragma unroll
      for (int m = 0; m < Acc::M_TILES; ++m) {
        u32 a[4], kept[4];
        load_a(a, m, kk);
        mma_m16n8k16<T>(d.at[m][2 * n], a, finite[0], finite[1]);
        mma_m16n8k16<T>(d.at[m][2 * n + 1], a, finite[2], finite[3]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 16 * m + 8 * (e & 1), k = 16 * kk + 8 * (e >> 1);
          kept[e] = pack2<T>(keep(row, k) ? 1.0f : 0.0f, keep(row, k + 1) ? 1.0f : 0.0f);
        }
        mma_m16n8k16<T>(codes.at[m][2 * n], kept, code[0], code[1]);
        mma_m16n8k16<T>(codes.at[m][2 * n + 1], kept, code[2], code[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < Acc::M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < Acc::N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) d.at[m][n][e] += sum_of_codes(codes.at[m][n][e]);
  }
}
