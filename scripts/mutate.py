"""Small faults, one at a time: which of them do the CPU tests notice? Called by mutate.sh.

Each mutant is a copy of the checkout with one piece of text replaced. The tests stop at their
first failure; a mutant that passes them all is a missing test.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CUDA, CUFA2 = "cuda_src/", "cufa2/"
KERNELS = ("tests/test_kernels.py", "tests/test_gpu_forward.py", "tests/test_gpu_backward.py")
HOPPER = ("tests/test_hopper_units.py", "tests/test_fwd_sm90.py")
HOST = ("tests/test_launch.py", "tests/test_plan.py", "tests/test_arrays.py")
BACKWARD = ("bwd_", "attn/key_walk", "attn/query_walk", "attn/grad_q", "attn/wide_grad")


class Mutant(NamedTuple):
    name: str
    file: str
    old: str  # stands in the file once
    new: str


MUTANTS = (
    # Waits and barriers
    Mutant(
        "forward: K and V not waited for",
        f"{CUDA}fwd_sm80.cuh",
        "if (v_late) cp_async_wait<1>(); else cp_async_wait<0>();",
        "if (v_late) cp_async_wait<1>(); else cp_async_wait<1>();",
    ),
    Mutant(
        "forward: no barrier before K and V are read",
        f"{CUDA}fwd_sm80.cuh",
        "block_sync();  // this block's K and V are visible; the other buffer is free",
        "",
    ),
    Mutant(
        "forward: no barrier before the output takes the place of Q",
        f"{CUDA}fwd_sm80.cuh",
        "block_sync();  // every warp is done with Q, K and V",
        "",
    ),
    Mutant(
        "wide forward: one turn too few waited for",
        f"{CUDA}fwd_wide_sm80.cuh",
        "cp_async_wait<Tile::SLOTS - 2>();\n  block_sync();  // what",
        "cp_async_wait<Tile::SLOTS - 1>();\n  block_sync();  // what",
    ),
    Mutant(
        "wide forward: no barrier in a turn",
        f"{CUDA}fwd_wide_sm80.cuh",
        "block_sync();  // what has landed is visible to all; all are done with the turn before",
        "",
    ),
    Mutant(
        "wide forward: sides do not wait for each other",
        f"{CUDA}tile/wide.cuh",
        "  sync_sides<Tile>();\n#pragma unroll",
        "#pragma unroll",
    ),
    Mutant(
        "backward: the first block not waited for",
        f"{CUDA}bwd_sm80.cuh",
        "cp_async_wait<1>();\n  block_sync();  // the first block is visible",
        "block_sync();  // the first block is visible",
    ),
    Mutant(
        "backward: no barrier after a block",
        f"{CUDA}bwd_sm80.cuh",
        "block_sync();  // dS^T and the next block",
        "// dS^T and the next block",
    ),
    Mutant(
        "backward: P and dS read before all sides have written them",
        f"{CUDA}bwd_sm80.cuh",
        "group_sync(1 + thread_index() / 32 / Tile::kSides, 32 * Tile::kSides);",
        "",
    ),
    Mutant(
        "dq: no barrier before K and V are read",
        f"{CUDA}bwd_dq_sm80.cuh",
        "block_sync();  // this block's K and V are visible; the other buffer is free",
        "",
    ),
    Mutant(
        "wide backward: no barrier before a block",
        f"{CUDA}bwd_wide_sm80.cuh",
        "block_sync();  // this block's columns are visible; all are done with the block before",
        "",
    ),
    Mutant(
        "wide backward: lanes overwrite what others still read",
        f"{CUDA}attn/wide_grad.cuh",
        "warp_sync();  // the lanes have read the tile",
        "",
    ),
    Mutant(
        "walk: a step is written where it is still read",
        f"{CUDA}attn/key_walk.cuh",
        "frame.steps[(n + 3) % 8] = frame.next(frame.steps[(n + 2) % 8]);",
        "frame.steps[(n + 1) % 8] = frame.next(frame.steps[(n + 2) % 8]);",
    ),
    # Masks
    Mutant(
        "mask: one key too many on the right",
        f"{CUDA}attn/features.cuh",
        "RIGHT ? min(i + last + 1, seqlen_k)",
        "RIGHT ? min(i + last + 2, seqlen_k)",
    ),
    Mutant(
        "mask: one key too few on the left",
        f"{CUDA}attn/features.cuh",
        "return {LEFT ? max(i + first, 0) : 0, RIGHT",
        "return {LEFT ? max(i + first + 1, 0) : 0, RIGHT",
    ),
    Mutant(
        "mask: a key that one row sees counts as seen by all",
        f"{CUDA}attn/features.cuh",
        "return {top.begin, bottom.end, bottom.begin, max(top.end, 0)};",
        "return {top.begin, bottom.end, bottom.begin, max(bottom.end, 0)};",
    ),
    Mutant(
        "mask: the last rows of a window are skipped",
        f"{CUDA}attn/features.cuh",
        "LEFT ? min(j - first + 1, seqlen_q) : seqlen_q",
        "LEFT ? min(j - first, seqlen_q) : seqlen_q",
    ),
    Mutant(
        "mask: keys past the end count as whole blocks",
        f"{CUDA}attn/features.cuh",
        "whole ? max(left.end, 0) : 0",
        "max(left.end, 0)",
    ),
    Mutant(
        "mask: causal of the other alignment",
        f"{CUDA}attn/features.cuh",
        "shift = p.top_left ? 0 : k - q;",
        "shift = p.top_left ? k - q : 0;",
    ),
    Mutant(
        "lengths of keys ignored",
        f"{CUDA}attn/features.cuh",
        "if (p.seqlens_k) k =",
        "if (false) k =",
    ),
    Mutant(
        "lengths taken from the neighbour",
        f"{CUDA}attn/features.cuh",
        "p.seqlens_q[batch * p.seqlens_q_stride]",
        "p.seqlens_q[(batch ^ 1) * p.seqlens_q_stride]",
    ),
    # Offsets
    Mutant(
        "forward: 32-bit offsets of rows of o",
        f"{CUDA}fwd_sm80.cuh",
        "store_global_16(out + i * p.o_stride.row +",
        "store_global_16(out + static_cast<int>(i * p.o_stride.row) +",
    ),
    Mutant(
        "wide forward: 32-bit offsets of rows of o",
        f"{CUDA}fwd_wide_sm80.cuh",
        "(out + i * p.o_stride.row +",
        "(out + static_cast<int>(i * p.o_stride.row) +",
    ),
    Mutant(
        "delta: 32-bit offsets of rows of do",
        f"{CUDA}bwd_delta.cuh",
        "load_global_16(grad_o + i * p.grad_o_stride.row +",
        "load_global_16(grad_o + static_cast<int>(i * p.grad_o_stride.row) +",
    ),
    # Softmax
    Mutant(
        "softmax: sums not rescaled",
        f"{CUDA}attn/softmax.cuh",
        "sum[r] *= factor[r];",
        "",
    ),
    Mutant(
        "softmax: stale maximum",
        f"{CUDA}attn/softmax.cuh",
        "reference[r] = rises ? top : reference[r];",
        "reference[r] = reference[r] == -inf() ? top : reference[r];",
    ),
    Mutant(
        "softmax: lse in the wrong base",
        f"{CUDA}attn/softmax.cuh",
        "fmaf(reference[r], kLn2, logf(l))",
        "fmaf(reference[r], kLn2, logf(l) * kLog2E)",
    ),
    Mutant(
        "softmax: rows without a key are not 0",
        f"{CUDA}attn/softmax.cuh",
        "inverse[r] = empty ? 0.0f : 1.0f / l;",
        "inverse[r] = 1.0f / l;",
    ),
    Mutant(
        "wide softmax: lse in the wrong base",
        f"{CUDA}attn/wide.cuh",
        "T(0.69314718055994531), log(l)",
        "T(1), log(l)",
    ),
    # Tails, strides, heads
    Mutant(
        "loader: rows past the end are loaded",
        f"{CUDA}tile/smem.cuh",
        "row + n * kRowStep < rows_left;",
        "row + n * kRowStep <= rows_left;",
    ),
    Mutant(
        "loader: columns past the end are loaded",
        f"{CUDA}tile/smem.cuh",
        "(g * kLanes + chunk) * 8 < cols_left",
        "(g * kLanes + chunk) * 8 <= cols_left",
    ),
    Mutant(
        "forward: V of another head of the group",
        f"{CUDA}fwd_wide_sm80.cuh",
        "w.head / p.group * p.v_stride.head",
        "w.head % p.num_heads / p.group * p.k_stride.head",
    ),
    Mutant(
        "backward: one query head too many in a group",
        f"{CUDA}attn/key_walk.cuh",
        "return at.head < (work.head + 1) * p.group;",
        "return at.head <= (work.head + 1) * p.group;",
    ),
    Mutant(
        "work: tiles of the wrong batch entry",
        f"{CUDA}attn/schedule.cuh",
        "const Index batch = batch_head / num_heads;",
        "const Index batch = batch_head / (num_heads + 1);",
    ),
    Mutant(
        "delta: dlse added, not taken off",
        f"{CUDA}bwd_delta.cuh",
        "delta -= dlse[i * p.dlse_stride.row];",
        "delta += dlse[i * p.dlse_stride.row];",
    ),
    Mutant(
        "delta: dq not cleared before it is added up",
        f"{CUDA}bwd_delta.cuh",
        "if (p.dq_sum) clear_dq<T, Tile::kThreads>(p, batch, head, first);",
        "",
    ),
    Mutant(
        "delta: sums of dq not cleared",
        f"{CUDA}bwd_delta.cuh",
        "store_global_16(sum + 4 * c, {{0u, 0u, 0u, 0u}});",
        "(void)sum;",
    ),
    Mutant(
        "convert: dq without the scale",
        f"{CUDA}bwd_convert.cuh",
        "fmaf(__uint_as_float(lane[t].word[2 * h]), p.scale, 0.0f)",
        "fmaf(__uint_as_float(lane[t].word[2 * h]), 1.0f, 0.0f)",
    ),
    Mutant(
        "convert: rows past the real ones are not 0",
        f"{CUDA}bwd_convert.cuh",
        "out.word[t] = i < len.q ? pack2<T>(lo, hi) : 0u;",
        "out.word[t] = i < len.q || i == 0 ? pack2<T>(lo, hi) : 0x3c003c00u;",
    ),
    Mutant(
        "dq: rows past the real ones count",
        f"{CUDA}bwd_dq_sm80.cuh",
        "const bool real = work.q_begin + n < frame.len.q;",
        "const bool real = work.q_begin + n <= frame.len.q;",
    ),
    Mutant(
        "softcap: gradient left out",
        f"{CUDA}bwd_dq_sm80.cuh",
        "if constexpr (!Score::kIdentity) x *= score.grad(logit);",
        "",
    ),
    # Operands
    Mutant(
        "TF32: small terms left out",
        f"{CUDA}prim/wide_mma.cuh",
        "mma_m16n8k8(fresh, a[0].hi, b[0].lo);",
        "",
    ),
    # The host
    Mutant(
        "params: strides of k and v swapped",
        f"{CUFA2}params.py",
        "batch, row, head, _ = view.strides\n",
        'batch, row, head, _ = (views["k"] if name == "v" else view).strides\n',
    ),
    Mutant(
        "params: a negative scale loses its sign",
        f"{CUFA2}params.py",
        "sign = math.copysign(1.0, p.softmax_scale) if scale >= 2.0**-126 else 0.0",
        "sign = 1.0 if scale >= 2.0**-126 else 0.0",
    ),
    Mutant(
        "params: log2(e) forgotten",
        f"{CUFA2}params.py",
        '"exact_scale_log2": exponent * _LOG2_E,\n        "q_sign"',
        '"exact_scale_log2": exponent,\n        "q_sign"',
    ),
    Mutant(
        "launch: a tile too few",
        f"{CUFA2}kernels.py",
        "return p.batch * p.num_heads * -(-p.seqlen_q // rows)",
        "return p.batch * p.num_heads * max(1, p.seqlen_q // rows)",
    ),
    Mutant(
        "launch: outputs not copied back",
        f"{CUFA2}launch.py",
        "arrays.copy_out(known[name], work[name])",
        "pass",
    ),
    Mutant(
        "launch: work memory one tile too small",
        f"{CUFA2}params.py",
        "return -(-p.seqlen_q // WORK_ROWS) * WORK_ROWS",
        "return max(1, p.seqlen_q // WORK_ROWS) * WORK_ROWS",
    ),
    Mutant(
        "launch: a buffer is kept while a larger one is taken",
        f"{CUFA2}launch.py",
        "self._buffer = None  # returned to the pool before the larger one is taken from it",
        "pass",
    ),
    Mutant(
        "copies: padding columns not cleared",
        f"{CUFA2}arrays.py",
        "target[..., d:] = 0",
        "pass",
    ),
    Mutant(
        "arrays: misaligned rows are taken in place",
        f"{CUFA2}arrays.py",
        "source.pointer % 16 == 0\n",
        "source.pointer % 4 == 0\n",
    ),
    Mutant(
        "plan: causal of a window's left side",
        f"{CUFA2}plan.py",
        'return "full" if window_right is None else "causal"',
        'return "full"',
    ),
    # Hopper
    Mutant(
        "Hopper: K not waited for",
        f"{CUDA}fwd_sm90.cuh",
        "mbarrier_wait(barrier(C::kKFull, place.stage), place.parity);\n    pin(s.at[0]);",
        "pin(s.at[0]);",
    ),
    Mutant(
        "Hopper: V not waited for",
        f"{CUDA}fwd_sm90.cuh",
        "mbarrier_wait(barrier(C::kVFull, at.stage), at.parity);",
        "",
    ),
    Mutant(
        "Hopper: Q not waited for",
        f"{CUDA}fwd_sm90.cuh",
        "      mbarrier_wait(barrier(C::kQFull, q.stage), q.parity);\n",
        "",
    ),
    Mutant(
        "Hopper: a stage of K refilled while it is read",
        f"{CUDA}attn/producer_sm90.cuh",
        "wait_in_step(control + C::kKEmpty + kMbarrierBytes * k.stage, k.parity);",
        "",
    ),
    Mutant(
        "Hopper: a stage of V refilled while it is read",
        f"{CUDA}attn/producer_sm90.cuh",
        "wait_in_step(control + C::kVEmpty + kMbarrierBytes * v.stage, v.parity);",
        "",
    ),
    Mutant(
        "Hopper: Q refilled while it is read",
        f"{CUDA}attn/producer_sm90.cuh",
        "wait_in_step(control + C::kQEmpty + kMbarrierBytes * q.stage, q.parity);",
        "",
    ),
    Mutant(
        "Hopper: V released before its product has ended",
        f"{CUDA}fwd_sm90.cuh",
        "      wgmma_wait<0>();\n      pin(o.at[0]);\n      release(C::kVEmpty, before.stage);",
        "      release(C::kVEmpty, before.stage);\n      wgmma_wait<0>();\n      pin(o.at[0]);",
    ),
    Mutant(
        "Hopper: K released before its product has ended",
        f"{CUDA}fwd_sm90.cuh",
        "    wgmma_wait<1>();\n    pin(s.at[0]);",
        "    wgmma_wait<2>();\n    pin(s.at[0]);",
    ),
    Mutant(
        "Hopper: K never released",
        f"{CUDA}fwd_sm90.cuh",
        "      });\n      release(C::kKEmpty, place.stage);",
        "      });",
    ),
    Mutant(
        "Hopper: no fence before S",
        f"{CUDA}fwd_sm90.cuh",
        "    pin(s.at[0]);\n    wgmma_fence();",
        "    pin(s.at[0]);",
    ),
    Mutant(
        "Hopper: no fence before O",
        f"{CUDA}fwd_sm90.cuh",
        "    pin(o.at[0]);\n    wgmma_fence();",
        "    pin(o.at[0]);",
    ),
    Mutant(
        "Hopper: P packed while its product runs",
        f"{CUDA}attn/softmax_sm90.cuh",
        "    if constexpr (LATE == 0) wait();",
        "    if constexpr (LATE == 0) {}",
    ),
    Mutant(
        "Hopper: the sign of Q not shown to the tensor cores",
        f"{CUDA}fwd_sm90.cuh",
        "  fence_shared_for_async();\n  group_sync(barrier, 128);",
        "  group_sync(barrier, 128);",
    ),
    Mutant(
        "Hopper: the sign of Q applied while others multiply",
        f"{CUDA}fwd_sm90.cuh",
        "  fence_shared_for_async();\n  group_sync(barrier, 128);",
        "  fence_shared_for_async();",
    ),
    Mutant(
        "Hopper: V past a sequence left as it is",
        f"{CUDA}attn/producer_sm90.cuh",
        "zero_rows<Tile>(target, frame.len_k - key, lane);",
        "",
    ),
    Mutant(
        "Hopper: the zeros of V not shown to the tensor cores",
        f"{CUDA}attn/producer_sm90.cuh",
        "  fence_shared_for_async();\n  warp_sync();",
        "  warp_sync();",
    ),
    Mutant(
        "Hopper: bytes of V expected of K",
        f"{CUDA}attn/producer_sm90.cuh",
        "mbarrier_arrive_expecting(full, Tile::K::kBytes);",
        "mbarrier_arrive_expecting(full, Tile::V::kBytes);",
    ),
    Mutant(
        "Hopper: a ring whose parity stays",
        f"{CUDA}attn/frame_sm90.cuh",
        "stage = 0, parity ^= 1;",
        "stage = 0;",
    ),
    Mutant(
        "Hopper: the left edge of a window is not masked",
        f"{CUDA}fwd_sm90.cuh",
        "for (; n >= max(first, full_first); --n) step<false>",
        "for (; n >= first; --n) step<false>",
    ),
    Mutant(
        "Hopper: claims are not reset",
        f"{CUDA}attn/producer_sm90.cuh",
        "  if (leader) end_claims(params.counter);",
        "",
    ),
    Mutant(
        "Hopper: the first block is not masked",
        f"{CUDA}fwd_sm90.cuh",
        "if (last >= full_beyond || last < full_first) {",
        "if (last < full_first) {",
    ),
    Mutant(
        "Hopper: a block that nobody sees is not let pass",
        f"{CUDA}fwd_sm90.cuh",
        "skip(frame.last - last);",
        "skip(frame.last - last - 1);",
    ),
    Mutant(
        "Hopper: what a warpgroup's last row sees taken for what its first does",
        f"{CUDA}fwd_sm90.cuh",
        "const int begin = rows_mask.rows.position(64 * group);",
        "const int begin = rows_mask.rows.position(64 * group + 63);",
    ),
    Mutant(
        "Hopper: O not rescaled",
        f"{CUDA}attn/softmax_sm90.cuh",
        "o.at[0][n][e] *= factor[e >> 1];",
        "o.at[0][n][e] *= 1.0f;",
    ),
    Mutant(
        "Hopper: sums not rescaled",
        f"{CUDA}attn/softmax_sm90.cuh",
        "sum[r] = fmaf(sum[r], factor[r], added[r]);",
        "sum[r] += added[r];",
    ),
    Mutant(
        "Hopper: out of range is taken for in range",
        f"{CUDA}attn/softmax_sm90.cuh",
        "if (warp_any(added[0] > kLargest || added[1] > kLargest)) {",
        "if (warp_any(added[0] > kLargest)) {",
    ),
    Mutant(
        "Hopper: scores not taken again",
        f"{CUDA}attn/softmax_sm90.cuh",
        "      again(s);\n",
        "",
    ),
    Mutant(
        "Hopper: a NaN that has leaked stays",
        f"{CUDA}fwd_sm90.cuh",
        "if (nan) mend(frame, rows_mask);",
        "",
    ),
    Mutant(
        "Hopper: keys that a row does not see summed up again",
        f"{CUDA}attn/rows_again.cuh",
        "const bool seen = mask.keep(row, j) && j >= first && j < beyond;",
        "const bool seen = j >= first && j < beyond;",
    ),
    Mutant(
        "Hopper: the head of K is that of Q",
        f"{CUDA}attn/producer_sm90.cuh",
        "const int kv_head = frame.head / p.group;",
        "const int kv_head = frame.head;",
    ),
    Mutant(
        "Hopper: the next tile not claimed",
        f"{CUDA}attn/frame_sm90.cuh",
        "if (!at.valid) return {0, 0, 0, 0, 0, 0, 0, -1};",
        "if (!at.valid || tile > 8) return {0, 0, 0, 0, 0, 0, 0, -1};",
    ),
    Mutant(
        "Hopper: strides of heads and batches of a tensor map",
        f"{CUFA2}device.py",
        "steps = tuple(2 * strides[a] if shape[a] > 1 else 16 for a in axes)",
        "steps = tuple(2 * strides[a] if shape[a] > 1 else 16 for a in (1, 0, 2))",
    ),
    Mutant(
        "Hopper: other values move with a NaN",
        f"{CUDA}tile/rows.cuh",
        "if constexpr (MEND) words[r][n] = where_nan<T>(load_global_8(at), words[r][n]);",
        "",
    ),
    Mutant(
        "Hopper: heads that share a tile in the wrong order",
        f"{CUDA}attn/frame_sm90.cuh",
        "return head + (row & ((1 << pack) - 1)); }",
        "return head + ((1 << pack) - 1 - (row & ((1 << pack) - 1))); }",
    ),
    Mutant(
        "Hopper: heads of two key heads share a tile",
        f"{CUFA2}params.py",
        "while p.group % (2 << pack) == 0 and",
        "while p.num_heads % (2 << pack) == 0 and",
    ),
    Mutant(
        "Hopper: a block of keys in two splits",
        f"{CUDA}attn/frame_sm90.cuh",
        "last = min(last, (split + 1) * params.split_blocks - 1);",
        "last = min(last, (split + 1) * params.split_blocks);",
    ),
    Mutant(
        "Hopper: parts merged before all are there",
        f"{CUDA}attn/output_sm90.cuh",
        "last_to_arrive(arrived, place.params.tiles,",
        "last_to_arrive(arrived, place.params.tiles - 1,",
    ),
    Mutant(
        "Hopper: warpgroups arrive at the counter of another",
        f"{CUDA}attn/output_sm90.cuh",
        "* Tile::kGroups + group;",
        "* Tile::kGroups;",
    ),
    Mutant(
        "Hopper: parts weighted by another base",
        f"{CUDA}attn/output_sm90.cuh",
        "exp2_approx((lses[first + lane] - top) * kLog2E)",
        "exp2_approx(lses[first + lane] - top)",
    ),
    Mutant(
        "Hopper: splits depend on the batch",
        f"{CUFA2}params.py",
        "-(-2 * sm_count // (heads >> pack))",
        "-(-2 * sm_count // (p.batch * heads >> pack))",
    ),
    Mutant(
        "Hopper: O stored before its last product has ended",
        f"{CUDA}fwd_sm90.cuh",
        "      begin_output(place);\n      wgmma_wait<0>();",
        "      begin_output(place);\n      wgmma_wait<1>();",
    ),
    Mutant(
        "Hopper: blocks that have to pass after a tile do not",
        f"{CUDA}fwd_sm90.cuh",
        "    skip(first - frame.first);\n",
        "",
    ),
    Mutant(
        "Hopper: a part of a row left out of the merge",
        f"{CUDA}attn/output_sm90.cuh",
        "const int count = min(32, parts - first);",
        "const int count = min(31, parts - first);",
    ),
    Mutant(
        "Hopper: a tensor map with a negative stride",
        f"{CUFA2}device.py",
        "return all(n <= 1 or 0 < s * itemsize < 2**40 for n, s in pairs)",
        "return all(n <= 1 or abs(s * itemsize) < 2**40 for n, s in pairs)",
    ),
    Mutant(
        "Hopper: boxes of Q's rows for K",
        f"{CUFA2}launch.py",
        '"k": (tile.block_k, 0), "v"',
        '"k": (tile.block_q, 0), "v"',
    ),
    Mutant(
        "Hopper: O sent before the copy engine may see it",
        f"{CUDA}attn/output_sm90.cuh",
        "  fence_shared_for_async();\n  warp_sync();\n  if (lane == 0) {\n    Tile::O",
        "  warp_sync();\n  if (lane == 0) {\n    Tile::O",
    ),
    Mutant(
        "Hopper: O sent before all lanes have put theirs",
        f"{CUDA}attn/output_sm90.cuh",
        "  fence_shared_for_async();\n  warp_sync();\n  if (lane == 0) {\n    Tile::O",
        "  fence_shared_for_async();\n  if (lane == 0) {\n    Tile::O",
    ),
    Mutant(
        "Hopper: the place of Q given back before O has left it",
        f"{CUDA}fwd_sm90.cuh",
        "if (thread_index() % 32 == 0) tma_store_wait();",
        "",
    ),
    Mutant(
        "Hopper: O sent to another position",
        f"{CUDA}attn/output_sm90.cuh",
        "place.rows.position(first_row), place.frame.batch);",
        "place.rows.q_begin + first_row, place.frame.batch);",
    ),
    Mutant(
        "Hopper: O sent to the first of the heads that share a tile",
        f"{CUDA}attn/output_sm90.cuh",
        "Tile::O::store(place.params.o_map, target, place.rows.head_of(first_row),",
        "Tile::O::store(place.params.o_map, target, place.frame.head,",
    ),
    Mutant(
        "Hopper: rows that see no key keep what was summed",
        f"{CUDA}fwd_sm90.cuh",
        "    clear_rows(o, rows);\n",
        "",
    ),
    Mutant(
        "Hopper: an output that no map describes",
        f"{CUFA2}attention.py",
        "            problem = launch.described(problem, o_view.canonical(self.options.layout))\n",
        "",
    ),
    Mutant(
        "Hopper: words exchanged with the wrong lane",
        f"{CUDA}prim/exchange.cuh",
        "odd ? word[0] : word[1], 1);",
        "odd ? word[0] : word[1], 2);",
    ),
)


def tests_of(mutant: Mutant) -> list[tuple[str, ...]]:
    """Arguments of pytest, run by run: those likely to notice first, then the rest."""
    if mutant.name.startswith("Hopper"):
        return [HOPPER]
    if mutant.file.startswith(CUFA2):
        return [HOST, KERNELS]
    backward = mutant.file.removeprefix(CUDA).startswith(BACKWARD)
    kind = "test_backward" if backward else "test_forward"
    return [(*KERNELS, "-k", kind), (*KERNELS, "-k", f"not {kind}"), HOST]


def pytest(tests: tuple[str, ...], tree: Path, cache: Path) -> str | None:
    """Run tests in a tree until one fails, and say which; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n"]
    command += [str(os.cpu_count() or 1), "--dist", "worksteal", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "CUFA2_EMULATOR": "required",
        "CUFA2_CACHE_DIR": str(cache),
    }
    ran = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest ended with {ran.returncode}\n{ran.stdout[-2000:]}")
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not ran.returncode:
        return None
    return failed[0].split(" - ")[0].split("::", 1)[-1] if failed else "a test that broke off"


def copied(folder: str) -> Path:
    """The checkout, copied into a folder."""
    tree = Path(folder) / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "results"))
    return tree


def run(mutant: Mutant, cache: Path) -> str | None:
    """The test that notices the fault, or None."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(folder)
        path = tree / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.file} has not the one line it changes")
        path.write_text(text.replace(mutant.old, mutant.new))
        found = (pytest(tests, tree, cache) for tests in tests_of(mutant))
        return next((name for name in found if name), None)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="mutate.sh", description=__doc__)
    parser.add_argument("--only", default="*", help="names to run, as a shell pattern")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if fnmatch.fnmatch(m.name, options.only)]
    if options.list:
        print("\n".join(f"{m.file}: {m.name}" for m in chosen))
        return
    survivors = []
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        print("without a fault (compiles what the others share)", flush=True)
        if found := pytest((*KERNELS, *HOPPER, *HOST), copied(folder), Path(cache)):
            raise SystemExit(f"{found} fails without any fault")
        for n, mutant in enumerate(chosen, 1):
            start = time.monotonic()
            found = run(mutant, Path(cache))
            said = f"killed by {found}" if found else "SURVIVES"
            seconds = time.monotonic() - start
            print(f"[{n}/{len(chosen)}] {seconds:5.0f} s  {mutant.name}: {said}", flush=True)
            survivors += [] if found else [mutant.name]
    print(f"killed {len(chosen) - len(survivors)} of {len(chosen)}")
    if survivors:
        raise SystemExit("survivors, each a missing test:\n  " + "\n  ".join(survivors))


if __name__ == "__main__":
    main()
