"""Tiny models of every family with random weights, for the tests of moe_ref.compat; nothing is downloaded."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

HIDDEN, WIDTH = 34, 20
_COMMON = {"vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
           "num_key_value_heads": 2, "num_experts_per_tok": 3}  # fmt: skip
_PLAIN = {**_COMMON, "head_dim": 16, "intermediate_size": WIDTH}
_DEEPSEEK = {**_COMMON, "intermediate_size": 40, "moe_intermediate_size": WIDTH, "n_routed_experts": 12,
             "n_shared_experts": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
             "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**_PLAIN, "num_local_experts": 7}),
    "mixtral_top_1": ("mixtral", {**_PLAIN, "num_local_experts": 7, "num_experts_per_tok": 1}),
    "mixtral_all": ("mixtral", {**_PLAIN, "num_local_experts": 7, "num_experts_per_tok": 7}),
    "mixtral_gelu": ("mixtral", {**_PLAIN, "num_local_experts": 7, "hidden_act": "gelu"}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_PLAIN, "num_experts": 9, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": 26},
    ),
    "qwen2_moe_renormalized": (
        "qwen2_moe",
        {**_PLAIN, "num_experts": 9, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": 26,
         "norm_topk_prob": True},
    ),
    "qwen3_moe": ("qwen3_moe", {**_PLAIN, "num_experts": 9, "moe_intermediate_size": WIDTH, "norm_topk_prob": True}),
    "qwen3_moe_raw": ("qwen3_moe", {**_PLAIN, "num_experts": 9, "moe_intermediate_size": WIDTH}),
    "qwen3_moe_top_1": (
        "qwen3_moe",
        {**_PLAIN, "num_experts": 9, "moe_intermediate_size": WIDTH, "num_experts_per_tok": 1},
    ),
    "olmoe": ("olmoe", {**{k: v for k, v in _PLAIN.items() if k != "head_dim"}, "num_experts": 9}),
    "deepseek_v2": ("deepseek_v2", {**_DEEPSEEK, "topk_method": "greedy", "routed_scaling_factor": 2.5}),
    "deepseek_v2_groups": (
        "deepseek_v2",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3_raw": ("deepseek_v3", {**_DEEPSEEK, "norm_topk_prob": False, "routed_scaling_factor": 1.5}),
    "deepseek_v3_all": ("deepseek_v3", {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 12}),
    "gpt_oss": ("gpt_oss", {**_PLAIN, "num_local_experts": 7}),
    "gpt_oss_top_1": ("gpt_oss", {**_PLAIN, "num_local_experts": 7, "num_experts_per_tok": 1}),
    "gpt_oss_clamped": ("gpt_oss", {**_PLAIN, "num_local_experts": 7, "swiglu_limit": 0.5}),
}  # fmt: skip
"""Name -> (model_type, config values)."""


def make_config(name: str, **changes: Any) -> Any:
    """The transformers config of a case."""
    model_type, values = CASES[name][0], CASES[name][1] | changes
    module = importlib.import_module(f"transformers.models.{model_type}.configuration_{model_type}")
    kind = next(
        v for k, v in vars(module).items() if k.endswith("Config") and getattr(v, "model_type", "") == model_type
    )
    config = kind(**values)
    # The library's grouped products need sizes that are multiples of 16 bytes; its plain loop takes any.
    config._experts_implementation = "eager"
    return config


def make_model(name: str, seed: int = 0) -> Any:
    """A whole model with two decoder layers; layer 1 has the MoE block."""
    model_type, _ = CASES[name]
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    kind = next(v for k, v in vars(modeling).items() if k.endswith("ForCausalLM"))
    torch.manual_seed(seed)
    model = kind(make_config(name))
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            scatter_weights(layer.mlp, seed)
    return model


def make_block(name: str, seed: int = 0) -> nn.Module:
    """The MoE block of layer 1, expert 3 starved."""
    return make_model(name, seed).model.layers[1].mlp


def block_on(
    name: str, device: torch.device, dtype: torch.dtype, changes: dict[str, Any], tokens: int, seed: int = 0
) -> tuple[nn.Module, torch.Tensor]:
    """A block of other sizes on a device, its router as the library keeps it in models of 16 bits; and an input."""
    from moe_ref.compat import FAMILIES

    config = make_config(name, **changes)
    family = FAMILIES[config.model_type]
    modeling = importlib.import_module(f"transformers.models.{family.model_type}.modeling_{family.model_type}")
    with device:
        block = getattr(modeling, family.block)(config)
    scatter_weights(block, seed)
    router = getattr(block, family.router)
    kept = {key: value.detach().clone() for key, value in router.state_dict().items()}
    block.to(dtype).eval().requires_grad_(False)
    if family.fp32_router:
        router.float()
        router.load_state_dict(kept)
    generator = torch.Generator(device=device).manual_seed(1000 + seed)
    x = torch.randn(1, tokens, config.hidden_size, device=device, generator=generator).to(dtype)
    x[..., 0] = 1.0
    return block, x


@torch.no_grad()
def scatter_weights(block: Any, seed: int) -> None:
    """Weights that show every error: of order one over the root of the fan-in, biases of order one, a starved expert.

    DeepSeek-V3's selection biases are negative for most experts, so a rejected group's score must be -inf, not 0.
    """
    router = getattr(block, "gate", None) or block.router
    device, hidden = router.weight.device, router.weight.shape[1]
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, value in block.named_parameters():
        scale = 1.0 if name.endswith("bias") else 1.5 * hidden**-0.5
        value.copy_(torch.empty(value.shape, device=device).normal_(0, scale, generator=generator))
    router.weight.mul_(2)
    if hasattr(router, "e_score_correction_bias"):
        bias = torch.empty(router.weight.shape[0], device=device).uniform_(-2.5, 0.2, generator=generator)
        bias[3] = -50.0
        router.e_score_correction_bias.copy_(bias)
    else:
        router.weight[3] = 0
        router.weight[3, 0] = -60.0
        if hasattr(router, "bias"):
            router.bias[3] = 0


def make_input(seed: int = 0, tokens: int = 37) -> torch.Tensor:
    """[1, tokens, HIDDEN]; the first channel is one, by which the starved expert is starved."""
    x = torch.empty(1, tokens, HIDDEN).normal_(0, 1, generator=torch.Generator().manual_seed(1000 + seed))
    x[..., 0] = 1.0
    return x


def hf_on_a_rank(rank: int, names: list[str]) -> list[Any]:
    """Output of this rank's part of the input, from a layer whose experts are spread over two real ranks."""
    from moe_ref import DistributedWorld, Placement
    from moe_ref.compat import from_transformers

    outputs = []
    for name in names:
        block = make_block(name)
        experts = from_transformers(block).config.experts
        placement = Placement.from_replicas([[e % 2] if e % 3 else [0, 1] for e in range(experts)], 2)
        layer = from_transformers(block, world=DistributedWorld(), placement=placement)
        part = make_input()[:, :20] if rank == 0 else make_input()[:, 20:]
        with torch.no_grad():
            outputs.append(layer(part).numpy())
    return outputs
