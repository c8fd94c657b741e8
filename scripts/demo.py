"""Embed sentences with MiniLM, every attention through cufa2, and compare each with float64.

Run it through scripts/demo.sh, which installs what it needs. The exit status is 1 if any attention
differs from plain dense float64 attention on the same q, k and v by more than the stated bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minilm
import numpy as np

import cufa2
from cufa2 import device
from cufa2.dense import plain_attention, reference64
from cufa2.kernels import KERNELS
from cufa2.testing import EPS, numpy_dtype, to_numpy

SENTENCES = Path(__file__).with_name("sentences.txt")
FIXTURE_SENTENCES = (7, 0, 12, 3, 6)  # 5 to 131 tokens, 250 in all: the file stays below 2 MB
FIXTURE_LAYERS = (0, 2, 5)
FLOAT32_BOUND = 1e-5  # of every float32 attention output, absolute
TABLE = 8  # sentences in the printed matrix


@dataclass
class Call:
    """One attention as it was computed: NumPy copies of its inputs and its result."""

    layer: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    lengths: np.ndarray
    o: np.ndarray


class Attention:
    """cufa2.flash_attention over padded batches, timed, and kept for the comparison if asked."""

    def __init__(self, xp: Any, keep: bool) -> None:
        self.xp = xp
        self.keep = keep
        self.seconds = 0.0
        self.calls: list[Call] = []

    def __call__(
        self,
        layer: int,
        q: minilm.Array,
        k: minilm.Array,
        v: minilm.Array,
        lengths: minilm.Array,
    ) -> minilm.Array:
        synchronize(self.xp)
        start = time.perf_counter()
        o = cufa2.flash_attention(q, k, v, seqlens_q=lengths, seqlens_k=lengths)
        synchronize(self.xp)
        self.seconds += time.perf_counter() - start
        if self.keep:
            self.calls.append(Call(layer, *(to_numpy(x) for x in (q, k, v, lengths, o))))
        return o


def main(argv: list[str] | None = None) -> int:
    """Run with these arguments (default: the command line's) and return the exit status."""
    args = parse_arguments(argv)
    on_gpu = bool(gpu_dtypes()) if args.device == "auto" else args.device == "gpu"
    xp: Any = device.cupy() if on_gpu else np
    exact_type = not on_gpu or "float32" in gpu_dtypes()
    dtype = args.dtype or ("float32" if exact_type else "float16")
    print(environment(xp), flush=True)

    folder = args.model or minilm.model_folder()
    sentences = [line for line in args.text.read_text("utf-8").splitlines() if line.strip()]
    if not sentences:
        raise SystemExit(f"{args.text} holds no sentence")
    encoder = minilm.Encoder(folder, xp, np.float32, attention_dtype=numpy_dtype(dtype))
    batches = [
        encoder.tokenize(sentences[i : i + args.batch])
        for i in range(0, len(sentences), args.batch)
    ]
    real = sum(int(b.lengths.sum()) for b in batches)
    padded = sum(b.ids.size for b in batches)
    print(
        f"{len(sentences)} sentences, {real} tokens, {padded} with padding, {len(batches)} batches"
        f"; attention in {dtype} over {'CuPy' if on_gpu else 'NumPy'} arrays",
        flush=True,
    )

    first = Attention(xp, keep=True)
    embed(encoder, batches, first)  # compiles and loads the kernels on a GPU
    again = Attention(xp, keep=False)
    start = time.perf_counter()
    embeddings = embed(encoder, batches, again)
    seconds = time.perf_counter() - start
    similarity = embeddings @ embeddings.T
    print_similarity(sentences, similarity)
    print(
        f"\ntime: {seconds:.3f} s, of which {again.seconds:.3f} s in {len(first.calls)} attentions"
        f" (first pass: {first.seconds:.3f} s in attention)"
    )

    worst, bound, passed = compare(first.calls, dtype)
    exact = embed(minilm.Encoder(folder, np, np.float64), batches, float64_attention)
    apart = largest(embeddings - exact)
    print(
        f"largest difference from float64 attention over all {minilm.LAYERS} layers: {worst:.2e}"
        f" (bound {bound:.2e}): {'passed' if passed else 'FAILED'}"
    )
    print(f"largest difference of the embeddings from an encoder all in float64: {apart:.2e}")

    if args.save_fixture:
        save_fixture(args.save_fixture, first.calls, args.batch)
    if args.json:
        figures = {
            "environment": environment(xp),
            "dtype": dtype,
            "sentences": sentences,
            "tokens": real,
            "padded_tokens": padded,
            "seconds": seconds,
            "attention_seconds": again.seconds,
            "first_attention_seconds": first.seconds,
            "attention_difference": worst,
            "attention_bound": bound,
            "embedding_difference": apart,
            "passed": passed,
            "similarity": similarity.round(6).tolist(),
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return 0 if passed else 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", type=Path, default=SENTENCES, help="sentences, one a line")
    text.add_argument(
        "--save-fixture", type=Path, help="write q, k, v of a few layers of the built-in sentences"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="of the attention; the default is float32 where this device has it, else float16",
    )
    parser.add_argument("--batch", type=int, default=8, help="sentences in a batch (8)")
    parser.add_argument("--model", type=Path, help="folder of model.safetensors, tokenizer.json")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.batch < 1:
        parser.error(f"--batch={args.batch} is less than 1")
    return args


def gpu_dtypes() -> set[str]:
    """Dtypes whose forward pass has a kernel for the first GPU; empty where there is none."""
    if not device.cuda_available():
        return set()
    rows = (r for r in KERNELS if r.direction == "forward" and r.min_cc <= device.info(0).cc)
    return {dtype for row in rows for dtype in row.dtypes}


def synchronize(xp: Any) -> None:
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def environment(xp: Any) -> str:
    parts = [f"cufa2 {cufa2.__version__}", f"Python {platform.python_version()}"]
    parts.append(f"NumPy {np.__version__}")
    if xp is np:
        parts.append(f"{platform.machine()} CPU, {os.cpu_count()} cores")
        parts.append(f"no GPU: {device.why_no_cuda() or 'not asked for'}")
    else:
        parts.append(f"CuPy {xp.__version__}")
        parts.append(device.info(xp.cuda.Device().id).name)
    return ", ".join(parts)


def embed(
    encoder: minilm.Encoder, batches: list[minilm.Tokens], attention: minilm.Attention
) -> np.ndarray:
    return np.concatenate([to_numpy(encoder.embed(batch, attention)) for batch in batches])


def float64_attention(
    layer: int, q: minilm.Array, k: minilm.Array, v: minilm.Array, lengths: minilm.Array
) -> np.ndarray:
    return reference64(q, k, v, seqlens_q=lengths, seqlens_k=lengths)[0]


def print_similarity(sentences: list[str], similarity: np.ndarray) -> None:
    """Each sentence's nearest other one, then the matrix of the first few."""
    print("\nnearest sentence of each (cosine):")
    others = similarity - 2 * np.eye(len(sentences))
    for i, j in enumerate(others.argmax(axis=1)):
        near = f"{similarity[i, j]:5.2f}  {short(sentences[j])}" if i != j else ""
        print(f"{i:3}  {short(sentences[i]):42} {near}")
    n = min(TABLE, len(sentences))
    print(f"\nsimilarity of the first {n}:")
    print("    " + "".join(f"{j:6}" for j in range(n)))
    for i in range(n):
        print(f"{i:4}" + "".join(f"{x:6.2f}" for x in similarity[i, :n]))


def short(sentence: str) -> str:
    return sentence if len(sentence) <= 42 else sentence[:39].rstrip() + "..."


def compare(calls: list[Call], dtype: str) -> tuple[float, float, bool]:
    """Error and bound of the call that comes closest to its bound, and whether all keep theirs."""
    figures = []
    for call in calls:
        lengths = {"seqlens_q": call.lengths, "seqlens_k": call.lengths}
        exact, _ = reference64(call.q, call.k, call.v, **lengths)
        bound = FLOAT32_BOUND
        if dtype != "float32":
            # The accuracy rule of cufa2.testing.assert_accurate, without stopping at a failure.
            plain, _ = plain_attention(call.q, call.k, call.v, **lengths)
            bound = 2 * largest(plain - exact) + EPS[dtype] * largest(exact)
        figures.append((largest(call.o - exact), bound))
    error, bound = max(
        figures, key=lambda figure: np.nan_to_num(figure[0] / figure[1], nan=np.inf)
    )
    return error, bound, all(error <= bound for error, bound in figures)


def largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


def save_fixture(path: Path, calls: list[Call], batch: int) -> None:
    """Write q, k, v of a few layers and sentences: (layers, tokens, 12, 32) float16, no padding.

    Token rows of all sentences follow each other; `lengths` says how many each has.
    """
    sentences = [divmod(i, batch) for i in FIXTURE_SENTENCES]
    by_batch = [[c for c in calls if c.layer == layer] for layer in FIXTURE_LAYERS]
    arrays = {
        "layers": np.array(FIXTURE_LAYERS, np.int32),
        "lengths": np.array([by_batch[0][i].lengths[b] for i, b in sentences], np.int32),
    }
    for name in ("q", "k", "v"):
        rows = [
            [getattr(of_layer[i], name)[b, : of_layer[i].lengths[b]] for i, b in sentences]
            for of_layer in by_batch
        ]
        arrays[name] = np.stack([np.concatenate(r) for r in rows]).astype(np.float16)
    np.savez_compressed(path, allow_pickle=False, **arrays)
    print(f"wrote {path}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
