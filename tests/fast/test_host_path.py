"""What a fused layer passes to its kernel, call after call, while everything that can change changes in between."""

from __future__ import annotations

import copy
import ctypes
import gc
import struct
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from optional import without_dsl
from torch import nn
from torch.nn.utils import parametrize, prune

from moe_fast import compiler
from moe_ref import MoEConfig, MoELayer, Routing
from moe_ref.balance import Plan, schedule
from moe_ref.errors import BackendUnavailable, UsageError
from moe_ref.placement import Placement

try:
    cute = compiler.import_cutlass()
except BackendUnavailable as error:
    without_dsl(error)

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64
from fused_host import FirstOf, Launches, argument_names, fused_on_cpu

from moe_fast import backend, engine_choice, quick, router
from moe_fast.backend import FusedBackend
from moe_fast.call import CHANGING, Call
from moe_fast.engine import Engine
from moe_fast.engine_choice import engine_for
from moe_fast.failures import CODE, STATUS, WORDS, MegakernelError, MegakernelInputError, MegakernelTimeout
from moe_fast.kernel.signals import RECORD_WORDS, Args, Operands
from moe_fast.local_ranks import LocalRanks

CONFIG = MoEConfig(hidden=128, intermediate=64, experts=4, top_k=2, dtype="bfloat16", max_tokens=64)
EVERYTHING = CONFIG.replace(
    expert_bias=True, router_bias=True, selection_bias=True, shared_intermediate=64, shared_gate=True
)
HALVES = [[0, 1], [1, 0], [0, 1], [1, 0]]


@pytest.fixture
def stream() -> dict[None, int]:
    return {None: 7}


@pytest.fixture
def launches(stream):
    seen = Launches()
    with fused_on_cpu(seen.function, stream):
        yield seen


@pytest.fixture(params=["gradients", "inference"])
def either_mode(request):
    """Calls of a layer with gradients take the long way, others the short way as soon as they can."""
    with torch.set_grad_enabled(request.param == "gradients"):
        yield


@pytest.fixture
def long_calls():
    """One entry for each call that takes the long way."""
    seen, forward = [], FusedBackend.forward

    def spy(*args: Any, **more: Any) -> Any:
        seen.append(args)
        return forward(*args, **more)

    with mock.patch.object(FusedBackend, "forward", spy):
        yield seen


def tokens(count: int = 8, **more) -> torch.Tensor:
    return torch.zeros(count, CONFIG.hidden, dtype=torch.bfloat16, **more)


def engine_of(layer: MoELayer) -> Engine:
    only = engine_for(layer).only
    assert only is not None
    return only


def check(launches: Launches, layer: MoELayer, x: torch.Tensor, **given) -> torch.Tensor:
    """One call passes exactly this layer's, this batch's and its engine's values; returns y."""
    before = len(launches)
    y = layer(x, **given)
    assert len(launches) == before + 1
    got, used = launches[-1], engine_of(layer)
    spare, router, shared = used.memory.workspace.data_ptr(), layer.router, layer.shared_expert

    def at(value: torch.Tensor | None) -> int:
        return spare if value is None else value.data_ptr()

    routing = given.get("routing")
    want = dict.fromkeys(argument_names(), 0) | used._fixed_arguments()
    want |= {
        "x": at(x) if len(x) else spare,
        "y": at(y) if len(x) else spare,
        "bias": at(router.selection_bias),
        "router_bias": at(router.bias),
        "first": at(getattr(layer, layer.up_names[0])),
        "second": at(layer.down_proj),
        "first_bias": at(getattr(layer, layer.up_names[1])),
        "second_bias": at(layer.down_proj_bias),
        "shared_first": at(shared and shared.up_proj),
        "shared_second": at(shared and shared.down_proj),
        "shared_gate": at(shared and shared.gate),
        "given_expert": at(routing and routing.expert_SK),
        "given_weight": at(routing and routing.weight_SK),
        "given": int(routing is not None),
        "deadline": int(used.deadline_s * 1e9),
        "tokens": len(x),
        "slots": len(layer.down_proj),
        "router": at(router.weight),
        "stream": got["stream"],
    }
    if used.shape.placed:
        want["placement"] = used.tables(layer.placement).data_ptr()
    if used.shape.drops:
        want["capacity"] = layer.config.capacity(len(x))
    assert got == want
    assert y.shape == x.shape
    return y


def moved(value: torch.Tensor) -> torch.Tensor:
    """The same values elsewhere."""
    return value.detach().clone()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("config", [CONFIG, EVERYTHING, CONFIG.replace(gated=False, capacity_factor=1.0)])
def test_a_call_passes_what_the_layer_has(launches, config, grad) -> None:
    layer = MoELayer(config, backend="fused")
    ids = torch.zeros(8, 2, dtype=torch.int64)
    routing = Routing(ids, torch.ones(8, 2, requires_grad=grad))
    with torch.set_grad_enabled(grad):
        for x in (tokens(), tokens(3), tokens(0), tokens(64, requires_grad=grad)):
            y = check(launches, layer, x)
            assert y.requires_grad == grad
        check(launches, layer, tokens(), routing=routing)
        check(launches, layer, tokens())


@pytest.mark.usefixtures("either_mode")
def test_x_of_any_shape(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    x = tokens().view(2, 4, -1)
    y = layer(x)
    assert y.shape == x.shape
    assert (launches[-1]["x"], launches[-1]["y"], launches[-1]["tokens"]) == (x.data_ptr(), y.data_ptr(), 8)
    turned = tokens(128).t()  # not contiguous: a copy is passed
    assert layer.config.hidden == 128
    with pytest.raises(ValueError, match="128 tokens, but buffers are sized for 64"):
        layer(turned)
    layer(turned[:32])
    assert launches[-1]["x"] not in (0, turned.data_ptr())


@pytest.mark.usefixtures("either_mode")
def test_parameters_that_are_replaced(launches) -> None:
    """As objects, through .data, by a state dict copied in or assigned, by functional_call and a parametrization."""
    layer = MoELayer(EVERYTHING, backend="fused")
    x = tokens()
    check(launches, layer, x)
    names = [name for name, _ in layer.named_parameters()]
    assert len(names) == 9
    for name in names:
        owner = layer.get_submodule(name.rpartition(".")[0])
        short = name.rpartition(".")[2]
        setattr(owner, short, nn.Parameter(moved(getattr(owner, short))))
        check(launches, layer, x)
        getattr(owner, short).data = moved(getattr(owner, short))
        check(launches, layer, x)
    state = {name: moved(value) for name, value in layer.state_dict().items()}
    layer.load_state_dict(state)
    check(launches, layer, x)
    assert launches[-1]["first"] not in [value.data_ptr() for value in state.values()]
    layer.load_state_dict(state, assign=True)
    check(launches, layer, x)
    assert launches[-1]["first"] == state["gate_up_proj"].data_ptr()

    other = {name: moved(value) for name, value in layer.named_parameters()}
    torch.func.functional_call(layer, other, (x,))
    assert [launches[-1][n] for n in ("router", "second", "shared_gate")] == [
        other[n].data_ptr() for n in ("router.weight", "down_proj", "shared_expert.gate")
    ]
    check(launches, layer, x)

    class Elsewhere(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return here

    here = moved(layer.down_proj)
    nn.utils.parametrize.register_parametrization(layer, "down_proj", Elsewhere())
    check(launches, layer, x)
    assert launches[-1]["second"] == here.data_ptr()
    nn.utils.parametrize.remove_parametrizations(layer, "down_proj")
    check(launches, layer, x)


@pytest.mark.usefixtures("either_mode")
def test_modules_that_are_replaced(launches) -> None:
    layer = MoELayer(EVERYTHING, backend="fused")
    check(launches, layer, tokens())
    layer.router = copy.deepcopy(layer.router)
    layer.shared_expert = copy.deepcopy(layer.shared_expert)
    check(launches, layer, tokens())
    again = copy.deepcopy(layer)
    check(launches, again, tokens())
    check(launches, layer, tokens())
    assert engine_for(again) is engine_for(layer)


@pytest.mark.usefixtures("either_mode")
def test_layers_that_share_an_engine_in_turn(launches) -> None:
    layers = [MoELayer(CONFIG, backend="fused", seed=seed) for seed in range(3)]
    for layer in (*layers, *layers, layers[0], layers[0]):
        check(launches, layer, tokens())
    assert len({id(engine_for(layer)) for layer in layers}) == 1


@pytest.mark.usefixtures("either_mode")
def test_a_selection_bias_set_later(launches) -> None:
    layer = MoELayer(EVERYTHING, backend="fused")
    check(launches, layer, tokens())
    layer.router.selection_bias = torch.ones(4)
    check(launches, layer, tokens())
    layer.router.selection_bias.data = torch.ones(4)
    check(launches, layer, tokens())


@pytest.mark.usefixtures("either_mode")
def test_a_layer_that_is_cast_or_moved_is_refused(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    check(launches, layer, tokens())
    with pytest.raises(TypeError, match=r"parameters are torch.float32 but its config says torch.bfloat16"):
        layer.float()(tokens())
    layer.bfloat16()
    check(launches, layer, tokens())
    with pytest.raises(TypeError, match=r"x is torch.float32, expected torch.bfloat16"):
        layer(tokens().float())
    layer.to("meta")
    with pytest.raises(ValueError, match="x is on cpu, but the layer is on meta"):
        layer(tokens())
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(UsageError, match="leave autocast"):
        MoELayer(CONFIG, backend="fused")(tokens())
    assert len(launches) == 2


@pytest.mark.usefixtures("either_mode")
def test_what_decides_the_engine(launches, monkeypatch) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    seen = []

    def call() -> None:
        check(launches, layer, tokens())
        seen.append(engine_of(layer))

    call()
    monkeypatch.setenv("MOE_REF_SCHEDULER", "tickets")
    call()
    monkeypatch.setenv("MOE_REF_TRANSPORT", "stores")
    call()
    monkeypatch.setenv("MOE_REF_TRANSPORT", "put_signal")
    call()
    layer.config = layer.config.replace(max_tokens=32)
    call()
    layer.router.weight = nn.Parameter(layer.router.weight.detach().float())
    layer(tokens())
    seen.append(engine_of(layer))
    assert seen[-1].shape.fp32_router
    assert len({id(one) for one in seen}) == len(seen)
    layer.router.bfloat16()
    monkeypatch.delenv("MOE_REF_SCHEDULER")
    monkeypatch.delenv("MOE_REF_TRANSPORT")
    layer.config = layer.config.replace(max_tokens=64)
    call()
    assert seen[-1] is seen[0]


def test_a_router_of_fp32_is_split_again_after_it_changed(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    layer.router.weight = nn.Parameter(layer.router.weight.detach().float())

    def passed() -> int:
        layer(tokens())
        return launches[-1]["router"]

    def parts() -> torch.Tensor:
        return router._parts[id(layer.router.weight)][2]

    first = passed()
    assert passed() == first == parts().data_ptr()
    kept = [parts()]  # so that no address is used again
    with torch.no_grad():
        layer.router.weight.add_(1)
    second = passed()
    kept.append(parts())
    layer.router.weight.data = moved(layer.router.weight)
    third = passed()
    assert len({first, second, third}) == 3


def test_a_router_of_inference_mode_is_split_at_every_call(launches) -> None:
    """Such a tensor has no version that would tell whether it has changed."""
    with torch.inference_mode():
        layer = MoELayer(CONFIG, backend="fused")
        layer.router.weight = nn.Parameter(layer.router.weight.detach().float(), requires_grad=False)
        for _ in range(2):
            layer(tokens())
    assert len(launches) == 2
    assert launches[-1]["router"] not in (0, layer.router.weight.data_ptr())
    assert id(layer.router.weight) not in router._parts


def test_parts_of_a_router_go_with_it(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    layer.router.weight = nn.Parameter(layer.router.weight.detach().float())
    layer(tokens())
    key = id(layer.router.weight)
    assert key in router._parts
    layer.router.weight = nn.Parameter(layer.router.weight.detach().bfloat16())
    gc.collect()
    assert key not in router._parts


@pytest.mark.usefixtures("either_mode")
def test_the_backend_is_switched(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    check(launches, layer, tokens())
    layer.backend = "ref"
    layer(tokens())
    assert len(launches) == 1
    layer.backend = "fused"
    check(launches, layer, tokens())


@pytest.mark.usefixtures("either_mode")
def test_closed_engines_are_not_used_again(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    check(launches, layer, tokens())
    engine_choice.close_engines()
    assert not engine_choice._last
    check(launches, layer, tokens())


@pytest.mark.usefixtures("either_mode")
def test_placements_planners_and_worlds(launches) -> None:
    config = CONFIG.replace(max_tokens=16)
    layer = MoELayer(config, backend="fused", world=FirstOf(2), placement=Placement.from_replicas(HALVES, 2))
    x = tokens()
    check(launches, layer, x)
    check(launches, layer, x)
    assert (launches[-1]["planned"], launches[-1]["quota"]) == (0, 0)
    tables = launches[-1]["placement"]
    layer.placement = Placement.from_replicas([ranks[::-1] for ranks in HALVES], 2)
    check(launches, layer, x)
    assert launches[-1]["placement"] != tables
    layer.placement = Placement.from_replicas(HALVES, 2)
    check(launches, layer, x)
    assert launches[-1]["placement"] == tables

    asked = []

    def planner(counts_PE: np.ndarray, placement: Placement) -> Plan:
        asked.append(counts_PE)
        return schedule(counts_PE, placement)

    layer.planner = planner
    layer(x)
    assert len(asked) == 1
    assert launches[-1]["planned"] == launches[-1]["given"] == 1
    assert launches[-1]["quota"] != 0
    layer.planner = None
    check(launches, layer, x)
    layer.schedule_method = "lp"
    layer(x)
    assert launches[-1]["planned"] == 1
    layer.schedule_method = "flow"
    check(launches, layer, x)

    two = engine_for(layer)
    layer.world, layer.placement = FirstOf(1), Placement.contiguous(4, 1)
    check(launches, layer, x)
    assert engine_for(layer) is not two


@pytest.mark.usefixtures("either_mode")
def test_every_launch_asks_for_its_stream(launches, stream) -> None:
    """A graph is captured on a stream of its own."""
    layer = MoELayer(CONFIG, backend="fused")
    layer(tokens())
    stream[None] = 8
    layer(tokens())
    assert [one["stream"] for one in launches] == [7, 8]


def test_gradients_only_where_they_are_asked_for(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    assert layer(tokens()).requires_grad
    layer.requires_grad_(False)
    assert not layer(tokens()).requires_grad
    assert layer(tokens(requires_grad=True)).requires_grad
    layer.down_proj.requires_grad_(True)
    y = layer(tokens())
    assert y.requires_grad
    y.sum().backward()
    assert layer.down_proj.grad is not None
    assert layer.router.weight.grad is None
    with torch.inference_mode():
        assert not layer(tokens()).requires_grad


def test_gradients_are_those_of_the_reference(launches) -> None:
    """Of every parameter, x and handed-in weights; the kernel's ids are put where it would put them."""
    layer = MoELayer(EVERYTHING, backend="fused")
    twin = MoELayer(EVERYTHING)
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        ids_SK = twin.gate(x).expert_SK
    layer(x)
    used = engine_of(layer)
    used.memory.local("expert")[:16] = ids_SK.flatten().int()
    for handed in (False, True):
        weight = torch.rand(8, 2, generator=torch.Generator().manual_seed(4)).requires_grad_()
        grads = []
        for one in (layer, twin):
            mine = x.clone().requires_grad_()
            weight.grad = None
            one.zero_grad()
            y = one(mine, routing=Routing(ids_SK, weight) if handed else None)
            y.backward(torch.ones_like(y))
            named = {name: p.grad for name, p in one.named_parameters()} | {"x": mine.grad, "weight": weight.grad}
            grads.append({name: None if grad is None else grad.float() for name, grad in named.items()})
        for name, want in grads[1].items():
            got = grads[0][name]
            if want is None or got is None:
                assert name in ("router.weight", "router.bias") if handed else name == "weight"
                assert got is None or not got.any()
                continue
            assert float((got - want).norm()) <= 2e-2 * float(want.norm()), name


def outcome(launches: Launches, layer: MoELayer, x: Any, **given: Any) -> Any:
    """What one call passes to the kernel and what it returns, or how it fails."""
    before = len(launches)
    try:
        y = layer(x, **given)
    except Exception as error:  # of whatever kind: the other way must fail alike
        return type(error), str(error)
    assert len(launches) == before + 1
    got = dict(launches[-1])
    y = y[0] if isinstance(y, (tuple, list)) else y
    if y.numel():
        assert got.pop("y") == y.data_ptr()
    # copies, and what a hook computes, lie elsewhere in each call
    copies = {"x": x, "bias": layer.router.selection_bias, "second": layer._parameters.get("down_proj")}
    for place, value in copies.items():
        if not (isinstance(value, torch.Tensor) and value.is_contiguous() and got[place] == value.data_ptr()):
            del got[place]
    return got, y.shape, y.dtype, y.stride(), y.device, y.requires_grad, y.is_inference(), type(y)


def both_ways(launches: Launches, layer: MoELayer, x: Any, **given: Any) -> Any:
    """The outcome of a call, after one that must come out alike on the long way."""
    got = outcome(launches, layer, x, **given)
    with mock.patch.object(FusedBackend, "quick", return_value=None):
        assert got == outcome(launches, layer, x, **given)
    return got


SHORT = {
    "plain": CONFIG,
    "every feature": EVERYTHING,
    "every feature in fp16": EVERYTHING.replace(dtype="float16"),
    "interleaved": CONFIG.replace(interleaved=True, expert_bias=True),
    "not gated": CONFIG.replace(gated=False, router_bias=True),
    "shared expert": CONFIG.replace(shared_intermediate=64),
    "selection bias": CONFIG.replace(selection_bias=True),
}
LONG = {
    "float32": CONFIG.replace(dtype="float32"),
    "every feature in float32": EVERYTHING.replace(dtype="float32"),
    "capacity": CONFIG.replace(capacity_factor=1.0),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_the_short_way_passes_what_the_long_way_would(launches, long_calls, name, mode) -> None:
    config = {**SHORT, **LONG}[name]
    layer = MoELayer(config, backend="fused")
    with mode():
        x = torch.zeros(64, config.hidden, dtype=config.torch_dtype)
        layer(x)
        for one in (
            x,
            x[:1],
            x[5:8],
            x[None],
            x[:6].view(2, 3, -1),
            x[0],
            # contiguous, but with other strides than a view of the result has
            x[:3, None].transpose(0, 1),
            torch.as_strided(x, (1, config.hidden), (7, 1)),
            torch.as_strided(x, (64, 1, 1, config.hidden), (config.hidden, 1, config.hidden, 1)),
            x.clone().requires_grad_(),
        ):
            before = len(long_calls)
            both_ways(launches, layer, one)
            assert len(long_calls) == before + (1 if name in SHORT else 2)
        layer.backend = "ref"
        layer.backend = "fused"
        before = len(long_calls)
        layer(x)
        assert len(long_calls) == before + (name in LONG)


def no_buffer(layer: MoELayer) -> None:
    """The selection bias as a plain attribute, in a layer that had none in the call before."""
    layer.router.selection_bias = None
    layer(tokens())
    del layer.router.selection_bias
    layer.router.selection_bias = torch.ones(4)


CHANGES: dict[str, Callable[[MoELayer], Any]] = {
    "parameter replaced": lambda layer: setattr(layer, "down_proj", nn.Parameter(moved(layer.down_proj))),
    "data replaced": lambda layer: setattr(layer.down_proj, "data", moved(layer.down_proj)),
    "another dtype there": lambda layer: setattr(layer.down_proj, "data", layer.down_proj.data.view(torch.float16)),
    "fewer experts there": lambda layer: setattr(layer.gate_up_proj, "data", layer.gate_up_proj.data[:2]),
    "transposed": lambda layer: setattr(layer.down_proj, "data", layer.down_proj.data.transpose(1, 2)),
    "sparse": lambda layer: setattr(layer, "down_proj", nn.Parameter(layer.down_proj.detach().to_sparse())),
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "down_proj", nn.Identity()),
    "pruned": lambda layer: prune.identity(layer, "down_proj"),
    "bias taken away": lambda layer: setattr(layer, "down_proj_bias", None),
    "selection bias replaced": lambda layer: setattr(layer.router, "selection_bias", torch.ones(4)),
    "selection bias of 16 bits": lambda layer: setattr(layer.router, "selection_bias", torch.ones(4).bfloat16()),
    "selection bias no buffer": no_buffer,
    "router replaced": lambda layer: setattr(layer, "router", copy.deepcopy(layer.router)),
    "router of fp32": lambda layer: layer.router.float(),
    "no shared expert": lambda layer: setattr(layer, "shared_expert", None),
    "another shared expert": lambda layer: setattr(layer, "shared_expert", copy.deepcopy(layer.shared_expert)),
    "state set": lambda layer: layer.__setstate__({"_parameters": copy.deepcopy(layer._parameters)}),
    "cast": lambda layer: layer.half(),
    "moved": lambda layer: layer.to("meta"),
    "config": lambda layer: setattr(layer, "config", layer.config.replace(max_tokens=32)),
    "placement": lambda layer: setattr(layer, "placement", Placement.contiguous(4, 1)),
    "world": lambda layer: setattr(layer, "world", FirstOf(1)),
    "deadline": lambda layer: setattr(engine_of(layer), "deadline_s", 1.5),
    "engines closed": lambda layer: engine_choice.close_engines(),
}
LASTING = (
    "parametrization",
    "pruned",
    "selection bias of 16 bits",
    "selection bias no buffer",
    "router of fp32",
)
"""Of these no call is short."""
INPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "not contiguous": lambda x: x.repeat(1, 2)[:, ::2],
    "expanded": lambda x: x[:1].expand(8, -1),
    "a parameter": nn.Parameter,
    "in a list": lambda x: [x],
    "no tokens": lambda x: x[:0],
    "no tokens in a batch": lambda x: x.view(2, 4, -1)[:, :0],
    "too many tokens": lambda x: x.repeat(9, 1),
    "another dtype": lambda x: x.float(),
    "another device": lambda x: x.to("meta"),
    "another width": lambda x: x.view(16, -1),
    "no dimensions": lambda x: x[0, 0],
    "nothing": lambda x: None,
}
ROUTING = Routing(torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2))
CALLS: dict[str, tuple[Callable[[], AbstractContextManager], dict[str, Any]]] = {
    "gradients": (torch.enable_grad, {}),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.float16), {}),
    "autocast to its own dtype": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), {}),
    "routing": (nullcontext, {"routing": ROUTING}),
    "statistics": (nullcontext, {"return_stats": True}),
    "MOE_REF_SCHEDULER": (lambda: mock.patch.dict("os.environ", MOE_REF_SCHEDULER="tickets"), {}),
    "MOE_REF_TRANSPORT": (lambda: mock.patch.dict("os.environ", MOE_REF_TRANSPORT="stores"), {}),
}


@pytest.mark.parametrize("name", [*CHANGES, *INPUTS, *CALLS])
def test_what_takes_the_long_way(launches, long_calls, monkeypatch, name) -> None:
    """Whatever has changed since the last call, and input that would be refused."""
    monkeypatch.setattr("moe_ref.layer.LayerStats.of", lambda *_: None)
    layer, x = MoELayer(EVERYTHING, backend="fused"), tokens()
    with torch.no_grad():
        for _ in range(2):
            layer(x)
        assert len(long_calls) == 1
        CHANGES.get(name, lambda _: None)(layer)
        where, given = CALLS.get(name, (nullcontext, {}))
        x = INPUTS.get(name, lambda x: x)(x)
        before, checked = len(long_calls), mock.Mock(wraps=layer.check_input)
        monkeypatch.setattr(layer, "check_input", checked)
        with where():
            got = both_ways(launches, layer, x, **given)
            assert checked.call_count == 2
            assert len(long_calls) - before in (0, 2)
            if name in CHANGES and isinstance(got[0], dict):
                # from then on it is short again
                both_ways(launches, layer, x)
                assert len(long_calls) - before == (4 if name in LASTING else 3)


def test_frozen_layers_in_grad_mode(launches, long_calls) -> None:
    """Nothing requires grad, but only the long way asks."""
    layer = MoELayer(CONFIG, backend="fused").requires_grad_(False)
    for _ in range(2):
        assert not layer(tokens()).requires_grad
    assert len(long_calls) == 2
    assert weakref.ref(layer) not in quick._known


def test_what_was_replaced_is_freed(launches) -> None:
    layer = MoELayer(EVERYTHING, backend="fused")
    with torch.no_grad():
        for _ in range(2):
            layer(tokens())
    gone = [weakref.ref(one) for one in (layer.router, layer.shared_expert, layer.router.weight, layer.down_proj)]
    layer.router, layer.shared_expert = copy.deepcopy(layer.router), None
    layer.down_proj = nn.Parameter(moved(layer.down_proj))
    engine_choice.close_engines()
    gone.append(weakref.ref(layer))
    assert weakref.ref(layer) not in quick._known
    del layer
    gc.collect()
    assert not [one() for one in gone if one() is not None]


def test_a_launch_between_a_call_and_its_remembering(launches, monkeypatch) -> None:
    """Another thread's, of a layer with the same engine: what it passed must not be taken for the first layer's."""
    layer, other = MoELayer(CONFIG, backend="fused"), MoELayer(CONFIG, backend="fused", seed=1)
    launch = backend.launch

    def overtaken(*args: Any) -> torch.Tensor:
        y = launch(*args)
        monkeypatch.setattr(backend, "launch", launch)
        other(tokens())
        return y

    with torch.no_grad():
        other(tokens())
        monkeypatch.setattr(backend, "launch", overtaken)
        layer(tokens())
        for _ in range(3):
            check(launches, layer, tokens())
            check(launches, other, tokens())


def test_gradients_of_gradients_are_refused(launches) -> None:
    """The recomputed chain is cut off from the graph: without an error they would lack a part."""
    layer = MoELayer(CONFIG, backend="fused")
    x = tokens(requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.float().sum().backward()


def test_ids_of_every_number_of_tokens(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    layer(tokens())
    used = engine_of(layer)
    for count in (8, 3, 8):
        written = torch.arange(count * 2) + count
        used.memory.local("expert")[: count * 2] = written.int()
        for ids in used.readback.expert_ids(count):
            assert torch.equal(ids, written.view(count, 2))


def test_a_record_is_fetched_once_and_only_when_it_is_read(launches, monkeypatch) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    filled = []

    def fill(record, used, of, counts, plan, x_SH) -> None:
        filled.extend(counts)
        record.counts_PE, record.routing = np.array([[1]]), [None]

    monkeypatch.setattr(backend, "fill_record", fill)
    monkeypatch.setattr(LocalRanks, "check", lambda self: None)
    record = layer._backend.forward(layer, [tokens()], None)
    assert record.y_SH[0].shape == (8, 128)
    assert record.layout is None
    assert not filled
    assert record.counts_PE[0, 0] == 1
    assert record.routing == [None]
    assert record.plan is None
    assert filled == [8]
    late = layer._backend.forward(layer, [tokens()], None)
    layer(tokens())
    for _ in range(2):
        with pytest.raises(UsageError, match="overwritten by a later call"):
            _ = late.plan
    assert layer._backend.forward(layer, [tokens(5)], None, keep=True).__dict__["routing"] == [None]
    assert filled == [8, 5]


@pytest.mark.usefixtures("either_mode")
def test_what_cuda_refuses_is_an_error(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    check(launches, layer, tokens())
    launches.error = 700
    with pytest.raises(MegakernelError, match="the kernel was not launched: cudaErrorIllegalAddress"):
        layer(tokens())
    launches.error = 0
    check(launches, layer, tokens())


def test_the_error_record_has_the_words_that_the_kernel_writes() -> None:
    assert len(WORDS) == RECORD_WORDS


@pytest.mark.usefixtures("either_mode")
def test_what_an_earlier_call_reported_is_raised(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    check(launches, layer, tokens())
    used = engine_of(layer)
    used.errors.words[STATUS] = 1
    with pytest.raises(MegakernelInputError, match="a logit of the gate is not finite"):
        layer(tokens())
    check(launches, layer, tokens())
    used.errors.words[CODE] = 1
    for _ in range(2):
        with pytest.raises(MegakernelTimeout, match=r"call Engine.recover\(\)"):
            layer(tokens())


@pytest.mark.usefixtures("either_mode")
def test_a_write_that_failed_is_made_up_for(launches) -> None:
    layer = MoELayer(CONFIG, backend="fused")
    check(launches, layer, tokens())
    used = engine_of(layer)
    with pytest.raises(struct.error):
        used._call(0, (*range(len(CHANGING) - 2), "no number"))
    check(launches, layer, tokens())


def test_under_torch_compile(launches, monkeypatch) -> None:
    """The launch is no operation of the graph; around it nothing is frozen."""
    layer = MoELayer(CONFIG, backend="fused")
    check(launches, layer, tokens())
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: setattr(layer, "down_proj", nn.Parameter(moved(layer.down_proj))),
            lambda: monkeypatch.setenv("MOE_REF_SCHEDULER", "tickets"),
        ):
            change()
            used = engine_of(layer)
            x = tokens()
            y = compiled(x)
            got = launches[-1]
            assert (got["x"], got["y"]) == (x.data_ptr(), y.data_ptr())
            assert got["second"] == layer.down_proj.data_ptr()
            assert got["plan"] == used.memory.address("plan")
    torch.compiler.reset()


def test_the_dsl_reads_the_arguments_where_they_are_written() -> None:
    """A host function of the kernel's signature, compiled by the DSL, tells what it was called with."""

    @cute.jit
    def tell(args: Args, operands: Operands, slots: Int32, grid: Int32, stream: cuda.CUstream):
        out = cute.make_tensor(
            cute.make_ptr(Int64, args.trace, cute.AddressSpace.generic, assumed_align=8), cute.make_layout(100)
        )
        for i, value in enumerate((*args, *operands, slots, grid)):
            out[i] = Int64(value)

    kinds = [Int64(1) if "Int64" in str(kind) else Int32(1) for kind in Args.__annotations__.values()]
    operands = Operands(*(Int64(1),) * len(Operands._fields))
    function = cute.compile(tell, Args(*kinds), operands, Int32(1), Int32(1), cuda.CUstream(0))
    told = np.zeros(100, dtype=np.int64)
    fixed = {"trace": told.ctypes.data_as(ctypes.c_void_p).value, "grid": 132, "heap": 1 << 40}
    call = Call(function, fixed)
    reused = [ctypes.c_int64(-1) for _ in range(10_000)]  # whatever was freed is written over
    for base in (100, 300, 300):
        values = tuple(range(base, base + len(CHANGING)))
        call(values[0], values[1:])
        got = dict(zip(argument_names(), told.tolist(), strict=False))
        want = {**dict(zip(CHANGING, values, strict=True)), **fixed}
        want.pop("stream")
        want = dict.fromkeys(got, 0) | want
        assert got == want
    assert len(reused) == 10_000
