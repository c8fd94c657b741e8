"""FlashAttention2, the launcher class: one call from arrays in to arrays out.

arrays -> Problem -> (CPU) reference or (GPU) plan, launch -> arrays. The functions of `api` are
thin over it.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import arrays, launch, reference
from .arrays import ArrayView
from .launch import KernelRecord, Loaded, Scratch
from .placement import Place, hold, parse_device, place, spell, stream_key
from .problem import (
    Options,
    Problem,
    check_array,
    check_lengths,
    check_ranks,
    dtype_name,
    lse_type,
    make_problem,
)


class FlashAttention2:
    """Forward and backward attention for one head dim, dtype and set of options.

    head_dim, dtype: D and the dtype that arrays must have (a name, or any library's dtype).
    head_dim_v: Dv, default D.
    causal, window, softmax_scale, softcap, layout, precision: as in `flash_attention`.
    deterministic: as in `flash_attention_backward`.
    device: "cuda", "cuda:N" or N loads the forward kernel now (compiled the first time, for about
        a second); "cpu" refuses GPU arrays; None decides at the first call by where they lie.

    The launcher owns grids and work buffers: buffers are kept per stream and grown when needed.
    They hold tensors that a kernel cannot use in place and what `backward` adds up. The
    log-sum-exp that `forward` returns is a new array each call: callers keep it for `backward`.

    Raises ValueError, TypeError: an option or head dim is wrong. UnsupportedError: `device` is a
    GPU without a kernel for this. CompileError: NVRTC is missing or failed.
    """

    options: Options
    head_dim: int | None
    head_dim_v: int | None
    dtype: str | None
    _device: tuple[str, int] | None

    def __init__(
        self,
        head_dim: int,
        dtype: Any,
        *,
        head_dim_v: int | None = None,
        causal: bool | str = False,
        window: tuple[int | None, int | None] | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        layout: str = "bshd",
        precision: str | None = None,
        deterministic: bool = False,
        device: str | int | None = None,
    ) -> None:
        options = Options.make(
            causal=causal,
            window=window,
            softmax_scale=softmax_scale,
            softcap=softcap,
            layout=layout,
            precision=precision,
            deterministic=deterministic,
        )
        self._setup(options)
        name = dtype_name(dtype)
        dims = (head_dim, head_dim if head_dim_v is None else head_dim_v)
        for given, d in zip(("head_dim", "head_dim_v"), dims, strict=True):
            if not isinstance(d, (int, np.integer)) or isinstance(d, bool):
                raise TypeError(f"{given}={d!r} is not an integer")
        self.dtype, (self.head_dim, self.head_dim_v) = name, dims
        self._device = parse_device(device)
        head, head_v = (SimpleNamespace(shape=(1, 1, 1, d), dtype=name) for d in dims)
        problem = make_problem("forward", options, head, head, head_v)
        if self._device is not None and self._device[0] == "cuda":
            self._kernels(problem, self._device[1])

    @classmethod
    def for_options(cls, options: Options) -> FlashAttention2:
        """A launcher for any head dim and dtype; what `flash_attention` uses."""
        self = cls.__new__(cls)
        self._setup(options)
        return self

    def _setup(self, options: Options) -> None:
        self.options = options
        self.head_dim = self.head_dim_v = self.dtype = None
        self._device = None
        self._records: dict[tuple[str, int], KernelRecord] = {}
        self._scratch: dict[tuple[int, int, int], Scratch] = {}

    @property
    def kernels(self) -> tuple[KernelRecord, ...]:
        """The kernels loaded so far: name, registers, shared memory; empty on the CPU."""
        return tuple(self._records.values())

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any = None,
        *,
        seqlens_q: Any = None,
        seqlens_k: Any = None,
        lse_out: Any = None,
        stream: Any = None,
        want_lse: bool = True,
    ) -> tuple[Any, Any]:
        """Compute (o, lse); shapes, dtypes and errors as in `flash_attention`.

        want_lse=False returns None for lse and saves its memory.
        """
        inputs = {"q": q, "k": k, "v": v, "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
        at = place({**inputs, "out": out, "lse_out": lse_out}, stream)
        with at.current():
            call = self._read(at, **inputs)
            problem = self._problem("forward", call)
            qv = call["q"]
            o_shape = (*qv.shape[:-1], problem.head_dim_v)
            o, o_view = self._output("out", out, o_shape, problem.dtype, call, at)
            problem = launch.described(problem, o_view.canonical(self.options.layout))
            lse, lse_view = None, None
            if want_lse or lse_out is not None:
                lse_shape, lse_dtype = lse_type(problem, len(qv.shape))
                lse, lse_view = self._output("lse_out", lse_out, lse_shape, lse_dtype, call, at)
            if o_view.size or (lse_view is not None and lse_view.size):
                self._run_forward(problem, call, o_view, lse_view, at)
            o = arrays.export(o, qv, at) if out is None else out
            if lse is not None and lse_out is None:
                lse = arrays.export(lse, qv, at)
            return o, lse

    def backward(
        self,
        do: Any,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        *,
        seqlens_q: Any = None,
        seqlens_k: Any = None,
        dlse: Any = None,
        stream: Any = None,
    ) -> tuple[Any, Any, Any]:
        """Compute (dq, dk, dv); shapes, dtypes and errors as in `flash_attention_backward`.

        Work memory on a GPU, in bytes, R being Sq rounded up to a multiple of 64: 8 B H R (16 for
        float64), and for 16-bit inputs unless deterministic 4 B H R D for the float32 sums of dq
        (D as compiled: 32, 64, 96, 128, 192 or 256).
        """
        named = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "dlse": dlse}
        named |= {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
        at = place(named, stream)
        with at.current():
            call = self._read(at, **named)
            problem = self._problem("backward", call)
            qv = call["q"]
            o_shape = (*qv.shape[:-1], problem.head_dim_v)
            check_array("do", call["do"], o_shape, problem.dtype)
            check_array("o", call["o"], o_shape, problem.dtype)
            for name in ("lse", "dlse"):
                if call[name] is not None:
                    check_array(name, call[name], *lse_type(problem, len(qv.shape)))
            kernels = self._kernels(problem, at.index) if at.kind == "cuda" else []
            grads = [arrays.empty(call[n].shape, problem.dtype, qv, at) for n in ("q", "k", "v")]
            for n, g in zip("qkv", grads, strict=True):
                call[f"d{n}"] = arrays.view(f"d{n}", g, at)
            self._run_backward(problem, kernels, call, at)
            dq, dk, dv = (arrays.export(g, qv, at) for g in grads)
            return dq, dk, dv

    def _read(self, at: Place, **named: Any) -> dict[str, Any]:
        """Views of all arrays given, in the caller's shapes; None stays None."""
        if self._device is not None and self._device != (at.kind, at.index):
            mine, theirs = spell(self._device), spell((at.kind, at.index))
            raise ValueError(f"this launcher is for {mine}; the arrays are on {theirs}")
        views = {n: None if a is None else arrays.view(n, a, at) for n, a in named.items()}
        check_ranks(self.options.layout, *(views[n] for n in ("q", "k", "v")))
        return views

    def _problem(self, direction: Any, call: dict[str, Any]) -> Problem:
        q, k, v = (call[n].canonical(self.options.layout) for n in ("q", "k", "v"))
        lens = (call["seqlens_q"], call["seqlens_k"])
        problem = launch.described(make_problem(direction, self.options, q, k, v, *lens), q, k, v)
        mine = (self.head_dim, self.head_dim_v)
        if self.head_dim is not None and mine != (problem.head_dim, problem.head_dim_v):
            raise ValueError(
                f"this launcher is for head dims {mine}, the arrays have "
                f"{(problem.head_dim, problem.head_dim_v)}"
            )
        if self.dtype not in (None, problem.dtype):
            raise TypeError(f"this launcher is for {self.dtype}, the arrays are {problem.dtype}")
        for name, longest in (("seqlens_q", problem.seqlen_q), ("seqlens_k", problem.seqlen_k)):
            if call[name] is not None and call[name].device[0] == "cpu":
                check_lengths(name, call[name].numpy().tolist(), longest)
        return problem

    def _output(
        self, name: str, given: Any, shape: Any, dtype: str, call: dict[str, Any], at: Place
    ) -> tuple[Any, ArrayView]:
        if given is None:
            array = arrays.empty(shape, dtype, call["q"], at)
            return array, arrays.view(name, array, at)
        view = arrays.view(name, given, at)
        check_array(name, view, shape, dtype)
        arrays.check_writable(name, view, call)
        call[name] = view  # lse_out is checked against out as well
        return given, view

    def _host(self, call: dict[str, Any]) -> dict[str, Any]:
        """(B,S,H,D), (B,H,S) and (B,) NumPy arrays over the caller's memory."""
        host = {}
        for name, view in call.items():
            if view is None:
                continue
            if name in ("lse", "dlse", "lse_out") and len(view.shape) == 2:
                host[name] = view.numpy()[:, None, :]
            elif len(view.shape) >= 3 and name not in ("lse", "dlse", "lse_out"):
                host[name] = view.canonical(self.options.layout).numpy()
            else:
                host[name] = view.numpy()
        return host

    def _run_forward(
        self,
        problem: Problem,
        call: dict[str, Any],
        o: ArrayView,
        lse: ArrayView | None,
        at: Place,
    ) -> None:
        tensors, lens = ("q", "k", "v", "o"), ("seqlens_q", "seqlens_k")
        if at.kind == "cpu":
            host = self._host({**call, "out": o, "lse_out": lse})
            q, k, v, out = (host[n] for n in ("q", "k", "v", "out"))
            reference.forward(problem, q, k, v, out, *(host.get(n) for n in ("lse_out", *lens)))
            return
        (kernel,) = self._kernels(problem, at.index)
        views = self._launch_views({**call, "o": o, "lse": lse}, tensors, ("lse", *lens))
        launch.forward(kernel, problem, views, at, self._work(at))
        self._hold(call, at)

    def _run_backward(
        self, problem: Problem, kernels: list[Loaded], call: dict[str, Any], at: Place
    ) -> None:
        rows = ("dlse", "seqlens_q", "seqlens_k")
        if at.kind == "cpu":
            host = self._host(call)
            given = (host[n] for n in ("do", "q", "k", "v", "o", "lse", "dq", "dk", "dv"))
            reference.backward(problem, *given, *(host.get(n) for n in rows))
            return
        tensors = ("q", "k", "v", "o", "grad_o", "dq", "dk", "dv")
        views = self._launch_views({**call, "grad_o": call["do"]}, tensors, ("lse", *rows))
        launch.backward(kernels, problem, views, at, self._work(at))
        self._hold(call, at)

    def _launch_views(
        self, call: dict[str, Any], tensors: tuple[str, ...], rows: tuple[str, ...]
    ) -> dict[str, ArrayView | None]:
        """The tensors as (B, S, H, D), the others as they are."""
        views = {n: call[n].canonical(self.options.layout) for n in tensors}
        return views | {n: call[n] for n in rows}

    def _work(self, at: Place) -> Scratch:
        return self._scratch.setdefault((at.index, *stream_key(at.stream)), Scratch())

    def _hold(self, call: dict[str, Any], at: Place) -> None:
        """Keep the arrays that no allocator ties to the stream until it has used them."""
        apart = [v.owner for v in call.values() if v is not None and v.library in at.apart]
        hold(apart, at.stream)

    def _kernels(self, problem: Problem, index: int) -> list[Loaded]:
        loaded = launch.load_all(problem, index)
        for kernel in loaded:
            self._records[kernel.record.name, index] = kernel.record
        return loaded


@functools.lru_cache(maxsize=256)
def launcher(options: Options) -> FlashAttention2:
    """The shared launcher of a set of options."""
    return FlashAttention2.for_options(options)
