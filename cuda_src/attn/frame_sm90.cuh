// Tiles of queries that a persistent block works on, one after the other, and its rings of stages.
#pragma once
#include "../prim/copy.cuh"
#include "../prim/exchange.cuh"
#include "features.cuh"
#include "params_sm90.cuh"
#include "schedule.cuh"

// One tile: what the producer has found out about it.
struct alignas(16) TileFrame {
  int valid;         // 0: there are no more; 1 + the split of its keys
  int batch, head, q_begin;
  int len_q, len_k;  // of the batch entry
  int first, last;   // key blocks that some row of the tile sees; none: last < first
};

// Its rows: 2^pack heads from `head` on for each query position.
struct TileRows {
  int q_begin, head, pack;
  CUFA2_DEVICE int position(int row) const { return q_begin + (row >> pack); }
  CUFA2_DEVICE int head_of(int row) const { return head + (row & ((1 << pack) - 1)); }
};

// A mask asked by row of the tile.
template <class Mask> struct TileMask {
  static constexpr bool kLeft = Mask::kLeft;
  const Mask& mask;
  TileRows rows;
  CUFA2_DEVICE RowRange row_range(int row) const { return mask.row_range(rows.position(row)); }
  CUFA2_DEVICE bool keep(int row, int j) const { return mask.keep(rows.position(row), j); }
};

// What lies behind the tiles in shared memory, by byte offsets: mbarriers of each stage, a word
// that nobody reads (see not_before), and the frame of each Q stage.
template <int Q_STAGES, int STAGES> struct ControlBlock {
  static constexpr u32 kQFull = 0, kQEmpty = kQFull + kMbarrierBytes * Q_STAGES;
  static constexpr u32 kKFull = kQEmpty + kMbarrierBytes * Q_STAGES;
  static constexpr u32 kKEmpty = kKFull + kMbarrierBytes * STAGES;
  static constexpr u32 kVFull = kKEmpty + kMbarrierBytes * STAGES;
  static constexpr u32 kVEmpty = kVFull + kMbarrierBytes * STAGES;
  static constexpr u32 kVRaw = kVEmpty + kMbarrierBytes * STAGES;  // V that has rows to be zeroed
  static constexpr u32 kNever = kVRaw + kMbarrierBytes;
  static constexpr u32 kFrames = (kNever + 4 + 15) / 16 * 16;
  static constexpr u32 kBytes = kFrames + Q_STAGES * sizeof(TileFrame);
};

// A place in a ring of COUNT, and the parity of its phase.
template <int COUNT> struct RingPlace {
  int stage;
  u32 parity;
  CUFA2_DEVICE void next() {
    if (++stage == COUNT) stage = 0, parity ^= 1;
  }
};

template <class Tile, class Mask>
CUFA2_DEVICE TileFrame frame_of(const FwdSm90Params& params, int tile) {
  const FwdParams& p = params.call;
  const int pack = params.pack, positions = Tile::BLOCK_Q >> pack;
  const Place at = find_place<u32>(tile, p.heads_total >> pack, p.section >> pack,
                                   p.num_heads >> pack, params.tiles);
  if (!at.valid) return {0, 0, 0, 0, 0, 0, 0, -1};
  const Lengths len(p, at.batch);
  const Mask mask(p, len);
  const int split = params.split_blocks ? at.tile : 0;
  const int q_begin = params.split_blocks ? 0 : (params.tiles - 1 - at.tile) * positions;
  const int q_end = min(q_begin + positions, len.q);
  const KvRange range = mask.kv_range(q_begin, q_end);
  int first = range.begin / Tile::BLOCK_K, last = (range.end - 1) / Tile::BLOCK_K;
  if (params.split_blocks) {
    first = max(first, split * params.split_blocks);
    last = min(last, (split + 1) * params.split_blocks - 1);
  }
  if (q_begin >= q_end || range.begin >= range.end || first > last) first = 0, last = -1;
  return {1 + split, static_cast<int>(at.batch), at.head << pack, q_begin, len.q, len.k, first,
          last};
}

CUFA2_DEVICE void store_frame(u32 shared, const TileFrame& frame) {
  const auto& half = reinterpret_cast<const Chunk(&)[2]>(frame);
  store_shared_16(shared, half[0]);
  store_shared_16(shared + 16, half[1]);
}
CUFA2_DEVICE TileFrame load_frame(u32 shared) {
  const Chunk a = load_shared_16(shared), b = load_shared_16(shared + 16);
  return {warp_uniform(a.word[0]), warp_uniform(a.word[1]), warp_uniform(a.word[2]),
          warp_uniform(a.word[3]), warp_uniform(b.word[0]), warp_uniform(b.word[1]),
          warp_uniform(b.word[2]), warp_uniform(b.word[3])};
}
