"""The public calls. Docstrings live here; the work is done in the rooms behind."""

from __future__ import annotations

from typing import Any

from .attention import FlashAttention2, launcher
from .problem import Options

__all__ = ["FlashAttention2", "flash_attention", "flash_attention_backward"]


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    layout: str = "bshd",
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse_out: Any = None,
    stream: Any = None,
) -> Any:
    """Compute exact softmax attention without ever storing the scores.

        s[i,j] = softmax_scale * sum_d q[i,d] k[j,d]
        s      = softcap * tanh(s / softcap)               if softcap > 0
        s[i,j] = -inf                                      where key j is masked for query i
        lse[i] = log sum_j exp(s[i,j])
        o[i]   = sum_j exp(s[i,j] - lse[i]) v[j]

    A row with no visible key gives o = 0 and lse = -inf, never NaN. NaN and Inf in masked or
    padded positions never reach a result.

    Args:
        q: (B, Sq, H, D) in layout "bshd", (B, H, Sq, D) in "bhsd", or flat (B*H, Sq, D). NumPy,
            CuPy, PyTorch, JAX or any array with __dlpack__; float16, bfloat16, float32 or
            float64, any strides.
        k: keys (B, Sk, Hk, D); H must be a multiple of Hk: query head h reads key head
            h // (H // Hk).
        v: values (B, Sk, Hk, Dv); Dv may differ from D.
        causal: True or "bottom_right": key j is visible to query i iff j <= i + Sk - Sq.
            "top_left": iff j <= i. Default False: all keys are.
        window: (left, right), both inclusive: i + shift - left <= j <= i + shift + right, where
            shift is Sk - Sq, or 0 with causal="top_left". None or -1 is unbounded.
        softmax_scale: factor of the scores; default 1/sqrt(D). Zero and negative are legal; at
            most 1e30 in magnitude.
        softcap: bound of the scores by tanh, 1e-30 to 1e30; default 0, off.
        seqlens_q, seqlens_k: (B,) int32 on the data's device: only so many rows of each batch
            entry are real. Masks then use these lengths. Rows beyond give o = 0, lse = -inf.
            Values are checked on the CPU and clamped to the array on a GPU.
        layout: "bshd" (default) or "bhsd".
        precision: of the products of float32 arrays, the only ones that take it. None (default)
            keeps float32 accuracy. "tf32" is faster: a GPU rounds their operands to TF32, 11
            significant bits, a relative error of 2^-11 at most; sums and softmax stay float32.
            NumPy takes it and keeps float32 accuracy.
        return_lse: also return lse, (B, H, Sq) float32 (float64 for float64 inputs), natural log;
            (B*H, Sq) for flat arrays.
        out, lse_out: arrays to write to, of the result's shape and dtype. Any strides; must not
            overlap each other or an input.
        stream: where GPU work is queued: a CuPy or torch stream, an object with __cuda_stream__,
            or an address. Default: the current stream of torch for torch tensors, else of CuPy.
            Work on it follows what the arrays' library has queued so far. The call does not wait
            for the GPU.

    Returns:
        o, shaped like q with Dv columns, or (o, lse), in q's library and dtype; `out` itself if
        given. Libraries other than NumPy, CuPy, torch and JAX get a NumPy or CuPy array.

    Raises:
        ValueError: a shape, length, option or device is wrong; names the value and the rule.
        TypeError: not an array of a supported dtype.
        UnsupportedError: legal, but no kernel on this GPU does it; lists the reasons.
        CompileError: NVRTC is missing, does not fit the driver, or failed.

    On a GPU a tensor is copied, once, only if its last axis is not contiguous, its rows are not
    16-byte aligned or its head dim is not a whole number of 16-byte pieces. Memory: inputs,
    outputs, such work copies and, where few queries make keys split among multiprocessors,
    a float32 part of o and lse a split; nothing of size Sq x Sk. A sequence has at most 2^29
    rows there.

    Source: Dao, "FlashAttention-2" (2023), arXiv 2307.08691.
    """
    options = Options.make(
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        layout=layout,
        precision=precision,
    )
    o, lse = launcher(options).forward(
        q,
        k,
        v,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        out=out,
        lse_out=lse_out,
        stream=stream,
        want_lse=return_lse,
    )
    return (o, lse) if return_lse else o


def flash_attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    seqlens_q: Any = None,
    seqlens_k: Any = None,
    layout: str = "bshd",
    precision: str | None = None,
    dlse: Any = None,
    deterministic: bool = False,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Compute the gradients of `flash_attention` with respect to q, k and v.

        P = exp(s - lse);  dP = do v^T;  delta = rowsum(do * o) - dlse;  dS = P * (dP - delta)
        (softcap: dS *= 1 - tanh(s / softcap)^2)
        dq = softmax_scale * dS k;  dk = softmax_scale * dS^T q;  dv = P^T do

    dk and dv are summed over the query heads that share a key head.

    Args:
        do: gradient of o, same shape and dtype as o.
        q, k, v, o, lse: inputs and results of the forward call, with its options.
        causal, window, softmax_scale, softcap, seqlens_q, seqlens_k, layout, precision, stream:
            as given to `flash_attention`.
        dlse: gradient of lse, same shape and dtype as lse; default none.
        deterministic: bit-identical results from run to run (NumPy's always are). On a GPU the
            default adds dq up by atomics, whose order varies; deterministic calls compute it in a
            pass of its own: 1.2 to 1.5 times the time and, of 16-bit inputs, less memory.

    Returns:
        (dq, dk, dv), each with the shape and dtype of its input, in q's library. Padding rows
        and rows without a visible key give exact zeros.

    Raises:
        ValueError, TypeError, CompileError: as `flash_attention`.
        UnsupportedError: as `flash_attention`.

    Work memory on a GPU, in bytes, R being Sq rounded up to a multiple of 64: 8 B H R (float64:
    16 B H R), and for 16-bit inputs unless deterministic 4 B H R D more for the float32 sums of
    dq; float32 and float64 add them up in dq itself.

    Source: Dao, "FlashAttention-2" (2023), arXiv 2307.08691, section 3.2.
    """
    options = Options.make(
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        layout=layout,
        precision=precision,
        deterministic=deterministic,
    )
    return launcher(options).backward(
        do,
        q,
        k,
        v,
        o,
        lse,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        dlse=dlse,
        stream=stream,
    )
