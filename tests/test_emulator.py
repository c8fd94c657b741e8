"""The emulated card notices what is wrong with a kernel, and says where."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator import backend, build

from cufa2 import compiler

HEAD = """
struct Params { const u32* in; u32* out; int n; };
extern "C" __global__ void unit(const Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int t = thread_index();
"""
# What a kernel of two warps does, which all of them get right ...
RIGHT = """
  cp_async_16(shared + 16 * t, p.in + 4 * t, t < p.n);
  cp_async_commit();
  cp_async_wait<0>();
  block_sync();
  const Chunk c = load_shared_16(shared + 16 * (63 - t));
  u32 sum = c.word[0] + c.word[1] + c.word[2] + c.word[3];
  block_sync();
  store_shared_4(shared + 4 * t, sum);
  warp_sync();
  sum = load_shared_4(shared + 4 * (t ^ 1));
  group_sync(1 + t / 32, 32);
  p.out[t] = sum + __shfl_xor_sync(kFullWarp, sum, 1);
"""
# ... and what is reported if a piece of it is replaced.
WRONG = {
    "no wait": ("cp_async_wait<0>();", "", r"a copy of thread \d+ is still to write"),
    "a group too early": ("cp_async_wait<0>();", "cp_async_wait<1>();", "is still to write"),
    "no barrier after the copy": (
        "cp_async_wait<0>();\n  block_sync();",
        "cp_async_wait<0>();",
        "is still to write|that thread .* wrote, with no barrier|nobody wrote",
    ),
    "no barrier before the store": (
        "  block_sync();\n  store",
        "  store",
        r"that thread \d+ (read|wrote), with no barrier",
    ),
    "no warp barrier": (
        "warp_sync();",
        "",
        r"that thread \d+ (read|wrote), with no barrier|nobody wrote",
    ),
    "shared memory beyond the end": (
        "shared + 16 * (63 - t)",
        "shared + 16 * (64 - t)",
        r"reads 16 bytes at 1024 of 1024 bytes of shared memory",
    ),
    "shared memory that nobody wrote": (
        "16 * t, p.in + 4 * t, t < p.n",
        "16 * (t / 2 * 2), p.in, t % 2 == 0",
        "nobody wrote|is still to write|with no barrier",
    ),
    "a misaligned copy": ("p.in + 4 * t", "p.in + 4 * t + 1", "misaligned"),
    "an input beyond its end": ("p.in + 4 * t", "p.in + 4 * t + 4", "past the end of in"),
    "an input before its start": ("p.in + 4 * t", "p.in + 4 * t - 4", "bytes before in"),
    "an output beyond its end": ("p.out[t]", "p.out[t + 1]", "past the end of out"),
    "an input that is written": ("p.out[t]", "const_cast<u32*>(p.in)[t]", "where it may not"),
    "an output that is read": ("p.out[t] =", "p.out[t] +=", "that nobody wrote, at byte"),
    "an output left out": (
        "p.out[t] = sum + __shfl_xor_sync(kFullWarp, sum, 1);",
        "sum += __shfl_xor_sync(kFullWarp, sum, 1);\n  if (t != 5) p.out[t] = sum;",
        "nobody wrote at byte 20 of out",
    ),
    "an output of two threads": ("p.out[t]", "p.out[t / 2]", "with no barrier in between"),
    "a barrier that half a block comes to": (
        "block_sync();\n  const",
        "if (t < 32) block_sync();\n  const",
        "deadlock|with no barrier|thread .* wrote",
    ),
    "a named barrier of too many": ("32);\n  p.out", "64);\n  p.out", "deadlock.*barrier 1 of 64"),
    "lanes that miss a shuffle": (
        "p.out[t] = sum +",
        "if (t % 2) p.out[t] = 0; else p.out[t] = sum +",
        "deadlock.*for their warp to come to a shuffle",
    ),
    "an index beyond an array": ("c.word[3]", "c.word[t / 16 + 1]", "an index outside its array"),
    "a product that overflows": (
        "p.out[t] = sum",
        "const int many = t * 0x4000000;\n  p.out[t] = (many > 5) + sum",
        "a product overflows",
    ),
    "a copy that nobody waits for": (
        "  p.out[t] = sum",
        "  cp_async_16(shared + 16 * t, p.in, false);\n  p.out[t] = sum",
        "cp.async in flight|is still to write|with no barrier",
    ),
}


def declared(path: Path) -> set[str]:
    """Functions and structs of a header, with the types of what they take."""
    text = re.sub(r"//.*", "", path.read_text())
    functions = re.findall(r"CUFA2_DEVICE [\w ]+? (\w+)\(([^)]*(?:\([^)]*\)[^)]*)*)\) ?\{", text)
    kinds = [
        (
            name,
            ", ".join(
                re.sub(r" ?\b\w+$", "", " ".join(p.split()).split(" =")[0])
                for p in taken.split(",")
            ),
        )
        for name, taken in functions
    ]
    structs = re.findall(r"^struct (?:alignas\(\d+\) )?(\w+ \{.*\});", text, re.MULTILINE)
    return {f"{name}({kind})" for name, kind in kinds} | set(structs)


def test_each_header_with_ptx_has_its_twin() -> None:
    """With the same functions. What has none is compiled as it is."""
    real = {p.name: p for p in (compiler.source_dir() / "prim").glob("*.cuh")}
    twins = {p.name: p for p in (build.HERE / "prim").glob("*.cuh")}
    assert {n for n, p in real.items() if re.search(r"\basm\b", p.read_text())} == twins.keys()
    for name, twin in twins.items():
        assert declared(real[name]), name
        assert declared(real[name]) == declared(twin), name


def run(body: str, seed: int) -> np.ndarray[Any, Any]:
    """The output of a kernel with this body, in one block of 64 threads."""
    text = compiler.flatten("unit.cuh", (build.HERE, build.HERE / "unit"))
    path = build.kernel(f'{text}\n#line 1 "body"\n{HEAD}{body}}}\n', "unit", "Params", "sm_90a")
    data = np.arange(256, dtype=np.uint32)
    out = np.full(64, 0xFFFFFFFF, np.uint32)
    backend.register(
        [
            ("in", data.ctypes.data, (240,), (4,), 4, 1),
            ("out", out.ctypes.data, (64,), (4,), 4, 6),
        ]
    )
    packed = np.zeros(1, [("in", "u8"), ("out", "u8"), ("n", "i4"), ("pad", "i4")])
    packed["in"], packed["out"], packed["n"] = data.ctypes.data, out.ctypes.data, 60
    function = backend.Function("unit", path, itertools.count(seed))
    function((1, 1), (64,), (np.void(packed.tobytes()),), shared_mem=1024)
    backend.check_written("unit")
    return out


pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.parametrize("seed", range(6))
def test_a_right_kernel_passes(seed: int) -> None:
    t = np.arange(64)
    sums = np.where(63 - t < 60, 4 * 4 * (63 - t) + 6, 0)
    np.testing.assert_array_equal(run(RIGHT, seed), sums + sums[t ^ 1])


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_does_not(fault: str) -> None:
    old, new, report = WRONG[fault]
    assert RIGHT.count(old) == 1, "the fault is at one place"
    for seed in range(6):
        with pytest.raises(backend.EmulatorError, match=f"(?s){report}") as raised:
            run(RIGHT.replace(old, new), seed)
    if "nobody wrote at byte" not in report:
        assert "body:" in str(raised.value), "the line in the kernel"
