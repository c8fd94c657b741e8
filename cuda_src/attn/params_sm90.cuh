// Run-time parameters of the Hopper kernels; params.py packs the same layouts.
#pragma once
#include "../prim/tma.cuh"
#include "params.cuh"

struct FwdSm90Params {
  TensorMap q_map, k_map, v_map;  // (B, H, S, D), boxes of 64 columns and a tile's rows
  FwdParams call;
  u32* counter;                   // (2,), zero: see claim_work
};
static_assert(sizeof(FwdSm90Params) == CUFA2_FWD_SM90_PARAMS_BYTES,
              "params.py packs another layout");
