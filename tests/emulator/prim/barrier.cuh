// Twin of prim/barrier.cuh.
#pragma once
#include "types.cuh"

CUFA2_DEVICE void block_sync() { emulator::barrier(0, 0, false); }
CUFA2_DEVICE bool block_any(bool flag) { return emulator::barrier(0, 0, flag); }
CUFA2_DEVICE void group_sync(int id, int threads) { emulator::barrier(id, threads, false); }
CUFA2_DEVICE bool group_any(int id, int threads, bool flag) {
  return emulator::barrier(id, threads, flag);
}
CUFA2_DEVICE void warp_sync() { emulator::warp_barrier(); }
CUFA2_DEVICE int thread_index() { return emulator::thread_index(); }
