"""The table of kernels: one frozen row each, and what one compiled instance (Variant) is.

Row order is preference order. A row lists what it *excludes*, so a new feature is on, and tested,
everywhere by default. Data and one-line predicates only; `plan` reads the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .problem import Direction, Problem

Stage = Literal["main", "delta", "dq"]
# The kernels of a pass, in the order in which they run.
STAGES: dict[Direction, tuple[Stage, ...]] = {
    "forward": ("main",),
    "backward": ("delta", "main", "dq"),
}

C_TYPES = {"float16": "fp16_t", "bfloat16": "bf16_t"}
SHORT_TYPES = {"float16": "fp16", "bfloat16": "bf16"}
MASKS = {"full": "FullMask", "causal": "CausalMask", "left": "LeftMask", "local": "LocalMask"}
SCORES = {"plain": "PlainScore", "softcap": "SoftcapScore"}

# Sequence positions, and sums of three of them (row + shift + window), are 32-bit in the kernels.
MAX_SEQLEN = 2**29


@dataclass(frozen=True)
class Tile:
    """Block shape of a kernel for head dims up to `max_head_dim`."""

    max_head_dim: int
    block_q: int
    block_k: int
    warps: int
    min_blocks: int  # blocks per multiprocessor that the register budget must leave room for
    # Only where registers suffice without spills: newest compute capability, score policies.
    max_cc: tuple[int, int] | None = None
    scores: tuple[str, ...] = ("plain", "softcap")
    least_smem: int = 0  # only where a block may have so many bytes: min_blocks fit together

    @property
    def arguments(self) -> tuple[int | bool, ...]:
        """Template arguments of the tile, after the element type and the head dims."""
        return ()

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Dynamic shared memory of a block."""
        return 0


@dataclass(frozen=True)
class FwdTile(Tile):
    """A tile of fwd_sm80: K and V in two stages."""

    q_in_registers: bool = False

    @property
    def arguments(self) -> tuple[int | bool, ...]:
        return self.block_q, self.block_k, self.warps, self.q_in_registers

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Q (O leaves through it) and two stages of K and V."""
        q = self.block_q * max(head_dim, head_dim_v)
        return 2 * (q + 2 * self.block_k * (head_dim + head_dim_v))


@dataclass(frozen=True)
class BwdTile(Tile):
    """A tile of bwd_sm80: `key_warps` warps split the keys; Q and dO in one or two stages."""

    key_warps: int = 1
    q_stages: int = 2
    do_stages: int = 2

    @property
    def arguments(self) -> tuple[int | bool, ...]:
        sizes = self.block_q, self.block_k, self.warps
        return *sizes, self.key_warps, self.q_stages, self.do_stages

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """K, V; stages of Q (with lse and delta) and dO; P, if warps share it; dS twice."""
        kv = 2 * self.block_k * (head_dim + head_dim_v)
        q = self.q_stages * self.block_q * (2 * head_dim + 8)
        grad_o = self.do_stages * self.block_q * 2 * head_dim_v
        weights = 2 * self.block_k * self.block_q * (2 if self.key_warps == self.warps else 3)
        return kv + q + grad_o + weights


@dataclass(frozen=True)
class DqTile(Tile):
    """A tile of bwd_dq_sm80: K and V in two stages."""

    @property
    def arguments(self) -> tuple[int | bool, ...]:
        return self.block_q, self.block_k, self.warps

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Q and dO, lse and delta, two stages of K and V."""
        tiles = 2 * (self.block_q + 2 * self.block_k) * (head_dim + head_dim_v)
        return tiles + 8 * self.block_q


@dataclass(frozen=True, eq=False)  # a row is itself: compared and hashed by identity, at no cost
class Kernel:
    """One kernel file: what it computes, where it runs, what it excludes, how it is tiled.

    head_dims are the compiled sizes; others round up, and beside a large one at least to
    `least(largest)`. The first tile that holds the head dims and fits the card's shared memory is
    taken. `blocks(tile, problem)` is the size of its grid.
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
    atomics: bool = False  # has an instance without them for deterministic calls
    least: Callable[[int], int] = lambda largest: 1

    @property
    def max_head_dim(self) -> int:
        """Largest head dim, of q/k and of v."""
        return self.head_dims[-1]

    def compiled_dims(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        """The compiled sizes that serve these head dims."""
        least = self.least(max(head_dim, head_dim_v))
        d, dv = (
            next(size for size in self.head_dims if size >= max(n, least))
            for n in (head_dim, head_dim_v)
        )
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

    @property
    def name(self) -> str:
        """Entry name as profilers show it, e.g. fwd_sm80_bf16_d128_causal."""
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"x{self.head_dim_v}"
        parts = [self.kernel.name, SHORT_TYPES[self.dtype], dims]
        parts += [p for p in (self.mask, self.score) if p not in ("full", "plain")]
        return "_".join(parts + ["deterministic"] * self.deterministic)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory per block, in bytes."""
        return self.tile.smem_bytes(self.head_dim, self.head_dim_v)


# 1 KB of a block's shared memory is left to the system and to the kernel's static part.
SMEM_RESERVE = 1024

_HALVES = ("float16", "bfloat16")
_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
_LONG = f"sequences longer than {MAX_SEQLEN}"
_TOO_LONG = (_LONG, lambda p: max(p.seqlen_q, p.seqlen_k) > MAX_SEQLEN)


def _query_tiles(tile: Tile, p: Problem) -> int:
    return p.batch * p.num_heads * -(-p.seqlen_q // tile.block_q)


def _key_tiles(tile: Tile, p: Problem) -> int:
    return p.batch * p.num_heads_kv * -(-p.seqlen_k // tile.block_k)


def _beside(largest: int) -> int:
    """Up to four warps of the backward share the columns of a gradient, 16 each at least."""
    return 64 if largest > 128 else 32


KERNELS: tuple[Kernel, ...] = (
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
        tiles=(
            FwdTile(64, 128, 64, 4, 2, q_in_registers=True),
            FwdTile(96, 128, 64, 4, 2, scores=("plain",)),
            FwdTile(128, 128, 64, 4, 2, max_cc=(9, 0), scores=("plain",)),
            FwdTile(128, 128, 48, 4, 2),
            FwdTile(256, 128, 64, 8, 1),
            FwdTile(256, 128, 32, 8, 1),
            FwdTile(256, 64, 32, 4, 1),
        ),
        excludes=(_TOO_LONG,),
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
        dtypes=_HALVES,
        head_dims=_HEAD_DIMS,
        tiles=(Tile(256, 64, 0, 8, 1),),
        policies=False,
        least=_beside,
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
        tiles=(
            BwdTile(64, 64, 128, 4, 2, key_warps=4, least_smem=200 << 10),
            BwdTile(64, 32, 128, 4, 2, key_warps=4),
            BwdTile(128, 64, 128, 8, 1, key_warps=4, max_cc=(9, 0)),
            BwdTile(128, 64, 128, 8, 1, key_warps=4, do_stages=1),
            BwdTile(128, 32, 64, 4, 2, key_warps=2),
            BwdTile(256, 64, 64, 8, 1, key_warps=2),
            BwdTile(256, 64, 64, 8, 1, key_warps=2, do_stages=1),
            BwdTile(256, 64, 64, 8, 1, key_warps=2, q_stages=1, do_stages=1),
            BwdTile(256, 32, 32, 4, 1, key_warps=2, do_stages=1),
        ),
        excludes=(_TOO_LONG,),
        atomics=True,
        least=_beside,
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
        least=_beside,
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
        tiles=(
            DqTile(128, 128, 32, 4, 2),
            DqTile(256, 128, 32, 8, 1),
            DqTile(256, 64, 32, 4, 1),
            DqTile(256, 64, 16, 4, 1),
        ),
        excludes=(
            _TOO_LONG,
            ("what bwd_sm80 has added up by atomics", lambda p: not p.deterministic),
        ),
    ),
)
