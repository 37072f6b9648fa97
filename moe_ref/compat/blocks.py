"""A block of transformers becomes an equal `MoELayer`, and a layer becomes a block.

transformers is needed for what is handed in and out, not for importing this module.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from moe_ref.compat.families import FAMILIES, Family, config_of, dtype_name, family_of
from moe_ref.compat.names import block_state, logical_state
from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError
from moe_ref.layer import MoELayer

_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELU": "gelu", "ReLU": "relu"}
_NO_EFFECT = ("layout", "wire_format", "capacity_factor", "max_tokens", "tile_rows", "dtype")
"""Fields of MoEConfig that a block knows nothing of."""


def from_transformers(block: nn.Module, *, dtype: str | None = None, **layer_arguments: Any) -> MoELayer:
    """A layer that computes what this block computes, with a copy of its weights.

    In fp32 and fp64 ids are equal and outputs agree to rounding. In bf16 and fp16 they differ by rounding: the library
    computes the logits of Mixtral, Qwen and OLMoE in 16 bits and adds expert outputs in 16 bits in expert order; here
    the gate is fp32, and the sum is fp32 in choice order. DeepSeek's router stays in fp32 in both.

    Args:
        block: MoE block of one of the families (`model.model.layers[i].mlp`), packed as in transformers 5.
        dtype: of the layer; None for the block's.
        layer_arguments: fields of MoEConfig that are about buffers and the wire (layout, wire_format, max_tokens,
            tile_rows), and backend, world, placement, device of `MoELayer`; the device is the block's unless given.

    Raises:
        UsageError: no block of a known family; or it does something that the layer does not (an unknown activation,
            router jitter while training).
    """
    family = _family_of_block(block)
    values = _values_of_block(block, family)
    tensors = {name: value.detach() for name, value in block.state_dict().items()}
    stored = dtype_name(tensors["experts.down_proj"].dtype) if "experts.down_proj" in tensors else None
    if stored is None:
        raise UsageError(
            f"{type(block).__name__} has no packed experts.down_proj; blocks of transformers 5 are expected "
            "(checkpoints of any age load with moe_ref.compat.load_layer)"
        )
    names = ("layout", "wire_format", "max_tokens", "tile_rows")
    buffers = {name: layer_arguments.pop(name) for name in names if name in layer_arguments}
    config = config_of(family.model_type, values, dtype or stored, **buffers)
    layer_arguments.setdefault("device", tensors["experts.down_proj"].device)
    return layer_from_state(logical_state(tensors, family, config), family, config, **layer_arguments)


def layer_from_state(state: dict[str, Tensor], family: Family, config: MoEConfig, **layer_arguments: Any) -> MoELayer:
    """Layer with these weights of all E experts (see `logical_state`)."""
    layer = MoELayer(config, **layer_arguments)
    if family.fp32_router and config.torch_dtype.itemsize < 4:
        # The parameters are replaced before loading: copying into 16 bits would round them.
        layer.router.weight = nn.Parameter(layer.router.weight.detach().float())
    layer.load_logical_state_dict({name: value.to(layer.router.weight.device) for name, value in state.items()})
    return layer


def to_transformers(layer: MoELayer, target: Any) -> nn.Module:
    """A block of transformers with a copy of the layer's weights.

    Args:
        layer: with all E experts in this process (a simulated world).
        target: config object of the model (its `model_type` names the family); or the name of a family, for a config
            made from the layer.

    Raises:
        UsageError: the layer computes something that this family can't (the message names the fields), or holds only a
            part of the experts; ImportError: transformers is not installed.
    """
    if not isinstance(layer, MoELayer):
        raise UsageError(f"layer is a {type(layer).__name__}, expected a MoELayer")
    if len(layer.held_experts) != layer.config.experts:
        raise UsageError(
            f"this process holds {len(layer.held_experts)} of {layer.config.experts} experts; gather them first "
            "(a checkpoint of moe_ref.train has all of them) and use a layer in a simulated world"
        )
    model_type = target if isinstance(target, str) else getattr(target, "model_type", None)
    family = family_of(str(model_type))
    module = _modeling(family)
    if isinstance(target, str):
        target = _make_config(family, layer.config)
    wanted = config_of(family.model_type, target.to_dict(), layer.config.dtype)
    ours, theirs = layer.config.to_dict(), wanted.to_dict()
    if ours["num_groups"] == 1:  # how the score of the only group is computed doesn't matter
        theirs["group_score"] = ours["group_score"] if theirs["num_groups"] == 1 else theirs["group_score"]
    if not ours["selection_bias"] and family.model_type == "deepseek_v3":
        ours["selection_bias"] = True  # a bias of zeros chooses the same
    unequal = [name for name in ours if name not in _NO_EFFECT and ours[name] != theirs[name]]
    if layer.config.capacity_factor is not None:
        unequal.append("capacity_factor")
    if unequal:
        shown = ", ".join(f"{name} {ours[name]!r} ({family.model_type}: {theirs[name]!r})" for name in unequal)
        raise UsageError(f"a {family.model_type} block can't compute what this layer computes: {shown}")
    block = getattr(module, family.block)(target).to(layer.config.torch_dtype)
    router = getattr(block, family.router)
    if family.fp32_router and layer.config.torch_dtype.itemsize < 4:
        router.float()
    state = block_state({name: value.detach().clone() for name, value in layer.state_dict().items()}, family)
    if family.model_type == "deepseek_v3" and not layer.config.selection_bias:
        state[f"{family.router}.e_score_correction_bias"] = torch.zeros(layer.config.experts)
    block.load_state_dict(state)
    return block.to(layer.router.weight.device)


# --- what a block says about itself -------------------------------------------------------------------------------


def _family_of_block(block: nn.Module) -> Family:
    for family in FAMILIES.values():
        if type(block).__name__ == family.block:
            return family
    known = ", ".join(family.block for family in FAMILIES.values())
    raise UsageError(f"{type(block).__name__} is not a MoE block that is known here; expected one of {known}")


def _values_of_block(block: Any, family: Family) -> dict[str, Any]:
    """The block's settings under the names of config.json; blocks of most families keep no config."""
    gate, experts = getattr(block, family.router), block.experts
    values: dict[str, Any] = {
        "hidden_size": gate.weight.shape[1],
        "num_experts_per_tok": gate.top_k,
        family.experts[0]: gate.weight.shape[0],
    }
    if family.model_type == "gpt_oss":
        return values | {
            family.intermediate: experts.intermediate_size,
            "swiglu_alpha": experts.alpha,
            "swiglu_limit": experts.limit,
        }
    values[family.intermediate] = experts.intermediate_dim
    kind = type(experts.act_fn).__name__
    if kind not in _ACTIVATIONS:
        raise UsageError(f"the experts' activation is {kind}, expected SiLU, GELU (exact) or ReLU")
    values["hidden_act"] = _ACTIVATIONS[kind]
    if family.model_type == "mixtral" and block.training and block.jitter_noise > 0:
        raise UsageError(
            f"the block multiplies its input by random noise while training (router_jitter_noise "
            f"{block.jitter_noise}); the layer doesn't: call block.eval(), or set block.jitter_noise = 0"
        )
    for theirs, name in (
        ("norm_topk_prob", "norm_topk_prob"),
        ("routed_scaling_factor", "routed_scaling_factor"),
        ("topk_method", "topk_method"),
        ("num_group", "n_group"),
        ("topk_group", "topk_group"),
    ):
        if hasattr(gate, theirs):
            values[name] = getattr(gate, theirs)
    if family.model_type == "deepseek_v3":
        values["topk_method"] = "noaux_tc"
    if family.shared is not None:
        width = getattr(block, family.shared).down_proj.weight.shape[1]
        values["shared_expert_intermediate_size"] = width
        values["n_shared_experts"] = width // experts.intermediate_dim
    return values


def _modeling(family: Family) -> Any:
    try:
        return importlib.import_module(f"transformers.models.{family.model_type}.modeling_{family.model_type}")
    except ImportError as error:
        raise ImportError(f"transformers with {family.model_type} is needed: pip install -e '.[hf]'") from error


def _make_config(family: Family, config: MoEConfig) -> Any:
    """A transformers config whose MoE block computes what the layer does, as far as the family can."""
    module = importlib.import_module(f"transformers.models.{family.model_type}.configuration_{family.model_type}")
    name = next(n for n in vars(module) if n.endswith("Config") and n.startswith(family.block[:5]))
    heads = 2 if config.hidden % 2 == 0 else 1
    values: dict[str, Any] = {
        "hidden_size": config.hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_experts_per_tok": config.top_k,
        family.intermediate: config.intermediate,
        "hidden_act": config.activation,
    }
    values["num_local_experts" if family.model_type in ("mixtral", "gpt_oss") else "num_experts"] = config.experts
    if family.model_type.startswith("deepseek"):
        values.pop("num_experts")
        values |= {
            "n_routed_experts": config.experts,
            "n_shared_experts": config.shared_intermediate // config.intermediate,
            "routed_scaling_factor": config.routed_scaling,
            "n_group": config.num_groups,
            "topk_group": config.top_groups,
        }
        if family.model_type == "deepseek_v2":
            values["topk_method"] = "group_limited_greedy" if config.num_groups > 1 else "greedy"
    if family.model_type == "gpt_oss":
        values |= {"swiglu_limit": config.clamp_limit, "swiglu_alpha": config.clamp_alpha, "hidden_act": "silu"}
    if family.model_type not in ("mixtral", "gpt_oss", "deepseek_v2"):
        values["norm_topk_prob"] = config.renormalize
    if family.model_type == "qwen2_moe":
        values["shared_expert_intermediate_size"] = config.shared_intermediate
    return getattr(module, name)(**values)
