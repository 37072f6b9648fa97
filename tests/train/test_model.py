"""The byte-level MoE model and the hidden states that come out of it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from moe_ref import MoEConfig, text
from moe_ref.layer import MoELayer
from moe_ref.train.model import ByteMoE, ByteMoEConfig, hidden_states, moe_layer, norm, rotate

# Small products: a second thread costs more than it gives, above all on a busy machine.
pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ByteMoEConfig(MoEConfig(hidden=32, intermediate=16, experts=8, top_k=2), moe_blocks=(1, 2), context=32)


def small_model(config: ByteMoEConfig = SMALL) -> ByteMoE:
    torch.manual_seed(3)
    return ByteMoE(config).eval()


def some_bytes(batch: int, length: int) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_config_round_trip_and_bad_values() -> None:
    assert ByteMoEConfig.from_dict(SMALL.to_dict()) == SMALL
    moe = SMALL.moe
    with pytest.raises(ValueError, match=r"moe_blocks is \[3\], expected ascending block numbers in \[0, 3\)"):
        ByteMoEConfig(moe, moe_blocks=(3,))
    with pytest.raises(ValueError, match=r"moe_blocks is"):
        ByteMoEConfig(moe, moe_blocks=())
    with pytest.raises(ValueError, match=r"heads is 3, expected a divisor of moe.hidden / 2 = 16"):
        ByteMoEConfig(moe, heads=3)
    with pytest.raises(ValueError, match=r"context is 0, expected an integer of at least 1"):
        ByteMoEConfig(moe, context=0)
    with pytest.raises(ValueError, match=r"not the config of a byte-level MoE model"):
        ByteMoEConfig.from_dict({"blocks": 2})
    with pytest.raises(ValueError, match=r"unknown config fields"):
        ByteMoEConfig.from_dict({**SMALL.to_dict(), "moe": {"width": 3}})


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turned_query, turned_key = (rotate(v.expand(1, 1, 20, 8))[0, 0] for v in (query, key))
    torch.testing.assert_close(turned_query.norm(dim=1), query.norm().expand(20))
    products = turned_query @ turned_key.T
    for distance in (-7, 0, 3, 11):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert products.std() > 1e-3


def test_model_is_causal() -> None:
    model, byte_BL = small_model(), some_bytes(2, 32)
    changed_BL = byte_BL.clone()
    changed_BL[:, 20:] = (changed_BL[:, 20:] + 1) % 256
    with torch.no_grad():
        before, _ = model(byte_BL)
        after, _ = model(changed_BL)
    assert before.shape == (2, 32, 256)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before[:, 20:], after[:, 20:], rtol=1e-2, atol=1e-2)


def test_fresh_model_is_about_as_good_as_a_uniform_guess() -> None:
    byte_BL = some_bytes(4, 32)
    logits, _ = small_model()(byte_BL[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), byte_BL[:, 1:].flatten())
    assert math.log(256) - 0.3 < loss.item() < math.log(256) + 1.5


def test_statistics_and_gradients_reach_every_parameter() -> None:
    model = small_model()
    logits, all_stats = model(some_bytes(4, 32))
    assert [int(stats.expert_load.sum()) for stats in all_stats] == [4 * 32 * 2] * 2
    loss = logits.logsumexp(-1).mean() + sum(stats.balance_loss + stats.z_loss for stats in all_stats)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.norm()) > 0, name


def test_too_long_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequences of 33 bytes, expected at most the context of 32"):
        small_model()(some_bytes(1, 33))


@pytest.mark.parametrize(("moe_index", "block"), [(-1, 2), (0, 1), (1, 2)])
def test_hidden_states_are_what_the_layer_is_given(moe_index: int, block: int) -> None:
    model, data = small_model(), text.excerpt()[:96]
    seen = []
    layer = model.blocks[block].ffn
    assert isinstance(layer, MoELayer)
    layer.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        model(torch.tensor(list(data)).view(3, 32))
    assert moe_layer(model, moe_index) == (block, layer)
    torch.testing.assert_close(hidden_states(model, data, 96, moe_index), seen[0].flatten(0, 1), rtol=1e-5, atol=1e-6)


def test_bits_of_hidden_states_do_not_depend_on_how_much_text_follows() -> None:
    model, data = small_model(), text.excerpt()
    long = hidden_states(model, data, 3000)
    assert torch.equal(long, hidden_states(model, data, 3000))
    for tokens in (0, 1, 31, 32, 33, 1025):
        assert torch.equal(hidden_states(model, data, tokens), long[:tokens])


def test_hidden_states_are_normed() -> None:
    x_SH = hidden_states(small_model(), text.excerpt(), 64)
    torch.testing.assert_close(x_SH.square().mean(dim=1), torch.ones(64), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(norm(x_SH), x_SH, rtol=1e-3, atol=1e-3)


def test_hidden_states_of_missing_text_or_layer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 tokens asked for, but the text has 3 bytes"):
        hidden_states(small_model(), b"abc", 5)
    with pytest.raises(ValueError, match=r"moe_index is 2, but the model has 2 MoE layers"):
        hidden_states(small_model(), b"abc", 3, moe_index=2)
