"""The CUDA backward around its kernels: layouts, libraries, streams, graphs, memory, errors."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import gpu_oracle as oracle
import numpy as np
import pytest
from gpu_oracle import (
    IN_PLACE,
    LAID,
    MODES,
    assert_gradients,
    assert_same,
    assert_same_gradients,
    backward,
    backward_checked,
    bits,
    check_backward,
    dense_backward,
    expected_gradients,
    fill_nan,
    forward,
    host,
    laid,
    lengths,
    normal,
    normal_lse,
    problem,
)
from producers import Producer
from test_gpu_arrays import same_bits, torch_host, torch_of
from test_gpu_backward import DTYPES, HALVES, ROWS
from test_gpu_forward import give_back_memory, opts

from cufa2 import (
    FlashAttention2,
    UnsupportedError,
    arrays,
    attention,
    flash_attention,
    flash_attention_backward,
    launch,
)
from cufa2.problem import DTYPES as ALL_DTYPES
from cufa2.testing import assert_accurate, numpy_dtype

pytestmark = pytest.mark.gpu

# Memory layouts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 66])
def test_every_tensor_has_its_own_strides(cp: Any, dim: int, dtype: str) -> None:
    do, q, k, v = problem(2, 70, 90, 4, 2, dim, dim, dtype)
    options = opts(causal=True)
    o, lse = forward(q, k, v, **options)
    dlse = normal_lse(q, 3)
    tensors = (do, q, k, v, o, lse, dlse)
    names = ("do", "q", "k", "v", "o", "lse", "dlse")
    expected = expected_gradients(do, q, k, v, dlse=dlse, **options)
    first = backward(do, q, k, v, (o, lse), dlse=dlse, deterministic=True, **options)
    assert_gradients(first, expected, "contiguous")
    kinds = list(LAID)
    for n in range(2 * len(kinds)):
        step = 1 + n // len(kinds)
        chosen = [kinds[(n + step * t) % len(kinds)] for t in range(7)]
        a, b, c, d, e, f, g = (laid(x, kind) for x, kind in zip(tensors, chosen, strict=True))
        grads = backward(a, b, c, d, (e, f), dlse=g, deterministic=True, **options)
        assert_same_gradients(grads, first, f"{chosen}")
        grads = backward(a, b, c, d, (e, f), dlse=g, **options)
        assert_gradients(grads, expected, f"{chosen}, default")
    for kind in kinds:
        moved: Any = [laid(x, kind) for x in tensors]
        a, b, c, d, e, f, g = moved
        before = arrays.copy_count()
        grads = backward(a, b, c, d, (e, f), dlse=g, deterministic=True, **options)
        copies = arrays.copy_count() - before
        assert_same_gradients(grads, first, f"all {kind}")
        if dim % 8 == 0:
            assert (copies == 0) == (kind in IN_PLACE), f"all {kind}: {copies} copies"
        for x, y, name in zip(moved, tensors, names, strict=True):
            assert_same(x, y, f"{name} after the call")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_that_is_one_number(cp: Any, dtype: str) -> None:
    """do with all strides 0, as the gradient of a sum is."""
    _, q, k, v = problem(2, 70, 90, 4, 2, 64, 64, dtype)
    for shape in ((), (64,), (1, 70, 1, 1)):
        few = normal((1, *shape), dtype, 5)[0]
        do = cp.broadcast_to(bits(few), q.shape).view(q.dtype)
        assert 0 in do.strides
        full = oracle.to_device(host(do))
        made = forward(q, k, v)
        grads = backward(do, q, k, v, made, deterministic=True)
        assert_same_gradients(
            grads, backward(full, q, k, v, made, deterministic=True), f"do {shape}"
        )
        check_backward(full, q, k, v, backward(do, q, k, v, made), f"do {shape}")


# Libraries


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(cp: Any, torch: Any, dtype: str) -> None:
    do, q, k, v = problem(2, 70, 70, 4, 2, 64, 64, dtype)
    made = forward(q, k, v, causal=True)
    dlse = normal_lse(q, 2)
    call = opts(causal=True, deterministic=True)
    expected = backward(do, q, k, v, made, dlse=dlse, **call)
    a, b, c, d, e, f, g = (torch_of(torch, x) for x in (do, q, k, v, *made, dlse))
    grads = flash_attention_backward(a, b, c, d, e, f, dlse=g, **call)
    a, b, c, d, e = (x.transpose(1, 2) for x in (a, b, c, d, e))
    other = flash_attention_backward(a, b, c, d, e, f, dlse=g, layout="bhsd", **call)
    for name, x, y, z in zip(("dq", "dk", "dv"), grads, other, expected, strict=True):
        assert isinstance(x, torch.Tensor), f"{name}: got {type(x)}"
        assert x.is_cuda, f"{name}: result on {x.device}"
        assert x.dtype is getattr(torch, dtype), f"{name}: got {x.dtype}"
        same_bits(torch_host(torch, x), z, name)
        same_bits(torch_host(torch, y.transpose(1, 2).contiguous()), z, f"{name}, bhsd")


def test_torch_autograd_agrees(cp: Any, torch: Any) -> None:
    """The formulas of the oracle, and so ours, are what autograd makes of torch's attention."""
    do, q, k, v = problem(2, 90, 90, 4, 2, 64, 64, HALVES[-1])
    leaves = [torch.from_numpy(host(x).astype(np.float64)).cuda() for x in (q, k, v)]
    for x in leaves:
        x.requires_grad_()
    tq, tk, tv = (x.transpose(1, 2) for x in leaves)
    wide = (x.repeat_interleave(2, dim=1) for x in (tk, tv))
    o = torch.nn.functional.scaled_dot_product_attention(tq, *wide, is_causal=True)
    o.backward(torch.from_numpy(host(do).astype(np.float64)).cuda().transpose(1, 2))
    exact = dense_backward(do, q, k, v, causal=True)
    for name, x, y in zip(("dq", "dk", "dv"), leaves, exact, strict=True):
        np.testing.assert_allclose(y, x.grad.cpu().numpy(), rtol=0, atol=1e-12, err_msg=name)
    backward_checked(do, q, k, v, "as autograd", causal=True)


def test_torch_needs_no_graph(cp: Any, torch: Any) -> None:
    do, q, k, v = problem(1, 20, 20, 2, 2, 64, 64, DTYPES[0])
    args = [torch_of(torch, x) for x in (do, q, k, v, *forward(q, k, v))]
    for n, name in enumerate(("do", "q", "k", "v", "o", "lse")):
        args[n].requires_grad_()
        with pytest.raises(ValueError, match=rf"{name} requires grad.*{name}\.detach\(\)"):
            flash_attention_backward(*args)
        args[n].requires_grad_(False)


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_jax(cp: Any, jax: Any, dtype: str) -> None:
    do, q, k, v = problem(2, 70, 90, 4, 2, 64, 64, dtype)
    made, call = forward(q, k, v, causal=True), opts(causal=True, deterministic=True)
    expected = backward(do, q, k, v, made, **call)
    a, b, c, d, e, f = (jax.numpy.asarray(host(x)) for x in (do, q, k, v, *made))
    grads = flash_attention_backward(a, b, c, d, e, f, **call)
    for name, x, y in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert isinstance(x, jax.Array), f"{name}: got {type(x)}"
        assert next(iter(x.devices())).platform == "gpu", f"{name}: result on {x.devices()}"
        assert x.dtype.name == dtype, f"{name}: got {x.dtype}"
        same_bits(np.asarray(x).view(f"u{y.itemsize}"), y, name)
    again = flash_attention_backward(a, *grads, e, f, **call)  # results go in again
    assert len(again) == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_producers_and_flat_arrays(cp: Any, dtype: str) -> None:
    do, q, k, v = problem(6, 70, 90, 1, 1, 64, 64, dtype)
    made, dlse = forward(q, k, v), normal_lse(q, 1)
    expected = backward(do, q, k, v, made, dlse=dlse, deterministic=True)
    a, b, c, d, e = (x[:, :, 0] for x in (do, q, k, v, made[0]))
    f, g = (x[:, 0] for x in (made[1], dlse))
    args = [Producer(x, readonly=True) for x in (a, b, c, d, e, f)]
    launcher = FlashAttention2(64, dtype, deterministic=True, device="cuda")
    for grads in (
        flash_attention_backward(*args, dlse=Producer(g), deterministic=True),
        launcher.backward(a, b, c, d, e, f, dlse=g),
    ):
        assert all(isinstance(x, cp.ndarray) for x in grads)
        assert_same_gradients([x[:, :, None] for x in grads], expected, "flat arrays")
    gc.collect()
    assert all(x.exports == x.deleted for x in args), "a capsule's deleter was not called"


# Streams


def test_work_is_queued_on_the_stream_asked_for(cp: Any) -> None:
    do, q, k, v = problem(2, 150, 200, 4, 2, 64, 64, HALVES[-1])
    made = forward(q, k, v)
    expected = {}
    for mode in MODES:
        expected[mode] = backward(do, q, k, v, made, deterministic=mode)
        check_backward(do, q, k, v, expected[mode], f"deterministic={mode}")
    late = [oracle.copy(x) for x in (do, q)]
    args = [*late, k, v, *made]
    stream = cp.cuda.Stream(non_blocking=True)
    for mode, spelled in itertools.product(MODES, (stream, stream.ptr, None)):
        for work in (0, 0, 100):  # the first two fill CuPy's pool and the work buffers
            fill_nan(*late)
            cp.cuda.Device().synchronize()
            with stream:
                oracle.spin(work)
                for x, y in zip(late, (do, q), strict=True):
                    bits(x)[...] = bits(y)
                if spelled is None:
                    start = time.perf_counter()
                    grads = flash_attention_backward(*args, deterministic=mode)
                    took = time.perf_counter() - start
            if spelled is not None:
                start = time.perf_counter()
                grads = flash_attention_backward(*args, deterministic=mode, stream=spelled)
                took = time.perf_counter() - start
            if work:
                assert not stream.done, f"{spelled}: the call waited for its stream"
                assert took < 0.05, f"{spelled}: the call took {took:.3f} s behind 0.1 s of work"
            stream.synchronize()
            if mode:
                assert_same_gradients(grads, expected[mode], f"stream={spelled!r}")
            else:
                check_backward(do, q, k, v, grads, f"stream={spelled!r}")


@pytest.mark.parametrize("dtype", [HALVES[-1], "float32"])
@pytest.mark.parametrize("dim", [64, 66])
@pytest.mark.parametrize("deterministic", MODES)
def test_case_14_graph_capture(cp: Any, deterministic: bool, dim: int, dtype: str) -> None:
    """Forward and backward in one graph; replays read what the inputs then hold."""
    tensors: Any = problem(2, 150, 200, 4, 2, dim, dim, dtype)
    do, q, k, v = tensors
    lens = lengths(200, 77)
    o, lse = oracle.empty(q.shape, dtype), oracle.empty((2, 4, 150), "float32")
    launcher = FlashAttention2(dim, dtype, causal=True, deterministic=deterministic)

    def step() -> Any:
        launcher.forward(q, k, v, seqlens_k=lens, out=o, lse_out=lse)
        return launcher.backward(do, q, k, v, o, lse, seqlens_k=lens)

    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        for _ in range(2):
            step()  # warm up: compile, load, work buffers; the results go back to the pool
        stream.synchronize()
        stream.begin_capture()
        try:
            grads = step()
        finally:
            graph = stream.end_capture()
    for seed, real in itertools.product((5, 6), (200, 3)):
        for x, y in zip(tensors, problem(2, 150, 200, 4, 2, dim, dim, dtype, seed), strict=True):
            bits(x)[...] = bits(y)
        lens[1] = real
        fill_nan(o, lse, *grads)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        what = f"replay {seed}, {real} keys"
        check_backward(do, q, k, v, grads, what, seqlens_k=lens, causal=True)


# Memory


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize(
    ("dtype", "heads"), [(HALVES[-1], 1), (HALVES[-1], 2), ("float32", 1), ("float64", 1)]
)
def test_memory_of_a_long_call(cp: Any, dtype: str, heads: int, deterministic: bool) -> None:
    """Results, two numbers of lse's type for each row, and by default for 16-bit inputs a float32
    dq: nothing else."""
    from cupy.cuda import memory_hook

    class Peak(memory_hook.MemoryHook):  # type: ignore[misc]
        name = "Peak"
        live: dict[int, int] = {}  # noqa: RUF012
        top = 0

        def malloc_postprocess(self, **kwargs: Any) -> None:
            self.live[kwargs["mem_ptr"]] = kwargs["mem_size"]
            self.top = max(self.top, sum(self.live.values()))

        def free_postprocess(self, **kwargs: Any) -> None:
            self.live.pop(kwargs["mem_ptr"], None)

    s, d = 65536, 128
    do, q, k, v = problem(1, s, s, heads, heads, d, d, dtype)
    call = opts(causal=True, deterministic=deterministic)
    few = [x[:, :64] for x in (do, q, k, v)]
    backward(*few, **call)  # everything is loaded
    made = forward(q, k, v, causal=True)
    attention.launcher.cache_clear()
    give_back_memory(cp)
    pool = cp.get_default_memory_pool()
    before, free = pool.total_bytes(), cp.cuda.runtime.memGetInfo()[0]
    with Peak() as peak:
        grads = flash_attention_backward(do, q, k, v, *made, **call)
        cp.cuda.Device().synchronize()
    rows = heads * -(-s // 64) * 64
    formula = sum(x.nbytes for x in (q, k, v)) + 2 * made[1].itemsize * rows
    if dtype in HALVES and not deterministic:
        formula += 4 * rows * d
    assert 0.99 * formula < peak.top < 1.01 * formula, f"{peak.top} bytes, {formula} documented"
    grown = pool.total_bytes() - before
    assert grown <= 1.01 * formula, f"CuPy's pool grew by {grown} bytes, {formula} documented"
    taken = free - cp.cuda.runtime.memGetInfo()[0]
    assert taken <= 1.01 * formula + (4 << 20), f"the card lost {taken} bytes"
    # The first rows of a causal problem are a problem of their own.
    part = [x[:, :300] for x in (do, q, k, v)]
    exact, plain = (dense_backward(*part, causal=True, low=low)[0] for low in (False, True))
    assert_accurate(host(grads[0][:, :300]), exact, plain, f"dq of the first rows, S={s}")


def test_case_15_a_thousand_steps_keep_nothing(cp: Any) -> None:
    pool = cp.get_default_memory_pool()
    plain = problem(1, 40, 50, 2, 1, 64, 64, HALVES[-1])
    odd = problem(1, 40, 50, 2, 1, 66, 66, HALVES[0])
    lens = lengths(33)
    marks = []
    gc.collect()
    pool.free_all_blocks()  # what earlier tests have left there
    for n in range(1000):
        for do, q, k, v in (plain, odd):
            options = opts(causal=bool(n % 3), seqlens_k=lens)
            o, lse = flash_attention(q, k, v, return_lse=True, **options)
            mode = opts(deterministic=bool(n % 2))
            flash_attention_backward(do, q, k, v, o, lse, dlse=lse, **mode, **options)
        flash_attention_backward(do[:, :0], q[:, :0], k, v, o[:, :0], lse[..., :0])
        with pytest.raises(ValueError, match="lse has shape"):
            flash_attention_backward(do, q, k, v, o, lse[..., :7])
        if n % 100 == 99:
            cp.cuda.Device().synchronize()
            gc.collect()
            free = cp.cuda.runtime.memGetInfo()[0]
            marks.append((pool.used_bytes(), pool.total_bytes(), free, len(gc.get_objects())))
    early, late = marks[2], marks[-1]
    assert late[0] <= early[0], f"CuPy's pool holds {late[0] - early[0]} bytes more: {marks}"
    assert late[1] <= early[1], f"CuPy's pool grew by {late[1] - early[1]} bytes: {marks}"
    assert early[2] - late[2] < 8 << 20, f"the card has {early[2] - late[2]} bytes less: {marks}"
    assert late[3] - early[3] < 500, f"{late[3] - early[3]} Python objects more: {marks}"


# Errors


def test_what_no_kernel_does_is_refused(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dtype and head dim beyond the table, before anything is loaded or allocated."""

    def launched(*args: Any) -> Any:
        raise AssertionError("a kernel was loaded for a call that is refused")

    monkeypatch.setattr(launch, "load", launched)
    refused = 0
    for dtype, (d, dv) in itertools.product(ALL_DTYPES, ((64, 64), (64, 257), (264, 64))):
        if any(dtype in row.dtypes and max(d, dv) <= row.max_head_dim for row in ROWS):
            continue
        do, q, k, v = problem(1, 20, 20, 2, 2, d, dv, dtype)
        o, lse = oracle.copy(do), normal_lse(q, 0)
        before = cp.get_default_memory_pool().used_bytes()
        for call in (flash_attention_backward, FlashAttention2(d, dtype, head_dim_v=dv).backward):
            with pytest.raises(UnsupportedError, match=f"(?s)backward.*{dtype}"):
                call(do, q, k, v, o, lse)
        assert cp.get_default_memory_pool().used_bytes() == before, "a refused call keeps memory"
        refused += 1
    assert refused >= 2, "the table has no end"


def test_a_wrong_call_changes_nothing(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = HALVES[0]
    do, q, k, v = problem(1, 20, 30, 2, 1, 64, 64, dtype)
    made, dlse = forward(q, k, v), normal_lse(q, 1)
    expected = backward(do, q, k, v, made, dlse=dlse, deterministic=True)
    o, lse = made
    good: dict[str, Any] = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    before = {name: oracle.copy(x) for name, x in good.items()}
    other = "float16" if dtype != "float16" else "bfloat16"
    foreign = oracle.to_device(host(q).astype(numpy_dtype(other)))
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"do": do[:, :7]}, ValueError, "do has shape"),
        ({"do": do[..., :32]}, ValueError, "do has shape"),
        ({"do": foreign}, TypeError, "do is"),
        ({"do": host(do)}, ValueError, "one device"),
        ({"o": made[0][:, :7]}, ValueError, "o has shape"),
        ({"o": foreign}, TypeError, "o is"),
        ({"lse": made[1][:, :1]}, ValueError, "lse has shape"),
        ({"lse": made[1].astype(np.float64)}, TypeError, "lse is"),
        ({"dlse": dlse[..., :7]}, ValueError, "dlse has shape"),
        ({"dlse": dlse.astype(np.float64)}, TypeError, "dlse is"),
        ({"dlse": host(dlse)}, ValueError, "one device"),
        ({"k": k[:, :7]}, ValueError, "rows"),
        ({"q": foreign}, TypeError, "one dtype"),
        ({"seqlens_q": lengths(20, 20)}, ValueError, "seqlens_q has shape"),
        ({"seqlens_k": lengths(30).astype(np.int64)}, TypeError, "seqlens_k has dtype int64"),
        ({"do": None}, TypeError, "do"),
    ]

    def launched(*args: Any) -> Any:
        raise AssertionError("a kernel was loaded for a call that is wrong")

    with monkeypatch.context() as patch:
        patch.setattr(launch, "load", launched)
        for change, error, match in wrong:
            with pytest.raises(error, match=match):
                flash_attention_backward(**{**good, **change})
    for name, x in good.items():
        assert_same(x, before[name], f"{name} after wrong calls")
    grads = backward(do, q, k, v, made, dlse=dlse, deterministic=True)
    assert_same_gradients(grads, expected, "a good call after wrong ones")
