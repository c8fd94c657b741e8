"""Before and after: two JSON files of bench.py side by side.

Only a ratio inside one process counts, because a power-capped card moves by several percent from
run to run. So beside the plain ratio of times stands the ratio corrected by the peers that ran in
both files: (peer after / cufa2 after) / (peer before / cufa2 before). Above 1 is faster after.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from report import OURS, Row, Run, geomean, is_ours


def load(path: Path) -> Run:
    """Read one result file; ValueError says what is wrong with it."""
    try:
        run = json.loads(path.read_text())
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(run, dict) or not {"rows", "contestants", "environment"} <= run.keys():
        raise ValueError(f"{path} is not a result of bench.py (no rows, contestants, environment)")
    return run


def index(run: Run) -> dict[str, Row]:
    """Rows by case name, only those that cufa2 ran."""
    return {row["case"]: row for row in run["rows"] if OURS in row["us"]}


def shared_peers(before: Run, after: Run) -> list[str]:
    """Contestants other than cufa2 that both runs measured, in the order of `before`."""
    return [c for c in before["contestants"] if not is_ours(c) and c in after["contestants"]]


def check_alike(before: Run, after: Run) -> None:
    """ValueError unless both runs measured the same thing: pass, dtype and precision."""
    measured = [
        [run.get("pass"), *(run.get("settings", {}).get(x) for x in ("dtype", "precision"))]
        for run in (before, after)
    ]
    if measured[0] != measured[1]:
        what = (" ".join(str(x) for x in run if x is not None) for run in measured)
        raise ValueError("the two files measured different things: " + " and ".join(what))


def compare(before: Run, after: Run) -> tuple[str, dict[str, float]]:
    """The report as text, and its geometric means: `plain` and `corrected` (if a peer is shared).

    The correction takes the geometric mean of all shared peers' own change per case, which is
    what the card's drift did to code that did not change.
    """
    check_alike(before, after)
    old, new = index(before), index(after)
    cases = [case for case in old if case in new]
    if not cases:
        raise ValueError("the two files have no case in common")
    peers = shared_peers(before, after)
    plain: list[float] = []
    corrected: list[float] = []
    drift: list[float] = []
    lines = [f"{'case':24s}{'before us':>11s}{'after us':>11s}{'ratio':>8s}{'corrected':>11s}"]
    for case in cases:
        a, b = old[case]["us"], new[case]["us"]
        r = a[OURS] / b[OURS]
        plain.append(r)
        line = f"{case:24s}{a[OURS]:11.1f}{b[OURS]:11.1f}{r:8.3f}"
        moves = [a[p] / b[p] for p in peers if p in a and p in b]
        if moves:
            drift.append(geomean(moves))
            corrected.append(r / drift[-1])
            line += f"{corrected[-1]:11.3f}"
        else:
            line += f"{'-':>11s}"
        lines.append(line)
    means = {"plain": geomean(plain)}
    summary = f"{'geometric mean':24s}{'':22s}{means['plain']:8.3f}"
    if corrected:
        means["corrected"] = geomean(corrected)
        summary += f"{means['corrected']:11.3f}"
    measured = [p for p in peers if any(p in run[c]["us"] for c in cases for run in (old, new))]
    lines += [summary, "above 1: faster after; " + noise(before, after, measured, drift)]
    for name, only in (("before", old.keys() - new.keys()), ("after", new.keys() - old.keys())):
        if only:
            lines.append(f"only {name}: {', '.join(sorted(only))}")
    return "\n".join(lines), means


def noise(before: Run, after: Run, peers: list[str], drift: list[float]) -> str:
    """One sentence on how far a ratio is from 1 with nothing changed."""
    spreads = [
        row["spread"][OURS]
        for run in (before, after)
        for row in run["rows"]
        if OURS in row.get("spread", {})
    ]
    inside = f"largest spread inside a run {100 * max(spreads):.1f} %" if spreads else ""
    if not drift:
        parts = ["no peer is in both files, so nothing corrects for the card's drift", inside]
    else:
        parts = [
            f"{', '.join(peers)} moved by {min(drift):.3f} to {max(drift):.3f} between the runs",
            inside,
        ]
    return "; ".join(p for p in parts if p)


def main(argv: list[str] | None = None) -> int:
    """Command line: compare.py BEFORE.json AFTER.json."""
    parser = argparse.ArgumentParser(prog="compare.sh", description=__doc__)
    parser.add_argument("before", type=Path, help="JSON written by bench.sh before the change")
    parser.add_argument("after", type=Path, help="JSON written by bench.sh after it")
    parser.add_argument(
        "--at-least", type=float, metavar="R", help="exit 1 if the geometric mean is below R"
    )
    args = parser.parse_args(argv)
    try:
        before, after = load(args.before), load(args.after)
        text, means = compare(before, after)
    except ValueError as e:
        print(f"compare.sh: error: {e}", file=sys.stderr)
        return 2
    for name, run in (("before", before), ("after", after)):
        env = run["environment"]
        dirty = " with uncommitted changes" if env.get("dirty") else ""
        print(
            f"{name}: {env['card']}, {env['date']}, commit {env['commit'][:8] or 'unknown'}{dirty}"
        )
    if before["environment"]["card"] != after["environment"]["card"]:
        print("warning: the two runs are from different cards")
    print(text)
    mean = means.get("corrected", means["plain"])
    return 1 if args.at_least is not None and mean < args.at_least else 0


if __name__ == "__main__":
    sys.exit(main())
