"""MoELayer: a Mixture-of-Experts layer on P ranks with a backend switch.

    layer = MoELayer(MoEConfig(hidden=512, intermediate=1024, experts=32, top_k=4), world=4)
    y = layer(x)                                    # x [..., 512]; the 4 simulated ranks share the tokens evenly
    ys = layer([x0, x1, x2, x3])                    # or each brings its own
    y, stats = layer(x, return_stats=True)          # loads, drops, bytes, auxiliary losses
    layer.backend = "fused"                         # the same layer in one kernel

Parameters are named and shaped as in today's Hugging Face experts. In a simulated world they hold all E experts; in a
real one (torch.distributed) each process holds the experts of its own slots, and a checkpoint of all of them can be
loaded with `load_logical_state_dict`.

Gradients: an expert's weight gradient is the sum over all ranks' tokens; router and shared-expert gradients are those
of this process' tokens, to be reduced by data parallelism as for any dense parameter. `backward()` and
`torch.autograd.grad` work, second derivatives included. Of torch.func, `functional_call` works; the transforms (grad,
vmap, jvp) do not, since how many rows go where depends on the values, and rows really move between ranks.

Letters: S tokens of a rank, H hidden, D intermediate, E experts, K choices, P ranks, X local slots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_ref import backends, balance, gate
from moe_ref.config import MoEConfig
from moe_ref.errors import BackendUnavailable, UsageError
from moe_ref.experts import ExpertWeights
from moe_ref.gate import Routing
from moe_ref.inputs import autocast_dtype, compute_dtype, routing_per_rank, tokens_per_rank
from moe_ref.parameters import Router, SharedExpert, hash_seed
from moe_ref.placement import Placement
from moe_ref.stats import LayerStats
from moe_ref.world import SimulatedWorld, World


class MoELayer(nn.Module):
    """See the module's docstring.

    Args:
        config: what to compute.
        backend: name in the registry; checked when it is set.
        world: a World, or a number of simulated ranks.
        placement: replica sets; None is plain expert parallelism.
        seed: of the initial weights; the same seed gives the same logical experts on any world and placement.
        device: of the parameters.

    Raises:
        UsageError: placement and config or world don't match; ranks were given different configs or placements.
        BackendUnavailable: the backend can't be used here; the message names the extra or the remedy.
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        config: MoEConfig,
        backend: str = "ref",
        world: World | int = 1,
        placement: Placement | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config is a {type(config).__name__}, expected moe_ref.MoEConfig")
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise UsageError(f"seed is {seed!r}, expected an integer of at least 0")
        self.config = config
        self.world = world if isinstance(world, World) else SimulatedWorld(world)
        self.placement = placement or Placement.contiguous(config.experts, self.world.num_ranks)
        if (self.placement.num_experts, self.placement.num_ranks) != (config.experts, self.world.num_ranks):
            raise UsageError(
                f"the placement is for {self.placement.num_experts} experts on {self.placement.num_ranks} ranks, "
                f"expected {config.experts} experts on {self.world.num_ranks}"
            )
        self.world.agree("MoEConfig", json.dumps(config.to_dict(), sort_keys=True))
        self.world.agree("placement", repr(self.placement.ranks_of_expert))
        self.schedule_method = "flow"
        self.check_plans = False
        """Debug mode: compare a hash of every plan across ranks (one small collective per forward)."""
        self.planner: Callable[[np.ndarray, Placement], balance.Plan] | None = None
        if len(self.world.local_ranks) == self.world.num_ranks:
            self.held_experts = tuple(range(config.experts))
        else:
            self.held_experts = self.placement.experts_of_rank[self.world.local_ranks[0]]

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(len(self.held_experts), *shape, dtype=config.torch_dtype, device=device))

        self.router = Router(config, device)
        self.up_names = ("gate_up_proj", "gate_up_proj_bias") if config.gated else ("up_proj", "up_proj_bias")
        """Names of the first product's weight and bias."""
        self.register_parameter(self.up_names[0], parameter(config.up_rows, config.hidden))
        self.register_parameter(self.up_names[1], parameter(config.up_rows) if config.expert_bias else None)
        self.down_proj = parameter(config.hidden, config.intermediate)
        self.register_parameter("down_proj_bias", parameter(config.hidden) if config.expert_bias else None)
        self.shared_expert = SharedExpert(config, device) if config.shared_intermediate else None
        self.reset_parameters(seed)
        self._backend: backends.Backend
        self.backend = backend

    # --- parameters ---------------------------------------------------------------------------------------------

    def reset_parameters(self, seed: int) -> None:
        """Uniform in +-1/sqrt(fan in); expert e draws from its own stream, so placement changes no weight."""

        @torch.no_grad()
        def fill(value: Tensor | None, fan_in: int, stream: int) -> None:
            if value is not None:
                generator = torch.Generator().manual_seed(hash_seed(seed, stream))
                bound = 1 / math.sqrt(fan_in)
                drawn = torch.empty(value.shape, dtype=torch.float32, device="cpu")
                value.copy_(drawn.uniform_(-bound, bound, generator=generator))

        config = self.config
        fill(self.router.weight, config.hidden, 0)
        fill(self.router.bias, config.hidden, 1)
        for i, expert in enumerate(self.held_experts):
            for j, (value, fan_in) in enumerate(
                (
                    (self.up_parameter, config.hidden),
                    (self.up_bias_parameter, config.hidden),
                    (self.down_proj, config.intermediate),
                    (self.down_proj_bias, config.intermediate),
                )
            ):
                fill(None if value is None else value[i], fan_in, 16 + 4 * expert + j)
        if self.shared_expert is not None:
            for j, value in enumerate(self.shared_expert.parameters()):
                fill(value, value.shape[-1], 4 + j)

    @property
    def up_parameter(self) -> nn.Parameter:
        """gate_up_proj [E, 2D, H] or up_proj [E, D, H]."""
        return getattr(self, self.up_names[0])

    @property
    def up_bias_parameter(self) -> nn.Parameter | None:
        """Bias of the first product, [E, 2D] or [E, D], or None."""
        return getattr(self, self.up_names[1])

    def load_logical_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state dict that holds all E experts (a simulated layer's) into this process' slots."""
        held = torch.tensor(self.held_experts, dtype=torch.long)
        experts = {*self.up_names, "down_proj", "down_proj_bias"}
        self.load_state_dict({k: v[held.to(v.device)] if k in experts else v for k, v in state.items()})

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Logical experts of a rank; the position is the slot."""
        return self.placement.experts_of_rank[rank]

    def weights_of(self, rank: int, dtype: torch.dtype) -> list[ExpertWeights]:
        """Weights of each slot of a local rank in `dtype` (another than the parameters' under autocast only)."""

        def rows(value: Tensor | None) -> Sequence[Tensor | None]:
            # unbind, not indexing: its backward builds the whole gradient once.
            return (None,) * len(self.held_experts) if value is None else value.to(dtype).unbind(0)

        index = {expert: i for i, expert in enumerate(self.held_experts)}
        up, down = rows(self.up_parameter), rows(self.down_proj)
        up_bias, down_bias = rows(self.up_bias_parameter), rows(self.down_proj_bias)
        result = []
        for i in (index[expert] for expert in self.experts_of(rank)):
            up_UH, down_HD = up[i], down[i]
            assert up_UH is not None
            assert down_HD is not None
            result.append(ExpertWeights(up_UH, down_HD, up_bias[i], down_bias[i]))
        return result

    def anchor(self) -> Tensor | None:
        """Keeps every rank in the backward of an exchange; see World.exchange."""
        # A leaf of its own, not a parameter: parameters can be frozen on some ranks, or absent.
        real = len(self.world.local_ranks) < self.world.num_ranks
        return torch.zeros((), requires_grad=True) if real and torch.is_grad_enabled() else None

    # --- stages -------------------------------------------------------------------------------------------------

    def gate(self, x_SH: Tensor) -> Routing:
        """Route tokens with this layer's router."""
        return gate.gate(x_SH, self.router.weight, self.config, self.router.bias, self.router.selection_bias)

    def make_plan(self, counts_PE: np.ndarray) -> balance.Plan:
        """Plan of a micro-batch: by `planner` if it is set, else trivial with one replica each, else scheduled."""
        if self.planner is not None:
            return self.planner(counts_PE, self.placement)
        if self.placement.max_replicas == 1:
            return balance.Plan.plain(counts_PE, self.placement)
        return balance.schedule(counts_PE, self.placement, method=self.schedule_method)

    def shared(self, x_SH: Tensor) -> Tensor | None:
        """Output of the shared expert, or None."""
        return None if self.shared_expert is None else self.shared_expert(x_SH)

    # --- forward ------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """Name of the backend in use; assign to switch."""
        return self._backend.name

    @backend.setter
    def backend(self, name: str) -> None:
        chosen = backends.get(name)
        reason = chosen.unavailable()
        if reason:
            raise BackendUnavailable(f"backend {name!r} can't run here: {reason}")
        self._backend = chosen

    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        routing: Routing | Sequence[Routing] | None = None,
        return_stats: bool = False,
    ) -> Any:
        """Run the layer.

        Args:
            x: [..., H] in the config's dtype; or, in a simulated world, one [S_p, H] per rank. A single tensor is split
                over the simulated ranks. Any S, zero included.
            routing: use this instead of the gate; one for all tokens of x, or one per rank.
            return_stats: also return LayerStats.

        Returns:
            y shaped like x (a list for a list); with return_stats a pair (y, stats).

        Raises:
            TypeError, ValueError: x or routing have a wrong type, shape, dtype or device, an id is out of range, a
                logit is not finite, or a rank has more than config.max_tokens tokens.
        """
        if routing is None and not return_stats:
            quick = getattr(self._backend, "quick", None)
            if quick is not None and (y := quick(self, x)) is not None:
                return y
        parts, routings = self.check_input(x, routing)
        # Under autocast all stages see tokens rounded to the autocast dtype; the gate's own arithmetic stays in fp32.
        kind = parts[0].device.type
        cast = autocast_dtype(kind)
        dtype = compute_dtype(self.config.torch_dtype, cast)
        tokens = [part if part.dtype == dtype else part.to(dtype) for part in parts]
        with nullcontext() if cast is None else torch.autocast(kind, enabled=False):
            record = self._backend.forward(self, tokens, routings)
            y = record.y_SH
            assert y is not None
            if isinstance(x, Tensor):
                # of one rank it is the result itself, not a copy: a fused layer stays one operation of the GPU
                y = y[0] if len(y) == 1 else torch.cat(y)
                y = y if y.shape == x.shape else y.view_as(x)
            return (y, LayerStats.of(record, self.config, dtype)) if return_stats else y

    def check_input(self, x: Any, routing: Any = None) -> tuple[list[Tensor], list[Routing] | None]:
        """Tokens and routing per local rank, checked; see moe_ref.inputs for what is refused.

        On real ranks the refusal of one reaches all, so that nobody waits for rows that will not come.
        """
        try:
            parts = tokens_per_rank(self, x)
            return parts, routing_per_rank(self, routing, parts)
        except (TypeError, ValueError):
            refuse = getattr(self._backend, "refuse", None)
            if refuse is not None:
                refuse(self)
            raise

    def extra_repr(self) -> str:
        c = self.config
        return f"hidden={c.hidden}, intermediate={c.intermediate}, experts={c.experts}, top_k={c.top_k}, {self.world}"
