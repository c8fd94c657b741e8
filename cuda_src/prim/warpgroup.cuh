// What the roles of a persistent, warp-specialised kernel need (sm_90).
#pragma once
#include "barrier.cuh"

// Registers of each thread of this warpgroup from here on, a multiple of 8; all its warps come
// here. What one warpgroup gives away, others can take.
template <int COUNT> CUFA2_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}
template <int COUNT> CUFA2_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// Work is handed out by counting: counter[0] counts what has been claimed beyond the first piece
// of each block, counter[1] the blocks that are done. The last one leaves both zero.
CUFA2_DEVICE int claim_work(u32* counter) {
  return static_cast<int>(gridDim.x + atomicAdd(counter, 1u));
}
CUFA2_DEVICE void end_claims(u32* counter) {
  __threadfence();
  if (atomicAdd(counter + 1, 1u) == gridDim.x - 1) {
    atomicExch(counter, 0u);
    atomicExch(counter + 1, 0u);
  }
}

// Whether these `threads`, whole warps with barrier `id` to themselves, are the last of `count`
// such groups that come here for a counter, which is zero before and after. They then see what all
// of them have written to global memory.
CUFA2_DEVICE bool last_to_arrive(u32* counter, u32 count, int id, int threads) {
  __threadfence();
  group_sync(id, threads);
  bool last = false;
  if (threadIdx.x % threads == 0) {
    last = atomicAdd(counter, 1u) == count - 1;
    if (last) atomicExch(counter, 0u);
  }
  // By vote, so that the compiler knows as well that no warp parts here.
  if (!__any_sync(0xffffffffu, group_any(id, threads, last))) return false;
  __threadfence();
  return true;
}
