"""What a benchmark run is reported as: environment, JSON, table and chart.

A run is one dict: `environment`, `settings`, `contestants`, `geomean` and `rows`, one per case:
`case`, sizes, `flops`, and per contestant `us`, `spread` and `error`. All that is shown is derived
from the measured microseconds by the functions here, so that compare.py and bench.py agree.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Run = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"
OURS = "cufa2"  # and with an ending, such as cufa2-det, its other ways of doing the same
PLAIN = "unfused, host"  # among the errors: unfused code in the dtype of the inputs

# Dense fp16/bf16 tensor-core peak with float32 accumulation in TFLOP/s, from the vendor's data
# sheets at boost clock; the first pattern found in the card's name counts. No row, no percentage.
PEAKS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)
PACKAGES = ("numpy", "ml_dtypes", "torch", "jax", "triton", "fa3-fwd", "flash_attn_3")


def is_ours(contestant: str) -> bool:
    """Whether it is cufa2, in whichever way, and not a peer."""
    return contestant == OURS or contestant.startswith(OURS + "-")


def peak_tflops(card: str, dtype: str = "bfloat16") -> float | None:
    """Peak TFLOP/s of the card, or None where the table has no row for it."""
    rows = PEAKS if dtype in ("bfloat16", "float16") else ()
    return next((peak for part, peak in rows if re.search(rf"\b{part}\b", card)), None)


def geomean(values: list[float]) -> float:
    """Geometric mean, exp(mean(log(x))); NaN for an empty list."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def tflops(row: Row, who: str) -> float | None:
    """Rate of one contestant on one case, or None where it did not run."""
    us = row["us"].get(who)
    return None if us is None else float(row["flops"]) / us / 1e6


def ratio(row: Row, peer: str) -> float | None:
    """Speed of cufa2 over that of `peer` in the same case: above 1 is faster."""
    ours, theirs = row["us"].get(OURS), row["us"].get(peer)
    return None if ours is None or theirs is None else float(theirs / ours)


def bandwidth(row: Row, who: str) -> float | None:
    """TB/s of one contestant if it moves every byte of its arrays once; None if not known."""
    us, size = row["us"].get(who), row.get("bytes")
    return None if us is None or size is None else float(size) / us / 1e6


def geomeans(rows: list[Row], contestants: list[str]) -> dict[str, dict[str, float]]:
    """Geometric means of the ratio to each other contestant, per head dim and of all; minimum."""
    result: dict[str, dict[str, float]] = {}
    for peer in contestants:
        pairs = [(row["head_dim"], r) for row in rows if (r := ratio(row, peer)) is not None]
        if peer == OURS or not pairs:
            continue
        means = {
            f"d{dim}": geomean([r for d, r in pairs if d == dim])
            for dim in sorted({d for d, _ in pairs})
        }
        means["all"] = geomean([r for _, r in pairs])
        means["min"] = min(r for _, r in pairs)
        result[peer] = means
    return result


class Gauge:
    """SM clock, power and temperature by NVML (the package nvidia-ml-py); empty without it."""

    def __init__(self, pci_bus_id: str) -> None:
        self._handle: Any = None
        self.samples: list[dict[str, float]] = []
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
        except Exception as e:  # a gauge that cannot be read must not stop a benchmark
            print(f"note: no clock and power readings ({e})", file=sys.stderr)

    def read(self) -> None:
        """Take one sample; call it while work is queued."""
        if self._handle is None:
            return
        nvml, handle = self._nvml, self._handle
        try:
            self.samples.append(
                {
                    "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                    "temperature_c": nvml.nvmlDeviceGetTemperature(
                        handle, nvml.NVML_TEMPERATURE_GPU
                    ),
                }
            )
        except nvml.NVMLError as e:
            print(f"note: clock and power readings stop ({e})", file=sys.stderr)
            self._handle = None

    def summary(self) -> dict[str, list[float]]:
        """Lowest, median and highest reading of each quantity over the run."""
        result = {}
        for key in self.samples[0] if self.samples else ():
            values = sorted(s[key] for s in self.samples)
            result[key] = [values[0], values[len(values) // 2], values[-1]]
        return result


def command(*argv: str) -> str:
    """Standard output of a command, or "" if it is missing or fails."""
    try:
        done = subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def environment(cupy: Any) -> dict[str, Any]:
    """Everything a reader needs to judge the figures: card, driver, versions, commit."""
    runtime = cupy.cuda.runtime
    device = cupy.cuda.Device()
    props = runtime.getDeviceProperties(device.id)
    name = props["name"]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    fields = "driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit"
    smi = command(
        "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={device.pci_bus_id}"
    )
    return {
        "card": name.decode() if isinstance(name, bytes) else str(name),
        "compute_capability": device.compute_capability,
        "multiprocessors": props["multiProcessorCount"],
        "l2_bytes": props["l2CacheSize"],
        "memory_bytes": props["totalGlobalMem"],
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "nvidia_smi": dict(zip(fields.split(","), smi.split(", "), strict=True)) if smi else {},
        "python": platform.python_version(),
        "system": platform.platform(),
        "cupy": cupy.__version__,
        "packages": versions,
        "commit": command("git", "rev-parse", "HEAD") or os.environ.get("CUFA2_COMMIT", ""),
        "dirty": bool(command("git", "status", "--porcelain")),
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
    }


def show_environment(env: dict[str, Any]) -> None:
    """Print the environment, one fact a line."""
    for key, value in env.items():
        parts = [f"{k} {v}" for k, v in value.items()] if isinstance(value, dict) else [str(value)]
        print(f"# {key}: {', '.join(parts)}")


def stem(run: Run, folder: Path = RESULTS) -> Path:
    """Path without ending for a run's files: card, pass, dtype unless bfloat16, date, commit."""
    env, settings = run["environment"], run["settings"]
    card = re.sub(r"[^a-z0-9]+", "-", env["card"].lower()).strip("-")
    date = re.sub(r"[^0-9]", "", env["date"][:16])
    commit = (env["commit"][:8] or "nogit") + ("-dirty" if env["dirty"] else "")
    measured = (run["pass"], settings["dtype"], settings.get("precision"), settings.get("set"))
    what = "-".join(x for x in measured if x not in (None, "bfloat16", "targets"))
    return folder / f"{card}_{what}_{date}_{commit}"


def save(run: Run, path: Path) -> None:
    """Write the run as JSON with one line per row, so that diffs stay readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({k: v for k, v in run.items() if k != "rows"}, indent=1)
    if "rows" in run:
        rows = ",\n".join("  " + json.dumps(row) for row in run["rows"])
        text = text[:-2] + f',\n "rows": [\n{rows}\n ]\n}}'
    path.write_text(text + "\n")


def table(run: Run) -> str:
    """Cases against contestants: microseconds, TFLOP/s, share of the peak, ratios; then means;
    for decoding, which memory bounds, TB/s.

    Last, where they were measured, the largest errors against float64, beside those of unfused
    code on the host.
    """
    contestants = run["contestants"]
    others = [c for c in contestants if c != OURS]
    peak = peak_tflops(run["environment"]["card"], run["settings"]["dtype"])
    unit, digits, rate_of = "TFLOP/s", 1, tflops
    if run["settings"].get("set") == "decode":
        unit, digits, rate_of, peak = "TB/s", 2, bandwidth, None
    head = f"{'case':24s}{OURS + ' us':>10s}{unit:>9s}" + (f"{'peak':>6s}" if peak else "")
    lines = [head + "".join(f"{c:>16s}{'x':>7s}" for c in others)]
    for row in run["rows"]:
        rate = rate_of(row, OURS) or 0.0
        line = f"{row['case']:24s}{row['us'][OURS]:10.1f}{rate:9.{digits}f}"
        line += f"{100 * rate / peak:5.0f}%" if peak else ""
        for other in others:
            theirs, times = rate_of(row, other), ratio(row, other)
            line += f"{theirs:16.{digits}f}" if theirs else f"{'-':>16s}"
            line += f"{times:7.2f}" if times else f"{'-':>7s}"
        lines.append(line)
    lines.append("geometric mean of the ratio (above 1: cufa2 is faster)")
    for other, means in geomeans(run["rows"], contestants).items():
        lines.append(f"  {other:16s}" + "  ".join(f"{k} {v:.3f}" for k, v in means.items()))
    if any(row.get("error") for row in run["rows"]):
        found = [*contestants, *([PLAIN] if PLAIN in run["rows"][0].get("error", {}) else [])]
        lines.append(f"{'largest error':24s}" + "".join(f"{c:>16s}" for c in found))
        for row in run["rows"]:
            errors = (row.get("error", {}).get(c) for c in found)
            cells = ("-" if e is None else f"{e:.2e}" for e in errors)
            lines.append(f"{row['case']:24s}" + "".join(f"{cell:>16s}" for cell in cells))
    return "\n".join(lines)


def chart(run: Run, path: Path) -> bool:
    """Bars of TFLOP/s per case, one panel a head dim; False if matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("note: no chart, since matplotlib is missing (pip install matplotlib)")
        return False
    rows, contestants = run["rows"], run["contestants"]
    dims = sorted({row["head_dim"] for row in rows})
    figure, panels = pyplot.subplots(
        len(dims), 1, figsize=(11, 3.1 * len(dims)), squeeze=False, layout="constrained"
    )
    for panel, dim in zip(panels[:, 0], dims, strict=True):
        cases = [row for row in rows if row["head_dim"] == dim]
        width = 0.84 / len(contestants)
        for i, who in enumerate(contestants):
            at = [x + (i - (len(contestants) - 1) / 2) * width for x in range(len(cases))]
            heights = [tflops(row, who) or 0.0 for row in cases]
            bars = panel.bar(at, heights, width, label=who)
            panel.bar_label(bars, [f"{h:.0f}" if h else "" for h in heights], fontsize=7)
        panel.set_xticks(range(len(cases)), [r["case"] for r in cases], fontsize=8)
        panel.set_ylabel("TFLOP/s")
        panel.set_title(f"head dim {dim}", fontsize=10)
        panel.margins(y=0.12)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(contestants))
    env = run["environment"]
    figure.suptitle(
        f"{run['pass']}, {run['settings']['dtype']}, {env['card']}, {env['date'][:10]}, "
        f"commit {env['commit'][:8]}"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
