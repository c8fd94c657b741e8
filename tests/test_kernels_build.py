"""Every row of KERNELS through NVRTC, for every architecture; no GPU is needed.

A kernel that spills registers, that ptxas has serialised wgmma in, or that does not fit the card
is a failure here, long before anyone runs it.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cufa2 import compiler, plan
from cufa2.cache import Cubin
from cufa2.device import DeviceInfo, info_for_arch
from cufa2.kernels import C_TYPES, KERNELS, MASKS, SCORES, Kernel, Variant
from cufa2.params import ALIGNMENT, FORMATS, PARAMS, SIZES, WORK_ROWS
from cufa2.problem import DTYPES, CompileError, Problem

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
REGISTERS = 65536  # 32-bit registers of a multiprocessor, on every architecture here


def serving(
    d: int, dv: int, dtype: str, mask: str, score: str, info: DeviceInfo, tf32: bool = False
) -> Iterator[Variant]:
    """What problems with these head dims compile to; `plan.variants` lists equal dims only."""
    bounds = {"full": (None, None), "causal": (None, 0), "left": (4, None), "local": (4, 4)}
    left, right = bounds[mask]
    for direction, deterministic in (("forward", False), ("backward", False), ("backward", True)):
        problem = Problem(
            direction=cast(Any, direction),
            dtype=dtype,
            batch=1,
            seqlen_q=1,
            seqlen_k=1,
            num_heads=1,
            num_heads_kv=1,
            head_dim=d,
            head_dim_v=dv,
            softmax_scale=1.0,
            softcap=1.0 if score == "softcap" else 0.0,
            window_left=left,
            window_right=right,
            deterministic=deterministic,
            precision="tf32" if tf32 else None,
        )
        yield from plan.choose(problem, info).variants


# Every instance of every architecture is some 7500 builds, too many for every run.
ALL_BUILDS = bool(os.environ.get("CUFA2_TEST_ALL_BUILDS"))


HALVES, WIDE = ("float16", "bfloat16"), ("float32", "float64")
# One architecture for each size of shared memory: they have all tiles of float32 and float64.
SMEM_SIZES = ("sm_80", "sm_86", "sm_90a")
EVERY_DIM = ("sm_80", "sm_90a")
LARGER = (64, 96, 128, 256)  # head dims at which tiles end
HARDEST = ("local", "softcap")  # for the registers


def wanted(v: Variant, arch: str) -> bool:
    """Whether to build this instance: every row, tile and head dim of two architectures, every
    tile of the others, and all policies on sm_90a.

    There bfloat16 has one or two policies of each head dim and the others in turn, causal alone if
    deterministic. sm_80 and sm_86, cards with less shared memory, have two policies in bfloat16 at
    one size, the others causal alone. float16 differs in two instructions: one mask at two
    sizes. float32 and float64, which take longest, see `wanted_wide`.
    CUFA2_TEST_ALL_BUILDS builds all.
    """
    plain, causal, sm_90a = v.score == "plain", v.mask == "causal", arch == "sm_90a"
    if ALL_BUILDS:
        return True
    if arch not in EVERY_DIM and v.head_dim not in LARGER:
        return False
    if not v.kernel.policies:
        return sm_90a or v.dtype == "bfloat16" or (v.dtype in WIDE and v.head_dim == 64)
    if v.dtype not in HALVES:
        return wanted_wide(v, arch)
    if v.dtype == "float16" or v.deterministic:
        sizes = v.head_dim in (64, 256) or v.head_dim != v.head_dim_v
        return causal and plain and sm_90a and sizes
    two = (causal and plain) or ((v.mask, v.score) == HARDEST and v.head_dim > 32)
    if sm_90a:
        return two or in_turn(v)
    if arch in ("sm_80", "sm_86") and v.head_dim == 64:
        return two
    # A head dim has another tile with softcap if one of its tiles is for one score only.
    choosy = any(
        t.scores != tuple(SCORES) and t.max_head_dim >= v.head_dim for t in v.kernel.tiles
    )
    return causal and (plain or (choosy and v.head_dim in (96, 128)))


def in_turn(v: Variant) -> bool:
    """One head dim of a kernel for each of its policies."""
    turn = list(itertools.product(MASKS, SCORES)).index((v.mask, v.score))
    return v.head_dim == LARGER[turn % len(LARGER)]


def wanted_wide(v: Variant, arch: str) -> bool:
    """Of float32 and float64: every tile on sm_90a, with all policies of float32 in turn; the
    tiles of cards with less shared memory; one head dim where another architecture has the same
    tiles; on sm_90a TF32, which leaves instructions of float32 out, and deterministic ones."""
    sm_90a, causal = arch == "sm_90a", (v.mask, v.score) == ("causal", "plain")
    if v.tf32 or v.deterministic:
        return sm_90a and causal and v.head_dim in (LARGER if v.tf32 else (64,))
    if not sm_90a:
        sizes = (64, 128, 256, 192 if v.dtype == "float64" else 64)
        return causal and v.head_dim in (sizes if arch in SMEM_SIZES else (64,))
    if v.dtype == "float32" and in_turn(v):
        return True
    ends = v.head_dim in LARGER or (v.dtype == "float64" and v.head_dim == 192)
    hardest = (v.mask, v.score) == HARDEST and v.head_dim in (64, 256)
    return (causal and ends) or hardest


# Pairs of Dv != D in which stretches, warps, sides and staging differ, by architecture and dtype.
PAIRS: dict[str, dict[str, tuple[tuple[int, int], ...]]] = {
    "sm_80": {"bfloat16": ((192, 128),)},
    "sm_86": {"bfloat16": ((64, 256),)},
    "sm_90a": {
        "bfloat16": ((192, 128), (64, 256), (256, 32), (96, 32)),
        "float32": ((192, 128), (64, 256)),
        "tf32": ((96, 256),),
        "float64": ((192, 128), (64, 256)),
    },
}


def builds() -> list[tuple[str, Variant]]:
    """What `wanted` says, and the PAIRS."""
    chosen = []
    for arch in ARCHS:
        info = info_for_arch(arch)
        chosen += [(arch, v) for v in plan.variants(info) if wanted(v, arch)]
        for kind, pairs in PAIRS.get(arch, {}).items():
            dtype, fast = ("float32", True) if kind == "tf32" else (kind, False)
            for d, dv in pairs:
                found = serving(d, dv, dtype, "causal", "plain", info, fast)
                chosen += [(arch, v) for v in found]
    return list(dict.fromkeys(chosen))


BUILDS = builds()
IDS = [f"{arch}-{v.name}" for arch, v in BUILDS]


def build_named(name: str, arch: str, folder: Path) -> Cubin:
    """A build in a process of its own: rows of the table are not sent, they are themselves."""
    variant = next(v for a, v in BUILDS if (a, v.name) == (arch, name))
    return compiler.build(variant, arch, folder=folder)


@pytest.fixture(scope="module")
def cubin_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[tuple[str, Variant]], Cubin]]:
    """Gives the cubin of a build. NVRTC builds one at a time in a process: where tests have no
    processes of their own (pytest-xdist), all builds of this run are begun here, one a core."""
    folder = tmp_path_factory.mktemp("kernels")
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield lambda build: compiler.build(build[1], build[0], folder=folder)
        return
    selected = [
        cast(tuple[str, Variant], item.callspec.params["build"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function is test_kernel
        and "build" in item.callspec.params
    ]
    with ProcessPoolExecutor(os.cpu_count() or 2, mp_context=get_context("spawn")) as pool:
        begun = {(arch, v): pool.submit(build_named, v.name, arch, folder) for arch, v in selected}
        yield lambda build: begun[build].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_kernel(
    build: tuple[str, Variant], cubin_of: Callable[[tuple[str, Variant]], Cubin]
) -> None:
    """Builds, spills nothing, keeps wgmma asynchronous, and fits the card it is for."""
    arch, variant = build
    cubin, info, tile = cubin_of(build), info_for_arch(arch), variant.tile
    assert (cubin.name, cubin.arch) == (variant.name, arch)
    assert re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", cubin.log) == [
        (variant.name, arch)
    ]
    assert cubin.spill_bytes == 0, cubin.log
    assert set(re.findall(r"(\d+) bytes spill", cubin.log)) == {"0"}, cubin.log
    assert "C75" not in cubin.log, "ptxas has serialised wgmma instructions"
    # Registers are handed out in units of 8 per thread.
    per_thread = -(-cubin.registers // 8) * 8
    assert 0 < per_thread * 32 * tile.warps * tile.min_blocks <= REGISTERS
    assert variant.smem_bytes + cubin.shared_memory <= info.smem_per_block
    if variant.kernel.max_cc == (9, 0):
        assert_descriptors_stay_uniform(cubin)


# Machine instructions of sm_90 by the low 12 bits of their first word.
R2UR, HGMMA = (0x2CA,), (0x9F0, 0xDF0)


def instructions(image: bytes, name: str) -> list[int]:
    """The instruction codes of a kernel of a cubin, an ELF file of 64 bits."""
    (sections,) = struct.unpack_from("<Q", image, 0x28)
    count, names = struct.unpack_from("<HH", image, 0x3C)
    heads = [struct.unpack_from("<IIQQQQ", image, sections + 64 * i) for i in range(count)]
    for label, _, _, _, start, size in heads:
        at = heads[names][4] + label
        if image[at : image.index(b"\0", at)].decode() == f".text.{name}":
            return [
                struct.unpack_from("<Q", image, start + i)[0] & 0xFFF for i in range(0, size, 16)
            ]
    raise AssertionError(f"no code of {name}")


def assert_descriptors_stay_uniform(cubin: Cubin) -> None:
    """AssertionError if registers are moved into those of the warp for each wgmma.

    Where ptxas cannot tell that a warp stays together, each product fetches its descriptors anew:
    three R2UR a product instead of one or fewer, and 3 to 9 % of the speed.
    """
    codes = instructions(cubin.path.read_bytes(), cubin.name)
    moves, products = (sum(c in kind for c in codes) for kind in (R2UR, HGMMA))
    assert products > 30, f"{cubin.name}: where are its products?"
    assert moves < 2 * products, f"{cubin.name}: {moves} R2UR for {products} products"


def test_the_builds_cover_the_table() -> None:
    """Each architecture, row and tile in use, of two each head dim; every mask and score."""
    for arch in ARCHS:
        mine = {v for a, v in BUILDS if a == arch}
        theirs = [
            v
            for v in plan.variants(info_for_arch(arch))
            if (v.dtype in HALVES and (arch in EVERY_DIM or v.head_dim in LARGER))
            or v.head_dim == 64
        ]
        assert {(v.kernel.name, v.head_dim, v.tile) for v in theirs} <= {
            (v.kernel.name, v.head_dim, v.tile) for v in mine if v.dtype != "float16"
        }
    policies = {(v.kernel.name, v.mask, v.score) for _, v in BUILDS}
    assert policies == {
        (k.name, m, s)
        for k in KERNELS
        for m in (MASKS if k.policies else ("full",))
        for s in (SCORES if k.policies else ("plain",))
    }
    assert {(v.kernel.name, v.dtype) for _, v in BUILDS} == {
        (k.name, dtype) for k in KERNELS for dtype in k.dtypes
    }
    used = {(v.kernel.name, v.tile) for _, v in BUILDS}
    rows = {(row.name, tile) for row in KERNELS for tile in row.tiles}
    assert used == rows, "a tile of the table serves no card"
    fast, exact = (
        {(v.kernel.name, v.tile) for arch, v in BUILDS if arch == "sm_90a" and v.tf32 == tf32}
        for tf32 in (True, False)
    )
    rows_of = {row.name for row in KERNELS if row.tf32}
    assert fast == {(name, t) for name, t in exact if name in rows_of and t.itemsize == 4}
    uneven = {
        (v.kernel.name, v.dtype) for _, v in BUILDS if v.head_dim != v.head_dim_v and not v.tf32
    }
    assert uneven == {
        (k.name, dtype)
        for k in KERNELS
        for dtype in k.dtypes
        if k.policies and (dtype != "float16" or k.pairs)
    }


# the parameter struct


def compile_unit(source: str, arch: str = "sm_80") -> str:
    """Compile a source of its own through the library's NVRTC call; returns the log."""
    unit: Any = SimpleNamespace(name="unit", kernel=SimpleNamespace(file="unit.cuh"))
    return compiler._compile(source, unit, arch)[1]


PARAMS_FILE = "attn/params_sm90.cuh"  # includes that of the others


def params_unit(checks: list[str], struct_name: str) -> str:
    return "\n".join(
        [
            *(f"#define {compiler.SIZE_NAMES[name]} {size}" for name, size in SIZES.items()),
            compiler.flatten(PARAMS_FILE),
            *checks,
            f'extern "C" __global__ void unit(const __grid_constant__ {struct_name} p) {{}}',
        ]
    )


def offset_of(struct_name: str, index: int) -> int:
    """Where `struct.pack` puts a field: after the fields before it, and their padding."""
    layout = PARAMS[struct_name]
    upto = "".join(code for _, code in layout[: index + 1])
    return struct.calcsize(upto) - struct.calcsize(layout[index][1])


def offset_check(struct_name: str, index: int, place: int) -> str:
    """C++ that compiles iff the field lies there. NVRTC has no offsetof; this is what it expands
    to in compilers of the same front end."""
    name = PARAMS[struct_name][index][0]
    address = f"__INTADDR__(&static_cast<{struct_name}*>(nullptr)->{name})"
    return f'static_assert({address} == {place}, "{name} moved");'


@pytest.mark.parametrize("struct_name", PARAMS)
def test_params_have_the_offsets_that_python_packs(struct_name: str) -> None:
    """Name by name: offset and type of every field, and no field more."""
    types = {"q": "i64", "i": "int", "f": "float", "d": "double", "128s": "TensorMap"}
    checks = []
    for index, (name, code) in enumerate(PARAMS[struct_name]):
        checks.append(offset_check(struct_name, index, offset_of(struct_name, index)))
        field = f"decltype(static_cast<{struct_name}*>(nullptr)->{name})"
        if code == "Q":
            checks.append(f"template <class T> constexpr bool pointer_{index} = false;")
            checks.append(f"template <class T> constexpr bool pointer_{index}<T*> = true;")
            test = f"pointer_{index}<{field}>"
        else:
            test = f"is_same<{field}, {types[code]}>"
        checks.append(f'static_assert({test}, "{name} has another type");')
    compile_unit(params_unit(checks, struct_name))
    padding = SIZES[struct_name] - struct.calcsize(FORMATS[struct_name])
    assert 0 <= padding < ALIGNMENT.get(struct_name, 1)
    assert SIZES[struct_name] % 8 == 0, "C pads the struct to its alignment"


@functools.cache
def tiles_in_use() -> dict[Kernel, set[Variant]]:
    """For each row a variant of every tile, dtype and pair of head dims that problems lead to."""
    found: dict[Kernel, set[Variant]] = {row: set() for row in KERNELS}
    sizes = sorted({d for row in KERNELS for d in row.head_dims})
    for arch, d, dv, dtype, score in itertools.product(ARCHS, sizes, sizes, DTYPES, SCORES):
        for tf32 in (False, True) if dtype == "float32" else (False,):
            for v in serving(d, dv, dtype, "full", score, info_for_arch(arch), tf32):
                found[v.kernel].add(replace(v, score="plain"))
    for arch in ARCHS:
        for v in plan.variants(info_for_arch(arch)):
            if v.kernel.pairs:
                found[v.kernel].add(replace(v, mask="full", score="plain"))
    return found


@pytest.mark.parametrize("row", [k for k in KERNELS if k.policies], ids=lambda row: row.name)
def test_python_knows_the_shared_memory_of_every_tile(row: Kernel) -> None:
    """Variant.smem_bytes is the kBytes of its C++ tile, for D != Dv too; of a kernel that has
    atomics the instance without them may use less."""
    checks = []
    for v in tiles_in_use()[row]:
        flags = [v.adds_dq] * bool(row.atomics) + [v.tf32] * row.tf32
        sizes = (str(a).lower() for a in (*v.tile.arguments, *flags))
        arguments = ", ".join([C_TYPES[v.dtype], str(v.head_dim), str(v.head_dim_v), *sizes])
        relation = "<=" if v.deterministic else "=="
        used = f"{row.tile_type}<{arguments}>::kBytes"
        checks.append(f'static_assert({used} {relation} {v.smem_bytes}, "{v.name} uses other");')
    assert {v.tile for v in tiles_in_use()[row]} == set(row.tiles)
    header, whole = (compiler.flatten(file) for file in (PARAMS_FILE, row.file))
    compile_unit(params_unit(checks, row.params).replace(header, whole))
    checks[-1] = checks[-1].replace("kBytes", "kBytes + (1 << 20)")
    with pytest.raises(CompileError, match=r'failed with "\w+ uses other"'):
        compile_unit(params_unit(checks, row.params).replace(header, whole))


MOVED = [(name, index) for name in PARAMS for index in (0, len(PARAMS[name]) // 2, -1)]


@pytest.mark.parametrize(("struct_name", "index"), MOVED)
def test_a_moved_field_is_noticed(struct_name: str, index: int) -> None:
    index %= len(PARAMS[struct_name])
    failure = f'static assertion failed with "{PARAMS[struct_name][index][0]} moved"'
    wrong = offset_check(struct_name, index, offset_of(struct_name, index) + 4)
    with pytest.raises(CompileError, match=re.escape(failure)) as e:
        compile_unit(params_unit([wrong], struct_name))
    assert "1 error detected" in str(e.value)


@pytest.mark.parametrize("struct_name", PARAMS)
def test_a_struct_of_another_size_is_noticed(struct_name: str) -> None:
    size = SIZES[struct_name]
    said = f"{compiler.SIZE_NAMES[struct_name]} {size}"
    source = params_unit([], struct_name).replace(said, said.replace(str(size), str(size + 8)))
    with pytest.raises(CompileError, match=r'failed with "params\.py packs another layout"'):
        compile_unit(source)


def test_work_rows_are_the_same_number_everywhere() -> None:
    check = f'static_assert(kWorkRows == {WORK_ROWS}, "Python has another number");'
    compile_unit(params_unit([check], "BwdParams"))


# wrong sources


def test_a_wrong_source_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, line and text of the error, the options, the NVRTC version; nothing is cached."""
    sources = tmp_path / "cuda_src"
    for path in compiler.source_dir().rglob("*.cuh"):
        copy = sources / path.relative_to(compiler.source_dir())
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    broken = sources / "attn" / "softmax.cuh"
    line = len(broken.read_text().splitlines()) + 2
    broken.write_text(broken.read_text() + "\nint wrong = no_such_name;\n")
    monkeypatch.setattr(compiler, "source_dir", lambda: sources)
    monkeypatch.setattr(compiler, "flatten", compiler.flatten.__wrapped__)
    variant = next(iter(plan.variants(info_for_arch("sm_80"))))
    with pytest.raises(CompileError) as e:
        compiler.build(variant, "sm_80", folder=tmp_path / "cache")
    message = str(e.value)
    major, minor = compiler.nvrtc_version()
    assert f"NVRTC {major}.{minor} failed on {variant.kernel.file}" in message
    assert f"options: {' '.join(compiler.OPTIONS)} -arch=sm_80" in message
    assert f"attn/softmax.cuh({line}): error: " in message
    assert "no_such_name" in message
    assert not list((tmp_path / "cache").glob("*"))


def test_an_architecture_nvrtc_does_not_know(tmp_path: Path) -> None:
    variant = next(iter(plan.variants(info_for_arch("sm_80"))))
    with pytest.raises(CompileError, match=r"sm_999a needs a newer NVRTC: .*pip install") as e:
        compiler.build(variant, "sm_999a", folder=tmp_path)
    assert "-arch=sm_999a" in str(e.value)
    assert not list(tmp_path.glob("*"))
