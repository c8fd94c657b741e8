"""Kernels compiled for the CPU: the sources of the product, with twins of the primitives.

`library(variant, arch)` and `kernel(source, ...)` give a shared library; it is kept in the cache
folder under the hash of all that went into it. The machine the kernels run on (runtime.h) is one
more library, built once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cufa2 import compiler, device
from cufa2.kernels import Variant

HERE = Path(__file__).resolve().parent
MACHINE = ("threads.cpp", "memory.cpp", "async.cpp", "numerics.cpp", "faults.cpp")
_COMMON = (
    *("-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC", "-shared"),
    "-fno-omit-frame-pointer",  # the machine walks the stack by them
)
# Every access becomes a call into memory.cpp, every undefined operation one into faults.cpp.
KERNEL_OPTIONS = (
    *("-O1", "-g1", "-Wno-unknown-pragmas", "-Wno-attributes"),
    *("-fsanitize=kernel-address", "-fsanitize=undefined", "-fno-sanitize-recover=all"),
    *("--param", "asan-instrumentation-with-call-threshold=0"),
    *("--param", "asan-stack=0", "--param", "asan-globals=0"),
)


def why_not() -> str | None:
    """None if kernels can be compiled here, else one sentence with what is missing."""
    if shutil.which("g++") is None:
        return "g++ is missing (Debian: apt-get install g++)"
    if shutil.which("addr2line") is None:
        return "addr2line is missing (Debian: apt-get install binutils)"
    program = "#include <boost/context/fiber.hpp>\nint main() {}\n"
    ran = subprocess.run(
        ["g++", "-std=c++17", "-x", "c++", "-", "-o", os.devnull, "-lboost_context"],
        input=program,
        text=True,
        capture_output=True,
        check=False,
    )
    if ran.returncode:
        return "Boost.Context is missing (Debian: apt-get install libboost-context-dev)"
    return None


def folder() -> Path:
    """Where compiled kernels are kept."""
    chosen = device.cache_dir() / "emulator"
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


@functools.cache
def machine() -> ctypes.CDLL:
    """The machine, loaded so that kernels find it."""
    headers = sorted(HERE.glob("*.h"))
    sources = [HERE / name for name in MACHINE]
    text = "".join(p.read_text() for p in (*headers, *sources))
    options = (*_COMMON, "-O3", "-Wall", "-Wextra", "-Werror")
    path = _compiled(text, options, sources, ("-lboost_context",), "machine")
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


_SHARED = r"__shared__ __align__\((\d+)\) unsigned char (\w+)"
_ENTRY = """
extern "C" __attribute__((no_sanitize("kernel-address", "undefined")))
void emulated(const void* params) {{ {name}(*static_cast<const {params}*>(params)); }}
"""


def source_of(text: str, name: str, params: str) -> str:
    """What g++ compiles: the flattened source `text` and an entry that takes a pointer.

    The one change: shared memory is asked for, where CUDA declares it. Of variables that it sees
    declared, thread-local ones among them, g++ checks no access.
    """
    text = re.sub(
        rf"extern {_SHARED}\[\];", r"unsigned char* \2 = emulator::dynamic_shared(\1);", text
    )
    text = re.sub(
        rf"{_SHARED}\[(.+)\];",
        r'unsigned char* \2 = emulator::static_shared("\2", \1, \3);',
        text,
    )
    if "__shared__" in re.sub("//.*", "", text):
        raise RuntimeError(f"{name}: a __shared__ variable of unknown form")
    return f'#include "cuda.h"\n{text}\n{_ENTRY.format(name=name, params=params)}'


def library(variant: Variant, arch: str) -> Path:
    """The shared library of a variant."""
    text = compiler.source_of(variant, (HERE,))
    return kernel(text, variant.name, variant.kernel.params, arch)


def kernel(text: str, name: str, params: str, arch: str) -> Path:
    """The shared library of the kernel `name`, which takes a struct `params`; its entry is
    `emulated`. text: flattened with HERE among the folders."""
    number = "".join(c for c in arch if c.isdigit()) + "0"
    options = (*_COMMON, *KERNEL_OPTIONS, f"-D__CUDA_ARCH__={number}", f"-I{HERE}")
    headers = "".join(p.read_text() for p in sorted(HERE.glob("*.h")))
    return _compiled(source_of(text, name, params), options, (), (), name, headers)


def native(text: str, defines: Sequence[str]) -> Path:
    """A shared library of a source that is to run as it is."""
    options = (*_COMMON, "-O2", "-Wno-unknown-pragmas", *defines, f"-I{HERE}")
    return _compiled(text, options, (), (), "native", (HERE / "language.h").read_text())


def _compiled(
    text: str,
    options: Sequence[str],
    sources: Sequence[Path],
    libraries: Sequence[str],
    stem: str,
    more: str = "",
) -> Path:
    """Compile `sources`, or `text` if there are none, unless it has been done before."""
    said = "\0".join((*(o for o in options if not o.startswith("-I")), text, more))
    path = folder() / f"{stem}-{hashlib.sha256(said.encode()).hexdigest()[:20]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        made = Path(scratch) / "made.so"
        files = list(sources)
        if not files:
            files = [Path(scratch) / f"{stem}.cpp"]
            files[0].write_text(text)
        ran = subprocess.run(
            ["g++", *options, *map(str, files), "-o", str(made), *libraries],
            text=True,
            capture_output=True,
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(f"g++ failed on {stem}:\n{ran.stderr[:6000]}")
        os.replace(made, path)
    return path


def places(frames: Sequence[int], path: Path, base: int) -> list[str]:
    """The lines of code that return addresses in a library belong to, innermost first."""
    if not frames:
        return []
    # A return address is behind its call.
    offsets = [hex(frame - base - 1) for frame in frames]
    ran = subprocess.run(
        ["addr2line", "-e", str(path), "-i", "-C", "-f", *offsets],
        text=True,
        capture_output=True,
        check=True,
    )
    lines = ran.stdout.splitlines()
    found = []
    for function, place in zip(lines[::2], lines[1::2], strict=True):
        name = function.split("(")[0].split("<")[0]
        where = place.split(" (discriminator")[0]
        where = where.removeprefix(f"{HERE}/").split("cuda_src/")[-1]
        found.append(f"{where} in {name}")
    return found
