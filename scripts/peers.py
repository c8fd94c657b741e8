"""The contestants of the benchmarks: cufa2 and the attention kernels it is measured against.

Each prepares its calls from the same CuPy (B, S, H, D) inputs, in the layout it likes best and
outside any timing, and gives back rows of its result for the check. PyTorch, cuDNN and
FlashAttention-3 are peers only: cufa2 needs none of them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cufa2 import flash_attention
from cufa2.testing import numpy_dtype

Inputs = tuple[Any, Any, Any]
Call = Callable[[], Any]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
Timer = Callable[[Call], float]

# Where FlashAttention-3 may be: the wheel fa3-fwd renames its module, upstream's build does not.
FA3_MODULES = ("fa3_fwd_interface", "flash_attn_interface", "flash_attn_3.flash_attn_interface")


@dataclass(frozen=True)
class Contestant:
    """One kernel in the race.

    prepare(sets, causal, timer): one zero-argument call per input set, each returning its output.
    head(output, b, h): that output's rows (S, D) of one head as a NumPy array of its dtype.
    context: entered around a batch of calls, so that choosing a back end costs no call anything.
    """

    name: str
    prepare: Callable[[list[Inputs], bool, Timer], list[Call]]
    head: Callable[[Any, int, int], np.ndarray]
    context: Context = field(default=contextlib.nullcontext)


def to_host(array: Any) -> np.ndarray:
    """A CuPy array of a 16-bit dtype as a NumPy array of that dtype, moved as raw integers."""
    import cupy

    host: np.ndarray = cupy.asnumpy(cupy.ascontiguousarray(array.view(np.uint16)))
    return host.view(array.dtype)


def to_torch(array: Any) -> Any:
    """The memory of a CuPy array of a 16-bit dtype as a torch tensor of that dtype.

    Goes through int16, since not every version of both libraries exchanges bfloat16.
    """
    import torch

    return torch.from_dlpack(array.view(np.int16)).view(getattr(torch, array.dtype.name))


def cufa2_contestant() -> Contestant:
    """flash_attention on CuPy arrays, with out= poisoned by NaN before its first call."""
    import cupy

    def prepare(sets: list[Inputs], causal: bool, timer: Timer) -> list[Call]:
        calls: list[Call] = []
        for q, k, v in sets:
            out = cupy.empty((*q.shape[:3], v.shape[3]), q.dtype)
            out.data.memset_async(0xFF, out.nbytes)  # all ones is NaN in every float type
            calls.append(partial(flash_attention, q, k, v, causal=causal, out=out))
        return calls

    return Contestant("cufa2", prepare, lambda o, b, h: to_host(o[b, :, h]))


def torch_peers() -> tuple[list[Contestant], list[str]]:
    """Peers that PyTorch brings and FA3, and a note for each that is missing."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as sdpa
    except (ImportError, OSError) as e:
        return [], [f"no peers: PyTorch cannot be imported ({e})"]
    if not torch.cuda.is_available():
        return [], ["no peers: this PyTorch sees no GPU"]

    def head(o: Any, b: int, h: int) -> np.ndarray:
        rows: np.ndarray = o[b, h].contiguous().view(torch.int16).cpu().numpy()
        return rows.view(numpy_dtype(str(o.dtype).removeprefix("torch.")))

    def sdpa_peer(name: str, backend: Any) -> Contestant:
        def context() -> contextlib.AbstractContextManager[Any]:
            stack = contextlib.ExitStack()
            stack.enter_context(sdpa_kernel(backend))
            stack.enter_context(torch.no_grad())
            return stack

        def prepare(sets: list[Inputs], causal: bool, timer: Timer) -> list[Call]:
            """(B, H, S, D) tensors in both storage orders; the faster order races."""
            views = [[to_torch(x).transpose(1, 2) for x in qkv] for qkv in sets]
            packed = [[x.contiguous() for x in qkv] for qkv in views]
            gqa = sets[0][0].shape[2] != sets[0][1].shape[2]

            def calls(tensors: list[list[Any]]) -> list[Call]:
                return [partial(sdpa, *qkv, is_causal=causal, enable_gqa=gqa) for qkv in tensors]

            with context():
                return min((calls(views), calls(packed)), key=lambda c: timer(c[0]))

        return Contestant(name, prepare, head, context)

    peers = [
        sdpa_peer("torch-fa2", SDPBackend.FLASH_ATTENTION),
        sdpa_peer("cudnn", SDPBackend.CUDNN_ATTENTION),
    ]
    notes = []
    fa3, name = import_first(FA3_MODULES, "flash_attn_func")
    if fa3 is None:
        notes.append("no FlashAttention-3: none of its modules is importable (PyPI: fa3-fwd)")
    elif torch.cuda.get_device_capability()[0] != 9:
        notes.append("no FlashAttention-3: it runs on Hopper cards only")
    else:
        notes.append(f"FlashAttention-3 is {name}")

        def prepare(sets: list[Inputs], causal: bool, timer: Timer) -> list[Call]:
            tensors = [[to_torch(x) for x in qkv] for qkv in sets]
            return [partial(fa3, *qkv, causal=causal) for qkv in tensors]

        def bshd_head(o: Any, b: int, h: int) -> np.ndarray:
            return head((o[0] if isinstance(o, tuple) else o).transpose(1, 2), b, h)

        peers.append(Contestant("fa3", prepare, bshd_head, torch.no_grad))
    return peers, notes


def import_first(modules: tuple[str, ...], attribute: str) -> tuple[Any, str]:
    """The attribute of the first module that imports, with its name; (None, "") if none does."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), attribute), module
        except (ImportError, AttributeError, OSError, RuntimeError):
            continue  # absent, or built for another PyTorch: the caller says so
    return None, ""
