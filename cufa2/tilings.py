"""The tiles of every kernel: the block shapes that it is compiled in, in order of preference.

`plan` takes the first tile that holds the head dims, is for the size of the elements and fits the
card: a list goes from small head dims to large ones and, for each, from the most shared memory to
the least. The plain numbers: largest head dim, block_q, block_k, warps, min_blocks.
"""

from __future__ import annotations

from .tiles import BwdTile, DqTile, FwdSm90Tile, FwdTile, Tile, WideGradTile, WideTile

_PLAIN = ("plain",)
FWD_SM90: tuple[Tile, ...] = (
    FwdSm90Tile(64, 192, 128, 16, 1, scores=_PLAIN, stages=3, q_stages=2, late=16),
    FwdSm90Tile(96, 128, 128, 12, 1, q_stages=2, late=16),
    FwdSm90Tile(128, 192, 80, 16, 1, scores=_PLAIN, stages=3, q_stages=2, late=24),
    FwdSm90Tile(128, 128, 128, 12, 1, q_stages=2, late=32),
    FwdSm90Tile(192, 128, 128, 12, 1, max_head_dim_v=128, late=24),
    FwdSm90Tile(192, 128, 112, 12, 1, scores=_PLAIN),
    FwdSm90Tile(192, 128, 96, 12, 1),
    FwdSm90Tile(256, 128, 80, 12, 1, scores=_PLAIN),
    FwdSm90Tile(256, 128, 64, 12, 1),
)

FWD: tuple[Tile, ...] = (
    FwdTile(64, 128, 64, 4, 2, q_in_registers=True),
    FwdTile(96, 128, 64, 4, 2, scores=("plain",)),
    FwdTile(128, 128, 64, 4, 2, max_cc=(9, 0), scores=("plain",)),
    FwdTile(128, 128, 48, 4, 2),
    FwdTile(256, 128, 64, 8, 1),
    FwdTile(256, 128, 32, 8, 1),
    FwdTile(256, 64, 32, 4, 1),
)

FWD_WIDE: tuple[Tile, ...] = (
    WideTile(64, 128, 32, 4, 2, itemsize=4),
    WideTile(64, 128, 32, 8, 1, itemsize=8),
    WideTile(96, 128, 32, 4, 2, itemsize=4),
    WideTile(128, 256, 32, 8, 1, max_cc=(8, 0), itemsize=4),
    WideTile(128, 128, 32, 4, 2, itemsize=4),
    WideTile(128, 128, 32, 8, 1, slots=3, itemsize=8),
    WideTile(128, 128, 16, 8, 1, itemsize=8),
    WideTile(128, 64, 16, 4, 1, itemsize=8),
    WideTile(192, 64, 32, 8, 1, split=2, parts=2, slots=4, itemsize=8),
    WideTile(192, 64, 16, 8, 1, split=2, itemsize=8),
    WideTile(256, 128, 32, 8, 1, split=2, itemsize=4),
    WideTile(256, 64, 32, 4, 1, split=2, itemsize=4),
    WideTile(256, 32, 16, 2, 1, split=2, itemsize=4),
    WideTile(256, 64, 32, 8, 1, split=2, parts=4, slots=4, itemsize=8),
    WideTile(256, 32, 16, 4, 1, split=2, itemsize=8),
    WideTile(256, 16, 8, 2, 1, split=2, itemsize=8),
)

BWD: tuple[Tile, ...] = (
    BwdTile(64, 64, 128, 4, 2, key_warps=4, least_smem=200 << 10),
    BwdTile(64, 32, 128, 4, 2, key_warps=4, max_cc=(9, 0)),
    BwdTile(128, 64, 128, 8, 1, key_warps=4, max_cc=(9, 0)),
    BwdTile(128, 64, 128, 8, 1, key_warps=4, do_stages=1, max_cc=(9, 0), scores=("plain",)),
    BwdTile(128, 32, 64, 4, 2, key_warps=2),
    BwdTile(256, 64, 64, 8, 1, key_warps=2),
    BwdTile(256, 64, 64, 8, 1, key_warps=2, do_stages=1),
    BwdTile(256, 64, 64, 8, 1, key_warps=2, q_stages=1, do_stages=1),
    BwdTile(256, 32, 32, 4, 1, key_warps=2, do_stages=1),
)

BWD_DQ: tuple[Tile, ...] = (
    DqTile(128, 128, 32, 4, 2, max_cc=(9, 0)),
    DqTile(256, 128, 32, 8, 1),
    DqTile(256, 64, 32, 4, 1),
    DqTile(256, 64, 16, 4, 1),
)

BWD_WIDE: tuple[Tile, ...] = (
    WideGradTile(64, 32, 128, 4, 2, stages=1, max_cc=(9, 0), itemsize=4, least_smem=200 << 10),
    WideGradTile(64, 16, 128, 4, 1, itemsize=4),
    WideGradTile(64, 32, 128, 8, 1, stages=1, itemsize=8),
    WideGradTile(64, 16, 64, 4, 1, itemsize=8),
    WideGradTile(64, 8, 64, 4, 1, itemsize=8),
    WideGradTile(128, 16, 64, 4, 2, split=2, itemsize=4, least_smem=200 << 10),
    WideGradTile(128, 16, 64, 4, 1, split=2, itemsize=4),
    WideGradTile(128, 16, 64, 4, 1, split=2, stages=1, itemsize=4),
    WideGradTile(128, 16, 64, 8, 1, split=2, itemsize=8),
    WideGradTile(128, 16, 32, 4, 1, split=2, itemsize=8),
    WideGradTile(128, 16, 16, 2, 1, split=2, stages=1, itemsize=8),
    WideGradTile(256, 16, 64, 8, 1, split=4, itemsize=4),
    WideGradTile(256, 16, 32, 4, 1, split=4, itemsize=4),
    WideGradTile(256, 16, 16, 2, 1, split=2, stages=1, itemsize=4),
    WideGradTile(192, 16, 32, 8, 1, split=4, itemsize=8),
    WideGradTile(256, 16, 32, 8, 1, split=4, stages=1, itemsize=8),
    WideGradTile(256, 16, 16, 4, 1, split=4, stages=1, itemsize=8),
    WideGradTile(256, 8, 16, 4, 1, split=4, stages=0, itemsize=8),
)

BWD_DQ_WIDE: tuple[Tile, ...] = (
    WideGradTile(64, 256, 32, 8, 1, keys=False, itemsize=4),
    WideGradTile(64, 128, 16, 4, 1, keys=False, itemsize=4),
    WideGradTile(64, 128, 16, 8, 1, keys=False, itemsize=8),
    WideGradTile(64, 64, 16, 4, 1, keys=False, itemsize=8),
    WideGradTile(64, 64, 8, 4, 1, keys=False, itemsize=8),
    WideGradTile(128, 128, 32, 8, 1, keys=False, itemsize=4),
    WideGradTile(128, 64, 32, 4, 1, keys=False, split=2, itemsize=4),
    WideGradTile(128, 64, 16, 4, 1, keys=False, split=2, stages=1, itemsize=4),
    WideGradTile(128, 64, 16, 8, 1, keys=False, split=2, itemsize=8),
    WideGradTile(128, 32, 16, 4, 1, keys=False, split=2, itemsize=8),
    WideGradTile(128, 16, 16, 2, 1, keys=False, split=2, stages=1, itemsize=8),
    WideGradTile(256, 64, 32, 8, 1, keys=False, split=2, stages=1, itemsize=4),
    WideGradTile(256, 32, 16, 4, 1, keys=False, split=4, itemsize=4),
    WideGradTile(256, 16, 16, 2, 1, keys=False, split=2, stages=1, itemsize=4),
    WideGradTile(192, 32, 16, 8, 1, keys=False, split=4, itemsize=8),
    WideGradTile(256, 32, 16, 8, 1, keys=False, split=4, stages=1, itemsize=8),
    WideGradTile(256, 16, 16, 4, 1, keys=False, split=4, stages=1, itemsize=8),
    WideGradTile(256, 16, 8, 4, 1, keys=False, split=4, stages=0, itemsize=8),
)
