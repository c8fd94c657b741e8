// The float32 buffer in which key blocks add up dQ by atomics, in whole 16 x 8 fragments: rows and
// columns of a tile are spread over a warp as prim/mma.cuh says, and a warp adds one fragment by
// one instruction. bwd_convert.cuh reads it back.
#pragma once
#include "params.cuh"

template <int D> struct GradQBuffer {
  // Where element e of lane's share of the fragment at rows 16 r.., columns 8 n.. lies.
  static CUFA2_DEVICE i64 offset(int r, int n, int lane, int e) {
    return (static_cast<i64>(r) * (D / 8) + n) * 128 + 4 * lane + e;
  }
};
