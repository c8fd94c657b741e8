"""prim/{mbarrier,tma,wgmma,warpgroup}.cuh and tile/blocked.cuh, each product and ring by itself:
exact on whole numbers, on the emulated card and on a Hopper one."""

from __future__ import annotations

import functools
import itertools
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gpu_oracle as oracle
import numpy as np
import primitives
import pytest
from emulator import backend, build
from test_plan import problem

from cufa2 import compiler, device, params
from cufa2.kernels import C_TYPES
from cufa2.testing import Backend, numpy_dtype

Array = np.ndarray[Any, Any]
THREADS = 384
FOLDER = build.HERE / "unit"


def source(body: str, folders: tuple[Path, ...]) -> str:
    return (
        f"{compiler.flatten('hopper.cuh', folders)}\n"
        f'extern "C" __global__ void __launch_bounds__({THREADS}, 1)\n'
        f"unit(const __grid_constant__ HopperParams params) {{\n  {body}(params);\n}}\n"
    )


@functools.cache
def on_card(body: str) -> Any:
    named: Any = SimpleNamespace(name="unit", kernel=SimpleNamespace(file="hopper.cuh"))
    image, log = compiler._compile(source(body, (FOLDER,)), named, "sm_90a")
    assert "C75" not in log, log
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "unit.cubin"
        path.write_bytes(image)
        function = device.cupy().RawModule(path=str(path)).get_function("unit")
    function.max_dynamic_shared_size_bytes = 220 * 1024
    return function


@functools.cache
def emulated(body: str) -> Any:
    text = source(body, (build.HERE, FOLDER))
    path = build.kernel(text, "unit", "HopperParams", "sm_90a")
    return backend.Function("unit", path, itertools.count())


def launch(
    where: Backend, body: str, tensors: list[Any], boxes: list[int], out: list[Any], numbers: Any
) -> None:
    """One launch of `grid` blocks: numbers are (grid, count, row, head, batch)."""
    grid, *numbers = numbers
    packed = b""
    with mock.patch.object(
        device,
        "encode_tensor_map",
        backend.encode_tensor_map if where.name == "emulated" else device.encode_tensor_map,
    ):
        for x, rows in zip(tensors, boxes, strict=True):
            strides = [s // x.itemsize for s in x.strides]
            packed += device.tensor_map(x.data.ptr, x.shape, strides, x.dtype.name, rows)
    packed += struct.pack("5Q4i", *(x.data.ptr for x in out), *numbers)
    params = np.void(packed.ljust(-(-len(packed) // 64) * 64, b"\0"))
    if where.name == "emulated":
        known = [
            (f"array {n}", x.data.ptr, x.shape, x.strides, x.itemsize, 1 if n < 2 else 3)
            for n, x in enumerate((*tensors, *out))
        ]
        backend.register(known)
        function = emulated(body)
    else:
        function = on_card(body)
    function((grid, 1), (THREADS,), (params,), shared_mem=200 * 1024)


@pytest.fixture(autouse=True)
def hopper(card: Backend) -> Any:
    with card.of("sm_90a"):
        if device.info(0).cc != (9, 0):
            pytest.skip("needs a Hopper card")
        yield


def whole(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """-1, 0 and 1: their products and sums are exact in 16 bits and in float32."""
    made = np.random.default_rng(seed).integers(-1, 2, shape).astype(numpy_dtype(dtype))
    return oracle.to_device(made)


def swizzled(tile: Array) -> Array:
    """A (rows, D) tile in blocks of 64 columns, 16-byte chunk c of row r at c ^ r % 8."""
    rows, d = tile.shape
    blocks = np.zeros((-(-d // 64), rows, 8, 8), tile.dtype)
    for c in range(d // 8):
        for r in range(rows):
            blocks[c // 8, r, (c % 8) ^ (r % 8)] = tile[r, 8 * c : 8 * c + 8]
    return blocks.reshape(-1)


@pytest.mark.parametrize(
    ("dtype", "dim", "n", "dim_v"),
    [
        ("bfloat16", 64, 128, 64),
        ("float16", 128, 128, 128),
        ("bfloat16", 192, 112, 192),
        ("float16", 96, 96, 96),
        ("bfloat16", 256, 80, 256),
        ("float16", 256, 64, 256),
    ],
)
def test_products(card: Backend, dtype: str, dim: int, n: int, dim_v: int) -> None:
    """Boxes within tensors and over their ends, of real dims below the compiled ones."""
    seq, h = 150, 2
    for row, less in ((0, 0), (100, 8)):
        a = whole((2, seq, h, dim - less), dtype, 1)
        b = whole((2, n - less, h, dim - less), dtype, 2)
        c = whole((2, n - less, h, dim_v - less), dtype, 3)
        s, o = (oracle.empty((128, size), "float32") for size in (n, dim_v))
        columns = -(-dim // 64) * 64
        box = oracle.card().zeros((128 * columns // 2,), np.uint32)
        claims = oracle.card().zeros((2,), np.uint32)
        oracle.fill_nan(s, o)
        launch(
            card,
            f"products<{C_TYPES[dtype]}, {dim}, {n}, {dim_v}>",
            [a, b, c],
            [128, n, n],
            [s, o, box, claims, claims],
            (1, 0, row, 1, 1),
        )
        left = np.zeros((128, dim))
        left[: seq - row] = np.pad(oracle.host(a)[1, row : row + 128, 1], ((0, 0), (0, less)))
        right = np.zeros((n, dim))
        right[: n - less, : dim - less] = oracle.host(b)[1, :, 1]
        last = np.zeros((n, dim_v))
        last[: n - less, : dim_v - less] = oracle.host(c)[1, :, 1]
        lies = oracle.host(box).view(numpy_dtype(dtype))
        np.testing.assert_array_equal(lies, swizzled(left.astype(lies.dtype)))
        np.testing.assert_array_equal(oracle.host(s), -left @ right.T)
        np.testing.assert_array_equal(oracle.host(o), -left @ right.T @ last)


@pytest.mark.parametrize(("dtype", "dim", "n"), [("bfloat16", 64, 128), ("float16", 128, 64)])
def test_transposed_products(card: Backend, dtype: str, dim: int, n: int) -> None:
    a, b = (whole((2, 120, 2, dim), dtype, seed) for seed in (1, 2))
    c = whole((2, 25, 2, n - 8), dtype, 3)
    kept = oracle.host(c).copy()
    direct, by_rows = (oracle.empty((n, dim), "float32") for _ in range(2))
    fragment = oracle.card().zeros((256,), np.uint32)
    factors = oracle.to_device(np.arange(n, dtype=np.uint32))
    oracle.fill_nan(direct, by_rows)
    launch(
        card,
        f"transposed<{C_TYPES[dtype]}, {dim}, {n}>",
        [a, b, c],
        [128, n, 16],
        [direct, by_rows, fragment, factors, factors],
        (1, 0, 20, 1, 1),
    )
    left, right = (np.zeros((size, dim)) for size in (128, n))
    left[:120] = oracle.host(a)[1, :, 1]
    right[: min(n, 120)] = oracle.host(b)[1, :n, 1]
    expected = right @ left.T @ left
    factor = np.arange(n)[:, None]
    np.testing.assert_array_equal(oracle.host(direct), expected + factor)
    np.testing.assert_array_equal(oracle.host(by_rows), expected + factor)
    kept[1, 20:, 1] = (left @ right.T)[16:21, : n - 8]
    np.testing.assert_array_equal(oracle.host(c), kept)  # what lies outside is not written
    piece = oracle.host(fragment).view(np.float32).reshape(16, 16)
    np.testing.assert_array_equal(piece, (expected + factor)[16:32, 32:48])


def test_claims(card: Backend) -> None:
    """Every piece of work is somebody's; what is left behind are zeros."""
    unused = whole((1, 8, 1, 64), "bfloat16", 0)
    claims = oracle.card().zeros((37,), np.uint32)
    counter = oracle.card().zeros((2,), np.uint32)
    spare = oracle.empty((4,), "float32")
    for _ in range(2):
        claims[...] = 0
        arrays = [spare, spare, spare, claims, counter]
        launch(card, "claims", [unused] * 3, [64] * 3, arrays, (3, 37, 0, 0, 0))
        assert oracle.host(claims).tolist() == [1] * 37
        assert oracle.host(counter).tolist() == [0, 0]


def test_arrivals(card: Backend) -> None:
    unused = whole((1, 8, 1, 64), "bfloat16", 0)
    claims = oracle.card().zeros((40 * 64,), np.uint32)
    counter = oracle.card().zeros((1,), np.uint32)
    spare, sums = oracle.empty((4,), "float32"), oracle.empty((64,), "float32")
    for _ in range(2):
        oracle.fill_nan(sums)
        arrays = [sums, spare, spare, claims, counter]
        launch(card, "arrivals", [unused] * 3, [64] * 3, arrays, (40, 0, 0, 0, 0))
        assert oracle.host(sums).tolist() == [820] * 64
        assert oracle.host(counter).tolist() == [0]


def test_every_primitive_is_here() -> None:
    text = primitives.code_of(FOLDER / "hopper.cuh") + primitives.code_of(
        compiler.source_dir() / "tile" / "blocked.cuh"
    )
    for name in primitives.HOPPER:
        for function in primitives.functions_of(build.HERE / "prim" / name):
            assert function in text, f"{function} of {name}"


def test_what_tiles_share_does_not_depend_on_the_batch() -> None:
    for seqlen_k in (100, 5000, 131072):
        one, *others = (
            params.sharing(
                problem(batch=b, seqlen_q=1, seqlen_k=seqlen_k, num_heads=8, num_heads_kv=2),
                block_q=128,
                block_k=128,
                sm_count=132,
            )
            for b in (1, 3, 64)
        )
        assert others == [one, one], f"{seqlen_k} keys"
        assert (one["split_blocks"] > 0) == (seqlen_k > 2048), f"{seqlen_k} keys: {one}"
