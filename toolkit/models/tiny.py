"""A tiny model: random weights and a byte tokenizer, in milliseconds and always the same.

For tests and explanations. Its logits are uncertain but not uniform (a few tokens lead, none is sure), and
depend on the whole prompt. Built as any mlx-lm model, so every family can be tried.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

BOS, EOS, VOCAB = 256, 257, 258  # ids 0 to 255 are the bytes
LARGEST = 20_000_000  # weights
SPREAD = 1.25  # standard deviation of the logits: largest probabilities near 0.1, entropy 4.7 nats

# What most families ask for, each by its own names; a family takes what it knows.
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "attention_bias": False, "mlp_bias": False, "use_bias": False,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 8192, "n_ctx": 8192, "n_inner": 128,
    "query_pre_attn_scalar": 16, "sliding_window": 4096, "sliding_window_pattern": 2, "logit_scale": 1.0,
    "partial_rotary_factor": 0.5, "rotary_dim": 8, "rotary_pct": 0.5, "attention_dropout": 0.0,
    "state_size": 16, "conv_kernel": 4, "time_step_rank": 4, "use_conv_bias": True, "expand": 2,
    "embedding_multiplier": 1.0, "attention_multiplier": 0.25, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "rotary_emb_base": 10000, "use_qkv_bias": False, "rope_scaling": None,
    "hidden_act": "silu", "qk_norm": True, "post_norm": True,
}  # fmt: skip


def build(seed: int, model_type: str, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A module of that family and its config; the caller guards the global generator."""
    from mlx_lm.utils import _get_classes

    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r}: must be an integer in [0, 2^64)")
    config = {"model_type": model_type, **CONFIG, **changes}
    mx.random.seed(seed)  # for the few families with initial values that `_weight` leaves
    try:
        kind, arguments = _get_classes(config)
        module = kind(arguments.from_dict(config))
        _randomize(module, seed)
    except SystemExit:  # one family does
        raise ValueError(f"model_type={model_type!r}: needs a package that isn't installed") from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"model_type={model_type!r} with the tiny configuration: {reason}; "
                         "give what it needs as keywords") from None  # fmt: skip
    return module, config


def _randomize(module: nn.Module, seed: int) -> None:
    module.eval()
    old = sorted(tree_flatten(module.parameters()))
    count = sum(array.size for _, array in old)
    if count > LARGEST:  # of a size that this family calls by another name; nothing is allocated yet
        raise ValueError(f"{count / 1e6:.0f} million weights, too many")
    rng = np.random.default_rng(seed)
    module.update(tree_unflatten([(path, _weight(rng, path, array)) for path, array in old]))
    _spread(module)
    mx.eval(module.parameters())


def _weight(rng: np.random.Generator, path: str, old: mx.array) -> mx.array:
    if old.ndim >= 2:  # by fan-in, so that every layer passes its input on at about the same size
        head = SPREAD if path.startswith("lm_head") else 1.0
        scale = 1.0 if "embed" in path or "wte" in path else head / math.sqrt(old.shape[-1])
    elif path.endswith("bias"):
        scale = 0.1
    else:
        return old  # norms: ones
    return mx.array((rng.standard_normal(old.shape) * scale).astype(np.float32))


def _spread(module: nn.Module) -> None:
    """Scale the output layer where a family's logits come out much wider or narrower than SPREAD.

    By powers of two, so that the weights are the same bits on every machine.
    """
    heads = [path for path, a in tree_flatten(module.parameters()) if a.ndim == 2 and a.shape[0] == VOCAB]
    for _ in range(4 if heads else 0):
        logits = module(mx.arange(16)[None] * 13).astype(mx.float32)
        step = round(math.log2(SPREAD / max(float(mx.std(logits[0, -1])), 1e-6)))
        if step == 0:
            return
        path = next((p for p in heads if "head" in p), heads[-1])
        old = dict(tree_flatten(module.parameters()))[path]
        module.update(tree_unflatten([(path, old * 2.0**step)]))


def byte_tokenizer() -> Any:
    """One token per byte, then BOS and EOS: an ordinary tokenizer, so mlx-lm's own tools take it too."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)} | {"<bos>": BOS, "<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>",
                                   clean_up_tokenization_spaces=False)  # fmt: skip
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
