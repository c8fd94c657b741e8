// Which (batch, head, query tile) a block works on.
//
// Blocks start in the order of their number. Heads are taken in sections whose K and V fit the L2
// cache together; inside a section the last query tiles of all its heads come first, since under
// a causal mask they are the longest, and a long tile started last would leave the card idle.
#pragma once
#include "params.cuh"

struct Work {
  i64 batch;
  int head, q_begin;
  bool valid;
};

template <int BLOCK_Q> CUFA2_DEVICE Work find_work(const FwdParams& p) {
  const i64 tiles = (p.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  const i64 index = blockIdx.x + static_cast<i64>(blockIdx.y) * gridDim.x;
  const i64 section = index / (p.section * tiles);
  const i64 rest = index - section * p.section * tiles;
  const i64 first_head = section * p.section;
  const i64 heads = min(p.section, p.heads_total - first_head);
  if (heads <= 0) return {0, 0, 0, false};
  const i64 tile = tiles - 1 - rest / heads;
  const i64 batch_head = first_head + rest % heads;
  return {batch_head / p.num_heads, static_cast<int>(batch_head % p.num_heads),
          static_cast<int>(tile) * BLOCK_Q, tile >= 0};
}
