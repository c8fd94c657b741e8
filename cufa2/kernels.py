"""The table of kernels: one frozen row each, and what one compiled instance (Variant) is.

In order of preference. A row lists what it *excludes*, so a new feature is on, and tested, by
default. Data and one-line predicates only; `plan` reads the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import tilings
from .problem import Direction, Problem
from .tiles import Tile

Stage = Literal["main", "delta", "dq"]
# The kernels of a pass, in the order in which they run.
STAGES: dict[Direction, tuple[Stage, ...]] = {
    "forward": ("main",),
    "backward": ("delta", "main", "dq"),
}

C_TYPES = {"float16": "fp16_t", "bfloat16": "bf16_t", "float32": "float", "float64": "double"}
SHORT_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
MASKS = {"full": "FullMask", "causal": "CausalMask", "left": "LeftMask", "local": "LocalMask"}
SCORES = {"plain": "PlainScore", "softcap": "SoftcapScore"}

# Sequence positions, and sums of three of them (row + shift + window), are 32-bit in the kernels.
MAX_SEQLEN = 2**29


@dataclass(frozen=True, eq=False)  # a row is itself: compared and hashed by identity, at no cost
class Kernel:
    """One kernel file: what it computes, where it runs, what it excludes, how it is tiled.

    head_dims are the compiled sizes; others round up, to a multiple of `grain(the larger one)`.
    The first tile that holds the head dims and fits the card's shared memory is taken.
    `blocks(tile, problem)` is the size of its grid.
    """

    name: str
    file: str
    direction: Direction
    stage: Stage
    tile_type: str  # C++ template of the tile
    params: str  # C++ struct of the parameters
    blocks: Callable[[Tile, Problem], int]
    min_cc: tuple[int, int]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    tiles: tuple[Tile, ...]
    excludes: tuple[tuple[str, Callable[[Problem], bool]], ...] = ()
    policies: bool = True  # takes a mask and a score
    atomics: tuple[str, ...] = ()  # dtypes with an instance that uses them, and one without
    dq_in_place: bool = False  # the atomics leave dq itself: nothing is left to do
    tf32: bool = False  # has an instance with products in TF32, for float32
    max_cc: tuple[int, int] = (99, 9)
    persistent: bool = False  # its blocks stay, at most one a multiprocessor, and claim their work
    pairs: tuple[tuple[int, int], ...] = ()  # the only compiled sizes of D and Dv, if any
    grain: Callable[[int], int] = lambda largest: 1

    @property
    def max_head_dim(self) -> int:
        """Largest head dim, of q/k and of v."""
        return self.head_dims[-1]

    def compiled_dims(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        """The compiled sizes that serve these head dims."""
        if self.pairs:
            return next((d, dv) for d, dv in self.pairs if d >= head_dim and dv >= head_dim_v)
        grain = self.grain(max(head_dim, head_dim_v))
        sizes = [size for size in self.head_dims if size % grain == 0]
        d, dv = (next(size for size in sizes if size >= n) for n in (head_dim, head_dim_v))
        return d, dv


@dataclass(frozen=True)
class Variant:
    """One compiled instance: everything the compiler sees, nothing that a call may change."""

    kernel: Kernel
    tile: Tile
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str = "full"
    score: str = "plain"
    deterministic: bool = False
    tf32: bool = False

    @property
    def name(self) -> str:
        """Entry name as profilers show it, e.g. fwd_sm80_bf16_d128_causal."""
        uneven = self.head_dim_v != self.head_dim
        dims = f"d{self.head_dim}" + f"x{self.head_dim_v}" * uneven
        parts = [self.kernel.name, "tf32" if self.tf32 else SHORT_TYPES[self.dtype], dims]
        parts += [p for p in (self.mask, self.score) if p not in ("full", "plain")]
        return "_".join(parts + ["deterministic"] * self.deterministic)

    @property
    def adds_dq(self) -> bool:
        """Whether dq is added up by atomics."""
        return self.dtype in self.kernel.atomics and not self.deterministic

    @property
    def completes_dq(self) -> bool:
        """Whether it leaves dq, so that no kernel of that stage follows."""
        return self.adds_dq and self.kernel.dq_in_place

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory per block, in bytes."""
        return self.tile.smem_bytes(self.head_dim, self.head_dim_v)


# 1 KB of a block's shared memory is left to the system and to the kernel's static part.
SMEM_RESERVE = 1024

_HALVES, _WIDE = ("float16", "bfloat16"), ("float32", "float64")
_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
_LONG = f"sequences longer than {MAX_SEQLEN}"
_TOO_LONG = (_LONG, lambda p: max(p.seqlen_q, p.seqlen_k) > MAX_SEQLEN)


def _count_tiles(p: Problem, rows: int) -> int:
    return p.batch * p.num_heads * -(-p.seqlen_q // rows)


def _query_tiles(tile: Tile, p: Problem) -> int:
    return _count_tiles(p, tile.block_q)


def _key_tiles(tile: Tile, p: Problem) -> int:
    return p.batch * p.num_heads_kv * -(-p.seqlen_k // tile.block_k)


def _columns(largest: int) -> int:
    """Up to four warps of the backward share the columns of a gradient, 16 each at least."""
    return 64 if largest > 128 else 32


def _even(largest: int) -> int:
    """Where registers are short, D and Dv may differ by a factor of two only, or ptxas spills."""
    return 128 if largest > 192 else 1


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="fwd_sm90",
        file="fwd_sm90.cuh",
        direction="forward",
        stage="main",
        tile_type="FwdSm90Tile",
        params="FwdSm90Params",
        blocks=_query_tiles,
        min_cc=(9, 0),
        max_cc=(9, 0),
        dtypes=_HALVES,
        head_dims=(64, 96, 128, 192, 256),
        pairs=((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
        tiles=tilings.FWD_SM90,
        excludes=(
            _TOO_LONG,
            ("tensors that no tensor map describes", lambda p: not p.tensor_maps),
            ("more than 2^30 tiles of queries", lambda p: _count_tiles(p, 64) > 2**30),
        ),
        persistent=True,
    ),
    Kernel(
        name="fwd_sm80",
        file="fwd_sm80.cuh",
        direction="forward",
        stage="main",
        tile_type="FwdTile",
        params="FwdParams",
        blocks=_query_tiles,
        min_cc=(8, 0),
        dtypes=_HALVES,
        head_dims=_HEAD_DIMS,
        tiles=tilings.FWD,
        excludes=(_TOO_LONG,),
    ),
    Kernel(
        name="fwd_wide_sm80",
        file="fwd_wide_sm80.cuh",
        direction="forward",
        stage="main",
        tile_type="WideTile",
        params="FwdParams",
        blocks=_query_tiles,
        min_cc=(8, 0),
        dtypes=_WIDE,
        head_dims=_HEAD_DIMS,
        tiles=tilings.FWD_WIDE,
        excludes=(_TOO_LONG,),
        tf32=True,
        grain=_even,
    ),
    Kernel(
        name="bwd_delta",
        file="bwd_delta.cuh",
        direction="backward",
        stage="delta",
        tile_type="DeltaTile",
        params="BwdParams",
        blocks=_query_tiles,
        min_cc=(8, 0),
        dtypes=(*_HALVES, *_WIDE),
        head_dims=_HEAD_DIMS,
        tiles=tuple(Tile(256, 64, 0, 8, 1, itemsize=n) for n in (2, 4, 8)),
        policies=False,
        grain=_columns,
    ),
    Kernel(
        name="bwd_sm80",
        file="bwd_sm80.cuh",
        direction="backward",
        stage="main",
        tile_type="BwdTile",
        params="BwdParams",
        blocks=_key_tiles,
        min_cc=(8, 0),
        dtypes=_HALVES,
        head_dims=_HEAD_DIMS,
        tiles=tilings.BWD,
        excludes=(_TOO_LONG,),
        atomics=_HALVES,
        grain=_columns,
    ),
    Kernel(
        name="bwd_convert",
        file="bwd_convert.cuh",
        direction="backward",
        stage="dq",
        tile_type="ConvertTile",
        params="BwdParams",
        blocks=_query_tiles,
        min_cc=(8, 0),
        dtypes=_HALVES,
        head_dims=_HEAD_DIMS,
        tiles=(Tile(256, 64, 0, 8, 1),),
        excludes=(("deterministic calls", lambda p: p.deterministic),),
        policies=False,
        grain=_columns,
    ),
    Kernel(
        name="bwd_dq_sm80",
        file="bwd_dq_sm80.cuh",
        direction="backward",
        stage="dq",
        tile_type="DqTile",
        params="BwdParams",
        blocks=_query_tiles,
        min_cc=(8, 0),
        dtypes=_HALVES,
        head_dims=_HEAD_DIMS,
        tiles=tilings.BWD_DQ,
        excludes=(
            _TOO_LONG,
            ("what bwd_sm80 has added up by atomics", lambda p: not p.deterministic),
        ),
    ),
    Kernel(
        name="bwd_wide_sm80",
        file="bwd_wide_sm80.cuh",
        direction="backward",
        stage="main",
        tile_type="WideKeyTile",
        params="BwdParams",
        blocks=_key_tiles,
        min_cc=(8, 0),
        dtypes=_WIDE,
        head_dims=_HEAD_DIMS,
        tiles=tilings.BWD_WIDE,
        excludes=(_TOO_LONG,),
        tf32=True,
        atomics=_WIDE,
        dq_in_place=True,
        grain=_columns,
    ),
    Kernel(
        name="bwd_dq_wide_sm80",
        file="bwd_wide_sm80.cuh",
        direction="backward",
        stage="dq",
        tile_type="WideQueryTile",
        params="BwdParams",
        blocks=_query_tiles,
        min_cc=(8, 0),
        dtypes=_WIDE,
        head_dims=_HEAD_DIMS,
        tiles=tilings.BWD_DQ_WIDE,
        excludes=(
            _TOO_LONG,
            ("what bwd_wide_sm80 has added up by atomics", lambda p: not p.deterministic),
        ),
        tf32=True,
    ),
)
