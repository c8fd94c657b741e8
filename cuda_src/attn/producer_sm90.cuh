// The warp that brings Q, K and V of tile after tile to the warpgroups of the Hopper forward.
#pragma once
#include "../prim/mbarrier.cuh"
#include "../prim/warpgroup.cuh"
#include "frame_sm90.cuh"

// Zeros the V rows of a tile from `row` on: memory past a sequence may hold anything.
template <class Tile> CUFA2_DEVICE void zero_rows(u32 v_tile, int row, int lane) {
#pragma unroll 1
  for (int block = 0; block < Tile::V::kBlocks; ++block) {
    const u32 start = v_tile + block * Tile::V::kBlockBytes;
    for (int i = row * 8 + lane; i < Tile::BLOCK_K * 8; i += 32) {
      store_shared_16(start + 16 * i, {});
    }
  }
  fence_shared_for_async();
  warp_sync();
}

// All lanes wait together: for one that lags behind lane 0, which lets the next phase begin, that
// phase could end as well before it has looked.
CUFA2_DEVICE void wait_in_step(u32 barrier, u32 parity) {
  mbarrier_wait(barrier, parity);
  warp_sync();
}

// The producer: one warp, of which lane 0 does all but zeroing.
template <class Tile, class Mask>
CUFA2_DEVICE void produce(const FwdSm90Params& params, u32 q_tiles, u32 k_tiles, u32 v_tiles,
                          u32 control) {
  using C = typename Tile::Control;
  const FwdParams& p = params.call;
  const int lane = thread_index() % 32;
  const bool leader = lane == 0;
  RingPlace<Tile::Q_STAGES> q{0, 1};
  RingPlace<Tile::STAGES> k{0, 1}, v{0, 1};
  u32 raw_parity = 0;
  int tile = blockIdx.x;
  for (;;) {
    const TileFrame frame = frame_of<Tile, Mask>(params, tile);
    const u32 q_full = control + C::kQFull + kMbarrierBytes * q.stage;
    wait_in_step(control + C::kQEmpty + kMbarrierBytes * q.stage, q.parity);
    if (leader) {
      store_frame(control + C::kFrames + q.stage * sizeof(TileFrame), frame);
      if (frame.last < frame.first) {
        mbarrier_arrive(q_full);
      } else {
        mbarrier_arrive_expecting(q_full, Tile::Q::kBytes);
        Tile::Q::load(q_tiles + q.stage * Tile::Q::kBytes, params.q_map, q_full, frame.head,
                      frame.q_begin, frame.batch);
      }
    }
    if (!frame.valid) break;
    q.next();
    const int kv_head = frame.head / p.group;
    int next = tile;
    for (int block = frame.last; block >= frame.first - 1; --block) {
      if (block >= frame.first) {
        const u32 full = control + C::kKFull + kMbarrierBytes * k.stage;
        wait_in_step(control + C::kKEmpty + kMbarrierBytes * k.stage, k.parity);
        if (leader) {
          mbarrier_arrive_expecting(full, Tile::K::kBytes);
          Tile::K::load(k_tiles + k.stage * Tile::K::kBytes, params.k_map, full,
                        block * Tile::BLOCK_K, kv_head, frame.batch);
        }
        k.next();
      } else {
        // As late as can be: a tile that is claimed when the one before it begins makes the order
        // of claims differ from the order of ends.
        next = leader ? claim_work(params.counter) : 0;
      }
      if (block < frame.last) {
        const int key = (block + 1) * Tile::BLOCK_K;
        const u32 full = control + C::kVFull + kMbarrierBytes * v.stage, raw = control + C::kVRaw;
        const u32 target = v_tiles + v.stage * Tile::V::kBytes;
        // Beyond the tensor there are zeros anyway.
        const bool foreign = frame.len_k < p.seqlen_k && key + Tile::BLOCK_K > frame.len_k;
        wait_in_step(control + C::kVEmpty + kMbarrierBytes * v.stage, v.parity);
        if (leader) {
          mbarrier_arrive_expecting(foreign ? raw : full, Tile::V::kBytes);
          Tile::V::load(target, params.v_map, foreign ? raw : full, key, kv_head, frame.batch);
        }
        if (foreign) {
          mbarrier_wait(raw, raw_parity);
          raw_parity ^= 1;
          zero_rows<Tile>(target, frame.len_k - key, lane);
          if (leader) mbarrier_arrive(full);
        }
        v.next();
      }
    }
    tile = warp_uniform(next);
  }
  if (leader) end_claims(params.counter);
}
