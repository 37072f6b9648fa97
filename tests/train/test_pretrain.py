"""Training: it learns, it is deterministic, and a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from moe_ref import MoEConfig, text
from moe_ref.errors import UsageError
from moe_ref.train.model import ByteMoEConfig
from moe_ref.train.pretrain import Corpus, Recipe, draw_batch, evaluate, report, train

# Small products: a second thread costs more than it gives, above all on a busy machine.
pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ByteMoEConfig(
    MoEConfig(hidden=32, intermediate=16, experts=8, top_k=2),
    blocks=2,
    moe_blocks=(1,),
    dense_intermediate=32,
    context=32,
)
RECIPE = Recipe(steps=12, batch=8, warm_up=4)


@pytest.fixture
def corpora() -> list[Corpus]:
    return [Corpus.of("prose", text.excerpt()[:40_000]), Corpus.of("tail", text.excerpt()[40_000:])]


def test_the_end_of_a_text_is_held_out() -> None:
    corpus = Corpus.of("x", bytes(range(100)) * 10)
    assert len(corpus.train) == 900
    assert len(corpus.held_out) == 100
    assert bytes(corpus.train.tolist() + corpus.held_out.tolist()) == bytes(range(100)) * 10


def test_unigram_bits_of_a_known_distribution() -> None:
    data = b"aab" * 3000
    assert Corpus.of("x", data).unigram_bits(8) == pytest.approx(0.98, abs=0.06)


def test_batches_are_a_function_of_seed_and_step(corpora: list[Corpus]) -> None:
    batch = draw_batch(corpora, RECIPE, 32, 5)
    assert batch.shape == (8, 33)
    assert torch.equal(batch, draw_batch(corpora, RECIPE, 32, 5))
    assert not torch.equal(batch, draw_batch(corpora, RECIPE, 32, 6))
    assert not torch.equal(batch, draw_batch(corpora, dataclasses.replace(RECIPE, seed=1), 32, 5))
    for row, sequence in enumerate(batch):
        assert bytes(sequence.tolist()) in bytes(corpora[row % 2].train.tolist())


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    recipe = Recipe(steps=1000, warm_up=100, learning_rate=1.0)
    rates = [recipe.rate(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[99] == rates[100] == pytest.approx(1.0)
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4)


def test_it_learns(corpora: list[Corpus], tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, steps=120, learning_rate=1e-2)
    model, progress = train(SMALL, recipe, corpora, tmp_path / "state.safetensors", every=20)
    record = report(model, corpora, recipe, progress)
    assert [entry["step"] for entry in record["training_curve"]] == [20, 40, 60, 80, 100, 120]
    held_out = record["held_out"]["prose"]
    assert held_out["bits_per_byte"] < 0.95 * held_out["unigram_bits_per_byte"]
    assert sum(held_out["expert_load"][0]) == 128 * 32 * 2


def test_a_stopped_run_goes_on_bit_for_bit(corpora: list[Corpus], tmp_path: Path) -> None:
    whole, _ = train(SMALL, RECIPE, corpora, tmp_path / "whole.safetensors", every=4)
    again, _ = train(SMALL, RECIPE, corpora, tmp_path / "again.safetensors", every=4)

    state = tmp_path / "state.safetensors"
    stops = iter([False] * 9 + [True])

    def draw_until_stopped(*arguments):
        if next(stops):
            raise KeyboardInterrupt
        return draw_batch(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_ref.train.pretrain.draw_batch", draw_until_stopped)
        with pytest.raises(KeyboardInterrupt):
            train(SMALL, RECIPE, corpora, state, every=4)
    resumed, progress = train(SMALL, RECIPE, corpora, state, resume=True, every=4)
    assert [entry["step"] for entry in progress["curve"]] == [4, 8, 12]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), f"two runs differ in {name}"
        assert torch.equal(value, resumed.state_dict()[name]), f"the resumed run differs in {name}"


def test_another_recipe_does_not_resume(corpora: list[Corpus], tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    train(SMALL, dataclasses.replace(RECIPE, steps=1), corpora, state)
    with pytest.raises(UsageError, match=r"is of a run with .*'steps': 1,.*resume with the same options"):
        train(SMALL, RECIPE, corpora, state, resume=True)


def test_nothing_to_resume(corpora: list[Corpus], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no state .*; start without --resume"):
        train(SMALL, RECIPE, corpora, tmp_path / "gone.safetensors", resume=True)


def test_evaluation_counts_every_route(corpora: list[Corpus], tmp_path: Path) -> None:
    model, _ = train(SMALL, dataclasses.replace(RECIPE, steps=1), corpora, tmp_path / "state.safetensors")
    bits, loads = evaluate(model, corpora[0])
    assert 7.0 < bits < 10.0
    assert sum(loads[0]) == 128 * 32 * SMALL.moe.top_k
