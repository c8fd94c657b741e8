// Which (batch, head, tile) a block works on.
//
// Blocks start in the order of their number. Heads are taken in sections whose operands fit the L2
// cache together; inside a section the same tile of all its heads comes before the next tile.
#pragma once
#include "params.cuh"

struct Work {
  i64 batch;
  int head, q_begin;
  bool valid;
};

struct KeyWork {
  i64 batch;
  int head, k_begin;  // key head
  bool valid;
};

// The n-th piece of work: heads_total heads, num_heads of them a batch entry, with `tiles` each.
struct Place {
  i64 batch;
  int head, tile;
  bool valid;
};

// Divisions in `Index`: 32-bit where the grid allows it. Every block starts with them, and 64-bit
// ones are long subroutines.
template <class Index>
CUFA2_DEVICE Place find_place(Index index, i64 heads_total, i64 section_heads, int num_heads,
                              int tile_count) {
  const Index tiles = tile_count, total = static_cast<Index>(heads_total);
  const Index per_section = static_cast<Index>(section_heads) * tiles;
  const Index section = index / per_section, rest = index % per_section;
  const Index first_head = section * static_cast<Index>(section_heads);
  if (first_head >= total) return {0, 0, 0, false};
  const Index heads = min(static_cast<Index>(section_heads), total - first_head);
  const Index tile = rest / heads, batch_head = first_head + rest % heads;
  if (tile >= tiles) return {0, 0, 0, false};
  const Index batch = batch_head / num_heads;
  return {static_cast<i64>(batch), static_cast<int>(batch_head - batch * num_heads),
          static_cast<int>(tile), true};
}

CUFA2_DEVICE Place find_place(i64 heads_total, i64 section_heads, int num_heads, int tiles) {
  if (gridDim.y == 1) {
    return find_place<u32>(blockIdx.x, heads_total, section_heads, num_heads, tiles);
  }
  return find_place<u64>(blockIdx.x + static_cast<u64>(blockIdx.y) * gridDim.x, heads_total,
                         section_heads, num_heads, tiles);
}

// The last query tiles come first: under a causal mask they are the longest, and a long tile
// started last would leave the card idle.
template <int BLOCK_Q, class Params> CUFA2_DEVICE Work find_work(const Params& p) {
  const int tiles = (p.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  const Place at = find_place(p.heads_total, p.section, p.num_heads, tiles);
  return {at.batch, at.head, (tiles - 1 - at.tile) * BLOCK_Q, at.valid};
}

// The first key tiles come first, for the same reason: most queries see them.
template <int BLOCK_K, class Params> CUFA2_DEVICE KeyWork find_key_work(const Params& p) {
  const int tiles = (p.seqlen_k + BLOCK_K - 1) / BLOCK_K;
  const Place at = find_place(p.heads_total_kv, p.section_kv, p.num_heads_kv, tiles);
  return {at.batch, at.head, at.tile * BLOCK_K, at.valid};
}
