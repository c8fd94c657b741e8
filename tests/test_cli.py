"""The command line: every command, its files, its refusals, and machines with parts missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cufa2 import __version__, cache, compiler, device, flash_attention, plan
from cufa2.__main__ import main
from cufa2.testing import make_inputs

ROOT = Path(__file__).resolve().parent.parent
SHAPE = (2, 9, 13, 4, 2, 16, 24)  # B, Sq, Sk, H, Hk, D, Dv


def child(code: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -c code args` with the checkout on the path."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[str], Any]:
    """q.npy, k.npy, v.npy in float32, and the arrays."""
    inputs = make_inputs(SHAPE, "float32", seed=3)
    paths = []
    for name, x in zip("qkv", inputs, strict=False):
        np.save(tmp_path / f"{name}.npy", x)
        paths.append(str(tmp_path / f"{name}.npy"))
    return paths, inputs[:3]


# info


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, kernels and the cache folder, each on a line of its own name."""
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = {line[:15].strip(): line[15:] for line in lines if line[:15].strip()}
    assert facts["cufa2"] == __version__
    assert facts["NumPy"] == np.__version__
    assert facts["cache"] == str(device.cache_dir())
    assert facts["kernels"].startswith("fwd_sm")
    why = device.why_no_cuda()
    assert facts["CUDA back end"] == ("on" if why is None else f"off: {why}")


NO_CUPY = "import sys; sys.modules['cupy'] = None\n"
NO_NVRTC = """
import sys
from cuda import pathfinder
real = pathfinder.load_nvidia_dynamic_lib
def load(name):
    if name == 'nvrtc':
        raise pathfinder.DynamicLibNotFoundError('libnvrtc is hidden')
    return real(name)
pathfinder.load_nvidia_dynamic_lib = load
"""
RUN = "from cufa2.__main__ import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        (NO_CUPY, {}, "CuPy cannot be imported"),
        ("import sys\n", {"CUDA_VISIBLE_DEVICES": ""}, "off: "),
        (NO_NVRTC, {}, "NVRTC cannot be loaded (libnvrtc is hidden)"),
    ],
)
def test_info_where_parts_are_missing(
    setting: str, environment: dict[str, str], expected: str
) -> None:
    """No CuPy, no visible GPU, no NVRTC: info reports it and succeeds."""
    done = child(setting + RUN, "info", **environment)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert "fwd_sm80" in done.stdout


@pytest.mark.parametrize("setting", [NO_CUPY, NO_NVRTC])
def test_attend_where_parts_are_missing(
    setting: str, files: tuple[list[str], Any], tmp_path: Path
) -> None:
    """NumPy needs neither CuPy nor NVRTC."""
    paths, qkv = files
    out = tmp_path / "o.npy"
    done = child(setting + RUN, "attend", *paths, "-o", str(out))
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(out), flash_attention(*qkv))


def test_cuda_is_refused_with_the_reason(files: tuple[list[str], Any], tmp_path: Path) -> None:
    """--device cuda without CuPy: status 1 and the reason, no output, no traceback."""
    out = tmp_path / "o.npy"
    done = child(NO_CUPY + RUN, "attend", *files[0], "--device", "cuda", "-o", str(out))
    assert done.returncode == 1
    assert done.stderr.startswith("cufa2: error: the CUDA back end is off: CuPy cannot be")
    assert "Traceback" not in done.stderr
    assert not out.exists()


# attend


def test_module_and_help() -> None:
    """`python -m cufa2` works, and every command explains itself."""
    for command in ([], ["info"], ["attend"], ["compile"], ["bench"]):
        code = "import runpy, sys; runpy.run_module('cufa2', run_name='__main__')"
        done = child(code, *command, "--help")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: cufa2 " + " ".join(command))


def test_attend_npy(
    files: tuple[list[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result is flash_attention's, to the bit, and --lse writes lse."""
    paths, qkv = files
    out, lse = tmp_path / "o.npy", tmp_path / "lse.npy"
    assert main(["attend", *paths, "--causal", "-o", str(out), "--lse", str(lse)]) == 0
    expected = flash_attention(*qkv, causal=True, return_lse=True)
    np.testing.assert_array_equal(np.load(out), expected[0])
    np.testing.assert_array_equal(np.load(lse), expected[1])
    assert "2 x 9 x 4 x 24 float32 on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--causal-alignment", "top_left"], {"causal": "top_left"}),
        (["--window", "3", "-1"], {"window": (3, -1)}),
        (["--window", "none", "2"], {"window": (None, 2)}),
        (["--softmax-scale", "0.7", "--softcap", "5"], {"softmax_scale": 0.7, "softcap": 5.0}),
        (["--softmax-scale", "-0.5"], {"softmax_scale": -0.5}),
        (["--dtype", "float64"], {}),
    ],
)
def test_attend_options(
    arguments: list[str], options: dict[str, Any], files: tuple[list[str], Any], tmp_path: Path
) -> None:
    """Each option reaches the call and changes the result."""
    paths, qkv = files
    out = tmp_path / "o.npy"
    assert main(["attend", *paths, *arguments, "-o", str(out)]) == 0
    wanted = np.float64 if "--dtype" in arguments else np.float32
    expected = flash_attention(*(x.astype(wanted) for x in qkv), **options)
    assert np.load(out).dtype == wanted
    np.testing.assert_array_equal(np.load(out), expected)
    assert not np.array_equal(expected, flash_attention(*qkv))


def test_attend_layout_and_lengths(tmp_path: Path) -> None:
    """--layout and --seqlens-q/-k, whose files may hold any integer type."""
    q, k, v, _ = make_inputs((2, 6, 8, 2, 2, 8, 8), "float32")
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    np.savez(tmp_path / "in.npz", q=q, k=k, v=v, other=np.zeros(3))
    np.save(tmp_path / "lq.npy", np.array([6, 3], np.int64))
    np.save(tmp_path / "lk.npy", np.array([2, 8], np.uint8))
    arguments = [str(tmp_path / "in.npz"), "--layout", "bhsd", "-o", str(tmp_path / "out.npz")]
    arguments += ["--seqlens-q", str(tmp_path / "lq.npy")]
    arguments += ["--seqlens-k", str(tmp_path / "lk.npy")]
    assert main(["attend", *arguments]) == 0
    lengths: dict[str, Any] = {
        "seqlens_q": np.array([6, 3], np.int32),
        "seqlens_k": np.array([2, 8], np.int32),
    }
    o, lse = flash_attention(q, k, v, layout="bhsd", return_lse=True, **lengths)
    with np.load(tmp_path / "out.npz") as written:
        assert sorted(written) == ["lse", "o"]
        np.testing.assert_array_equal(written["o"], o)
        np.testing.assert_array_equal(written["lse"], lse)


def test_attend_safetensors_bfloat16(tmp_path: Path) -> None:
    """bfloat16 goes in and comes out as itself."""
    q, k, v, _ = make_inputs(SHAPE, "bfloat16")
    save_file({"q": q, "k": k, "v": v}, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    assert main(["attend", str(tmp_path / "in.safetensors"), "-o", str(out)]) == 0
    written = load_file(out)
    o, lse = flash_attention(q, k, v, return_lse=True)
    assert written["o"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(written["o"].view(np.uint16), o.view(np.uint16))
    np.testing.assert_array_equal(written["lse"], lse)


def test_attend_npy_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NumPy's raw 2-byte items are read as bfloat16 only when told so."""
    qkv = make_inputs(SHAPE, "bfloat16")[:3]
    paths = []
    for name, x in zip("qkv", qkv, strict=True):
        paths.append(str(tmp_path / f"{name}.npy"))
        np.save(paths[-1], x)
    out = str(tmp_path / "o.npy")
    assert main(["attend", *paths, "-o", out]) == 2
    assert "say --dtype bfloat16" in capsys.readouterr().err
    assert main(["attend", *paths, "--dtype", "bfloat16", "-o", out]) == 0
    expected = flash_attention(*qkv).view(np.uint16)
    np.testing.assert_array_equal(np.load(out).view(np.uint16), expected)


def test_attend_big_endian_and_fortran(tmp_path: Path, files: tuple[list[str], Any]) -> None:
    """Files keep byte order and memory order; neither changes the result."""
    qkv = files[1]
    paths = []
    for name, x in zip("qkv", qkv, strict=True):
        paths.append(str(tmp_path / f"{name}_be.npy"))
        np.save(paths[-1], np.asfortranarray(x.astype(">f4")))
    out = tmp_path / "o.npy"
    assert main(["attend", *paths, "-o", str(out)]) == 0
    np.testing.assert_allclose(np.load(out), flash_attention(*qkv), rtol=1e-5, atol=1e-6)


def test_attend_without_safetensors(
    files: tuple[list[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the package, and comes before any work."""
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    out = str(tmp_path / "o.safetensors")
    assert main(["attend", *files[0], "-o", out]) == 1


def refusals(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Name -> (arguments of attend, part of the message); files that exist are in `folder`."""
    q, k, v, _ = make_inputs(SHAPE, "float32")
    np.savez(folder / "two.npz", q=q, k=k)
    np.save(folder / "short.npy", k[:, :5])
    np.save(folder / "whole.npy", np.ones((2, 9, 4, 16), np.int64))
    np.save(folder / "double.npy", q.astype(np.float64))
    np.save(folder / "complex.npy", np.ones((2, 9, 4, 16), np.complex64))
    np.save(folder / "lengths.npy", np.array([1.0, 2.0]))
    np.save(folder / "long.npy", np.array([14, 2]))
    np.save(folder / "objects.npy", np.array([{}], object))
    (folder / "junk.npy").write_bytes(b"\x93NUMPY\x01\x00junk")
    (folder / "junk.npz").write_bytes(b"junk")
    (folder / "junk.safetensors").write_bytes(b"junk" * 8)
    (folder / "text.txt").write_text("1 2 3")
    for name, x in (("q", q), ("k", k), ("v", v)):
        np.save(folder / f"{name}.npy", x)
    qkv = ["q.npy", "k.npy", "v.npy"]
    return {
        "missing": (["none.npy", "k.npy", "v.npy"], "cannot read none.npy: No such file"),
        "two files": (["q.npy", "k.npy"], "as three files or as one, not as 2"),
        "one array": (["q.npy"], "lacks q, k, v; it holds array"),
        "no v": (["two.npz"], "two.npz lacks v; it holds q, k"),
        "many in one": (["two.npz", "k.npy", "v.npy"], "holds 2 arrays (q, k), not one"),
        "junk npy": (["junk.npy", "k.npy", "v.npy"], "is not a .npy file of numbers"),
        "junk npz": (["junk.npz"], "is not a .npz file of numbers"),
        "junk safetensors": (["junk.safetensors"], "is not a .safetensors file of numbers"),
        "objects": (["objects.npy", "k.npy", "v.npy"], "is not a .npy file of numbers"),
        "suffix": (["text.txt"], "does not end in one of .npy, .npz, .safetensors"),
        "folder": ([".", "k.npy", "v.npy"], "does not end in one of"),
        "keys": (["q.npy", "short.npy", "v.npy"], "k has 5 rows and v has 13"),
        "mixed dtypes": (["double.npy", "k.npy", "v.npy"], "q, k and v must have one dtype"),
        "integers": (["whole.npy", "k.npy", "v.npy"], "int64"),
        "complex": (["complex.npy", *qkv[1:], "--dtype", "float32"], "q holds complex64"),
        "softcap": ([*qkv, "--softcap", "-1"], "softcap=-1.0 is not within 1e-30"),
        "window": ([*qkv, "--window", "-2", "0"], "window=[-2, 0]"),
        "precision": (
            [*qkv, "--dtype", "float64", "--precision", "tf32"],
            "precision='tf32' is for float32 arrays; q, k and v are float64",
        ),
        "scale": ([*qkv, "--softmax-scale", "nan"], "softmax_scale=nan is not finite"),
        "lengths": ([*qkv, "--seqlens-k", "lengths.npy"], "does not hold integers"),
        "long": ([*qkv, "--seqlens-k", "long.npy"], "seqlens_k[0]=14 is outside 0..13"),
        "output suffix": ([*qkv, "-o", "o.txt"], "o.txt does not end in one of"),
        "output folder": ([*qkv, "-o", "nowhere/o.npy"], "its folder does not exist"),
        "output is a folder": ([*qkv, "-o", "dir.npy"], "cannot write dir.npy: Is a directory"),
    }


def test_attend_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong input: one line on standard error, status 2, nothing written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir.npy").mkdir()
    for name, (arguments, message) in refusals(tmp_path).items():
        output = [] if "-o" in arguments else ["-o", "result.npy"]
        assert main(["attend", *arguments, *output]) == 2, name
        written = capsys.readouterr()
        assert written.err.startswith("cufa2: error: "), name
        assert message in written.err, name
        assert written.err.count("\n") == 1, name
        assert written.out == "", name
        assert not (tmp_path / "result.npy").exists(), name


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["attend", "q.npy"],
        ["attend", "q.npy", "-o", "o.npy", "--layout", "sbhd"],
        ["attend", "q.npy", "-o", "o.npy", "--window", "1"],
        ["compile", "--arch", "sm_75", "-o", "x"],
        ["compile", "--arch", "sm_80", "--head-dim", "65", "-o", "x"],
    ],
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's own status, 2, and a usage line."""
    with pytest.raises(SystemExit) as e:
        main(arguments)
    assert e.value.code == 2
    assert "usage: cufa2" in capsys.readouterr().err


# compile and bench

ONE = ["--head-dim", "32", "--dtype", "float16", "--mask", "causal", "--score", "plain"]
ONE += ["--direction", "forward"]


def test_compile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds the chosen kernels, once, into a folder that serves without NVRTC."""
    monkeypatch.setenv("CUFA2_CACHE_DIR", str(tmp_path / "unused"))
    folder = tmp_path / "kernels"
    command = ["compile", "--arch", "sm_80", "--arch", "sm_90a", *ONE, "-o", str(folder)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "[1/2] fwd_sm80_fp16_d32_causal" in out
    assert "[2/2]" in out
    assert " registers, 0 bytes spilled" in out
    assert f"CUFA2_CACHE_DIR={folder}" in out
    assert len(list(folder.glob("*.cubin"))) == 2
    assert not (tmp_path / "unused").exists()
    assert main(command) == 0
    assert capsys.readouterr().out.count("already there") == 2
    found = child(
        NO_NVRTC
        + "from cufa2 import compiler, device, plan\n"
        + "for v in plan.variants(device.info_for_arch('sm_90a')):\n"
        + "    if v.name == 'fwd_sm80_fp16_d32_causal':\n"
        + "        print(compiler.build(v, 'sm_90a').cached)\n",
        CUFA2_CACHE_DIR=str(folder),
    )
    assert found.stdout == "True\n", found.stderr


def test_compile_one_pass_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the masks: a backward pass needs its kernels without one as well."""
    built = []

    def build(variant: Any, arch: str, *, folder: Path) -> cache.Cubin:
        built.append(variant.name)
        path = folder / variant.name
        return cache.Cubin(path, variant.name, arch, "12.9", 1, 0, 0, 0.1, "", False)

    monkeypatch.setattr(compiler, "build", build)
    choices = [*ONE[:-1], "backward"]
    assert main(["compile", "--arch", "sm_90a", *choices, "-o", str(tmp_path)]) == 0
    names = ("bwd_delta", "bwd_sm80", "bwd_convert", "bwd_dq_sm80")
    ends = ("", "_causal", "", "_causal")
    wanted = [f"{name}_fp16_d32{end}" for name, end in zip(names, ends, strict=True)]
    assert sorted(built) == sorted([*wanted, "bwd_sm80_fp16_d32_causal_deterministic"])


def test_compile_covers_all_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without choices every variant of the architecture is built, each once."""
    built = []

    def build(variant: Any, arch: str, *, folder: Path) -> cache.Cubin:
        built.append((variant, arch))
        path = folder / variant.name
        return cache.Cubin(path, variant.name, arch, "12.9", 1, 0, 0, 0.1, "", False)

    monkeypatch.setattr(compiler, "build", build)
    arguments = ["--arch", "sm_86", "--arch", "sm_86", "-o", str(tmp_path)]
    assert main(["compile", *arguments]) == 0
    wanted = list(plan.variants(device.info_for_arch("sm_86")))
    assert sorted(v.name for v, _ in built) == sorted(v.name for v in wanted)


def test_compile_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that is a file; no NVRTC."""
    (tmp_path / "file").write_text("")
    command = ["compile", "--arch", "sm_80", *ONE, "-o"]
    assert main([*command, str(tmp_path / "file")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "file" / "below")]) == 2
    done = child(NO_NVRTC + RUN, *command, str(tmp_path / "empty"))
    assert done.returncode == 1
    assert done.stderr.startswith("cufa2: error: NVRTC cannot be loaded (libnvrtc is hidden)")
    assert "Traceback" not in done.stderr


def test_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Times full and causal attention of each shape, in the wanted dtype."""
    monkeypatch.setattr("cufa2.__main__.CPU_SHAPES", ((1, 64, 2, 16),))
    assert main(["bench", "--device", "cpu", "--dtype", "float64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "forward, float64, cpu: NumPy"
    rows = [line.split() for line in lines[2:]]
    assert [row[:5] for row in rows] == [["1", "64", "2", "16", m] for m in ("full", "causal")]
    for row, flops in zip(rows, (4 * 2 * 64 * 64 * 16, 2 * 2 * 64 * 64 * 16), strict=True):
        assert float(row[6]) == pytest.approx(flops / float(row[5]) * 1e-9, rel=0.02)


def test_bench_checks_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong result stops the benchmark before a time is printed."""
    monkeypatch.setattr("cufa2.__main__.CPU_SHAPES", ((1, 64, 2, 16),))
    monkeypatch.setattr(
        "cufa2.__main__.flash_attention", lambda *a, **k: flash_attention(*a, **k) * 1.001
    )
    with pytest.raises(AssertionError, match="head dim 16"):
        main(["bench", "--device", "cpu"])
    assert "full" not in capsys.readouterr().out
