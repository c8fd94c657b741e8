"""Arrays in files, for the command line: .npy, .npz and .safetensors, in and out.

bfloat16 travels as itself in .safetensors. NumPy's own formats keep it only as raw 2-byte items,
which `cast` turns back when told to.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SUFFIXES = (".npy", ".npz", ".safetensors")


class UserError(Exception):
    """Something the caller of the command line can mend; one line."""


def read_qkv(paths: list[Path]) -> dict[str, Array]:
    """q, k and v from three files, or by those names from one .npz or .safetensors file."""
    if len(paths) == 3:
        return {name: _read_one(path) for name, path in zip("qkv", paths, strict=True)}
    if len(paths) != 1:
        raise UserError(f"give q, k and v as three files or as one, not as {len(paths)}")
    found = _read(paths[0])
    if missing := [name for name in "qkv" if name not in found]:
        raise UserError(f"{paths[0]} lacks {', '.join(missing)}; it holds {', '.join(found)}")
    return {name: found[name] for name in "qkv"}


def read_lengths(path: Path) -> Array:
    """The integers of a file as int32."""
    x = _read_one(path)
    if x.dtype.kind not in "iu" or (x.size and not 0 <= x.min() <= x.max() < 2**31):
        raise UserError(f"{path} does not hold integers from 0 to 2^31 - 1")
    return x.astype(np.int32)


def cast(name: str, x: Array, dtype: str | None) -> Array:
    """To `dtype` (None: its own) in native byte order; raw 2-byte items become bfloat16."""
    if dtype == "bfloat16":
        _import("ml_dtypes", "bfloat16 arrays")  # teaches NumPy the name
    if x.dtype.name == "void16":
        if dtype != "bfloat16":
            raise UserError(f"{name} holds raw 2-byte items; if bfloat16, say --dtype bfloat16")
        return x.view(dtype)
    if dtype is None:
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if x.dtype.kind not in "fiu" and x.dtype.name != "bfloat16":
        raise UserError(f"{name} holds {x.dtype}, which is no kind of number to make {dtype} of")
    return x.astype(dtype, copy=False)


def check_output(path: Path) -> None:
    """UserError unless a file of a known kind can be made there; before any work is done."""
    _check_suffix(path)
    if path.suffix == ".safetensors":
        _safetensors()
    if not path.absolute().parent.is_dir():
        raise UserError(f"cannot write {path}: its folder does not exist")


def write(path: Path, arrays: Mapping[str, Array]) -> None:
    """All arrays by name; into a .npy file the first alone."""
    try:
        if path.suffix == ".npy":
            np.save(path, next(iter(arrays.values())))
        elif path.suffix == ".npz":
            np.savez(path, **dict(arrays))  # type: ignore[arg-type]  # any names, says NumPy
        else:
            packed = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
            _safetensors().save_file(packed, path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror or e}") from e


def _read_one(path: Path) -> Array:
    arrays = _read(path)
    if len(arrays) != 1:
        raise UserError(f"{path} holds {len(arrays)} arrays ({', '.join(arrays)}), not one")
    return next(iter(arrays.values()))


def _read(path: Path) -> dict[str, Array]:
    """The arrays of a file by name; the one of a .npy file is called "array"."""
    _check_suffix(path)
    try:
        if path.suffix == ".safetensors":
            return dict(_safetensors().load_file(path))
        loaded = np.load(path)
        if isinstance(loaded, np.ndarray):
            return {"array": loaded}
        with loaded:
            return dict(loaded)
    except ImportError:
        raise
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e
    except Exception as e:  # NumPy, zipfile and safetensors raise types of their own
        if "bfloat16" in str(e):
            _import("ml_dtypes", "bfloat16 arrays")
        raise UserError(f"{path} is not a {path.suffix} file of numbers: {e}") from e


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} does not end in one of {', '.join(SUFFIXES)}")


def _safetensors() -> Any:
    return _import("safetensors.numpy", ".safetensors files")


def _import(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise ImportError(f"{what} need `pip install {package}`") from e
