// Twin of prim/copy.cuh.
#pragma once
#include "types.cuh"

CUFA2_DEVICE u32 shared_address(const void* pointer) { return emulator::shared_address(pointer); }

CUFA2_DEVICE void cp_async_16(u32 shared, const void* global, bool valid) {
  emulator::copy_async_16(shared, global, valid);
}
CUFA2_DEVICE void cp_async_commit() { emulator::commit_copies(); }
template <int N> CUFA2_DEVICE void cp_async_wait() { emulator::wait_copies(N); }

struct alignas(16) Chunk { u32 word[4]; };
struct Pair { float lo, hi; };

CUFA2_DEVICE Chunk load_shared_16(u32 shared) {
  Chunk c;
  emulator::read_shared(shared, &c, 16);
  return c;
}
CUFA2_DEVICE void store_shared_16(u32 shared, const Chunk& c) {
  emulator::write_shared(shared, &c, 16);
}
CUFA2_DEVICE Pair load_shared_8(u32 shared) {
  Pair x;
  emulator::read_shared(shared, &x, 8);
  return x;
}
CUFA2_DEVICE void store_shared_8(u32 shared, const Pair& x) {
  emulator::write_shared(shared, &x, 8);
}
CUFA2_DEVICE u32 load_shared_4(u32 shared) {
  u32 word;
  emulator::read_shared(shared, &word, 4);
  return word;
}
CUFA2_DEVICE void store_shared_4(u32 shared, u32 word) {
  emulator::write_shared(shared, &word, 4);
}

CUFA2_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 shared) { emulator::load_matrices(r, shared); }
CUFA2_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 shared) {
  emulator::load_matrices_transposed(r, shared);
}

CUFA2_DEVICE void stmatrix_x4(u32 shared, const u32 (&r)[4]) {
  emulator::store_matrices(shared, r, false);
}
CUFA2_DEVICE void stmatrix_x4_trans(u32 shared, const u32 (&r)[4]) {
  emulator::store_matrices(shared, r, true);
}

CUFA2_DEVICE Chunk load_global_16(const void* global) {
  Chunk c;
  emulator::read_global(global, &c, 16);
  return c;
}
struct alignas(8) Words { u32 word[2]; };
CUFA2_DEVICE Words load_global_8(const void* global) {
  Words x;
  emulator::read_global(global, &x, 8);
  return x;
}
CUFA2_DEVICE void store_global_8(void* global, const Words& x) {
  emulator::write_global(global, &x, 8);
}
CUFA2_DEVICE void store_global_16(void* global, const Chunk& c) {
  emulator::write_global(global, &c, 16);
}
CUFA2_DEVICE void reduce_add(double* p, double x, bool valid) {
  if (valid) emulator::add_global(p, x);
}
CUFA2_DEVICE void reduce_add_4(float* p, const float (&x)[4], bool valid = true) {
  for (int e = 0; e < 4 && valid; ++e) emulator::add_global(p + e, x[e]);
}
