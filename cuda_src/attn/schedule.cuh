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

// Divisions in `Index`: 32-bit where the grid allows it. Every block starts with them, and 64-bit
// ones are long subroutines.
template <int BLOCK_Q, class Index> CUFA2_DEVICE Work find_work(const FwdParams& p, Index index) {
  const Index tiles = (p.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  const Index per_section = static_cast<Index>(p.section) * tiles;
  const Index section = index / per_section, rest = index % per_section;
  const Index first_head = section * static_cast<Index>(p.section);
  if (first_head >= static_cast<Index>(p.heads_total)) return {0, 0, 0, false};
  const Index heads =
      min(static_cast<Index>(p.section), static_cast<Index>(p.heads_total) - first_head);
  const Index tile = rest / heads, batch_head = first_head + rest % heads;
  if (tile >= tiles) return {0, 0, 0, false};
  const Index batch = batch_head / p.num_heads;
  return {static_cast<i64>(batch), static_cast<int>(batch_head - batch * p.num_heads),
          static_cast<int>(tiles - 1 - tile) * BLOCK_Q, true};
}

template <int BLOCK_Q> CUFA2_DEVICE Work find_work(const FwdParams& p) {
  if (gridDim.y == 1) return find_work<BLOCK_Q, u32>(p, blockIdx.x);
  return find_work<BLOCK_Q, u64>(p, blockIdx.x + static_cast<u64>(blockIdx.y) * gridDim.x);
}
