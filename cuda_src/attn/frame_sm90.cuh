// Tiles of queries that a persistent block works on, one after the other, and its rings of stages.
#pragma once
#include "../prim/copy.cuh"
#include "../prim/exchange.cuh"
#include "features.cuh"
#include "params_sm90.cuh"
#include "schedule.cuh"

// One tile: what the producer has found out about it.
struct alignas(16) TileFrame {
  int valid;         // 0: there are no more
  int batch, head, q_begin;
  int len_q, len_k;  // of the batch entry
  int first, last;   // key blocks that some row of the tile sees; none: last < first
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
CUFA2_DEVICE TileFrame frame_of(const FwdParams& p, int tile) {
  const int tiles = (p.seqlen_q + Tile::BLOCK_Q - 1) / Tile::BLOCK_Q;
  const Place at = find_place<u32>(tile, p.heads_total, p.section, p.num_heads, tiles);
  if (!at.valid) return {0, 0, 0, 0, 0, 0, 0, -1};
  const Lengths len(p, at.batch);
  const Mask mask(p, len);
  const int q_begin = (tiles - 1 - at.tile) * Tile::BLOCK_Q;
  const int q_end = min(q_begin + Tile::BLOCK_Q, len.q);
  const KvRange range = mask.kv_range(q_begin, q_end);
  const bool any = q_begin < q_end && range.begin < range.end;
  return {1, static_cast<int>(at.batch), at.head, q_begin, len.q, len.k,
          any ? range.begin / Tile::BLOCK_K : 0, any ? (range.end - 1) / Tile::BLOCK_K : -1};
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
