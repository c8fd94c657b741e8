"""The house rules that a parser can hold: who imports whom, what lies where, how long it is."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cufa2"
CUDA = ROOT / "cuda_src"
COLUMNS = 99

# Module -> the modules of this package that it may import. Rooms that are missing here fail.
ARROWS: dict[str, set[str]] = {
    "problem": set(),
    "device": set(),
    "dlpack": set(),
    "cache": set(),
    "tiles": set(),
    "tilings": {"tiles"},
    "kernels": {"problem", "tiles", "tilings"},
    "params": {"problem"},
    "plan": {"kernels", "tiles", "device", "problem"},
    "compiler": {"cache", "kernels", "params", "device", "problem"},
    "placement": {"dlpack", "device"},
    "arrays": {"placement", "dlpack", "device"},
    "reference": {"problem"},
    "launch": {
        *("compiler", "kernels", "params", "arrays", "placement", "device", "problem"),
        *("plan", "selfcheck"),
    },
    "selfcheck": {"cache", "kernels", "arrays", "reference", "device", "problem"},
    "attention": {"launch", "reference", "arrays", "placement", "problem"},
    "api": {"attention", "problem"},
    "__init__": {"api", "problem"},
    # On top of the library, and used by nothing in it.
    "files": set(),
    "dense": {"problem"},
    "testing": {"attention", "device", "problem"},
    "__main__": {
        *("__init__", "compiler", "device", "plan", "kernels", "problem", "files"),
        *("dense", "testing"),
    },
}
# Third-party packages that a module may import, and only inside functions. NumPy goes everywhere
# except where a line below says otherwise.
LAZY: dict[str, set[str]] = {
    "device": {"cupy"},
    "arrays": {"ml_dtypes"},
    "testing": {"cupy", "ml_dtypes"},
}
WITHOUT_NUMPY = {
    "problem",
    "device",
    "kernels",
    "tilings",
    "params",
    "plan",
    "compiler",
    "cache",
    "dlpack",
    "api",
}

MODULES = sorted(PACKAGE.glob("*.py"))
HEADERS = sorted(CUDA.rglob("*.cuh"))
LAYERS = ("prim", "tile", "attn", "")  # a file may include its own layer and those before it


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path.name)


def imports(path: Path) -> Iterator[tuple[str, str, bool]]:
    """(package, module, lazily) of every import; package "" is this one."""
    tree = parsed(path)
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        lazily = node in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], alias.name, lazily
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{path.name}:{node.lineno} leaves the package"
            if node.level == 0:
                yield (node.module or "").partition(".")[0], node.module or "", lazily
            elif node.module:
                yield "", node.module, lazily
            else:  # from . import x: a module, or a name of the package itself
                for alias in node.names:
                    known = (PACKAGE / f"{alias.name}.py").exists()
                    yield "", alias.name if known else "__init__", lazily


def code_of(path: Path) -> str:
    """A header without comments."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
    return re.sub(r"//.*", "", text)


def includes(path: Path) -> list[str]:
    return re.findall(r"^\s*#\s*include\s*(.*?)\s*$", code_of(path), re.M)


def layer_of(path: Path) -> str:
    return path.relative_to(CUDA).parent.as_posix().replace(".", "")


def names(paths: list[Path]) -> list[str]:
    return [p.name if p.parent in (PACKAGE, CUDA) else f"{p.parent.name}/{p.name}" for p in paths]


# Python


def test_every_room_is_known() -> None:
    assert {p.stem for p in MODULES} == set(ARROWS)


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_import_arrows(path: Path) -> None:
    found = {module for package, module, _ in imports(path) if package == ""}
    assert found <= ARROWS[path.stem], "an arrow that the house does not have"
    assert "cufa2" not in {package for package, _, _ in imports(path)}, "import relatively"


def test_arrows_have_one_direction() -> None:
    """Following the arrows never leads back."""
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for below in ARROWS[module]:
                visit(below, (*above, module))
            done.add(module)

    for module in ARROWS:
        visit(module, ())
    users = {m: {a for a, below in ARROWS.items() if m in below} for m in ARROWS}
    assert users["testing"] == users["dense"] == users["files"] == {"__main__"}
    assert users["__main__"] == set()


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_third_party_imports(path: Path) -> None:
    """NumPy alone at import time; CuPy in one place; no framework anywhere."""
    for package, module, lazily in imports(path):
        if package in ("", "numpy") or package in sys.stdlib_module_names:
            continue
        assert package in LAZY.get(path.stem, set()), f"{path.name} imports {module}"
        assert lazily, f"{path.name} imports {module} when it is imported"
    if path.stem in WITHOUT_NUMPY:
        assert "numpy" not in {package for package, _, _ in imports(path)}


def test_the_parser_sees_what_it_should(tmp_path: Path) -> None:
    """The checks above can fail: each kind of import is found, and where it stands."""
    path = tmp_path / "x.py"
    path.write_text(
        "import cupy.cuda as c\nfrom torch import nn\nfrom . import plan, __version__\n"
        "from .launch import load\nif True:\n  import jax\ndef f():\n  import ml_dtypes\n"
    )
    assert set(imports(path)) == {
        ("cupy", "cupy.cuda", False),
        ("torch", "torch", False),
        ("", "plan", False),
        ("", "__init__", False),
        ("", "launch", False),
        ("jax", "jax", False),
        ("ml_dtypes", "ml_dtypes", True),
    }


@pytest.mark.parametrize(
    ("attribute", "rooms"),
    [
        ("environ", {"device"}),
        ("getenv", {"device"}),
        (
            "nvrtc",
            {"compiler", "cache", "selfcheck"},
        ),  # in cache it is a field: the version of an entry
        ("RawModule", {"launch"}),
        ("getDeviceProperties", {"device"}),
    ],
)
def test_what_one_room_alone_knows(attribute: str, rooms: set[str]) -> None:
    """The environment, NVRTC, modules and device properties are each one room's business."""
    users = {
        path.stem
        for path in MODULES
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Attribute) and node.attr == attribute)
        or (isinstance(node, ast.Name) and node.id == attribute)
    }
    assert users - {"__main__", "testing"} <= rooms


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_modules_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 300
    assert max(map(len, lines), default=0) <= COLUMNS


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_modules_say_what_they_are(path: Path) -> None:
    assert len(ast.get_docstring(parsed(path)) or "") > 30


# CUDA


@pytest.mark.parametrize("path", HEADERS, ids=names(HEADERS))
def test_include_layers(path: Path) -> None:
    """kernels -> attn -> tile -> prim, by quoted includes of files that exist."""
    layer = layer_of(path)
    assert layer in LAYERS
    for spec in includes(path):
        quoted = re.fullmatch(r'"(.+)"', spec)
        assert quoted, f"{spec} is no file of ours; NVRTC finds no other"
        target = (path.parent / quoted[1]).resolve()
        assert target.is_relative_to(CUDA), f"{spec} leaves cuda_src"
        assert target.is_file(), f"{spec} does not exist"
        below = layer_of(target)
        assert LAYERS.index(below) <= LAYERS.index(layer), f"{spec} is a layer above"
        assert below != "", "a kernel file includes a kernel file"


def test_includes_have_no_cycle() -> None:
    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, f"{path} includes itself"
        for spec in includes(path):
            visit((path.parent / spec.strip('"')).resolve(), (*above, path))

    for path in HEADERS:
        visit(path, ())


@pytest.mark.parametrize("path", HEADERS, ids=names(HEADERS))
def test_header_style(path: Path) -> None:
    """Included once, says first what it is, no inline PTX outside prim/, short enough."""
    text = path.read_text()
    lines = text.splitlines()
    assert lines.count("#pragma once") == 1
    assert lines[0].startswith("// ")
    assert len(lines) <= (150 if layer_of(path) == "prim" else 500)
    assert max(map(len, lines)) <= COLUMNS
    if layer_of(path) != "prim":
        assert not re.search(r"\b(asm|__asm__)\b", code_of(path))


def test_kernel_files_are_rows() -> None:
    """Each file at the top of cuda_src is a row of the table, and each row has its file."""
    from cufa2.kernels import KERNELS

    assert {row.file for row in KERNELS} == {p.name for p in CUDA.glob("*.cuh")}
    assert {p.suffix for p in CUDA.rglob("*") if p.is_file()} == {".cuh"}
