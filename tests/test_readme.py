"""The README's Python examples run as they stand, each on the machine it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
NEEDS_GPU = ("cupy", "jax", "torch")  # what a CPU machine may lack


def _library(block: str) -> str:
    found = [name for name in (*NEEDS_GPU, "numpy") if f"import {name}" in block]
    return found[0] if found else "cufa2"


def _run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, str(README), "exec"), {})
    printed = capsys.readouterr().out
    promised = re.findall(r"^print\(.*\)\s+# (.*)", block, re.MULTILINE)
    assert promised or _library(block) not in ("numpy", "cupy"), "these say what they print"
    for expected in promised:
        assert expected in printed


def test_every_library_has_its_example() -> None:
    assert {_library(b) for b in BLOCKS} == {*NEEDS_GPU, "numpy", "cufa2"}


@pytest.mark.parametrize("block", [b for b in BLOCKS if _library(b) not in NEEDS_GPU])
def test_example_on_any_machine(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run(block, capsys)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [b for b in BLOCKS if _library(b) in NEEDS_GPU], ids=_library)
def test_example_on_a_gpu(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run(block, capsys)
