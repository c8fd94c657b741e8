"""The run-time parameters of the kernels: their layout, and their values for one launch.

The structs of cuda_src/attn/params.cuh, field by field; a test compares offsets. Plain integers
and floats: pointers come from the caller as numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .problem import Problem


class View(Protocol):
    """What a launch needs of an array: its address, and shape and strides in elements."""

    @property
    def pointer(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def itemsize(self) -> int: ...


Layout = tuple[tuple[str, str], ...]
Views = Mapping[str, View | None]

_LOG2_E = math.log2(math.e)
_MAX_FLOAT32 = 3.4028234663852886e38
SPLIT_KEYS = 1024  # the least that a tile of few queries gets when keys are split
STORED_ROWS = 16  # of o, in a box that a warp of fwd_sm90 writes
WORK_ROWS = 64  # kWorkRows: the work arrays of a backward pass have whole tiles of rows


def _layout(*groups: tuple[str, Sequence[str]]) -> Layout:
    return tuple((name, code) for code, names in groups for name in names)


def _strides(tensors: Sequence[str]) -> list[str]:
    return [f"{t}_stride.{axis}" for t in tensors for axis in ("batch", "row", "head")]


_FWD_TENSORS = ("q", "k", "v", "o")
_BWD_TENSORS = ("q", "k", "v", "o", "grad_o", "dq", "dk", "dv")
_LENGTHS = ("seqlens_q", "seqlens_k")
_MASK = ("window_left", "window_right", "seqlens_q_stride", "seqlens_k_stride", "top_left")

FWD_PARAMS = _layout(
    ("Q", (*_FWD_TENSORS, "lse", *_LENGTHS)),
    ("q", (*_strides((*_FWD_TENSORS, "lse")), "heads_total", "section")),
    ("d", ("exact_tanh_scale", "exact_scale_log2")),
    ("i", ("num_heads", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", *_MASK)),
    ("f", ("tanh_scale", "scale_log2", "q_sign")),
)
BWD_PARAMS = _layout(
    ("Q", (*_BWD_TENSORS, "lse", "dlse", "row_lse", "delta", "dq_sum", *_LENGTHS)),
    ("q", _strides((*_BWD_TENSORS, "lse", "dlse"))),
    ("q", ("heads_total", "heads_total_kv", "section", "section_kv")),
    ("d", ("exact_tanh_scale", "exact_scale_log2", "exact_scale")),
    ("i", ("num_heads", "num_heads_kv", "group", "seqlen_q", "seqlen_k", "rows")),
    ("i", ("head_dim", "head_dim_v", *_MASK)),
    ("f", ("tanh_scale", "scale_log2", "scale")),
)
MAPS = ("q_map", "k_map", "v_map", "o_map")
FWD_SM90_PARAMS = (
    *_layout(("128s", MAPS)),
    *((f"call.{name}", code) for name, code in FWD_PARAMS),
    *_layout(("Q", ("counter", "arrived", "part_o", "part_lse"))),
    *_layout(("i", ("pack", "tiles", "split_blocks"))),
)
PARAMS = {
    "FwdParams": FWD_PARAMS,
    "FwdSm90Params": FWD_SM90_PARAMS,
    "BwdParams": BWD_PARAMS,
}
FORMATS = {name: "".join(code for _, code in layout) for name, layout in PARAMS.items()}
ALIGNMENT = {"FwdSm90Params": 64}  # of structs with tensor maps
SIZES = {
    name: -(-struct.calcsize(code) // (a := ALIGNMENT.get(name, 1))) * a
    for name, code in FORMATS.items()
}


def pack(struct_name: str, values: Mapping[str, Any]) -> bytes:
    """The struct's bytes; KeyError if a field has no value."""
    fields = (values[name.removeprefix("call.")] for name, _ in PARAMS[struct_name])
    return struct.pack(FORMATS[struct_name], *fields).ljust(SIZES[struct_name], b"\0")


def forward_values(p: Problem, views: Views, l2_bytes: int) -> dict[str, Any]:
    """Values of the FwdParams fields. views: q, k, v, o (B, S, H, D), lse, seqlens_q, seqlens_k;
    the last three may be None."""
    scale = abs(p.softmax_scale)
    # The sign of the scale goes into Q, and so does a scale of zero: the exponent's factor, in
    # float32, stays positive.
    sign = math.copysign(1.0, p.softmax_scale) if scale >= 2.0**-126 else 0.0
    exponent = p.softcap if p.softcap else scale if sign else 1.0
    values = _common(p, views, _FWD_TENSORS)
    values |= _rows_of("lse", views["lse"])
    values |= {
        "section": _section(p.batch * p.num_heads_kv, _kv_bytes(p, views), l2_bytes) * p.group,
        "tanh_scale": _tanh_scale(scale, p.softcap),
        "scale_log2": exponent * _LOG2_E,
        "exact_tanh_scale": scale / p.softcap if p.softcap else 0.0,
        "exact_scale_log2": exponent * _LOG2_E,
        "q_sign": sign,
    }
    return values


def sharing(p: Problem, block_q: int, block_k: int, sm_count: int) -> dict[str, int]:
    """How tiles of fwd_sm90 share the work of few queries (pack, tiles, split_blocks).

    2^pack query heads of a key head share a tile as long as the queries do not fill it. Where a
    tile then has all queries, its keys are split into parts that together fill the card twice, of
    SPLIT_KEYS at least, or of twice as many from 16 parts on. None of it depends on the batch: nor
    does a row's result.
    """
    pack, heads = 0, p.num_heads
    while p.group % (2 << pack) == 0 and p.seqlen_q << (pack + 1) <= block_q:
        if block_q % (2 << pack):
            break
        pack += 1
    if p.seqlen_q << pack > block_q:
        return {"pack": pack, "tiles": -(-(p.seqlen_q << pack) // block_q), "split_blocks": 0}
    blocks = -(-p.seqlen_k // block_k)
    # A part costs some microseconds: of many keys there are fewer than could be.
    wanted = max(min(p.seqlen_k // SPLIT_KEYS, 16), p.seqlen_k // (2 * SPLIT_KEYS))
    splits = min(wanted, -(-2 * sm_count // (heads >> pack)))
    if splits < 2:
        return {"pack": pack, "tiles": 1, "split_blocks": 0}
    each = -(-blocks // splits)
    return {"pack": pack, "tiles": -(-blocks // each), "split_blocks": each}


def backward_values(
    p: Problem, views: Views, work: Mapping[str, int], l2_bytes: int
) -> dict[str, Any]:
    """Values of the BwdParams fields.

    views: q, k, v, o, grad_o, dq, dk, dv (B, S, H, D), lse; dlse, seqlens_q, seqlens_k or None.
    work: addresses of the work arrays row_lse and delta, and of what dq is added up in, dq_sum
    (0: none).
    """
    exponent = p.softcap if p.softcap else p.softmax_scale
    itemsize = _itemsize(views)
    # What the blocks of a key head share: Q and dO of its group, and the sums of dQ.
    sums = p.head_dim * max(itemsize, 4) if work["dq_sum"] else 0
    per_row = (p.head_dim + p.head_dim_v) * itemsize + sums
    heads = p.batch * p.num_heads_kv
    values = _common(p, views, _BWD_TENSORS)
    values |= _rows_of("lse", views["lse"]) | _rows_of("dlse", views["dlse"])
    values |= work
    values |= {
        "heads_total_kv": heads,
        "num_heads_kv": p.num_heads_kv,
        "section": _section(heads, _kv_bytes(p, views), l2_bytes) * p.group,
        "section_kv": _section(heads, p.group * p.seqlen_q * per_row, l2_bytes),
        "rows": work_rows(p),
        "tanh_scale": math.copysign(_tanh_scale(abs(p.softmax_scale), p.softcap), p.softmax_scale),
        "scale_log2": exponent * _LOG2_E,
        "scale": p.softmax_scale,
        "exact_tanh_scale": p.softmax_scale / p.softcap if p.softcap else 0.0,
        "exact_scale_log2": exponent * _LOG2_E,
        "exact_scale": p.softmax_scale,
    }
    return values


def work_rows(p: Problem) -> int:
    """Rows of the work arrays of a backward pass: Sq in whole tiles."""
    return -(-p.seqlen_q // WORK_ROWS) * WORK_ROWS


def _common(p: Problem, views: Views, tensors: Sequence[str]) -> dict[str, Any]:
    q, v = views["q"], views["v"]
    assert q is not None, "q is given"
    assert v is not None, "v is given"
    values: dict[str, Any] = {
        "heads_total": p.batch * p.num_heads,
        "num_heads": p.num_heads,
        "group": p.group,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        "head_dim": q.shape[3],
        "head_dim_v": v.shape[3],
        "window_left": p.window_left or 0,
        "window_right": p.window_right or 0,
        "top_left": int(p.align == "top_left"),
    }
    for name in _LENGTHS:
        lengths = views[name]
        values[name] = 0 if lengths is None else lengths.pointer
        values[f"{name}_stride"] = 0 if lengths is None else lengths.strides[0]
    for name in tensors:
        view = views[name]
        assert view is not None, "only lengths, lse and dlse may be None"
        batch, row, head, _ = view.strides
        values[name] = view.pointer
        values |= {f"{name}_stride.batch": batch, f"{name}_stride.row": row}
        values[f"{name}_stride.head"] = head
    return values


def _rows_of(name: str, lse: View | None) -> dict[str, int]:
    """Address and strides of a (B, H, Sq) or flat (B, Sq) array, or of none."""
    if lse is None:
        pointer, batch, head, row = 0, 0, 0, 0
    elif len(lse.strides) == 2:
        pointer, batch, head, row = lse.pointer, lse.strides[0], 0, lse.strides[1]
    else:
        pointer, (batch, head, row) = lse.pointer, lse.strides
    strides = {f"{name}_stride.batch": batch, f"{name}_stride.row": row}
    return {name: pointer, **strides, f"{name}_stride.head": head}


def _tanh_scale(scale: float, softcap: float) -> float:
    # Clamped: infinity would turn a score of 0 into NaN.
    return min(scale / softcap, _MAX_FLOAT32) if softcap else 0.0


def _itemsize(views: Views) -> int:
    q = views["q"]
    assert q is not None, "q is given"
    return q.itemsize


def _kv_bytes(p: Problem, views: Views) -> int:
    """What the query heads of a group share."""
    return p.seqlen_k * (p.head_dim + p.head_dim_v) * _itemsize(views)


def _section(heads: int, bytes_each: int, l2_bytes: int) -> int:
    """Heads that run side by side, so that what their blocks share stays in the L2 cache.

    About as many as fill 60 % of it, split into sections of about equal size: a small last one
    would start its long causal tiles when the card is about to run dry (a tenth of the time of 16
    heads of 16k keys, measured on an H200).
    """
    at_most = max(1, int(0.6 * l2_bytes) // max(1, bytes_each))
    sections = max(1, int(heads / at_most + 0.5))
    return -(-heads // sections)
