"""Arrays of any library, lying anyhow, in and out of the CUDA forward."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import gpu_oracle as oracle
import numpy as np
import pytest
from gpu_oracle import (
    DTYPES,
    assert_same,
    bits,
    check,
    fill_nan,
    host,
    inputs,
    lengths,
    normal,
)
from producers import OldProducer, Producer

from cufa2 import (
    FlashAttention2,
    UnsupportedError,
    arrays,
    flash_attention,
)
from cufa2.testing import numpy_dtype

pytestmark = pytest.mark.gpu

SENTINEL = 0x3A5B  # an ordinary number in float16 and in bfloat16


def opts(**options: Any) -> dict[str, Any]:
    return options


def plain(x: Any) -> Any:
    return x


def expect(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """(o, lse) of contiguous CuPy copies; checked."""
    q, k, v = (oracle.to_device(host(x)) for x in (q, k, v))
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    check(o, lse, q, k, v, f"contiguous copies, {options}", **options)
    return o, lse


def portable() -> Any:
    """For arrays that no tensor map describes, as their strides are not positive: what they give
    is compared to the bit with results of the same kernel."""
    return oracle.preferring("fwd_sm80")


# Libraries


def torch_of(torch: Any, x: Any) -> Any:
    """A torch tensor on the GPU with the bits of a CuPy array."""
    tensor = torch.from_numpy(host(x).view(np.int16)).cuda()
    return tensor.view(getattr(torch, x.dtype.name))


def torch_host(torch: Any, tensor: Any) -> Any:
    """A torch tensor's bits on the host."""
    whole = torch.int16 if tensor.element_size() == 2 else torch.int32
    return tensor.view(whole).cpu().numpy().view(f"u{tensor.element_size()}")


def same_bits(x: Any, expected: Any, name: str) -> None:
    """x: unsigned integers on the host; expected: a CuPy array."""
    y = bits(expected).get()
    assert x.shape == y.shape, f"{name}: shapes {x.shape} and {y.shape}"
    assert (x == y).all(), f"{name}: {np.count_nonzero(x != y)} of {x.size} values differ"


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(cp: Any, torch: Any, dtype: str) -> None:
    q, k, v = inputs(2, 70, 90, 4, 2, 64, 64, dtype)
    o, lse = expect(q, k, v, causal=True)
    tq, tk, tv = (torch_of(torch, x) for x in (q, k, v))
    got, got_lse = flash_attention(tq, tk, tv, causal=True, return_lse=True)
    for x, name in ((got, dtype), (got_lse, "float32")):
        assert isinstance(x, torch.Tensor), f"{name}: got {type(x)}"
        assert x.is_cuda, f"{name}: result on {x.device}"
        assert x.dtype is getattr(torch, name), f"{name}: got {x.dtype}"
    same_bits(torch_host(torch, got), o, "o")
    same_bits(torch_host(torch, got_lse), lse, "lse")
    swapped = [x.transpose(1, 2) for x in (tq, tk, tv)]
    out = torch.empty_like(tq).transpose(1, 2)
    back = flash_attention(swapped[0], swapped[1], swapped[2], causal=True, layout="bhsd", out=out)
    assert back is out
    same_bits(torch_host(torch, out.transpose(1, 2).contiguous()), o, "out=, bhsd")
    short = torch.tensor([70, 3], dtype=torch.int32, device="cuda")
    got = flash_attention(tq, tk, tv, seqlens_q=short)
    same_bits(torch_host(torch, got), expect(q, k, v, seqlens_q=lengths(70, 3))[0], "seqlens")


def test_torch_autograd_is_refused_not_ignored(cp: Any, torch: Any) -> None:
    q, k, v = (torch_of(torch, x) for x in inputs(1, 20, 20, 2, 2, 64, 64, "bfloat16"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        x.requires_grad_()
        with pytest.raises(ValueError, match=rf"{name} requires grad.*{name}\.detach\(\)"):
            flash_attention(q, k, v)
        flash_attention(q.detach(), k.detach(), v.detach())
        with torch.no_grad():
            result = flash_attention(q, k, v)
        assert not result.requires_grad
        x.requires_grad_(False)


def test_torch_current_stream(cp: Any, torch: Any) -> None:
    source = [torch_of(torch, x) for x in inputs(1, 300, 300, 4, 4, 64, 64, "bfloat16")]
    good = flash_attention(source[0], source[1], source[2])
    late = [torch.zeros_like(x) for x in source]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, source, strict=True):
            x.copy_(y)
        result = flash_attention(late[0], late[1], late[2])
        assert not side.query(), "the call waited for the stream"
        copy = result.clone()
    side.synchronize()
    assert torch.equal(copy.view(torch.int16), good.view(torch.int16))


def test_torch_results_belong_to_the_stream_of_the_work(cp: Any, torch: Any) -> None:
    """torch's allocator hands a freed block out again at once to the stream it was used on. With
    stream= the work runs elsewhere, and must not overwrite what torch's stream still reads."""
    q, k, v = (torch_of(torch, x) for x in inputs(1, 256, 256, 4, 4, 64, 64, "bfloat16"))
    good = flash_attention(q, k, v)
    saved = torch.empty_like(good)
    other = cp.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    for _ in range(5):
        before = torch.full_like(good, 7.0)
        torch.cuda._sleep(50_000_000)
        saved.copy_(before)  # queued: reads `before` when the sleep is over
        del before
        result = flash_attention(q, k, v, stream=other)
        other.synchronize()
        torch.cuda.synchronize()
        assert bool((saved == 7.0).all()), "the result overwrote memory that was still being read"
        assert torch.equal(result.view(torch.int16), good.view(torch.int16))
        del result


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(cp: Any, jax: Any, dtype: str) -> None:
    q, k, v = inputs(2, 70, 90, 4, 2, 64, 64, dtype)
    o, lse = expect(q, k, v, causal=True)
    jq, jk, jv = (jax.numpy.asarray(host(x)) for x in (q, k, v))
    assert next(iter(jq.devices())).platform == "gpu"
    got, got_lse = flash_attention(jq, jk, jv, causal=True, return_lse=True)
    for x, name in ((got, dtype), (got_lse, "float32")):
        assert isinstance(x, jax.Array), f"{name}: got {type(x)}"
        assert next(iter(x.devices())).platform == "gpu", f"{name}: result on {x.devices()}"
        assert x.dtype.name == name, f"{name}: got {x.dtype}"
    same_bits(np.asarray(got).view(np.uint16), o, "o")
    same_bits(np.asarray(got_lse).view(np.uint32), lse, "lse")
    twice = flash_attention(got, jk, jv) if dtype == "bfloat16" else got  # a result goes in again
    assert bool(jax.numpy.isfinite(twice.astype("float32")).all())


def test_jax_arrays_are_never_written(cp: Any, jax: Any) -> None:
    q, k, v = inputs(1, 20, 20, 2, 2, 64, 64, "bfloat16")
    jq, jk, jv = (jax.numpy.asarray(host(x)) for x in (q, k, v))
    out = jax.numpy.asarray(np.full(q.shape, 7, numpy_dtype("bfloat16")))
    with pytest.raises(ValueError, match="out is read-only"):
        flash_attention(jq, jk, jv, out=out)
    cp.cuda.Device().synchronize()
    assert (np.asarray(out).astype(np.float32) == 7).all(), "an immutable array was written"


def test_numba(cp: Any, numba_cuda: Any) -> None:
    q, k, v = inputs(2, 70, 90, 4, 2, 64, 64, "float16")
    o, lse = expect(q, k, v, causal=True)
    nq, nk, nv = (numba_cuda.to_device(host(x)) for x in (q, k, v))
    got, got_lse = flash_attention(nq, nk, nv, causal=True, return_lse=True)
    assert isinstance(got, cp.ndarray)
    assert_same(got, o, "o")
    assert_same(got_lse, lse, "lse")
    out = numba_cuda.to_device(np.zeros(q.shape, np.float16))
    assert flash_attention(nq, nk, nv, causal=True, out=out) is out
    cp.cuda.Device().synchronize()
    same_bits(out.copy_to_host().view(np.uint16), o, "out=")
    every_second = numba_cuda.to_device(np.repeat(host(k), 2, axis=1))[:, ::2]
    assert_same(flash_attention(nq, every_second, nv, causal=True), o, "strided")


class CudaArrayInterface:
    """Nothing but __cuda_array_interface__."""

    def __init__(self, x: Any) -> None:
        self.__cuda_array_interface__ = x.__cuda_array_interface__
        self.kept = x


def test_cuda_array_interface_alone(cp: Any) -> None:
    q, k, v = inputs(2, 70, 90, 4, 2, 64, 64, "float16")
    wrapped = [CudaArrayInterface(x) for x in (q, k[:, ::-1], v)]
    with portable():
        got = flash_attention(wrapped[0], wrapped[1], wrapped[2])
        assert isinstance(got, cp.ndarray)
        assert_same(got, expect(q, k[:, ::-1], v)[0], "o")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(Producer, id="versioned"),
        pytest.param(lambda x: Producer(x, versioned=False), id="unversioned"),
        pytest.param(OldProducer, id="old"),
        pytest.param(lambda x: Producer(x, null_strides=True), id="null strides"),
        pytest.param(lambda x: OldProducer(x, null_strides=True), id="old, null strides"),
        pytest.param(lambda x: Producer(x, byte_offset=6), id="byte_offset 6"),
        pytest.param(lambda x: OldProducer(x, byte_offset=4096), id="old, byte_offset 4096"),
        pytest.param(lambda x: Producer(x, readonly=True), id="read-only"),
    ],
)
def test_dlpack_capsules(cp: Any, wrap: Callable[[Any], Producer], dtype: str) -> None:
    q, k, v = inputs(2, 70, 90, 4, 2, 64, 64, dtype)
    o, lse = expect(q, k, v, causal=True)
    made = [wrap(x) for x in (q, k, v)]
    got, got_lse = flash_attention(made[0], made[1], made[2], causal=True, return_lse=True)
    assert isinstance(got, cp.ndarray)
    assert_same(got, o, "o")
    assert_same(got_lse, lse, "lse")
    for producer, name in zip(made, "qkv", strict=True):
        assert producer.exports == 1, f"{name} was exported {producer.exports} times"
        assert producer.streams == [1], f"{name}: the legacy stream is 1, got {producer.streams}"
    if not made[0].null_strides:
        turned = [wrap(x) for x in (q, k[:, ::-1], v[:, ::-1])]
        with portable():
            got = flash_attention(turned[0], turned[1], turned[2])
            assert_same(got, expect(q, k[:, ::-1], v[:, ::-1])[0], "negative strides")


def test_dlpack_stream_is_the_works_own(cp: Any) -> None:
    q, k, v = inputs(1, 20, 20, 2, 2, 64, 64, "bfloat16")
    apart = cp.cuda.Stream(non_blocking=True)
    asked = cp.cuda.Stream()
    cp.cuda.Device().synchronize()
    for current, option, expected in (
        (cp.cuda.Stream.null, None, 1),
        (apart, None, apart.ptr),
        (cp.cuda.Stream.ptds, None, 2),
        (apart, asked, asked.ptr),
        (apart, 1, 1),
        (apart, 0, 1),
        (cp.cuda.Stream.null, asked.ptr, asked.ptr),
    ):
        for kind in (Producer, OldProducer):
            spies = [kind(x) for x in (q, k, v)]
            with current:
                flash_attention(spies[0], spies[1], spies[2], stream=option)
            for spy in spies:
                assert spy.streams == [expected], f"{current}, stream={option}: {spy.streams}"
    spies = [Producer(host(x)) for x in (q, k, v)]
    flash_attention(spies[0], spies[1], spies[2])
    assert [s.streams for s in spies] == [[None]] * 3, "CPU memory has no stream"


def test_dlpack_deleters_run_once(cp: Any) -> None:
    q, k, v = inputs(1, 20, 20, 2, 2, 64, 64, "bfloat16")
    spies = []
    for kind in (Producer, OldProducer):
        made = [kind(x) for x in (q, k, v)]
        flash_attention(made[0], made[1], made[2])
        spies += made
        made = [kind(x) for x in (q, k[:, :7], v)]
        with pytest.raises(ValueError, match="k has 7 rows and v has 20"):
            flash_attention(made[0], made[1], made[2])
        spies += made
        made = [kind(x) for x in (q, k[:, :0], v[:, :0])]
        flash_attention(made[0], made[1], made[2])
        spies += made
        wide = cp.zeros((1, 20, 2, 264), np.float16)
        made = [kind(x) for x in (wide, wide, wide)]
        with pytest.raises(UnsupportedError):
            flash_attention(made[0], made[1], made[2])
        spies += made
    cp.cuda.Device().synchronize()
    flash_attention(q, k, v)  # lets go of what has finished
    del made
    gc.collect()
    for i, spy in enumerate(spies):
        assert (spy.exports, spy.deleted) == (1, 1), f"{i}: {spy.exports} exports, {spy.deleted}"


def test_pinned_memory_is_cpu_memory(cp: Any) -> None:
    q, k, v = (host(x) for x in inputs(1, 20, 20, 2, 2, 64, 64, "float16"))
    made = [Producer(x, device=(3, 0)) for x in (q, k, v)]
    got = flash_attention(made[0], made[1], made[2])
    assert isinstance(got, np.ndarray)
    assert (got == flash_attention(q, k, v)).all()
    with pytest.raises(TypeError, match="device type 7"):
        flash_attention(Producer(q, device=(7, 0)), k, v)


def test_q_decides_the_library(cp: Any, torch: Any) -> None:
    q, k, v = inputs(1, 33, 40, 2, 2, 64, 64, "bfloat16")
    o, _ = expect(q, k, v)
    tk = torch_of(torch, k)
    torch.cuda.synchronize()
    assert_same(flash_attention(q, tk, Producer(v)), o, "CuPy q, torch k, DLPack v")
    got = flash_attention(torch_of(torch, q), k, v)
    assert isinstance(got, torch.Tensor)
    same_bits(torch_host(torch, got), o, "torch q")


# How arrays lie


def lay(x: Any, how: str) -> Any:
    """A CuPy view with the values of x (B, S, H, D) that lies otherwise; NaN lies around it."""
    b, s, h, d = x.shape
    if how == "plain":
        return x
    if how == "every second row":
        base = oracle.empty((b, 2 * s, h, d), x.dtype.name)
        view = base[:, ::2]
    elif how == "heads first":
        base = oracle.empty((b, h, s, d), x.dtype.name)
        view = base.transpose(0, 2, 1, 3)
    elif how == "reversed rows":
        base = oracle.empty((b, s, h, d), x.dtype.name)
        view = base[:, ::-1]
    elif how == "wider rows":
        base = oracle.empty((b, s, h, d + 24), x.dtype.name)
        view = base[..., 8 : 8 + d]
    elif how == "packed":  # as q, k and v of one projection
        base = oracle.empty((b, s, 3, h, d), x.dtype.name)
        view = base[:, :, 1]
    elif how == "last axis reversed":
        base = oracle.empty((b, s, h, d), x.dtype.name)
        view = base[..., ::-1]
    elif how == "dims first":
        base = oracle.empty((b, d, h, s), x.dtype.name)
        view = base.transpose(0, 3, 2, 1)
    else:
        offset = int(how.removeprefix("offset "))
        base = oracle.empty((x.size + offset,), x.dtype.name)
        view = base[offset:].reshape(x.shape)
    fill_nan(base)
    bits(view)[...] = bits(x)
    return view


ALIGNED = ("plain", "every second row", "heads first", "reversed rows", "wider rows", "packed")
MISALIGNED = ("last axis reversed", "dims first", *(f"offset {n}" for n in range(1, 8)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 70, 70, 4, 2), (1, 1, 300, 8, 1)])
def test_case_10_every_tensor_has_its_own_strides(
    cp: Any, shape: tuple[int, ...], dtype: str
) -> None:
    b, sq, sk, h, hk = shape
    q, k, v = inputs(b, sq, sk, h, hk, 64, 96, dtype)
    o, _ = expect(q, k, v, causal=True)
    with portable():
        unmapped, _ = expect(q, k, v, causal=True)
    rng = np.random.default_rng(0)
    combinations = list(itertools.product(ALIGNED, repeat=4))
    for n in rng.permutation(len(combinations))[:60]:
        hows = combinations[n]
        views = [lay(x, how) for x, how in zip((q, k, v), hows, strict=False)]
        out = lay(oracle.copy(o), hows[3])
        fill_nan(out)
        before = arrays.copy_count()
        flash_attention(views[0], views[1], views[2], causal=True, out=out)
        assert arrays.copy_count() == before, f"{hows}: an aligned tensor was copied"
        backwards = [x.strides[1] < 0 and x.shape[1] > 1 for x in (*views, out)]
        assert_same(out, unmapped if any(backwards) else o, f"{hows}")
    every = [broadcast_batch(cp, x) for x in (q, k, v)]
    with portable():
        got = flash_attention(every[0], every[1], every[2])
        assert_same(got, expect(*every)[0], "one batch entry, broadcast")


def broadcast_batch(cp: Any, x: Any) -> Any:
    return cp.broadcast_to(bits(x)[:1], (3, *x.shape[1:])).view(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_11_negative_strides(cp: Any, dtype: str) -> None:
    with portable():
        negative_strides(dtype)


def negative_strides(dtype: str) -> None:
    q, k, v = inputs(2, 70, 90, 4, 2, 64, 64, dtype)
    for wrap in (plain, Producer):
        got = flash_attention(wrap(q), wrap(k[:, ::-1]), wrap(v[:, ::-1]), return_lse=True)
        check(got[0], got[1], q, k, v, f"{wrap}: keys and values reversed")
        assert_same(got[0], expect(q, k[:, ::-1], v[:, ::-1])[0], f"{wrap}: reversed rows")
        turned = q[..., ::-1], k[..., ::-1]
        got = flash_attention(wrap(turned[0]), wrap(turned[1]), wrap(v), return_lse=True)
        assert_same(got[0], expect(*turned, v)[0], f"{wrap}: reversed dims")
        got = flash_attention(wrap(q[::-1]), wrap(k[::-1]), wrap(v[::-1]), return_lse=True)
        assert_same(got[0], expect(q, k, v)[0][::-1], f"{wrap}: reversed batch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (66, 66), (64, 37), (5, 64)])
def test_case_12_misaligned_tensors_are_copied_once(
    cp: Any, dims: tuple[int, int], dtype: str
) -> None:
    d, dv = dims
    q, k, v = inputs(2, 40, 50, 4, 2, d, dv, dtype)
    o, _ = expect(q, k, v)
    always = [d % 8 != 0, d % 8 != 0, dv % 8 != 0, dv % 8 != 0]  # q, k, v, o
    for how in MISALIGNED:
        for which in (*range(4), None):
            tensors = [
                lay(x, how) if which in (n, None) else x
                for n, x in enumerate((q, k, v, oracle.copy(o)))
            ]
            fill_nan(tensors[3])
            before = arrays.copy_count()
            flash_attention(tensors[0], tensors[1], tensors[2], out=tensors[3])
            copied = arrays.copy_count() - before
            expected = sum(a or which in (n, None) for n, a in enumerate(always))
            what = f"D={d} Dv={dv}, {how}, tensor {'all' if which is None else 'qkvo'[which]}"
            assert copied == expected, f"{what}: {copied} copies, not {expected}"
            assert_same(tensors[3], o, what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dv", [64, 40, 37])
def test_memory_around_outputs_is_left_alone(cp: Any, dv: int, dtype: str) -> None:
    b, sq, h = 2, 130, 3
    q, k, v = inputs(b, sq, 90, h, 1, 64, dv, dtype)
    lens = {"seqlens_q": lengths(130, 9), "seqlens_k": lengths(90, 0)}
    mapped = expect(q, k, v, causal=True, **lens)
    with portable():
        unmapped = expect(q, k, v, causal=True, **lens)
    base = cp.full((b + 2, 2 * sq + 6, h + 2, dv + 16), SENTINEL, np.uint16)
    lse_base = cp.full((b, h + 2, 3 * sq), SENTINEL, np.uint32)
    for at in (8, 3):  # aligned, and not
        frames = {
            "steps": (slice(1, -1), slice(2, 2 + 2 * sq, 2), slice(1, -1), slice(at, at + dv)),
            "backwards": (
                slice(1, -1),
                slice(1 + sq, 1, -1),
                slice(1, -1),
                slice(at, at + dv),
            ),
        }
        for name, frame in frames.items():
            in_place = at % 8 == dv % 8 == 0
            o, lse = unmapped if name == "backwards" and in_place else mapped
            base[...] = SENTINEL
            lse_base[...] = SENTINEL
            out = base[frame].view(numpy_dtype(dtype))
            lse_out = lse_base[:, 1:-1, 1::3].view(np.float32)
            results = flash_attention(
                q, k, v, causal=True, return_lse=True, out=out, lse_out=lse_out, **lens
            )
            assert results[0] is out
            assert results[1] is lse_out
            assert_same(out, o, f"{name} at {at}: o")
            assert_same(lse_out, lse, f"{name} at {at}: lse")
            base[frame] = SENTINEL
            bits(lse_out)[...] = SENTINEL
            assert bool((base == SENTINEL).all()), f"{name} at {at}: memory around o was written"
            assert bool((lse_base == SENTINEL).all()), f"{name} at {at}: memory around lse"


# Refusals: before any launch, outputs untouched


def refused(
    guarded: Any,
    error: type[Exception],
    match: str,
    call: Callable[..., Any],
    *args: Any,
    **kw: Any,
) -> None:
    bits(guarded)[...] = SENTINEL
    with pytest.raises(error, match=match):
        call(*args, **kw)
    assert bool((bits(guarded) == SENTINEL).all()), f"{match}: the refused call wrote to out"


def test_devices_must_not_mix(cp: Any) -> None:
    q, k, v = inputs(2, 20, 30, 2, 2, 64, 64, "float16")
    out = oracle.copy(q)
    for n, name in enumerate("qkv"):
        mixed = [q, k, v]
        mixed[n] = host(mixed[n])
        pattern = rf"one device.*{name} on cpu"
        refused(out, ValueError, pattern, flash_attention, *mixed, out=out)
    lens = np.array([20, 3], np.int32)
    for name in ("seqlens_q", "seqlens_k"):
        option = opts(**{name: lens})
        refused(out, ValueError, f"{name} on cpu", flash_attention, q, k, v, out=out, **option)
    on_host = np.zeros(q.shape, np.float16)
    with pytest.raises(ValueError, match="out on cpu"):
        flash_attention(q, k, v, out=on_host)
    with pytest.raises(ValueError, match="lse_out on cpu"):
        flash_attention(q, k, v, return_lse=True, lse_out=np.zeros((2, 2, 20), np.float32))
    with pytest.raises(ValueError, match="out on cuda:0"):
        flash_attention(host(q), host(k), host(v), out=out)
    with pytest.raises(ValueError, match="stream= is for GPU arrays"):
        flash_attention(host(q), host(k), host(v), stream=cp.cuda.Stream.null)
    with pytest.raises(TypeError, match="stream='fast'"):
        flash_attention(q, k, v, stream="fast")
    cpu = FlashAttention2(64, "float16", device="cpu")
    with pytest.raises(ValueError, match="launcher is for cpu"):
        cpu.forward(q, k, v)
    gpu = FlashAttention2(64, "float16", device="cuda")
    with pytest.raises(ValueError, match="launcher is for cuda"):
        gpu.forward(host(q), host(k), host(v))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_out_of_range_are_clamped(cp: Any, dtype: str) -> None:
    b, sq, sk = 4, 70, 90
    q, k, v = inputs(b, sq, sk, 2, 1, 64, 64, dtype)
    wild = {"seqlens_q": lengths(-5, 10**6, 71, 2**31 - 1), "seqlens_k": lengths(10**9, -1, 91, 5)}
    tame = {"seqlens_q": lengths(0, 70, 70, 70), "seqlens_k": lengths(90, 0, 90, 5)}
    surrounded = []
    for x in (q, k, v, q):
        base = oracle.empty((b + 2, *x.shape[1:]), dtype)
        fill_nan(base)
        bits(base)[1:-1] = bits(x)
        surrounded.append(base)
    a, c, d, o_base = surrounded
    bits(o_base)[...] = SENTINEL
    for options in (opts(), opts(causal=True), opts(window=(9, 9), causal="top_left")):
        o, lse = expect(q, k, v, **options, **tame)
        out = o_base[1:-1]
        _, got_lse = flash_attention(
            a[1:-1], c[1:-1], d[1:-1], out=out, return_lse=True, **options, **wild
        )
        assert_same(out, o, f"o with {options}")
        assert_same(got_lse, lse, f"lse with {options}")
        for end in (0, -1):
            assert bool((bits(o_base)[end] == SENTINEL).all()), f"{options}: wrote outside"
    strided = cp.asarray(np.array([0, 9, 70, 9, 70, 9, 70, 9], np.int32))[::2]
    o, _ = expect(q, k, v, seqlens_q=tame["seqlens_q"])
    with_steps = flash_attention(q, k, v, seqlens_q=strided)
    assert_same(with_steps, o, "lengths as a strided view")


def test_seqlens_of_another_kind(cp: Any) -> None:
    q, k, v = inputs(2, 20, 30, 2, 2, 64, 64, "float16")
    out = oracle.copy(q)
    for lens, error, match in (
        (cp.asarray(np.array([20, 3])), TypeError, "seqlens_k"),
        (cp.asarray(np.array([20, 3], np.float32)), TypeError, "seqlens_k is float32"),
        (lengths(20, 3, 1), ValueError, r"seqlens_k has shape \(3,\)"),
        (lengths(20), ValueError, r"seqlens_k has shape \(1,\)"),
    ):
        refused(out, error, match, flash_attention, q, k, v, out=out, seqlens_k=lens)


def test_outputs_that_cannot_be_written(cp: Any) -> None:
    q, k, v = inputs(2, 20, 20, 2, 2, 64, 64, "float16")
    out = oracle.copy(q)

    def call(o: Any, **more: Any) -> Callable[[], Any]:
        return lambda: flash_attention(q, k, v, out=o, **more)

    refused(out, ValueError, "out is read-only", call(Producer(out, readonly=True)))
    one = cp.broadcast_to(bits(out)[:1], q.shape).view(q.dtype)
    refused(out, ValueError, "share memory", call(one))
    refused(out, ValueError, r"out has shape \(2, 19", call(out[:, 1:]))
    refused(out, TypeError, "out is float32", call(cp.zeros(q.shape, np.float32)))
    refused(out, TypeError, "out is bfloat16", call(bits(out).view(numpy_dtype("bfloat16"))))
    lse = cp.zeros((2, 2, 20), np.float32)
    refused(out, ValueError, "lse_out has shape", call(out, lse_out=lse[:, :, 1:]))
    refused(out, TypeError, "lse_out is float16", call(out, lse_out=lse.astype(np.float16)))
    inside = bits(out).reshape(-1)[: 2 * lse.size].view(np.float32).reshape(lse.shape)
    refused(out, ValueError, "lse_out overlaps out", call(out, lse_out=inside))
    for n, name in enumerate("qkv"):
        before = [oracle.copy(x) for x in (q, k, v)]
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            call((q, k, v)[n])()
        for x, y in zip((q, k, v), before, strict=True):
            assert_same(x, y, f"inputs after out={name}")


def test_what_has_no_kernel(cp: Any) -> None:
    for name in ("float16", "float32", "float64"):
        q, k, v = (cp.ones((1, 20, 2, 264), name) for _ in range(3))
        out = cp.empty(q.shape, name)
        with pytest.raises(UnsupportedError, match=rf"(?s){name}.*fwd_sm80: "):
            flash_attention(q, k, v)
        out[...] = 3
        with pytest.raises(UnsupportedError, match="fwd_wide_sm80"):
            flash_attention(q, k, v, out=out)
        assert bool((out == 3).all()), f"{name}: the refused call wrote to out"
    for name in ("int8", "uint16", "int32", "complex64", "bool"):
        q, k, v = (cp.ones((1, 20, 2, 64), name) for _ in range(3))
        for wrap in (plain, Producer) if name in ("int8", "uint16", "int32") else (plain,):
            with pytest.raises(TypeError, match=name):
                flash_attention(wrap(q), wrap(k), wrap(v))
    q, k, v = inputs(1, 20, 20, 2, 2, 64, 64, "float16")
    other = normal(k.shape, "bfloat16", 1)
    out = oracle.copy(q)
    match = "q=float16, k=bfloat16, v=float16"
    refused(out, TypeError, match, flash_attention, q, other, v, out=out)
    wide = normal((1, 20, 2, 264), "float16", 1)
    with pytest.raises(UnsupportedError, match="head dims go up to 256, not 264"):
        flash_attention(wide, wide, wide)
    o, lse = flash_attention(q, k, v, return_lse=True)
    check(o, lse, q, k, v, "a plain call afterwards")
