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

// threads.cpp: the running thread sleeps until another one wakes it.
void sleep_for(const char* what);
void wake(int thread);

// async.cpp: what runs in the background of a block. land_one() ends a copy, if there is one.
void begin_async_block();
bool land_one();
void end_async_thread();

// memory.cpp, for async.cpp.
unsigned char* begin_bulk_write(u32 address, u32 bytes);
void end_bulk_write(u32 address, u32 bytes);
const unsigned char* bulk_read_shared(u32 address, u32 bytes);
void bulk_read_global(const void* from, void* to, std::size_t bytes);
void bulk_write_global(void* to, const void* from, std::size_t bytes);
u32 random_number();

// memory.cpp: a launch, a block of it, its end, and the end of a thread.
void begin_launch(const void* module, u32 shared_bytes);
void begin_block();
void end_thread();
std::string describe(const void* address);

}  // namespace emulator
