// What a Hopper block does in the background, on whole numbers: the results are exact, so that a
// real card and the emulated one must both give what NumPy does.
#include "prim/barrier.cuh"
#include "prim/exchange.cuh"
#include "prim/reduce.cuh"
#include "prim/warpgroup.cuh"
#include "tile/blocked.cuh"

struct HopperParams {
  TensorMap a, b, c;  // (B, H, S, D), boxes of 128, N and N (to be stored: 16) rows
  float* s;           // (128, N)
  float* o;           // (128, DV)
  u32* box;           // (128, D / 2), A as it lies in shared memory
  u32* claims;        // (count,)
  u32* counter;       // (2,)
  int count, row, head, batch;  // of the claims; of A and B
};

// S = -A B^T and O = S C by two warpgroups, 64 rows each; a third one brings the operands. Once
// more with B in the other stage of a ring of two.
template <class T, int D, int N, int DV> CUFA2_DEVICE void products(const HopperParams& p) {
  using A = BlockedTile<128, D>;
  using B = BlockedTile<N, D>;
  using C = BlockedTile<N, DV>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 a = shared_address(shared_memory), b = a + A::kBytes, c = b + 2 * B::kBytes;
  const u32 a_full = c + C::kBytes, b_full = a_full + 8, b_empty = b_full + 16;
  const u32 c_full = b_empty + 16, never = c_full + 8;
  const int thread = thread_index(), group = warp_uniform(thread / 128);
  if (thread == 0) {
    tensor_map_prefetch(p.a);
    mbarrier_make(a_full, 1);
    for (int i = 0; i < 2; ++i) {
      mbarrier_make(b_full + 8 * i, 1);
      mbarrier_make(b_empty + 8 * i, 8);
    }
    mbarrier_make(c_full, 1);
    mbarrier_make_fence();
  }
  block_sync();
  if (group == 0) {
    give_registers<24>();
    if (thread == 0) {
      mbarrier_arrive_expecting(a_full, A::kBytes);
      A::load(a, p.a, a_full, p.row, p.head, p.batch);
      mbarrier_arrive_expecting(c_full, C::kBytes);
      C::load(c, p.c, c_full, 0, p.head, p.batch);
      for (int i = 0; i < 4; ++i) {
        mbarrier_wait(b_empty + 8 * (i % 2), (i / 2 & 1) ^ 1);
        mbarrier_arrive_expecting(b_full + 8 * (i % 2), B::kBytes);
        B::load(b + i % 2 * B::kBytes, p.b, b_full + 8 * (i % 2), 0, p.head, p.batch);
      }
    }
    return;
  }
  take_registers<240>();
  const int lane = thread % 32, first = thread - 128;
  mbarrier_wait(a_full, 0);
  for (int i = first; i < A::kBytes / 16; i += 256) {
    Chunk x = load_shared_16(a + 16 * i);
    for (int w = 0; w < 4; ++w) {
      p.box[4 * i + w] = x.word[w];
      x.word[w] ^= 0x80008000u;  // the sign of both elements
    }
    store_shared_16(a + 16 * i, x);
  }
  fence_shared_for_async();
  group_sync(1, 256);
  const u32 rows = a + (group - 1) * A::kGroupBytes;
  Accumulator<1, N / 8> s;
  for (int i = 0; i < 4; ++i) {
    mbarrier_wait(b_full + 8 * (i % 2), i / 2 & 1);
    pin(s.at[0]);
    wgmma_fence();
    const u64 left = operand_of_columns(rows), right = operand_of_columns(b + i % 2 * B::kBytes);
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      wgmma_shared<T, false, false>(s.at[0], left + A::step_of_columns(kk),
                                    right + B::step_of_columns(kk), kk != 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(s.at[0]);
    if (lane == 0) mbarrier_arrive(b_empty + 8 * (i % 2));
  }
  u32 weights[N / 16][4];
#pragma unroll
  for (int kk = 0; kk < N / 16; ++kk)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* pair = &s.at[0][2 * kk + (e >> 1)][2 * (e & 1)];
      weights[kk][e] = pack2<T>(pair[0], pair[1]);
    }
  Accumulator<1, DV / 8> o;
  o.clear();
  mbarrier_wait(c_full, 0);
  pin(weights);
  pin(o.at[0]);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < N / 16; ++kk) {
    wgmma_rows<T>(o.at[0], weights[kk], operand_of_rows(c, N) + C::step_of_rows(kk));
  }
  wgmma_commit();
  not_before(s.at[0][0][0], never);
  wgmma_wait<0>();
  pin(o.at[0]);
  const int row = first / 32 * 16;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int i = row + s.row(lane, e >> 1);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) p.s[i * N + s.column(lane, n, e)] = s.at[0][n][e];
#pragma unroll
    for (int n = 0; n < DV / 8; ++n) p.o[i * DV + o.column(lane, n, e)] = o.at[0][n][e];
  }
}

// Half of T A, rows or columns, and a factor for each row; T from t as it lies or from s by its
// rows.
template <class T, class A, class S, class St, bool FROM_S, bool ROWS>
CUFA2_DEVICE void multiply_transposed_by(u32 a, u32 s_tile, u32 t_tile, u32 factors, float* out) {
  const int thread = thread_index(), lane = thread % 32, warp = thread % 128 / 32;
  const int group = warp_uniform(thread / 128);
  const u64 by_rows = operand_of_rows(a + (ROWS ? 0 : group * A::kBlockBytes), 128);
  const u64 s = operand_of_rows(s_tile + (ROWS ? group * S::kBlockBytes : 0), 128);
  const u64 t = operand_of_columns(t_tile + (ROWS ? group * St::kGroupBytes : 0));
  Accumulator<1, 8> o;
  pin(o.at[0]);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < 128 / 16; ++kk) {
    const u64 step = by_rows + A::step_of_rows(kk);
    const u64 left = FROM_S ? s + S::step_of_rows(kk) : t + St::step_of_columns(kk);
    wgmma_shared<T, FROM_S, true>(o.at[0], left, step, kk != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(o.at[0]);
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = (ROWS ? 64 * group : 0) + 16 * warp + o.row(lane, e >> 1);
      const int j = (ROWS ? 0 : 64 * group) + o.column(lane, n, e);
      const float factor = static_cast<float>(load_shared_4(factors + 4 * i));
      out[i * A::COLS + j] = o.at[0][n][e] + factor;
    }
}

// S = A B^T of two warpgroups again, 64 rows each, rounded, and stored as it is (s) and transposed
// (t). Then T A, the two of them sharing the rows (N = 128) or the columns, from t as it lies and
// from s by its rows; factors that a bulk copy brings are added up on top. 16 rows of S from the
// 16th on go to the rows of C from p.row on.
template <class T, int D, int N> CUFA2_DEVICE void transposed(const HopperParams& p) {
  using A = BlockedTile<128, D>;
  using B = BlockedTile<N, D>;
  using S = BlockedTile<128, N>;
  using St = BlockedTile<N, 128>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 a = shared_address(shared_memory), b = a + A::kBytes, s_tile = b + B::kBytes;
  const u32 t_tile = s_tile + S::kBytes, factors = t_tile + St::kBytes, full = factors + 4 * N;
  const int thread = thread_index(), group = warp_uniform(thread / 128);
  if (thread == 0) {
    mbarrier_make(full, 1);
    mbarrier_make_fence();
    mbarrier_arrive_expecting(full, A::kBytes + B::kBytes + 4 * N);
    A::load(a, p.a, full, 0, p.head, p.batch);
    B::load(b, p.b, full, 0, p.head, p.batch);
    bulk_load(factors, p.claims, 4 * N, full);
  }
  block_sync();
  if (group == 2) return;
  const int lane = thread % 32, warp = thread % 128 / 32;
  mbarrier_wait(full, 0);
  Accumulator<1, N / 8> s;
  pin(s.at[0]);
  wgmma_fence();
  const u64 left = operand_of_columns(a + group * A::kGroupBytes), right = operand_of_columns(b);
#pragma unroll
  for (int kk = 0; kk < D / 16; ++kk) {
    wgmma_shared<T, false, false>(s.at[0], left + A::step_of_columns(kk),
                                  right + B::step_of_columns(kk), kk != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(s.at[0]);
  const int row = 64 * group + 16 * warp, inner = lane % 8, matrix = lane / 8;
#pragma unroll
  for (int kk = 0; kk < N / 16; ++kk) {
    u32 packed[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* pair = &s.at[0][2 * kk + (e >> 1)][2 * (e & 1)];
      packed[e] = pack2<T>(pair[0], pair[1]);
    }
    const int second = matrix / 2 * 8 + inner, first = matrix % 2;
    stmatrix_x4(s_tile + S::offset(row + 8 * first + inner, 2 * kk + matrix / 2), packed);
    stmatrix_x4_trans(t_tile + St::offset(16 * kk + second, row / 8 + first), packed);
  }
  fence_shared_for_async();
  group_sync(1, 256);
  if (thread == 0) {
    S::store(p.c, s_tile + 128 * 16, p.row, p.head, p.batch);
    tma_store_wait();
  }
  constexpr bool kRows = N == 128;
  multiply_transposed_by<T, A, S, St, false, kRows>(a, s_tile, t_tile, factors, p.s);
  multiply_transposed_by<T, A, S, St, true, kRows>(a, s_tile, t_tile, factors, p.o);
  // One warp's share of the same, from fragments.
  if (thread < 32) {
    u32 left_of[4], of_rows[4];
    float o[2][4] = {};
    for (int kk = 0; kk < 128 / 16; ++kk) {
      St::load_a(left_of, t_tile, 16, kk, lane);
      A::load_b_of_rows(of_rows, a, 16 * kk, 2, lane);
      mma_m16n8k16<T>(o[0], left_of, of_rows[0], of_rows[1]);
      mma_m16n8k16<T>(o[1], left_of, of_rows[2], of_rows[3]);
    }
    for (int n = 0; n < 2; ++n)
      for (int r = 0; r < 2; ++r) {
        const int i = lane / 4 + 8 * r, j = 8 * n + 2 * (lane % 4);
        const Words two = load_global_8(p.claims + 16 + i / 2 * 2);
        const float factor = static_cast<float>(two.word[i % 2]);
        store_global_8(p.box + 16 * i + j, {__float_as_uint(o[n][2 * r] + factor),
                                            __float_as_uint(o[n][2 * r + 1] + factor)});
      }
  }
}

// The last of the blocks to arrive sees what the others wrote, and leaves zero. Its second and
// third warp do; the barrier is theirs.
CUFA2_DEVICE void arrivals(const HopperParams& p) {
  const int thread = thread_index() - 64;
  if (thread < 0 || thread >= 64) return;
  p.claims[64 * blockIdx.x + thread] = blockIdx.x + 1;
  if (!last_to_arrive(p.counter, gridDim.x, 1, 64)) return;
  u32 sum = 0;
  for (u32 block = 0; block < gridDim.x; ++block) sum += p.claims[64 * block + (thread + 33) % 64];
  p.s[thread] = static_cast<float>(sum);
}

// Each claim is somebody's, once; words that two lanes exchange come to their places.
CUFA2_DEVICE void claims(const HopperParams& p) {
  const int lane = thread_index(), t = lane % 4;
  if (lane >= 32) return;
  int mine = static_cast<int>(blockIdx.x);
  while (mine < p.count) {
    u32 words[2] = {16u * t, 16u * t + 1};
    pair_exchange(words, t % 2);
    const u32 even = t / 2 * 32;  // the even lane's first word
    const bool right = words[0] == even + t % 2 && words[1] == even + 16 + t % 2;
    if (!warp_any(!right) && lane == 0) p.claims[mine] += 1;
    mine = warp_uniform(lane == 0 ? claim_work(p.counter) : -1);
  }
  if (lane == 0) end_claims(p.counter);
}
