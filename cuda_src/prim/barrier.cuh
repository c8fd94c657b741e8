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

// The same, and tells its threads whether any of them raised `flag`.
CUFA2_DEVICE bool group_any(int id, int threads, bool flag) {
  int any;
  asm volatile("{.reg .pred p, q;\nsetp.ne.s32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\n"
               "selp.s32 %0, 1, 0, q;}"
               : "=r"(any) : "r"(id), "r"(threads), "r"(static_cast<int>(flag)) : "memory");
  return any != 0;
}

CUFA2_DEVICE void warp_sync() { __syncwarp(); }

// threadIdx.x of a one-dimensional block, opaque: what is computed from it is computed where it
// stands and not kept in registers across a loop.
CUFA2_DEVICE int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
