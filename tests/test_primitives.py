"""Each primitive of cuda_src/prim does the same on the emulated card as on a Hopper GPU.

What an H200 returned is kept (`primitives.RECORDED`), so that a machine without a GPU holds the
emulated card to it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import primitives
import pytest
from emulator import build
from primitives import Unit, assert_agree

from cufa2 import device

UNITS = primitives.units()


@pytest.fixture(scope="module")
def recorded() -> Any:
    with np.load(primitives.RECORDED) as file:
        return dict(file)


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.name)
def test_emulated(unit: Unit, recorded: Any) -> None:
    assert_agree(unit, primitives.on_emulator(unit), recorded[unit.name])


@pytest.mark.gpu
@pytest.mark.usefixtures("cp", "emulator")
@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.name)
def test_cuda_and_emulated(unit: Unit) -> None:
    if unit.name.startswith("product") and device.info(0).cc[0] != 9:
        pytest.skip("the tensor cores of other generations cut sums elsewhere")
    assert_agree(unit, primitives.on_emulator(unit), primitives.on_gpu(unit))


def test_what_is_recorded(recorded: Any) -> None:
    assert recorded.keys() - {"card"} == {u.name for u in UNITS}


def test_every_primitive_has_a_unit() -> None:
    """Those of Hopper, and what only its kernels use, in test_hopper_units.py."""
    files = ("primitives.cuh", "hopper.cuh")
    text = "".join(primitives.code_of(primitives.FOLDER / name) for name in files)
    for twin in (build.HERE / "prim").glob("*.cuh"):
        for name in primitives.functions_of(twin) if twin.name not in primitives.HOPPER else ():
            assert re.search(rf"\b{name}\b", text), f"{name} of {twin.name}"
