// What threads.cpp and memory.cpp know of each other.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "runtime.h"

namespace emulator {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr int kMaxThreads = 1024, kMaxBarriers = 16;
constexpr u32 kMaxShared = 227 * 1024;

// Vector clocks. An access of thread b at its time `clock` is before what thread a does now if
// a has passed a barrier with b since, that is if clock <= seen(a, b).
extern int block_threads;  // of the running block
extern std::vector<u32> clocks;
inline u32& seen(int a, int b) { return clocks[static_cast<std::size_t>(a) * block_threads + b]; }
inline u32 now(int thread) { return seen(thread, thread); }

// The fiber that runs, and its stack.
extern int current;
extern std::uintptr_t stack_begin, stack_end;

// What the lanes of warps hand in and get, which the twins' own code reads and writes.
extern std::uintptr_t slots_begin, slots_end;

// memory.cpp: a launch, a block of it, its end, and the end of a thread.
void begin_launch(const void* module, u32 shared_bytes);
void begin_block();
void end_thread();
std::string describe(const void* address);

}  // namespace emulator
