"""Compiled kernels on disk: content-addressed, safe under many processes, sound when damaged.

An entry is `<name>-<arch>-<key>-nvrtc<version>.cubin` and a .json beside it. The key is a hash of
the architecture, the options and the whole source text. The NVRTC version is part of the name,
not of the key: a hit must not need NVRTC, only prefer the one that is installed. Both files are
renamed into place; the .json holds the cubin's hash, so a cut or mixed-up entry is a miss.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

Version = tuple[int, int]


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel on disk, and what the compiler said about it."""

    path: Path
    name: str
    arch: str
    nvrtc: str
    registers: int
    spill_bytes: int
    shared_memory: int  # static bytes; the dynamic part is Variant.smem_bytes
    seconds: float  # compile time, of the build that made it
    log: str
    cached: bool


def version_text(version: Version) -> str:
    """(12, 9) -> '12.9'."""
    return f"{version[0]}.{version[1]}"


def entries(folder: Path, stem: str, driver: Version | None) -> dict[Version, Cubin]:
    """Intact cache entries for `stem` that `driver` can load, by NVRTC version."""
    found = {}
    for meta in folder.glob(f"{stem}-nvrtc*.json"):
        path = meta.with_suffix(".cubin")
        try:
            fields = json.loads(meta.read_text())
            if hashlib.sha256(path.read_bytes()).hexdigest() != fields.pop("sha256"):
                continue  # cut short or damaged: compiled again
            major, minor = map(int, fields["nvrtc"].split("."))
            cubin = Cubin(path=path, cached=True, **fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if driver is None or major <= driver[0]:
            found[(major, minor)] = cubin
    return found


def store(
    folder: Path,
    stem: str,
    name: str,
    arch: str,
    version: Version,
    image: bytes,
    log: str,
    seconds: float,
) -> Cubin:
    """Write image and .json, each by an atomic rename; the .json, written last, makes it valid."""
    cubin = Cubin(
        path=folder / f"{stem}-nvrtc{version_text(version)}.cubin",
        name=name,
        arch=arch,
        nvrtc=version_text(version),
        registers=_figure(r"Used (\d+) registers", log),
        spill_bytes=_figure(r"(\d+) bytes spill stores", log),
        shared_memory=_figure(r"(\d+) bytes smem", log),
        seconds=round(seconds, 3),
        log=log,
        cached=False,
    )
    fields = {k: v for k, v in asdict(cubin).items() if k not in ("path", "cached")}
    fields["sha256"] = hashlib.sha256(image).hexdigest()
    try:
        _write(cubin.path, image)
        _write(cubin.path.with_suffix(".json"), json.dumps(fields, indent=1).encode())
    except OSError as e:
        fallback = _private_dir()
        if folder == fallback:
            raise
        reason = e.strerror or e  # without the name of the temporary file: one text, shown once
        warnings.warn(
            f"the kernel cache {folder} cannot be written ({reason}); compiled kernels last for "
            "this process only. Set CUFA2_CACHE_DIR to a writable folder.",
            RuntimeWarning,
            stacklevel=2,
        )
        return store(fallback, stem, name, arch, version, image, log, seconds)
    return cubin


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


_private: tempfile.TemporaryDirectory[str] | None = None


def _private_dir() -> Path:
    """A folder of this process alone, for when the cache cannot be written."""
    global _private
    if _private is None:
        _private = tempfile.TemporaryDirectory(prefix="cufa2-")
    return Path(_private.name)


def _figure(pattern: str, log: str) -> int:
    """Sum of a figure over all functions that ptxas reports."""
    return sum(int(n) for n in re.findall(pattern, log))
