// Barriers in shared memory that count arrivals and bytes of background copies (sm_90).
//
// A phase of an mbarrier ends when as many threads have arrived as it was made for and every byte
// that they announced has come. wait(barrier, parity) returns once a phase of that parity has
// ended; on a fresh barrier parity 1 counts as ended, so a producer's first wait passes.
#pragma once
#include "types.cuh"

constexpr u32 kMbarrierBytes = 8;

// `arrivals` threads end a phase. One thread makes all barriers, then the fence, then the block's
// barrier.
CUFA2_DEVICE void mbarrier_make(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :: "r"(barrier), "r"(arrivals) : "memory");
}
CUFA2_DEVICE void mbarrier_make_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

CUFA2_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrives, and announces `bytes` that copies will bring in this phase.
CUFA2_DEVICE void mbarrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}

CUFA2_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n\t.reg .pred %%done;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 %%done, [%1], %2;\n\t"
                 "selp.b32 %0, 1, 0, %%done;\n\t}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

// Makes what this thread wrote to shared memory visible to the tensor cores and the copy engine,
// which see memory through another proxy; a barrier must still follow.
CUFA2_DEVICE void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
