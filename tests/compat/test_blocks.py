"""Layers against transformers' own blocks: ids, outputs, gradients, and the way back."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[hf]')")

from hf_models import CASES, hf_on_a_rank, make_block, make_config, make_input
from ranks import run_ranks

from moe_ref import MoEConfig, MoELayer, Placement
from moe_ref.compat import FAMILIES, block_state, from_transformers, logical_state, to_transformers
from moe_ref.definition import relative_error
from moe_ref.errors import UsageError


def run_block(block, x):
    y = block(x)
    return y[0] if isinstance(y, tuple) else y


def their_ids(block, x) -> torch.Tensor:
    router = getattr(block, "gate", None) or block.router
    return router(x.reshape(-1, x.shape[-1]))[2]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", list(CASES))
def test_equal_to_the_block(name: str, seed: int) -> None:
    block = make_block(name, seed)
    layer = from_transformers(block)
    x = make_input(seed)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, stats = layer(mine, return_stats=True)
    want = run_block(block, theirs)

    ids_SK = stats.record.routing[0].expert_SK
    assert torch.equal(ids_SK.sort(-1).values, their_ids(block, x).sort(-1).values)
    if layer.config.top_k < layer.config.experts:
        assert stats.expert_load[3] == 0, "the starved expert got tokens: the case shows less than it should"
    assert relative_error(y, want) <= 1e-5

    scale = torch.empty_like(y).normal_(generator=torch.Generator().manual_seed(7))
    (y * scale).sum().backward()
    (want * scale).sum().backward()
    assert relative_error(mine.grad, theirs.grad) <= 1e-5
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in block.named_parameters()}
    grads |= {n: torch.zeros_like(b) for n, b in block.named_buffers()}
    family = next(f for f in FAMILIES.values() if f.block == type(block).__name__)
    ours = dict(layer.named_parameters())
    for key, gradient in logical_state(grads, family, layer.config).items():
        if key != "router.selection_bias":
            assert ours[key].grad is not None, key
            if name == "mixtral_top_1" and key == "router.weight":
                # One renormalised weight is 1 whatever the router says: its gradient is zero, up to rounding in both.
                assert float(ours[key].grad.norm()) <= 1e-5 * float(theirs.grad.norm())
                continue
            assert relative_error(ours[key].grad, gradient) <= 1e-5, key
    if layer.config.top_k < layer.config.experts:
        assert not ours["down_proj"].grad[3].any()


@pytest.mark.parametrize("name", list(CASES))
def test_there_and_back(name: str) -> None:
    block = make_block(name)
    layer = from_transformers(block)
    again = to_transformers(layer, make_config(name))
    assert type(again) is type(block)
    state = again.state_dict()
    assert set(state) == set(block.state_dict())
    for key, value in block.state_dict().items():
        assert torch.equal(state[key], value), key
    # By the family's name alone, with a config made from the layer.
    by_name = from_transformers(to_transformers(layer, CASES[name][0]))
    assert by_name.config == layer.config
    assert all(torch.equal(value, layer.state_dict()[key]) for key, value in by_name.state_dict().items())


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_on_ranks_with_replicas(name: str, one_thread, same_rows) -> None:
    block = make_block(name)
    alone = from_transformers(block)
    experts = alone.config.experts
    placement = Placement.from_replicas([[e % 4, (e + 1) % 4] for e in range(experts)], 4)
    layer = from_transformers(block, world=4, placement=placement)
    x = make_input()
    with torch.no_grad():
        assert same_rows(layer(x), alone(x))


def test_on_real_ranks(one_thread, same_rows) -> None:
    outputs = run_ranks(hf_on_a_rank, 2, ["qwen2_moe", "deepseek_v3"])
    for i, name in enumerate(("qwen2_moe", "deepseek_v3")):
        with torch.no_grad():
            want = from_transformers(make_block(name))(make_input())
        got = torch.cat([torch.from_numpy(output[i]) for output in outputs], dim=1)
        assert same_rows(got, want)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_bf16(name: str) -> None:
    block = make_block(name).to(torch.bfloat16)
    router = getattr(block, "gate", None) or block.router
    if name.startswith("deepseek"):
        router.float()
    layer = from_transformers(block)
    assert layer.config.dtype == "bfloat16"
    assert layer.router.weight.dtype == router.weight.dtype
    x = make_input().to(torch.bfloat16)
    with torch.no_grad():
        y, stats = layer(x, return_stats=True)
        want = run_block(block, x)
    same_S = (stats.record.routing[0].expert_SK.sort(-1).values == their_ids(block, x).sort(-1).values).all(-1)
    # Logits of 16 bits may choose another expert where two are close; tokens with equal choices must agree.
    assert same_S.float().mean() >= 0.9
    assert relative_error(y[0][same_S], want[0][same_S]) <= 2e-2
    if name.startswith("deepseek"):
        assert same_S.all()
        assert to_transformers(layer, make_config(name)).gate.weight.dtype == torch.float32


def test_selection_bias_stays_fp32() -> None:
    block = make_block("deepseek_v3").to(torch.bfloat16)
    block.gate.float()
    block.gate.e_score_correction_bias.fill_(0.1234567)
    layer = from_transformers(block)
    assert torch.equal(layer.router.selection_bias, block.gate.e_score_correction_bias)


def test_what_a_block_does_and_the_layer_does_not() -> None:
    from transformers.activations import ACT2FN

    block = make_block("mixtral")
    block.jitter_noise = 0.1
    with pytest.raises(UsageError, match=r"router_jitter_noise 0.1.*block.eval\(\)"):
        from_transformers(block.train())
    from_transformers(block.eval())
    block.experts.act_fn = ACT2FN["gelu_pytorch_tanh"]
    with pytest.raises(UsageError, match="activation is GELUTanh, expected SiLU"):
        from_transformers(block)
    with pytest.raises(UsageError, match="Linear is not a MoE block that is known here; expected one of Mixtral"):
        from_transformers(torch.nn.Linear(2, 2))
    group_limited = make_block("deepseek_v2")
    group_limited.gate.topk_method = "noisy"
    with pytest.raises(UsageError, match="topk_method is 'noisy', expected one of"):
        from_transformers(group_limited)


def test_what_a_family_can_not_compute() -> None:
    layer = MoELayer(MoEConfig(hidden=8, intermediate=8, experts=4, top_k=2, scoring="sigmoid"))
    with pytest.raises(UsageError, match=r"mixtral block can't compute.*scoring 'sigmoid' \(mixtral: 'softmax'\)"):
        to_transformers(layer, "mixtral")
    with pytest.raises(UsageError, match="model_type is 'llama', expected one of mixtral"):
        to_transformers(layer, "llama")
    capped = MoELayer(MoEConfig(hidden=8, intermediate=8, experts=4, top_k=2, capacity_factor=1.0))
    with pytest.raises(UsageError, match="capacity_factor"):
        to_transformers(capped, "mixtral")


def test_layout_is_stated_and_not_guessed() -> None:
    """hidden = 2 x width: [E, 2D, H] and [E, H, 2D] have the same shape, and only the family says which it is."""
    config = MoEConfig(hidden=8, intermediate=4, experts=2, top_k=1, renormalize=True)
    layer = MoELayer(config, seed=3)
    state = {name: value.detach() for name, value in layer.state_dict().items()}
    mixtral, gpt_oss = FAMILIES["mixtral"], FAMILIES["gpt_oss"]
    straight, turned = block_state(state, mixtral), block_state(state, gpt_oss)
    assert straight["experts.gate_up_proj"].shape == turned["experts.gate_up_proj"].shape == (2, 8, 8)
    assert torch.equal(straight["experts.gate_up_proj"], turned["experts.gate_up_proj"].transpose(1, 2))
    assert torch.equal(logical_state(turned, gpt_oss, config)["gate_up_proj"], state["gate_up_proj"])


def test_without_transformers(monkeypatch) -> None:
    layer = MoELayer(MoEConfig(hidden=8, intermediate=8, experts=4, top_k=2))
    for name in [n for n in sys.modules if n.startswith("transformers.models.mixtral")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers.models.mixtral.modeling_mixtral", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[hf\]'"):
        to_transformers(layer, "mixtral")


def test_a_block_with_parameters_of_its_own_is_refused() -> None:
    """An adapter, say: leaving it out would give another output without a word."""
    block = make_block("qwen3_moe")
    block.experts.register_parameter("lora_A", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(UsageError, match=r"has tensors that are not the family's.*experts\.lora_A"):
        from_transformers(block)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_router_of_64_bits_stays_one(name: str) -> None:
    layer = from_transformers(make_block(name).double())
    with torch.no_grad():
        layer.router.weight += 1e-12
    back = to_transformers(layer, make_config(name))
    assert torch.equal(back.gate.weight, layer.router.weight)


def test_buffers_are_sized_where_the_block_is_taken() -> None:
    """max_tokens, layout and tile_rows are the layer's, not the block's."""
    layer = from_transformers(make_block("mixtral"), max_tokens=77, tile_rows=16)
    assert (layer.config.max_tokens, layer.config.tile_rows) == (77, 16)
