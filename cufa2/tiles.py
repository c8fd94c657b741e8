"""Block shapes of the kernels: their sizes, template arguments and shared memory."""

from __future__ import annotations

from dataclasses import dataclass


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
    itemsize: int = 2  # bytes of the elements that it is for
    least_smem: int = 0  # only where a block may have so many bytes: min_blocks fit together
    max_head_dim_v: int = 0  # 0: as max_head_dim

    @property
    def arguments(self) -> tuple[int | bool, ...]:
        """Template arguments of the tile, between the head dims and those of its variant."""
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
class FwdSm90Tile(Tile):
    """A tile of fwd_sm90: a warpgroup for each 64 queries, and one that feeds them.

    Q, and K and V, have stages of their own; `late` exponentials come before the wait for P V.
    """

    stages: int = 2
    q_stages: int = 1
    late: int = 0

    @property
    def arguments(self) -> tuple[int | bool, ...]:
        return self.block_q, self.block_k, self.stages, self.q_stages, self.late

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """The stages, in blocks of 64 columns; barriers and frames."""
        d, dv = (-(-n // 64) * 64 for n in (head_dim, head_dim_v))
        tiles = self.q_stages * self.block_q * d + self.stages * self.block_k * (d + dv)
        barriers = 8 * (2 * self.q_stages + 4 * self.stages + 1) + 4
        return 2 * tiles + -(-barriers // 16) * 16 + 32 * self.q_stages


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


@dataclass(frozen=True)
class WideTile(Tile):
    """A tile of fwd_wide_sm80 for elements of `itemsize` bytes.

    `split` warps share their rows and halve the columns; K and V come in `parts` of their columns
    that take turns at `slots` buffers.
    """

    split: int = 1
    parts: int = 1
    slots: int = 2

    @property
    def arguments(self) -> tuple[int | bool, ...]:
        return self.block_q, self.block_k, self.warps, self.split, self.parts, self.slots

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Q (rows in whole grains of 128 bytes a part), the slots, and scores that are shared."""
        grain = 128 * self.split * self.parts
        row, row_v = (-(-n * self.itemsize // grain) * grain for n in (head_dim, head_dim_v))
        scores = self.split * self.block_q * self.block_k * self.itemsize
        used = scores if self.split > 1 else 0
        slots = self.slots * self.block_k * max(row, row_v) // self.parts
        return self.block_q * row + slots + used


@dataclass(frozen=True)
class WideGradTile(Tile):
    """A tile of bwd_wide_sm80 (rows are keys) or bwd_dq_wide_sm80 (rows are queries).

    `split` warps share their rows and halve the columns; what the walk passes has `stages` stages,
    or takes turns in one place (0).
    """

    split: int = 1
    stages: int = 2
    keys: bool = True

    @property
    def arguments(self) -> tuple[int | bool, ...]:
        return self.block_q, self.block_k, self.warps, self.split, self.stages

    def smem_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Rows, stages of columns, lse and delta beside the queries; S and dP of each warp."""
        grain = 128 * self.split
        d, dv = (-(-n * self.itemsize // grain) * grain for n in (head_dim, head_dim_v))
        rows, columns = self.block_q, self.block_k
        if self.keys:
            rows, columns = columns, rows
        stage = columns * (d + dv if self.stages else max(d, dv))
        facts = 2 * self.itemsize * self.block_q
        stages = max(self.stages, 1)
        scores = 2 * rows * self.split * columns * self.itemsize
        return rows * (d + dv) + stages * stage + facts * (stages if self.keys else 1) + scores
