// Values that lanes of a warp hand one another.
#pragma once
#include "types.cuh"

// Lane 0's value: what the compiler then knows to be the same in all lanes of the warp, and keeps,
// with all that is computed from it, in registers of the warp.
CUFA2_DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// The value of one lane, the same for all.
CUFA2_DEVICE float warp_broadcast(float x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}

// Lanes of a quad exchange words: of each four, lane t hands in word t' for lane t' and gets word
// t of each. Several at once: what an exchange takes is latency.
template <int N> CUFA2_DEVICE void quad_transpose(u32 (&words)[N][4], int t) {
  const bool odd = t & 1, upper = t & 2;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    u32 (&word)[4] = words[i];
    const u32 a = __shfl_xor_sync(0xffffffffu, odd ? word[0] : word[1], 1);
    const u32 b = __shfl_xor_sync(0xffffffffu, odd ? word[2] : word[3], 1);
    if (odd) word[0] = a, word[2] = b;
    else word[1] = a, word[3] = b;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    u32 (&word)[4] = words[i];
    const u32 c = __shfl_xor_sync(0xffffffffu, upper ? word[0] : word[2], 2);
    const u32 d = __shfl_xor_sync(0xffffffffu, upper ? word[1] : word[3], 2);
    if (upper) word[0] = c, word[1] = d;
    else word[2] = c, word[3] = d;
  }
}
