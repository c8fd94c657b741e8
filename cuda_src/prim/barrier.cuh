// Barriers among the threads of a block, and a thread's place in it.
#pragma once
#include "types.cuh"

CUFA2_DEVICE void block_sync() { __syncthreads(); }

// Barrier that also tells every thread whether any of them raised `flag`.
CUFA2_DEVICE bool block_any(bool flag) { return __syncthreads_or(flag) != 0; }

// Barrier number `id` (1 to 15; 0 is the block's) among `threads` threads, whole warps.
CUFA2_DEVICE void group_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

CUFA2_DEVICE void warp_sync() { __syncwarp(); }

// threadIdx.x of a one-dimensional block, opaque: what is computed from it is computed where it
// stands and not kept in registers across a loop.
CUFA2_DEVICE int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
