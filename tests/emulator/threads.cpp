// Fibers, barriers, what warps do together, and the order in which threads run.
#include <algorithm>
#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <new>
#include <random>

#include "machine.h"

namespace emulator {

namespace context = boost::context;

Dim3 block_index, grid_size;
int block_threads;
std::vector<u32> clocks;
int current;
std::uintptr_t stack_begin, stack_end;

namespace {

constexpr std::size_t kStackBytes = 256 * 1024, kSlotBytes = 128;
constexpr int kBackground = -2;  // a thread waits for something that async.cpp knows of
constexpr std::size_t kDepth = 48;  // frames of a stack that are kept

enum class State { kReady, kWaiting, kDone };

struct Thread {
  alignas(context::fiber) unsigned char place[sizeof(context::fiber)];
  State state;
  const char* waits_for;
  int barrier;  // or -1: for its warp
  context::fiber& fiber() { return *reinterpret_cast<context::fiber*>(place); }
};

struct Barrier {
  int threads = 0, arrived = 0;
  bool flag = false, result = false;
  std::vector<int> waiting;
};

struct Warp {
  const char* operation = nullptr;
  int arrived = 0;
  u32 ready = 0;  // lanes that can run
  alignas(16) unsigned char in[32 * kSlotBytes], out[32 * kSlotBytes];
};

Thread threads[kMaxThreads];
std::vector<unsigned char> stacks;
Warp warps[kMaxThreads / 32];
Barrier barriers[kMaxBarriers];
context::fiber scheduler;  // where the running fiber came from
void (*kernel)(const void*);
const void* parameters;
std::mt19937 random_bits;

std::string error;  // of the launch, empty: none
std::vector<void*> error_stack;
bool showing;  // a thread that wakes up is to show its stack
std::vector<void*> shown_stack;

// Return addresses, innermost first. Everything is compiled with frame pointers.
__attribute__((noinline)) std::vector<void*> stack_here() {
  std::vector<void*> found;
  auto frame = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
  while (frame >= stack_begin && frame + 16 <= stack_end && frame % 8 == 0 &&
         found.size() < kDepth) {
    void* const* at = reinterpret_cast<void* const*>(frame);
    found.push_back(at[1]);
    const auto next = reinterpret_cast<std::uintptr_t>(at[0]);
    if (next <= frame) break;
    frame = next;
  }
  return found;
}

void sleep() {
  scheduler = std::move(scheduler).resume();
  while (showing) {
    shown_stack = stack_here();
    scheduler = std::move(scheduler).resume();
  }
}

void wait(const char* what, int barrier_id) {
  Thread& me = threads[current];
  me.state = State::kWaiting;
  me.waits_for = what;
  me.barrier = barrier_id;
  warps[current / 32].ready &= ~(1u << current % 32);
  sleep();
}

// What each of these threads has seen by now, all of them see.
void join(const std::vector<int>& members) {
  std::vector<u32> all(block_threads, 0);
  for (int m : members)
    for (int t = 0; t < block_threads; ++t) all[t] = std::max(all[t], seen(m, t));
  for (int m : members) {
    std::copy(all.begin(), all.end(), &seen(m, 0));
    ++seen(m, m);
  }
}

context::fiber run_thread(context::fiber&& from) {
  scheduler = std::move(from);
  kernel(parameters);
  end_thread();
  end_async_thread();
  threads[current].state = State::kDone;
  warps[current / 32].ready &= ~(1u << current % 32);
  return std::move(scheduler);
}

void resume(int thread) {
  current = thread;
  stack_begin = reinterpret_cast<std::uintptr_t>(&stacks[thread * kStackBytes]);
  stack_end = stack_begin + kStackBytes;
  threads[thread].fiber() = std::move(threads[thread].fiber()).resume();
}

// How the next thread is chosen: by a rank of the warps, so that one runs as far ahead of the
// others as barriers let it; anyone; or in turns.
struct Schedule {
  enum { kRanked, kAnyone, kTurns, kKinds } kind;
  std::vector<int> rank;
  int turn = 0;

  explicit Schedule(int warp_count) : kind(decltype(kind)(random_bits() % kKinds)) {
    for (int w = 0; w < warp_count; ++w) rank.push_back(w);
    std::shuffle(rank.begin(), rank.end(), random_bits);
  }
  int next() {  // or -1
    const int n = static_cast<int>(rank.size());
    const int first = kind == kRanked ? 0 : kind == kTurns ? turn + 1 : random_bits() % n;
    for (int i = 0; i < n; ++i) {
      const int place = (first + i) % n, warp = rank[place];
      if (!warps[warp].ready) continue;
      turn = place;
      int lane = __builtin_ctz(warps[warp].ready);
      if (kind == kAnyone) {
        const int from = random_bits() % 32;
        const u32 above = warps[warp].ready >> from;
        if (above) lane = from + __builtin_ctz(above);
      }
      return 32 * warp + lane;
    }
    return -1;
  }
};

// Says of each group of threads that wait at one place for one thing where that is.
void report_deadlock() {
  std::map<std::pair<std::string, std::vector<void*>>, std::vector<int>> groups;
  showing = true;
  for (int t = 0; t < block_threads; ++t) {
    if (threads[t].state != State::kWaiting) continue;
    resume(t);
    char what[96];
    const int id = threads[t].barrier;
    if (id == kBackground) {
      std::snprintf(what, sizeof what, "for %s", threads[t].waits_for);
    } else if (id < 0) {
      std::snprintf(what, sizeof what, "for their warp to come to a %s", threads[t].waits_for);
    } else {
      std::snprintf(what, sizeof what, "at barrier %d of %d threads, %d have come", id,
                    barriers[id].threads, barriers[id].arrived);
    }
    groups[{what, shown_stack}].push_back(t);
  }
  showing = false;
  error = "deadlock: no thread of the block can go on";
  for (const auto& [key, members] : groups) {
    error += "\n  " + std::to_string(members.size()) + " threads (" +
             std::to_string(members.front()) + " to " + std::to_string(members.back()) +
             ") wait " + key.first + "\x01";
    for (void* frame : key.second) {
      char text[32];
      std::snprintf(text, sizeof text, "%p ", frame);
      error += text;
    }
    error += "\x02";
  }
}

void run_block() {
  begin_block();
  begin_async_block();
  clocks.assign(static_cast<std::size_t>(block_threads) * block_threads, 0);
  stacks.resize(block_threads * kStackBytes);
  for (auto& b : barriers) b = Barrier();
  for (int w = 0; w < block_threads / 32; ++w) {
    warps[w].operation = nullptr;
    warps[w].arrived = 0;
  }
  for (int t = 0; t < block_threads; ++t) {
    seen(t, t) = 1;
    unsigned char* stack = &stacks[t * kStackBytes];
    context::stack_context where;
    where.size = kStackBytes;
    where.sp = stack + kStackBytes;
    struct Kept {  // the stacks are ours
      context::stack_context allocate() { return {}; }
      void deallocate(context::stack_context&) {}
    };
    // What a failed launch left there is dropped as it is: nothing in a kernel has to be undone.
    new (threads[t].place) context::fiber(
        std::allocator_arg, context::preallocated(where.sp, where.size, where), Kept(),
        run_thread);
    wake(t);
  }
  Schedule schedule(block_threads / 32);
  while (error.empty()) {
    const int next = schedule.next();
    // Copies end as late as can be, when nobody can go on, or now and then before.
    if (next < 0 || (schedule.kind == Schedule::kAnyone && random_bits() % 64 == 0)) {
      if (!land_one() && next < 0) break;
    }
    if (next >= 0) resume(next);
  }
  if (!error.empty()) return;
  for (int t = 0; t < block_threads; ++t) {
    if (threads[t].state == State::kWaiting) return report_deadlock();
  }
}

}  // namespace

std::uintptr_t slots_begin = reinterpret_cast<std::uintptr_t>(warps);
std::uintptr_t slots_end = slots_begin + sizeof warps;

int thread_index() { return current; }

void wake(int thread) {
  threads[thread].state = State::kReady;
  warps[thread / 32].ready |= 1u << thread % 32;
}
void sleep_for(const char* what) { wait(what, kBackground); }
u32 random_number() { return static_cast<u32>(random_bits()); }

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char text[512];
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  char where[96];
  std::snprintf(where, sizeof where, "block (%u, %u), thread %d: ", block_index.x, block_index.y,
                current);
  error = std::string(where) + text;
  error_stack = stack_here();
  for (;;) scheduler = std::move(scheduler).resume();  // and never comes back
}

bool barrier(int id, int count, bool flag) {
  const bool whole = count == 0;
  if (whole) count = block_threads;
  if (id < 0 || id >= kMaxBarriers) fail("barrier %d: there are 0 to 15", id);
  if (count % 32 || count > block_threads) {
    fail("barrier %d of %d threads: not whole warps of the block's %d", id, count, block_threads);
  }
  Barrier& b = barriers[id];
  if (b.arrived && b.threads != count) {
    fail("barrier %d of %d threads: others came to it as one of %d", id, count, b.threads);
  }
  b.threads = count;
  b.flag = b.flag || flag;
  b.waiting.push_back(current);
  if (++b.arrived < count) {
    wait("barrier", id);
    return b.result;
  }
  std::vector<int> per_warp(block_threads / 32, 0);
  for (int t : b.waiting) ++per_warp[t / 32];
  for (std::size_t w = 0; w < per_warp.size(); ++w) {
    if (per_warp[w] % 32) fail("barrier %d: %d lanes of warp %zu", id, per_warp[w], w);
  }
  join(b.waiting);
  for (int t : b.waiting)
    if (t != current) wake(t);
  b.result = b.flag;
  b.flag = false;
  b.arrived = 0;
  b.waiting.clear();
  return b.result;
}

void collective(const char* operation, const void* in, std::size_t in_bytes, void* out,
                std::size_t out_bytes, Combine combine, void (*function)()) {
  Warp& warp = warps[current / 32];
  if (in_bytes > kSlotBytes || out_bytes > kSlotBytes) std::abort();
  if (warp.arrived && std::strcmp(warp.operation, operation) != 0) {
    fail("%s: other lanes of the warp came to a %s", operation, warp.operation);
  }
  warp.operation = operation;
  const int lane = current % 32;
  std::memcpy(warp.in + lane * in_bytes, in, in_bytes);
  if (++warp.arrived < 32) {
    wait(operation, -1);
  } else {
    warp.arrived = 0;
    combine(function, warp.in, warp.out);
    for (int l = 0; l < 32; ++l)
      if (l != lane) wake(current / 32 * 32 + l);
  }
  std::memcpy(out, warp.out + lane * out_bytes, out_bytes);
}

void warp_barrier() {
  char none = 0;
  collective<char, char>("warp barrier", none, none, [](const char*, char*) {
    std::vector<int> lanes(32);
    for (int l = 0; l < 32; ++l) lanes[l] = current / 32 * 32 + l;
    join(lanes);
  });
}

}  // namespace emulator

// Runs a grid block after block. Returns 0, or 1 with `message` and the addresses of `stack`.
extern "C" int emulator_launch(void (*entry)(const void*), const void* params, unsigned grid_x,
                               unsigned grid_y, int block, u_int32_t shared_bytes, unsigned seed,
                               char* message, int message_bytes, void** stack, int* stack_depth) {
  using namespace emulator;
  error.clear();
  error_stack.clear();
  kernel = entry;
  parameters = params;
  grid_size = {grid_x, grid_y, 1};
  block_threads = block;
  random_bits.seed(seed);
  begin_launch(reinterpret_cast<const void*>(entry), shared_bytes);
  for (unsigned y = 0; y < grid_y && error.empty(); ++y) {
    for (unsigned x = 0; x < grid_x && error.empty(); ++x) {
      block_index = {x, y, 0};
      run_block();
    }
  }
  if (error.empty()) return 0;
  std::snprintf(message, message_bytes, "%s", error.c_str());
  *stack_depth = std::min<int>(*stack_depth, error_stack.size());
  std::copy_n(error_stack.begin(), *stack_depth, stack);
  return 1;
}
