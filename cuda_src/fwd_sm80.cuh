// Forward attention on mma.sync tensor cores; compute capability 8.0 and newer.
//
//   o[i] = sum_j exp(s[i,j] - lse[i]) v[j],   s = softmax_scale q k^T (+ policies)
//
// One block owns BLOCK_Q query rows of one head and walks over the key blocks its mask leaves,
// from the last to the first. Each warp owns 16 * M_TILES rows: S = Q K^T stays in its registers,
// becomes P there (online softmax) and is the A operand of O += P V, so no score ever touches
// memory. K and V are double-buffered by cp.async: the loads of a block are issued when the block
// before it starts, and one barrier per block both publishes the data and frees the other buffer
// (a second one waits for the first V of a block that has the multiprocessor to itself).
//
// NaN never leaks from a masked key: padded rows are filled with zeros on the way in, masked
// scores are selected away, and should a NaN still reach O through 0 * NaN (a non-finite V row
// that only some rows of the tile may see), the tile is done again with multiply_pv_kept.
#pragma once
#include "attn/schedule.cuh"
#include "attn/scores.cuh"
#include "attn/softmax.cuh"

template <class T_, int D_, int DV_, int BLOCK_Q_, int BLOCK_K_, int WARPS_, bool Q_IN_REGISTERS_>
struct FwdTile {
  using T = T_;
  static constexpr int D = D_, DV = DV_, BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_, WARPS = WARPS_;
  static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_;
  static constexpr int kThreads = 32 * WARPS;
  static constexpr int M_TILES = BLOCK_Q / (16 * WARPS);
  static constexpr int kStages = 2;
  // Whether a block has the multiprocessor to itself. Nothing else runs then while its first loads
  // are on their way, so it starts on K alone and waits for V when it needs it.
  static constexpr bool kAlone = WARPS > 4;
  static_assert(BLOCK_Q == 16 * WARPS * M_TILES, "warps split the query rows evenly");
  static_assert(BLOCK_K % 16 == 0, "a key block is whole k16 steps of P V");

  using Q = SmemTile<BLOCK_Q, D>;
  using K = SmemTile<BLOCK_K, D>;
  using V = SmemTile<BLOCK_K, DV>;
  using O = SmemTile<BLOCK_Q, DV>;
  using Scores = Accumulator<M_TILES, BLOCK_K / 8>;
  using Output = Accumulator<M_TILES, DV / 8>;

  // First row of a thread's warp within the tile.
  static CUFA2_DEVICE int warp_row(int thread) { return thread / 32 * 16 * M_TILES; }

  // O leaves through the shared memory that Q came in.
  static constexpr int kQBytes = Q::kBytes > O::kBytes ? Q::kBytes : O::kBytes;
  static constexpr int kStageBytes = K::kBytes + V::kBytes;
  static constexpr int kBytes = kQBytes + kStages * kStageBytes;
};

// Multiplies the Q tile by 0 or -1, so that scale <= 0 costs the main loop nothing: the softmax
// always sees a positive scale and takes the right maximum.
template <class Tile> CUFA2_DEVICE void apply_sign(u32 q_tile, float sign, int thread) {
  for (int i = thread; i < Tile::Q::kBytes / 16; i += Tile::kThreads) {
    Chunk c = load_shared_16(q_tile + 16 * i);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const Float2 f = unpack2<typename Tile::T>(c.word[w]);
      c.word[w] = pack2<typename Tile::T>(f.lo * sign, f.hi * sign);
    }
    store_shared_16(q_tile + 16 * i, c);
  }
}

// S = Q K^T for one key block. `q_kept` holds Q if the tile keeps it in registers.
template <class Tile, class QReader, class KReader>
CUFA2_DEVICE void multiply_qk(typename Tile::Scores& s, const QReader& q, const KReader& k,
                              const u32 (*q_kept)[Tile::M_TILES][4]) {
  s.clear();
#pragma unroll
  for (int kk = 0; kk < Tile::D / 16; ++kk) {
    u32 a[Tile::M_TILES][4];
#pragma unroll
    for (int m = 0; m < Tile::M_TILES; ++m) {
      if constexpr (Tile::Q_IN_REGISTERS) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[m][e] = q_kept[kk][m][e];
      } else {
        q.load(a[m], m, kk);
      }
    }
#pragma unroll
    for (int n = 0; n < Tile::BLOCK_K / 16; ++n) {
      u32 b[4];
      k.load(b, n, kk);
#pragma unroll
      for (int m = 0; m < Tile::M_TILES; ++m) {
        mma_m16n8k16<typename Tile::T>(s.at[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<typename Tile::T>(s.at[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// P of one k16 step as an A operand: two neighbouring score tiles, rounded.
template <class T, class Scores>
CUFA2_DEVICE void pack_p(u32 (&a)[4], const Scores& p, int m, int kk) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float* pair = &p.at[m][2 * kk + (e >> 1)][2 * (e & 1)];
    a[e] = pack2<T>(pair[0], pair[1]);
  }
}

// O += P V for one key block.
template <class Tile, class VReader>
CUFA2_DEVICE void multiply_pv(typename Tile::Output& o, const typename Tile::Scores& p,
                              const VReader& v) {
#pragma unroll
  for (int kk = 0; kk < Tile::BLOCK_K / 16; ++kk) {
    u32 a[Tile::M_TILES][4];
#pragma unroll
    for (int m = 0; m < Tile::M_TILES; ++m) pack_p<typename Tile::T>(a[m], p, m, kk);
#pragma unroll
    for (int n = 0; n < Tile::DV / 16; ++n) {
      u32 b[4];
      v.load_trans(b, kk, n);
#pragma unroll
      for (int m = 0; m < Tile::M_TILES; ++m) {
        mma_m16n8k16<typename Tile::T>(o.at[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<typename Tile::T>(o.at[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// O += P V where V may hold NaN or Inf in rows that not every query row of the tile keeps: there
// 0 * NaN would leak. The finite part of V is multiplied as ever, in the same order, so rows that
// keep no such key come out the same to the bit. What the others get is counted by a second
// product, of kept (0 or 1) with the codes of prim/types.cuh, and added as +Inf, -Inf or NaN.
template <class Tile, class Mask>
CUFA2_DEVICE void multiply_pv_kept(typename Tile::Output& o, const typename Tile::Scores& s,
                                   u32 v_tile, const Mask& mask, int q_begin, int key) {
  using T = typename Tile::T;
  constexpr int kSteps = Tile::BLOCK_K / 16;
  static_assert(Tile::BLOCK_K < kNegativeInfCode, "counts of one code must not reach the next");
  u32 p[kSteps][Tile::M_TILES][4];
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk)
#pragma unroll
    for (int m = 0; m < Tile::M_TILES; ++m) pack_p<T>(p[kk][m], s, m, kk);
#pragma unroll
  for (int n = 0; n < Tile::DV / 16; ++n) {
    Accumulator<Tile::M_TILES, 2> codes;
    codes.clear();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      // Step by step, and everything anew in each: registers are short.
      warp_sync();
      const int thread = thread_index(), lane = thread % 32;
      const int q_row = q_begin + Tile::warp_row(thread);
      const auto v = FragmentReader<typename Tile::V>::by_row(v_tile, lane);
      u32 finite[4], code[4];
      v.load_trans(finite, kk, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) code[e] = split_nonfinite<T>(finite[e]);
#pragma unroll
      for (int m = 0; m < Tile::M_TILES; ++m) {
        mma_m16n8k16<T>(o.at[m][2 * n], p[kk][m], finite[0], finite[1]);
        mma_m16n8k16<T>(o.at[m][2 * n + 1], p[kk][m], finite[2], finite[3]);
        u32 kept[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = q_row + Tile::Output::row(lane, 2 * m + (e & 1));
          const int j = key + 16 * kk + Tile::Scores::column(lane, e >> 1, 0);
          kept[e] = pack2<T>(mask.keep(i, j) ? 1.0f : 0.0f, mask.keep(i, j + 1) ? 1.0f : 0.0f);
        }
        mma_m16n8k16<T>(codes.at[m][0], kept, code[0], code[1]);
        mma_m16n8k16<T>(codes.at[m][1], kept, code[2], code[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < Tile::M_TILES; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 4; ++e) o.at[m][2 * n + h][e] += sum_of_codes(codes.at[m][h][e]);
  }
}

// Normalises O and writes it and the log-sum-exp. O passes through shared memory so that it leaves
// in whole rows. Rows without a visible key and rows past the sequence become exact zeros.
template <class Tile, class Softmax>
CUFA2_DEVICE void store_output(const FwdParams& p, const Work& work, int seqlen_q,
                               const typename Tile::Output& o, const Softmax& softmax, u32 o_tile,
                               int thread, int first_row, int column) {
  using T = typename Tile::T;
  constexpr int M_TILES = Tile::M_TILES, kRows = 2 * M_TILES;
  const int lane = thread % 32, warp_row = Tile::warp_row(thread);
  float inverse[kRows], lse[kRows];
  softmax.finish(inverse, lse);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int m = r >> 1, e = (r & 1) * 2;
    const int row = warp_row + Tile::Output::row(lane, r), i = work.q_begin + first_row + row;
    const bool zero = inverse[r] == 0.0f || i >= seqlen_q;
#pragma unroll
    for (int n = 0; n < Tile::Output::N_TILES; ++n) {
      const u32 pair = pack2<T>(o.at[m][n][e] * inverse[r], o.at[m][n][e + 1] * inverse[r]);
      store_shared_4(o_tile + Tile::O::offset(row, n) + 4 * (lane % 4), zero ? 0u : pair);
    }
    if (p.lse && lane % 4 == 0 && i < p.seqlen_q) {
      static_cast<float*>(p.lse)[work.batch * p.lse_stride.batch +
                                 work.head * p.lse_stride.head + i * p.lse_stride.row] =
          zero ? -inf() : lse[r];
    }
  }
  warp_sync();  // a warp stores the rows it staged
  T* out = static_cast<T*>(p.o) + work.batch * p.o_stride.batch + work.head * p.o_stride.head +
           column;
#pragma unroll 4
  for (int c = lane; c < 16 * M_TILES * Tile::O::kChunks; c += 32) {
    const int row = warp_row + c / Tile::O::kChunks, chunk = c % Tile::O::kChunks;
    const int i = work.q_begin + first_row + row;
    if (i < p.seqlen_q && column + chunk * 8 < p.head_dim_v) {
      store_global_16(out + i * p.o_stride.row + chunk * 8,
                      load_shared_16(o_tile + Tile::O::offset(row, chunk)));
    }
  }
}

// What a block knows about its tile. It lies in shared memory, written once by one thread: the
// registers belong to O and S, and most of this is read once per key block or less.
template <class Tile, class Mask> struct Frame {
  using T = typename Tile::T;
  Work work;
  Lengths len;
  Mask mask;
  int first, last;              // key blocks that some row of the tile sees; none: last < first
  int full_first, full_beyond;  // among them, those [full_first, full_beyond) that need no mask
  const T *q, *k, *v;           // row 0 of the head; q at the tile's first row

  CUFA2_DEVICE Frame(const FwdParams& p, const Work& w)
      : work(w), len(p, w.batch), mask(p, len), first(0), last(-1),
        q(static_cast<const T*>(p.q) + w.batch * p.q_stride.batch + w.head * p.q_stride.head +
          w.q_begin * p.q_stride.row),
        k(static_cast<const T*>(p.k) + w.batch * p.k_stride.batch +
          w.head / p.group * p.k_stride.head),
        v(static_cast<const T*>(p.v) + w.batch * p.v_stride.batch +
          w.head / p.group * p.v_stride.head) {
    const int q_end = min(w.q_begin + Tile::BLOCK_Q, len.q);
    const KvRange range = mask.kv_range(w.q_begin, q_end);
    if (w.q_begin < q_end && range.begin < range.end) {
      first = range.begin / Tile::BLOCK_K;
      last = (range.end - 1) / Tile::BLOCK_K;
    }
    full_first = (range.full_begin + Tile::BLOCK_K - 1) / Tile::BLOCK_K;
    full_beyond = range.full_end / Tile::BLOCK_K;
  }
};

// Computes and stores BLOCK_Q rows from `row` and DV columns from `column` of the frame's tile;
// returns whether this thread met a NaN in O. KEPT: masked blocks take the product that lets no
// NaN reach a row that does not keep its key.
template <class Tile, bool KEPT, class Score, class TileFrame>
CUFA2_DEVICE bool attend(const FwdParams& p, const TileFrame& frame, const Score& score,
                         u32 q_tile, int row, int column) {
  constexpr int BLOCK_K = Tile::BLOCK_K, M_TILES = Tile::M_TILES;
  const int thread = thread_index(), lane = thread % 32;
  const u32 k_tile = q_tile + Tile::kQBytes, v_tile = k_tile + Tile::K::kBytes;
  auto load_kv = [&](int block, u32 stage, int thread) {
    const int key = block * BLOCK_K, keys_left = frame.len.k - key;
    TileLoader<typename Tile::K, Tile::kThreads>::load(
        k_tile + stage, frame.k + key * p.k_stride.row, p.k_stride.row, keys_left, p.head_dim,
        thread);
    if constexpr (Tile::kAlone) cp_async_commit();
    TileLoader<typename Tile::V, Tile::kThreads>::load(
        v_tile + stage, frame.v + key * p.v_stride.row + column, p.v_stride.row, keys_left,
        p.head_dim_v - column, thread);
    cp_async_commit();
  };

  const auto q_reader = FragmentReader<typename Tile::Q>::by_row(
      q_tile + Tile::warp_row(thread) * Tile::Q::kRowBytes, lane);
  if (frame.last >= frame.first) {
    TileLoader<typename Tile::Q, Tile::kThreads>::load(
        q_tile, frame.q + row * p.q_stride.row, p.q_stride.row,
        frame.len.q - frame.work.q_begin - row, p.head_dim, thread);
    cp_async_commit();
    load_kv(frame.last, 0, thread);
    if (p.q_sign != 1.0f || Tile::Q_IN_REGISTERS) {
      cp_async_wait<Tile::kAlone ? 2 : 1>();
      block_sync();
      if (p.q_sign != 1.0f) {
        apply_sign<Tile>(q_tile, p.q_sign, thread);
        block_sync();
      }
    }
  }
  u32 q_kept[Tile::Q_IN_REGISTERS ? Tile::D / 16 : 1][M_TILES][4];
  if constexpr (Tile::Q_IN_REGISTERS) {
    if (frame.last >= frame.first) {
#pragma unroll
      for (int kk = 0; kk < Tile::D / 16; ++kk)
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) q_reader.load(q_kept[kk][m], m, kk);
    }
  }

  typename Tile::Output o;
  OnlineSoftmax<2 * M_TILES> softmax;
  o.clear();
  softmax.reset();
  u32 stage = 0;
  for (int block = frame.last; block >= frame.first; --block) {
    // Read before the barrier: the latency passes while waiting for it. The thread's number too,
    // where registers are short: what is computed from it then need not outlive the products.
    const int again = Tile::kAlone && !KEPT ? thread : thread_index();
    const bool more = block > frame.first;
    const bool masked = block < frame.full_first || block >= frame.full_beyond;
    const bool v_late = Tile::kAlone && block == frame.last;
    if (v_late) cp_async_wait<1>(); else cp_async_wait<0>();
    block_sync();  // this block's K and V are visible; the other buffer is free
    if (more) load_kv(block - 1, stage ^ Tile::kStageBytes, again);

    typename Tile::Scores s;
    const auto k_reader = FragmentReader<typename Tile::K>::by_pair(
        k_tile + stage, KEPT ? again % 32 : lane);
    multiply_qk<Tile>(s, q_reader, k_reader, q_kept);
    if (v_late) {
      if (more) cp_async_wait<2>(); else cp_async_wait<0>();
      block_sync();
    }
    apply_score<Tile>(s, score);
    if (masked) apply_mask<Tile>(s, frame.mask, frame.work.q_begin + row, block * BLOCK_K);
    softmax.step(s, o, p.scale_log2);
    if (KEPT && masked) {
      multiply_pv_kept<Tile>(o, s, v_tile + stage, frame.mask, frame.work.q_begin + row,
                             block * BLOCK_K);
    } else {
      const auto v_reader = FragmentReader<typename Tile::V>::by_row(v_tile + stage, again % 32);
      multiply_pv<Tile>(o, s, v_reader);
    }
    stage ^= Tile::kStageBytes;
  }
  const bool nan = o.has_nan();
  block_sync();  // every warp is done with Q, K and V
  store_output<Tile>(p, frame.work, frame.len.q, o, softmax, q_tile, thread_index(), row, column);
  return nan;
}

template <class Tile, class Mask, class Score>
CUFA2_DEVICE void fwd_sm80(const FwdParams& p) {
  using TileFrame = Frame<Tile, Mask>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ __align__(16) unsigned char frame_memory[sizeof(TileFrame)];
  auto& frame = *reinterpret_cast<TileFrame*>(frame_memory);
  const Work work = find_work<Tile::BLOCK_Q>(p);
  if (!work.valid) return;
  if (thread_index() == 0) frame = TileFrame(p, work);
  block_sync();
  const Score score(p);
  const u32 memory = shared_address(shared_memory);
  const bool nan = attend<Tile, false>(p, frame, score, memory, 0, 0);
  if constexpr (Mask::kPerRow) {
    if (!block_any(nan)) return;
    // Rare: the tile again, in parts, so that the longer product has registers. Sums of a row or a
    // column do not depend on the neighbours, so they come out the same to the bit.
    using Part = FwdTile<typename Tile::T, Tile::D, 32, 16 * Tile::WARPS, Tile::BLOCK_K,
                         Tile::WARPS, false>;
#pragma unroll 1
    for (int row = 0; row < Tile::BLOCK_Q; row += Part::BLOCK_Q)
#pragma unroll 1
      for (int column = 0; column < p.head_dim_v; column += Part::DV) {
        attend<Part, true>(p, frame, score, memory, row, column);
        block_sync();
      }
  }
}
