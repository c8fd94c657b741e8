"""Variant -> cubin: one flattened source, one NVRTC call, the disk cache of `cache`.

The only room that knows NVRTC, and it calls it through CuPy's thin binding: `RawModule(code=)`
would force its own -arch, would not hash included headers and cannot compile without a GPU.
NVRTC itself needs none, so folders of cubins can be built ahead of time on any machine.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from . import device, params
from .cache import Cubin, Version, entries, store, version_text
from .kernels import C_TYPES, MASKS, SCORES, Variant
from .problem import CompileError

SIZE_NAMES = {
    "FwdParams": "CUFA2_FWD_PARAMS_BYTES",
    "FwdSm90Params": "CUFA2_FWD_SM90_PARAMS_BYTES",
    "BwdParams": "CUFA2_BWD_PARAMS_BYTES",
}
OPTIONS = ("--std=c++17", "-lineinfo", "--ptxas-options=-v")


def build(
    variant: Variant,
    arch: str,
    *,
    folder: Path | None = None,
    driver: Version | None = None,
    progress: Callable[[str], None] | None = None,
) -> Cubin:
    """The cubin of `variant` for `arch`, from the cache or compiled now.

    arch: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a, ...
    folder: cache folder; default `device.cache_dir()`.
    driver: CUDA version of the driver that will load it; newer cubins are not returned.
    progress: called with one line before a compilation starts.

    Raises CompileError: NVRTC is missing, too old for `arch`, too new for `driver`, or refused
    the source; the message holds its log, the options and the file.
    """
    folder = device.cache_dir() if folder is None else folder
    source = source_of(variant)
    stem = f"{variant.name}-{arch}-{_key(source, arch)}"
    found = entries(folder, stem, driver)
    newest = found[max(found)] if found else None
    if newest is not None and _is_current(max(found)):
        return newest
    try:
        version = nvrtc_version()
        if driver is not None and version[0] > driver[0]:
            raise CompileError(
                f"NVRTC {version_text(version)} makes cubins that the driver, for CUDA "
                f"{version_text(driver)}, cannot load: {device.INSTALL}"
            )
    except CompileError:
        if newest is None:
            raise
        return newest  # built elsewhere; this machine cannot build a better one
    if version in found:
        return found[version]
    if progress is not None:
        progress(f"compiling {variant.name} for {arch} with NVRTC {version_text(version)}")
    start = time.perf_counter()
    image, log = _compile(source, variant, arch)
    seconds = time.perf_counter() - start
    return store(folder, stem, variant.name, arch, version, image, log, seconds)


def source_of(variant: Variant, folders: tuple[Path, ...] = ()) -> str:
    """One self-contained source: the flattened headers, this variant's sizes, one entry.

    folders: where headers are looked for before `source_dir()`.
    """
    kernel, tile = variant.kernel, variant.tile
    arguments = [str(a).lower() for a in tile.arguments]
    if kernel.atomics:
        arguments.append(str(variant.adds_dq).lower())
    if kernel.tf32:
        arguments.append(str(variant.tf32).lower())
    sizes = {
        "ELEMENT": C_TYPES[variant.dtype],
        "HEAD_DIM": variant.head_dim,
        "HEAD_DIM_V": variant.head_dim_v,
        "TILE_ARGUMENTS": "".join(f", {a}" for a in arguments),
        "POLICIES": f", {MASKS[variant.mask]}, {SCORES[variant.score]}" if kernel.policies else "",
        "THREADS": 32 * tile.warps,
        "MIN_BLOCKS": tile.min_blocks,
    }
    bytes_of = "".join(f"#define {SIZE_NAMES[n]} {size}\n" for n, size in params.SIZES.items())
    defines = "\n".join(f"#define {name} {value}" for name, value in sizes.items())
    return (
        f"{bytes_of}{flatten(kernel.file, folders)}\n{defines}\n"
        f'extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)\n'
        f"{variant.name}(const __grid_constant__ {kernel.params} params) {{\n"
        f"  using VariantTile = {kernel.tile_type}<ELEMENT, HEAD_DIM, HEAD_DIM_V\n"
        f"                                         TILE_ARGUMENTS>;\n"
        f"  {kernel.name}<VariantTile POLICIES>(params);\n}}\n"
    )


@functools.cache
def flatten(file: str, folders: tuple[Path, ...] = ()) -> str:
    """A cuda_src file with its #include "..." lines replaced by the files, each once. A file of
    the same name in one of `folders` takes the place of that in `source_dir()`."""
    lines: list[str] = []
    _flatten(file, (*folders, source_dir()), set(), lines)
    return "".join(lines)


@functools.cache
def source_dir() -> Path:
    """Folder of the CUDA sources: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise CompileError(f"the CUDA sources are missing: no cuda_src in or beside {package}")


@functools.cache
def _nvrtc() -> Any:
    """CuPy's binding of NVRTC. Errors are not cached, so installing it mends a running process."""
    try:
        module = device.cupy_module()
    except RuntimeError as e:
        raise CompileError(f"NVRTC is reached through CuPy: {e}") from e
    try:
        module.cuda.nvrtc.getVersion()
    except Exception as e:  # cuda-pathfinder, the loader and CuPy each raise their own types
        raise CompileError(f"NVRTC cannot be loaded ({e}): {device.INSTALL}") from e
    return module.cuda.nvrtc


def nvrtc_version() -> Version:
    """(major, minor) of the NVRTC that compiles here; CompileError if there is none."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def _compile(source: str, variant: Variant, arch: str) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    options = (*OPTIONS, f"-arch={arch}")
    program = nvrtc.createProgram(source, f"{variant.name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as e:
            log = nvrtc.getProgramLog(program)
            hint = f"; {arch} needs a newer NVRTC: {device.INSTALL}" if "--gpu-arch" in log else ""
            raise CompileError(
                f"NVRTC {version_text(nvrtc_version())} failed on {variant.kernel.file} ({e})"
                f"{hint}\noptions: {' '.join(options)}\n{log}"
            ) from e
        # CuPy drops the image's last byte; the driver tolerates that, other readers do not.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def _flatten(file: str, folders: tuple[Path, ...], seen: set[str], lines: list[str]) -> None:
    if file in seen:
        return
    seen.add(file)
    path = next((p for folder in folders if (p := folder / file).is_file()), folders[-1] / file)
    name = file if path.parent.is_relative_to(folders[-1]) else path.as_posix()
    lines.append(f'#line 1 "{name}"\n')
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        include = re.match(r'#include "(.+)"', line)
        if include:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(file), include[1]))
            _flatten(target, folders, seen, lines)
            lines.append(f'#line {number + 1} "{name}"\n')
        elif not line.startswith("#pragma once"):
            lines.append(line)
        else:
            lines.append("\n")


def _key(source: str, arch: str) -> str:
    return hashlib.sha256("\0".join((arch, *OPTIONS, source)).encode()).hexdigest()[:24]


def _is_current(version: Version) -> bool:
    """Whether a cached entry is what this machine's NVRTC would make, as far as can be told
    without loading it (100 ms): from the version of the NVRTC wheel, if one is installed."""
    installed = []
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            major, minor = metadata.version(wheel).split(".")[:2]
        except metadata.PackageNotFoundError:
            continue
        installed.append((int(major), int(minor)))
    return not installed or version in installed
