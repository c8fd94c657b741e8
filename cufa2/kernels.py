"""The table of kernels: one frozen row each, and what one compiled instance (Variant) is.

Row order is preference order. A row lists what it *excludes*, so a new feature is on, and tested,
everywhere by default. Data and one-line predicates only; `plan` reads the table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from .problem import Direction, Problem

# Run-time parameters, in the order and with the types of cuda_src/attn/params.cuh.
_STRIDES = [
    f"{t}_stride.{axis}" for t in ("q", "k", "v", "o", "lse") for axis in ("batch", "row", "head")
]
FWD_PARAMS: tuple[tuple[str, str], ...] = (
    *((name, "Q") for name in ("q", "k", "v", "o", "lse", "seqlens_q", "seqlens_k")),
    *((name, "q") for name in _STRIDES),
    *((name, "q") for name in ("heads_total", "section")),
    *(
        (name, "i")
        for name in ("num_heads", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    ),
    *((name, "i") for name in ("window_left", "window_right")),
    *((name, "i") for name in ("seqlens_q_stride", "seqlens_k_stride", "top_left")),
    *((name, "f") for name in ("tanh_scale", "scale_log2", "q_sign")),
)
FWD_FORMAT = "".join(code for _, code in FWD_PARAMS)
FWD_PARAMS_BYTES = struct.calcsize(FWD_FORMAT)

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
    q_in_registers: bool
    min_blocks: int  # blocks per multiprocessor that the register budget must leave room for
    # Only where registers suffice without spills: newest compute capability, score policies.
    max_cc: tuple[int, int] | None = None
    scores: tuple[str, ...] = ("plain", "softcap")

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Dynamic shared memory: Q (O leaves through it) and two stages of K and V."""
        q = self.block_q * max(head_dim, head_dim_v)
        return 2 * (q + 2 * self.block_k * (head_dim + head_dim_v))


@dataclass(frozen=True, eq=False)  # a row is itself: compared and hashed by identity, at no cost
class Kernel:
    """One kernel file: what it computes, where it runs, what it excludes, how it is tiled.

    head_dims are the compiled sizes; others round up. The first tile that holds the head dims and
    fits the card's shared memory is taken.
    """

    name: str
    file: str
    direction: Direction
    min_cc: tuple[int, int]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    tiles: tuple[Tile, ...]
    excludes: tuple[tuple[str, Callable[[Problem], bool]], ...] = ()

    @property
    def max_head_dim(self) -> int:
        """Largest head dim, of q/k and of v."""
        return self.head_dims[-1]

    def compiled_dim(self, head_dim: int) -> int:
        """The compiled size that serves a head dim."""
        return next(d for d in self.head_dims if d >= head_dim)


@dataclass(frozen=True)
class Variant:
    """One compiled instance: everything the compiler sees, nothing that a call may change."""

    kernel: Kernel
    tile: Tile
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    score: str

    @property
    def name(self) -> str:
        """Entry name as profilers show it, e.g. fwd_sm80_bf16_d128_causal."""
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"x{self.head_dim_v}"
        parts = [self.kernel.name, SHORT_TYPES[self.dtype], dims]
        parts += [p for p in (self.mask, self.score) if p not in ("full", "plain")]
        return "_".join(parts)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory per block, in bytes."""
        return self.tile.smem_bytes(self.head_dim, self.head_dim_v)


# 1 KB of a block's shared memory is left to the system and to the kernel's static part.
SMEM_RESERVE = 1024

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="fwd_sm80",
        file="fwd_sm80.cuh",
        direction="forward",
        min_cc=(8, 0),
        dtypes=("float16", "bfloat16"),
        head_dims=(32, 64, 96, 128, 192, 256),
        tiles=(
            Tile(64, 128, 64, 4, True, 2),
            Tile(96, 128, 64, 4, False, 2, scores=("plain",)),
            Tile(128, 128, 64, 4, False, 2, max_cc=(9, 0), scores=("plain",)),
            Tile(128, 128, 48, 4, False, 2),
            Tile(256, 128, 64, 8, False, 1),
            Tile(256, 128, 32, 8, False, 1),
            Tile(256, 64, 32, 4, False, 1),
        ),
        excludes=(
            (
                f"sequences longer than {MAX_SEQLEN}",
                lambda p: max(p.seqlen_q, p.seqlen_k) > MAX_SEQLEN,
            ),
        ),
    ),
)
