"""Tensor names: from those of Hugging Face blocks and checkpoints to ours, and back.

Ours are `gate_up_proj [E, 2D, H]`, `down_proj [E, H, D]` and, inside `router` and `shared_expert`, the rest. Theirs:

    packed (modules since transformers 5)    experts.gate_up_proj, experts.down_proj              one tensor for all E
    unpacked (most checkpoints)              experts.J.gate_proj.weight, .up_proj, .down_proj     (w1, w3, w2: mixtral)

Whether the rows of a packed tensor stand gate-then-up or interleaved, and whether it is transposed, is stated by the
family and never guessed from shapes: [E, 2D, H] and [E, H, 2D] are the same shape when 2D = H.

Letters: E experts, H hidden, D intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moe_ref.compat.families import Family
from moe_ref.compat.quantised import BLOCKS, SCALE_INV, SCALES, dequantised
from moe_ref.config import MoEConfig
from moe_ref.errors import UsageError

Read = Callable[[str], Tensor]
"""Tensor of a name inside the block."""


def logical_state(tensors: Mapping[str, Tensor], family: Family, config: MoEConfig) -> dict[str, Tensor]:
    """State dict of a layer with all E experts, from the tensors of one block.

    Args:
        tensors: by name inside the block (`gate.weight`, `experts.0.up_proj.weight`, ...), packed or unpacked, also
            gpt-oss' 4-bit form and 8-bit floats with a factor per block; each is read once, so a file will do.
        family, config: of the model.

    Returns:
        What `MoELayer.load_logical_state_dict` takes; dtypes as stored.

    Raises:
        UsageError: a tensor is missing or has another shape than the config says; the message names it.
    """
    experts, hidden, width = config.experts, config.hidden, config.intermediate
    used: set[str] = set()
    read = _reader(tensors, used)
    state = {"router.weight": read(f"{family.router}.weight")}
    if config.router_bias:
        state["router.bias"] = read(f"{family.router}.bias")
    if config.selection_bias:
        state["router.selection_bias"] = read(f"{family.router}.e_score_correction_bias")

    packed = f"experts.gate_up_proj{BLOCKS}" in tensors or "experts.gate_up_proj" in tensors
    if packed:
        four_bit = f"experts.gate_up_proj{BLOCKS}" in tensors  # stored [E, out, in], whatever the family
        for name in ("gate_up_proj", "down_proj"):
            value = read(f"experts.{name}")
            state[name] = value.transpose(1, 2).contiguous() if family.transposed and not four_bit else value
        if config.expert_bias:
            state |= {f"{name}_bias": read(f"experts.{name}_bias") for name in ("gate_up_proj", "down_proj")}
    elif family.unpacked is not None:
        gate, up, down = family.unpacked

        def stacked(name: str, shape: tuple[int, int]) -> Tensor:
            values = []
            for expert in range(experts):
                key = f"experts.{expert}.{name}.weight"
                values.append(read(key))
                if tuple(values[-1].shape) != shape:
                    raise UsageError(
                        f"the block's {key} has shape {list(values[-1].shape)}, but the {family.model_type} config "
                        f"says {list(shape)}; config and weights are of different models"
                    )
            return torch.stack(values)

        state["gate_up_proj"] = torch.cat([stacked(gate, (width, hidden)), stacked(up, (width, hidden))], dim=1)
        state["down_proj"] = stacked(down, (hidden, width))
    else:
        raise UsageError(f"the {family.model_type} block has no experts.gate_up_proj; found {sorted(tensors)[:8]}")

    if family.shared and config.shared_intermediate:
        parts = [read(f"{family.shared}.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")]
        state["shared_expert.up_proj"] = torch.cat(parts[:2])
        state["shared_expert.down_proj"] = parts[2]
        if config.shared_gate:
            state["shared_expert.gate"] = read("shared_expert_gate.weight")

    want: dict[str, tuple[int, ...]] = {
        "router.weight": (experts, hidden),
        "gate_up_proj": (experts, 2 * width, hidden),
        "down_proj": (experts, hidden, width),
        "router.bias": (experts,),
        "router.selection_bias": (experts,),
        "gate_up_proj_bias": (experts, 2 * width),
        "down_proj_bias": (experts, hidden),
        "shared_expert.gate": (1, hidden),
        "shared_expert.up_proj": (2 * config.shared_intermediate, hidden),
        "shared_expert.down_proj": (hidden, config.shared_intermediate),
    }
    for name, shape in want.items():
        if name in state and tuple(state[name].shape) != shape:
            raise UsageError(
                f"the block's tensors make a {name} of shape {list(state[name].shape)}, but the {family.model_type} "
                f"config says {list(shape)}; config and weights are of different models"
            )
        if name in state and (not state[name].is_floating_point() or state[name].element_size() == 1):
            raise UsageError(
                f"the block's {name} is stored as {state[name].dtype} without factors that are known here; expected "
                "floating-point numbers of 16 bits or more, or one of the forms of moe_ref.compat.quantised"
            )
    # What is left would take part in what the block computes: biases, adapters, experts beyond the config's.
    left = sorted(set(tensors) - used)
    if left:
        raise UsageError(
            f"the {family.model_type} block has tensors that are not the family's, or more experts than the config's "
            f"{experts}: {', '.join(left[:4])}{', ...' if len(left) > 4 else ''}"
        )
    return state


def block_state(state: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """The inverse of `logical_state`: names and layout of the block's module, packed.

    Args:
        state: `MoELayer.state_dict()` with all E experts.
    """

    def turned(value: Tensor) -> Tensor:
        return value.transpose(1, 2).contiguous() if family.transposed else value

    result = {
        f"{family.router}.weight": state["router.weight"],
        "experts.gate_up_proj": turned(state["gate_up_proj"]),
        "experts.down_proj": turned(state["down_proj"]),
    }
    moved = {
        "router.bias": f"{family.router}.bias",
        "router.selection_bias": f"{family.router}.e_score_correction_bias",
        "gate_up_proj_bias": "experts.gate_up_proj_bias",
        "down_proj_bias": "experts.down_proj_bias",
        "shared_expert.down_proj": f"{family.shared}.down_proj.weight",
        "shared_expert.gate": "shared_expert_gate.weight",
    }
    result |= {theirs: state[ours] for ours, theirs in moved.items() if ours in state}
    if "shared_expert.up_proj" in state:
        gate, up = state["shared_expert.up_proj"].chunk(2)
        result |= {f"{family.shared}.gate_proj.weight": gate, f"{family.shared}.up_proj.weight": up}
    return result


def _reader(tensors: Mapping[str, Tensor], used: set[str]) -> Read:
    """Read a tensor by name, put together from its quantised parts where it is stored so; adds to `used` what it read
    from."""

    def read(name: str) -> Tensor:
        used.update((name, f"{name}{BLOCKS}", f"{name}{SCALES}", f"{name}{SCALE_INV}"))
        value = dequantised(tensors, name)
        if value is not None:
            return value
        if name not in tensors:
            near = sorted(key for key in tensors if key.split(".")[0] == name.split(".")[0])
            raise UsageError(f"the block has no tensor {name}; it has {', '.join(near[:6]) or 'nothing like it'}")
        return tensors[name]

    return read
