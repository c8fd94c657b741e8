// What leaves a tile of the Hopper forward: rows of O and lse, or of parts of them, when the keys
// are split among tiles and the last of these to end merges them.
//
//   lse = log sum_s exp(lse_s),   o = sum_s exp(lse_s - lse) o_s
#pragma once
#include "../prim/warpgroup.cuh"
#include "../tile/frag.cuh"
#include "../tile/rows.cuh"
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

// Rows without a visible key (`inverse` 0) and rows past the sequence are exact zeros.
template <class Tile>
CUFA2_DEVICE OutputRows<typename Tile::T> output_rows(const OutputPlace<Tile>& place,
                                                      int first_row, const float (&inverse)[2]) {
  OutputRows<typename Tile::T> rows;
  const int lane = thread_index() % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + Tile::Output::row(lane, r), i = place.rows.position(row);
    rows.at[r] = place.o(row);
    rows.zero[r] = inverse[r] == 0.0f || i >= place.frame.len_q;
    rows.factor[r] = rows.zero[r] ? 0.0f : inverse[r];
    rows.inside[r] = i < place.p.seqlen_q;
  }
  return rows;
}

// Has a warp's 16 rows of O, normalised, written in the background, by way of its rows of Q in
// shared memory, at `target`: nobody reads these any more.
template <class Tile>
CUFA2_DEVICE void send_rows(const OutputPlace<Tile>& place, int first_row, u32 target,
                            const typename Tile::Output& o,
                            const OutputRows<typename Tile::T>& rows) {
  using T = typename Tile::T;
  const int lane = thread_index() % 32, matrix = lane / 8;
  const u32 row = lane % 8 + matrix % 2 * 8;
  warp_sync();  // every lane is done with Q
#pragma unroll
  for (int kk = 0; kk < Tile::DV / 16; ++kk) {
    u32 packed[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float factor = rows.factor[e & 1];
      const float* pair = &o.at[0][2 * kk + (e >> 1)][2 * (e & 1)];
      packed[e] = pack2<T>(pair[0] * factor, pair[1] * factor);
    }
    stmatrix_x4(target + Tile::O::offset(row, 2 * kk + matrix / 2), packed);
  }
  fence_shared_for_async();
  warp_sync();
  if (lane == 0) {
    Tile::O::store(place.params.o_map, target, place.rows.head_of(first_row),
                   place.rows.position(first_row), place.frame.batch);
  }
}

// Writes 16 rows of a part of O, from `column` on. MEND as store_columns has it.
template <class Tile, bool MEND, class Output>
CUFA2_DEVICE void store_part(const OutputPlace<Tile>& place, int first_row, const Output& o,
                             const OutputRows<typename Tile::T>& rows, int column) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!rows.inside[r]) continue;
    const i64 part = place.part(first_row + Output::row(lane, r)) + place.split;
    float* const at = place.params.part_o + part * Tile::DV + column;
#pragma unroll
    for (int n = 0; n < Output::N_TILES; ++n) {
      const float* pair = &o.at[0][n][2 * r];
      Words words{__float_as_uint(pair[0] * rows.factor[r]),
                  __float_as_uint(pair[1] * rows.factor[r])};
      float* const target = at + Output::column(lane, n, 0);
      if constexpr (MEND) words = where_nan<float>(load_global_8(target), words);
      store_global_8(target, words);
    }
  }
}

// Merges the parts of one row, by a warp. A lane holds two columns of every 64.
template <class Tile> CUFA2_DEVICE void merge_row(const OutputPlace<Tile>& place, int row) {
  constexpr int kSteps = (Tile::DV + 63) / 64;
  const FwdParams& p = place.p;
  const int lane = thread_index() % 32, parts = place.params.tiles;
  const float* const lses = place.params.part_lse + place.part(row);
  const float* const os = place.params.part_o + place.part(row) * Tile::DV + 2 * lane;
  float top = -inf();
#pragma unroll 1
  for (int first = 0; first < parts; first += 32) {
    if (first + lane < parts) top = fmaxf(top, lses[first + lane]);
  }
  top = warp_max(top);
  if (top == -inf()) top = 0.0f;
  float total = 0.0f, sum[kSteps][2] = {};
#pragma unroll 1
  for (int first = 0; first < parts; first += 32) {
    const int count = min(32, parts - first);
    const float weight = lane < count ? exp2_approx((lses[first + lane] - top) * kLog2E) : 0.0f;
    total += weight;
#pragma unroll 16 / kSteps  // so many loads at once, or their latency would show
    for (int s = 0; s < count; ++s) {
      const float w = warp_broadcast(weight, s);
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        if (2 * lane + 64 * n >= Tile::DV) continue;
        const float* const at = os + (first + s) * Tile::DV + 64 * n;
        sum[n][0] = fmaf(w, at[0], sum[n][0]);
        sum[n][1] = fmaf(w, at[1], sum[n][1]);
      }
    }
  }
  total = warp_sum(total);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    const int column = 2 * lane + 64 * n;
    if (column >= p.head_dim_v) continue;
    *reinterpret_cast<u32*>(place.o(row) + column) =
        pack2<typename Tile::T>(sum[n][0] * inverse, sum[n][1] * inverse);
  }
  if (lane == 0 && p.lse) *place.lse(row) = total == 0.0f ? -inf() : top + logf(total);
}

// By a warpgroup that has written its rows of a part, the `group`-th of the tile: the last one
// merges them all.
template <class Tile>
CUFA2_DEVICE void merge_parts(const OutputPlace<Tile>& place, int group, int barrier) {
  const int first = 64 * group, seqlen_q = place.p.seqlen_q;
  if (place.rows.position(first) >= seqlen_q) return;
  const i64 sharing = static_cast<i64>(place.frame.batch) * place.p.num_heads + place.frame.head;
  u32* const arrived = place.params.arrived + (sharing >> place.rows.pack) * Tile::kGroups + group;
  if (!last_to_arrive(arrived, place.params.tiles, barrier, 128)) return;
  // Loops with ends that the compiler knows to be those of the whole warp: see Consumer::mend.
#pragma unroll 1
  for (int row = first + warp_uniform(thread_index() % 128 / 32); row < first + 64; row += 4) {
    if (place.rows.position(row) < seqlen_q) merge_row(place, row);
  }
}
