"""What a call costs besides the kernel: host time, first call, cached load, memory.

Run by `bench.sh forward --host`; as a program of its own it is the child process that times first
calls with the cache folder it finds in CUFA2_CACHE_DIR, and prints them as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import to_torch

from cufa2 import FlashAttention2, device, flash_attention, testing

BATCHES, CALLS = 40, 50  # the launch queue holds about 1000 calls, so 50 never wait for the device
FIRST_CALL_DIMS = (32, 64, 96, 128, 192, 256)
LONG = (1, 131072, 4, 128)  # B, S, H, D of the memory measurement: 513 MiB of arrays in bf16


def queued(call: Callable[[], Any]) -> float:
    """Median host microseconds per call over batches of queued calls."""
    runtime = device.cupy().cuda.runtime
    call()
    samples = []
    for _ in range(BATCHES):
        runtime.deviceSynchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - start) / CALLS * 1e6)
    runtime.deviceSynchronize()
    return float(np.median(samples))


def filled(shape: tuple[int, ...], dtype: str) -> Any:
    """A CuPy array of small equal numbers; needs no kernel, so nothing else is compiled."""
    array = device.cupy().empty(shape, testing.numpy_dtype(dtype))
    array.data.memset_async(0x3C, array.nbytes)
    return array


def host_times(dtype: str) -> dict[str, float]:
    """Host microseconds per warm call on a tiny problem, torch's SDPA beside cufa2."""
    cupy = device.cupy()
    q, k, v = (filled((1, 64, 4, 64), dtype) for _ in range(3))
    out, lse = cupy.empty(q.shape, q.dtype), cupy.empty((1, 4, 64), np.float32)
    op = FlashAttention2(64, dtype, causal=True)
    times = {
        "flash_attention": queued(lambda: flash_attention(q, k, v, causal=True)),
        "flash_attention, out=": queued(lambda: flash_attention(q, k, v, causal=True, out=out)),
        "FlashAttention2.forward": queued(lambda: op.forward(q, k, v)),
        "FlashAttention2.forward, out= and lse_out=": queued(
            lambda: op.forward(q, k, v, out=out, lse_out=lse)
        ),
    }
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as sdpa
    except ImportError as e:
        print(f"note: no PyTorch beside these ({e})")
        return times
    a, b, c = (to_torch(x).transpose(1, 2) for x in (q, k, v))
    with torch.no_grad():
        times["torch sdpa"] = queued(lambda: sdpa(a, b, c, is_causal=True))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            times["torch sdpa, FlashAttention-2"] = queued(lambda: sdpa(a, b, c, is_causal=True))
        x, y, z = (to_torch(t) for t in (q, k, v))
        times["flash_attention on torch tensors"] = queued(
            lambda: flash_attention(x, y, z, causal=True)
        )
    return times


def first_calls(dtype: str) -> dict[str, Any]:
    """Seconds of the first call per head dim in a new process: empty cache, then filled cache."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for state in ("empty", "filled"):
            done = subprocess.run(
                [sys.executable, __file__, "--dtype", dtype],
                env={
                    **os.environ,
                    "CUFA2_CACHE_DIR": str(Path(folder, "cache")),
                    "CUDA_CACHE_DISABLE": "1",  # the driver keeps a cache of its own
                },
                stdout=subprocess.PIPE,
                text=True,
                timeout=120,
                check=True,
            )
            results[state] = json.loads(done.stdout)
    return results


def time_first_calls(dtype: str) -> dict[str, float]:
    """In this process: seconds from a call to its finished result, first and second time."""
    cupy = device.cupy()
    times = {}
    for dim in FIRST_CALL_DIMS:
        q = filled((1, 256, 2, dim), dtype)
        cupy.cuda.runtime.deviceSynchronize()
        for name in (f"{dim}", f"{dim} again"):
            start = time.perf_counter()
            flash_attention(q, q, q, causal=True)
            cupy.cuda.runtime.deviceSynchronize()
            times[name] = time.perf_counter() - start
    return times


def peak_memory(dtype: str) -> dict[str, float]:
    """Bytes taken by a call at S = 131072 against those of its arrays."""
    cupy = device.cupy()
    pool, runtime = cupy.get_default_memory_pool(), cupy.cuda.runtime
    batch, seqlen, heads, dim = LONG
    warm = filled((batch, 256, heads, dim), dtype)
    flash_attention(warm, warm, warm, causal=True, return_lse=True)  # module and its local memory
    runtime.deviceSynchronize()
    gc.collect()
    pool.free_all_blocks()
    pool_before, free_before = pool.total_bytes(), runtime.memGetInfo()[0]
    q, k, v = (filled((batch, seqlen, heads, dim), dtype) for _ in range(3))
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    runtime.deviceSynchronize()
    # The pool gives nothing back by itself, so its size now is its peak.
    peak = pool.total_bytes() - pool_before
    card = free_before - runtime.memGetInfo()[0]
    arrays = sum(x.nbytes for x in (q, k, v, o, lse))
    return {
        "seqlen": seqlen,
        "arrays_bytes": arrays,
        "pool_peak_bytes": peak,
        "card_bytes": card,
        "pool_excess_percent": 100 * (peak / arrays - 1),
        "card_excess_percent": 100 * (card / arrays - 1),
    }


def measure(dtype: str) -> dict[str, Any]:
    """All of the above, printed as it comes."""
    memory = peak_memory(dtype)
    print(
        f"peak memory at S = {memory['seqlen']}: arrays {memory['arrays_bytes'] / 2**20:.1f} MiB, "
        f"CuPy's pool {memory['pool_excess_percent']:+.2f} %, "
        f"cudaMemGetInfo {memory['card_excess_percent']:+.2f} %",
        flush=True,
    )
    calls = first_calls(dtype)
    print("first call in a new process, milliseconds (empty cache, filled cache, second call);")
    print("the first row has loading NVRTC, or what else a process does once, in it")
    for dim in FIRST_CALL_DIMS:
        empty, filled_cache = (1000 * calls[state][str(dim)] for state in ("empty", "filled"))
        again = 1000 * calls["filled"][f"{dim} again"]
        print(f"  head dim {dim:4d}{empty:10.0f}{filled_cache:10.1f}{again:10.2f}", flush=True)
    times = host_times(dtype)
    print("host time per warm call, microseconds")
    for name, us in times.items():
        print(f"  {name:46s}{us:8.1f}", flush=True)
    return {"memory": memory, "first_calls": calls, "host_us": times}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    print(json.dumps(time_first_calls(parser.parse_args().dtype)))
