"""Checkpoints: round trip, bad files, and what the shipped one can do."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from moe_ref import MoEConfig, text
from moe_ref.errors import UsageError
from moe_ref.train.checkpoint import FORMAT, METADATA_KEY, load_checkpoint, save_checkpoint, tiny_moe
from moe_ref.train.model import ByteMoE, ByteMoEConfig, hidden_states, moe_layer

# Small products: a second thread costs more than it gives, above all on a busy machine.
pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ByteMoEConfig(MoEConfig(hidden=32, intermediate=16, experts=8, top_k=2), context=32)
SHIPPED = Path(text.__file__).parent / "assets" / "tiny_moe.safetensors"


def test_round_trip(tmp_path: Path) -> None:
    model, path = ByteMoE(SMALL), tmp_path / "model.safetensors"
    save_checkpoint(path, model, {"why": "test"}, torch.float32)
    state = torch.get_rng_state()
    loaded, notes = load_checkpoint(path)
    assert torch.equal(state, torch.get_rng_state()), "loading moved the caller's random state"
    assert loaded.config == SMALL
    assert notes == {"why": "test"}
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    save_checkpoint(path, model, {})
    half = load_checkpoint(path)[0].state_dict()["head.weight"]
    assert half.dtype == torch.float32
    assert torch.equal(half, model.head.weight.half().float())


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(UsageError, match=r"no checkpoint .*; make one with python -m moe_ref.train.pretrain"):
        load_checkpoint(path)
    path.write_bytes(b"not a checkpoint, but long enough to have a header")
    with pytest.raises(UsageError, match=r"is not a readable safetensors file"):
        load_checkpoint(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(UsageError, match=f"has the format None, expected '{FORMAT}'"):
        load_checkpoint(path)
    about = {"format": FORMAT, "notes": {}, "config": {"blocks": 1}}
    save_file({"a": torch.zeros(1)}, path, metadata={METADATA_KEY: json.dumps(about)})
    with pytest.raises(UsageError, match=r"the metadata of .* can't be used: not the config"):
        load_checkpoint(path)
    save_file({"a": torch.zeros(1)}, path, metadata={METADATA_KEY: "[1"})
    with pytest.raises(UsageError, match=r"the metadata of .* can't be used"):
        load_checkpoint(path)
    about["config"] = SMALL.to_dict()
    save_file({"a": torch.zeros(1)}, path, metadata={METADATA_KEY: json.dumps(about)})
    with pytest.raises(UsageError, match=r"the tensors of .* don't fit its config: .*Missing key"):
        load_checkpoint(path)


def test_the_same_model_is_the_same_file(tmp_path: Path) -> None:
    model = ByteMoE(SMALL)
    for name in "ab":
        save_checkpoint(tmp_path / name, model, {"why": "test"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_shipped_checkpoint_is_small_and_names_its_recipe() -> None:
    assert SHIPPED.stat().st_size <= 3_000_000
    model, notes = tiny_moe()
    assert (model.config.moe.experts, model.config.moe.top_k) == (32, 4)
    assert notes["texts"] == ["prose", "code"]
    assert notes["recipe"]["steps"] >= 1000
    assert tiny_moe()[0] is model


def test_shipped_model_reads() -> None:
    """Far better than a model without context on the frozen excerpt (its end; 4.7 bits per byte without context)."""
    data = torch.tensor(list(text.excerpt()[-64 * 257 :])).view(64, 257)
    bits = 0.0
    with torch.no_grad():
        for chunk in data.split(16):
            logits, _ = tiny_moe()[0](chunk[:, :-1])
            bits += float(F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())) / math.log(2) / 4
    frequencies = torch.bincount(data.flatten(), minlength=256).double()
    share = frequencies[frequencies > 0] / frequencies.sum()
    assert bits < 0.55 * float(-(share * share.log2()).sum())


def test_shipped_gate_has_the_skew_of_a_trained_one() -> None:
    """The busiest expert does clearly more than the mean; no expert is dead on 32 kB of text."""
    model, _ = tiny_moe()
    _, layer = moe_layer(model)
    x_SH = hidden_states(model, text.excerpt(), 32768)
    load_E = torch.bincount(layer.gate(x_SH).expert_SK.flatten(), minlength=32)
    assert 1.5 < float(load_E.max() / load_E.double().mean()) < 6
    assert int(load_E.min()) > 0


def test_record_of_the_training_belongs_to_the_checkpoint() -> None:
    record = json.loads((Path(__file__).parents[2] / "docs" / "results" / "tiny_moe_training.json").read_text())
    model, notes = tiny_moe()
    assert record["checkpoint_sha256"] == hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
    assert record["recipe"] == notes["recipe"]
    # a field that the config got later has its default there
    assert type(model.config).from_dict(record["config"]) == model.config
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    for values in record["held_out"].values():
        assert values["bits_per_byte"] < 0.6 * values["unigram_bits_per_byte"]
