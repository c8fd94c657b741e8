// Every access outside a thread's own stack: is it inside an array, is it aligned, has somebody
// written what is read, and does a barrier order it with what other threads do to the same bytes?
//
// Kernels are compiled with -fsanitize=kernel-address and -fsanitize=undefined, whose calls end up
// here. What the primitives read and write by themselves comes through runtime.h.
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <unordered_map>

#include "machine.h"

namespace emulator {
namespace {

// Where dynamic shared memory begins: nothing a kernel may count on but the alignment it asks for.
constexpr u32 kSharedBase = 4 * 1024;
constexpr u32 kMaxStatic = 16 * 1024;
alignas(1024) unsigned char shared_memory[kMaxShared + 1024], static_memory[kMaxStatic];

u32 fences[kMaxThreads];  // when a thread last made its writes visible to the other proxy

// What is known of UNIT bytes of memory: who wrote them last and who has read them since.
struct Cell {
  static constexpr int kReads = 6;
  struct Read { u32 clock; u16 thread; };
  u32 stamp = 0;  // of the block that this is about
  u32 write_clock = 0;
  u16 writer = 0;
  u8 reads = 0;  // kReads + 1: too many, see Shadow::crowds
  bool written = false, in_flight = false, atomic = false;
  bool fenced = true;  // or written by a thread: the asynchronous proxy does not see it yet
  Read read[kReads];
};

// What a warp of some block had written when it arrived at a counter: by lane, up to which clock.
struct Arrival {
  u32 stamp;
  int warp;
  u32 clock[32];
};
std::unordered_map<const u32*, std::vector<Arrival>> arrivals;
// Those that each warp of the running block has waited for.
std::vector<Arrival> known[kMaxThreads / 32];

bool is_known(u32 stamp, int writer, u32 clock) {
  for (const auto& a : known[current / 32]) {
    if (a.stamp == stamp && a.warp == writer / 32 && clock <= a.clock[writer % 32]) return true;
  }
  return false;
}

// kStart: of a copy that lands later. Bulk copies and products of warpgroups see memory through
// another proxy than threads do.
enum class Access { kRead, kWrite, kStart, kAtomic, kBulkStart, kBulkRead };

class Shadow {
 public:
  // fresh: every block of a launch finds it unwritten, as shared memory is. What is not fresh
  // is global: what other blocks of the launch wrote nobody may count on.
  Shadow(std::size_t bytes, int unit, bool fresh)
      : unit_(unit), fresh_(fresh), cells_((bytes + unit - 1) / unit) {}

  // Every block starts anew: with stamp. In global memory what other blocks of the launch did is
  // known by stamps from `launch_stamp` on.
  std::string check(std::size_t at, std::size_t bytes, Access access, u32 stamp,
                    u32 launch_stamp) {
    std::string fault;
    for (std::size_t i = at / unit_; i <= (at + bytes - 1) / unit_ && fault.empty(); ++i) {
      fault = check_cell(i, access, stamp, launch_stamp);
    }
    return fault;
  }

  // A bulk copy counts as done when its thread asked for it: who waits for its bytes waits for
  // that thread's arrival, too.
  void land_bulk(std::size_t at, std::size_t bytes) {
    for (std::size_t i = at / unit_; i <= (at + bytes - 1) / unit_; ++i) {
      cells_[i].in_flight = false;
    }
  }

  void land(std::size_t at, std::size_t bytes) {
    for (std::size_t i = at / unit_; i <= (at + bytes - 1) / unit_; ++i) {
      cells_[i].in_flight = false;
      cells_[i].write_clock = now(cells_[i].writer);
    }
  }

 private:
  std::string check_cell(std::size_t i, Access access, u32 stamp, u32 launch_stamp) {
    Cell& cell = cells_[i];
    if (cell.stamp != stamp) {
      if (!fresh_ && cell.stamp >= launch_stamp && cell.written) {
        if (access == Access::kRead && is_known(cell.stamp, cell.writer, cell.write_clock)) return {};
        const bool both = access == Access::kAtomic && cell.atomic;
        if (!both) return "that another block of the grid writes";
      }
      cell = Cell();
      cell.stamp = stamp;
      crowds_.erase(i);
    }
    if (cell.in_flight) {
      return of_thread("that a copy of thread %d is still to write", cell.writer);
    }
    const bool before = cell.write_clock <= seen(current, cell.writer);
    const bool both = access == Access::kAtomic && cell.atomic;
    if (cell.written && cell.writer != current && !before && !both) {
      return of_thread("that thread %d wrote, with no barrier in between", cell.writer);
    }
    if (access == Access::kRead || access == Access::kBulkRead) {
      if (fresh_ && !cell.written) return "that nobody wrote";
      if (access == Access::kBulkRead && !cell.fenced && cell.write_clock > fences[cell.writer]) {
        return of_thread("that thread %d wrote, with no proxy fence after it", cell.writer);
      }
      add_read(i, cell);
      return {};
    }
    const int reader = unordered_reader(i, cell);
    if (reader >= 0) return of_thread("that thread %d read, with no barrier in between", reader);
    crowds_.erase(i);
    cell.reads = 0;
    cell.written = true;
    cell.in_flight = access == Access::kStart || access == Access::kBulkStart;
    cell.atomic = access == Access::kAtomic;
    cell.fenced = access == Access::kBulkStart;
    cell.writer = static_cast<u16>(current);
    cell.write_clock = now(current);
    return {};
  }

  static std::string of_thread(const char* format, int thread) {
    char text[96];
    std::snprintf(text, sizeof text, format, thread);
    return text;
  }

  void add_read(std::size_t i, Cell& cell) {
    if (cell.reads <= Cell::kReads) {
      // A read that this one is ordered after need not be remembered: who waits for this one waits
      // for that one.
      for (int r = 0; r < cell.reads; ++r) {
        auto& old = cell.read[r];
        if (old.clock <= seen(current, old.thread)) {
          old = {now(current), static_cast<u16>(current)};
          return;
        }
      }
      if (cell.reads < Cell::kReads) {
        cell.read[cell.reads++] = {now(current), static_cast<u16>(current)};
        return;
      }
      auto& all = crowds_[i];
      all.assign(block_threads, 0);
      for (const auto& old : cell.read) all[old.thread] = old.clock;
      cell.reads = Cell::kReads + 1;
    }
    crowds_[i][current] = now(current);
  }

  int unordered_reader(std::size_t i, const Cell& cell) const {
    if (cell.reads <= Cell::kReads) {
      for (int r = 0; r < cell.reads; ++r) {
        const auto& old = cell.read[r];
        if (old.thread != current && old.clock > seen(current, old.thread)) return old.thread;
      }
      return -1;
    }
    const auto& all = crowds_.at(i);
    for (int t = 0; t < block_threads; ++t)
      if (t != current && all[t] > seen(current, t)) return t;
    return -1;
  }

  int unit_;
  bool fresh_;  // every block finds it unwritten
  std::vector<Cell> cells_;
  std::unordered_map<std::size_t, std::vector<u32>> crowds_;
};

// Global memory that the launch was given.
constexpr u8 kReadable = 1, kWritable = 2, kResult = 4;
struct Named {
  std::string name;
  std::uintptr_t begin, end;
  bool result;  // all of it must be written in the end
  std::uintptr_t pointer;
  std::vector<long> shape, strides;
  int itemsize;
};
struct Region {
  std::uintptr_t begin, end;
  std::vector<u8> state;  // of each byte
  std::unique_ptr<Shadow> shadow;  // where a byte is writable
  std::vector<Named> arrays;
};

struct Copy {
  u32 shared;
  const void* global;
  bool valid;
};
struct Copies {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

std::vector<Region> regions;
Region* last_region;
u32 stamp, launch_stamp;
u32 shared_bytes;
u32 shared_shift;  // of dynamic shared memory from a multiple of 1024
std::unordered_map<std::string, unsigned char*> variables;  // __shared__ ones of the kernel
u32 static_bytes;
std::uintptr_t module_begin, module_end;  // its constants, among others
std::unique_ptr<Shadow> dynamic_shadow, static_shadow;
Copies copies[kMaxThreads];

Region* region_of(std::uintptr_t at) {
  if (last_region && at >= last_region->begin && at < last_region->end) return last_region;
  auto after = std::upper_bound(regions.begin(), regions.end(), at,
                                [](std::uintptr_t x, const Region& r) { return x < r.begin; });
  if (after == regions.begin()) return nullptr;
  --after;
  if (at >= after->end) return nullptr;
  return last_region = &*after;
}

const char* verb(Access access) {
  const bool read = access == Access::kRead || access == Access::kBulkRead;
  return read ? "reads" : access == Access::kAtomic ? "adds to" : "writes";
}

void check_global(std::uintptr_t at, std::size_t bytes, Access access) {
  Region* region = region_of(at);
  const void* address = reinterpret_cast<const void*>(at);
  if (!region || at + bytes > region->end) {
    fail("%s %zu bytes outside all arrays, %s", verb(access), bytes, describe(address).c_str());
  }
  u8* state = &region->state[at - region->begin];
  const u8 needed = access == Access::kRead    ? kReadable
                    : access == Access::kWrite ? kWritable
                                               : kReadable | kWritable;
  for (std::size_t i = 0; i < bytes; ++i) {
    const u8 lacks = needed & ~state[i];
    if (!lacks) continue;
    const bool unwritten = lacks == kReadable && state[i] & kWritable;
    fail("%s %zu bytes %s, %s", verb(access), bytes,
         unwritten ? "that nobody wrote" : "where it may not",
         describe(static_cast<const char*>(address) + i).c_str());
  }
  if (!region->shadow) return;
  const auto fault =
      region->shadow->check(at - region->begin, bytes, access, stamp, launch_stamp);
  if (!fault.empty()) {
    fail("%s %zu bytes %s, %s", verb(access), bytes, fault.c_str(), describe(address).c_str());
  }
  if (access == Access::kWrite) std::fill_n(state, bytes, u8(state[0] | kReadable | kWritable));
}

void check_shared(std::size_t at, std::size_t bytes, Access access) {
  if (at + bytes > shared_bytes) {
    fail("%s %zu bytes at %zu of %u bytes of shared memory", verb(access), bytes, at,
         shared_bytes);
  }
  const auto fault = dynamic_shadow->check(at, bytes, access, stamp, 0);
  if (!fault.empty()) {
    fail("%s %zu bytes of shared memory at %zu %s", verb(access), bytes, at, fault.c_str());
  }
}

unsigned char* shared_at(u32 address, int bytes, Access access) {
  const u32 at = address - kSharedBase - shared_shift;
  if (address % bytes) {
    fail("%s %d bytes of shared memory at %u: misaligned", verb(access), bytes, at);
  }
  check_shared(at, bytes, access);
  return shared_memory + shared_shift + at;
}

// What the compiler's own loads and stores touch.
void check_access(std::uintptr_t at, std::size_t bytes, Access access) {
  if (at >= stack_begin && at + bytes <= stack_end) return;
  const auto dynamic = reinterpret_cast<std::uintptr_t>(shared_memory) + shared_shift;
  const auto fixed = reinterpret_cast<std::uintptr_t>(static_memory);
  if (at >= dynamic && at < dynamic + kMaxShared) return check_shared(at - dynamic, bytes, access);
  if (at >= fixed && at + bytes <= fixed + static_bytes) {
    const auto fault = static_shadow->check(at - fixed, bytes, access, stamp, 0);
    if (fault.empty()) return;
    fail("%s %zu bytes of a __shared__ variable %s", verb(access), bytes, fault.c_str());
  }
  if (at >= slots_begin && at + bytes <= slots_end) return;
  if (access == Access::kRead && at >= module_begin && at + bytes <= module_end) return;
  check_global(at, bytes, access);
}

void require_aligned(const void* pointer, int bytes, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % bytes) {
    fail("%s %d bytes: misaligned, %s", what, bytes, describe(pointer).c_str());
  }
}

template <class T> void add(T* to, T x) {
  require_aligned(to, sizeof(T), "adds to");
  check_global(reinterpret_cast<std::uintptr_t>(to), sizeof(T), Access::kAtomic);
  *to += x;
}

// Where the module of a kernel is mapped.
int find_module(dl_phdr_info* info, std::size_t, void* inside) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(*static_cast<const void**>(inside));
  std::uintptr_t low = ~std::uintptr_t(0), high = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    low = std::min(low, info->dlpi_addr + part.p_vaddr);
    high = std::max(high, info->dlpi_addr + part.p_vaddr + part.p_memsz);
  }
  if (wanted < low || wanted >= high) return 0;
  module_begin = low;
  module_end = high;
  return 1;
}

}  // namespace

void begin_launch(const void* module, u32 bytes) {
  arrivals.clear();
  dl_iterate_phdr(find_module, &module);
  shared_bytes = bytes;
  dynamic_shadow = std::make_unique<Shadow>(bytes, 4, true);
  static_shadow = std::make_unique<Shadow>(kMaxStatic, 1, true);
  launch_stamp = stamp + 1;
}

void begin_block() {
  for (auto& all : known) all.clear();
  ++stamp;
  std::memset(shared_memory, 0xff, sizeof shared_memory);
  std::memset(static_memory, 0xff, sizeof static_memory);
  variables.clear();
  static_bytes = 0;
  for (int t = 0; t < block_threads; ++t) copies[t] = Copies(), fences[t] = 0;
}

void end_thread() {
  std::size_t left = copies[current].open.size();
  for (const auto& group : copies[current].groups) left += group.size();
  if (left) fail("a thread ends with %zu of its cp.async in flight", left);
}

std::string describe(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const Named* best = nullptr;
  std::uintptr_t least = ~std::uintptr_t(0);
  for (const auto& region : regions) {
    for (const auto& array : region.arrays) {
      const auto away = at < array.begin  ? array.begin - at
                        : at >= array.end ? at - array.end + 1
                                          : 0;
      if (away < least) least = away, best = &array;
    }
  }
  char text[160];
  if (!best) {
    std::snprintf(text, sizeof text, "at %p: there are no arrays", address);
  } else if (at < best->begin) {
    std::snprintf(text, sizeof text, "%zu bytes before %s", best->begin - at, best->name.c_str());
  } else if (at >= best->end) {
    std::snprintf(text, sizeof text, "%zu bytes past the end of %s", at - best->end,
                  best->name.c_str());
  } else {
    std::snprintf(text, sizeof text, "at byte %zu of %s", at - best->begin, best->name.c_str());
  }
  return text;
}

unsigned char* dynamic_shared(u32 alignment) {
  shared_shift = alignment % 1024;
  return shared_memory + shared_shift;
}

unsigned char* static_shared(const char* name, u32 alignment, u32 bytes) {
  auto& place = variables[name];
  if (!place) {
    const u32 at = (static_bytes + alignment - 1) / alignment * alignment;
    static_bytes = at + bytes;
    if (static_bytes > kMaxStatic) fail("%u bytes of __shared__ variables", static_bytes);
    place = static_memory + at;
  }
  return place;
}

u32 shared_address(const void* pointer) {
  const auto at = static_cast<const unsigned char*>(pointer) - shared_memory;
  if (at < 0 || at > static_cast<long>(sizeof shared_memory)) {
    fail("shared_address of %p, which is not in shared memory", pointer);
  }
  return kSharedBase + static_cast<u32>(at);
}

void read_shared(u32 address, void* to, int bytes) {
  std::memcpy(to, shared_at(address, bytes, Access::kRead), bytes);
}

void write_shared(u32 address, const void* from, int bytes) {
  std::memcpy(shared_at(address, bytes, Access::kWrite), from, bytes);
}

namespace {

struct MatrixRow { u16 at[8]; };
struct Fragments { u32 at[4]; };

void load(const char* name, u32 (&r)[4], u32 address,
          void (*function)(const MatrixRow*, Fragments*)) {
  MatrixRow row;
  read_shared(address, &row, 16);
  Fragments mine;
  collective(name, row, mine, function);
  std::memcpy(r, mine.at, sizeof r);
}

}  // namespace

void load_matrices(u32 (&r)[4], u32 address) {
  load("ldmatrix", r, address, [](const MatrixRow* rows, Fragments* out) {
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m) {
        const u16* pair = &rows[8 * m + lane / 4].at[2 * (lane % 4)];
        out[lane].at[m] = pair[0] | static_cast<u32>(pair[1]) << 16;
      }
  });
}

void load_matrices_transposed(u32 (&r)[4], u32 address) {
  load("transposing ldmatrix", r, address, [](const MatrixRow* rows, Fragments* out) {
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m) {
        const MatrixRow* pair = &rows[8 * m + 2 * (lane % 4)];
        out[lane].at[m] = pair[0].at[lane / 4] | static_cast<u32>(pair[1].at[lane / 4]) << 16;
      }
  });
}

void store_matrices(u32 address, const u32 (&r)[4], bool transposed) {
  struct Stored {
    u32 address;
    u32 at[4];
    bool transposed;
  };
  Stored in{address, {r[0], r[1], r[2], r[3]}, transposed};
  MatrixRow row;
  collective<Stored, MatrixRow>("stmatrix", in, row, [](const Stored* from, MatrixRow* rows) {
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m)
        for (int half = 0; half < 2; ++half) {
          const u16 x = from[lane].at[m] >> 16 * half & 0xffffu;
          const int along = lane / 4, across = 2 * (lane % 4) + half;
          if (from[0].transposed) rows[8 * m + across].at[along] = x;
          else rows[8 * m + along].at[across] = x;
        }
  });
  write_shared(address, row.at, 16);
}

void read_global(const void* from, void* to, int bytes) {
  require_aligned(from, bytes, "reads");
  check_global(reinterpret_cast<std::uintptr_t>(from), bytes, Access::kRead);
  std::memcpy(to, from, bytes);
}

void write_global(void* to, const void* from, int bytes) {
  require_aligned(to, bytes, "writes");
  check_global(reinterpret_cast<std::uintptr_t>(to), bytes, Access::kWrite);
  std::memcpy(to, from, bytes);
}

u32 exchange_global(u32* at, u32 x, bool adds) {
  require_aligned(at, 4, "adds to");
  check_global(reinterpret_cast<std::uintptr_t>(at), 4, Access::kAtomic);
  const u32 old = *at;
  *at = adds ? old + x : x;
  return old;
}

void arrive_at(const u32* counter) {
  Arrival mine{stamp, current / 32, {}};
  for (int lane = 0; lane < 32; ++lane) mine.clock[lane] = now(current / 32 * 32 + lane);
  arrivals[counter].push_back(mine);
}
void know_arrivals(const u32* counter) {
  auto& all = known[current / 32];
  for (const auto& a : arrivals[counter]) all.push_back(a);
}

void fence_for_bulk() {
  fences[current] = now(current);
  ++seen(current, current);
}

unsigned char* begin_bulk_write(u32 address, u32 bytes) {
  const u32 at = address - kSharedBase - shared_shift;
  check_shared(at, bytes, Access::kBulkStart);
  return shared_memory + shared_shift + at;
}
void end_bulk_write(u32 address, u32 bytes) {
  dynamic_shadow->land_bulk(address - kSharedBase - shared_shift, bytes);
}
const unsigned char* bulk_read_shared(u32 address, u32 bytes) {
  const u32 at = address - kSharedBase - shared_shift;
  check_shared(at, bytes, Access::kBulkRead);
  return shared_memory + shared_shift + at;
}
void bulk_read_global(const void* from, void* to, std::size_t bytes) {
  check_global(reinterpret_cast<std::uintptr_t>(from), bytes, Access::kRead);
  std::memcpy(to, from, bytes);
}
void bulk_write_global(void* to, const void* from, std::size_t bytes) {
  check_global(reinterpret_cast<std::uintptr_t>(to), bytes, Access::kWrite);
  std::memcpy(to, from, bytes);
}

void add_global(float* to, float x) { add(to, x); }
void add_global(double* to, double x) { add(to, x); }

void copy_async_16(u32 shared, const void* global, bool valid) {
  if (valid) {
    require_aligned(global, 16, "reads");
    check_global(reinterpret_cast<std::uintptr_t>(global), 16, Access::kRead);
  }
  shared_at(shared, 16, Access::kStart);
  copies[current].open.push_back({shared, global, valid});
}

void commit_copies() {
  auto& mine = copies[current];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}

void wait_copies(int groups_in_flight) {
  auto& groups = copies[current].groups;
  while (static_cast<int>(groups.size()) > groups_in_flight) {
    for (const auto& copy : groups.front()) {
      const u32 at = copy.shared - kSharedBase - shared_shift;
      dynamic_shadow->land(at, 16);
      unsigned char* target = shared_memory + shared_shift + at;
      if (copy.valid) std::memcpy(target, copy.global, 16);
      else std::memset(target, 0, 16);
    }
    groups.pop_front();
  }
}

}  // namespace emulator

// The memory of a launch. Regions are whole buffers, sorted and apart; arrays lie in them.
extern "C" void emulator_forget_memory() {
  emulator::regions.clear();
  emulator::last_region = nullptr;
}

extern "C" void emulator_add_region(std::uintptr_t begin, std::uintptr_t end) {
  using namespace emulator;
  regions.push_back({begin, end, std::vector<u8>(end - begin, 0), nullptr, {}});
}

namespace {

// Calls `function` with the address of each element.
template <class Function> void for_elements(const emulator::Named& array, Function&& function) {
  std::vector<long> index(array.shape.size(), 0);
  for (;;) {
    std::uintptr_t at = array.pointer;
    for (std::size_t a = 0; a < index.size(); ++a) at += index[a] * array.strides[a];
    function(at);
    int a = static_cast<int>(index.size()) - 1;
    while (a >= 0 && ++index[a] == array.shape[a]) index[a--] = 0;
    if (a < 0) return;
  }
}

}  // namespace

extern "C" void emulator_add_array(const char* name, std::uintptr_t pointer, int axes,
                                   const long* shape, const long* strides, int itemsize,
                                   int flags) {
  using namespace emulator;
  std::uintptr_t low = pointer, high = pointer + itemsize;
  for (int a = 0; a < axes; ++a) {
    if (!shape[a]) return;
    const long far = (shape[a] - 1) * strides[a];
    (far < 0 ? low : high) += far;
  }
  Region* region = region_of(low);
  region->arrays.push_back({name, low, high, (flags & kResult) != 0, pointer,
                            std::vector<long>(shape, shape + axes),
                            std::vector<long>(strides, strides + axes), itemsize});
  if (flags & kWritable && !region->shadow) {
    region->shadow = std::make_unique<Shadow>(region->end - region->begin, 4, false);
  }
  for_elements(region->arrays.back(), [&](std::uintptr_t at) {
    for (int i = 0; i < itemsize; ++i) region->state[at - region->begin + i] |= flags & ~kResult;
  });
}

// Whether every element of the results has been written; else 1 and which one has not.
extern "C" int emulator_unwritten(char* message, int bytes) {
  using namespace emulator;
  std::string first;
  for (auto& region : regions) {
    for (auto& array : region.arrays) {
      if (!array.result) continue;
      for_elements(array, [&](std::uintptr_t at) {
        if (first.empty() && !(region.state[at - region.begin] & kReadable)) {
          first = describe(reinterpret_cast<const void*>(at));
        }
      });
    }
  }
  std::snprintf(message, bytes, "%s", first.c_str());
  return !first.empty();
}

// AddressSanitizer's calls, of code compiled with -fsanitize=kernel-address -fno-sanitize-recover.
#define ASAN(size)                                                             \
  extern "C" void __asan_load##size(std::uintptr_t at) {             \
    emulator::check_access(at, size, emulator::Access::kRead);                 \
  }                                                                            \
  extern "C" void __asan_store##size(std::uintptr_t at) {            \
    emulator::check_access(at, size, emulator::Access::kWrite);                \
  }
ASAN(1)
ASAN(2)
ASAN(4)
ASAN(8)
ASAN(16)
extern "C" void __asan_loadN(std::uintptr_t at, std::size_t bytes) {
  if (bytes) emulator::check_access(at, bytes, emulator::Access::kRead);
}
extern "C" void __asan_storeN(std::uintptr_t at, std::size_t bytes) {
  if (bytes) emulator::check_access(at, bytes, emulator::Access::kWrite);
}
extern "C" void __asan_handle_no_return() {}
