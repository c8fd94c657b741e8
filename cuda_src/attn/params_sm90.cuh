// Run-time parameters of the Hopper kernels; params.py packs the same layouts.
#pragma once
#include "../prim/tma.cuh"
#include "params.cuh"

struct FwdSm90Params {
  // Boxes of 64 columns and a tile's rows; of o, a warp's. k and v: (B, H, S, D). q and o:
  // (B, S, H, D), as 2^pack heads of one key head may share a tile, row by row.
  TensorMap q_map, k_map, v_map, o_map;
  FwdParams call;
  u32* counter;                   // (2,), zero: see claim_work
  // With splits, which then are all the tiles of a head or of those that share one:
  u32* arrived;                   // (B * H / 2^pack, BLOCK_Q / 64), zero
  float* part_o;                  // (B, H, Sq, splits, DV)
  float* part_lse;                // (B, H, Sq, splits)
  int pack, tiles;
  int split_blocks;               // key blocks of a split; 0: tiles are of queries
};
static_assert(sizeof(FwdSm90Params) == CUFA2_FWD_SM90_PARAMS_BYTES,
              "params.py packs another layout");
