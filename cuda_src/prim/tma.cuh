// The tensor memory accelerator (sm_90): one thread asks for a whole box of a tensor.
#pragma once
#include "mbarrier.cuh"

// A CUtensorMap, which the driver fills in. It must be read where it is passed: in a kernel's
// __grid_constant__ parameters.
struct alignas(64) TensorMap { char opaque[128]; };

CUFA2_DEVICE void tensor_map_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// Copies the box at (column, y, z, batch) of a map of four axes, of which the first is the columns
// and the last the batch, to `shared` in the background. All bytes of the box, those outside the
// tensor as zeros, count for `barrier`.
CUFA2_DEVICE void tma_load(u32 shared, const TensorMap& map, u32 barrier, int column, int y,
                           int z, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(shared), "l"(&map), "r"(barrier), "r"(column), "r"(y), "r"(z),
                  "r"(batch) : "memory");
}

// The other way, of what lies inside the tensor, once this thread's stores are committed.
CUFA2_DEVICE void tma_store(const TensorMap& map, u32 shared, int column, int y, int z,
                            int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
               "[%0, {%2, %3, %4, %5}], [%1];"
               :: "l"(&map), "r"(shared), "r"(column), "r"(y), "r"(z), "r"(batch) : "memory");
}
CUFA2_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's committed stores have been read from shared memory.
CUFA2_DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The same of `bytes` that lie together, a multiple of 16, as both places are.
CUFA2_DEVICE void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :: "r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
