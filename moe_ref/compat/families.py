"""What the families of Hugging Face MoE models compute, as configs of our layer.

A family is known by its `model_type`. What differs between families is what the router does with its logits, whether
there is a shared expert, and how expert tensors are called and laid out; the expert itself is a gated FFN everywhere.

    family        scores   chosen among            renormalised        scaled  shared expert
    mixtral       softmax  scores                  always              -       -
    qwen2_moe     softmax  scores                  norm_topk_prob      -       times sigmoid(x w)
    qwen3_moe     softmax  scores                  norm_topk_prob      -       -
    olmoe         softmax  scores                  norm_topk_prob      -       -
    deepseek_v2   softmax  scores of best groups   never               yes     weight 1
    deepseek_v3   sigmoid  scores + bias, groups   norm_topk_prob      yes     weight 1
    gpt_oss       softmax  logits                  by the softmax      -       -

In 16 bits the library and this layer round at different places: see `from_transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_ref.config import DTYPES, MoEConfig
from moe_ref.errors import UsageError


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        model_type: in config.json.
        block: class of the MoE block in transformers.
        inner: name of the block inside a decoder layer of a checkpoint.
        router: name of the router inside the block.
        experts, intermediate: config keys of E and D; the first one that is there counts.
        unpacked: names of gate, up and down of one expert in unpacked checkpoints; None if there are none.
        transposed: packed experts are [E, in, out] instead of [E, out, in].
        shared: name of the shared expert inside the block, or None.
        fp32_router: router weight and selection bias are kept in fp32 in models of 16 bits.
    """

    model_type: str
    block: str
    inner: str = "mlp"
    router: str = "gate"
    experts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    intermediate: str = "moe_intermediate_size"
    unpacked: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    shared: str | None = None
    fp32_router: bool = False


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("mixtral", "MixtralSparseMoeBlock", "block_sparse_moe", intermediate="intermediate_size",
               unpacked=("w1", "w3", "w2")),
        Family("qwen2_moe", "Qwen2MoeSparseMoeBlock", shared="shared_expert"),
        Family("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
        Family("olmoe", "OlmoeSparseMoeBlock", intermediate="intermediate_size"),
        Family("deepseek_v2", "DeepseekV2Moe", shared="shared_experts", fp32_router=True),
        Family("deepseek_v3", "DeepseekV3MoE", shared="shared_experts", fp32_router=True),
        Family("gpt_oss", "GptOssMLP", router="router", intermediate="intermediate_size", unpacked=None,
               transposed=True),
    )
}  # fmt: skip
"""Every family by its model_type."""


def family_of(model_type: str) -> Family:
    """The family of this model_type.

    Raises:
        UsageError: it is not known; the message lists those that are.
    """
    if model_type not in FAMILIES:
        raise UsageError(f"model_type is {model_type!r}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def config_of(model_type: str, values: Mapping[str, Any], dtype: str = "float32", **buffers: Any) -> MoEConfig:
    """Config of the MoE layer that a model of this family has.

    Args:
        model_type: the family.
        values: the model's config, as in its config.json; what is missing or None has the default of the library.
        dtype: of the layer.
        buffers: further fields of MoEConfig that don't change what is computed (layout, max_tokens, tile_rows).

    Raises:
        UsageError: an unknown family, a missing value, or a value that the layer can't compute; the message names it.
    """
    family = family_of(model_type)

    def get(name: str, default: Any = None) -> Any:
        value = values.get(name)
        return default if value is None else value

    def need(*names: str) -> int:
        for name in names:
            value = values.get(name)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool):
                    raise UsageError(f"{name} of the {model_type} config is {value!r}, expected an integer")
                return value
        raise UsageError(f"the {model_type} config has none of {', '.join(names)}; it can't be the model's config.json")

    def number(name: str, default: float, kind: type = float) -> Any:
        value = get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, kind)):
            what = "a number" if kind is float else "an integer"
            raise UsageError(f"{name} of the {model_type} config is {value!r}, expected {what}")
        return kind(value)

    def flag(name: str, default: bool) -> bool:
        value = get(name, default)
        if not isinstance(value, bool):
            raise UsageError(f"{name} of the {model_type} config is {value!r}, expected true or false")
        return value

    def legal(name: str, default: Any, *accepted: Any) -> Any:
        value = get(name, default)
        if value not in accepted:
            raise UsageError(f"{name} is {value!r}, expected one of {list(accepted)} for {model_type}")
        return value

    intermediate = need(family.intermediate)
    fields: dict[str, Any] = {
        "hidden": need("hidden_size"),
        "intermediate": intermediate,
        "experts": need(*family.experts),
        "top_k": need("num_experts_per_tok"),
        "dtype": dtype,
        **buffers,
    }
    if model_type == "gpt_oss":
        fields |= {
            "activation": "clamped_swiglu",
            "interleaved": True,
            "expert_bias": True,
            "router_bias": True,
            "top_k_order": "before_scores",
            "renormalize": False,
            "clamp_limit": number("swiglu_limit", 7.0),
            "clamp_alpha": number("swiglu_alpha", 1.702),
        }
        return MoEConfig(**fields)
    fields["activation"] = legal("hidden_act", "silu", "silu", "gelu", "relu")
    if model_type == "mixtral":
        fields["renormalize"] = True
    elif model_type in ("qwen2_moe", "qwen3_moe", "olmoe"):
        fields["renormalize"] = flag("norm_topk_prob", False)
    if model_type == "qwen2_moe":
        fields |= {"shared_intermediate": need("shared_expert_intermediate_size"), "shared_gate": True}
    if family.shared == "shared_experts":
        fields["shared_intermediate"] = intermediate * number("n_shared_experts", 0, int)
        fields["routed_scaling"] = number("routed_scaling_factor", 1.0 if model_type == "deepseek_v2" else 2.5)
    if model_type == "deepseek_v2":
        legal("scoring_func", "softmax", "softmax")
        fields["renormalize"] = False  # the library never reads the flag
        if legal("topk_method", "greedy", "greedy", "group_limited_greedy") == "group_limited_greedy":
            fields |= {"num_groups": need("n_group"), "top_groups": need("topk_group"), "group_score": "max"}
    elif model_type == "deepseek_v3":
        legal("scoring_func", "sigmoid", "sigmoid")
        legal("topk_method", "noaux_tc", "noaux_tc")
        fields |= {
            "scoring": "sigmoid",
            "selection_bias": True,
            "renormalize": flag("norm_topk_prob", True),
            "num_groups": number("n_group", 8, int),
            "top_groups": number("topk_group", 4, int),
            "group_score": "top2_sum",
        }
    return MoEConfig(**fields)


def dtype_name(dtype: torch.dtype | str) -> str:
    """Name of a dtype as MoEConfig has it.

    Raises:
        UsageError: the layer does not compute in it.
    """
    plain = str(dtype).removeprefix("torch.")
    if plain not in DTYPES:
        raise UsageError(f"the weights are {plain}, expected one of {', '.join(DTYPES)}; convert them first")
    return plain
