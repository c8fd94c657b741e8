// A unit for each primitive, run on the card and on the emulated one: their results are the same.
//
// UNIT(name, words, results, type, ulps): each thread takes `words` 32-bit words at `in` and writes
// `results` of them at `out`, aligned to 16 bytes if their number is a multiple of 4, to 8 if of 2.
// They are numbers of this type, at most `ulps` units in the last place apart; as u32, the bits of
// a NaN count too. Blocks are of 64 threads and have 2048 bytes of shared memory at `shared`.
#include "unit.cuh"

#define UNIT(name, words, results, type, ulps)                                  \
  CUFA2_DEVICE void unit_##name([[maybe_unused]] const u32* in, u32* out,       \
                                [[maybe_unused]] u32 shared, [[maybe_unused]] int t)

CUFA2_DEVICE void write(u32* out, float x) { *out = __float_as_uint(x); }
CUFA2_DEVICE void write(u32* out, double x) { *reinterpret_cast<double*>(out) = x; }
CUFA2_DEVICE void write(u32* out, const Chunk& c) {
  for (int e = 0; e < 4; ++e) out[e] = c.word[e];
}
CUFA2_DEVICE float float_at(const u32* in) { return __uint_as_float(*in); }
CUFA2_DEVICE double double_at(const u32* in) { return *reinterpret_cast<const double*>(in); }
CUFA2_DEVICE Chunk chunk_at(const u32* in) { return {{in[0], in[1], in[2], in[3]}}; }

// prim/mma.cuh. Words: A, B, D.
template <class T> CUFA2_DEVICE void product_of_halves(const u32* in, u32* out) {
  u32 a[4];
  float d[4];
  for (int e = 0; e < 4; ++e) a[e] = in[e], d[e] = float_at(in + 6 + e);
  mma_m16n8k16<T>(d, a, in[4], in[5]);
  for (int e = 0; e < 4; ++e) write(out + e, d[e]);
}
UNIT(product_fp16, 10, 4, u32, 0) { product_of_halves<fp16_t>(in, out); }
UNIT(product_bf16, 10, 4, u32, 0) { product_of_halves<bf16_t>(in, out); }

UNIT(product_tf32, 10, 8, u32, 0) {
  u32 a[4], b[2] = {in[4], in[5]};
  float d[4], fresh[4];
  for (int e = 0; e < 4; ++e) a[e] = in[e], d[e] = float_at(in + 6 + e);
  mma_m16n8k8(d, a, b);
  mma_m16n8k8_new(fresh, a, b);
  for (int e = 0; e < 4; ++e) write(out + e, d[e]), write(out + 4 + e, fresh[e]);
}

UNIT(product_float64, 20, 16, double, 0) {
  double a[4], b[2] = {double_at(in + 8), double_at(in + 10)}, d[4], fresh[4];
  for (int e = 0; e < 4; ++e) a[e] = double_at(in + 2 * e), d[e] = double_at(in + 12 + 2 * e);
  mma_m16n8k8(d, a, b);
  mma_m16n8k8_new(fresh, a, b);
  for (int e = 0; e < 4; ++e) write(out + 2 * e, d[e]), write(out + 8 + 2 * e, fresh[e]);
}

// prim/convert.cuh.
UNIT(pack_fp16, 2, 1, u32, 0) { *out = pack2<fp16_t>(float_at(in), float_at(in + 1)); }
UNIT(pack_bf16, 2, 1, u32, 0) { *out = pack2<bf16_t>(float_at(in), float_at(in + 1)); }
UNIT(unpack_fp16, 1, 2, u32, 0) {
  const Float2 f = unpack2<fp16_t>(*in);
  write(out, f.lo), write(out + 1, f.hi);
}
UNIT(unpack_bf16, 1, 2, u32, 0) {
  const Float2 f = unpack2<bf16_t>(*in);
  write(out, f.lo), write(out + 1, f.hi);
}
UNIT(round_to_tf32, 1, 1, u32, 0) { *out = rounded_to_tf32(float_at(in)); }
UNIT(exponential, 1, 1, float, 2) { write(out, exp2_approx(float_at(in))); }
UNIT(reciprocal, 1, 1, float, 1) { write(out, reciprocal_approx(float_at(in))); }

// prim/copy.cuh.
UNIT(copies, 4, 8, u32, 0) {
  cp_async_16(shared + 16 * t, in, t % 5 != 0);
  cp_async_commit();
  cp_async_16(shared + 1024 + 16 * t, in, true);
  cp_async_commit();
  cp_async_wait<1>();
  block_sync();
  write(out, load_shared_16(shared + 16 * (63 - t)));
  cp_async_wait<0>();
  block_sync();
  write(out + 4, load_shared_16(shared + 1024 + 16 * (t ^ 7)));
}
UNIT(shared_accesses, 4, 8, u32, 0) {
  store_shared_16(shared + 16 * t, chunk_at(in));
  block_sync();
  const Pair x = load_shared_8(shared + 8 * (127 - t));
  write(out, x.lo), write(out + 1, x.hi);
  out[2] = load_shared_4(shared + 4 * (5 * t % 256));
  write(out + 4, load_shared_16(shared + 16 * (t ^ 9)));
  block_sync();
  store_shared_8(shared + 8 * t, {float_at(in), float_at(in + 1)});
  store_shared_4(shared + 512 + 4 * t, in[2]);
  block_sync();
  out[3] = load_shared_4(shared + 4 * (3 * t));
}
UNIT(address, 1, 2, u32, 0) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  out[0] = shared_address(shared_memory + 20) - shared;
  out[1] = shared % 128;
}
UNIT(matrices, 4, 8, u32, 0) {
  store_shared_16(shared + 16 * t, chunk_at(in));
  block_sync();
  u32 r[4];
  ldmatrix_x4(r, shared + 16 * (t ^ 5));
  for (int e = 0; e < 4; ++e) out[e] = r[e];
  ldmatrix_x4_trans(r, shared + 16 * (63 - t));
  for (int e = 0; e < 4; ++e) out[4 + e] = r[e];
}
UNIT(global_accesses, 4, 4, u32, 0) {
  u32* other = out + 4 * ((t ^ 1) - t);
  store_global_16(other, load_global_16(in));
}
// Sums of small integers, exact in any order.
CUFA2_DEVICE int small(u32 word) { return static_cast<int>(word % 2000) - 1000; }
UNIT(adds_to_floats, 4, 4, u32, 0) {
  write(out, Chunk{});
  block_sync();
  float x[4];
  for (int e = 0; e < 4; ++e) x[e] = static_cast<float>(small(in[e]));
  for (int n = 0; n < 5; ++n) {
    reduce_add_4(reinterpret_cast<float*>(out) + 4 * (5 * n % 64 * t % 64 - t), x, in[n % 4] % 3);
  }
  reduce_add_4(reinterpret_cast<float*>(out), x);
}
UNIT(adds_to_doubles, 2, 2, double, 0) {
  write(out, 0.0);
  block_sync();
  for (int n = 0; n < 5; ++n) {
    double* other = reinterpret_cast<double*>(out) + (5 * n % 64 * t % 64 - t);
    reduce_add(other, small(in[n % 2]), in[n % 2] / 7 % 3);
  }
}

// prim/barrier.cuh.
UNIT(votes, 1, 4, u32, 0) {
  out[0] = block_any(*in % 61 == 0);
  out[1] = group_any(1 + t / 32, 32, *in % 31 == 0);
  out[2] = warp_any(*in % 37 == 0);
  out[3] = static_cast<u32>(thread_index());
}
UNIT(exchanges, 1, 3, u32, 0) {
  store_shared_4(shared + 4 * t, *in);
  warp_sync();
  out[0] = load_shared_4(shared + 4 * (t ^ 31));
  group_sync(1 + t / 32, 32);
  store_shared_4(shared + 4 * t, out[0] + 1);
  group_sync(3, 64);
  out[1] = load_shared_4(shared + 4 * (63 - t));
  block_sync();
  store_shared_4(shared + 4 * t, out[1] + 1);
  block_sync();
  out[2] = load_shared_4(shared + 4 * (t ^ 33));
}

// prim/reduce.cuh and prim/wide.cuh: built of what has twins.
UNIT(lanes, 1, 4, float, 0) {
  const float x = float_at(in);
  write(out, quad_max(x)), write(out + 1, quad_sum(x)), write(out + 2, eighth_sum(x));
  out[3] = quad_sum(static_cast<int>(*in & 0xffff));
}
UNIT(lanes_of_a_warp, 1, 3, float, 0) {
  const float x = float_at(in);
  write(out, warp_max(x)), write(out + 1, warp_sum(x)), write(out + 2, warp_broadcast(x, 21));
}
UNIT(lanes_of_doubles, 2, 4, double, 0) {
  write(out, quad_sum(double_at(in))), write(out + 2, eighth_sum(double_at(in)));
}
UNIT(power_of_2, 2, 2, double, 0) { write(out, power_of_2(double_at(in))); }

// Arithmetic of the language: exact where IEEE 754 says what it is (a product that is added to
// something is not here: NVRTC makes it an fma, g++ is told not to) ...
UNIT(arithmetic, 3, 5, float, 0) {
  const float x = float_at(in), y = float_at(in + 1), z = float_at(in + 2);
  write(out, fmaf(x, y, z)), write(out + 1, x / y), write(out + 2, x - y);
  write(out + 3, fmaxf(x, y)), write(out + 4, fabsf(z));
}
UNIT(arithmetic_of_doubles, 6, 6, double, 0) {
  const double x = double_at(in), y = double_at(in + 2), z = double_at(in + 4);
  write(out, fma(x, y, z)), write(out + 2, x / y), write(out + 4, __dadd_rn(x, z));
}
// ... and where it does not, as far apart as two libraries are, each good to a unit or so.
UNIT(logarithm, 1, 1, float, 1) { write(out, logf(float_at(in))); }
UNIT(hyperbolic_tangent, 1, 1, float, 2) { write(out, tanh(float_at(in))); }
UNIT(logarithm_of_doubles, 2, 2, double, 1) { write(out, log(double_at(in))); }
UNIT(hyperbolic_tangent_of_doubles, 2, 2, double, 2) { write(out, tanh(double_at(in))); }
