// What a Hopper block has in the background: mbarriers, bulk copies and products of warpgroups.
//
// Copies land and products are done as late as the program allows: a copy when no thread can go on
// without it, a product at its wait. Until then the target of a copy is out of bounds, and what a
// product reads or writes must stay as it was when the product began.
#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "machine.h"
#include "numerics.h"

namespace emulator {
namespace {

struct Mbarrier {
  int arrivals, pending;  // threads of a phase, and how many of them are still to come
  long bytes = 0;         // announced, less those that have come
  u32 phase = 0;          // how many have ended
  int maker;
  u32 made;               // when
  std::vector<u32> clock; // what those who arrived had seen
  std::vector<u32> ended[2];  // the same at the end of the last phase of each parity
  std::vector<std::pair<int, u32>> waiting;  // threads, and the parity of what they wait for
};

struct BulkCopy {
  u32 shared, barrier;
  unsigned char* target;
  std::vector<unsigned char> box;
  int thread;  // that asked for it
  u32 clock;   // when
};

// A product of one warp's 16 rows, with all that it read when it began.
struct Product {
  WarpgroupProduct of[32];
  std::vector<u16> a, b;  // (16, 16) and (8 tiles, 16)
  std::vector<float> d;   // (32 lanes, tiles, 4)
};
struct WarpProducts {
  bool fenced = false;
  std::vector<Product> open;
  std::deque<std::vector<Product>> batches;
  int registers = 0;
};

// A box on its way out, and what it held when its thread sent it.
struct BulkStore {
  const EmulatedMap* map;
  u32 shared;
  int at[4];
  std::vector<u16> inside;
};
struct ThreadStores {
  std::vector<BulkStore> open, committed;
};

std::unordered_map<u32, Mbarrier> mbarriers;
std::unordered_map<int, ThreadStores> stores;
std::vector<BulkCopy> bulk_copies;
WarpProducts products[kMaxThreads / 32];

Mbarrier& mbarrier_at(u32 address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("there is no mbarrier at %u", address);
  Mbarrier& b = found->second;
  if (b.maker != current && b.made > seen(current, b.maker)) {
    fail("an mbarrier that thread %d made, with no barrier in between", b.maker);
  }
  return b;
}

void take(std::vector<u32>& clock, int thread) {
  clock.resize(block_threads, 0);
  for (int t = 0; t < block_threads; ++t) clock[t] = std::max(clock[t], seen(thread, t));
}

void end_phase_if_complete(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.ended[b.phase % 2] = b.clock;
  ++b.phase;
  b.pending = b.arrivals;
  auto waiting = std::move(b.waiting);
  b.waiting.clear();
  for (const auto& [thread, parity] : waiting) wake(thread);
}

// Where row r of a box lies in global memory, and how many of its elements lie there.
struct BoxRow {
  std::uint64_t address;
  std::size_t count;
};
BoxRow row_of(const EmulatedMap& map, const int (&at)[4], u32 r) {
  const std::int64_t place[4] = {at[0], static_cast<std::int64_t>(at[1]) + r % map.box[0],
                                 static_cast<std::int64_t>(at[2]) + r / map.box[0], at[3]};
  for (int axis = 0; axis < 4; ++axis) {
    if (place[axis] < 0 || place[axis] >= static_cast<std::int64_t>(map.extents[axis])) return {};
  }
  std::uint64_t address = map.pointer + 2 * place[0];
  for (int axis = 1; axis < 4; ++axis) address += place[axis] * map.strides[axis - 1];
  return {address, std::min<std::size_t>(64, map.extents[0] - place[0])};
}

// The bytes of a box as they will lie in shared memory.
std::vector<unsigned char> read_box(const EmulatedMap& map, const int (&at)[4]) {
  std::vector<unsigned char> box(map.rows() * 128);
  for (u32 r = 0; r < map.rows(); ++r) {
    u16 row[64] = {};
    const BoxRow from = row_of(map, at, r);
    if (from.count) {
      bulk_read_global(reinterpret_cast<const void*>(from.address), row, 2 * from.count);
    }
    for (u32 chunk = 0; chunk < 8; ++chunk) {
      std::memcpy(&box[128 * r + 16 * (chunk ^ (r % 8))], row + 8 * chunk, 16);
    }
  }
  return box;
}

void land(const BulkCopy& copy) {
  std::memcpy(copy.target, copy.box.data(), copy.box.size());
  end_bulk_write(copy.shared, copy.box.size());
  Mbarrier& b = mbarriers.at(copy.barrier);
  b.bytes -= copy.box.size();
  b.clock.resize(block_threads, 0);
  b.clock[copy.thread] = std::max(b.clock[copy.thread], copy.clock);
  end_phase_if_complete(b);
}

// The elements of a box in shared memory that lie inside the tensor, row by row.
std::vector<u16> inside_of(const BulkStore& store) {
  std::vector<u16> inside;
  for (u32 r = 0; r < store.map->rows(); ++r) {
    const std::size_t count = row_of(*store.map, store.at, r).count;
    for (u32 c = 0; c < count; ++c) {
      const u32 chunk = store.shared + 128 * r + 16 * (c / 8 ^ r % 8);
      u16 x;
      std::memcpy(&x, bulk_read_shared(chunk + 2 * (c % 8), 2), 2);
      inside.push_back(x);
    }
  }
  return inside;
}

void write_box(const BulkStore& store) {
  std::size_t from = 0;
  for (u32 r = 0; r < store.map->rows(); ++r) {
    const BoxRow to = row_of(*store.map, store.at, r);
    if (!to.count) continue;
    bulk_write_global(reinterpret_cast<void*>(to.address), &store.inside[from], 2 * to.count);
    from += to.count;
  }
}

u32 field(u64 descriptor, int shift) { return (descriptor >> shift & 0x3fff) << 4; }

// Element (row, column) of an operand in blocks of 64 columns: 16 rows or columns of a k step.
u16 element(u64 descriptor, bool by_rows, u32 mn, u32 k) {
  const u32 start = field(descriptor, 0), leading = field(descriptor, 16);
  const u32 stride = field(descriptor, 32);
  const u32 linear = by_rows
      ? start + mn % 64 * 2 + mn / 64 * leading + k % 8 * 128 + k / 8 * stride
      : start + mn % 8 * 128 + mn / 8 * stride + k * 2;
  const u32 address = linear ^ (linear >> 7 & 7) << 4;
  u16 x;
  std::memcpy(&x, bulk_read_shared(address, 2), 2);
  return x;
}

std::vector<u16> operand(u64 descriptor, bool by_rows, u32 first, u32 count) {
  if (descriptor >> 62 != 1) fail("an operand that is not swizzled by 128 bytes");
  std::vector<u16> read(16 * count);
  for (u32 mn = 0; mn < count; ++mn)
    for (u32 k = 0; k < 16; ++k) read[16 * mn + k] = element(descriptor, by_rows, first + mn, k);
  return read;
}

std::vector<u16> from_registers(const WarpgroupProduct* of) {
  std::vector<u16> read(16 * 16);
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 4; ++e)
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * (e & 1), k = 8 * (e >> 1) + 2 * (lane % 4) + half;
        read[16 * row + k] = of[lane].a_registers[e] >> 16 * half & 0xffffu;
      }
  return read;
}

// A of a warp's rows.
std::vector<u16> left(const WarpgroupProduct* of, int warp) {
  if (of[0].a_registers) return from_registers(of);
  return operand(of[0].a, of[0].a_by_rows, warp % 4 * 16, 16);
}

constexpr u32 kPoison = 0xffffbadd;  // a NaN: what registers of D hold until the product is done

Product begin(const WarpgroupProduct* of) {
  const int warp = current / 32, running = current;
  current = 32 * warp;  // lane 0 stands for what the warp reads in the background
  Product made;
  std::copy_n(of, 32, made.of);
  const auto& p = of[0];
  made.a = left(of, warp);
  made.b = operand(p.b, p.b_by_rows, 0, 8 * p.tiles);
  current = running;
  for (int lane = 0; lane < 32; ++lane)
    for (int n = 0; n < p.tiles; ++n)
      for (int e = 0; e < 4; ++e) {
        float& d = of[lane].d[n][e];
        made.d.push_back(d);
        std::memcpy(&d, &kPoison, 4);
      }
  return made;
}

// Of products on the same registers, the one that began before is done before.
void finish(const Product& product, const std::vector<Product>& after) {
  const auto& p = product.of[0];
  const int running = current;
  current = current / 32 * 32;
  const bool kept = product.a == left(product.of, current / 32) &&
                    product.b == operand(p.b, p.b_by_rows, 0, 8 * p.tiles);
  current = running;
  if (!kept) fail("an operand changed while a product of the warpgroup was under way");
  (void)after;
  for (int lane = 0; lane < 32; ++lane)
    for (int n = 0; n < p.tiles; ++n)
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + 8 * (e >> 1), column = 8 * n + 2 * (lane % 4) + (e & 1);
        float& d = product.of[lane].d[n][e];
        u32 bits;
        std::memcpy(&bits, &d, 4);
        float old = product.d[(lane * p.tiles + n) * 4 + e];
        u32 old_bits;
        std::memcpy(&old_bits, &old, 4);
        // Behind another product on the same registers `d` holds that one's result by now.
        if (old_bits == kPoison) old = d;
        else if (bits != kPoison) fail("D was touched while a product was under way");
        if (!p.accumulate) old = 0;
        d = dot_of_halves(p.fp16, &product.a[16 * row], &product.b[16 * column], old);
      }
}

}  // namespace

void begin_async_block() {
  mbarriers.clear();
  stores.clear();
  bulk_copies.clear();
  for (auto& w : products) w = WarpProducts();
}

bool land_one() {
  if (bulk_copies.empty()) return false;
  const std::size_t which = random_number() % bulk_copies.size();
  const BulkCopy copy = bulk_copies[which];
  bulk_copies.erase(bulk_copies.begin() + which);
  land(copy);
  return true;
}

void end_async_thread() {
  if (!stores[current].open.empty() || !stores[current].committed.empty()) {
    fail("a thread ends with stores under way");
  }
  const auto& mine = products[current / 32];
  if (!mine.open.empty() || !mine.batches.empty()) {
    fail("a thread ends with products of its warpgroup under way");
  }
}

void make_mbarrier(u32 address, int arrivals) {
  if (address % 8) fail("an mbarrier at %u: misaligned", address);
  const u32 zeros[2] = {};
  write_shared(address, zeros, 8);
  Mbarrier b{};
  b.arrivals = b.pending = arrivals;
  b.maker = current;
  b.made = now(current);
  mbarriers[address] = b;
}

void arrive_at_mbarrier(u32 address, u32 expected_bytes) {
  Mbarrier& b = mbarrier_at(address);
  if (!b.pending) fail("more threads arrive at an mbarrier than the %d of a phase", b.arrivals);
  take(b.clock, current);
  ++seen(current, current);
  --b.pending;
  b.bytes += expected_bytes;
  end_phase_if_complete(b);
}

void wait_for_mbarrier(u32 address, u32 parity) {
  for (;;) {
    Mbarrier& b = mbarrier_at(address);
    // A phase of this parity has ended, and the next one has not.
    if ((b.phase + 1) % 2 == parity) {
      if (b.phase) {
        for (int t = 0; t < block_threads && !b.ended[parity].empty(); ++t) {
          seen(current, t) = std::max(seen(current, t), b.ended[parity][t]);
        }
      }
      ++seen(current, current);
      return;
    }
    b.waiting.push_back({current, parity});
    sleep_for("the phase of an mbarrier");
  }
}

void load_box(u32 shared, const EmulatedMap* map, u32 barrier, int column, int y, int z,
              int batch) {
  if (shared % 1024) fail("a box lands at %u: not a multiple of 1024", shared);
  mbarrier_at(barrier);
  unsigned char* target = begin_bulk_write(shared, map->rows() * 128);
  bulk_copies.push_back({shared, barrier, target, read_box(*map, {column, y, z, batch}),
                         current, now(current)});
  ++seen(current, current);
}

void store_box(const EmulatedMap* map, u32 shared, int column, int y, int z, int batch) {
  if (shared % 1024) fail("a box comes from %u: not a multiple of 1024", shared);
  BulkStore store{map, shared, {column, y, z, batch}, {}};
  store.inside = inside_of(store);
  stores[current].open.push_back(std::move(store));
}

void commit_stores() {
  ThreadStores& mine = stores[current];
  for (auto& store : mine.open) mine.committed.push_back(std::move(store));
  mine.open.clear();
}

void wait_for_stores() {
  for (const auto& store : stores[current].committed) {
    if (inside_of(store) != store.inside) fail("a box changed before its store had read it");
    write_box(store);
  }
  stores[current].committed.clear();
}

void load_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
  if (bytes % 16 || shared % 16 || reinterpret_cast<std::uintptr_t>(global) % 16) {
    fail("a bulk copy of %u bytes from %p to %u: all are multiples of 16", bytes, global, shared);
  }
  mbarrier_at(barrier);
  unsigned char* target = begin_bulk_write(shared, bytes);
  std::vector<unsigned char> read(bytes);
  bulk_read_global(global, read.data(), bytes);
  bulk_copies.push_back({shared, barrier, target, std::move(read), current, now(current)});
  ++seen(current, current);
}

void fence_products() {
  char none = 0;
  collective<char, char>("wgmma fence", none, none,
                         [](const char*, char*) { products[current / 32].fenced = true; });
}

void begin_product(const WarpgroupProduct& product) {
  char none = 0;
  collective<WarpgroupProduct, char>("wgmma", product, none,
                                     [](const WarpgroupProduct* in, char*) {
    auto& mine = products[current / 32];
    if (!mine.fenced) fail("a wgmma without a fence since the last batch");
    mine.open.push_back(begin(in));
  });
}

void commit_products() {
  char none = 0;
  collective<char, char>("wgmma commit", none, none, [](const char*, char*) {
    auto& mine = products[current / 32];
    mine.batches.push_back(std::move(mine.open));
    mine.open.clear();
    mine.fenced = false;
  });
}

void wait_for_products(int batches) {
  char none = 0;
  collective<int, char>("wgmma wait", batches, none, [](const int* in, char*) {
    auto& waiting = products[current / 32].batches;
    while (static_cast<int>(waiting.size()) > in[0]) {
      for (const auto& product : waiting.front()) finish(product, waiting.front());
      waiting.pop_front();
    }
  });
}

void set_registers(int count, bool more) {
  if (count % 8 || count < 24 || count > 256) fail("setmaxnreg of %d registers", count);
  const int before = 65536 / block_threads / 8 * 8;
  if (more ? count < before : count > before) {
    fail("setmaxnreg to %d registers from %d", count, before);
  }
  products[current / 32].registers = count;
  int total = 0;
  for (int w = 0; w < block_threads / 32; ++w) total += 32 * products[w].registers;
  if (total > 65536) fail("the warps take %d registers, there are 65536", total);
}

}  // namespace emulator
