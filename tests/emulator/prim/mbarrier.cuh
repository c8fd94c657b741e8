// Twin of prim/mbarrier.cuh.
#pragma once
#include "types.cuh"

constexpr u32 kMbarrierBytes = 8;

CUFA2_DEVICE void mbarrier_make(u32 barrier, u32 arrivals) {
  emulator::make_mbarrier(barrier, arrivals);
}
CUFA2_DEVICE void mbarrier_make_fence() {}
CUFA2_DEVICE void mbarrier_arrive(u32 barrier) { emulator::arrive_at_mbarrier(barrier, 0); }
CUFA2_DEVICE void mbarrier_arrive_expecting(u32 barrier, u32 bytes) {
  emulator::arrive_at_mbarrier(barrier, bytes);
}
CUFA2_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  emulator::wait_for_mbarrier(barrier, parity);
}
CUFA2_DEVICE void fence_shared_for_async() { emulator::fence_for_bulk(); }
