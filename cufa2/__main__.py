"""The command line, `python -m cufa2`: info, attend, compile, bench.

Exit status: 0 success, 2 a wrong argument or input file, 1 whatever else stops the work. Either
comes with a message `cufa2: error: ...`.
"""

from __future__ import annotations

import argparse
import functools
import platform
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, compiler, device, flash_attention, plan
from .files import UserError, cast, check_output, read_lengths, read_qkv, write
from .kernels import KERNELS, MASKS, SCORES, STAGES, Variant
from .problem import DTYPES, LAYOUTS, PRECISIONS

GPU_DTYPES = tuple(t for t in DTYPES if any(t in k.dtypes for k in KERNELS))
# B, S, H, D of the quick benchmark: a second or two on either back end.
CPU_SHAPES = ((1, 512, 4, 64), (1, 2048, 4, 64), (1, 1024, 4, 128))
GPU_SHAPES = ((4, 1024, 16, 64), (1, 4096, 16, 64), (1, 4096, 16, 128), (1, 8192, 8, 256))


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except UserError as e:
        return _fail(e, 2)
    except (RuntimeError, ImportError, MemoryError, OSError) as e:
        return _fail(str(e) or type(e).__name__, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _fail(error: object, status: int) -> int:
    print(f"cufa2: error: {error}", file=sys.stderr)
    return status


def info(_: argparse.Namespace) -> None:
    """Print versions, devices, kernels, the cache folder, and why the CUDA back end is off."""
    facts: dict[str, Callable[[], list[str]]] = {
        "cufa2": lambda: [__version__],
        "Python": lambda: [f"{platform.python_version()} on {platform.platform()}"],
        "NumPy": lambda: [np.__version__],
        "CuPy": _cupy,
        "NVRTC": lambda: [".".join(map(str, compiler.nvrtc_version()))],
        "driver": _driver,
        "CUDA back end": lambda: [f"off: {why}" if (why := device.why_no_cuda()) else "on"],
        "devices": _devices,
        "kernels": _kernels,
        "cache": lambda: [str(device.cache_dir())],
    }
    for name, ask in facts.items():
        try:
            lines = ask()
        except Exception as e:  # info is read when something is broken: it reports that, too
            lines = [f"not usable: {' '.join(str(e).split())}"]
        for i, line in enumerate(lines):
            print(f"{'' if i else name:15s}{line}")


def _driver() -> list[str]:
    major, minor = device.driver_cuda()
    return [f"CUDA {major}.{minor}" if major else "none found through CuPy"]


def _cupy() -> list[str]:
    packages = [d for d in metadata.distributions() if (d.name or "").startswith("cupy")]
    return [f"{d.version} ({d.name})" for d in packages] or ["not installed"]


def _devices() -> list[str]:
    if not device.cuda_available():
        return ["none"]
    infos = [device.info(i) for i in range(device.cupy().cuda.runtime.getDeviceCount())]
    return [
        f"{i}: {d.name}, {d.arch}, {d.sm_count} multiprocessors, {d.smem_per_block >> 10} KB "
        "shared memory a block" + ("" if d.cc >= (8, 0) else "; too old for every kernel")
        for i, d in enumerate(infos)
    ]


def _kernels() -> list[str]:
    return [
        f"{k.name} ({k.direction}): {', '.join(k.dtypes)}; head dims to {k.max_head_dim}; "
        f"compute capability {'.'.join(map(str, k.min_cc))} and newer; {k.file}"
        for k in KERNELS
    ]


def attend(args: argparse.Namespace) -> None:
    """Read q, k, v, compute attention, write the result."""
    for path in filter(None, (args.output, args.lse)):
        check_output(path)
    arrays = [cast(name, x, args.dtype) for name, x in read_qkv(args.inputs).items()]
    lengths = {
        name: read_lengths(path)
        for name in ("seqlens_q", "seqlens_k")
        if (path := getattr(args, name)) is not None
    }
    kind = args.device or _default_device(arrays[0].dtype.name)
    put = _to_device if kind == "cuda" else lambda x: x
    start = time.perf_counter()
    try:
        o, lse = flash_attention(
            *map(put, arrays),
            causal=args.causal_alignment or args.causal,
            window=args.window,
            softmax_scale=args.softmax_scale,
            softcap=args.softcap,
            layout=args.layout,
            precision=args.precision,
            return_lse=True,
            **{name: put(x) for name, x in lengths.items()},
        )
    except (ValueError, TypeError) as e:
        raise UserError(e) from e
    results = {name: x.get() if kind == "cuda" else x for name, x in (("o", o), ("lse", lse))}
    seconds = time.perf_counter() - start
    write(args.output, results)
    if args.lse:
        write(args.lse, {"lse": results["lse"]})
    shape = " x ".join(map(str, o.shape))
    print(f"{args.output}: {shape} {o.dtype} on {kind}, {1000 * seconds:.1f} ms")


def _default_device(dtype: str) -> str:
    return "cuda" if dtype in GPU_DTYPES and device.cuda_available() else "cpu"


def _to_device(x: np.ndarray) -> Any:
    return device.cupy().asarray(x.view(f"u{x.itemsize}")).view(x.dtype)  # as bits: any dtype


def compile_(args: argparse.Namespace) -> None:
    """Build cubins for the given architectures into a folder, two at a time."""

    def chosen(v: Variant) -> bool:
        wanted: list[tuple[Any, Any]] = [(args.direction, v.kernel.direction)]
        wanted.append((args.head_dim, v.head_dim))
        wanted.append((args.dtype, v.dtype))
        if v.kernel.policies:  # the others belong to every mask and score
            wanted += [(args.mask, v.mask), (args.score, v.score)]
        return all(not values or value in values for values, value in wanted)

    jobs = [
        (variant, arch)
        for arch in dict.fromkeys(args.arch)
        for variant in plan.variants(device.info_for_arch(arch))
        if chosen(variant)
    ]
    if not jobs:
        raise UserError("no kernel matches these choices; `cufa2 info` lists the kernels")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot make the folder {args.output}: {e.strerror}") from e
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:  # NVRTC lets other threads run while it compiles
        builds = [pool.submit(compiler.build, v, arch, folder=args.output) for v, arch in jobs]
        try:
            for i, done in enumerate(as_completed(builds), 1):
                cubin = done.result()
                if cubin.path.parent != args.output:  # built, but kept for this process only
                    raise UserError(f"cannot write into {args.output}")
                what = "already there" if cubin.cached else f"{cubin.seconds:.1f} s"
                print(
                    f"[{i}/{len(jobs)}] {cubin.name} {cubin.arch}: {what}, {cubin.registers} "
                    f"registers, {cubin.spill_bytes} bytes spilled",
                    flush=True,
                )
        finally:
            pool.shutdown(cancel_futures=True)
    print(f"{len(jobs)} kernels in {args.output}, {time.perf_counter() - start:.1f} s")
    folder = shlex.quote(str(args.output.resolve()))
    print(f"to use them, also without NVRTC: CUFA2_CACHE_DIR={folder}")


def bench(args: argparse.Namespace) -> None:
    """Check, then time, a few forward shapes on the back end that is there."""
    from .dense import plain_attention, reference64
    from .testing import assert_accurate, make_inputs, time_gpu

    kind = args.device or ("cuda" if device.cuda_available() else "cpu")
    dtype = args.dtype or ("bfloat16" if kind == "cuda" else "float32")
    put = _to_device if kind == "cuda" else lambda x: x

    def run_cpu(call: Callable[[], Any]) -> float:
        times: list[float] = []
        while len(times) < 3 or (sum(times) < 1.0 and len(times) < 20):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1000 * float(np.median(times))

    print(f"forward, {dtype}, {kind}: {device.info(0).name if kind == 'cuda' else 'NumPy'}")
    print(f"{'B':>4s}{'S':>7s}{'H':>4s}{'D':>5s}  {'mask':8s}{'ms':>10s}{'TFLOP/s':>10s}")
    for b, s, h, d in GPU_SHAPES if kind == "cuda" else CPU_SHAPES:
        for causal in (False, True):
            small = make_inputs((1, 130, 130, 1, 1, d, d), dtype)[:3]
            truth, plain = (f(*small, causal=causal)[0] for f in (reference64, plain_attention))
            o = flash_attention(*map(put, small), causal=causal)
            assert_accurate(o, truth, plain, f"head dim {d}")
            arrays = [put(x) for x in make_inputs((b, s, s, h, h, d, d), dtype)[:3]]
            call = functools.partial(flash_attention, *arrays, causal=causal)
            ms = time_gpu(call) if kind == "cuda" else run_cpu(call)
            rate = 4e-9 * b * h * s * s * d / (1 + causal) / ms
            mask = "causal" if causal else "full"
            print(f"{b:4d}{s:7d}{h:4d}{d:5d}  {mask:8s}{ms:10.3f}{rate:10.3g}", flush=True)


def _bound(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cufa2", description="Exact FlashAttention on NumPy, CuPy and DLPack arrays."
    )
    parser.add_argument("--version", action="version", version=f"cufa2 {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], None], help_: str, more: str = "") -> Any:
        name = run.__name__.rstrip("_")
        sub = commands.add_parser(name, help=help_, description=f"{help_}. {more}")
        sub.set_defaults(run=run)
        return sub.add_argument

    command(info, "Show versions, devices, kernels, and why a back end is off")

    add = command(
        attend,
        "Compute attention on arrays in files",
        "Inputs are three files q, k, v or one .npz or .safetensors file that holds q, k and v; "
        "float16, bfloat16, float32 or float64. A .npy file written by NumPy keeps bfloat16 only "
        "as raw items: read it with --dtype bfloat16. A .npz or .safetensors result holds o, lse.",
    )
    add("inputs", nargs="+", type=Path, metavar="FILE", help="q.npy k.npy v.npy, or one file")
    add("-o", "--output", type=Path, required=True, help="result: .npy, .npz or .safetensors")
    add("--lse", type=Path, metavar="FILE", help="also write the log-sum-exp here")
    add("--causal", action="store_true", help="hide future keys, aligned to the last key")
    add("--causal-alignment", choices=("bottom_right", "top_left"), help="causal, aligned so")
    add("--window", nargs=2, type=_bound, metavar=("LEFT", "RIGHT"), help="-1 or none: unbounded")
    add("--softmax-scale", type=float, metavar="X", help="default 1/sqrt(D)")
    add("--softcap", type=float, default=0.0, metavar="X", help="bound of the scores; 0: off")
    add("--layout", choices=LAYOUTS, default="bshd", help="axes of the arrays (default bshd)")
    add("--precision", choices=PRECISIONS, help="products of float32 arrays; default: as exact")
    add("--seqlens-q", type=Path, metavar="FILE", help="(B,) integers: real rows of q")
    add("--seqlens-k", type=Path, metavar="FILE", help="(B,) integers: real rows of k and v")
    add("--dtype", choices=DTYPES, help="convert the inputs to this first")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if it serves the dtype, else cpu")

    add = command(
        compile_,
        "Build kernels ahead of time",
        "Needs NVRTC, but no GPU. A machine without NVRTC uses the folder as CUFA2_CACHE_DIR. "
        "Covers head dims with D = Dv and, for float32, both precisions; without further choices "
        "all of them.",
    )
    add("--arch", action="append", required=True, choices=device.ARCHS, help="may be repeated")
    dims = sorted({d for k in KERNELS for d in k.head_dims})
    add("--head-dim", action="append", type=int, choices=dims, help="only this; may be repeated")
    add("--dtype", action="append", choices=GPU_DTYPES, help="only this; may be repeated")
    add("--direction", action="append", choices=tuple(STAGES), help="only this pass")
    add("--mask", action="append", choices=tuple(MASKS), help="only this; may be repeated")
    add("--score", action="append", choices=tuple(SCORES), help="only this; may be repeated")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to fill")

    add = command(bench, "Time a few forward shapes on this machine", "Results are checked first.")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on the CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
