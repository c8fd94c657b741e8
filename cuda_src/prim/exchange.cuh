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

// Two neighbouring lanes have two words each: the even one gets both first words, in the order of
// the lanes, the odd one both second words.
CUFA2_DEVICE void pair_exchange(u32 (&word)[2], bool odd) {
  const u32 other = __shfl_xor_sync(0xffffffffu, odd ? word[0] : word[1], 1);
  if (odd) word[0] = other;
  else word[1] = other;
}
