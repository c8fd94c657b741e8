// Integer names and the two 16-bit float types. No host or CUDA header is included: NVRTC finds
// none by itself, and each would cost 60 to 170 ms of every compilation.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define CUFA2_DEVICE __device__ __forceinline__

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

CUFA2_DEVICE float inf() { return __int_as_float(0x7f800000); }

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;

// Storage types: the bits of one element. Arithmetic happens in float32 only.
struct fp16_t { u16 bits; };
struct bf16_t { u16 bits; };
