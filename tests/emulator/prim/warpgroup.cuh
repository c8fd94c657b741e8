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
CUFA2_DEVICE bool last_to_arrive(u32* counter, u32 count, int id, int threads) {
  const bool first_lane = thread_index() % 32 == 0;
  warp_sync();
  if (first_lane) emulator::arrive_at(counter);
  group_sync(id, threads);
  bool last = false;
  if (thread_index() % threads == 0) {
    last = emulator::exchange_global(counter, 1, true) == count - 1;
    if (last) emulator::exchange_global(counter, 0, false);
  }
  last = group_any(id, threads, last);
  if (last && first_lane) emulator::know_arrivals(counter);
  warp_sync();
  return last;
}
