"""scripts/compare.sh, and what of the other measuring scripts runs without a GPU."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cufa2 import device
from cufa2.kernels import KERNELS

ROOT = Path(__file__).resolve().parent.parent


def run_of(rows: dict[str, dict[str, float]], **environment: Any) -> dict[str, Any]:
    """A result file's content from {case: {contestant: us}}."""
    contestants = list(dict.fromkeys(who for us in rows.values() for who in us))
    env = {"card": "NVIDIA H200", "date": "2026-12-01 10:00:00+0000", "commit": "a" * 40}
    return {
        "pass": "forward",
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
    """On a card with the most shared memory every tile of every forward row is run."""
    reached = script("sanitize_cases").targets(device.info_for_arch("sm_90a"))
    wanted = {(k.name, t) for k in KERNELS if k.direction == "forward" for t in k.tiles}
    assert {(t.row.name, t.tile) for t in reached} == wanted
    dims = {(k.name, d) for k in KERNELS if k.direction == "forward" for d in k.head_dims}
    assert {(t.row.name, t.dim) for t in reached} == dims


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
    path = report.stem(run, tmp_path).with_suffix(".json")
    assert path.name == "nvidia-h200_forward_202612011000_aaaaaaaa.json"
    report.save(run, path)
    assert json.loads(path.read_text()) == run


def test_peaks(script: Any) -> None:
    """The card's name finds its own row, not that of a longer or shorter name."""
    peak = script("report").peak_tflops
    assert peak("NVIDIA H200") == peak("NVIDIA H100 80GB HBM3") == 989.0
    assert peak("NVIDIA H100 PCIe") == 756.0
    assert (peak("NVIDIA L4"), peak("NVIDIA L40S")) == (121.0, 362.0)
    assert peak("NVIDIA T4") is None
