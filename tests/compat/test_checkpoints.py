"""Checkpoint directories: every family as the library saves it, shards, packed names, quantised forms, errors."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[hf]')")

from hf_models import CASES, make_input, make_model

from moe_ref.cli import main
from moe_ref.compat import FAMILIES, Checkpoint, block_state, config_of, from_transformers, load_layer, logical_state
from moe_ref.compat.quantised import from_fp8, from_mxfp4
from moe_ref.errors import UsageError

ONE_EACH = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2_groups", "deepseek_v3", "gpt_oss"]


def saved(name: str, folder: Path, **arguments) -> Path:
    """A model of this case as the library saves it."""
    make_model(name).save_pretrained(folder, **arguments)
    return folder


@pytest.mark.parametrize("name", ONE_EACH)
def test_as_the_library_saves_it(name: str, tmp_path: Path) -> None:
    block = make_model(name).model.layers[1].mlp
    layer = load_layer(saved(name, tmp_path), 1)
    want = from_transformers(block)
    assert layer.config == want.config
    for key, value in want.state_dict().items():
        assert torch.equal(layer.state_dict()[key], value), key
    first = 1 if name.startswith("deepseek") else 0
    assert list(Checkpoint(tmp_path).layers) == list(range(first, 2))


def test_shards_and_a_tensor_that_is_missing(tmp_path: Path) -> None:
    saved("qwen2_moe", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    layer = load_layer(tmp_path, 1)
    with torch.no_grad():
        block = make_model("qwen2_moe").model.layers[1].mlp
        assert torch.allclose(layer(make_input()), block(make_input()), atol=1e-5)
    index = tmp_path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    missing = "model.layers.1.mlp.experts.4.up_proj.weight"
    shard = value["weight_map"].pop(missing)
    index.write_text(json.dumps(value))
    with pytest.raises(UsageError, match=r"no tensor experts.4.up_proj.weight; it has experts.0"):
        load_layer(tmp_path, 1)
    value["weight_map"][missing] = next(s for s in value["weight_map"].values() if s != shard)
    index.write_text(json.dumps(value))
    with pytest.raises(UsageError, match=f"lacks {missing}, which the index says it has"):
        load_layer(tmp_path, 1)
    (tmp_path / shard).unlink()
    with pytest.raises(UsageError, match=f"names the shard {shard}, which is not in"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_packed_and_unpacked_names_are_the_same_layer(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    config, family = checkpoint.config(1), checkpoint.family
    unpacked = dict(checkpoint.block(1))
    assert "experts.gate_up_proj" not in unpacked
    state = logical_state(unpacked, family, config)
    again = logical_state(block_state(state, family), family, config)
    assert set(state) == set(again)
    assert all(torch.equal(state[key], again[key]) for key in state)
    # Mixtral's names are w1 = gate, w2 = down, w3 = up: swapped ones would give another layer.
    gate, up, down = family.unpacked or ()
    assert torch.equal(state["gate_up_proj"][2, :20], unpacked[f"experts.2.{gate}.weight"])
    assert torch.equal(state["gate_up_proj"][2, 20:], unpacked[f"experts.2.{up}.weight"])
    assert torch.equal(state["down_proj"][2], unpacked[f"experts.2.{down}.weight"])


def test_four_bit_floats() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 8, 2), dtype=torch.uint8, generator=generator)
    mine = from_mxfp4(blocks, scales)
    assert mine.shape == (3, 8, 64)
    assert torch.equal(mine.transpose(1, 2), convert_moe_packed_tensors(blocks, scales))

    # A whole block in this form: hidden 64, width 32, so both products have whole blocks of 32.
    values = {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3,
              "num_experts_per_tok": 2}  # fmt: skip
    config = config_of("gpt_oss", values, "bfloat16")
    down = torch.randint(0, 256, (3, 64, 1, 16), dtype=torch.uint8, generator=generator)
    tensors = {
        "router.weight": torch.zeros(3, 64),
        "router.bias": torch.zeros(3),
        "experts.gate_up_proj_blocks": torch.cat([blocks] * 8, dim=1),
        "experts.gate_up_proj_scales": torch.cat([scales] * 8, dim=1),
        "experts.gate_up_proj_bias": torch.zeros(3, 64),
        "experts.down_proj_blocks": down,
        "experts.down_proj_scales": torch.full((3, 64, 1), 127, dtype=torch.uint8),
        "experts.down_proj_bias": torch.zeros(3, 64),
    }
    state = logical_state(tensors, FAMILIES["gpt_oss"], config)
    assert torch.equal(state["gate_up_proj"][:, :8], mine)  # rows stay as stored: interleaved, [E, 2D, H]
    assert state["down_proj"].shape == (3, 64, 32)
    del tensors["experts.down_proj_scales"]
    with pytest.raises(UsageError, match=r"down_proj_blocks without experts\.down_proj_scales"):
        logical_state(tensors, FAMILIES["gpt_oss"], config)


def test_eight_bit_floats(tmp_path: Path) -> None:
    value = torch.randn(200, 130).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.5
    plain = from_fp8(value, scale)
    assert torch.equal(plain[:128, :128], (value[:128, :128].float() * scale[0, 0]).to(torch.bfloat16))
    assert torch.equal(plain[128:, 128:], (value[128:, 128:].float() * scale[1, 1]).to(torch.bfloat16))
    with pytest.raises(UsageError, match="expected one per block of 128 x 128"):
        from_fp8(value, scale[:1])

    tensors = load_file(saved("deepseek_v3", tmp_path) / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n or "shared_experts" in n]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load_layer(tmp_path, 1)
    assert layer.config.dtype == "bfloat16"
    stored = tensors["model.layers.1.mlp.experts.5.down_proj.weight"].float() * 0.5
    assert torch.equal(layer.down_proj[5].float(), stored)


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a directory; expected one with config\.json"):
        Checkpoint(tmp_path / "none")
    with pytest.raises(UsageError, match=r"no file .*config.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="can't be read as JSON"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="model_type is 'llama'"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(UsageError, match=r"has no \*.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(UsageError, match=r"pytorch_model.bin is pickled and is never opened here"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UsageError, match="is not a readable safetensors file"):
        Checkpoint(tmp_path)
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="no MoE layer in it"):
        Checkpoint(tmp_path)
    save_file(
        {"model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UsageError, match="the mixtral config has none of intermediate_size"):
        load_layer(tmp_path, 0)
    values = {"hidden_size": 3, "intermediate_size": 2, "num_local_experts": 1, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **values}))
    tensors = {f"model.layers.0.block_sparse_moe.experts.0.w{i}.weight": torch.zeros(2, 2) for i in (1, 2, 3)}
    save_file(
        {**tensors, "model.layers.0.block_sparse_moe.gate.weight": torch.zeros(1, 3)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        UsageError, match=r"experts\.0\.w1\.weight has shape \[2, 2\], but the mixtral config says \[2, 3\]"
    ):
        load_layer(tmp_path, 0)
    with pytest.raises(UsageError, match=r"layer 7 has no experts; MoE layers of .*: \[0\]"):
        load_layer(tmp_path, 7)


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


@pytest.mark.parametrize("name", ONE_EACH)
def test_command(name: str, tmp_path: Path, capsys) -> None:
    saved(name, tmp_path)
    code = run_command("run", "--hf", str(tmp_path), "--ranks", "3", "--tokens", "19", "--text", "excerpt", "--json")
    captured = capsys.readouterr()
    assert code == 0, captured.err
    values = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert values["model_type"] == CASES[name][0]
    assert values["relative_error"] <= 1e-5
    assert [entry["layer"] for entry in values["layers"]] == list(Checkpoint(tmp_path).layers)
    for entry in values["layers"]:
        assert sum(entry["rows_per_rank"]) == 3 * 19 * entry["top_k"] == sum(entry["expert_load"])


def test_command_in_bf16_and_as_a_table(tmp_path: Path, capsys) -> None:
    make_model("qwen2_moe").to(torch.bfloat16).save_pretrained(tmp_path)
    assert run_command("run", "--hf", str(tmp_path), "--tokens", "8", "--text", "excerpt") == 0
    assert "qwen2_moe on 4 ranks, 8 tokens each" in capsys.readouterr().out
    assert run_command("run", "--hf", str(tmp_path), "--tokens", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["relative_error"] == 0.0


def test_command_errors(tmp_path: Path, capsys) -> None:
    assert run_command("run", "--hf", str(tmp_path / "none")) == 2
    assert run_command("run", "--hf", str(saved("olmoe", tmp_path)), "--experts", "4") == 2
    assert "--experts has no meaning with --hf" in " ".join(capsys.readouterr().err.split())


def write_small(folder: Path, values: dict | None = None, tensors: dict | None = None) -> Path:
    """A qwen3_moe checkpoint with one layer of 5 experts, and with these values and tensors changed (None: removed)."""
    generator = torch.Generator().manual_seed(0)
    block = "model.layers.0.mlp."
    shapes = {"model.embed_tokens.weight": (256, 8), "model.layers.0.post_attention_layernorm.weight": (8,),
              f"{block}gate.weight": (5, 8)}  # fmt: skip
    for expert in range(5):
        shapes |= {f"{block}experts.{expert}.{name}.weight": shape for name, shape in
                   (("gate_proj", (6, 8)), ("up_proj", (6, 8)), ("down_proj", (8, 6)))}  # fmt: skip
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} | (tensors or {})
    config = {"model_type": "qwen3_moe", "hidden_size": 8, "moe_intermediate_size": 6, "num_experts": 5,
              "num_experts_per_tok": 2, **(values or {})}  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value for name, value in state.items() if value is not None}, folder / "model.safetensors")
    return folder


def run_small(folder: Path) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["run", "--hf", str(folder), "--tokens", "9", "--ranks", "3", "--json"])
    return int(stop.value.code or 0)


def test_what_the_config_says_and_what_the_tensors_are(tmp_path: Path, capsys) -> None:
    """Every one is refused in words: none of them is a number that is computed with all the same."""
    experts = "model.layers.0.mlp.experts."
    assert run_small(write_small(tmp_path)) == 0
    zeros = torch.zeros
    cases: list[tuple[dict, dict, str]] = [
        ({}, {f"{experts}0.up_proj.bias": zeros(6)}, "tensors that are not the family's.*experts.0.up_proj.bias"),
        ({}, {f"{experts}5.up_proj.weight": zeros(6, 8)}, "or more experts than the config's 5: experts.5.up_proj"),
        ({}, {f"{experts}3.up_proj.weight": zeros(3, 8)}, r"3.up_proj.weight has shape \[3, 8\].*says \[6, 8\]"),
        ({}, {f"{experts}3.up_proj.weight": zeros(())}, r"3.up_proj.weight has shape \[\].*says \[6, 8\]"),
        ({}, {"model.layers.0.mlp.gate.weight": zeros(5, 8, dtype=torch.int64)}, "router.weight is stored as torch"),
        ({}, {f"{experts}{e}.{n}_proj.weight": zeros(*s).to(torch.float8_e4m3fn) for e in range(5)
              for n, s in (("gate", (6, 8)), ("up", (6, 8)), ("down", (8, 6)))}, "float8_e4m3fn without factors"),
        ({}, {f"{experts}0.up_proj.weight": zeros(6, 8).to(torch.float8_e4m3fn),
              f"{experts}0.up_proj.weight_scale_inv": torch.ones(1)}, "have factors .1., expected two dimensions"),
        ({}, {"model.embed_tokens.weight": zeros(256, 9)}, r"embed_tokens.weight .* has shape \[256, 9\]"),
        ({}, {"model.embed_tokens.weight": zeros(256)}, r"embed_tokens.weight .* has shape \[256\]"),
        ({}, {"model.embed_tokens.weight": zeros(0, 8)}, r"embed_tokens.weight .* has shape \[0, 8\]"),
        ({}, {"model.layers.0.post_attention_layernorm.weight": zeros(3)}, r"norm before layer 0 has shape \[3\]"),
        ({"norm_topk_prob": "yes"}, {}, "norm_topk_prob of the qwen3_moe config is 'yes', expected true or false"),
        ({"text_config": [1]}, {}, r"text_config in .*config.json is \[1\], expected an object"),
    ]  # fmt: skip
    for values, tensors, message in cases:
        assert run_small(write_small(tmp_path, values, tensors)) == 2, message
        assert re.search(message, " ".join(capsys.readouterr().err.split())), message
    for name, value in (("n_group", "a"), ("routed_scaling_factor", [1]), ("n_shared_experts", True)):
        with pytest.raises(UsageError, match=f"{name} of the deepseek_v3 config is .*, expected a"):
            config_of("deepseek_v3", {"hidden_size": 8, "moe_intermediate_size": 6, "n_routed_experts": 8,
                                      "num_experts_per_tok": 2, name: value})  # fmt: skip


def test_what_is_no_file(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        path = write_small(tmp_path) / name
        path.unlink()
        os.mkfifo(path)  # opening it would wait for ever
        with pytest.raises(UsageError, match="is no regular file"):
            Checkpoint(tmp_path)
        path.unlink()
    write_small(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"config\.json can't be read as JSON"):
        Checkpoint(tmp_path)
