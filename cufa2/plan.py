"""Problem and GPU -> the kernel instances that serve it, or a refusal that says why.

Pure and deterministic: no GPU call, no environment; results are cached.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .device import DeviceInfo
from .kernels import KERNELS, MASKS, SCORES, SMEM_RESERVE, STAGES, Kernel, Variant
from .problem import ITEMSIZES, Problem, UnsupportedError
from .tiles import Tile


@dataclass(frozen=True)
class Plan:
    """The compiled instances that a call runs, in order."""

    variants: tuple[Variant, ...]

    @property
    def variant(self) -> Variant:
        """The main one: the forward, or what computes dk and dv."""
        return next(v for v in self.variants if v.kernel.stage == "main")

    @property
    def kernel(self) -> Kernel:
        """The row of the main one."""
        return self.variant.kernel


@functools.lru_cache(maxsize=4096)
def choose(
    problem: Problem, info: DeviceInfo, kernel: str | None = None, without: tuple[str, ...] = ()
) -> Plan:
    """Take, for each stage, the first row of KERNELS that can serve `problem` on `info`.

    kernel: name of the only row to consider for its stage (tests and benchmarks force one).
    without: names of rows to pass over.
    Raises UnsupportedError listing every row and why it declined.
    """
    stages = STAGES[problem.direction]
    forced = next((row.stage for row in KERNELS if row.name == kernel), stages[-1])
    chosen: list[Variant] = []
    for stage in stages:
        if stage == "dq" and chosen[-1].completes_dq:
            continue
        refusals = []
        for row in KERNELS:
            if row.direction == problem.direction and row.stage != stage:
                continue
            if kernel is not None and stage == forced and row.name != kernel:
                continue
            reason = refusal(row, problem, info)
            if row.name in without:
                reason = "is passed over"
            if reason is None:
                chosen.append(_variant(row, problem, info))
                break
            refusals.append(f"  {row.name}: {reason}")
        else:
            raise UnsupportedError(_explain(problem, info, kernel, refusals))
    return Plan(tuple(chosen))


def _explain(problem: Problem, info: DeviceInfo, kernel: str | None, refusals: list[str]) -> str:
    wanted = (
        f"{problem.direction} of {problem.dtype}, D={problem.head_dim}, Dv={problem.head_dim_v}"
    )
    tried = "\n".join(refusals) or f"  there is no kernel named {kernel!r}"
    return (
        f"no CUDA kernel does the {wanted} on {info.name}:\n{tried}\n"
        "NumPy arrays are served for every legal problem."
    )


def refusal(row: Kernel, problem: Problem, info: DeviceInfo) -> str | None:
    """Why `row` cannot serve `problem` on `info`; None if it can."""
    if row.direction != problem.direction:
        return f"computes the {row.direction} pass only"
    if info.cc < row.min_cc:
        have, need = (".".join(map(str, cc)) for cc in (info.cc, row.min_cc))
        return f"needs compute capability {need}, the card has {have}"
    if info.cc > row.max_cc:
        return "is for cards up to compute capability " + ".".join(map(str, row.max_cc))
    if problem.dtype not in row.dtypes:
        return f"takes {' and '.join(row.dtypes)}, not {problem.dtype}"
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > row.max_head_dim:
        return f"head dims go up to {row.max_head_dim}, not {largest}"
    for rule, applies in row.excludes:
        if applies(problem):
            return f"excludes {rule}"
    d, dv = row.compiled_dims(problem.head_dim, problem.head_dim_v)
    if _tile(row, d, dv, problem.dtype, _score(problem), info) is None:
        return f"no tile for D={d}, Dv={dv} fits {info.smem_per_block} bytes of shared memory"
    return None


def variants(arch_info: DeviceInfo) -> Iterator[Variant]:
    """Every variant that KERNELS can produce on an architecture, of pairs of D and Dv that differ
    those that a row lists."""
    for row in KERNELS:
        if not row.min_cc <= arch_info.cc <= row.max_cc:
            continue
        masks, scores = (MASKS, SCORES) if row.policies else (("full",), ("plain",))
        pairs = row.pairs or [(dim, dim) for dim in row.head_dims]
        for (d, dv), score, dtype in itertools.product(pairs, scores, row.dtypes):
            tile = _tile(row, d, dv, dtype, score, arch_info)
            if tile is not None:
                bare = (False, True) if dtype in row.atomics else (False,)
                fast = (False, True) if row.tf32 and dtype == "float32" else (False,)
                for mask, deterministic, tf32 in itertools.product(masks, bare, fast):
                    yield Variant(row, tile, dtype, d, dv, mask, score, deterministic, tf32)


def mask_of(window_left: int | None, window_right: int | None) -> str:
    """Name of the mask policy for these bounds; lengths never change it."""
    if window_left is None:
        return "full" if window_right is None else "causal"
    return "left" if window_right is None else "local"


def _variant(row: Kernel, problem: Problem, info: DeviceInfo) -> Variant:
    d, dv = row.compiled_dims(problem.head_dim, problem.head_dim_v)
    score = _score(problem)
    tile = _tile(row, d, dv, problem.dtype, score, info)
    assert tile is not None, "refusal() has checked that a tile fits"
    tf32 = row.tf32 and problem.precision == "tf32"
    if not row.policies:
        return Variant(row, tile, problem.dtype, d, d, tf32=tf32)
    mask = mask_of(problem.window_left, problem.window_right)
    deterministic = problem.dtype in row.atomics and problem.deterministic
    return Variant(row, tile, problem.dtype, d, dv, mask, score, deterministic, tf32)


def _score(problem: Problem) -> str:
    return "softcap" if problem.softcap else "plain"


def _tile(row: Kernel, d: int, dv: int, dtype: str, score: str, info: DeviceInfo) -> Tile | None:
    room = info.smem_per_block - SMEM_RESERVE
    fitting = (
        t
        for t in row.tiles
        if max(d, dv) <= t.max_head_dim
        and dv <= (t.max_head_dim_v or dv)
        and t.itemsize == ITEMSIZES[dtype]
        and t.smem_bytes(d, dv) <= room
        and (t.max_cc is None or info.cc <= t.max_cc)
        and score in t.scores
        and t.least_smem <= info.smem_per_block
    )
    return next(fitting, None)
