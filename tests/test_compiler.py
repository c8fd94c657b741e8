"""Sources, keys and the cache of compiled kernels, also with many processes and damaged files.

Most tests compile a stand-in for the real sources, a kernel of one line that NVRTC builds in
milliseconds: the cache treats it like any other.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cufa2 import cache, compiler, device, plan
from cufa2.cache import Cubin
from cufa2.device import info_for_arch
from cufa2.problem import CompileError

ROOT = Path(__file__).resolve().parent.parent
ARCH = "sm_80"
VARIANT = next(iter(plan.variants(info_for_arch(ARCH))))

STAND_IN = """#pragma once
#include "attn/small.cuh"
template <class T, int D, int DV, int BQ, int BK, int W, bool Q> struct FwdTile {};
template <class Tile, class Mask, class Score> __device__ void fwd_sm80(const FwdParams& p) {
  *p.o = number();
}
"""
SMALL = """#pragma once
struct fp16_t {}; struct bf16_t {}; struct FullMask {}; struct PlainScore {};
struct FwdParams { float* o; };
__device__ float number() { return 1.0f; }
"""


def use_sources(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Compile from another folder, read anew at every call."""
    monkeypatch.setattr(compiler, "source_dir", lambda: folder)
    monkeypatch.setattr(compiler, "flatten", compiler.flatten.__wrapped__)


def write_stand_in(folder: Path) -> Path:
    (folder / "attn").mkdir(parents=True)
    (folder / "fwd_sm80.cuh").write_text(STAND_IN)
    (folder / "attn" / "small.cuh").write_text(SMALL)
    return folder


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in sources, in use."""
    folder = write_stand_in(tmp_path / "cuda_src")
    use_sources(monkeypatch, folder)
    return folder


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the real sources, in use."""
    folder = tmp_path / "cuda_src"
    shutil.copytree(compiler.source_dir(), folder)
    use_sources(monkeypatch, folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def key() -> str:
    return compiler._key(compiler.source_of(VARIANT), ARCH)


def build(folder: Path, **options: Any) -> Cubin:
    return compiler.build(VARIANT, ARCH, folder=folder, **options)


def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise CompileError("no NVRTC here")

    monkeypatch.setattr(compiler, "_nvrtc", missing)


def is_sound(cubin: Cubin) -> bool:
    """The image is an ELF file for a GPU, whole, and the one that its .json describes."""
    image = cubin.path.read_bytes()
    fields = json.loads(cubin.path.with_suffix(".json").read_text())
    return (
        image.startswith(b"\x7fELF")
        and VARIANT.name.encode() in image
        and fields["sha256"] == hashlib.sha256(image).hexdigest()
    )


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


# sources


def reachable(file: str, seen: set[str]) -> set[str]:
    """The files that `file` includes, itself included, by a walk of our own."""
    if file not in seen:
        seen.add(file)
        folder = Path(file).parent
        for name in re.findall(
            r'^#include "(.+)"', (compiler.source_dir() / file).read_text(), re.M
        ):
            reachable(Path(os.path.normpath(folder / name)).as_posix(), seen)
    return seen


@pytest.mark.parametrize(
    "file",
    sorted(
        p.relative_to(compiler.source_dir()).as_posix()
        for p in compiler.source_dir().rglob("*.cuh")
    ),
)
def test_flatten(file: str) -> None:
    """Every header once, nothing left to include, and #line names the place of every line."""
    flat = compiler.flatten(file)
    assert "#include" not in flat
    assert "#pragma once" not in flat
    texts: dict[str, list[str]] = {}
    name, number, covered = "", 0, dict[str, list[int]]()
    for line in flat.splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if directive:
            number, name = int(directive[1]), directive[2]
            continue
        if name not in texts:
            texts[name] = (compiler.source_dir() / name).read_text().splitlines()
        expected = texts[name][number - 1]
        assert line == ("" if expected == "#pragma once" else expected), f"{name}:{number}"
        covered.setdefault(name, []).append(number)
        number += 1
    assert set(covered) == reachable(file, set())
    for name, numbers in covered.items():
        rest = [n for n, x in enumerate(texts[name], 1) if not x.startswith("#include")]
        assert numbers == rest, f"{name} is there twice or not whole"


def test_source_names_the_variant() -> None:
    """One extern "C" entry with the variant's name, sizes as defines before it."""
    for variant in plan.variants(info_for_arch("sm_90a")):
        source = compiler.source_of(variant)
        assert source.count('extern "C"') == 1
        struct = variant.kernel.params
        assert f"\n{variant.name}(const __grid_constant__ {struct} params)" in source
        assert f"#define HEAD_DIM {variant.head_dim}\n" in source
        arguments = [str(a).lower() for a in variant.tile.arguments]
        arguments += [str(variant.adds_dq).lower()] * bool(variant.kernel.atomics)
        arguments += [str(variant.tf32).lower()] * variant.kernel.tf32
        assert "#define TILE_ARGUMENTS " + "".join(f", {a}" for a in arguments) + "\n" in source


def test_keys_tell_variants_apart() -> None:
    variants = list(plan.variants(info_for_arch("sm_90a")))
    sources = [compiler.source_of(v) for v in variants]
    keys = {compiler._key(s, a) for s in sources for a in ("sm_80", "sm_90a")}
    assert len(keys) == 2 * len(variants)


# keys


def test_every_source_text_is_in_the_key(copied: Path) -> None:
    """A change anywhere in any header that the kernel includes gives another key."""
    before = key()
    for name in sorted(reachable("fwd_sm80.cuh", set())):
        path = copied / name
        text = path.read_text()
        path.write_text(text + "// one more comment\n")
        assert key() != before, f"{name} is not in the key"
        path.write_text(text)
        assert key() == before
    (copied / "unused.cuh").write_text("int unused;\n")
    assert key() == before


def test_options_and_architecture_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    source = compiler.source_of(VARIANT)
    before = compiler._key(source, "sm_80")
    assert compiler._key(source, "sm_86") != before
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--use_fast_math"))
    assert compiler._key(source, "sm_80") != before


def test_keys_are_the_same_in_another_process() -> None:
    """No hash seed, no path of the checkout."""
    code = (
        "from cufa2 import compiler, plan, device\n"
        f"v = next(iter(plan.variants(device.info_for_arch({ARCH!r}))))\n"
        f"print(compiler._key(compiler.source_of(v), {ARCH!r}))"
    )
    result = child(code, PYTHONHASHSEED="7")
    assert result.stdout.strip() == key()
    assert str(ROOT) not in compiler.source_of(VARIANT)


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code with the checkout on the path; it must succeed."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


# hits and misses


def test_a_build_and_its_hit(sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit is the same Cubin, needs no NVRTC, reports no progress and writes nothing."""
    lines: list[str] = []
    made = build(folder, progress=lines.append)
    major, minor = compiler.nvrtc_version()
    assert lines == [f"compiling {VARIANT.name} for {ARCH} with NVRTC {major}.{minor}"]
    assert not made.cached
    assert (made.name, made.arch, made.nvrtc) == (VARIANT.name, ARCH, f"{major}.{minor}")
    assert made.registers > 0
    assert made.seconds > 0
    assert "ptxas" in made.log
    assert is_sound(made)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o644
    assert {p.suffix for p in folder.iterdir()} == {".cubin", ".json"}
    before = files_of(folder)
    no_nvrtc(monkeypatch)
    hit = build(folder, progress=lines.append)
    assert hit.cached
    assert {**vars(hit), "cached": False} == vars(made)
    assert len(lines) == 1
    assert files_of(folder) == before


def test_a_changed_source_is_another_entry(sources: Path, folder: Path) -> None:
    """Two versions of the library share a folder; each gets its own kernel."""
    small = sources / "attn" / "small.cuh"
    one = build(folder)
    small.write_text(SMALL.replace("1.0f", "2.0f"))
    two = build(folder)
    assert not two.cached
    assert two.path != one.path
    assert two.path.read_bytes() != one.path.read_bytes()
    assert build(folder) == Cubin(**{**vars(two), "cached": True})
    small.write_text(SMALL)
    assert build(folder) == Cubin(**{**vars(one), "cached": True})


def test_architectures_are_separate_entries(sources: Path, folder: Path) -> None:
    made = {compiler.build(VARIANT, arch, folder=folder).path for arch in ("sm_80", "sm_90a")}
    assert len(made) == 2


def test_cache_folder_of_the_environment(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUFA2_CACHE_DIR, else XDG_CACHE_HOME, else ~/.cache; read at each call."""
    monkeypatch.setenv("CUFA2_CACHE_DIR", str(tmp_path / "mine" / "deep"))
    assert compiler.build(VARIANT, ARCH).path.parent == tmp_path / "mine" / "deep"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUFA2_CACHE_DIR", "~/there")
    assert device.cache_dir() == tmp_path / "there"
    monkeypatch.setenv("CUFA2_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert device.cache_dir() == tmp_path / "xdg" / "cufa2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert device.cache_dir() == tmp_path / ".cache" / "cufa2"


def test_a_real_kernel_is_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is no special case."""
    made = build(folder)
    assert is_sound(made)
    no_nvrtc(monkeypatch)
    start = time.perf_counter()
    assert build(folder).cached
    assert time.perf_counter() - start < 0.5


def test_threads_share_a_cache(sources: Path, folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: build(folder), range(16)))
    assert all(is_sound(c) for c in made)
    assert len({c.path for c in made}) == 1


# damage


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": cut_in_half,
    "bit": flip_a_bit,
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
}
OTHER_JSON = ["null", "[]", "{}", '"text"', "7", '{"sha256": 1}', "[[[[", '{"nvrtc": "12"}']


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_entries_are_built_again(
    suffix: str, damage: Callable[[Path], object], sources: Path, folder: Path
) -> None:
    made = build(folder)
    image = made.path.read_bytes()
    damage(made.path.with_suffix(suffix))
    again = build(folder)
    assert again.path == made.path
    assert is_sound(again)
    assert again.path.read_bytes() == image
    if (suffix, damage) != (".json", flip_a_bit):  # a bit of the log is harmless
        assert not again.cached
    assert build(folder).cached


@pytest.mark.parametrize("text", OTHER_JSON)
def test_json_of_another_kind_is_a_miss(text: str, sources: Path, folder: Path) -> None:
    made = build(folder)
    made.path.with_suffix(".json").write_text(text)
    again = build(folder)
    assert not again.cached
    assert is_sound(again)


@pytest.mark.parametrize("change", ["drop", "add", "version"])
def test_json_of_another_version_is_a_miss(change: str, sources: Path, folder: Path) -> None:
    """Fields that a later or earlier library writes do not confuse this one."""
    made = build(folder)
    meta = made.path.with_suffix(".json")
    fields = json.loads(meta.read_text())
    if change == "drop":
        del fields["registers"]
    elif change == "add":
        fields["surprise"] = 1
    else:
        fields["nvrtc"] = "twelve"
    meta.write_text(json.dumps(fields))
    again = build(folder)
    assert not again.cached
    assert is_sound(again)


def test_mixed_up_images_are_a_miss(sources: Path, folder: Path) -> None:
    """An image under the .json of another one is not loaded."""
    one = build(folder)
    other = compiler.build(VARIANT, "sm_90a", folder=folder)
    shutil.copy(other.path, one.path)
    again = build(folder)
    assert not again.cached
    assert is_sound(again)


# folders that cannot be written


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh private folder, removed afterwards."""
    monkeypatch.setattr(cache, "_private", None)
    yield
    if cache._private is not None:
        cache._private.cleanup()


def test_a_cache_under_a_regular_file(sources: Path, tmp_path: Path, private: None) -> None:
    """One warning that says what to do; the kernel is built all the same."""
    (tmp_path / "file").write_text("in the way")
    place = tmp_path / "file" / "cache"
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        made = build(place)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(place) in message
    assert "CUFA2_CACHE_DIR" in message
    assert is_sound(made)
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_unwritable_cache_warns_once_a_process(tmp_path: Path) -> None:
    """With Python's default filters, however many kernels are built."""
    write_stand_in(tmp_path / "cuda_src")
    (tmp_path / "file").write_text("")
    code = f"""
        from pathlib import Path
        from cufa2 import compiler, plan, device
        compiler.source_dir = lambda: Path({str(tmp_path / "cuda_src")!r})
        v = next(iter(plan.variants(device.info_for_arch("sm_80"))))
        for arch in ("sm_80", "sm_86", "sm_89"):
            print(compiler.build(v, arch).path.stat().st_size > 0)
    """
    result = child(textwrap.dedent(code), CUFA2_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert result.stdout.split() == ["True"] * 3
    assert result.stderr.count("RuntimeWarning") == 1


def test_a_folder_in_place_of_an_entry(sources: Path, folder: Path, private: None) -> None:
    """It can be neither read nor replaced: the private folder serves."""
    made = build(folder)
    become_a_folder(made.path)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        again = build(folder)
    assert is_sound(again)
    assert again.path.parent != folder


def test_a_read_only_file_system(
    sources: Path, folder: Path, private: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning is the same text for every kernel, so that Python shows it once."""

    real = tempfile.mkstemp

    def read_only(*, dir: Path, prefix: str) -> Any:
        if dir == folder:
            raise OSError(30, "Read-only file system", str(dir / (prefix + os.urandom(4).hex())))
        return real(dir=dir, prefix=prefix)

    monkeypatch.setattr(tempfile, "mkstemp", read_only)
    texts = set()
    for arch in ("sm_80", "sm_86"):
        with pytest.warns(RuntimeWarning, match="Read-only file system") as caught:
            assert is_sound(compiler.build(VARIANT, arch, folder=folder))
        texts |= {str(w.message) for w in caught}
    assert len(texts) == 1


def test_a_full_disk(
    sources: Path, folder: Path, private: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No entry, no stray temporary file, a warning, and a kernel."""
    real = os.replace

    def full(a: Any, b: Any) -> None:
        if Path(b).parent == folder:
            raise OSError(28, "No space left on device")
        real(a, b)

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        made = build(folder)
    assert is_sound(made)
    assert list(folder.iterdir()) == []


# ahead-of-time folders, other NVRTCs, other drivers


def test_an_ahead_of_time_folder_is_only_read(
    sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without NVRTC and without write permission; nothing is written, not even tried."""
    build(folder)
    before = files_of(folder)
    no_nvrtc(monkeypatch)

    def write(*_: Any) -> None:
        raise AssertionError("a hit writes nothing")

    monkeypatch.setattr(cache, "_write", write)
    folder.chmod(0o555)
    try:
        assert build(folder).cached
    finally:
        folder.chmod(0o755)
    assert files_of(folder) == before


def as_if_built_by(cubin: Cubin, version: str) -> Path:
    """A second entry for the same source, by another NVRTC."""
    path = Path(str(cubin.path).replace(f"nvrtc{cubin.nvrtc}", f"nvrtc{version}"))
    image = cubin.path.read_bytes() + b"\0"
    fields = json.loads(cubin.path.with_suffix(".json").read_text())
    fields |= {"nvrtc": version, "sha256": hashlib.sha256(image).hexdigest()}
    path.write_bytes(image)
    path.with_suffix(".json").write_text(json.dumps(fields))
    return path


def test_entries_newer_than_the_driver_are_not_returned(
    sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build(folder)
    newer = as_if_built_by(made, "99.1")
    assert build(folder, driver=(int(made.nvrtc.split(".")[0]), 0)).path == made.path
    no_nvrtc(monkeypatch)
    monkeypatch.setattr(compiler, "_is_current", lambda _: False)
    assert build(folder, driver=(99, 0)).path == newer
    assert build(folder, driver=(98, 9)).path == made.path
    assert build(folder).path == newer
    with pytest.raises(CompileError, match="no NVRTC here"):
        build(folder, driver=(1, 0))


def test_the_installed_nvrtc_is_preferred(sources: Path, folder: Path) -> None:
    """An entry of another NVRTC is not taken where this one can build its own."""
    made = build(folder)
    as_if_built_by(made, "1.0")
    made.path.unlink()
    made.path.with_suffix(".json").unlink()
    again = build(folder)
    assert not again.cached
    assert again.path == made.path
    assert build(folder).path == made.path


def test_an_nvrtc_newer_than_the_driver(sources: Path, folder: Path) -> None:
    """It would make a cubin that cannot be loaded: refused before it compiles, unless cached."""
    with pytest.raises(
        CompileError, match=r"NVRTC .* makes cubins that the driver, for CUDA 1\.0"
    ) as e:
        build(folder, driver=(1, 0))
    assert device.INSTALL in str(e.value)
    assert not folder.exists() or not list(folder.iterdir())
    old = as_if_built_by(build(folder), "1.0")
    assert build(folder, driver=(1, 0)).path == old


def test_a_missing_nvrtc_is_explained_and_not_remembered(
    sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install; once that is done, the same process goes on."""
    compiler._nvrtc.cache_clear()

    def no_cupy() -> Any:
        raise RuntimeError(f"CuPy cannot be imported; {device.INSTALL}")

    with monkeypatch.context() as patched:
        patched.setattr(device, "cupy_module", no_cupy)
        for _ in range(2):
            with pytest.raises(CompileError, match="NVRTC is reached through CuPy") as e:
                build(folder)
            assert device.INSTALL in str(e.value)
    real = device.cupy_module()

    class Broken:
        class cuda:
            class nvrtc:
                @staticmethod
                def getVersion() -> Any:
                    raise OSError("libnvrtc.so.12: cannot open shared object file")

    with monkeypatch.context() as patched:
        patched.setattr(device, "cupy_module", Broken)
        with pytest.raises(CompileError, match="NVRTC cannot be loaded") as e:
            build(folder)
        assert "libnvrtc.so.12" in str(e.value)
        assert device.INSTALL in str(e.value)
    assert device.cupy_module() is real
    assert is_sound(build(folder))


# many processes


def _work(sources: str, folder: str, rounds: int, barrier: Any, results: Any) -> None:
    """One process: a build per round, all processes at once."""
    compiler.source_dir = lambda: Path(sources)  # type: ignore[assignment]
    compiler.nvrtc_version()
    for _ in range(rounds):
        barrier.wait(60)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                cubin = compiler.build(VARIANT, ARCH, folder=Path(folder))
            results.put(("ok" if is_sound(cubin) else "damaged", str(cubin.path)))
        except BaseException as e:
            results.put((type(e).__name__, str(e)))
        barrier.wait(60)


def test_many_processes_at_once(tmp_path: Path) -> None:
    """Twelve processes build one kernel: three times into an empty folder, then with every file
    cut in half, then with one file empty, then with garbage for a .json."""
    sources, folder, n = write_stand_in(tmp_path / "cuda_src"), tmp_path / "cache", 12

    def empty_folder() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def all_cut() -> None:
        for path in folder.iterdir():
            cut_in_half(path)

    def one_empty() -> None:
        next(folder.glob("*.cubin")).write_bytes(b"")

    def garbage() -> None:
        next(folder.glob("*.json")).write_text("null")

    damages = [empty_folder] * 3 + [all_cut, one_empty, garbage]
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(n + 1), context.Queue()
    arguments = (str(sources), str(folder), len(damages), barrier, results)
    processes = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(n)]
    for process in processes:
        process.start()
    try:
        for damage in damages:
            damage()
            barrier.wait(60)
            found = [results.get(timeout=60) for _ in range(n)]
            barrier.wait(60)
            assert {state for state, _ in found} == {"ok"}, found
            assert len({path for _, path in found}) == 1
            assert sorted(p.suffix for p in folder.iterdir()) == [".cubin", ".json"]
    except BaseException:
        barrier.abort()  # the processes need not wait for what will not come
        raise
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
    assert [process.exitcode for process in processes] == [0] * n
