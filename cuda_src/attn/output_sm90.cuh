// What leaves a tile of the Hopper forward: rows of O and lse, or of parts of them, when the keys
// are split among tiles and the last of these to end merges them.
//
//   lse = log sum_s exp(lse_s),   o = sum_s exp(lse_s - lse) o_s
#pragma once
#include "../prim/warpgroup.cuh"
#include "../tile/frag.cuh"
#include "frame_sm90.cuh"
#include "rows_again.cuh"

// Where O and lse of a row begin; with splits of its keys, those of its part.
template <class Tile> struct OutputPlace {
  const FwdSm90Params& params;
  const FwdParams& p;
  const TileFrame& frame;
  const TileRows rows;
  const bool is_part;
  const int split;

  CUFA2_DEVICE OutputPlace(const FwdSm90Params& params, const TileFrame& frame)
      : params(params), p(params.call), frame(frame),
        rows{frame.q_begin, frame.head, params.pack}, is_part(params.split_blocks != 0),
        split(frame.valid - 1) {}
  CUFA2_DEVICE typename Tile::T* o(int row) const {
    return static_cast<typename Tile::T*>(p.o) + frame.batch * p.o_stride.batch +
           rows.head_of(row) * p.o_stride.head + rows.position(row) * p.o_stride.row;
  }
  CUFA2_DEVICE float* lse(int row) const {
    return static_cast<float*>(p.lse) + frame.batch * p.lse_stride.batch +
           rows.head_of(row) * p.lse_stride.head + rows.position(row) * p.lse_stride.row;
  }
  // The first of the parts of a row.
  CUFA2_DEVICE i64 part(int row) const {
    const i64 head = static_cast<i64>(frame.batch) * p.num_heads + rows.head_of(row);
    return (head * p.seqlen_q + rows.position(row)) * params.tiles;
  }
};

// Writes 16 rows and 32 columns of O, normalised. The lanes of a quad exchange elements so that
// each writes 16 bytes. Rows without a visible key and rows past the sequence are exact zeros.
// MEND: only where NaN was written before, by the same threads.
template <class Tile, bool MEND>
CUFA2_DEVICE void store_columns(const OutputPlace<Tile>& place, int first_row,
                                const float (&o)[4][4], const float (&inverse)[2], int column) {
  using Rows = Accumulator<1, 4>;
  using T = typename Tile::T;
  const FwdParams& p = place.p;
  const int lane = thread_index() % 32, t = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + Rows::row(lane, r), i = place.rows.position(row);
    const bool zero = inverse[r] == 0.0f || i >= place.frame.len_q;
    u32 word[4];  // columns 2 t.. of tile n; wanted: all columns of tile t
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const u32 rounded = pack2<T>(o[n][2 * r] * inverse[r], o[n][2 * r + 1] * inverse[r]);
      word[n] = zero ? 0u : rounded;
    }
    quad_transpose(word, t);
    if (i < p.seqlen_q && column + 8 * t < p.head_dim_v) {
      T* const at = place.o(row) + column + 8 * t;
      Chunk chunk{{word[0], word[1], word[2], word[3]}};
      if constexpr (MEND) chunk = where_nan<T>(load_global_16(at), chunk);
      store_global_16(at, chunk);
    }
  }
}

// Writes 16 rows of a part of O, from `column` on. MEND as above.
template <class Tile, bool MEND, class Output>
CUFA2_DEVICE void store_part(const OutputPlace<Tile>& place, int first_row, const Output& o,
                             const float (&inverse)[2], int column) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + Output::row(lane, r), i = place.rows.position(row);
    if (i >= place.p.seqlen_q) continue;
    const bool zero = inverse[r] == 0.0f || i >= place.frame.len_q;
    float* const at = place.params.part_o + (place.part(row) + place.split) * Tile::DV + column;
#pragma unroll
    for (int n = 0; n < Output::N_TILES; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float x = zero ? 0.0f : o.at[0][n][2 * r + c] * inverse[r];
        float& target = at[Output::column(lane, n, c)];
        if (!MEND || target != target) target = x;
      }
  }
}

// By each warp that has written its rows of a part: the last one merges them all.
template <class Tile>
CUFA2_DEVICE void merge_parts(const OutputPlace<Tile>& place, int first_row) {
  using T = typename Tile::T;
  const FwdParams& p = place.p;
  const int lane = thread_index() % 32, parts = place.params.tiles, warps = Tile::BLOCK_Q / 16;
  const i64 sharing = static_cast<i64>(place.frame.batch) * p.num_heads + place.frame.head;
  u32* const arrived = place.params.arrived + (sharing >> place.rows.pack) * warps;
  if (!last_to_arrive(arrived + first_row / 16, parts)) return;
#pragma unroll 1
  for (int row = first_row; row < first_row + 16; ++row) {
    if (place.rows.position(row) >= p.seqlen_q) continue;
    const float* const lses = place.params.part_lse + place.part(row);
    const float* const os = place.params.part_o + place.part(row) * Tile::DV;
    float top = -inf();
    for (int s = 0; s < parts; ++s) top = fmaxf(top, lses[s]);
    if (top == -inf()) top = 0.0f;
    float sum = 0.0f;
#pragma unroll 1
    for (int column = 2 * lane; column < Tile::DV; column += 64) {
      float lo = 0.0f, hi = 0.0f;
      sum = 0.0f;
#pragma unroll 4
      for (int s = 0; s < parts; ++s) {
        const float weight = exp2_approx((lses[s] - top) * kLog2E);
        lo = fmaf(weight, os[s * Tile::DV + column], lo);
        hi = fmaf(weight, os[s * Tile::DV + column + 1], hi);
        sum += weight;
      }
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      if (column < p.head_dim_v) {
        *reinterpret_cast<u32*>(place.o(row) + column) = pack2<T>(lo * inverse, hi * inverse);
      }
    }
    if (lane == 0 && p.lse) *place.lse(row) = sum == 0.0f ? -inf() : top + logf(sum);
  }
}
