"""A tiny random model of every model type that mlx-lm has.

`GENERIC` is what most families ask for, each by its own names; a family takes what it knows. `OWN` holds what
one family needs besides. Sliding windows and chunks are shorter than the prompts that the tests run, so that
they matter; `BEYOND` says why a type can't be built here.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as mlx_cache

VOCAB = 128
WINDOW = 6

GENERIC: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "use_bias": False,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "n_routed_experts": 4, "n_shared_experts": 1, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "shared_intermediate_size": 32, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_ctx": 512, "n_inner": 96,
    "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2, "logit_scale": 1.0,
    "partial_rotary_factor": 0.5, "rotary_dim": 8, "rotary_pct": 0.5, "attention_dropout": 0.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "use_qk_norm": True, "qk_norm": True, "post_norm": True, "rope_scaling": None, "hidden_act": "silu",
    "state_size": 16, "conv_kernel": 4, "time_step_rank": 4, "use_conv_bias": True, "expand": 2,
    "embedding_multiplier": 1.0, "attention_multiplier": 0.25, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "rotary_emb_base": 10000, "use_qkv_bias": False,
    "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4, "conv_bias": False, "conv_L_cache": 3,
}  # fmt: skip

_LONGCAT = {
    "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 96, "moe_topk": 2,
    "expert_ffn_hidden_size": 32, "zero_expert_num": 1, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "ngram_vocab_size_ratio": 2,
}  # fmt: skip
_QWEN35 = {"num_hidden_layers": 2, "num_experts": 0, "rope_parameters": {
    "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "partial_rotary_factor": 0.5,
}}  # fmt: skip
_LLAMA4_SCALING = {"rope_theta": 10000.0, "type": "default", "rope_type": "default",
                   "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 5}  # fmt: skip
_KDA = {"num_heads": 4, "head_dim": 16, "kda_layers": [1, 3], "full_attn_layers": [2],
        "short_conv_kernel_size": 4}  # fmt: skip
_TWO_ROPES = {"sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
              "full_attention": {"rope_theta": 50000.0, "rope_type": "default"}}  # fmt: skip
_SHARING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]

OWN: dict[str, dict[str, Any]] = {
    "afm7": {"hidden_dim": 64, "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": {"num_dense_layers": 1},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 1, "num_key_value_heads": 4},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1, "num_key_value_heads": 4},
    "bailing_moe_v3": {"layer_group_size": 2, "moe_shared_expert_intermediate_size": 32},
    "dbrx": {"d_model": 64, "n_layers": 3, "n_heads": 4,
             "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"topk_method": "greedy", "rope_scaling": {
        "type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}},
    "deepseek_v41": {"num_key_value_heads": 1, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16,
                     "scoring_func": "sqrtsoftplus", "compress_ratios": (0, 4, 4), "hc_mult": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
                     "moe_num_shared_experts": 1},
    "exaone4": {"num_hidden_layers": 4, "sliding_window_pattern": "LLG"},
    "exaone_moe": {"is_moe_layer": [False, True, True]},
    "gear": {"layer_types": ["conv_mixer", "full_attention", "sliding_attention"]},
    "gemma3n": {"num_kv_shared_layers": 2, "num_hidden_layers": 5, "layer_types": _SHARING,
                "vocab_size_per_layer_input": VOCAB, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0],
                "hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "altup_coef_clip": 120.0,
                "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8},
    "gemma4_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "global_head_dim": 32,
                    "layer_types": _SHARING,
                    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
                    "use_double_wide_mlp": True, "tie_word_embeddings": True},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "type": "default"}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4,
                         "mamba_d_head": 32, "mamba_proj_bias": False, "mamba_d_state": 16,
                         "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_conv_bias": True},
    "hunyuan": {"moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True,
                "cla_share_factor": 2, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
              "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2},
    "kimi_k3": {"num_experts_per_token": 2, "hidden_act": "situ", "linear_attn_config": _KDA,
                "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0, "attn_res_block_size": 2},
    "kimi_linear": {"num_experts_per_token": 2, "linear_attn_config": _KDA, "model_max_length": 8192},
    "laguna": {"mlp_layer_types": ["dense", "sparse", "sparse"], "partial_rotary_factor": 1.0,
               "rope_parameters": _TWO_ROPES},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_dim": 64, "block_multiple_of": 8,
             "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "use_expert_bias": True,
                 "num_dense_layers": 1},
    "lille-130m": {"block_size": 512, "n_kv_heads": 2},
    "llama": {"num_hidden_layers": 4,
              "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    "llama4": {"num_hidden_layers": 4, "num_experts_per_tok": 1, "attention_chunk_size": WINDOW,
               "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96, "floor_scale": 4},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0, 1]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba2": {"num_heads": 8, "n_groups": 1, "time_step_limit": (0.0, 100.0), "head_dim": 16,
               "intermediate_size": 128},
    "mellum": {"rope_parameters": _TWO_ROPES},
    "mimo": {"num_nextn_predict_layers": 0},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0, 1], "moe_layer_freq": [0, 1, 1],
                      "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
                      "sliding_window_size": WINDOW, "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4,
                      "swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_v_head_dim": 16},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minicpm3": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0, "rope_scaling": {
        "original_max_position_embeddings": 4096, "short_factor": 1.0, "long_factor": 1.5}},
    "minimax_m3_vl": {"dense_intermediate_size": 96, "moe_layer_freq": [0, 1, 1],
                      "sparse_attention_freq": [0, 1, 1], "index_block_size": 4, "index_topk_blocks": 2},
    "ministral3": {"rope_parameters": _LLAMA4_SCALING},
    "mistral4": {"rope_parameters": _LLAMA4_SCALING},
    "muse_glimmer": {"layer_rope_theta": [10000.0, 0.0, 10000.0], "rope_parameters": {"rope_theta": 10000.0}},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}}]},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-"], "mamba_num_heads": 4, "mamba_head_dim": 16,
                   "mamba_proj_bias": False, "ssm_state_size": 16, "n_groups": 1},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                    "linear_allow_neg_eigval": True, "linear_num_key_heads": 4},
    "openelm": {"num_transformer_layers": 3, "model_dim": 64, "ffn_dim_divisor": 16,
                "num_query_heads": [4, 4, 4], "num_kv_heads": [2, 2, 2], "ffn_multipliers": [1.0, 1.0, 1.5]},
    # It blots out ids near 100,300 whatever its vocabulary: with fewer it would write outside its array.
    "phi3small": {"vocab_size": 100352, "dense_attention_every_n_layers": 2, "ff_intermediate_size": 96,
                  "gegelu_limit": 20.0, "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 2,
                  "blocksparse_vert_stride": 2},
    "phixtral": {"num_vocab": VOCAB, "model_dim": 64, "num_heads": 4},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 16, "mamba_num_heads": 8, "mamba_d_state": 8},
    "qwen": {"kv_channels": 16, "intermediate_size": 192},
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35 | {"num_experts": 4},
    "recurrent_gemma": {"conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": WINDOW,
                        "block_types": ["recurrent", "attention", "recurrent"], "num_key_value_heads": 1},
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "smollm3": {"no_rope_layer_interval": 2, "no_rope_layers": [1, 0, 1]},
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": {
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        "full_attention": {"rope_theta": 50000.0, "rope_type": "default", "partial_rotary_factor": 0.5}}},
    "step3p5": {"num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 32,
                "moe_layers_enum": "1,2"},
}  # fmt: skip

# Wrappers (mostly of a vision model) around another type's text model.
WRAPPED: dict[str, str] = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n", "gemma4": "gemma4_text", "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_k3", "kimi_vl": "deepseek_v3", "lfm2-vl": "lfm2", "llama4": "llama4",
    "minimax_m3_vl": "minimax_m3_vl", "mistral3": "llama", "pixtral": "llama",
    "qwen2_vl": "qwen2", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe", "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}  # fmt: skip

BEYOND: dict[str, str] = {
    "olmo": "needs the package ai2-olmo, and exits Python without it",
    "bitnet": "its layers exist for Metal only",
    "muse_spark": "its attention exists for Metal only",
    "prism_hadamard_qwen35": "its weights exist only as packed 2-bit files",
}


def model_types() -> list[str]:
    """Every model type: the modules of mlx-lm that have a `Model`."""
    names = [m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return [n for n in sorted(names, key=str.lower) if n in BEYOND or _is_model(n)]


def _is_model(name: str) -> bool:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    return hasattr(module, "Model") and hasattr(module, "ModelArgs")


def config(model_type: str) -> dict[str, Any]:
    """The configuration that a model type is built with here."""
    inner = WRAPPED.get(model_type)
    if inner is None:
        return {"model_type": model_type, **GENERIC, **OWN.get(model_type, {})}
    text = {"model_type": inner, **GENERIC, **OWN.get(inner, {}), **OWN.get(model_type, {})}
    return {"model_type": model_type, "vocab_size": VOCAB, "text_config": text}


def build(model_type: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny model with seeded random float32 weights; `changes` to its configuration."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict({**config(model_type), **changes}))
    model.eval()
    rng = np.random.default_rng(seed)
    old = sorted(tree_flatten(model.parameters()))
    size = sum(a.size for _, a in old)
    if size > 8_000_000:
        raise ValueError(f"{size / 1e6:.0f} million weights, too many")
    model.update(tree_unflatten([(path, _weight(rng, path, a)) for path, a in old]))
    _spread(model)
    mx.eval(model.parameters())
    return model


def _weight(rng: np.random.Generator, path: str, old: mx.array) -> mx.array:
    if not mx.issubdtype(old.dtype, mx.floating):
        return old
    noise = rng.standard_normal(old.shape)
    if old.ndim >= 2:
        scale = 1.0 if "embed" in path or "wte" in path else 1.5 / math.sqrt(old.shape[-1])
        return mx.array((noise * scale).astype(np.float32))
    return (old + 0.1 * noise).astype(mx.float32)


def _spread(model: nn.Module) -> None:
    """Bring the logits to a spread near 2, so that a difference means the same in every family."""
    logits = model(mx.arange(16)[None] * 7, cache=mlx_cache.make_prompt_cache(model)).astype(mx.float32)
    factor = 2.0 / max(float(mx.std(logits[0, -1, :VOCAB])), 1e-6)
    heads = [p for p, a in tree_flatten(model.parameters()) if a.ndim == 2 and a.shape[0] == VOCAB]
    path = next((p for p in heads if "head" in p or "output" in p), None)
    if path is not None:
        weight = dict(tree_flatten(model.parameters()))[path]
        model.update(tree_unflatten([(path, weight * 2.0 ** round(math.log2(factor)))]))
