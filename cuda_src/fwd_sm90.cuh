// Forward attention on Hopper's warpgroup products (wgmma), fed by tensor maps (sm_90a).
//
//   o[i] = sum_j exp(s[i,j] - lse[i]) v[j],   s = softmax_scale q k^T (+ policies)
//
// Blocks stay on their multiprocessor and claim tile after tile of BLOCK_Q query rows. One thread
// of the first warpgroup brings Q, and K and V in rings of STAGES; each other warpgroup owns 64 of
// the rows. It walks over the key blocks from the last to the first and overlaps two of them:
//
//   S(n) = Q K(n)^T and O += P(n+1) V(n+1) are issued together; once S(n) is there its softmax
//   runs beside the second product, and P(n) is packed when that has ended.
//
// A warpgroup leaves out blocks that none of its rows sees. NaN never leaks from a masked key:
// rows past a tensor come as zeros, rows past a sequence are zeroed on arrival, masked scores are
// selected away, and should a NaN reach O through 0 * NaN all the same (a non-finite V row that
// only some rows of the tile may see), its warp sums its rows up again (attn/rows_again.cuh).
#pragma once
#include "attn/frame_sm90.cuh"
#include "attn/output_sm90.cuh"
#include "attn/producer_sm90.cuh"
#include "attn/rows_again.cuh"
#include "attn/scores.cuh"
#include "attn/softmax_sm90.cuh"
#include "tile/blocked.cuh"

template <class T_, int D_, int DV_, int BLOCK_Q_, int BLOCK_K_, int STAGES_, int Q_STAGES_,
          int LATE_>
struct FwdSm90Tile {
  using T = T_;
  static constexpr int D = D_, DV = DV_, BLOCK_Q = BLOCK_Q_, BLOCK_K = BLOCK_K_;
  static constexpr int STAGES = STAGES_, Q_STAGES = Q_STAGES_, LATE = LATE_;
  static constexpr int kGroups = BLOCK_Q / 64;  // warpgroups that compute
  static constexpr int kRegisters = kGroups == 3 ? 160 : 240;
  static constexpr int kProducerRegisters = kGroups == 3 ? 32 : 24;
  static_assert(BLOCK_Q == 64 * kGroups && (kGroups == 2 || kGroups == 3), "64 rows a warpgroup");

  using Q = BlockedTile<BLOCK_Q, D>;
  using K = BlockedTile<BLOCK_K, D>;
  using V = BlockedTile<BLOCK_K, DV>;
  // Where the next Q does not wait for its place, O leaves by way of Q's memory.
  static constexpr bool kSends = Q_STAGES > 1;
  using O = BlockedTile<BLOCK_Q, DV>;
  static_assert(!kSends || DV <= D, "there is room");
  using Scores = Accumulator<1, BLOCK_K / 8>;
  using Output = Accumulator<1, DV / 8>;
  using Softmax = LazySoftmax<T, Scores, Output, LATE>;
  static constexpr int M_TILES = 1;

  // First row within the tile of a warp that computes; the first warpgroup does not.
  static CUFA2_DEVICE int warp_row(int thread) { return (thread / 32 - 4) * 16; }
  using Control = ControlBlock<Q_STAGES, STAGES>;
  static constexpr int kTileBytes = Q_STAGES * Q::kBytes + STAGES * (K::kBytes + V::kBytes);
  static constexpr int kBytes = kTileBytes + Control::kBytes;
};

// S = Q K^T of a warpgroup's rows and one key block.
template <class Tile>
CUFA2_DEVICE void multiply_qk(typename Tile::Scores& s, u32 q_rows, u32 k_tile) {
  const u64 q = operand_of_columns(q_rows), k = operand_of_columns(k_tile);
#pragma unroll
  for (int kk = 0; kk < Tile::D / 16; ++kk) {
    wgmma_shared<typename Tile::T, false, false>(s.at[0], q + Tile::Q::step_of_columns(kk),
                                                 k + Tile::K::step_of_columns(kk), kk != 0);
  }
}

// The same of one warp alone, at once.
template <class Tile>
CUFA2_DEVICE void multiply_qk_again(typename Tile::Scores& s, u32 q_rows, u32 k_tile) {
  const int lane = thread_index() % 32, row = thread_index() % 128 / 32 * 16;
  s.clear();
#pragma unroll
  for (int n = 0; n < Tile::BLOCK_K / 8; ++n) {
#pragma unroll 1  // each step by itself: registers are short
    for (int kk = 0; kk < Tile::D / 16; kk += 2) {
      u32 a[4], b[4];
      Tile::K::load_b(b, k_tile, 8 * n, kk, lane);
      Tile::Q::load_a(a, q_rows, row, kk, lane);
      mma_m16n8k16<typename Tile::T>(s.at[0][n], a, b[0], b[1]);
      Tile::Q::load_a(a, q_rows, row, kk + 1, lane);
      mma_m16n8k16<typename Tile::T>(s.at[0][n], a, b[2], b[3]);
    }
  }
  warp_sync();  // lane 0 releases what all have read
}

// O += P V of a warpgroup's rows and one key block.
template <class Tile>
CUFA2_DEVICE void multiply_pv(typename Tile::Output& o, const typename Tile::Softmax::Weights& p,
                              u32 v_tile) {
  const u64 v = operand_of_rows(v_tile, Tile::BLOCK_K);
#pragma unroll
  for (int kk = 0; kk < Tile::BLOCK_K / 16; ++kk) {
    wgmma_rows<typename Tile::T>(o.at[0], p[kk], v + Tile::V::step_of_rows(kk));
  }
}

// Multiplies a warpgroup's rows of Q by 0 or -1, so that scale <= 0 costs the main loop nothing:
// the softmax always sees a positive scale and takes the right maximum.
template <class Tile>
CUFA2_DEVICE void apply_sign(u32 q_rows, float sign, int thread, int barrier) {
#pragma unroll 1
  for (int block = 0; block < Tile::Q::kBlocks; ++block) {
    const u32 start = q_rows + block * Tile::Q::kBlockBytes;
#pragma unroll 1
    for (int i = thread; i < Tile::Q::kGroupBytes / 16; i += 128) {
      Chunk c = load_shared_16(start + 16 * i);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const Float2 f = unpack2<typename Tile::T>(c.word[w]);
        c.word[w] = pack2<typename Tile::T>(f.lo * sign, f.hi * sign);
      }
      store_shared_16(start + 16 * i, c);
    }
  }
  fence_shared_for_async();
  group_sync(barrier, 128);
}

// A warpgroup's walk over the key blocks of its tiles.
template <class Tile, class Mask, class Score> struct Consumer {
  using C = typename Tile::Control;
  const FwdSm90Params& params;
  const FwdParams& p;
  const Score score;
  const u32 q_tiles, k_tiles, v_tiles, control;
  RingPlace<Tile::STAGES> place{0, 0};  // of the next K and V that come
  typename Tile::Scores s;
  typename Tile::Softmax::Weights weights;
  typename Tile::Output o;
  typename Tile::Softmax softmax;
  bool sent = false;  // O of the last tile may not have left yet: its Q stage is held

  CUFA2_DEVICE Consumer(const FwdSm90Params& params, u32 q_tiles, u32 k_tiles, u32 v_tiles,
                        u32 control)
      : params(params), p(params.call), score(p), q_tiles(q_tiles), k_tiles(k_tiles),
        v_tiles(v_tiles), control(control) {}

  CUFA2_DEVICE u32 barrier(u32 offset, int stage) const {
    return control + offset + kMbarrierBytes * stage;
  }
  // Each warp releases for itself.
  CUFA2_DEVICE void release(u32 offset, int stage) const {
    if (thread_index() % 32 == 0) mbarrier_arrive(barrier(offset, stage));
  }
  CUFA2_DEVICE u32 k_tile(int stage) const { return k_tiles + stage * Tile::K::kBytes; }
  CUFA2_DEVICE u32 v_tile(int stage) const { return v_tiles + stage * Tile::V::kBytes; }

  // Lets `count` blocks pass that none of these rows sees.
  CUFA2_DEVICE void skip(int count) {
    for (; count > 0; --count) {
      mbarrier_wait(barrier(C::kKFull, place.stage), place.parity);
      mbarrier_wait(barrier(C::kVFull, place.stage), place.parity);
      warp_sync();  // every lane has seen the phase that lane 0 lets end
      release(C::kKEmpty, place.stage);
      release(C::kVEmpty, place.stage);
      place.next();
    }
  }

  // Releases the Q stage of the tile before the one with this stage. Late: by then O has left.
  CUFA2_DEVICE void release_sent(int q_stage) {
    if (!sent) return;
    sent = false;
    if (thread_index() % 32 == 0) tma_store_wait();
    release(C::kQEmpty, q_stage ^ 1);
  }

  // Issues S = Q K^T of the block at `place`.
  CUFA2_DEVICE void begin_scores(u32 q_rows) {
    mbarrier_wait(barrier(C::kKFull, place.stage), place.parity);
    pin(s.at[0]);
    wgmma_fence();
    multiply_qk<Tile>(s, q_rows, k_tile(place.stage));
    wgmma_commit();
  }
  // Issues O += P V of the block at `at`.
  CUFA2_DEVICE void begin_output(const RingPlace<Tile::STAGES>& at) {
    mbarrier_wait(barrier(C::kVFull, at.stage), at.parity);
    pin(weights);
    pin(o.at[0]);
    wgmma_fence();
    multiply_pv<Tile>(o, weights, v_tile(at.stage));
    wgmma_commit();
  }

  // Block n, after block n + 1.
  template <bool MASKED>
  CUFA2_DEVICE void step(u32 q_rows, const TileMask<Mask>& mask, int n) {
    const auto before = place;
    place.next();
    begin_scores(q_rows);
    begin_output(before);
    wgmma_wait<1>();
    pin(s.at[0]);
    const auto wait = [&] {
      wgmma_wait<0>();
      pin(o.at[0]);
      release(C::kVEmpty, before.stage);
    };
    const u32 never = control + C::kNever;
    apply_score<Tile>(s, score);
    if constexpr (MASKED) {
      release(C::kKEmpty, place.stage);
      apply_mask<Tile>(s, mask, 0, n * Tile::BLOCK_K);
      softmax.exact(s, weights, o, p.scale_log2, never, wait);
    } else {
      softmax.quick(s, weights, o, p.scale_log2, never, wait, [&](typename Tile::Scores& scores) {
        multiply_qk_again<Tile>(scores, q_rows, k_tile(place.stage));
        apply_score<Tile>(scores, score);
      });
      release(C::kKEmpty, place.stage);
    }
  }

  CUFA2_DEVICE void tile(const TileFrame& frame, int q_stage) {
    const Mask mask(p, Lengths(frame.len_q, frame.len_k, p.top_left));
    // Among those that compute; asked for anew, as registers are short.
    const int group = warp_uniform(thread_index() / 128) - 1;
    const TileMask<Mask> rows_mask{mask, {frame.q_begin, frame.head, params.pack}};
    const int begin = rows_mask.rows.position(64 * group);
    const int end = min(rows_mask.rows.position(64 * group + 63) + 1, frame.len_q);
    const KvRange range = mask.kv_range(begin, end);
    int first = max(range.begin / Tile::BLOCK_K, frame.first);
    int last = min((range.end - 1) / Tile::BLOCK_K, frame.last);
    const bool any = begin < end && range.begin < range.end && first <= last;
    if (!any) first = frame.first, last = frame.first - 1;
    const int full_first = (range.full_begin + Tile::BLOCK_K - 1) / Tile::BLOCK_K;
    const int full_beyond = range.full_end / Tile::BLOCK_K;
    o.clear();
    softmax.reset();
    skip(frame.last - last);
    if (any) {
      const u32 q_rows = q_tiles + q_stage * Tile::Q::kBytes + group * Tile::Q::kGroupBytes;
      if (p.q_sign != 1.0f) apply_sign<Tile>(q_rows, p.q_sign, thread_index() % 128, 1 + group);
      begin_scores(q_rows);
      release_sent(q_stage);
      wgmma_wait<0>();
      pin(s.at[0]);
      release(C::kKEmpty, place.stage);
      apply_score<Tile>(s, score);
      if (last >= full_beyond || last < full_first) {
        apply_mask<Tile>(s, rows_mask, 0, last * Tile::BLOCK_K);
      }
      softmax.exact(s, weights, o, p.scale_log2, control + C::kNever, [] {});
      int n = last - 1;
#pragma unroll 1
      for (; n >= max(first, full_beyond); --n) step<true>(q_rows, rows_mask, n);
#pragma unroll 1
      for (; n >= max(first, full_first); --n) step<false>(q_rows, rows_mask, n);
      if constexpr (Mask::kLeft) {
#pragma unroll 1
        for (; n >= first; --n) step<true>(q_rows, rows_mask, n);
      }
      if constexpr (!Tile::kSends) release(C::kQEmpty, q_stage);
      begin_output(place);
      wgmma_wait<0>();
      pin(o.at[0]);
      release(C::kVEmpty, place.stage);
      place.next();
    } else {
      release_sent(q_stage);
      if constexpr (!Tile::kSends) release(C::kQEmpty, q_stage);
    }
    skip(first - frame.first);
    const bool nan = has_nan(frame);
    store(frame, q_stage, !nan);
    if (nan) mend(frame, rows_mask);
    finish(frame);
  }

  // O and lse. If `may_send` O may arrive later.
  CUFA2_DEVICE void store(const TileFrame& frame, int q_stage, bool may_send) {
    const OutputPlace<Tile> place(params, frame);
    const int first_row = Tile::warp_row(thread_index());
    float inverse[2], lse[2];
    softmax.finish(inverse, lse);
    const auto rows = output_rows(place, first_row, inverse);
    clear_rows(o, rows);
    if (place.is_part) {
      store_part<Tile, false>(place, first_row, o, rows, 0);
    } else if (Tile::kSends && may_send) {
      send_rows(place, first_row, q_tiles + q_stage * Tile::Q::kBytes + 128 * first_row, o, rows);
    } else {
      store_rows(rows, o, p.head_dim_v);
    }
    sent = Tile::kSends;
    // Behind O, as sending waits for all stores before.
    const int lane = thread_index() % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + Tile::Output::row(lane, r), i = place.rows.position(row);
      if (lane % 4 == 0 && i < p.seqlen_q) {
        const float value = i < frame.len_q ? lse[r] : -inf();
        if (place.is_part) params.part_lse[place.part(row) + place.split] = value;
        else if (p.lse) *place.lse(row) = value;
      }
    }
  }

  // Whether the mask is of rows and a row of the warp has NaN: some may have leaked.
  CUFA2_DEVICE bool has_nan(const TileFrame& frame) const {
    if constexpr (!Mask::kPerRow) return false;
    return warp_any(has_nan(OutputPlace<Tile>(params, frame), Tile::warp_row(thread_index())));
  }

  // Writes what is NaN again, summed up without the keys that a row does not see.
  CUFA2_DEVICE void mend(const TileFrame& frame, const TileMask<Mask>& mask) {
    const OutputPlace<Tile> place(params, frame);
    const int first_row = Tile::warp_row(thread_index());
    float inverse[2], lse[2];
    softmax.finish(inverse, lse);
    const auto rows = output_rows(place, first_row, inverse);
    const int begin = place.rows.position(first_row);
    const int end = min(place.rows.position(first_row + 15) + 1, frame.len_q);
    const KvRange range = mask.mask.kv_range(begin, end);
    // Uniform for the compiler, too: beside a loop with other ends it keeps no descriptor of a
    // product in registers of the warp, anywhere (48 R2UR in each step of the main loop).
    const int key_begin = warp_uniform(max(range.begin, frame.first * Tile::BLOCK_K));
    const int key_end = warp_uniform(min(range.end, (frame.last + 1) * Tile::BLOCK_K));
#pragma unroll 1
    for (int column = 0; column < p.head_dim_v; column += 32) {
      Accumulator<1, 4> again;
      sum_again<typename Tile::T>(p, frame, mask, score, softmax, first_row, key_begin, key_end,
                                  column, again);
      if (place.is_part) store_part<Tile, true>(place, first_row, again, rows, column);
      else store_columns<true>(rows, again.at[0], column, p.head_dim_v);
    }
  }

  CUFA2_DEVICE void finish(const TileFrame& frame) {
    const OutputPlace<Tile> place(params, frame);
    const int group = warp_uniform(thread_index() / 128) - 1;
    if (place.is_part) merge_parts(place, group, 1 + group);
  }

  // Whether this lane owns a NaN, or an infinity, in a row of the sequence.
  CUFA2_DEVICE bool has_nan(const OutputPlace<Tile>& place, int row) const {
    float probe[2][2] = {};  // NaN if an element is, or infinite
#pragma unroll
    for (int n = 0; n < Tile::Output::N_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        probe[e >> 1][n & 1] = fmaf(o.at[0][n][e], 0.0f, probe[e >> 1][n & 1]);
      }
    const float of_row[2] = {probe[0][0] + probe[0][1], probe[1][0] + probe[1][1]};
    const bool nan[2] = {of_row[0] != of_row[0], of_row[1] != of_row[1]};
    const int lane = thread_index() % 32;
    const int len_q = place.frame.len_q;
    return (nan[0] && place.rows.position(row + Tile::Output::row(lane, 0)) < len_q) ||
           (nan[1] && place.rows.position(row + Tile::Output::row(lane, 1)) < len_q);
  }

  CUFA2_DEVICE void run() {
    RingPlace<Tile::Q_STAGES> q{0, 0};
    for (;;) {
      mbarrier_wait(barrier(C::kQFull, q.stage), q.parity);
      const TileFrame frame = load_frame(control + C::kFrames + q.stage * sizeof(TileFrame));
      warp_sync();  // lane 0 releases what all have read
      if (!frame.valid) {
        release_sent(q.stage);
        return;
      }
      tile(frame, q.stage);
      q.next();
    }
  }
};

template <class Tile, class Mask, class Score>
CUFA2_DEVICE void fwd_sm90(const FwdSm90Params& params) {
  using C = typename Tile::Control;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 q_tiles = shared_address(shared_memory);
  const u32 k_tiles = q_tiles + Tile::Q_STAGES * Tile::Q::kBytes;
  const u32 v_tiles = k_tiles + Tile::STAGES * Tile::K::kBytes;
  const u32 control = q_tiles + Tile::kTileBytes;
  if (thread_index() == 0) {
    tensor_map_prefetch(params.q_map);
    tensor_map_prefetch(params.k_map);
    tensor_map_prefetch(params.v_map);
    constexpr int kWarps = 4 * Tile::kGroups;
    for (int i = 0; i < Tile::Q_STAGES; ++i) {
      mbarrier_make(control + C::kQFull + kMbarrierBytes * i, 1);
      mbarrier_make(control + C::kQEmpty + kMbarrierBytes * i, kWarps);
    }
    for (int i = 0; i < Tile::STAGES; ++i) {
      mbarrier_make(control + C::kKFull + kMbarrierBytes * i, 1);
      mbarrier_make(control + C::kKEmpty + kMbarrierBytes * i, kWarps);
      mbarrier_make(control + C::kVFull + kMbarrierBytes * i, 1);
      mbarrier_make(control + C::kVEmpty + kMbarrierBytes * i, kWarps);
    }
    mbarrier_make(control + C::kVRaw, 1);
    mbarrier_make_fence();
  }
  block_sync();
  if (warp_uniform(thread_index() / 128) == 0) {
    give_registers<Tile::kProducerRegisters>();
    if (warp_uniform(thread_index() / 32) == 0) {
      produce<Tile, Mask>(params, q_tiles, k_tiles, v_tiles, control);
    }
  } else {
    take_registers<Tile::kRegisters>();
    Consumer<Tile, Mask, Score>(params, q_tiles, k_tiles, v_tiles, control).run();
  }
}
