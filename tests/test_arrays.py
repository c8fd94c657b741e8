"""Arrays in and out on the CPU: NumPy in all its shapes, and DLPack capsules made by hand."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import hashlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from producers import DESTRUCTOR, OldProducer, Producer, alive, new_capsule

from cufa2 import arrays, flash_attention, flash_attention_backward, placement
from cufa2.arrays import ArrayView
from cufa2.placement import CPU
from cufa2.testing import make_inputs, poison

ROOT = Path(__file__).resolve().parent.parent
SHAPE = (2, 9, 13, 4, 2, 16, 24)  # B, Sq, Sk, H, Hk, D, Dv
DTYPES = ("float16", "bfloat16", "float32", "float64")


def qkv(dtype: str = "float32", seed: int = 0) -> Any:
    return make_inputs(SHAPE, dtype, seed)[:3]


def digest(x: Any) -> str:
    return hashlib.sha256(np.asarray(x).tobytes()).hexdigest()


CUDA_MEMORY, PINNED_MEMORY, VULKAN_MEMORY = (2, 1), (3, 0), (7, 0)  # (DLDeviceType, index)


class NumpyBehindDLPack:
    """NumPy's own capsules."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


PRODUCERS: dict[str, Callable[[Any], Any]] = {
    "versioned": Producer,
    "unversioned": lambda x: Producer(x, versioned=False),
    "old": OldProducer,
    "null strides": lambda x: Producer(x, null_strides=True),
    "old null strides": lambda x: OldProducer(x, null_strides=True),
    "byte offset": lambda x: Producer(x, byte_offset=6 * x.itemsize // 2),
    "old byte offset": lambda x: OldProducer(x, byte_offset=64),
    "read-only": lambda x: Producer(x, readonly=True),
    "pinned": lambda x: Producer(x, device=PINNED_MEMORY),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", PRODUCERS.values(), ids=PRODUCERS)
def test_producers_give_what_numpy_gives(make: Callable[[Any], Any], dtype: str) -> None:
    """Forward and backward, to the bit; results of an unknown library are NumPy arrays; every
    capsule is released exactly once."""
    q, k, v, do = make_inputs(SHAPE, dtype)
    lens = np.array([5, 13], np.int32)
    before = [digest(x) for x in (q, k, v, do)]
    o, lse = flash_attention(q, k, v, causal=True, seqlens_k=lens, return_lse=True)
    grads = flash_attention_backward(do, q, k, v, o, lse, causal=True, seqlens_k=lens)

    made = [make(x) for x in (q, k, v, do, o, lse, lens)]
    pq, pk, pv, pdo, po, plse, plens = made
    results = flash_attention(pq, pk, pv, causal=True, seqlens_k=plens, return_lse=True)
    results += flash_attention_backward(pdo, pq, pk, pv, po, plse, causal=True, seqlens_k=plens)
    for ours, expected in zip(results, (o, lse, *grads), strict=True):
        assert type(ours) is np.ndarray
        assert ours.dtype == expected.dtype
        assert ours.flags.writeable
        np.testing.assert_array_equal(ours, expected)
    assert [digest(x) for x in (q, k, v, do)] == before
    gc.collect()
    assert [p.exports for p in made] == [2, 2, 2, 1, 1, 1, 2]
    assert {s for p in made for s in p.streams} == {None}, "the CPU has no streams"
    assert [p.deleted for p in made] == [p.exports for p in made]


def test_strides_of_capsules() -> None:
    """Transposed, sliced and reversed memory; a capsule has signed strides in elements."""
    q, k, v = qkv()
    expected = flash_attention(q, k, v)
    bhsd = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    wide = [np.repeat(x, 3, axis=3)[..., ::3] for x in (q, k, v)]
    back = [np.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1] for x in (q, k, v)]
    for strided in (bhsd, wide, back):
        ours = flash_attention(*(Producer(x) for x in strided))
        np.testing.assert_array_equal(ours, flash_attention(*strided))
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)


def test_numpy_capsules() -> None:
    q, k, v = qkv("float16")
    k.flags.writeable = False
    ours = flash_attention(*map(NumpyBehindDLPack, (q, k, v)))
    np.testing.assert_array_equal(ours, flash_attention(q, k, v))


def test_q_decides_the_library() -> None:
    """Producers mix with NumPy."""
    q, k, v = qkv()
    expected = flash_attention(q, k, v)
    for ours in (flash_attention(Producer(q), k, v), flash_attention(q, Producer(k), v)):
        assert type(ours) is np.ndarray
        np.testing.assert_array_equal(ours, expected)


def test_a_capsule_keeps_its_memory() -> None:
    """Memory is released after the call and its results are gone, not before."""
    q = qkv()[0]
    producer = Producer(q)
    view = arrays.view("q", producer, CPU)
    array = view.numpy()
    del view
    gc.collect()
    assert (producer.exports, producer.deleted) == (1, 0)
    np.testing.assert_array_equal(array, q)
    del array
    gc.collect()
    assert producer.deleted == 1


def test_others_may_set_up_ctypes_as_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of ctypes.pythonapi are shared by the process; we rely on no one's prototype."""
    for name in ("PyCapsule_GetName", "PyCapsule_GetPointer"):
        function = getattr(ctypes.pythonapi, name)
        monkeypatch.setattr(function, "restype", ctypes.c_int)
        monkeypatch.setattr(function, "argtypes", [])
    q, k, v = qkv()
    ours = flash_attention(*map(Producer, (q, k, v)))
    np.testing.assert_array_equal(ours, flash_attention(q, k, v))


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "dtype code": (lambda q: Producer(q, code=17), TypeError, "q has dtype code 17 32"),
    "complex": (lambda q: Producer(q, code=5, bits=64), TypeError, "q has dtype complex64"),
    "int": (lambda q: Producer(q, code=0, bits=64), TypeError, "q has dtype int64"),
    "bits as uint16": (lambda q: Producer(q, code=1, bits=16), TypeError, "q has dtype uint16"),
    "float8": (lambda q: Producer(q, code=10, bits=8), TypeError, "q has dtype code 10 8"),
    "lanes": (lambda q: Producer(q, lanes=2), TypeError, "q has dtype float32x2; use"),
    "version": (lambda q: Producer(q, major=2), TypeError, r"DLPack 2\.0 is not known; 1\.x is"),
    "shape": (lambda q: Producer(q[:, :, :, :8]), ValueError, "head dim of q is 8 and of k is 16"),
    "rank": (lambda q: Producer(q[0, 0]), ValueError, r"shape \(4, 16\); q, k and v must all be"),
    "heads": (lambda q: Producer(q[:, :, :3]), ValueError, "num_heads=3 is not a multiple"),
    "mixed": (lambda q: Producer(q.astype("float16")), TypeError, "must have one dtype, got q=f"),
}


@pytest.mark.parametrize(("make", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_release_their_capsules(make: Any, error: Any, message: str) -> None:
    q, k, v = qkv()
    made = [make(q), Producer(k), OldProducer(v)]
    with pytest.raises(error, match=message) as e:
        flash_attention(*made)
    del e
    gc.collect()
    assert [p.deleted for p in made] == [p.exports for p in made]
    assert made[0].exports == 1


def test_nothing_leaks() -> None:
    """Hundreds of rounds of good, empty and wrong calls: every deleter once, no object more."""
    q, k, v = qkv()
    made: list[Producer] = []

    def track(x: Any) -> Producer:
        made.append((Producer, OldProducer)[len(made) % 2](x))
        return made[-1]

    def rounds(n: int) -> None:
        for i in range(n):
            flash_attention(track(q), track(k), track(v), causal=bool(i % 2))
            flash_attention(track(q[:0]), track(k[:0]), track(v[:0]))
            with pytest.raises(ValueError, match="k has 12 rows and v has 13"):
                flash_attention(track(q), track(k[:, 1:]), track(v))

    rounds(5)
    gc.collect()
    objects = len(gc.get_objects()) - len(made)
    rounds(200)
    gc.collect()
    assert all(p.deleted == p.exports == 1 for p in made)
    assert not alive
    # A Producer holds a view and a dict; nothing else may grow with the rounds.
    more = len(gc.get_objects()) - len(made) - objects
    assert more < 2 * len(made) + 200


def test_unknown_capsules_and_devices() -> None:
    q, k, v = qkv()

    class Spent(Producer):
        def __dlpack__(self, **_: Any) -> Any:
            return "no capsule"

    class Renamed(Producer):
        def __dlpack__(self, **_: Any) -> Any:
            return new_capsule(ctypes.addressof(ctypes.c_int(1)), b"used_dltensor", DESTRUCTOR())

    with pytest.raises(TypeError, match="q is on DLPack device type 7; use CPU or CUDA memory"):
        flash_attention(Producer(q, device=VULKAN_MEMORY), k, v)
    with pytest.raises(TypeError, match="gave no fresh DLPack capsule"):
        flash_attention(Renamed(q), k, v)
    with pytest.raises((TypeError, ValueError)):
        flash_attention(Spent(q), k, v)


def test_errors_of_a_producer_are_its_own() -> None:
    q, k, v = qkv()

    class Refusing(Producer):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("requires grad")

    with pytest.raises(BufferError, match="requires grad"):
        flash_attention(Refusing(q), k, v)


# devices


def test_mixed_devices_are_listed() -> None:
    """No export, no launch: the devices alone tell."""
    q, k, v = qkv()
    lens = np.array([1, 2], np.int32)
    on_gpu = Producer(k, device=CUDA_MEMORY)
    with pytest.raises(ValueError, match="must be on one device") as e:
        flash_attention(q, on_gpu, v)
    assert str(e.value) == (
        "all arrays must be on one device, got q on cpu, k on cuda:1, v on cpu"
    )
    with pytest.raises(ValueError, match="q on cpu, k on cpu, v on cpu, seqlens_k on cuda:1"):
        flash_attention(q, k, v, seqlens_k=Producer(lens, device=CUDA_MEMORY))
    with pytest.raises(ValueError, match="out on cuda:1"):
        flash_attention(q, k, v, out=on_gpu)
    with pytest.raises(ValueError, match="k on cuda:0, v on cuda:1"):
        flash_attention(q, Producer(k, device=(2, 0)), Producer(v, device=(2, 1)))
    with pytest.raises(ValueError, match="do on cuda:1"):
        flash_attention_backward(on_gpu, q, k, v, q, q)
    assert on_gpu.exports == 0


@pytest.mark.parametrize("stream", [0, 1, object()])
def test_streams_are_for_gpus(stream: Any) -> None:
    q, k, v = qkv()
    rule = "stream= is for GPU arrays; the arrays are on the CPU"
    with pytest.raises(ValueError, match=rule):
        flash_attention(q, k, v, stream=stream)
    with pytest.raises(ValueError, match=rule):
        flash_attention_backward(q, q, k, v, q, q, stream=stream)


@pytest.mark.parametrize("wrong", [None, [[1.0]], 3.0, "q", np.float32(1), object()])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_array(name: str, wrong: Any) -> None:
    named = dict(zip("qkv", qkv(), strict=True))
    with pytest.raises(TypeError, match=f"{name} is a {type(wrong).__name__}; give a NumPy or"):
        flash_attention(**{**named, name: wrong})


@pytest.mark.parametrize("name", ["do", "q", "k", "v", "o", "lse"])
def test_what_is_no_array_in_the_backward_pass(name: str) -> None:
    q, k, v, do = make_inputs(SHAPE)
    o, lse = flash_attention(q, k, v, return_lse=True)
    named = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    with pytest.raises(TypeError, match=f"{name} is a NoneType; give a NumPy or"):
        flash_attention_backward(**{**named, name: None})


# NumPy in


def test_inputs_are_never_written() -> None:
    """Read-only arrays are accepted; no array changes."""
    for dtype in DTYPES:
        inputs = make_inputs(SHAPE, dtype)
        for x in inputs:
            x.flags.writeable = False
        before = [digest(x) for x in inputs]
        q, k, v, do = inputs
        o, lse = flash_attention(q, k, v, return_lse=True)
        o.flags.writeable = lse.flags.writeable = False
        for g in flash_attention_backward(do, q, k, v, o, lse):
            assert g.flags.writeable
        assert [digest(x) for x in inputs] == before


def test_array_kinds(tmp_path: Path) -> None:
    """memmap, broadcast_to and subclasses are arrays; results are plain writable ones."""
    q, k, v = qkv()
    expected = flash_attention(q, k, v)

    class Tagged(np.ndarray[Any, Any]):
        pass

    mapped = np.memmap(tmp_path / "q", q.dtype, "w+", shape=q.shape)
    mapped[:] = q
    mapped.flush()
    for special in (np.memmap(tmp_path / "q", q.dtype, "r", shape=q.shape), q.view(Tagged)):
        ours = flash_attention(special, k, v)
        assert type(ours) is np.ndarray
        assert ours.flags.writeable
        np.testing.assert_array_equal(ours, expected)
    one = np.broadcast_to(k[:1, :1, :1], k.shape)
    np.testing.assert_array_equal(flash_attention(q, one, v), flash_attention(q, one.copy(), v))


def test_refused_kinds() -> None:
    q, k, v = qkv()
    masked_array: Any = np.ma.masked_array
    masked, unmasked = masked_array(k, mask=k > 0), masked_array(q)
    for name, array in {"k": masked, "out": unmasked}.items():
        with pytest.raises(TypeError, match=f"^{name} is a masked array; its mask would be ign"):
            flash_attention(**{"q": q, "k": k, "v": v, name: array})
    with pytest.raises(TypeError, match=r"v has dtype >f4, which is not in native byte order"):
        flash_attention(q, k, v.astype(">f4"))
    for dtype in ("object", "int8", "complex64", "bool", "longdouble"):
        with pytest.raises(TypeError, match=f"q has dtype {np.dtype(dtype).name}; use float16, "):
            flash_attention(q.astype(dtype), k, v)
    with pytest.raises(TypeError, match="dtype int32 is not supported; use one of float16, "):
        flash_attention(*(x.astype("int32") for x in (q, k, v)))
    matrix: Any = q[0, :, 0].view(np.matrix)
    with pytest.raises(ValueError, match=r"q has shape \(9, 16\); q, k and v must all be 4-D"):
        flash_attention(matrix, k, v)


@pytest.mark.parametrize(
    ("shapes", "name"),
    [(((3,),) * 3, "q"), (((2, 3, 4, 5), (2, 3, 5), (2, 3, 5)), "k"), (((1,) * 5,) * 3, "q")],
)
def test_ranks(shapes: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} has shape .*; q, k and v must all be 4-D"):
        flash_attention(*(np.zeros(s) for s in shapes))


def record_views(x: Any, *, pad: str) -> Any:
    """x as a field of packed records: its strides are in bytes that need not be whole elements."""
    records = np.zeros(x.shape, [("pad", pad), ("x", x.dtype)])
    records["x"] = x
    return records["x"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pad", ["u1", "(2,)u1", "u4", "(3,)u8"])
def test_fields_of_records(pad: str, dtype: str) -> None:
    """Odd strides and misaligned elements are read right."""
    q, k, v = qkv(dtype)
    fields = [record_views(x, pad=pad) for x in (q, k, v)]
    ours, expected = flash_attention(*fields), flash_attention(q, k, v)
    # The order of summation may differ between strided and contiguous products.
    atol = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6)
    np.testing.assert_allclose(ours.astype(float), expected.astype(float), rtol=0, atol=atol)


@pytest.mark.parametrize("pad", ["u1", "(2,)u1", "u4", "(3,)u8"])
def test_results_into_fields_of_records(pad: str) -> None:
    """They arrive in the caller's memory, or the call says that they cannot."""
    q, k, v = qkv()
    expected, expected_lse = flash_attention(q, k, v, return_lse=True)
    out, lse_out = (
        record_views(np.full(x.shape, 7, x.dtype), pad=pad) for x in (expected, expected_lse)
    )
    if out.strides[-1] % out.itemsize:
        for given in ({"out": out}, {"lse_out": lse_out}):
            with pytest.raises(ValueError, match="strides are not whole elements"):
                flash_attention(q, k, v, **given)
        assert (out == 7).all()
    else:
        assert flash_attention(q, k, v, out=out, lse_out=lse_out) is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse_out, expected_lse)


# strides


def layouts(x: Any) -> dict[str, Any]:
    """The same values in memory of many shapes."""
    rows = np.zeros((x.shape[0], 2 * x.shape[1], *x.shape[2:]), x.dtype)
    rows[:, ::2] = x
    return {
        "contiguous": x,
        "every second row": rows[:, ::2],
        "bhsd": np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
        "reversed": np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        "fortran": np.asfortranarray(x),
    }


def test_every_tensor_has_its_own_strides() -> None:
    """All combinations, forward and backward, into outputs with strides of their own."""
    q, k, v, do = make_inputs((1, 70, 70, 2, 1, 32, 32), seed=4)
    expected, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    grads = flash_attention_backward(do, q, k, v, expected, lse, causal=True)
    for (a, b, c), (name, d) in zip(
        itertools.product(*(layouts(x).values() for x in (q, k, v))),
        itertools.cycle(layouts(do).items()),
        strict=False,
    ):
        out = layouts(np.full_like(expected, np.nan))[name]
        lse_out = np.full((1, 70, 2), np.nan, np.float32).swapaxes(1, 2)
        assert flash_attention(a, b, c, causal=True, out=out, lse_out=lse_out) is out
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse_out, lse, rtol=0, atol=1e-6)
        for ours, right in zip(
            flash_attention_backward(d, a, b, c, out, lse_out, causal=True), grads, strict=True
        ):
            np.testing.assert_allclose(ours, right, rtol=0, atol=1e-5)


def test_broadcast_gradient() -> None:
    """do as autograd gives it for a sum: one 1, all strides 0."""
    q, k, v, do = make_inputs(SHAPE, "float64")
    o, lse = flash_attention(q, k, v, return_lse=True)
    ones = np.broadcast_to(np.float64(1), do.shape)
    ours = flash_attention_backward(ones, q, k, v, o, lse)
    expected = flash_attention_backward(ones.copy(), q, k, v, o, lse)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def test_negative_strides() -> None:
    """Reversed head dims cancel; reversing keys and values together changes rounding only."""
    q, k, v = qkv("float64")
    expected = flash_attention(q, k, v)
    for ours in (
        flash_attention(q[..., ::-1], k[..., ::-1], v),
        flash_attention(q, k[:, ::-1], v[:, ::-1]),
        flash_attention(q[::-1], k[::-1], v[::-1])[::-1],
        flash_attention(q, k, v[..., ::-1])[..., ::-1],
    ):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_start_addresses(offset: int, dtype: str) -> None:
    """Slices at odd offsets of a larger buffer, NumPy and DLPack."""
    q, k, v = qkv(dtype)
    moved = []
    for x in (q, k, v):
        buffer = np.full(x.size + 8, np.nan, dtype)
        buffer[offset : offset + x.size] = x.ravel()
        moved.append(buffer[offset : offset + x.size].reshape(x.shape))
    ours, expected = flash_attention(*moved), flash_attention(q, k, v)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3 if dtype == "float16" else 1e-6)
    np.testing.assert_array_equal(flash_attention(*map(Producer, moved)), ours)


steps = st.sampled_from((-3, -2, -1, 1, 2, 3))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_strides(data: st.DataObject) -> None:
    """Random steps on every axis of every tensor, axes in random memory order, random gaps."""
    q, k, v, _ = make_inputs((2, 5, 6, 2, 1, 4, 3), "float64")
    expected, expected_lse = flash_attention(q, k, v, causal=True, return_lse=True)

    def strided(x: Any) -> Any:
        order = data.draw(st.permutations(range(x.ndim)))
        step = data.draw(st.tuples(*[steps] * x.ndim))
        room = [abs(s) * n for n, s in zip(x.shape, step, strict=True)]
        buffer = np.full([room[i] for i in order], np.nan).transpose(np.argsort(order))
        view = buffer[tuple(slice(None, None, s) for s in step)]
        view[...] = x
        return view

    out, lse_out = strided(expected * np.nan), strided(expected_lse * np.nan)
    flash_attention(*map(strided, (q, k, v)), causal=True, out=out, lse_out=lse_out)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse_out, expected_lse, rtol=0, atol=1e-14)


# out= and lse_out=


def test_outputs_are_returned_and_written() -> None:
    q, k, v = qkv()
    expected, expected_lse = flash_attention(q, k, v, return_lse=True)
    out, lse_out = np.empty_like(expected), np.empty_like(expected_lse)
    poison(out, lse_out)
    assert flash_attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    poison(out)
    made = flash_attention(q, k, v, out=out, lse_out=lse_out, return_lse=True)
    assert made[0] is out
    assert made[1] is lse_out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse_out, expected_lse)
    # lse_out is written even where it is not asked back.
    poison(lse_out)
    flash_attention(q, k, v, lse_out=lse_out)
    np.testing.assert_array_equal(lse_out, expected_lse)


def test_outputs_through_dlpack() -> None:
    """A producer of any library may own the result."""
    q, k, v = qkv("bfloat16")
    expected = flash_attention(q, k, v)
    memory = np.full_like(expected, np.nan)
    out = Producer(memory)
    assert flash_attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(memory, expected)
    with pytest.raises(ValueError, match=r"^out is read-only"):
        flash_attention(q, k, v, out=Producer(memory, readonly=True))
    gc.collect()
    assert out.deleted == out.exports == 1


def test_nothing_around_an_output_is_written() -> None:
    q, k, v = qkv()
    expected, expected_lse = flash_attention(q, k, v, return_lse=True)
    big = np.full((4, 13, 6, 30), 7, np.float32)
    big_lse = np.full((3, 9, 12), 7, np.float32)
    out, lse_out = big[1:3, 2:11, 1:5, 3:27], big_lse[:2, 1:9:2, 2:11]
    flash_attention(q, k, v, out=out, lse_out=lse_out)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse_out, expected_lse)
    out[...] = lse_out[...] = 7
    assert (big == 7).all()
    assert (big_lse == 7).all()


def full(*shape: int, dtype: Any = np.float32) -> Any:
    return np.full(shape, 7, dtype)


def bad_outputs() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """Outputs for SHAPE in float32 that cannot be right, and what is said about them."""
    shape, lse_shape = (2, 9, 4, 24), (2, 4, 9)
    frozen, frozen_lse, shared = full(*shape), full(*lse_shape), full(1736)
    frozen.flags.writeable = frozen_lse.flags.writeable = False
    strided = np.lib.stride_tricks.as_strided
    return {
        "shape": ({"out": full(2, 9, 4, 16)}, ValueError, r"out has shape \(2, 9, 4, 16\)"),
        "layout": ({"out": full(2, 4, 9, 24)}, ValueError, r"it must be \(2, 9, 4, 24\)"),
        "rank": ({"out": full(9, 4, 24)}, ValueError, r"out has shape \(9, 4, 24\)"),
        "dtype": (
            {"out": full(*shape, dtype="float64")},
            TypeError,
            "out is float64; it must be float32",
        ),
        "lse shape": ({"lse_out": full(2, 9, 4)}, ValueError, r"lse_out has shape \(2, 9, 4\)"),
        "lse dtype": (
            {"lse_out": full(*lse_shape, dtype="float64")},
            TypeError,
            "lse_out is float64; it must be float32",
        ),
        "read-only": ({"out": frozen}, ValueError, "^out is read-only"),
        "lse read-only": ({"lse_out": frozen_lse}, ValueError, "^lse_out is read-only"),
        "broadcast": (
            {"out": strided(full(24), shape, (0, 0, 0, 4))},
            ValueError,
            "out has elements that share memory",
        ),
        "overlapping rows": (
            {"out": strided(full(3000), shape, (4 * 720, 4 * 80, 4 * 20, 4))},
            ValueError,
            "out has elements that share memory",
        ),
        "over each other": (
            {"out": shared[:1728].reshape(shape), "lse_out": shared[1664:].reshape(lse_shape)},
            ValueError,
            "lse_out overlaps out in memory",
        ),
        "list": ({"out": [1.0]}, TypeError, "out is a list; give a NumPy"),
        "bytes": ({"out": full(*shape, dtype=">f4")}, TypeError, "native byte order"),
    }


@pytest.mark.parametrize("case", bad_outputs())
def test_bad_outputs(case: str) -> None:
    """Refused by name and rule, and nothing is written: not even to the output that is right."""
    given, error, message = bad_outputs()[case]
    lse_out = full(2, 4, 9)
    out = full(2, 9, 4, 24)
    given = {"out": out, "lse_out": lse_out, **given}
    with pytest.raises(error, match=message):
        flash_attention(*qkv(), **given)
    assert all((np.asarray(x) == 7).all() for x in given.values() if isinstance(x, np.ndarray))


def test_outputs_may_not_overlap_inputs() -> None:
    """Wholly, in part, or through another view of the same memory."""
    buffer = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    q, k, v = (buffer[i : i + 640].reshape(1, 10, 4, 16) for i in (0, 1000, 2000))
    lens = buffer[3900:3901].view(np.int32)
    lens[:] = 10
    before = digest(buffer)
    aside = buffer[3000:3640].reshape(q.shape)
    for at, name in ((0, "q"), (600, "q"), (1639, "k"), (1500, "k"), (2639, "v"), (3300, "seq")):
        out = buffer[at : at + 640].reshape(q.shape)
        with pytest.raises(ValueError, match=f"^out overlaps {name}.*; inputs are never written"):
            flash_attention(q, k, v, out=out, seqlens_k=lens)
    with pytest.raises(ValueError, match=r"^out overlaps v in memory"):
        flash_attention(q, k, v, out=Producer(v[:, ::-1]))
    with pytest.raises(ValueError, match=r"^lse_out overlaps k in memory"):
        flash_attention(q, k, v, out=aside, lse_out=buffer[990:1030].reshape(1, 4, 10))
    assert digest(buffer) == before
    expected = flash_attention(q, k, v, seqlens_k=lens)
    assert flash_attention(q, k, v, out=aside, seqlens_k=lens) is aside
    np.testing.assert_array_equal(aside, expected)


def test_a_failed_call_leaves_outputs_alone() -> None:
    """Whatever fails: shapes, options, lengths."""
    q, k, v = qkv()
    out, lse_out = full(2, 9, 4, 24), full(2, 4, 9)
    failing: list[dict[str, Any]] = [
        {"seqlens_k": np.array([3, 14], np.int32)},
        {"seqlens_q": np.array([-1, 9], np.int32)},
        {"seqlens_q": np.array([1], np.int32)},
        {"seqlens_k": np.array([1, 2])},
        {"softcap": -1},
        {"window": (1.5, 0)},
        {"layout": "bhsd"},
        {"stream": 0},
    ]
    for options in failing:
        with pytest.raises((ValueError, TypeError)):
            flash_attention(q, k, v, out=out, lse_out=lse_out, **options)
    with pytest.raises(ValueError, match="k has 12 rows"):
        flash_attention(q, k[:, 1:], v, out=out, lse_out=lse_out)
    assert (out == 7).all()
    assert (lse_out == 7).all()


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
@pytest.mark.parametrize("name", ["do", "o", "lse", "dlse"])
def test_backward_arrays_must_fit(name: str, wrong: str) -> None:
    """Shape and dtype of o and lse, also for their gradients."""
    q, k, v, do = make_inputs(SHAPE)
    o, lse = flash_attention(q, k, v, return_lse=True)
    named = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": lse}
    array = named[name]
    bad = array[:, :1] if wrong == "shape" else array.astype("float64")
    error = ValueError if wrong == "shape" else TypeError
    message = f"^{name} has shape .*; it must be" if wrong == "shape" else f"^{name} is float64;"
    with pytest.raises(error, match=message):
        flash_attention_backward(**{**named, name: bad})


# lengths


@pytest.mark.parametrize("name", ["seqlens_q", "seqlens_k"])
def test_lengths(name: str) -> None:
    """Strided, read-only and foreign int32 arrays are read; anything else is refused."""
    q, k, v = qkv()
    good = np.array([4, 9], np.int32)

    def attend(lengths: Any) -> Any:
        named: dict[str, Any] = {name: lengths}
        return flash_attention(q, k, v, **named)

    expected = attend(good)
    frozen = np.array([4, 0, 9, 0], np.int32)[::2]
    frozen.flags.writeable = False
    for spelling in (frozen, np.array([9, 4], np.int32)[::-1], Producer(good), OldProducer(good)):
        np.testing.assert_array_equal(attend(spelling), expected)
    for dtype in ("int64", "uint32", "int16", "float32", "bool"):
        with pytest.raises(TypeError, match=f"^{name} .*{dtype}.*int32"):
            attend(good.astype(dtype))
    for shape in ((1,), (3,), (2, 1), (0,)):
        with pytest.raises(ValueError, match=rf"^{name} has shape .*; it must be \(B,\) = \(2,\)"):
            attend(np.zeros(shape, np.int32))
    longest = 9 if name == "seqlens_q" else 13
    for bad in (-1, longest + 1, 2**31 - 1, -(2**31)):
        with pytest.raises(ValueError, match=rf"^{name}\[1\]={bad} is outside 0\.\.{longest}$"):
            attend(np.array([1, bad], np.int32))
    with pytest.raises(TypeError, match=f"^{name} is a list; give a NumPy"):
        attend([4, 9])


# views


def view_of(shape: tuple[int, ...]) -> ArrayView:
    """A compact float32 view at address 1000."""
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return ArrayView(1000, shape, strides, "float32", ("cpu", 0), "numpy", False, None)


def test_canonical() -> None:
    """(B, S, H, D) through strides: same address, no copy."""
    bshd = view_of((2, 5, 3, 4))
    assert bshd.canonical("bshd") == bshd
    bhsd = view_of((2, 3, 5, 4)).canonical("bhsd")
    assert (bhsd.shape, bhsd.strides) == ((2, 5, 3, 4), (60, 4, 20, 1))
    for layout in ("bshd", "bhsd"):
        flat = view_of((6, 5, 4)).canonical(layout)
        assert (flat.shape, flat.strides) == ((6, 5, 1, 4), (20, 4, 0, 1))
    assert bhsd.pointer == 1000


def test_byte_range() -> None:
    assert view_of((2, 3)).byte_range() == (1000, 1024)
    assert view_of((2, 0)).byte_range() == (1000, 1000)
    backwards = ArrayView(1000, (4, 2), (-2, 3), "float16", ("cpu", 0), "numpy", False, None)
    assert backwards.byte_range() == (1000 - 12, 1000 + 8)


def test_no_copy_is_made_for_numpy() -> None:
    q, k, v = qkv()
    before = arrays.copy_count()
    for x in (q, q[:, ::-1], q.swapaxes(1, 2)):
        view = arrays.view("q", x, CPU)
        assert np.shares_memory(view.numpy(), x)
        np.testing.assert_array_equal(view.numpy(), x)
    flash_attention(q, k, v)
    assert arrays.copy_count() == before


def test_bfloat16_is_never_read_as_another_type() -> None:
    q, k, v = qkv("bfloat16")
    o = flash_attention(*map(Producer, (q, k, v)))
    assert o.dtype == ml_dtypes.bfloat16
    for other in ("uint16", "int16"):
        with pytest.raises(TypeError, match=f"q has dtype {other}; use float16, bfloat16"):
            flash_attention(q.view(other), k, v)


# what is imported


def child(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_framework_is_imported() -> None:
    """Not by the import, nor by NumPy calls in both directions, nor by errors."""
    code = """
import sys
import threading
import numpy as np
import cufa2
q = np.ones((1, 3, 2, 8), np.float32)
o, lse = cufa2.flash_attention(q, q, q, return_lse=True)
cufa2.flash_attention_backward(o, q, q, q, o, lse)
cufa2.FlashAttention2(8, "float32", device="cpu").forward(q, q, q)
try:
    cufa2.flash_attention([1], q, q)
except TypeError:
    pass
names = ("cupy", "torch", "jax", "ml_dtypes", "numba", "tensorflow")
print([n for n in names if n in sys.modules])
"""
    assert child(code).strip() == "[]"


def test_importing_is_quick() -> None:
    """Less than NumPy's own import would take; the best of three, since machines are busy."""
    code = """
import time
import numpy, ctypes, json, tempfile
start = time.perf_counter()
import cufa2
print(time.perf_counter() - start)
"""
    assert min(float(child(code)) for _ in range(3)) < 0.3


def test_held_arrays_are_let_go_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads at the head of the queue at once must not drop the entry behind it."""
    meeting = threading.Barrier(2)

    class Finished:
        @property
        def done(self) -> bool:
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.2)  # lets a second thread get here, if anything does
            return True

    class Running:
        done = False

    behind = (Running(), ("an array in use",))
    monkeypatch.setattr(placement, "_held", collections.deque([(Finished(), ()), behind]))
    threads = [threading.Thread(target=placement.hold, args=((), None)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(placement._held) == [behind]
