"""The primitives of cuda_src on real numbers: on a GPU, on the emulated card, and as recorded.

`python tests/primitives.py FILE.npz` records what this machine's GPU returns, for RECORDED.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from emulator import backend, build

from cufa2 import compiler, device

FOLDER = build.HERE / "unit"
RECORDED = FOLDER / "nvidia-h200.npz"
THREADS, BLOCKS, SHARED_BYTES = 64, 24, 2048
Array = np.ndarray[Any, Any]


# Twins whose units are in hopper.cuh, a kernel each.
HOPPER = ("mbarrier.cuh", "tma.cuh", "wgmma.cuh", "warpgroup.cuh")


def code_of(file: Path) -> str:
    """A source without its comments."""
    return re.sub("//.*", "", file.read_text())


def functions_of(file: Path) -> list[str]:
    """The names of the functions that a header defines."""
    found = re.findall(r"CUFA2_DEVICE [\w ]+? (\w+)\(", code_of(file))
    assert found, file
    return found


class Unit(NamedTuple):
    """A UNIT of primitives.cuh."""

    name: str
    words: int
    results: int
    kind: str
    ulps: int


def units() -> list[Unit]:
    """All of them, in order."""
    text = (FOLDER / "primitives.cuh").read_text()
    found = re.findall(r"^UNIT\((\w+), (\d+), (\d+), (\w+), (\d+)\) \{", text, re.MULTILINE)
    return [Unit(name, int(n), int(m), kind, int(ulps)) for name, n, m, kind, ulps in found]


def source(folders: tuple[Path, ...]) -> str:
    """One kernel that runs the unit it is told to."""
    cases = "\n".join(
        f"    case {i}: unit_{u.name}(p.in + {u.words} * thread, p.out + {u.results} * thread, "
        "shared, t); break;"
        for i, u in enumerate(units())
    )
    return f"""{compiler.flatten("primitives.cuh", folders)}
struct Params {{ const u32* in; u32* out; i64 unit; }};
extern "C" __global__ void primitives(const __grid_constant__ Params p) {{
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int t = thread_index(), thread = static_cast<int>(blockIdx.x) * {THREADS} + t;
  switch (p.unit) {{
{cases}
  }}
}}
"""


# Inputs, the same numbers forever: bits of a counter, scrambled.


def scrambled(name: str, count: int) -> Array:
    """`count` random 64-bit words that are this name's own (splitmix64)."""
    x = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 32)
    x *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed


class Format(NamedTuple):
    """A binary floating-point format: widths of its fields, and the type its bits are kept in."""

    exponent: int
    fraction: int
    kept: str


FP16, BF16 = Format(5, 10, "u2"), Format(8, 7, "u2")
FP32, FP64 = Format(8, 23, "u4"), Format(11, 52, "u8")


def numbers(name: str, count: int, form: Format, kind: int) -> Array:
    """`count` numbers of a format, as bits: of like magnitude (0); of magnitudes that differ by
    2^12 (1), by 2^60 (2) or by all there is (3); many zeros of both signs (4); powers of two (5);
    subnormal and the smallest normal ones (6); with infinities and NaN (7)."""
    word = scrambled(name, count)
    top, bias = (1 << form.exponent) - 1, (1 << form.exponent - 1) - 1
    spread = {1: 6, 2: 30, 3: top, 4: 6, 5: 30}.get(kind, 2)
    low, high = max(1, bias - spread), min(top - 1, bias + spread)
    if kind == 6:
        low, high = 0, 3
    share = (word >> np.uint64(1)) % np.uint64(1 << 10)
    exponent = np.uint64(low) + (word >> np.uint64(11)) % np.uint64(high - low + 1)
    fraction = scrambled(name + " fraction", count) >> np.uint64(64 - form.fraction)
    if kind == 5:
        fraction[:] = 0
    if kind == 4:
        zero = share < 600
        exponent[zero], fraction[zero] = 0, 0
    if kind == 7:
        for end, value in ((6, 1), (24, 0)):
            chosen = share < end
            exponent[chosen], fraction[chosen] = top, value << form.fraction - 1
    sign = word & np.uint64(1)
    bits = (((sign << np.uint64(form.exponent)) | exponent) << np.uint64(form.fraction)) | fraction
    kept: Array = bits.astype(form.kept)
    return kept


# Words of each unit, by format; others take 32 random bits.
FORMATS: dict[str, tuple[Format, ...]] = {
    "product_fp16": (FP16,) * 12 + (FP32,) * 4,
    "product_bf16": (BF16,) * 12 + (FP32,) * 4,
    "product_tf32": (FP32,) * 10,
    "product_float64": (FP64,) * 10,
    "pack_fp16": (FP32, FP32),
    "pack_bf16": (FP32, FP32),
    "round_to_tf32": (FP32,),
    "exponential": (FP32,),
    "reciprocal": (FP32,),
    "lanes": (FP32,),
    "lanes_of_a_warp": (FP32,),
    "lanes_of_doubles": (FP64,),
    "power_of_2": (FP64,),
    "arithmetic": (FP32, FP32, FP32),
    "arithmetic_of_doubles": (FP64, FP64, FP64),
    "logarithm": (FP32,),
    "hyperbolic_tangent": (FP32,),
    "logarithm_of_doubles": (FP64,),
    "hyperbolic_tangent_of_doubles": (FP64,),
}
KINDS = 8
# What a function is for: its numbers are drawn from here in some of the blocks.
RANGES = {
    "exponential": (-140.0, 130.0),
    "power_of_2": (-1100.0, 1023.0),
    "hyperbolic_tangent": (-12.0, 12.0),
    "hyperbolic_tangent_of_doubles": (-22.0, 22.0),
    "pack_fp16": (-70000.0, 70000.0),
}


def inputs(unit: Unit) -> Array:
    """Words (blocks, threads, words) of a unit: each kind of numbers fills a block in turn."""
    shape = (BLOCKS, THREADS, unit.words)
    formats = FORMATS.get(unit.name)
    if formats is None:
        return scrambled(unit.name, int(np.prod(shape))).astype("u4").reshape(shape)
    blocks = []
    for block in range(BLOCKS):
        columns = [
            numbers(f"{unit.name} {block} {i}", THREADS, form, block % KINDS)
            for i, form in enumerate(formats)
        ]
        if unit.name in RANGES and block >= BLOCKS // 2:
            low, high = RANGES[unit.name]
            share = scrambled(f"{unit.name} {block}", THREADS).astype("f8") / 2**64
            kind = {"u4": "f4", "u8": "f8"}[formats[0].kept]
            columns[0] = (low + (high - low) * share).astype(kind).view(formats[0].kept)
        rows = [b"".join(x.tobytes() for x in row) for row in zip(*columns, strict=True)]
        blocks.append(np.frombuffer(b"".join(rows), "u4").reshape(THREADS, unit.words))
    return np.stack(blocks)


def params(words: int, out: int, number: int) -> Array:
    """The kernel's parameters."""
    return np.array([words, out, number], "u8")


@functools.cache
def _emulated() -> Path:
    return build.kernel(source((build.HERE, FOLDER)), "primitives", "Params", "sm_90a")


def on_emulator(unit: Unit) -> Array:
    """Its results (blocks, threads, results) on the emulated card, as words."""
    words, out = aligned(inputs(unit)), aligned(np.zeros((BLOCKS, THREADS, unit.results), "u4"))
    out[...] = 0xFFFFFFFF
    backend.register(
        [
            ("in", words.ctypes.data, words.shape, words.strides, 4, 1),
            ("out", out.ctypes.data, out.shape, out.strides, 4, 6),
        ]
    )
    packed = params(words.ctypes.data, out.ctypes.data, units().index(unit))
    function = backend.Function(
        "primitives", _emulated(), itertools.count(zlib.crc32(unit.name.encode()))
    )
    function((BLOCKS, 1), (THREADS,), (np.void(packed.tobytes()),), shared_mem=SHARED_BYTES)
    backend.check_written(unit.name)
    return out


def aligned(x: Array) -> Array:
    """A copy at a multiple of 16 bytes, as GPU memory is."""
    raw = np.empty(x.nbytes + 16, np.uint8)
    made: Array = raw[-raw.ctypes.data % 16 :][: x.nbytes].view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


@functools.cache
def _function() -> Any:
    """Compiled as the product's kernels are: CuPy by itself would flush subnormal numbers."""
    named: Any = SimpleNamespace(name="primitives", kernel=SimpleNamespace(file="primitives.cuh"))
    image, _ = compiler._compile(source((FOLDER,)), named, device.info(0).arch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "primitives.cubin"
        path.write_bytes(image)
        return device.cupy().RawModule(path=str(path)).get_function("primitives")


def on_gpu(unit: Unit) -> Array:
    """The same on this machine's GPU."""
    cupy = device.cupy()
    words = cupy.asarray(inputs(unit))
    out = cupy.full((BLOCKS, THREADS, unit.results), 0xFFFFFFFF, "u4")
    packed = params(words.data.ptr, out.data.ptr, units().index(unit))
    _function()((BLOCKS,), (THREADS,), (np.void(packed.tobytes()),), shared_mem=SHARED_BYTES)
    return np.asarray(out.get())


def assert_agree(unit: Unit, a: Array, b: Array) -> None:
    """AssertionError unless two results of a unit are as alike as it says."""
    kind = {"u32": "u4", "float": "f4", "double": "f8"}[unit.kind]
    a, b = (np.ascontiguousarray(x).view(kind) for x in (a, b))
    if kind == "u4":
        np.testing.assert_array_equal(a, b, unit.name)
        return
    integer = {"f4": "i4", "f8": "i8"}[kind]
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not unit.ulps:
        same &= (np.signbit(a) == np.signbit(b)) | np.isnan(a)
    apart = np.abs(a.view(integer).astype(object) - b.view(integer).astype(object))
    wrong = ~same & ~(apart <= unit.ulps)
    where = np.argwhere(wrong)
    if len(where):
        at = tuple(where[0])
        raise AssertionError(
            f"{unit.name}: {len(where)} of {a.size} results are apart, the first at "
            f"{tuple(map(int, at))}: {a[at]!r} and {b[at]!r}"
        )


def main(path: str) -> None:
    """Record this machine's GPU."""
    results: Any = {u.name: on_gpu(u) for u in units()}
    np.savez_compressed(path, card=np.array(device.info(0).name), **results)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main(sys.argv[1])
