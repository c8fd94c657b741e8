"""Fixtures of the tests of kernels, on a GPU and emulated.

Frameworks are imported by the tests that use them, never before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from cufa2 import device, testing
from cufa2.testing import BACKENDS, Backend

# JAX would take three quarters of the card's memory at its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

MANY = 20  # selected tests from which on compiling the kernels ahead saves time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel", help="row of the table that serves every problem it can")


@pytest.fixture(autouse=True, scope="session")
def _preferred(pytestconfig: pytest.Config) -> Iterator[None]:
    """What --kernel asks for."""
    name = pytestconfig.getoption("kernel")
    if name is None:
        yield
        return
    import gpu_oracle

    with gpu_oracle.preferring(name):
        yield


@pytest.fixture(scope="session")
def cp(request: pytest.FixtureRequest) -> Any:
    """CuPy on a working GPU. Whoever asks for GPU tests without one is told, not skipped."""
    why = device.why_no_cuda()
    if why is not None:
        pytest.fail(f"the GPU tests need a GPU: {why}", pytrace=False)
    if len(request.session.items) > MANY:
        import gpu_oracle

        gpu_oracle.compile_side_by_side()
    return device.cupy()


@pytest.fixture(autouse=True)
def _errors_show_where_they_happen(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait for the card after each GPU test, so that a fault shows where it arose."""
    yield
    on_card = {"cp", "card", "either", "backend"} & set(request.fixturenames)
    if request.node.get_closest_marker("gpu") and on_card:
        device.cupy().cuda.Device().synchronize()


def _backend(name: str, request: pytest.FixtureRequest) -> Backend:
    if name != "numpy":
        request.getfixturevalue({"cuda": "cp", "emulated": "emulator"}[name])
    return testing.backend(name)


_EACH = [pytest.param(n, marks=[pytest.mark.gpu] if n == "cuda" else []) for n in BACKENDS]


@pytest.fixture(scope="module", params=_EACH)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every back end, the real card only with -m gpu: the same tests for all."""
    return _backend(request.param, request)


@pytest.fixture(scope="module", params=_EACH[1:])
def card(request: pytest.FixtureRequest) -> Backend:
    """Those that run kernels."""
    return _backend(request.param, request)


@pytest.fixture(params=_EACH[1:])
def either(request: pytest.FixtureRequest) -> Iterator[Any]:
    """CuPy on the card, or what stands for it on the emulated one: a test with this fixture runs
    on both, on the emulated card only the cases that its mark `emulated` lists."""
    import gpu_oracle

    with _backend(request.param, request).of("sm_90a"):
        yield gpu_oracle.card()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what takes CuPy as GPU tests, and leave out what `emulated` does not list."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        if "cp" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        params = item.callspec.params if hasattr(item, "callspec") else {}
        only = item.get_closest_marker("emulated")
        if params.get("either") == "emulated" and only is not None:
            chosen = all(params[name] in values for name, values in only.kwargs.items())
            (kept if chosen else left_out).append(item)
        else:
            kept.append(item)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def emulator() -> None:
    """Kernels can be compiled for the CPU here."""
    from emulator import build

    why = build.why_not()
    if why is None:
        return
    if os.environ.get("CUFA2_EMULATOR") == "required":
        pytest.fail(f"the kernels cannot be emulated: {why}", pytrace=False)
    pytest.skip(f"the kernels cannot be emulated: {why}")


def _framework(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.fixture(scope="session")
def torch(cp: Any) -> Any:
    module = _framework("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch sees no GPU")
    return module


@pytest.fixture(scope="session")
def jax(cp: Any) -> Any:
    module = _framework("jax")
    if not any(d.platform == "gpu" for d in module.devices()):
        pytest.skip("this JAX sees no GPU")
    return module


@pytest.fixture(scope="session")
def numba_cuda(cp: Any) -> Any:
    module = _framework("numba.cuda")
    if not module.is_available():
        pytest.skip("this Numba sees no GPU")
    return module
