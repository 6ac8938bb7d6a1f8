"""A GGUF file's model as an ordinary Hugging Face one: config, weights, tokenizer.

For the llama, qwen2 and qwen3 families. The result is what mlx-lm and transformers read: q and k rows are put
back in their order, so rope is the usual one. Nothing here downloads or knows about caches.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm.auto import tqdm

from . import gguf_tokenizer
from .gguf import FAMILIES, Header, Tensor, check, read_header

GROUP = 32  # weights per scale in Q4_0, Q4_1 and Q8_0


def config(header: Header) -> dict[str, Any]:
    """The model's config.json, with the names that mlx-lm and transformers use."""
    check(header)
    get, meta = header.of_family, header.metadata
    names = {t.name: t for t in header.tensors}
    for key in ("attention.head_count", "embedding_length", "block_count", "feed_forward_length",
                "attention.layer_norm_rms_epsilon", "context_length"):  # fmt: skip
        if not isinstance(get(key), int | float):
            raise ValueError(f"{header.path}: {header.architecture}.{key}={get(key)!r}: must be a number")
    if "token_embd.weight" not in names:
        raise ValueError(f"{header.path}: has no tensor token_embd.weight, so it's no language model")
    heads, dim = get("attention.head_count"), get("embedding_length")
    out = {
        "model_type": header.architecture,
        "architectures": [FAMILIES[header.architecture]],
        "hidden_size": dim,
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", dim // heads),
        "rms_norm_eps": _short(get("attention.layer_norm_rms_epsilon")),
        "vocab_size": names["token_embd.weight"].shape[0],
        "max_position_embeddings": get("context_length"),
        "rope_theta": _short(get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "rope_scaling": _rope_scaling(header),
        "hidden_act": "silu",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }  # fmt: skip
    return {key: value for key, value in out.items() if value is not None}


def _rope_scaling(header: Header) -> dict[str, Any] | None:
    """Rope scaling as config.json has it; a kind that can't be written so is refused."""
    get = header.of_family
    for tensor in header.tensors:
        if tensor.name == "rope_freqs.weight":
            return _llama3_scaling(header, tensor)
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{header.path}: rope scaling {kind!r}: must be none, linear, yarn or llama3")
    original = get("rope.scaling.original_context_length")
    scaling = {"rope_type": kind, "type": kind, "factor": get("rope.scaling.factor", 1.0)}
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def _llama3_scaling(header: Header, tensor: Tensor) -> dict[str, Any]:
    """Llama 3's settings, from the factor per frequency that a file has in their place."""
    factors = np.fromfile(header.path, "<f4", tensor.shape[0], offset=header.data + tensor.offset)
    base = header.of_family("rope.freq_base", 10000.0)
    wavelength = 2 * np.pi * base ** (np.arange(len(factors)) / len(factors))
    low, high, original, factor = 1.0, 4.0, 8192, float(factors.max())
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ValueError(f"{header.path}: rope_freqs.weight: not Llama 3's rule with factor {factor:g}, "
                         "the only one that a config can say")  # fmt: skip
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original}  # fmt: skip


def _short(x: float) -> float:
    """A float32 as the shortest decimal that reads back to it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(x)))


_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def rename(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor, its suffix (weight, bias, scales, biases) kept."""
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{suffix}"
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{suffix}"
    return None


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undo the reordering of q and k rows that GGUF's llama has for interleaved rope.

    Rows are output features, so packed weights, scales and biases are reordered alike.
    """
    half = rows.shape[0] // heads // 2
    rest = rows.shape[1:]
    return rows.reshape(heads, half, 2, *rest).swapaxes(1, 2).reshape(heads * half * 2, *rest)


def weights(header: Header, *, dequantize: bool = True, progress: bool = False) -> dict[str, mx.array]:
    """All tensors, under Hugging Face names and in its row order.

    Parameters
    ----------
    dequantize : bool
        Quantized tensors as float32; else as MLX's packed weight, scales and biases.
    """
    counts = config(header)  # checks the file, so it comes before MLX opens it
    heads = {"q_proj": counts["num_attention_heads"], "k_proj": counts["num_key_value_heads"]}
    arrays = mx.load(str(header.path))
    out = {}
    for tensor in tqdm(header.tensors, desc=f"Reading {header.path.name}", disable=not progress, leave=False):
        if tensor.name == "rope_freqs.weight":  # in the config
            continue
        name = rename(tensor.name)
        if name is None:
            raise ValueError(f"{header.path}: tensor {tensor.name}: not one that "
                             f"{header.architecture} models have")  # fmt: skip
        for suffix, array in _parts(arrays, tensor, dequantize).items():
            if header.architecture == "llama" and (part := name.split(".")[-2]) in heads:
                array = unpermute(array, heads[part])
            mx.eval(array)
            out[f"{name.rpartition('.')[0]}.{suffix}"] = array
    return out


def _parts(arrays: dict[str, mx.array], tensor: Tensor, dequantize: bool) -> dict[str, mx.array]:
    """A tensor as one array, or where it's packed and shall stay so, as three."""
    stem, _, suffix = tensor.name.rpartition(".")
    array = arrays[tensor.name]
    if f"{stem}.scales" not in arrays:
        return {suffix: array.astype(mx.float32) if dequantize else array}
    scales, biases = arrays[f"{stem}.scales"], arrays[f"{stem}.biases"]
    if not dequantize:
        return {"weight": array, "scales": scales, "biases": biases}
    bits = array.shape[-1] * 32 // tensor.shape[-1]
    # float32 scales first: dequantizing with the file's float16 ones would round two weights in five.
    return {"weight": mx.dequantize(array, scales.astype(mx.float32), biases.astype(mx.float32),
                                    group_size=GROUP, bits=bits)}  # fmt: skip


def quantized_types(header: Header) -> list[str]:
    """The quantized types in a file, by name."""
    return sorted({t.type for t in header.tensors} - {"F32", "F16", "BF16"})


def convert(path: Path, directory: Path, *, progress: bool = False) -> None:
    """Write a GGUF file's model to a directory that mlx-lm and transformers can read.

    Weights are float32: 16 bits would round 42 % of a Q4_1 file's values.
    """
    header = read_header(path)
    arrays = weights(header, progress=progress)
    extra = {"gguf_types": quantized_types(header)}
    (directory / "config.json").write_text(json.dumps(config(header) | extra, indent=2))
    gguf_tokenizer.write(header.metadata, directory, str(path))
    target = directory / "model.safetensors"
    try:
        mx.save_safetensors(str(target), arrays, metadata={"format": "mlx"})
    except RuntimeError as error:  # MLX's "[write] Unable to write ... bytes to file."
        code = errno.ENOSPC if "[write]" in str(error) else errno.EIO
        raise OSError(code, os.strerror(code), target.name) from error
