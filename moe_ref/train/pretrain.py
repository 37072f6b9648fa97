"""Train the byte-level MoE model that ships in the package: `python -m moe_ref.train.pretrain`.

Half of every batch is prose, half is code (`moe_ref.text`); the last tenth of each is held out. AdamW with warm-up and
cosine decay. The balance loss is kept small on purpose: it stops experts from dying, and leaves the gate the skew that
text gives it.

Deterministic for a given machine, thread count and version of torch: batches are a function of (seed, step). A run
that was stopped goes on with --resume, bit for bit as if it had not been stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_ref import text
from moe_ref.config import MoEConfig
from moe_ref.console import err
from moe_ref.errors import UsageError
from moe_ref.results import provenance, write_results
from moe_ref.train.checkpoint import load_checkpoint, save_checkpoint
from moe_ref.train.model import ByteMoE, ByteMoEConfig

TINY_MOE = ByteMoEConfig(MoEConfig(hidden=128, intermediate=64, experts=32, top_k=4))
"""The shipped model: 1.2 million parameters, 2.4 MB in float16."""

HELD_OUT = 0.1
"""Share of each text, at its end, that is never trained on."""

HELD_OUT_SEQUENCES = 128
"""Held-out sequences per text, spread evenly."""


@dataclass(frozen=True)
class Recipe:
    """What fixes a training run, together with the texts and the model's config."""

    steps: int = 1500
    batch: int = 16
    learning_rate: float = 3e-3
    warm_up: int = 100
    weight_decay: float = 0.1
    balance: float = 2e-3
    z: float = 1e-4
    clip: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then cosine decay to a tenth."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        progress = (step - self.warm_up) / max(self.steps - self.warm_up, 1)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Corpus:
    """One text, split into bytes to train on and bytes to judge by; uint8 tensors."""

    name: str
    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, name: str, data: bytes) -> Corpus:
        """Split a text; the end is held out."""
        everything = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        cut = int(len(data) * (1 - HELD_OUT))
        return cls(name, everything[:cut], everything[cut:])

    def held_out_sequences(self, context: int) -> Tensor:
        """HELD_OUT_SEQUENCES sequences of context + 1 bytes, int64."""
        starts = torch.linspace(0, len(self.held_out) - context - 1, HELD_OUT_SEQUENCES).long()
        return torch.stack([self.held_out[s : s + context + 1] for s in starts.tolist()]).long()

    def unigram_bits(self, context: int) -> float:
        """Bits per byte of the best model without context (byte frequencies of the training part) on the same bytes."""
        counts = torch.bincount(self.train.long(), minlength=256).double() + 1
        bits = -(counts / counts.sum()).log2()
        return float(bits[self.held_out_sequences(context)[:, 1:]].mean())


def draw_batch(corpora: list[Corpus], recipe: Recipe, context: int, step: int) -> Tensor:
    """The batch of a step, [batch, context + 1] int64: equal parts of every text, a function of (seed, step)."""
    generator = torch.Generator().manual_seed((recipe.seed * 1_000_003 + step) % 2**63)
    rows = []
    for index in range(recipe.batch):
        source = corpora[index % len(corpora)].train
        start = int(torch.randint(len(source) - context, (1,), generator=generator))
        rows.append(source[start : start + context + 1])
    return torch.stack(rows).long()


@torch.no_grad()
def evaluate(model: ByteMoE, corpus: Corpus) -> tuple[float, list[list[int]]]:
    """Bits per byte on the held-out part, and the load of every expert of every MoE layer there."""
    context = model.config.context
    bits, loads = 0.0, torch.zeros(len(model.config.moe_blocks), model.config.moe.experts, dtype=torch.int64)
    sequences = corpus.held_out_sequences(context)
    for chunk in sequences.split(16):
        logits, all_stats = model(chunk[:, :-1])
        nats = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum")
        bits += float(nats) / math.log(2)
        loads += torch.stack([torch.as_tensor(stats.expert_load) for stats in all_stats])
    return bits / (len(sequences) * context), loads.tolist()


def make_optimizer(model: ByteMoE, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over all parameters, in the order of `model.parameters()`."""
    return torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )


def train_step(model: ByteMoE, optimizer: torch.optim.AdamW, recipe: Recipe, batch: Tensor, step: int) -> float:
    """One step on a batch [B, context + 1]; returns the cross entropy in bits per byte, auxiliary losses apart."""
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(step)
    logits, all_stats = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    total = loss
    for stats in all_stats:
        total = total + recipe.balance * stats.balance_loss + recipe.z * stats.z_loss
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    return loss.item() / math.log(2)


def save_state(path: Path, model: ByteMoE, optimizer: torch.optim.AdamW, progress: dict[str, Any]) -> None:
    """Write all that `load_state` needs to go on; the old file is replaced only when the new one is complete."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    save_file(tensors, unfinished, metadata={"progress": json.dumps(progress)})
    unfinished.replace(path)


@torch.no_grad()
def load_state(path: Path, model: ByteMoE, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """Fill model and optimizer from a state file and return its progress."""
    if not path.is_file():
        raise UsageError(f"no state {path} to go on from; start without --resume")
    with safe_open(path, framework="pt") as file:
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_tensor(f"model.{name}"))
            optimizer.state[parameter] = {
                key: file.get_tensor(f"optimizer.{name}.{key}") for key in ("step", "exp_avg", "exp_avg_sq")
            }
        return json.loads(file.metadata()["progress"])


def train(
    config: ByteMoEConfig, recipe: Recipe, corpora: list[Corpus], state: Path, resume: bool = False, every: int = 50
) -> tuple[ByteMoE, dict[str, Any]]:
    """Train a model; state is written every `every` steps.

    Returns:
        The model and its progress: `step`, `seconds`, `curve` (a list of {step, bits_per_byte}, the mean over the steps
        since the entry before).
    """
    torch.manual_seed(recipe.seed)
    model = ByteMoE(config)
    optimizer = make_optimizer(model, recipe)
    progress: dict[str, Any] = {"step": 0, "seconds": 0.0, "curve": [], "recipe": asdict(recipe)}
    if resume:
        progress = load_state(state, model, optimizer)
        if progress["recipe"] != asdict(recipe):
            raise UsageError(
                f"{state} is of a run with {progress['recipe']}, expected {asdict(recipe)}; "
                "resume with the same options, or start anew without --resume"
            )
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("", total=recipe.steps, completed=progress["step"])
        recent, before = [], time.monotonic()
        for step in range(progress["step"], recipe.steps):
            recent.append(train_step(model, optimizer, recipe, draw_batch(corpora, recipe, config.context, step), step))
            bar.update(task, advance=1, description=f"{recent[-1]:.3f} bits per byte")
            if (step + 1) % every == 0 or step + 1 == recipe.steps:
                now = time.monotonic()
                progress["step"], progress["seconds"] = step + 1, progress["seconds"] + now - before
                progress["curve"].append({"step": step + 1, "bits_per_byte": round(sum(recent) / len(recent), 4)})
                recent, before = [], now
                save_state(state, model, optimizer, progress)
    return model.eval(), progress


def report(model: ByteMoE, corpora: list[Corpus], recipe: Recipe, progress: dict[str, Any]) -> dict[str, Any]:
    """What a run achieved: bits per byte and expert loads on the held-out part of every text, and the curve."""
    held_out = {}
    for corpus in corpora:
        bits, loads = evaluate(model, corpus)
        held_out[corpus.name] = {
            "bits_per_byte": round(bits, 4),
            "unigram_bits_per_byte": round(corpus.unigram_bits(model.config.context), 4),
            "expert_load": loads,
            "max_over_mean": [round(max(load) * len(load) / sum(load), 4) for load in loads],
        }
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "config": model.config.to_dict(),
        "recipe": asdict(recipe),
        "train_bytes": {corpus.name: len(corpus.train) for corpus in corpora},
        "held_out": held_out,
        "seconds": round(progress["seconds"], 1),
        "training_curve": progress["curve"],
    }


def main(
    steps: int = typer.Option(Recipe.steps, min=1, help="Training steps."),
    seed: int = typer.Option(0, min=0, help="Seed of weights and batches."),
    threads: int = typer.Option(2, min=1, help="CPU threads; part of what makes a run reproducible."),
    out: Path = typer.Option(Path("moe_ref/assets/tiny_moe.safetensors"), help="Checkpoint to write."),
    results: Path = typer.Option(Path("docs/results/tiny_moe_training.json"), help="Record to write."),
    state: Path = typer.Option(Path(".cache/tiny_moe_state.safetensors"), help="State for --resume."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the state of a run that was stopped."),
) -> None:
    """Train the byte-level MoE model on prose and code, write its checkpoint and the record of the run."""
    torch.set_num_threads(threads)
    recipe = Recipe(steps=steps, seed=seed)
    corpora = [Corpus.of("prose", text.prose()), Corpus.of("code", text.code())]
    model, progress = train(TINY_MOE, recipe, corpora, state, resume)
    notes = {"recipe": asdict(recipe), "texts": [corpus.name for corpus in corpora]}
    save_checkpoint(out, model, notes)
    stored, _ = load_checkpoint(out)
    command = f"python -m moe_ref.train.pretrain --steps {steps} --seed {seed} --threads {threads}"
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    record = {
        "title": "How the shipped model was trained",
        "description": "A byte-level MoE language model on prose and code; losses in bits per byte.",
        **provenance(command, ("safetensors",)),
        "checkpoint_sha256": digest,
        **report(stored, corpora, recipe, progress),
    }
    write_results(results, record)
    for name, values in record["held_out"].items():
        err.print(
            f"{name}: {values['bits_per_byte']} bits per byte held out (without context: "
            f"{values['unigram_bits_per_byte']}), busiest expert {values['max_over_mean']} times the mean"
        )
    err.print(f"wrote {out} ({out.stat().st_size} bytes) and {results}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except UsageError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None
