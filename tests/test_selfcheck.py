"""A kernel that NVRTC has miscompiled is found out before it is used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_oracle as oracle
import numpy as np
import pytest
from test_gpu_forward import run_checked

from cufa2 import compiler, device, launch, plan, reference, selfcheck
from cufa2.cache import Cubin
from cufa2.kernels import Variant

HOPPER = [v for v in plan.variants(device.info_for_arch("sm_90a")) if v.kernel.name == "fwd_sm90"]


@pytest.mark.parametrize("variant", HOPPER, ids=lambda v: v.name)
def test_the_problem_is_served_by_the_variant(variant: Variant) -> None:
    problem, _ = selfcheck.problem_of(variant)
    assert plan.choose(problem, device.info_for_arch("sm_90a")).variants == (variant,)


def cubin_of(folder: Path, nvrtc: str = "13.0", image: bytes = b"image") -> Cubin:
    path = folder / "kernel.cubin"
    path.write_bytes(image)
    return Cubin(path, "kernel", "sm_90a", nvrtc, 168, 0, 0, 1.0, "", False)


def run_by_reference(fault: float) -> selfcheck.Run:
    """Stands for a kernel: the right o, times 1 + fault at one place."""

    def run(problem: Any, views: Any) -> None:
        host = {n: selfcheck._widened(views[n].owner, problem.dtype) for n in "qkvo"}
        lse = views["lse"].owner.view(np.float32)
        q, k, v = (host[n] for n in "qkv")
        o = np.empty_like(host["o"])
        reference.forward(problem, q, k, v, o, lse)
        o.flat[np.abs(o).argmax()] *= 1 + fault
        views["o"].owner[...] = selfcheck._halves(o, problem.dtype)

    return run


@pytest.mark.parametrize("variant", HOPPER[::11], ids=lambda v: v.name)
def test_right_values_pass_once_and_wrong_ones_never(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SimpleNamespace(asarray=np.array, asnumpy=np.asarray)
    monkeypatch.setattr(device, "cupy", lambda: host)
    cubin = cubin_of(tmp_path)
    assert not selfcheck.trusted(cubin, variant)
    for fault in (0.25, np.nan):
        with pytest.raises(selfcheck.MiscompiledError, match=r"NVRTC 13\.0, computes wrong") as e:
            selfcheck.check(cubin, variant, run_by_reference(fault))
        assert e.value.row == "fwd_sm90"
        assert not selfcheck.trusted(cubin, variant)
    selfcheck.check(cubin, variant, run_by_reference(0.0))
    assert selfcheck.trusted(cubin, variant)
    # Another file in its place is not trusted for it.
    assert not selfcheck.trusted(cubin_of(tmp_path, image=b"another"), variant)


def test_what_needs_no_check(tmp_path: Path) -> None:
    assert selfcheck.trusted(cubin_of(tmp_path, "12.6"), HOPPER[0])
    plain = plan.choose(selfcheck.problem_of(HOPPER[0])[0], device.info_for_arch("sm_80")).variant
    assert selfcheck.trusted(cubin_of(tmp_path), plain)


def test_a_planted_cubin_is_refused(
    cp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the portable kernel serves instead, with a warning."""
    if device.info(0).cc != (9, 0):
        pytest.skip("needs a Hopper card")
    monkeypatch.setenv("CUFA2_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "_miscompiled", {})
    q, k, v = oracle.inputs(1, 300, 300, 2, 1, 64, 64, "bfloat16")
    planted, whole = (
        next(v for v in HOPPER if v.name == f"fwd_sm90_bf16_d64{mask}") for mask in ("_causal", "")
    )
    made = {v: compiler.build(v, "sm_90a", driver=device.driver_cuda()) for v in (planted, whole)}
    monkeypatch.setattr(selfcheck, "SUSPECTS", (made[whole].nvrtc,))
    assert not selfcheck.trusted(made[whole], whole)
    run_checked(q, k, v, "the right one")
    assert selfcheck.trusted(made[whole], whole)

    # Before it is loaded: CuPy keeps what it has loaded from a path.
    source = compiler.source_of(planted)
    wrong = source.replace("inverse[r] = empty ? 0.0f : 1.0f / l;", "inverse[r] = 1.5f / l;")
    assert wrong != source
    image, _ = compiler._compile(wrong, planted, "sm_90a")
    path = made[planted].path
    path.write_bytes(image)
    fields = json.loads(path.with_suffix(".json").read_text())
    fields["sha256"] = hashlib.sha256(image).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(fields))
    with pytest.warns(RuntimeWarning, match=r"fwd_sm90_bf16_d64_causal, .*computes wrong values"):
        run_checked(q, k, v, "in its place the portable kernel", causal=True)
    assert not selfcheck.trusted(made[planted], planted)
