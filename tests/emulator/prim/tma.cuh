// Twin of prim/tma.cuh. Maps are those of backend.py, not the driver's.
#pragma once
#include "mbarrier.cuh"

struct alignas(64) TensorMap { char opaque[128]; };

CUFA2_DEVICE void tensor_map_prefetch(const TensorMap&) {}
CUFA2_DEVICE void tma_load(u32 shared, const TensorMap& map, u32 barrier, int column, int y,
                           int z, int batch) {
  emulator::load_box(shared, reinterpret_cast<const emulator::EmulatedMap*>(&map), barrier, column,
                     y, z, batch);
}
CUFA2_DEVICE void tma_store(const TensorMap& map, u32 shared, int column, int y, int z,
                            int batch) {
  emulator::store_box(reinterpret_cast<const emulator::EmulatedMap*>(&map), shared, column, y, z,
                      batch);
}
CUFA2_DEVICE void tma_store_commit() { emulator::commit_stores(); }
CUFA2_DEVICE void tma_store_wait() { emulator::wait_for_stores(); }
CUFA2_DEVICE void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
  emulator::load_bulk(shared, global, bytes, barrier);
}
