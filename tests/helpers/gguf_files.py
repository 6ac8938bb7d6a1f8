"""A GGUF writer of our own for tests: small files of every tensor type, and whole tiny models.

Written from the format's description, apart from the code under test: what is read back was not written by
the same functions.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

NUMBER = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q2_K": 10, "Q6_K": 14, "BF16": 30}
BYTES = {"F32": (4, 1), "F16": (2, 1), "BF16": (2, 1), "Q4_0": (18, 32), "Q4_1": (20, 32), "Q8_0": (34, 32),
         "Q2_K": (84, 256), "Q6_K": (210, 256)}  # fmt: skip


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]],
          version: int = 3) -> Path:  # fmt: skip
    """Tensors by name: shape (outermost first), type number, bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    offset, body = 0, b""
    for name, (shape, number, data) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", n) for n in reversed(shape)) + struct.pack("<IQ", number, offset)
        data += bytes(-len(data) % 32)
        body, offset = body + data, offset + len(data)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    items = [_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)


def random_blocks(kind: str, weights: int, seed: int = 0) -> bytes:
    """Bytes of that many weights; scales are moderate halves, the rest is any bits."""
    size, per = BYTES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (weights // per, size), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q6_K": [208]}
    for at in halves.get(kind, []):
        blocks[:, at : at + 2] = rng.normal(0, 0.01, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    if kind in ("F32", "F16", "BF16"):
        numbers = rng.normal(0, 1, weights).astype("<f4")
        raw = {"F32": numbers, "F16": numbers.astype("<f2"), "BF16": numbers.view("<u4") >> 16}[kind]
        return (raw.astype("<u2") if kind == "BF16" else raw).tobytes()
    return blocks.tobytes()


def dequantize(kind: str, data: bytes) -> np.ndarray:
    """The same weights by the format's own formulas, in float32."""
    if kind == "F32":
        return np.frombuffer(data, "<f4")
    if kind == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    b = np.frombuffer(data, np.uint8).reshape(-1, BYTES[kind][0])

    def half(at: int) -> np.ndarray:
        return b[:, at : at + 2].copy().view("<f2").astype(np.float32)

    if kind == "Q8_0":
        return (half(0) * b[:, 2:].view(np.int8)).reshape(-1)
    if kind in ("Q4_0", "Q4_1"):
        codes = b[:, 2 if kind == "Q4_0" else 4 :]
        q = np.concatenate([codes & 15, codes >> 4], 1).astype(np.float32)  # low nibbles come first
        return (half(0) * (q - 8) if kind == "Q4_0" else half(0) * q + half(2)).reshape(-1)
    if kind == "Q2_K":
        scales, q = b[:, :16], b[:, 16:80].reshape(-1, 2, 1, 32)
        q = (q >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3).reshape(-1, 16, 16)
        d, m = half(80) * (scales & 15), half(82) * (scales >> 4)
        return (d[..., None] * q - m[..., None]).reshape(-1)
    assert kind == "Q6_K"
    low, high, scales = b[:, :128].reshape(-1, 2, 1, 64), b[:, 128:192].reshape(-1, 2, 1, 32), b[:, 192:208]
    low = (low >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1) & 15).reshape(-1, 2, 4, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    q = (low | high << 4).astype(np.int8).reshape(-1, 16, 16) - 32
    return (half(208)[..., None] * scales.view(np.int8)[..., None] * q).reshape(-1)


def quantize(kind: str, weights: np.ndarray) -> bytes:
    """Round float32 weights [rows, columns] to Q4_1 or Q8_0 blocks."""
    blocks = weights.reshape(-1, 32)
    if kind == "Q8_0":
        d = (np.abs(blocks).max(1, keepdims=True) / 127).astype("<f2")
        q = np.round(blocks / np.maximum(d.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
        return np.concatenate([d.view(np.uint8), q.view(np.uint8)], 1).tobytes()
    low = blocks.min(1, keepdims=True).astype("<f2")
    d = ((blocks.max(1, keepdims=True) - low) / 15).astype("<f2")
    q = np.round((blocks - low) / np.maximum(d.astype(np.float32), 1e-12)).clip(0, 15).astype(np.uint8)
    codes = q[:, :16] | q[:, 16:] << 4
    return np.concatenate([d.view(np.uint8), low.view(np.uint8), codes], 1).tobytes()


def byte_vocabulary() -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with one merge, BOS and EOS."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    pieces = [chr(i) if i in printable else chr(next(spare)) for i in range(256)] + ["<bos>", "<eos>"]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3], "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257}  # fmt: skip


_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_model(
    path: Path,
    model: Any,
    kind: str = "F32",
    *,
    permute: bool = True,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A whole model as llama.cpp's converter would write it, matrices as `kind`."""
    config = model.config
    family = config["model_type"]
    tensors = {name: (array.shape, 0, array.astype("<f4").tobytes()) for name, array in (extra or {}).items()}
    for name, array in tree_flatten(model.module.parameters()):
        stem, suffix = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            out = f"blk.{layer}.{_NAMES[stem]}.{suffix}"
        else:
            out = f"{_NAMES[stem]}.{suffix}"
        weights = np.array(array.astype(mx.float32))
        if permute and family == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
            # As llama.cpp has it: each head's two halves interleaved.
            split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
            weights = np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))
        matrix = weights.ndim == 2 and kind != "F32"
        data = quantize(kind, weights) if matrix else weights.astype("<f4").tobytes()
        tensors[out] = (weights.shape, NUMBER[kind] if matrix else 0, data)
    return write(path, model_metadata(config) | (metadata or {}), tensors)


def model_metadata(config: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    family = config["model_type"]
    return {
        "general.architecture": family,
        **{f"{family}.{k}": v for k, v in keys.items()},
        **byte_vocabulary(),
    }
