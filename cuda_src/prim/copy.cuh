// Moving 16-byte chunks: global -> shared without registers (cp.async), shared -> fragments
// (ldmatrix), and plain vector accesses. Shared memory is addressed by 32-bit byte addresses.
#pragma once
#include "types.cuh"

CUFA2_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory in the background; writes zeros and reads nothing if !valid.
// Both addresses are multiples of 16.
CUFA2_DEVICE void cp_async_16(u32 shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// Closes the group of copies issued by this thread since the last commit.
CUFA2_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's newest groups are still in flight.
template <int N> CUFA2_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 and
// receives elements (l / 4, 2 * (l % 4) + {0, 1}) of each.
CUFA2_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}

// The same with each 8x8 matrix transposed on the way.
CUFA2_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}

// The other way: lane l hands in such elements and gives the address of row l % 8 of matrix l / 8
// (sm_90).
CUFA2_DEVICE void stmatrix_x4(u32 shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
CUFA2_DEVICE void stmatrix_x4_trans(u32 shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

struct alignas(16) Chunk { u32 word[4]; };

CUFA2_DEVICE Chunk load_shared_16(u32 shared) {
  Chunk c;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
               : "r"(shared) : "memory");
  return c;
}

CUFA2_DEVICE void store_shared_16(u32 shared, const Chunk& c) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(shared), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3])
               : "memory");
}

// Two floats at a multiple of 8.
struct Pair { float lo, hi; };

CUFA2_DEVICE Pair load_shared_8(u32 shared) {
  Pair x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.lo), "=f"(x.hi) : "r"(shared) : "memory");
  return x;
}

CUFA2_DEVICE void store_shared_8(u32 shared, const Pair& x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(shared), "f"(x.lo), "f"(x.hi) : "memory");
}

CUFA2_DEVICE u32 load_shared_4(u32 shared) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared) : "memory");
  return word;
}

CUFA2_DEVICE void store_shared_4(u32 shared, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" :: "r"(shared), "r"(word) : "memory");
}

CUFA2_DEVICE Chunk load_global_16(const void* global) {
  Chunk c;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
               : "l"(global) : "memory");
  return c;
}

// Two words at a multiple of 8.
struct alignas(8) Words { u32 word[2]; };

CUFA2_DEVICE Words load_global_8(const void* global) {
  Words x;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(x.word[0]), "=r"(x.word[1]) : "l"(global) : "memory");
  return x;
}
CUFA2_DEVICE void store_global_8(void* global, const Words& x) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};"
               :: "l"(global), "r"(x.word[0]), "r"(x.word[1]) : "memory");
}

CUFA2_DEVICE void store_global_16(void* global, const Chunk& c) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(global), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3])
               : "memory");
}

// *p += x in L2, in no defined order; nothing if !valid.
CUFA2_DEVICE void reduce_add(double* p, double x, bool valid) {
  asm volatile("{\n\t.reg .pred %%valid;\n\tsetp.ne.b32 %%valid, %2, 0;\n\t"
               "@%%valid red.relaxed.gpu.global.add.f64 [%0], %1;\n\t}"
               :: "l"(p), "d"(x), "r"(static_cast<int>(valid)) : "memory");
}

// The same of four elements; p is a multiple of 16.
CUFA2_DEVICE void reduce_add_4(float* p, const float (&x)[4], bool valid = true) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n\t.reg .pred %%valid;\n\tsetp.ne.b32 %%valid, %5, 0;\n\t"
               "@%%valid red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n\t}"
               :: "l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]),
                  "r"(static_cast<int>(valid)) : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4 && valid; ++e) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(p + e), "f"(x[e]) : "memory");
  }
#endif
}
