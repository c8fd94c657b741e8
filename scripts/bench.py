"""Speed of cufa2, forward or backward, beside the attention kernels that PyTorch users have.

float16 and bfloat16 run beside PyTorch's FlashAttention-2, cuDNN and FlashAttention-3, float32
beside PyTorch's memory-efficient kernel, float64 beside unfused PyTorch. --precision changes what
cufa2 does, not its peers. All contestants run in one process on the same inputs. Each case is
checked first (rows of two heads against float64; cufa2 must keep the accuracy rule, a peer that
breaks it is noted), then timed in rounds of random order, so that a power cap hits all alike.
Inputs are random and rotate through more memory than the L2 cache holds. --set takes other shapes;
those of decoding are replayed from a CUDA graph. With --host it measures instead what surrounds a
kernel: host time, first calls, cached loads, peak memory.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import host
import numpy as np
import report
from peers import Call, Contestant, Inputs, cufa2_contestants, release, torch_peers
from truth import check, plain_error, truths

from cufa2 import device
from cufa2.problem import DTYPES, PRECISIONS, Direction
from cufa2.testing import SETS, Case, numpy_dtype, time_gpu


class Pace(NamedTuple):
    """How often a contestant is called: rounds of `warm` and then `calls` timed calls."""

    rounds: int
    calls: int
    warm: int


FAST, SLOW = Pace(6, 4, 2), Pace(4, 3, 1)  # SLOW for float32 and float64: many times the work
DRAWN = 1 << 28  # random numbers at most: several times an L2
BEHIND = 60 << 20  # bytes that other inputs touch before a set comes round again: past an L2
AHEAD = 12  # memsets of the filler queued first: about 3 ms in which the host runs ahead


def pace(dtype: str) -> Pace:
    """The pace that suits a dtype; the median of all timed calls is reported."""
    return FAST if numpy_dtype(dtype).itemsize == 2 else SLOW


class Bench:
    """Random numbers, filler and gauge, shared by all cases of one run.

    precision: "tf32" is checked as float16 is, whose significand has the same length.
    graphs: calls are replayed from CUDA graphs.
    """

    def __init__(
        self,
        direction: Direction,
        dtype: str,
        precision: str | None,
        seed: int,
        graphs: bool = False,
    ) -> None:
        self.cupy = device.cupy()
        self.direction = direction
        self.dtype = numpy_dtype(dtype)
        self.low = numpy_dtype("float16" if precision == "tf32" else dtype)
        self.pace = pace(dtype)
        self.graphs = graphs
        self.random = np.random.default_rng(seed)
        self.pool = self.cupy.empty(0, f"u{self.dtype.itemsize}")
        self.filler = self.cupy.empty(1 << 30, np.uint8)
        self.gauge = report.Gauge(self.cupy.cuda.Device().pci_bus_id)

    def inputs(self, case: Case) -> list[Inputs]:
        """Sets of q, k, v, and do for the backward pass, (B, S, H, D): standard normal, disjoint,
        together past the L2 cache.

        Every case reads from one pool of random numbers, because drawing them anew (10 ns each)
        would take longer than all measurements. Beyond DRAWN the numbers come again.
        """
        b, sq, sk, hk = case.batch, case.seqlen_q, case.seqlen_k, case.num_heads_kv
        shapes = [
            (b, sq, case.num_heads, case.head_dim),
            (b, sk, hk, case.head_dim),
            (b, sk, hk, case.head_dim_v),
        ]
        if self.direction == "backward":
            shapes.append((b, sq, case.num_heads, case.head_dim_v))
        size = sum(math.prod(shape) for shape in shapes)
        count = 1 + math.ceil(BEHIND / (size * self.dtype.itemsize))
        if self.pool.size < count * size:
            wide = np.float64 if self.dtype == np.float64 else np.float32
            drawn = self.random.standard_normal(min(count * size, DRAWN), wide)
            bits = drawn.astype(self.dtype, copy=False).view(self.pool.dtype)
            self.pool = self.cupy.resize(self.cupy.asarray(bits), count * size)
        sets, at = [], 0
        for _ in range(count):
            arrays = []
            for shape in shapes:
                end = at + math.prod(shape)
                arrays.append(self.pool[at:end].view(self.dtype).reshape(shape))
                at = end
            sets.append(tuple(arrays))
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
        release()
        sets = self.inputs(case)
        expected = truths(case, sets[0], self.low)
        row: report.Row = {
            "case": case.name,
            "batch": case.batch,
            "seqlen": case.seqlen_k,
            "num_heads": case.num_heads,
            "head_dim": case.head_dim,
            "causal": bool(case.causal),
            "flops": case.flops(self.direction),
            "error": {report.PLAIN: plain_error(expected)},
            "us": {},
            "spread": {},
        }
        if self.direction == "forward":
            row["bytes"] = case.forward_bytes(self.dtype.itemsize)
        racing: list[tuple[Contestant, list[Call]]] = []
        for who in contestants:
            ours = report.is_ours(who.name)
            try:
                calls = who.prepare(sets, bool(case.causal), quick)
                with who.context():
                    error, complaints = check(expected, who, calls[0](), strict=ours)
                    if self.graphs:
                        calls = [who.graph(calls)]
                row["error"][who.name] = error
                racing.append((who, calls))
                for complaint in complaints[:1]:
                    print(f"note: in {case.name} less accurate than the rule: {complaint}")
            except (RuntimeError, AssertionError, AttributeError, TypeError) as e:
                if ours:
                    raise
                reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
                print(f"note: {who.name} sits out {case.name}: {reason}", flush=True)
        times: dict[str, list[float]] = {who.name: [] for who, _ in racing}
        for _ in range(self.pace.rounds):
            # A new order each round: who follows the hungriest kernel gets the lowest clocks.
            for n in self.random.permutation(len(racing)):
                who, calls = racing[n]
                with who.context():
                    us = self.batch(calls, self.pace.warm + self.pace.calls)
                each = len(sets) if self.graphs else 1
                times[who.name] += [x / each for x in us[self.pace.warm :]]
        for name, samples in times.items():
            low, median, high = np.percentile(samples, (10, 50, 90))
            row["us"][name] = float(median)
            row["spread"][name] = float((high - low) / median)
        return row


def quick(call: Call) -> float:
    """Milliseconds of a call, roughly: enough to choose between two layouts."""
    return time_gpu(call, warmup=2, repeats=5)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for cufa2 beyond those of the case."""
    return {} if args.precision is None else {"precision": args.precision}


def race(args: argparse.Namespace) -> report.Run:
    """Time every selected case; prints each as it comes."""
    graphs = args.set == "decode"
    bench = Bench(args.direction, args.dtype, args.precision, args.seed, graphs)
    peers, notes = ([], []) if args.no_peers else torch_peers(args.direction, args.dtype)
    for note in notes:
        print(f"note: {note}", flush=True)
    contestants = [*cufa2_contestants(args.direction, options(args), args.kernel), *peers]
    rows = []
    for case in (c for c in SETS[args.set] if fnmatch.fnmatch(c.name, args.cases)):
        start = time.perf_counter()
        row = bench.run(case, contestants)
        rates = (f"{n} {report.tflops(row, n):.1f}" for n in row["us"])
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
    parser.add_argument("direction", nargs="?", default="forward", choices=("forward", "backward"))
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--precision", choices=PRECISIONS, help="with float32; default: as exact")
    parser.add_argument("--kernel", action="append", default=[], help="forward: force it, too")
    parser.add_argument("--set", default="targets", choices=SETS, help="of shapes")
    parser.add_argument("--cases", default="*", metavar="GLOB", help="names, such as 'd128_*'")
    parser.add_argument("--host", action="store_true", help="host time, first calls, memory")
    parser.add_argument("--no-peers", action="store_true", help="time cufa2 alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=report.RESULTS, metavar="DIR")
    args = parser.parse_args()
    if args.precision is not None and (args.dtype != "float32" or args.host):
        parser.error(f"--precision {args.precision} is for --dtype float32, and not with --host")
    if args.kernel and args.direction != "forward":
        parser.error("--kernel is for the forward pass")
    if args.set == "decode" and args.direction != "forward":
        parser.error("--set decode is for the forward pass")
    if why := device.why_no_cuda():
        print(f"bench.sh: no GPU to measure on: {why}", file=sys.stderr)
        return 1
    names = [c.name for c in SETS[args.set]]
    if not fnmatch.filter(names, args.cases):
        parser.error(f"--cases {args.cases!r} matches none of {', '.join(names)}")
    start = time.perf_counter()
    environment = report.environment(device.cupy())
    report.show_environment(environment)
    run: report.Run = {
        "pass": "host" if args.host else args.direction,
        "environment": environment,
        "settings": {
            "dtype": args.dtype,
            "set": args.set,
            **options(args),
            "seed": args.seed,
            **pace(args.dtype)._asdict(),
        },
    }
    run |= {"host": host.measure(args.dtype)} if args.host else race(args)
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
