// Twin of prim/warpgroup.cuh.
#pragma once
#include "barrier.cuh"

template <int COUNT> CUFA2_DEVICE void take_registers() { emulator::set_registers(COUNT, true); }
template <int COUNT> CUFA2_DEVICE void give_registers() { emulator::set_registers(COUNT, false); }

CUFA2_DEVICE int claim_work(u32* counter) {
  return static_cast<int>(gridDim.x + emulator::exchange_global(counter, 1, true));
}
CUFA2_DEVICE void end_claims(u32* counter) {
  if (emulator::exchange_global(counter + 1, 1, true) == gridDim.x - 1) {
    emulator::exchange_global(counter, 0, false);
    emulator::exchange_global(counter + 1, 0, false);
  }
}
CUFA2_DEVICE bool last_to_arrive(u32* counter, u32 count) {
  const bool first = thread_index() % 32 == 0;
  warp_sync();
  u32 before = 0;
  if (first) {
    emulator::arrive_at(counter);
    before = emulator::exchange_global(counter, 1, true);
    if (before == count - 1) {
      emulator::know_arrivals(counter);
      emulator::exchange_global(counter, 0, false);
    }
  }
  return __shfl_sync(~0u, before, 0) == count - 1;
}
