"""cufa2: exact FlashAttention, forward and backward, for NVIDIA GPUs without PyTorch.

    from cufa2 import flash_attention
    o = flash_attention(q, k, v, causal=True)      # NumPy, CuPy, JAX, PyTorch or any DLPack array

Importing this package imports neither CuPy nor a framework and touches no GPU.
"""

from .api import FlashAttention2, flash_attention, flash_attention_backward
from .problem import CompileError, UnsupportedError

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "FlashAttention2",
    "UnsupportedError",
    "__version__",
    "flash_attention",
    "flash_attention_backward",
]
