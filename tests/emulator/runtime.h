// The machine that kernels run on when they are compiled for the CPU.
//
// A block's threads are fibers of one host thread. They change places only where the hardware
// makes them wait for one another: at barriers and at what a warp does together. The order is
// drawn from a seed. Everything a kernel reads or writes outside its own stack is checked, see
// memory.h; a fault ends the launch with the reason and the place.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulator {

struct Dim3 { unsigned x = 1, y = 1, z = 1; };
extern Dim3 block_index, grid_size;

int thread_index();

// Ends the launch. The text is printf's; the kernel's stack is added to it.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Barrier `id` of `threads` threads, 0: all of the block. Returns whether any raised `flag`.
bool barrier(int id, int threads, bool flag);
void warp_barrier();

// All 32 lanes hand in `in`; when the last has come, `combine` makes what each gets. It orders no
// memory accesses, as on the device.
using Combine = void (*)(void (*function)(), const void* in, void* out);
void collective(const char* operation, const void* in, std::size_t in_bytes, void* out,
                std::size_t out_bytes, Combine combine, void (*function)());

template <class In, class Out>
inline void collective(const char* operation, const In& in, Out& out,
                       void (*function)(const In*, Out*)) {
  collective(
      operation, &in, sizeof(In), &out, sizeof(Out),
      [](void (*erased)(), const void* all_in, void* all_out) {
        reinterpret_cast<void (*)(const In*, Out*)>(erased)(static_cast<const In*>(all_in),
                                                            static_cast<Out*>(all_out));
      },
      reinterpret_cast<void (*)()>(function));
}

// What `extern __shared__` and `__shared__` variables become: bytes that the compiler knows
// nothing of, so that it checks each access.
unsigned char* dynamic_shared(std::uint32_t alignment);
unsigned char* static_shared(const char* name, std::uint32_t alignment, std::uint32_t bytes);

// Dynamic shared memory, by its 32-bit byte addresses. `bytes` is 4, 8 or 16, and the address a
// multiple of it.
std::uint32_t shared_address(const void* pointer);
void read_shared(std::uint32_t address, void* to, int bytes);
void write_shared(std::uint32_t address, const void* from, int bytes);

// ldmatrix: row l % 8 of matrix l / 8 is what lane l reads; it gets two elements of each matrix.
void load_matrices(std::uint32_t (&r)[4], std::uint32_t address);
void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address);
// stmatrix: the other way.
void store_matrices(std::uint32_t address, const std::uint32_t (&r)[4], bool transposed);

// mbarriers, in shared memory: see prim/mbarrier.cuh.
void make_mbarrier(std::uint32_t address, int arrivals);
void arrive_at_mbarrier(std::uint32_t address, std::uint32_t expected_bytes);
void wait_for_mbarrier(std::uint32_t address, std::uint32_t parity);
void fence_for_bulk();

// The box of a tensor map at these coordinates, written to shared memory later.
struct EmulatedMap {
  std::uint64_t pointer, extents[4], strides[3];  // strides in bytes, of all axes but the columns
  std::uint32_t kind, box[2];  // of the second and third axis
  std::uint32_t rows() const { return box[0] * box[1]; }
};
void load_box(std::uint32_t shared, const EmulatedMap* map, std::uint32_t barrier, int column,
              int y, int z, int batch);
// The other way: read no earlier than the thread waits for it.
void store_box(const EmulatedMap* map, std::uint32_t shared, int column, int y, int z, int batch);
void commit_stores();
void wait_for_stores();
// load_box of plain bytes.
void load_bulk(std::uint32_t shared, const void* global, std::uint32_t bytes,
               std::uint32_t barrier);

// Products of a warpgroup, done at the wait: D (64 x 8 TILES) += A B.
struct WarpgroupProduct {
  float (*d)[4];
  int tiles;
  bool fp16, accumulate;
  bool a_by_rows, b_by_rows;         // what is summed over, of operands in shared memory
  std::uint64_t a, b;                // these, see prim/wgmma.cuh
  const std::uint32_t* a_registers;  // four of them, or null
};
void begin_product(const WarpgroupProduct& product);
void fence_products();
void commit_products();
void wait_for_products(int batches);
void set_registers(int count, bool more);

// Global memory.
std::uint32_t exchange_global(std::uint32_t* at, std::uint32_t x, bool adds);
// A lane lets what its warp has written be known to whoever has waited for arrivals at a counter.
void arrive_at(const std::uint32_t* counter);
void know_arrivals(const std::uint32_t* counter);
void read_global(const void* from, void* to, int bytes);
void write_global(void* to, const void* from, int bytes);
void add_global(float* to, float x);
void add_global(double* to, double x);

// cp.async. What is copied is read and lands at the wait and not before: as late as the program
// allows. Until then nobody may touch the target.
void copy_async_16(std::uint32_t shared, const void* global, bool valid);
void commit_copies();
void wait_copies(int groups_in_flight);

}  // namespace emulator
