"""Wheel, sdist and editable installs find the CUDA sources; nothing is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cufa2

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("cufa2", "cuda_src", "tests", "scripts")
HEADERS = {p.relative_to(ROOT / "cuda_src").as_posix() for p in ROOT.glob("cuda_src/**/*.cuh")}
MODULES = {p.name for p in ROOT.glob("cufa2/*.py")}

PIP = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--quiet")


def python(*args: object, cwd: Path) -> str:
    """Run this interpreter away from the checkout; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone of the repository holds, so that builds leave no trace in it."""
    folder = tmp_path_factory.mktemp("clone") / "cufa2"
    folder.mkdir()
    for name in SHIPPED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    python("-m", "build", "--no-isolation", "--sdist", "--outdir", folder, tree, cwd=folder)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "build", "--no-isolation", "--wheel", "--outdir", folder, tree, cwd=folder)
    (made,) = folder.iterdir()
    return made


def check_installed(site: Path, sources: Path, cwd: Path) -> None:
    """An interpreter that sees `site` first imports that cufa2, which reads `sources`."""
    code = """
import site, sys
count = len(sys.path)
site.addsitedir(sys.argv[1])
sys.path[:0] = sys.path[count:]
import cufa2
from cufa2 import compiler, device, plan
from importlib.metadata import version
print(cufa2.__file__, compiler.source_dir(), cufa2.__version__, version("cufa2"), sep="\\n")
for v in plan.variants(device.info_for_arch("sm_90a")):
    assert len(compiler.source_of(v)) > 1000
"""
    file, found, attribute, metadata = python("-c", code, site, cwd=cwd).splitlines()
    assert Path(found).resolve() == sources.resolve()
    assert {p.relative_to(found).as_posix() for p in Path(found).rglob("*.cuh")} == HEADERS
    assert attribute == metadata == cufa2.__version__
    assert not Path(file).is_relative_to(ROOT)


def test_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", cufa2.__version__)


def test_wheel(wheel: Path, tmp_path: Path) -> None:
    """Everything inside the package, and nothing beside it."""
    assert wheel.name == f"cufa2-{cufa2.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    info = f"cufa2-{cufa2.__version__}.dist-info/"
    assert {f for f in files if not f.startswith(info)} == {
        *(f"cufa2/{m}" for m in MODULES),
        *(f"cufa2/cuda_src/{h}" for h in HEADERS),
    }
    assert {f"{info}METADATA", f"{info}entry_points.txt", f"{info}licenses/LICENSE"} <= files
    python("-m", "pip", "install", *PIP, "--target", tmp_path / "site", wheel, cwd=tmp_path)
    check_installed(tmp_path / "site", tmp_path / "site/cufa2/cuda_src", tmp_path)


def test_sdist_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """The sdist holds sources, tests and scripts, and its wheel equals the checkout's."""
    with tarfile.open(sdist) as archive:
        files = set(archive.getnames())
    top = f"cufa2-{cufa2.__version__}"
    assert {
        *(f"{top}/cufa2/{m}" for m in MODULES),
        *(f"{top}/cuda_src/{h}" for h in HEADERS),
        *(f"{top}/{f}" for f in ("pyproject.toml", "README.md", "LICENSE", "PKG-INFO")),
        f"{top}/tests/{Path(__file__).name}",
        f"{top}/scripts/test.sh",
    } <= files
    assert not any("__pycache__" in f or "/.venv" in f for f in files)
    python("-m", "pip", "wheel", *PIP[:3], "-w", tmp_path, sdist, cwd=tmp_path)
    (rebuilt,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as a, zipfile.ZipFile(rebuilt) as b:
        assert {n: a.getinfo(n).CRC for n in a.namelist()} == {
            n: b.getinfo(n).CRC for n in b.namelist()
        }
    python("-m", "pip", "install", *PIP, "--target", tmp_path / "site", rebuilt, cwd=tmp_path)
    check_installed(tmp_path / "site", tmp_path / "site/cufa2/cuda_src", tmp_path)


def test_editable_install(tree: Path, tmp_path: Path) -> None:
    """The package and the sources of the checkout itself, so that edits count at once."""
    prefix = tmp_path / "prefix"
    python("-m", "pip", "install", *PIP, "--prefix", prefix, "--editable", tree, cwd=tmp_path)
    (site,) = prefix.glob("lib*/python*/site-packages")
    assert not (site / "cufa2" / "__init__.py").exists()
    check_installed(site, tree / "cuda_src", tmp_path)


def test_missing_sources_are_explained(wheel: Path, tmp_path: Path) -> None:
    """A package without its CUDA sources says so instead of failing in NVRTC."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    shutil.rmtree(tmp_path / "cufa2" / "cuda_src")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import cufa2
from cufa2 import compiler
try:
    compiler.source_dir()
except cufa2.CompileError as e:
    print(e)
"""
    printed = python("-c", code, tmp_path, cwd=tmp_path)
    assert printed.startswith("the CUDA sources are missing: no cuda_src in or beside ")
    assert str(tmp_path / "cufa2") in printed
