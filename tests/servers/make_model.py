# SPDX-License-Identifier: Apache-2.0
"""Write a tiny sliding-window model with random weights. Run by models.py inside the servers' environment.

usage: make_model.py ARCHITECTURE KV_HEADS FOLDER
"""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

LAYERS = 4
WINDOW = 64
VOCABULARY = 512
HEAD = 32
TYPES = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def common(kv_heads: int) -> dict[str, Any]:
    return dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
                num_attention_heads=8, num_key_value_heads=kv_heads, max_position_embeddings=4096, rms_norm_eps=1e-6,
                tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0, sliding_window=WINDOW,
                layer_types=TYPES)


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def gptoss(kv_heads: int) -> tuple[Any, dict[str, Any]]:
    """Alternating sliding-window and full attention, attention sinks, experts."""
    config = transformers.GptOssConfig(**common(kv_heads), head_dim=HEAD, num_local_experts=4, num_experts_per_tok=2)
    # In the files of the real models, and read by SGLang, but not part of the configuration class.
    return transformers.GptOssForCausalLM(config), {"swiglu_limit": 7.0}


def mellum(kv_heads: int) -> tuple[Any, dict[str, Any]]:
    """Alternating sliding-window and full attention, nothing else."""
    config = transformers.MellumConfig(
        **common(kv_heads), head_dim=HEAD, mlp_layer_types=["dense"] * LAYERS, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64,
        rope_parameters={"sliding_attention": rope(10000.0), "full_attention": rope(500000.0)})
    return transformers.MellumForCausalLM(config), {}


def mimo(kv_heads: int) -> tuple[Any, dict[str, Any]]:
    """K and V rows of different width, and twice as many KV heads in the sliding-window layers."""
    key, value = 48, HEAD
    config = transformers.MiMoV2FlashConfig(
        **common(kv_heads), head_dim=key, v_head_dim=value, mlp_layer_types=["dense"] * LAYERS, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64,
        rope_parameters={"sliding_attention": rope(10000.0, partial_rotary_factor=1.0),
                         "full_attention": rope(500000.0, partial_rotary_factor=1.0)})
    # The names that SGLang reads are those of the model's own repository.
    names = dict(hybrid_layer_pattern=[int(kind == "sliding_attention") for kind in TYPES],
                 moe_layer_freq=[0] * LAYERS, swa_num_attention_heads=8, swa_num_key_value_heads=2 * kv_heads,
                 swa_head_dim=key, swa_v_head_dim=value, sliding_window_size=WINDOW, layernorm_epsilon=1e-6,
                 rope_theta=500000.0, swa_rope_theta=10000.0, partial_rotary_factor=1.0,
                 add_swa_attention_sink_bias=False, add_full_attention_sink_bias=False, scoring_func="sigmoid",
                 topk_method="noaux_tc", rope_scaling=None)
    return transformers.MiMoV2FlashForCausalLM(config), names


def randomise(model: Any, sinks: bool) -> None:
    """Weights large enough that attention is not uniform and the best token stands out."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks") and not sinks:
                weight.fill_(-1e9)
            elif weight.dim() > 1:
                weight.normal_(0.0, 0.12)
            elif "norm" in name:
                weight.copy_(1.0 + 0.1 * torch.randn_like(weight))
            else:
                weight.normal_(0.0, 0.05)


def tokenizer() -> Any:
    """Servers want one; it learns its merges from a source file of the standard library."""
    model = Tokenizer(BPE(unk_token=None))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "<s>", "</s>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    model.train_from_iterator(Path(os.__file__).read_text().splitlines(), trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>",
                                                pad_token="<pad>")


def main() -> None:
    architecture, kv_heads, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(1234)
    model, names = {"gptoss": gptoss, "mellum": mellum, "mimo": mimo}[architecture](kv_heads)
    model = model.to(torch.float32)
    randomise(model, sinks=architecture == "gptoss")
    model.save_pretrained(folder)
    if names:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **names}, indent=1))
    tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main()
