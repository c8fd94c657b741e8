// The built-in variables of a kernel, and what its warps do with built-in functions.
#pragma once
#include "language.h"
#include "runtime.h"

#define blockIdx emulator::block_index
#define gridDim emulator::grid_size

template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask) {
  struct Sent { T x; int mask; };
  const Sent sent{x, mask};
  emulator::collective<Sent, T>("shuffle", sent, x, [](const Sent* in, T* out) {
    for (int lane = 0; lane < 32; ++lane) out[lane] = in[lane ^ in[lane].mask].x;
  });
  return x;
}
template <class T> inline T __shfl_sync(unsigned, T x, int lane) {
  struct Sent { T x; int lane; };
  const Sent sent{x, lane};
  emulator::collective<Sent, T>("shuffle", sent, x, [](const Sent* in, T* out) {
    for (int l = 0; l < 32; ++l) out[l] = in[in[l].lane].x;
  });
  return x;
}
inline int __any_sync(unsigned, int flag) {
  int any = 0;
  emulator::collective<int, int>("vote", flag, any, [](const int* in, int* out) {
    int found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= in[lane] != 0;
    for (int lane = 0; lane < 32; ++lane) out[lane] = found;
  });
  return any;
}
