// Barriers among the threads of a block, and a thread's place in it.
#pragma once
#include "types.cuh"

CUFA2_DEVICE void block_sync() { __syncthreads(); }

// Barrier that also tells every thread whether any of them raised `flag`.
CUFA2_DEVICE bool block_any(bool flag) { return __syncthreads_or(flag) != 0; }

CUFA2_DEVICE void warp_sync() { __syncwarp(); }

// threadIdx.x of a one-dimensional block, opaque: what is computed from it is computed where it
// stands and not kept in registers across a loop.
CUFA2_DEVICE int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
