"""Plan laws: which kernel instance serves a problem on a card, and what a refusal says."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cufa2 import device, kernels, params, plan
from cufa2.device import DeviceInfo, info_for_arch
from cufa2.kernels import KERNELS, MAX_SEQLEN, SMEM_RESERVE, STAGES, Kernel
from cufa2.problem import DTYPES, ITEMSIZES, Problem, UnsupportedError
from cufa2.tiles import WideGradTile

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
INFOS = {arch: info_for_arch(arch) for arch in ARCHS}
TURING = DeviceInfo("a Turing card", (7, 5), 64 << 10, 40, 4 << 20)


def problem(**changes: Any) -> Problem:
    """A small legal problem with some fields changed."""
    fields: dict[str, Any] = {
        "direction": "forward",
        "dtype": "bfloat16",
        "batch": 2,
        "seqlen_q": 100,
        "seqlen_k": 200,
        "num_heads": 4,
        "num_heads_kv": 2,
        "head_dim": 64,
        "head_dim_v": 64,
        "softmax_scale": 0.125,
    }
    return Problem(**{**fields, **changes})


bounds = st.none() | st.integers(0, 1000)
kinds = [*itertools.product(STAGES, DTYPES)]


def problem_of(kind: tuple[str, str], tf32: bool, **changes: Any) -> Problem:
    """A problem of this direction and dtype; tf32: with such products, if it may have them."""
    precision = "tf32" if tf32 and kind[1] == "float32" else None
    return problem(direction=kind[0], dtype=kind[1], precision=precision, **changes)


problems = st.builds(
    problem_of,
    kind=st.sampled_from(kinds),
    batch=st.integers(0, 5),
    seqlen_q=st.integers(0, MAX_SEQLEN),
    seqlen_k=st.integers(0, MAX_SEQLEN),
    num_heads=st.sampled_from((2, 4, 64)),
    head_dim=st.integers(1, 256),
    head_dim_v=st.integers(1, 256),
    softmax_scale=st.floats(-5, 5),
    softcap=st.sampled_from((0.0, 0.5, 30.0)),
    align=st.sampled_from(("bottom_right", "top_left")),
    window_left=bounds,
    window_right=bounds,
    has_seqlens_q=st.booleans(),
    has_seqlens_k=st.booleans(),
    tf32=st.booleans(),
    deterministic=st.booleans(),
)
infos = st.sampled_from(list(INFOS.values()))


def computes(variant: kernels.Variant) -> bool:
    """Whether the kernel does attention's work, and so takes a mask and a score."""
    return variant.kernel.policies


@settings(deadline=None, max_examples=400)
@given(problems, infos)
def test_every_legal_problem_has_a_plan(p: Problem, info: DeviceInfo) -> None:
    """And its kernels compute this problem, stage by stage, and fit this card."""
    chosen = plan.choose(p, info)
    stages = STAGES[p.direction]
    assert tuple(v.kernel.stage for v in chosen.variants) == (
        stages[:-1] if chosen.variant.completes_dq else stages
    )
    assert chosen.kernel is chosen.variant.kernel
    assert chosen.kernel.stage == "main"
    for variant in chosen.variants:
        row = variant.kernel
        assert row in KERNELS
        assert row.direction == p.direction
        assert info.cc >= row.min_cc
        assert p.dtype == variant.dtype
        assert p.dtype in row.dtypes
        assert p.head_dim <= variant.head_dim <= row.max_head_dim
        assert variant.tile in row.tiles
        assert max(variant.head_dim, variant.head_dim_v) <= variant.tile.max_head_dim
        assert variant.smem_bytes + SMEM_RESERVE <= info.smem_per_block
        assert variant.tile.max_cc is None or info.cc <= variant.tile.max_cc
        assert variant.tile.least_smem <= info.smem_per_block
        assert not any(applies(p) for _, applies in row.excludes)
        assert variant.deterministic == (p.dtype in row.atomics and p.deterministic)
        assert variant.tf32 == (row.tf32 and p.precision == "tf32")
        if row.policies:
            assert (variant.score == "softcap") == (p.softcap > 0)
            assert p.head_dim_v <= variant.head_dim_v <= row.max_head_dim
            # The mask policy reads exactly the bounds that the problem has.
            left, right = variant.mask in ("left", "local"), variant.mask in ("causal", "local")
            assert (left, right) == (p.window_left is not None, p.window_right is not None)
        grain = row.grain(max(p.head_dim, p.head_dim_v))
        assert variant.head_dim % grain == variant.head_dim_v % grain == 0
    # The kernels of a backward pass that share the dq buffer agree on its row length. Those that
    # compute dq, and not only convert it, read no buffer.
    shared = {v.head_dim for v in chosen.variants if v.kernel.stage != "dq" or not computes(v)}
    assert len(shared) == 1
    # dq is added up by atomics, of 16-bit inputs in a buffer that is then converted; or, to repeat
    # to the bit, computed by a kernel of its own.
    adds = p.direction == "backward" and not p.deterministic
    assert chosen.variant.adds_dq == adds
    assert chosen.variant.completes_dq == (adds and ITEMSIZES[p.dtype] > 2)
    if p.direction == "backward":
        computed = [v for v in chosen.variants if v.kernel.stage == "dq" and computes(v)]
        assert len(computed) == (not adds)


@settings(deadline=None, max_examples=200)
@given(problems, infos)
def test_plans_are_deterministic(p: Problem, info: DeviceInfo) -> None:
    """The cache changes nothing, nor does an equal card or problem."""
    chosen = plan.choose(p, info)
    assert plan.choose.__wrapped__(p, info) == chosen
    again = plan.choose.__wrapped__(dataclasses.replace(p), dataclasses.replace(info))
    assert again == chosen
    assert again.variant.name == chosen.variant.name
    assert plan.choose(p, info, chosen.kernel.name) == chosen


@settings(deadline=None, max_examples=300)
@given(
    problems,
    infos,
    st.fixed_dictionaries(
        {
            "batch": st.integers(0, 10**6),
            "seqlen_q": st.integers(0, MAX_SEQLEN),
            "seqlen_k": st.integers(0, MAX_SEQLEN),
            "num_heads": st.sampled_from((2, 6, 128)),
            "softmax_scale": st.floats(-1e3, 1e3),
            "has_seqlens_q": st.booleans(),
            "has_seqlens_k": st.booleans(),
            "align": st.sampled_from(("bottom_right", "top_left")),
        }
    ),
    st.integers(0, MAX_SEQLEN),
)
def test_what_a_call_may_change_never_compiles_anything(
    p: Problem, info: DeviceInfo, changes: dict[str, Any], bound: int
) -> None:
    """Batch, lengths, heads, scale, alignment and the size of a window keep the variant, as long
    as the tiles can be counted."""
    sides = ("window_left", "window_right")
    windows: dict[str, Any] = {n: bound for n in sides if getattr(p, n) is not None}
    other = dataclasses.replace(p, **changes, **windows)
    p, other = (
        x if x.batch * x.num_heads * x.seqlen_q <= 2**30 else dataclasses.replace(x, batch=1)
        for x in (p, other)
    )
    assert plan.choose(other, info).variant == plan.choose(p, info).variant


@settings(deadline=None, max_examples=200)
@given(problems, infos)
def test_padding_to_whole_chunks_keeps_the_variant(p: Problem, info: DeviceInfo) -> None:
    """A head dim that is served through a work copy of the next multiple of 8 has its kernel."""
    dims = {n: -(-getattr(p, n) // 8) * 8 for n in ("head_dim", "head_dim_v")}
    assert plan.choose(dataclasses.replace(p, **dims), info) == plan.choose(p, info)


def test_strides_and_pointers_are_no_part_of_a_problem() -> None:
    """So they cannot change a variant, and one variant shares no field with the parameters."""
    names = {f.name for f in dataclasses.fields(Problem)}
    assert not any("stride" in n or "pointer" in n for n in names)
    variant = {f.name for f in dataclasses.fields(kernels.Variant)}
    layouts = [*params.FWD_PARAMS, *params.BWD_PARAMS]
    parameters = {name.partition(".")[0] for name, _ in layouts}
    # The compiled head dims and the real ones share a name and nothing else.
    assert variant & parameters == {"head_dim", "head_dim_v"}


@pytest.mark.parametrize("arch", device.ARCHS)
def test_variants_of_an_architecture(arch: str) -> None:
    """Names are unique, sizes fit, and every row, dim, dtype, mask and score is there."""
    info = info_for_arch(arch)
    made = list(plan.variants(info))
    assert len({v.name for v in made}) == len(made)
    assert len(set(made)) == len(made)
    assert all(v.smem_bytes + SMEM_RESERVE <= info.smem_per_block for v in made)
    rows = [row for row in KERNELS if row.min_cc <= info.cc <= row.max_cc]
    seen = collections.Counter((v.kernel.name, v.head_dim, v.dtype) for v in made)
    each = len(kernels.MASKS) * len(kernels.SCORES)
    assert seen == {
        (row.name, d, t): max(1, sum(d == pair[0] for pair in row.pairs))
        * (each * (1 + (t in row.atomics)) if row.policies else 1)
        * (1 + (row.tf32 and t == "float32"))
        for row in rows
        for d in row.head_dims
        for t in row.dtypes
    }


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_variants_hold_every_plan_with_equal_dims(arch: str, dtype: str) -> None:
    """What an ahead-of-time build makes is what calls with D = Dv need."""
    made = set(plan.variants(INFOS[arch]))
    for d in range(1, 257):
        for left, right in ((None, None), (None, 0), (5, None), (5, 5)):
            p = problem(
                dtype=dtype, head_dim=d, head_dim_v=d, window_left=left, window_right=right
            )
            assert plan.choose(p, INFOS[arch]).variant in made
            for deterministic in (False, True):
                q = dataclasses.replace(p, direction="backward", deterministic=deterministic)
                assert set(plan.choose(q, INFOS[arch]).variants) <= made


@pytest.mark.parametrize("arch", ARCHS)
def test_variants_hold_both_precisions_of_float32(arch: str) -> None:
    """A folder of cubins serves precision="tf32" as well; float64 and the like have one way."""
    made = set(plan.variants(INFOS[arch]))
    for d, precision in itertools.product(range(1, 257), (None, "tf32")):
        p = problem(dtype="float32", head_dim=d, head_dim_v=d, precision=precision)
        for direction, deterministic in itertools.product(STAGES, (False, True)):
            p = dataclasses.replace(p, direction=direction, deterministic=deterministic)
            chosen = plan.choose(p, INFOS[arch]).variants
            assert set(chosen) <= made
            assert {v.tf32 for v in chosen if v.kernel.tf32} == {precision == "tf32"}
    assert {v.dtype for v in made if v.tf32} == {"float32"}


def test_variant_names() -> None:
    """As profilers show them; what is off is not named."""
    info = INFOS["sm_80"]
    names = [
        plan.choose(problem(**changes), info, "fwd_sm80").variant.name
        for changes in (
            {},
            {"dtype": "float16", "head_dim": 65, "head_dim_v": 96},
            {"head_dim": 192, "head_dim_v": 128, "window_right": 0},
            {"head_dim": 129, "head_dim_v": 7, "window_left": 4, "softcap": 1.0},
            {"head_dim": 256, "head_dim_v": 256, "window_left": 4, "window_right": 4},
        )
    ]
    assert names == [
        "fwd_sm80_bf16_d64",
        "fwd_sm80_fp16_d96",
        "fwd_sm80_bf16_d192x128_causal",
        "fwd_sm80_bf16_d192x32_left_softcap",
        "fwd_sm80_bf16_d256_local",
    ]
    for deterministic, last in ((False, "bwd_convert_bf16_d64"), (True, "bwd_dq_sm80_bf16_d64")):
        p = problem(direction="backward", deterministic=deterministic)
        delta, main, dq = (v.name for v in plan.choose(p, info).variants)
        assert delta == "bwd_delta_bf16_d64"
        assert main == "bwd_sm80_bf16_d64" + "_deterministic" * deterministic
        assert dq == last
    for precision, short in ((None, "fp32"), ("tf32", "tf32")):
        p = problem(dtype="float32", window_right=0, precision=precision)
        assert plan.choose(p, info).variant.name == f"fwd_wide_sm80_{short}_d64_causal"
        main = f"bwd_wide_sm80_{short}_d64_causal"
        p = dataclasses.replace(p, direction="backward")
        assert [v.name for v in plan.choose(p, info).variants] == ["bwd_delta_fp32_d64", main]
        p = dataclasses.replace(p, deterministic=True)
        assert [v.name for v in plan.choose(p, info).variants] == [
            "bwd_delta_fp32_d64",
            f"{main}_deterministic",
            f"bwd_dq_wide_sm80_{short}_d64_causal",
        ]


@pytest.mark.parametrize(
    ("left", "right", "mask"),
    [
        (None, None, "full"),
        (None, 0, "causal"),
        (None, 7, "causal"),
        (7, None, "left"),
        (0, None, "left"),
        (0, 0, "local"),
        (7, 7, "local"),
    ],
)
def test_mask_policies(left: int | None, right: int | None, mask: str) -> None:
    assert plan.mask_of(left, right) == mask


# refusals


def refused(p: Problem, info: DeviceInfo, kernel: str | None = None) -> str:
    with pytest.raises(UnsupportedError, match="no CUDA kernel does the ") as e:
        plan.choose(p, info, kernel)
    return str(e.value)


def reasons(message: str) -> dict[str, str]:
    """The row names of a refusal, each with its reason."""
    lines = [line.strip() for line in message.splitlines() if line.startswith("  ")]
    return {name: reason for name, _, reason in (line.partition(": ") for line in lines)}


@pytest.mark.parametrize(
    ("changes", "info", "reason"),
    [
        (
            {"dtype": "float32", "head_dim": 300},
            "sm_90a",
            "takes float16 and bfloat16, not float32",
        ),
        ({"head_dim": 300}, "sm_80", "takes float32 and float64, not bfloat16"),
        (
            {"direction": "backward", "dtype": "float32", "head_dim": 257},
            "sm_90a",
            "head dims go up to 256, not 257",
        ),
        (
            {"direction": "backward", "dtype": "float64", "seqlen_q": MAX_SEQLEN + 1},
            "sm_90a",
            "takes float16 and bfloat16, not float64",
        ),
        (
            {"direction": "backward", "dtype": "float64", "seqlen_k": MAX_SEQLEN + 1},
            "sm_80",
            f"excludes sequences longer than {MAX_SEQLEN}",
        ),
        ({"head_dim": 257}, "sm_90a", "head dims go up to 256, not 257"),
        ({"head_dim_v": 512}, "sm_100a", "head dims go up to 256, not 512"),
        (
            {"seqlen_q": MAX_SEQLEN + 1},
            "sm_90a",
            f"excludes sequences longer than {MAX_SEQLEN}",
        ),
        (
            {"seqlen_k": MAX_SEQLEN + 1},
            "sm_86",
            f"excludes sequences longer than {MAX_SEQLEN}",
        ),
        ({}, TURING, "needs compute capability 8.0, the card has 7.5"),
    ],
)
def test_refusals_list_every_row_and_its_reason(changes: Any, info: Any, reason: str) -> None:
    card = info if isinstance(info, DeviceInfo) else INFOS[info]
    p = problem(**changes)
    message = refused(p, card)
    listed = reasons(message)
    served = {
        row.stage
        for row in KERNELS
        if row.direction == p.direction and plan.refusal(row, p, card) is None
    }
    stage = next(s for s in STAGES[p.direction] if s not in served)
    rows = [row for row in KERNELS if row.direction != p.direction or row.stage == stage]
    assert set(listed) == {row.name for row in rows}
    assert any(reason in told for told in listed.values())
    assert card.name in message.splitlines()[0]
    assert p.dtype in message.splitlines()[0]
    assert p.direction in message.splitlines()[0]
    assert f"D={p.head_dim}, Dv={p.head_dim_v}" in message.splitlines()[0]
    assert message.endswith("NumPy arrays are served for every legal problem.")
    for row in rows:
        assert plan.refusal(row, p, card) == listed[row.name]


def test_a_card_with_too_little_shared_memory() -> None:
    small = dataclasses.replace(INFOS["sm_86"], smem_per_block=24 << 10)
    message = refused(problem(head_dim=250, head_dim_v=250), small)
    expected = f"no tile for D=256, Dv=256 fits {24 << 10} bytes of shared memory"
    assert reasons(message)["fwd_sm80"] == expected


def test_a_kernel_may_be_forced() -> None:
    info = INFOS["sm_90a"]
    assert plan.choose(problem(), info, "fwd_sm80").kernel.name == "fwd_sm80"
    assert "there is no kernel named 'fwd_sm00'" in refused(problem(), info, "fwd_sm00")
    assert set(reasons(refused(problem(dtype="float32"), info, "fwd_sm80"))) == {"fwd_sm80"}


def test_refusals_are_not_cached_as_plans() -> None:
    """Asking again gives the same error."""
    p = problem(direction="backward", dtype="float32", head_dim=300)
    assert refused(p, INFOS["sm_90a"]) == refused(p, INFOS["sm_90a"])


# the table


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name)
def test_rows_are_sound(row: Kernel) -> None:
    """Dims and tiles ascend so that "the first that fits" is the best one that fits."""
    assert row.atomics or not row.dq_in_place
    # A file is named for its row, or for another one of the same pass and dtypes that it serves.
    mates = (r for r in KERNELS if (r.direction, r.dtypes) == (row.direction, row.dtypes))
    assert row.file in {f"{r.name}.cuh" for r in mates}
    assert list(row.head_dims) == sorted(set(row.head_dims))
    for size in {ITEMSIZES[dtype] for dtype in row.dtypes}:
        tiles = [t for t in row.tiles if t.itemsize == size]
        assert [t.max_head_dim for t in tiles] == sorted(t.max_head_dim for t in tiles)
        assert tiles[-1].max_head_dim == row.max_head_dim
        assert tiles[-1].max_cc is None, "the last resort is for every card"
    assert set(row.dtypes) <= set(kernels.C_TYPES)
    for tile in row.tiles:
        # Warps own rows, of which an instruction takes 16: queries, or in a tile that leaves dk
        # and dv keys. Of the other side it takes 8.
        of_keys = isinstance(tile, WideGradTile) and tile.keys
        rows, columns = (tile.block_q, tile.block_k)[:: -1 if of_keys else 1]
        assert rows % 16 == columns % 8 == 0
        assert tile.itemsize in {ITEMSIZES[dtype] for dtype in row.dtypes}
        if isinstance(tile, WideGradTile):
            assert rows * tile.split % (16 * tile.warps) == 0, "warps split the rows evenly"
            assert tile.keys == (row.stage == "main")
        if row.direction == "backward" and (row.stage != "dq" or not row.policies):
            assert params.WORK_ROWS % tile.block_q == 0, "work arrays hold whole tiles"
    for n in range(1, row.max_head_dim + 1):
        up = min(d for d in row.head_dims if d >= n and d % row.grain(n) == 0)
        assert row.compiled_dims(n, n) == (up, up)
    assert row.stage in STAGES[row.direction]


def test_row_names_are_unique() -> None:
    assert len({row.name for row in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize(
    ("cc", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_architectures(cc: tuple[int, int], arch: str) -> None:
    """The stand-in for an architecture has its compute capability and its limits."""
    info = info_for_arch(arch)
    assert (info.cc, info.arch, device.arch_of(cc)) == (cc, arch, arch)
    limits = {"sm_80": 163, "sm_90a": 227, "sm_100a": 227}  # KB a block, CUDA programming guide
    assert info.smem_per_block == limits.get(arch, 99) << 10


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "90a", "compute_80", ""])
def test_unknown_architectures(arch: str) -> None:
    with pytest.raises(ValueError, match=f"^arch '{arch}' is not one of sm_80, "):
        info_for_arch(arch)
