"""What a call costs besides the kernel: host time, first call, cached load, memory.

Run by `bench.sh --host`; as a program of its own it is the child process that times first
calls with the cache folder it finds in CUFA2_CACHE_DIR, and prints them as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import to_torch, torch_call

from cufa2 import (
    FlashAttention2,
    attention,
    device,
    flash_attention,
    flash_attention_backward,
    testing,
)
from cufa2.problem import DTYPES

BATCHES, CALLS = 40, 50  # the launch queue holds about 1000 calls, so 50 never wait for the device
FIRST_CALL_DIMS = (32, 64, 96, 128, 192, 256)
# B, S, H, D of the memory measurements: about 500 MiB of arrays in bfloat16.
LONG = (1, 131072, 4, 128)
LONG_BACKWARD = (1, 65536, 4, 128)


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
    q, k, v, do = (filled((1, 64, 4, 64), dtype) for _ in range(4))
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    op = FlashAttention2(64, dtype, causal=True)
    gradients = partial(flash_attention_backward, do, q, k, v, out, lse, causal=True)
    times = {
        "flash_attention": queued(lambda: flash_attention(q, k, v, causal=True)),
        "flash_attention, out=": queued(lambda: flash_attention(q, k, v, causal=True, out=out)),
        "FlashAttention2.forward": queued(lambda: op.forward(q, k, v)),
        "FlashAttention2.forward, out= and lse_out=": queued(
            lambda: op.forward(q, k, v, out=out, lse_out=lse)
        ),
        "flash_attention_backward": queued(gradients),
        "flash_attention_backward, deterministic": queued(partial(gradients, deterministic=True)),
        "FlashAttention2.backward": queued(lambda: op.backward(do, q, k, v, out, lse)),
    }
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as sdpa
    except ImportError as e:
        print(f"note: no PyTorch beside these ({e})")
        return times
    tensors = [to_torch(x).transpose(1, 2) for x in (q, k, v, do)]
    x, y, z = (to_torch(t) for t in (q, k, v))
    causal = partial(sdpa, is_causal=True)
    for name, context in (
        ("torch sdpa", contextlib.nullcontext()),
        ("torch sdpa, FlashAttention-2", sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    ):
        try:
            with context:
                with torch.no_grad():
                    times[name] = queued(torch_call(causal, *tensors[:3]))
                times[f"{name}, backward"] = queued(torch_call(causal, *tensors))
        except RuntimeError as e:
            print(f"note: no {name} for {dtype} ({e})")
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
    """Bytes taken by a forward call at S = 131072 against those of its arrays."""

    def run(seqlen: int) -> list[Any]:
        q, k, v = (filled((LONG[0], seqlen, *LONG[2:]), dtype) for _ in range(3))
        return [q, k, v, *flash_attention(q, k, v, causal=True, return_lse=True)]

    return peak(run, LONG[1], 0)


def peak_memory_backward(dtype: str, deterministic: bool) -> dict[str, float]:
    """Likewise for a backward call at S = 65536: inputs, outputs, two numbers a query (of the type
    of lse) and, for 16-bit types unless deterministic, a float32 dq."""
    batch, longest, heads, dim = LONG_BACKWARD

    def run(seqlen: int) -> list[Any]:
        q, k, v, do = (filled((batch, seqlen, heads, dim), dtype) for _ in range(4))
        o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        grads = flash_attention_backward(
            do, q, k, v, o, lse, causal=True, deterministic=deterministic
        )
        return [q, k, v, do, o, lse, *grads]

    rows, itemsize = batch * longest * heads, testing.numpy_dtype(dtype).itemsize
    sums = 4 * dim if itemsize == 2 and not deterministic else 0
    return peak(run, longest, rows * (2 * max(itemsize, 4) + sums))


def give_back() -> None:
    """Return to the driver what CuPy's pool keeps for reuse."""
    cupy = device.cupy()
    cupy.cuda.runtime.deviceSynchronize()
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


def peak(run: Callable[[int], list[Any]], seqlen: int, work: int) -> dict[str, float]:
    """Bytes taken by run(seqlen) against those of the arrays that it returns and `work` more."""
    cupy = device.cupy()
    pool, runtime = cupy.get_default_memory_pool(), cupy.cuda.runtime
    attention.launcher.cache_clear()
    give_back()  # or small arrays would keep a large block, which the run then finds there
    run(256)  # loads the modules, with what local memory they need
    give_back()
    pool_before, free_before = pool.total_bytes(), runtime.memGetInfo()[0]
    arrays = run(seqlen)
    runtime.deviceSynchronize()
    # The pool gives nothing back by itself, so its size now is its peak.
    taken = pool.total_bytes() - pool_before
    card = free_before - runtime.memGetInfo()[0]
    expected = sum(x.nbytes for x in arrays) + work
    return {
        "seqlen": seqlen,
        "arrays_bytes": expected - work,
        "work_bytes": work,
        "pool_peak_bytes": taken,
        "card_bytes": card,
        "pool_excess_percent": 100 * (taken / expected - 1),
        "card_excess_percent": 100 * (card / expected - 1),
    }


def measure(dtype: str) -> dict[str, Any]:
    """All of the above, printed as it comes."""
    memory = {
        "forward": peak_memory(dtype),
        "backward": peak_memory_backward(dtype, False),
        "backward, deterministic": peak_memory_backward(dtype, True),
    }
    for name, m in memory.items():
        print(
            f"peak memory of the {name} at S = {m['seqlen']}: "
            f"arrays {m['arrays_bytes'] / 2**20:.1f} MiB, work {m['work_bytes'] / 2**20:.1f} MiB, "
            f"CuPy's pool {m['pool_excess_percent']:+.2f} %, "
            f"cudaMemGetInfo {m['card_excess_percent']:+.2f} %",
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
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    print(json.dumps(time_first_calls(parser.parse_args().dtype)))
