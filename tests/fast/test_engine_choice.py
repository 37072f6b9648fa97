"""Which engine a layer gets, and when that is worked out anew; without a GPU the making of engines is replaced."""

from __future__ import annotations

import pytest

from moe_fast import backend
from moe_ref import MoEConfig, MoELayer
from moe_ref.placement import Placement


@pytest.fixture
def made(monkeypatch):
    """(scheduler, transport) of every engine that was looked for."""
    seen: list[tuple[str, str]] = []

    def find(layer, scheduler, transport):
        seen.append((scheduler, transport))
        return object()

    monkeypatch.setattr(backend, "_find_engine", find)
    yield seen
    backend._last.clear()


def test_a_layer_is_looked_at_once(made):
    layer = MoELayer(MoEConfig(32, 16, 4, 2), world=2)
    assert backend.engine_for(layer) is backend.engine_for(layer)
    assert made == [("spare_warps", "auto")]


def test_whatever_decides_the_engine_is_looked_at_again(made, monkeypatch):
    layer = MoELayer(MoEConfig(32, 16, 4, 2), world=2)
    engines = [backend.engine_for(layer)]
    layer.placement = Placement.from_replicas([[0, 1]] * 4, 2)
    engines.append(backend.engine_for(layer))
    layer.config = layer.config.replace(max_tokens=7)
    engines.append(backend.engine_for(layer))
    engines.append(backend.engine_for(layer, transport="put_signal"))
    monkeypatch.setenv("MOE_REF_SCHEDULER", "tickets")
    engines.append(backend.engine_for(layer))
    layer.double()
    engines.append(backend.engine_for(layer))
    assert len({id(engine) for engine in engines}) == len(engines) == len(made)
    assert made[3:] == [("spare_warps", "put_signal"), ("tickets", "auto"), ("tickets", "auto")]
