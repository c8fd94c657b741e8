"""scripts/compare.sh, and what of the other measuring scripts runs without a GPU."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cufa2 import device, plan
from cufa2.dense import reference64, reference64_backward
from cufa2.kernels import KERNELS
from cufa2.problem import Options, Problem, make_problem
from cufa2.testing import EPS, Case, make_inputs

ROOT = Path(__file__).resolve().parent.parent


def run_of(
    rows: dict[str, dict[str, float]], direction: str = "forward", **environment: Any
) -> dict[str, Any]:
    """A result file's content from {case: {contestant: us}}."""
    contestants = list(dict.fromkeys(who for us in rows.values() for who in us))
    env = {"card": "NVIDIA H200", "date": "2026-12-01 10:00:00+0000", "commit": "a" * 40}
    return {
        "pass": direction,
        "environment": env | {"dirty": False} | environment,
        "settings": {"dtype": "bfloat16"},
        "contestants": contestants,
        "rows": [
            {
                "case": case,
                "head_dim": 64,
                "flops": 1e12,
                "us": us,
                "spread": dict.fromkeys(us, 0.02),
            }
            for case, us in rows.items()
        ],
    }


def compare(tmp_path: Path, before: Any, after: Any, *extra: str) -> Any:
    """Run the script on two contents; text instead of a dict is written as it is."""
    paths = []
    for name, run in (("before.json", before), ("after.json", after)):
        (tmp_path / name).write_text(run if isinstance(run, str) else json.dumps(run))
        paths.append(name)
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "compare.sh"), *paths, *extra],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


BEFORE = {"one": {"cufa2": 200.0, "torch-fa2": 100.0}, "two": {"cufa2": 90.0, "torch-fa2": 90.0}}
# The card is 10 % slower in the second run; cufa2 got 2 times faster on `one`, 1 time on `two`.
AFTER = {"one": {"cufa2": 110.0, "torch-fa2": 110.0}, "two": {"cufa2": 99.0, "torch-fa2": 99.0}}


def test_ratios_and_means(tmp_path: Path) -> None:
    """Per case the plain and the corrected ratio; the mean is geometric, not arithmetic."""
    done = compare(tmp_path, run_of(BEFORE), run_of(AFTER))
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert lines["one"][1:] == ["200.0", "110.0", f"{200 / 110:.3f}", "2.000"]
    assert lines["two"][1:] == ["90.0", "99.0", f"{90 / 99:.3f}", "1.000"]
    assert lines["geometric"][2:] == [f"{math.sqrt(200 / 110 * 90 / 99):.3f}", f"{2**0.5:.3f}"]
    assert "torch-fa2 moved by 0.909 to 0.909" in done.stdout
    assert "largest spread inside a run 2.0 %" in done.stdout


def test_without_shared_peer(tmp_path: Path) -> None:
    """No common peer: no corrected column, and the note says so."""
    after = {case: {"cufa2": us["cufa2"], "fa3": 1.0} for case, us in AFTER.items()}
    done = compare(tmp_path, run_of(BEFORE), run_of(after))
    assert done.returncode == 0, done.stderr
    assert "no peer is in both files" in done.stdout
    assert "2.000" not in done.stdout


def test_other_ways_of_cufa2_are_no_peers(tmp_path: Path) -> None:
    """cufa2-det changes with cufa2, so it says nothing about the card's drift."""
    before, after = (
        {case: {**us, "cufa2-det": us["cufa2"] * scale} for case, us in runs.items()}
        for runs, scale in ((BEFORE, 2.0), (AFTER, 3.0))
    )
    done = compare(tmp_path, run_of(before, "backward"), run_of(after, "backward"))
    assert done.returncode == 0, done.stderr
    assert "torch-fa2 moved by 0.909 to 0.909" in done.stdout
    assert "2.000" in done.stdout
    assert "det" not in done.stdout


def test_other_cases_and_cards_are_named(tmp_path: Path) -> None:
    """Cases of one file only are listed, and so is a change of card."""
    before = run_of({**BEFORE, "gone": {"cufa2": 1.0}})
    after = run_of({**AFTER, "new": {"cufa2": 1.0}}, card="NVIDIA A100", dirty=True)
    done = compare(tmp_path, before, after)
    assert "only before: gone" in done.stdout
    assert "only after: new" in done.stdout
    assert "different cards" in done.stdout
    assert "with uncommitted changes" in done.stdout


@pytest.mark.parametrize(("bound", "status"), [("1.4", 0), ("1.5", 1)])
def test_at_least(tmp_path: Path, bound: str, status: int) -> None:
    """--at-least turns the corrected mean, 1.414 here, into an exit status."""
    done = compare(tmp_path, run_of(BEFORE), run_of(AFTER), "--at-least", bound)
    assert done.returncode == status


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("{", run_of(AFTER), "is not JSON"),
        ("[]", run_of(AFTER), "is not a result of bench.py"),
        (run_of(BEFORE), run_of({"three": {"cufa2": 1.0}}), "no case in common"),
        (run_of(BEFORE), run_of(AFTER, "backward"), "forward bfloat16 and backward bfloat16"),
        (
            run_of(BEFORE) | {"settings": {"dtype": "float32"}},
            run_of(AFTER) | {"settings": {"dtype": "float32", "precision": "tf32"}},
            "forward float32 and forward float32 tf32",
        ),
    ],
)
def test_refusals(tmp_path: Path, before: Any, after: Any, message: str) -> None:
    """Exit status 2 and one line on standard error."""
    done = compare(tmp_path, before, after)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_missing_file(tmp_path: Path) -> None:
    """A file that is not there is named."""
    script = str(ROOT / "scripts" / "compare.sh")
    done = subprocess.run(
        ["bash", script, "a.json", "b.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "cannot read a.json" in done.stderr


@pytest.mark.parametrize("script", ["bench.py", "sanitize_cases.py"])
def test_no_gpu_is_said(script: str) -> None:
    """Without a visible GPU the measuring scripts stop at once, with the reason."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "no GPU to" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of scripts/ by name."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


def test_sanitizer_reaches_every_tile(script: Any) -> None:
    """On a card with the most shared memory every tile and head dim of every row is run."""
    cases, info = script("sanitize_cases"), device.info_for_arch("sm_90a")
    reached = cases.targets(info)
    assert {(t.row.name, t.tile) for t in reached} == {
        (k.name, t) for k in KERNELS for t in k.tiles
    }
    assert {(t.row.name, t.dim) for t in reached} == {
        (k.name, d) for k in KERNELS for d in k.head_dims
    }
    for few in (False, True):
        run = set()
        for number in cases.needed(info, few):
            target = reached[number]
            assert target.modes(info), f"{target.name} takes part in nothing"
            for mode in target.modes(info):
                problem = problem_of(target, deterministic=mode)
                run |= {(v.kernel.name, v.tile) for v in target.choose(problem, info).variants}
        assert run == {(t.row.name, t.tile) for t in reached}


def test_sanitizer_forces_the_tile(script: Any) -> None:
    """In its stage only, and not on a score that the tile is not made for."""
    info = device.info_for_arch("sm_90a")
    for target in script("sanitize_cases").targets(info):
        for mode, softcap in itertools.product(target.modes(info), (0.0, 2.0)):
            problem = problem_of(target, deterministic=mode, softcap=softcap)
            row = target.row.name if target.row.stage == "main" else None
            own = plan.choose(problem, info, row).variants
            for forced, free in zip(target.choose(problem, info).variants, own, strict=True):
                made_for = forced.score in target.tile.scores
                if forced.kernel is target.row and made_for:
                    assert forced.tile == target.tile
                else:
                    assert forced == free


def problem_of(target: Any, **options: Any) -> Problem:
    """A problem that the sanitizer's target serves."""
    dims = (target.dim, target.dim_v)
    head, head_v = (SimpleNamespace(shape=(1, 1, 1, n), dtype=target.dtypes[0]) for n in dims)
    return make_problem(target.row.direction, Options.make(**options), head, head, head_v)


def test_benchmarks_refuse_wrong_results(script: Any) -> None:
    """cufa2 for breaking the accuracy rule; a peer only for something else than rounding."""
    truth, peers = script("truth"), script("peers")
    who = peers.Contestant("who", lambda *_: [], lambda x, b, h: x[b, :, h])
    exact = np.linspace(-1, 1, 24).reshape(4, 6)
    result = np.zeros((2, 8, 3, 6), np.float32)
    expected = [truth.Truth("o", 0, 1, 2, slice(2, 6), exact, exact.astype(np.float32))]
    for off, allowed, complaints in ((0, (0, 1), 0), (1e-3, (0,), 1), (0.1, (), 0)):
        result[1, 2:6, 2] = exact + off
        for strict in (False, True):
            if strict in allowed:
                error, said = truth.check(expected, who, (result, None), bool(strict))
                assert error == pytest.approx(off, abs=1e-7)
                assert len(said) == complaints
            else:
                with pytest.raises(AssertionError, match="who, o, head 2 of batch 1"):
                    truth.check(expected, who, result, bool(strict))
    result[1, 3, 2] = np.nan
    with pytest.raises(AssertionError):
        truth.check(expected, who, result, False)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
def test_benchmarks_check_against_the_truth(
    script: Any, monkeypatch: pytest.MonkeyPatch, causal: bool, dtype: str
) -> None:
    """The rows that benchmarks check are those of the dense float64 results."""
    truth = script("truth")
    monkeypatch.setattr(truth, "to_host", np.asarray)
    monkeypatch.setattr(truth, "multiplier", lambda: np)
    monkeypatch.setattr(truth, "CHUNK", 50)
    case = Case("", 2, 80, 80, 4, 2, 16, 24, causal=causal)
    q, k, v, do = make_inputs(case, dtype, seed=1)
    exact = {
        "o": reference64(q, k, v, **case.options)[0],
        **dict(
            zip(("dq", "dk", "dv"), reference64_backward(do, q, k, v, **case.options), strict=True)
        ),
    }
    places = {"o": 0, "dq": 0, "dk": 1, "dv": 2}
    for inputs, names in (((q, k, v), {"o"}), ((q, k, v, do), {"dq", "dk", "dv"})):
        found = truth.truths(case, inputs, q.dtype)
        assert {(t.result, t.batch, t.head) for t in found} == {
            (n, b, h) for n in names for b, h in ((0, 0), (1, 1 if n in ("dk", "dv") else 3))
        }
        for t in found:
            assert t.place == places[t.result]
            wanted = exact[t.result][t.batch, t.rows, t.head]
            largest = np.abs(wanted).max()
            np.testing.assert_allclose(t.exact, wanted, rtol=0, atol=1e-14 * largest)
            # Unfused code is off by its own rounding, neither exact nor wildly wrong.
            unit = EPS[dtype] * largest
            assert 0 < np.abs(t.plain.astype(t.exact.dtype) - wanted).max() < 30 * unit
            assert t.plain.dtype == q.dtype


def test_report_of_a_run(script: Any, tmp_path: Path) -> None:
    """Rates, ratios and means come from the microseconds; a missing peer leaves a dash."""
    report = script("report")
    run = run_of({"one": {"cufa2": 200.0, "fa3": 100.0}, "two": {"cufa2": 100.0, "fa3": 400.0}})
    run["rows"].append({**run["rows"][0], "case": "three", "us": {"cufa2": 500.0}})
    means = report.geomeans(run["rows"], run["contestants"])
    assert means == {
        "fa3": {"d64": pytest.approx(2**0.5), "all": pytest.approx(2**0.5), "min": 0.5}
    }
    lines = {line.split()[0]: line.split() for line in report.table(run).splitlines()}
    assert lines["one"] == ["one", "200.0", "5000.0", "506%", "10000.0", "0.50"]
    assert lines["two"][-1] == "4.00"
    assert lines["three"][-2:] == ["-", "-"]
    assert "largest error" not in report.table(run)
    path = report.stem(run, tmp_path).with_suffix(".json")
    assert path.name == "nvidia-h200_forward_202612011000_aaaaaaaa.json"
    report.save(run, path)
    assert json.loads(path.read_text()) == run


def test_report_of_decoding(script: Any, tmp_path: Path) -> None:
    """Bytes a second: memory bounds it."""
    report = script("report")
    run = run_of({"one": {"cufa2": 200.0, "fa3": 100.0}})
    run["settings"]["set"] = "decode"
    run["rows"][0]["bytes"] = 4e8
    lines = [line.split() for line in report.table(run).splitlines()]
    assert lines[0] == ["case", "cufa2", "us", "TB/s", "fa3", "x"]
    assert lines[1] == ["one", "200.0", "2.00", "4.00", "0.50"]
    assert report.stem(run, tmp_path).name.startswith("nvidia-h200_forward-decode_2026")


def test_report_of_a_backward_run(script: Any, tmp_path: Path) -> None:
    """cufa2-det stands beside the peers; other dtypes have no peak; errors have a table."""
    report = script("report")
    run = run_of({"one": {"cufa2": 200.0, "cufa2-det": 300.0, "torch-plain": 400.0}}, "backward")
    run["settings"]["dtype"] = "float64"
    run["rows"][0]["error"] = {"cufa2": 1.5e-15, "cufa2-det": 1.25e-15}
    lines = [line.split() for line in report.table(run).splitlines()]
    rows = [line for line in lines if line[0] == "one"]
    assert rows[0] == ["one", "200.0", "5000.0", "3333.3", "1.50", "2500.0", "2.00"]
    assert rows[1] == ["one", "1.50e-15", "1.25e-15", "-"]
    assert ["cufa2-det", "d64", "1.500", "all", "1.500", "min", "1.500"] in lines
    assert report.stem(run, tmp_path).name.startswith("nvidia-h200_backward-float64_2026")
    run["settings"]["precision"] = "tf32"
    assert report.stem(run, tmp_path).name.startswith("nvidia-h200_backward-float64-tf32_2026")
    assert [report.is_ours(c) for c in (*run["contestants"], "cufa21")] == [
        True,
        True,
        False,
        False,
    ]


def test_old_results_still_load(script: Any) -> None:
    """Every result in the repository, whatever version wrote it, can be compared and shown."""
    report, comparing = script("report"), script("compare")
    paths = [p for p in report.RESULTS.glob("*.json") if "_host_" not in p.name]
    assert paths
    for path in paths:
        run = comparing.load(path)
        _, means = comparing.compare(run, run)
        assert means["plain"] == pytest.approx(1)
        assert run["rows"][0]["case"] in report.table(run)


def test_peaks(script: Any) -> None:
    """The card's name finds its own row, not that of a longer or shorter name."""
    peak = script("report").peak_tflops
    assert peak("NVIDIA H200") == peak("NVIDIA H100 80GB HBM3") == 989.0
    assert peak("NVIDIA H100 PCIe") == 756.0
    assert (peak("NVIDIA L4"), peak("NVIDIA L40S")) == (121.0, 362.0)
    assert peak("NVIDIA T4") is None
    assert peak("NVIDIA H200", "float16") == 989.0
    assert peak("NVIDIA H200", "float64") is None
