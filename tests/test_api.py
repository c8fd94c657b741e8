"""The public calls on NumPy arrays: one computation behind three doors, in every layout."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cufa2
from cufa2 import (
    FlashAttention2,
    device,
    flash_attention,
    flash_attention_backward,
    testing,
)
from cufa2.dense import (
    plain_attention,
    plain_attention_backward,
    reference64,
    reference64_backward,
)
from cufa2.testing import assert_accurate, assert_lse, make_inputs

ROOT = Path(__file__).resolve().parent.parent
SHAPE = (2, 37, 41, 4, 2, 16, 24)  # B, Sq, Sk, H, Hk, D, Dv
DTYPES = ("float16", "bfloat16", "float32", "float64")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (5, 3)},
    "causal window": {"causal": True, "window": (7, None)},
    "softcap": {"softcap": 2.0, "softmax_scale": -0.4},
    "scale zero": {"softmax_scale": 0},
    "lengths": {
        "seqlens_q": np.array([37, 11], np.int32),
        "seqlens_k": np.array([0, 23], np.int32),
        "causal": True,
    },
}


def swap(x: Any) -> Any:
    return np.ascontiguousarray(x.swapaxes(1, 2))


def flat(x: Any) -> Any:
    """(B, S, H, D) as contiguous (B*H, S, D)."""
    return swap(x).reshape(-1, x.shape[1], x.shape[3])


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the launcher, and what each call is given."""
    call = {n: x for n, x in options.items() if n.startswith("seqlens")}
    return {n: x for n, x in options.items() if n not in call}, call


# results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_results(dtype: str, options: dict[str, Any]) -> None:
    """Right by the accuracy rule, forward and backward, with the shapes and dtypes promised."""
    q, k, v, do = make_inputs(SHAPE, dtype, seed=2)
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    assert (o.shape, o.dtype) == ((2, 37, 4, 24), q.dtype)
    assert (lse.shape, lse.dtype) == (
        (2, 4, 37),
        np.float64 if dtype == "float64" else np.float32,
    )
    o64, lse64 = reference64(q, k, v, **options)
    assert_accurate(o, o64, plain_attention(q, k, v, **options)[0], "o")
    assert_lse(lse, lse64, dtype)
    grads = flash_attention_backward(do, q, k, v, o, lse, **options)
    truth = reference64_backward(do, q, k, v, **options)
    plain = plain_attention_backward(do, q, k, v, **options)
    for name, x, g, t, p in zip(("dq", "dk", "dv"), (q, k, v), grads, truth, plain, strict=True):
        assert (type(g), g.shape, g.dtype) == (np.ndarray, x.shape, x.dtype)
        assert_accurate(g, t, p, name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_three_doors(options: dict[str, Any]) -> None:
    """Function, launcher for one head dim, and a launcher used twice: the same bits."""
    q, k, v, do = make_inputs(SHAPE, "float32", seed=3)
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    grads = flash_attention_backward(do, q, k, v, o, lse, **options)
    fixed, call = split(options)
    attention = FlashAttention2(16, "float32", head_dim_v=24, **fixed)
    for _ in range(2):
        made: tuple[Any, ...] = attention.forward(q, k, v, **call)
        made += attention.backward(do, q, k, v, *made, **call)
        for ours, expected in zip(made, (o, lse, *grads), strict=True):
            np.testing.assert_array_equal(ours, expected)
    assert attention.kernels == ()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layouts(options: dict[str, Any]) -> None:
    """bshd, bhsd and flat arrays are one problem; every result has its input's layout."""
    shape = (2, 37, 41, 3, 3, 16, 24)  # flat arrays have one query head per key head
    q, k, v, do = make_inputs(shape, "float64", seed=4)
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    grads = flash_attention_backward(do, q, k, v, o, lse, **options)

    a, b, c, d = map(swap, (q, k, v, do))
    ours = flash_attention(a, b, c, layout="bhsd", return_lse=True, **options)
    ours += flash_attention_backward(d, a, b, c, *ours, layout="bhsd", **options)
    for x, expected in zip(ours, (swap(o), lse, *map(swap, grads)), strict=True):
        assert x.shape == expected.shape
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)

    each: dict[str, Any] = {
        n: np.repeat(x, 3) if n.startswith("seqlens") else x for n, x in options.items()
    }
    a, b, c, d = map(flat, (q, k, v, do))
    for layout in ("bshd", "bhsd"):
        ours = flash_attention(a, b, c, layout=layout, return_lse=True, **each)
        ours += flash_attention_backward(d, a, b, c, *ours, layout=layout, **each)
        right = (flat(o), lse.reshape(6, 37), *map(flat, grads))
        for x, expected in zip(ours, right, strict=True):
            assert x.shape == expected.shape
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


def test_flat_outputs() -> None:
    q, k, v = map(flat, make_inputs((2, 5, 7, 3, 3, 8, 8))[:3])
    expected, expected_lse = flash_attention(q, k, v, return_lse=True)
    out, lse_out = np.empty_like(expected), np.empty_like(expected_lse)
    assert flash_attention(q, k, v, out=out, lse_out=lse_out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse_out, expected_lse)
    with pytest.raises(ValueError, match=r"lse_out has shape \(2, 3, 5\); it must be \(6, 5\)"):
        flash_attention(q, k, v, lse_out=lse_out.reshape(2, 3, 5))


def test_return_types() -> None:
    """o alone, or the pair; lse is a new array at every call."""
    q, k, v = make_inputs(SHAPE)[:3]
    assert type(flash_attention(q, k, v)) is np.ndarray
    made = flash_attention(q, k, v, return_lse=True)
    assert type(made) is tuple
    assert len(made) == 2
    attention = FlashAttention2(16, np.float32, head_dim_v=24)
    (o1, lse1), (o2, lse2) = attention.forward(q, k, v), attention.forward(q, k, v)
    assert not np.shares_memory(o1, o2)
    assert not np.shares_memory(lse1, lse2)
    o, lse = attention.forward(q, k, v, want_lse=False)
    assert lse is None
    np.testing.assert_array_equal(o, o1)
    grads = flash_attention_backward(o1, q, k, v, o1, lse1, dlse=lse1, deterministic=True)
    assert type(grads) is tuple
    assert len(grads) == 3


def test_tf32_is_taken_and_not_needed() -> None:
    """NumPy computes at float32 accuracy all the same; other dtypes are refused in both passes."""
    q, k, v, do = make_inputs(SHAPE, "float32")
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    grads = flash_attention_backward(do, q, k, v, o, lse, causal=True)
    fast: dict[str, Any] = {"causal": True, "precision": "tf32"}
    attention = FlashAttention2(16, "float32", head_dim_v=24, causal=True, precision="tf32")
    for made in (
        flash_attention(q, k, v, return_lse=True, **fast),
        attention.forward(q, k, v),
    ):
        for x, expected in zip(made, (o, lse), strict=True):
            np.testing.assert_array_equal(x, expected)
    for made in (
        flash_attention_backward(do, q, k, v, o, lse, **fast),
        attention.backward(do, q, k, v, o, lse),
    ):
        for x, expected in zip(made, grads, strict=True):
            np.testing.assert_array_equal(x, expected)
    wide = [x.astype(np.float64) for x in (do, q, k, v, o, lse)]
    out = np.full_like(wide[4], np.nan)
    message = r"^precision='tf32' is for float32 arrays; q, k and v are float64$"
    with pytest.raises(ValueError, match=message):
        flash_attention(*wide[1:4], precision="tf32", out=out)
    assert np.isnan(out).all()
    with pytest.raises(ValueError, match=message):
        flash_attention_backward(*wide, precision="tf32")


def test_gradient_of_lse_is_used() -> None:
    """dlse=None is the same as zeros; anything else changes dq and dk, and never dv."""
    q, k, v, do = make_inputs(SHAPE, "float64")
    o, lse = flash_attention(q, k, v, return_lse=True)
    none = flash_attention_backward(do, q, k, v, o, lse)
    zeros = flash_attention_backward(do, q, k, v, o, lse, dlse=np.zeros_like(lse))
    dlse = np.random.default_rng(1).standard_normal(lse.shape)
    some = flash_attention_backward(do, q, k, v, o, lse, dlse=dlse)
    for a, b in zip(none, zeros, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(none[2], some[2])
    for a, b in zip(some, reference64_backward(do, q, k, v, dlse=dlse), strict=True):
        np.testing.assert_allclose(a, b.astype(float), rtol=0, atol=1e-12)
    assert np.abs(none[0] - some[0]).max() > 1e-3


def test_one_number_many_spellings() -> None:
    q, k, v = make_inputs(SHAPE)[:3]
    expected = flash_attention(q, k, v, softmax_scale=0.125, softcap=30.0, window=(3, 5))
    spellings: tuple[Any, ...] = (np.float32, np.float64, np.array)
    for number in spellings:
        ours = flash_attention(
            q,
            k,
            v,
            softmax_scale=number(0.125),
            softcap=number(30),
            window=(np.int64(3), np.int8(5)),
        )
        np.testing.assert_array_equal(ours, expected)


# empty sizes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (0, 0, 0)], ids=str)
def test_empty_sizes(sizes: tuple[int, int, int], causal: Any, dtype: str) -> None:
    """Shapes and dtypes as usual; without keys o is 0, lse -inf and dq 0."""
    q, k, v, do = make_inputs((*sizes, 4, 2, 16, 24), dtype)
    for lens in (None, "zero"):
        lengths: dict[str, Any] = (
            {} if lens is None else {"seqlens_k": np.zeros(sizes[0], np.int32)}
        )
        o, lse = flash_attention(q, k, v, causal=causal, return_lse=True, **lengths)
        assert (o.shape, o.dtype) == ((*sizes[:2], 4, 24), q.dtype)
        assert lse.shape == (sizes[0], 4, sizes[1])
        if sizes[2] == 0 or lens:
            assert not o.astype(float).any()
            assert (lse == -np.inf).all()
        grads = flash_attention_backward(do, q, k, v, o, lse, causal=causal, **lengths)
        for x, g in zip((q, k, v), grads, strict=True):
            assert (g.shape, g.dtype) == (x.shape, x.dtype)
        if 0 in sizes or lens:  # no pair of a query and a key
            assert not any(g.astype(float).any() for g in grads)


def test_no_heads() -> None:
    """(0, 0) heads is an empty result; zero key heads under query heads is wrong."""
    q, k = np.zeros((2, 5, 0, 8)), np.zeros((2, 7, 0, 8))
    o, lse = flash_attention(q, k, k, return_lse=True)
    assert (o.shape, lse.shape) == ((2, 5, 0, 8), (2, 0, 5))
    assert [g.shape for g in flash_attention_backward(o, q, k, k, o, lse)] == [
        *(q.shape, k.shape, k.shape)
    ]
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_heads_kv=0"):
        flash_attention(np.zeros((2, 5, 4, 8)), k, k)


# the launcher class


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", np.float16, np.dtype("float16"), ml_dtypes.bfloat16]
)
def test_launcher_dtypes(dtype: Any) -> None:
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    attention = FlashAttention2(16, dtype, head_dim_v=24)
    assert (attention.head_dim, attention.head_dim_v, attention.dtype) == (16, 24, name)
    o, _ = attention.forward(*make_inputs(SHAPE, name)[:3])
    assert o.dtype.name == name
    assert FlashAttention2(8, dtype).head_dim_v == 8


def test_launcher_refuses_other_arrays() -> None:
    q, k, v, do = make_inputs(SHAPE)
    o, lse = flash_attention(q, k, v, return_lse=True)
    narrow, half = FlashAttention2(8, "float32"), FlashAttention2(16, "float16", head_dim_v=24)
    dims = r"this launcher is for head dims \(8, 8\), the arrays have \(16, 24\)"
    types = "this launcher is for float16, the arrays are float32"
    with pytest.raises(ValueError, match=dims):
        narrow.forward(q, k, v)
    with pytest.raises(ValueError, match=dims):
        narrow.backward(do, q, k, v, o, lse)
    with pytest.raises(TypeError, match=types):
        half.forward(q, k, v)
    with pytest.raises(TypeError, match=types):
        half.backward(do, q, k, v, o, lse)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((0, "float32"), {}, ValueError, "head dims must be at least 1, got D=0 and Dv=0"),
        ((8, "float32"), {"head_dim_v": 0}, ValueError, "got D=8 and Dv=0"),
        ((8, "int8"), {}, TypeError, "dtype int8 is not supported; use one of float16, "),
        ((8, np.int32), {}, TypeError, "dtype int32 is not supported"),
        ((8, "half precision"), {}, TypeError, "dtype half precision is not supported"),
        ((8, "float32"), {"causal": "left"}, ValueError, "causal='left' is not one of"),
        ((8, "float32"), {"softcap": -1}, ValueError, "softcap=-1.0 is not within 1e-30"),
        ((8, "float32"), {"layout": "sbhd"}, ValueError, "layout='sbhd' is not one of"),
        ((8, "float32"), {"precision": "high"}, ValueError, "is not one of (None, 'tf32')"),
        ((8, "float16"), {"precision": "tf32"}, ValueError, "q, k and v are float16"),
        ((8, "float32"), {"window": 3}, ValueError, "window=3: window must be None or a pair"),
        ((8, "float32"), {"device": "gpu"}, ValueError, "device='gpu' is not None, 'cpu', 'cuda'"),
        ((8, "float32"), {"device": "cuda:x"}, ValueError, "device='cuda:x' is not None"),
        ((8, "float32"), {"device": "cuda:"}, ValueError, "device='cuda:' is not None"),
        ((8, "float32"), {"device": 1.5}, ValueError, "device=1.5 is not None"),
        ((8, "float32"), {"device": -1}, ValueError, "device=-1 is not None"),
        ((8.5, "float32"), {}, TypeError, "head_dim=8.5 is not an integer"),
        (("8", "float32"), {}, TypeError, "head_dim='8' is not an integer"),
        ((8, "float32"), {"head_dim_v": 8.0}, TypeError, "head_dim_v=8.0 is not an integer"),
    ],
)
def test_launcher_refusals(args: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        FlashAttention2(*args, **options)


def test_a_cpu_launcher_refuses_gpu_arrays() -> None:
    """By the device that the array names; nothing is exported or moved."""

    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError("not to be exported")

    x = np.zeros((1, 2, 1, 8), np.float32)
    attention = FlashAttention2(8, "float32", device="cpu")
    attention.forward(x, x, x)
    with pytest.raises(ValueError, match="all arrays must be on one device, got q on cpu, k on c"):
        attention.forward(x, OnGpu(), x)


def test_without_a_gpu_the_error_says_why() -> None:
    """GPU arrays and device="cuda" get the reason; NumPy goes on working."""
    code = """
import numpy as np
import cufa2

class OnGpu:
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, **_):
        raise AssertionError("not to be exported")

x = np.zeros((1, 2, 1, 8), np.float16)
for call in (
    lambda: cufa2.flash_attention(OnGpu(), OnGpu(), OnGpu()),
    lambda: cufa2.FlashAttention2(8, "float16", device="cuda"),
    lambda: cufa2.FlashAttention2(8, "float16", device="cuda:0"),
    lambda: cufa2.FlashAttention2(8, "float16", device=0),
    lambda: cufa2.FlashAttention2(8, "float16", device="cpu").forward(OnGpu(), OnGpu(), OnGpu()),
):
    try:
        call()
    except (RuntimeError, ValueError) as e:
        print(type(e).__name__, e)
print(cufa2.flash_attention(x, x, x).shape)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    *errors, last = result.stdout.splitlines()
    assert last == "(1, 2, 1, 8)"
    assert len(errors) == 5
    for error in errors[:4]:
        assert error.startswith("RuntimeError the CUDA back end is off: ")
    # Which of the two reasons comes first does not matter; both name the cause.
    assert "the CUDA back end is off" in errors[4] or "this launcher is for cpu" in errors[4]


# documentation


PUBLIC = (FlashAttention2, flash_attention, flash_attention_backward)


def test_public_names() -> None:
    assert cufa2.__all__ == [
        "CompileError",
        "FlashAttention2",
        "UnsupportedError",
        "__version__",
        "flash_attention",
        "flash_attention_backward",
    ]
    assert all(hasattr(cufa2, name) for name in cufa2.__all__)
    assert cufa2.api.__all__ == [x.__name__ for x in PUBLIC]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda x: x.__name__)
def test_docstrings(public: Any) -> None:
    """Every argument by name, every error; functions also formula, shapes, results and source."""
    text = inspect.getdoc(public) or ""
    assert "Raises" in text
    for error in ("ValueError", "TypeError", "UnsupportedError", "CompileError"):
        assert error in text
    for name in inspect.signature(public).parameters:
        assert re.search(rf"\b{name}\b", text), f"{name} is not explained"
    if public is not FlashAttention2:
        for part in ("Args:", "Returns:", "Raises:", "Source:", "lse", " = "):
            assert part in text
    if public is flash_attention:
        for shape in ("(B, Sq, H, D)", "(B, Sk, Hk, D)", "(B, Sk, Hk, Dv)", "(B, H, Sq)"):
            assert shape in text


@pytest.mark.parametrize("name", ["CompileError", "UnsupportedError"])
def test_errors_are_explained(name: str) -> None:
    assert len(getattr(cufa2, name).__doc__) > 30


@pytest.mark.parametrize("name", ["forward", "backward", "kernels"])
def test_launcher_methods_are_explained(name: str) -> None:
    assert len(getattr(FlashAttention2, name).__doc__) > 30


def test_options_agree() -> None:
    """Functions and launcher take the same options with the same defaults, keyword-only."""
    forward = inspect.signature(flash_attention).parameters
    backward = inspect.signature(flash_attention_backward).parameters
    launcher = inspect.signature(FlashAttention2).parameters
    options = ("causal", "window", "softmax_scale", "softcap", "layout", "precision")
    for name in options:
        for signature in (forward, backward, launcher):
            assert signature[name].kind is inspect.Parameter.KEYWORD_ONLY
            assert signature[name].default == forward[name].default
    assert backward["deterministic"].default is launcher["deterministic"].default is False
    positional = [p.name for p in forward.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["q", "k", "v"]
    positional = [p.name for p in backward.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["do", "q", "k", "v", "o", "lse"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_huge_softcap_changes_nothing(dtype: str) -> None:
    """s -> cap tanh(s / cap) tends to s."""
    q, k, v = make_inputs((1, 5, 7, 2, 2, 8, 8), dtype, 3)[:3]
    plain, lse = flash_attention(q, k, v, return_lse=True)
    capped, capped_lse = flash_attention(q, k, v, softcap=1e30, return_lse=True)
    np.testing.assert_allclose(capped, plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(capped_lse, lse, rtol=1e-5)


def test_a_launcher_keeps_to_its_device() -> None:
    q, k, v = make_inputs((1, 5, 7, 2, 2, 8, 8), "float32", 0)[:3]
    launcher = FlashAttention2(8, "float32")
    launcher._device = ("cuda", 1)  # as on a machine that has one
    message = r"^this launcher is for cuda:1; the arrays are on cpu$"
    with pytest.raises(ValueError, match=message):
        launcher.forward(q, k, v)


def test_forward_takes_out_by_position() -> None:
    q, k, v = make_inputs((1, 5, 7, 2, 2, 8, 8), "float32", 0)[:3]
    out = np.full_like(q, np.nan)
    o, _ = FlashAttention2(8, "float32").forward(q, k, v, out)
    assert o is out
    np.testing.assert_array_equal(o, flash_attention(q, k, v))


def test_back_ends_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown one, and those that are not here, are refused with the reason."""
    with pytest.raises(ValueError, match="backend='metal' is not one of"):
        testing.backend("metal")
    monkeypatch.setattr(device, "why_no_cuda", lambda: "no driver at all")
    monkeypatch.setattr(device, "_cuda_process", None)
    with pytest.raises(RuntimeError, match="no driver at all"):
        testing.backend("cuda")
    monkeypatch.setattr("importlib.import_module", mock.Mock(side_effect=ModuleNotFoundError))
    with pytest.raises(RuntimeError, match=r"in tests/ of a checkout"):
        testing.backend("emulated")
