"""Forward speed of cufa2 beside PyTorch's FlashAttention-2, cuDNN and FlashAttention-3.

All contestants run in one process on the same inputs. Each case is checked first (rows of two
heads against float64), then timed in rounds of random order, so that a power cap hits all
alike. Inputs are random and rotate through more memory than the L2 cache holds. With --host it
measures instead what surrounds a kernel: host time, first calls, cached loads, peak memory.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import host
import numpy as np
import report
from peers import Call, Contestant, Inputs, cufa2_contestant, to_host, torch_peers

from cufa2 import device
from cufa2.testing import (
    CASES,
    Case,
    assert_accurate,
    numpy_dtype,
    plain_attention,
    reference64,
    time_gpu,
)

ROUNDS, CALLS, WARM = 6, 4, 2  # 24 timed calls a contestant; their median is reported
BEHIND = 60 << 20  # bytes that other inputs touch before a set comes round again: past an L2
AHEAD = 3  # memsets of the filler queued first: about 1 ms in which the host runs ahead
CHECKED_ROWS = 16  # rows at the start, in the middle and at the end of each checked head
DTYPES = ("bfloat16", "float16")


class Bench:
    """Random numbers, filler and gauge, shared by all cases of one run."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.cupy = device.cupy()
        self.dtype = numpy_dtype(dtype)
        self.random = np.random.default_rng(seed)
        self.pool = self.cupy.empty(0, np.uint16)
        self.filler = self.cupy.empty(1 << 30, np.uint8)
        self.gauge = report.Gauge(self.cupy.cuda.Device().pci_bus_id)

    def inputs(self, case: Case) -> list[Inputs]:
        """Sets of q, k, v (B, S, H, D): standard normal, disjoint, together past the L2 cache.

        Every case reads from one pool of random numbers, because drawing them anew (10 ns each)
        would take longer than all measurements.
        """
        b, sq, sk, hk = case.batch, case.seqlen_q, case.seqlen_k, case.num_heads_kv
        shapes = (
            (b, sq, case.num_heads, case.head_dim),
            (b, sk, hk, case.head_dim),
            (b, sk, hk, case.head_dim_v),
        )
        size = sum(math.prod(shape) for shape in shapes)
        count = 1 + math.ceil(BEHIND / (size * self.dtype.itemsize))
        if self.pool.size < count * size:
            drawn = self.random.standard_normal(count * size, np.float32).astype(self.dtype)
            self.pool = self.cupy.asarray(drawn.view(np.uint16))
        sets, at = [], 0
        for _ in range(count):
            arrays = []
            for shape in shapes:
                end = at + math.prod(shape)
                arrays.append(self.pool[at:end].view(self.dtype).reshape(shape))
                at = end
            sets.append((arrays[0], arrays[1], arrays[2]))
        return sets

    def batch(self, calls: Sequence[Call], count: int) -> list[float]:
        """Device microseconds of `count` calls in turn.

        A memset keeps the device busy while the host queues them: a peer whose Python takes
        longer than its kernel is timed by its kernel all the same.
        """
        cuda = self.cupy.cuda
        marks = [(cuda.Event(), cuda.Event()) for _ in range(count)]
        for _ in range(AHEAD):
            self.filler.data.memset_async(0, self.filler.nbytes)
        for i, (start, end) in enumerate(marks):
            start.record()
            calls[i % len(calls)]()
            end.record()
        self.gauge.read()
        marks[-1][1].synchronize()
        return [1000 * cuda.get_elapsed_time(start, end) for start, end in marks]

    def run(self, case: Case, contestants: list[Contestant]) -> report.Row:
        """Check, then time, one case."""
        sets = self.inputs(case)
        expected = truths(case, sets[0])
        row: report.Row = {
            "case": case.name,
            "batch": case.batch,
            "seqlen": case.seqlen_k,
            "num_heads": case.num_heads,
            "head_dim": case.head_dim,
            "causal": bool(case.causal),
            "flops": case.flops("forward"),
            "error": {},
            "us": {},
            "spread": {},
        }
        racing: list[tuple[Contestant, list[Call]]] = []
        for who in contestants:
            try:
                calls = who.prepare(sets, bool(case.causal), quick)
                with who.context():
                    row["error"][who.name] = check(expected, who, calls[0]())
                racing.append((who, calls))
            except (RuntimeError, AssertionError) as e:
                if who.name == report.OURS:
                    raise
                reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
                print(f"note: {who.name} sits out {case.name}: {reason}", flush=True)
        times: dict[str, list[float]] = {who.name: [] for who, _ in racing}
        for _ in range(ROUNDS):
            # A new order each round: who follows the hungriest kernel gets the lowest clocks.
            for n in self.random.permutation(len(racing)):
                who, calls = racing[n]
                with who.context():
                    times[who.name] += self.batch(calls, WARM + CALLS)[WARM:]
        for name, us in times.items():
            low, median, high = np.percentile(us, (10, 50, 90))
            row["us"][name] = float(median)
            row["spread"][name] = float((high - low) / median)
        return row


def quick(call: Call) -> float:
    """Milliseconds of a call, roughly: enough to choose between two layouts."""
    return time_gpu(call, warmup=2, repeats=5)


@dataclass(frozen=True)
class Truth:
    """Some rows of one head: o (1, rows, 1, Dv) in float64 and from unfused code in q's dtype."""

    batch: int
    head: int
    rows: slice
    exact: np.ndarray
    plain: np.ndarray


def truths(case: Case, inputs: Inputs) -> list[Truth]:
    """Rows at the start, in the middle and at the end of the first and the last head.

    Under a causal mask rows that end before row `end` are a problem of their own with `end`
    keys, since the mask is aligned to the last key.
    """
    result = []
    for b, h in ((0, 0), (case.batch - 1, case.num_heads - 1)):
        kv = h // (case.num_heads // case.num_heads_kv)
        q, k, v = (
            to_host(x[b : b + 1, :, i : i + 1]) for x, i in zip(inputs, (h, kv, kv), strict=True)
        )
        last = case.seqlen_q - CHECKED_ROWS
        for begin in (0, last // 2, last):
            rows = slice(begin, begin + CHECKED_ROWS)
            keys = rows.stop if case.causal else case.seqlen_k
            part = q[:, rows], k[:, :keys], v[:, :keys]
            exact, _ = reference64(*part, **case.options)
            plain, _ = plain_attention(*part, **case.options)
            result.append(Truth(b, h, rows, exact, plain))
    return result


def check(expected: list[Truth], who: Contestant, output: Any) -> float:
    """Largest error of a contestant's output; AssertionError if it breaks the accuracy rule."""
    errors = []
    for t in expected:
        rows = who.head(output, t.batch, t.head)[None, t.rows, None]
        name = f"{who.name}, head {t.head} of batch {t.batch}, rows {t.rows.start}.."
        errors.append(assert_accurate(rows, t.exact, t.plain, name)[0])
    return max(errors)


def forward(args: argparse.Namespace) -> report.Run:
    """Time every selected case; prints each as it comes."""
    bench = Bench(args.dtype, args.seed)
    peers, notes = ([], []) if args.no_peers else torch_peers()
    for note in notes:
        print(f"note: {note}", flush=True)
    contestants = [cufa2_contestant(), *peers]
    rows = []
    for case in (c for c in CASES if fnmatch.fnmatch(c.name, args.cases)):
        start = time.perf_counter()
        row = bench.run(case, contestants)
        rates = (f"{n} {report.tflops(row, n):.0f}" for n in row["us"])
        print(
            f"{case.name}: {', '.join(rates)} TFLOP/s ({time.perf_counter() - start:.1f} s)",
            flush=True,
        )
        rows.append(row)
    names = [c.name for c in contestants]
    return {
        "rows": rows,
        "contestants": names,
        "geomean": report.geomeans(rows, names),
        "gauge": bench.gauge.summary(),
    }


def main() -> int:
    """Command line of bench.sh."""
    parser = argparse.ArgumentParser(prog="bench.sh", description=__doc__)
    parser.add_argument("direction", nargs="?", default="forward", choices=("forward",))
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--cases", default="*", metavar="GLOB", help="names, such as 'd128_*'")
    parser.add_argument("--host", action="store_true", help="host time, first calls, memory")
    parser.add_argument("--no-peers", action="store_true", help="time cufa2 alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=report.RESULTS, metavar="DIR")
    args = parser.parse_args()
    if why := device.why_no_cuda():
        print(f"bench.sh: no GPU to measure on: {why}", file=sys.stderr)
        return 1
    if not any(fnmatch.fnmatch(c.name, args.cases) for c in CASES):
        parser.error(f"--cases {args.cases!r} matches none of {', '.join(c.name for c in CASES)}")
    start = time.perf_counter()
    environment = report.environment(device.cupy())
    report.show_environment(environment)
    run: report.Run = {
        "pass": "host" if args.host else args.direction,
        "environment": environment,
        "settings": {"dtype": args.dtype, "seed": args.seed, "rounds": ROUNDS, "calls": CALLS},
    }
    run |= {"host": host.measure(args.dtype)} if args.host else forward(args)
    path = report.stem(run, args.results).with_suffix(".json")
    report.save(run, path)
    print(f"written: {path}")
    if not args.host:
        picture = path.with_suffix(".png")
        if report.chart(run, picture):
            print(f"written: {picture}")
        for key, (low, median, high) in run["gauge"].items():
            print(f"# {key}: lowest {low:.0f}, median {median:.0f}, highest {high:.0f}")
    print(f"# {time.perf_counter() - start:.0f} s in all")
    if not args.host:
        print(report.table(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
