"""The contestants of the benchmarks: cufa2 and the attention kernels it is measured against.

Each prepares its calls from the same CuPy (B, S, H, D) inputs, in the layout it likes best and
outside any timing, and gives back rows of its results for the check. For the backward pass the
forward is part of the preparation: a call computes the gradients alone, into new arrays. PyTorch,
cuDNN and FlashAttention-3 are peers only: cufa2 needs none of them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from report import is_ours

from cufa2 import flash_attention, flash_attention_backward, plan
from cufa2.problem import Direction
from cufa2.testing import numpy_dtype

Inputs = tuple[Any, ...]  # q, k, v, and the output's gradient do for the backward pass
Call = Callable[[], Any]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
Timer = Callable[[Call], float]

# Where FlashAttention-3 may be: the wheel fa3-fwd renames its module and has no backward,
# upstream's build does neither.
FA3_MODULES = ("fa3_fwd_interface", "flash_attn_interface", "flash_attn_3.flash_attn_interface")
PLAIN_BYTES = 4 << 30  # scores that unfused code holds at a time; several such arrays live at once


@dataclass(frozen=True)
class Contestant:
    """One kernel in the race.

    prepare(sets, causal, timer): one zero-argument call per input set, each returning o, or a
        tuple that begins with o, or (dq, dk, dv) where a set has do. May give fewer calls where
        its own memory per set is far beyond every cache.
    rows(result, b, h): one head (S, D) of one of these, as a NumPy array of its dtype.
    context: entered around a batch of calls, so that choosing a back end costs no call anything.
    graph(calls): one call that replays a CUDA graph of all of them.
    """

    name: str
    prepare: Callable[[list[Inputs], bool, Timer], list[Call]]
    rows: Callable[[Any, int, int], np.ndarray]
    context: Context = field(default=contextlib.nullcontext)

    def graph(self, calls: list[Call]) -> Call:
        return cupy_graph(calls) if is_ours(self.name) else torch_graph(calls)


def cupy_graph(calls: list[Call]) -> Call:
    """Replays calls on CuPy's current stream."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
    return partial(replay, graph.launch, calls)


def torch_graph(calls: list[Call]) -> Call:
    """Replays calls on PyTorch's current stream; PyTorch keeps their results."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return partial(replay, graph.replay, calls)


def replay(launch: Call, calls: list[Call]) -> None:
    """Launch a graph of `calls`; these keep the arrays that it reads and writes."""
    launch()


def to_host(array: Any) -> np.ndarray:
    """A CuPy array as a NumPy array of the same dtype, moved as raw integers."""
    import cupy

    bits = array.view(f"u{array.itemsize}")
    host: np.ndarray = cupy.asnumpy(cupy.ascontiguousarray(bits))
    return host.view(array.dtype)


def to_torch(array: Any) -> Any:
    """The memory of a CuPy array as a torch tensor of the same dtype.

    Goes through integers, since not every version of both libraries exchanges bfloat16.
    """
    import torch

    return torch.from_dlpack(array.view(f"i{array.itemsize}")).view(
        getattr(torch, array.dtype.name)
    )


def torch_to_host(tensor: Any) -> np.ndarray:
    """A torch tensor as a NumPy array of the same dtype, moved as raw integers."""
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    host: np.ndarray = tensor.contiguous().view(bits).cpu().numpy()
    return host.view(numpy_dtype(str(tensor.dtype).removeprefix("torch.")))


def release() -> None:
    """Give the memory that both libraries keep for reuse back to the card: they share it."""
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


@contextlib.contextmanager
def forced(kernel: str | None) -> Iterator[None]:
    """Have every call use this row of the table of kernels, or refuse; None: the best, as ever."""
    with mock.patch.object(plan, "choose", partial(plan.choose, kernel=kernel)):
        yield


def cufa2_contestants(
    direction: Direction, options: dict[str, Any], kernels: Sequence[str] = ()
) -> list[Contestant]:
    """cufa2 on CuPy arrays; the backward pass both ways.

    options: more keyword arguments. kernels: rows that race as well, each by force, forward only.
    """
    import cupy

    def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
        array = cupy.empty(shape, dtype)
        array.data.memset_async(0xFF, array.nbytes)  # all ones is NaN in every float type
        return array

    def forward(sets: list[Inputs], causal: bool, timer: Timer) -> list[Call]:
        calls: list[Call] = []
        for q, k, v in sets:
            out = poisoned((*q.shape[:3], v.shape[3]), q.dtype)
            calls.append(partial(flash_attention, q, k, v, causal=causal, out=out, **options))
        return calls

    def backward(
        deterministic: bool, sets: list[Inputs], causal: bool, timer: Timer
    ) -> list[Call]:
        calls: list[Call] = []
        for q, k, v, do in sets:
            o, lse = flash_attention(q, k, v, causal=causal, return_lse=True, **options)
            call = partial(flash_attention_backward, do, q, k, v, o, lse, causal=causal)
            calls.append(partial(call, deterministic=deterministic, **options))
        spare = [poisoned(x.shape, x.dtype) for x in sets[0][:3]]
        spare.clear()  # the pool makes the first call's results of this memory
        return calls

    def rows(x: Any, b: int, h: int) -> np.ndarray:
        return to_host(x[b, :, h])

    if direction == "forward":
        rivals = [Contestant(f"cufa2-{n}", forward, rows, partial(forced, n)) for n in kernels]
        return [Contestant("cufa2", forward, rows), *rivals]
    return [
        Contestant("cufa2", partial(backward, False), rows),
        Contestant("cufa2-det", partial(backward, True), rows),
    ]


def torch_peers(direction: Direction, dtype: str) -> tuple[list[Contestant], list[str]]:
    """The peers for a dtype, which PyTorch and FA3 bring, and notes on what is missing."""
    try:
        import torch
        from torch.nn.attention import SDPBackend
    except (ImportError, OSError) as e:
        return [], [f"no peers: PyTorch cannot be imported ({e})"]
    if not torch.cuda.is_available():
        return [], ["no peers: this PyTorch sees no GPU"]
    torch.set_float32_matmul_precision("highest")  # no TF32
    if dtype == "float64":
        return [plain_peer()], []
    if dtype == "float32":
        return [sdpa_peer("torch-efficient", SDPBackend.EFFICIENT_ATTENTION)], []
    fa3, notes = fa3_peers(direction)
    fa2 = sdpa_peer("torch-fa2", SDPBackend.FLASH_ATTENTION)
    return [fa2, sdpa_peer("cudnn", SDPBackend.CUDNN_ATTENTION), *fa3], notes


def torch_call(attention: Callable[..., Any], q: Any, k: Any, v: Any, do: Any = None) -> Call:
    """A call of attention(q, k, v), or of its gradients alone if do is given.

    The graph is kept and nothing is accumulated: each call of the latter runs the backward
    kernels once, on the stream of the forward pass, and returns new (dq, dk, dv).
    """
    if do is None:
        return partial(attention, q, k, v)
    import torch

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    return partial(torch.autograd.grad, out, leaves, do, retain_graph=True)


def sdpa_peer(name: str, backend: Any) -> Contestant:
    """One back end of torch's scaled_dot_product_attention."""
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def prepare(sets: list[Inputs], causal: bool, timer: Timer) -> list[Call]:
        """(B, H, S, D) tensors in both storage orders; the faster order races."""
        gqa = sets[0][0].shape[2] != sets[0][1].shape[2]
        attention = partial(sdpa, is_causal=causal, enable_gqa=gqa)
        views = [[to_torch(x).transpose(1, 2) for x in arrays] for arrays in sets]
        packed = [[x.contiguous() for x in tensors] for tensors in views]
        with sdpa_kernel(backend):
            choices = [[torch_call(attention, *x) for x in order] for order in (views, packed)]
            return min(choices, key=lambda calls: timer(calls[0]))

    return Contestant(
        name, prepare, lambda x, b, h: torch_to_host(x[b, h]), partial(sdpa_kernel, backend)
    )


def fa3_peers(direction: Direction) -> tuple[list[Contestant], list[str]]:
    """FlashAttention-3, if a build with this pass can be imported and the card is a Hopper."""
    import torch

    modules = FA3_MODULES if direction == "forward" else FA3_MODULES[1:]
    fa3, name = import_first(modules, "flash_attn_func")
    if fa3 is None:
        tried = f"none of {', '.join(modules)} can be imported"
        hint = "PyPI: fa3-fwd" if direction == "forward" else "the wheel fa3-fwd has no backward"
        return [], [f"no FlashAttention-3 {direction}: {tried} ({hint})"]
    if torch.cuda.get_device_capability()[0] != 9:
        return [], ["no FlashAttention-3: it runs on Hopper cards only"]

    def prepare(sets: list[Inputs], causal: bool, timer: Timer) -> list[Call]:
        attention = partial(fa3, causal=causal)
        return [torch_call(attention, *(to_torch(x) for x in arrays)) for arrays in sets]

    peer = Contestant("fa3", prepare, lambda x, b, h: torch_to_host(x[b, :, h]))
    return [peer], [f"FlashAttention-3 is {name}"]


def plain_peer() -> Contestant:
    """Unfused PyTorch: two matrix products around a softmax; H = Hk.

    It works on as many heads at a time as keep their scores within PLAIN_BYTES. The backward pass
    keeps the probabilities of all heads, as autograd does.
    """
    import torch

    def attention(mask: Any, q: Any, k: Any, v: Any) -> Any:
        """softmax(mask(q k^T / sqrt(D))) v for q, k, v (heads, S, D), mask (Sq, Sk) or None."""
        s = torch.bmm(q * q.shape[2] ** -0.5, k.transpose(1, 2))
        if mask is not None:
            s.masked_fill_(mask, float("-inf"))
        return torch.bmm(torch.softmax(s, -1), v)

    def in_turn(parts: list[Call], heads: tuple[int, int]) -> tuple[Any, ...]:
        """Results (B, H, S, D) of calls that do some heads each."""
        done = [part() for part in parts]
        results = zip(*(x if isinstance(x, tuple) else (x,) for x in done), strict=True)
        joined = (x[0] if len(x) == 1 else torch.cat(x) for x in results)
        return tuple(x.unflatten(0, heads) for x in joined)

    def prepare(sets: list[Inputs], causal: bool, timer: Timer) -> list[Call]:
        (b, sq, h, _), sk = sets[0][0].shape, sets[0][1].shape[1]
        scores = sq * sk * sets[0][0].itemsize
        step = max(1, PLAIN_BYTES // scores)
        if step < b * h:
            print(f"note: torch-plain works on {step} of {b * h} heads at a time", flush=True)
        if len(sets[0]) == 4 and len(sets) * b * h * scores > torch.cuda.mem_get_info()[0] // 2:
            sets = sets[:1]
        mask = None
        if causal:
            device = to_torch(sets[0][0]).device
            mask = torch.ones(sq, sk, dtype=torch.bool, device=device).triu_(1 + sk - sq)
        calls: list[Call] = []
        for arrays in sets:
            flat = [to_torch(x).transpose(1, 2).flatten(0, 1).contiguous() for x in arrays]
            parts = zip(*(x.split(step) for x in flat), strict=True)
            calls.append(
                partial(in_turn, [torch_call(partial(attention, mask), *x) for x in parts], (b, h))
            )
        return calls

    return Contestant("torch-plain", prepare, lambda x, b, h: torch_to_host(x[b, h]))


def import_first(modules: tuple[str, ...], attribute: str) -> tuple[Any, str]:
    """The attribute of the first module that imports, with its name; (None, "") if none does."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), attribute), module
        except (ImportError, AttributeError, OSError, RuntimeError):
            continue  # absent, or built for another PyTorch: the caller says so
    return None, ""
