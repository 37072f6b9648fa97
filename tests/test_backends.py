"""The registry of backends and the doctor."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from moe_ref import MoEConfig, MoELayer, backends, doctor
from moe_ref.errors import BackendUnavailable

CONFIG = MoEConfig(hidden=8, intermediate=8, experts=2, top_k=1)


def test_the_reference_is_always_available() -> None:
    assert backends.available()["ref"] is None
    assert MoELayer(CONFIG).backend == "ref"


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match=r"unknown backend 'fuzed', expected one of fused, ref, unfused"):
        MoELayer(CONFIG, backend="fuzed")


def test_a_backend_that_is_not_installed_names_the_extra(monkeypatch) -> None:
    monkeypatch.setattr(backends, "_entries", dict)
    with pytest.raises(BackendUnavailable, match=r"pip install -e '.\[fused\]'"):
        MoELayer(CONFIG, backend="fused")
    assert "'.[fused]'" in (backends.available()["fused"] or "")


def test_a_backend_that_does_not_import_says_why(monkeypatch) -> None:
    entry = EntryPoint("fused", "no_such_module_of_ours:Backend", "moe_ref.backends")
    monkeypatch.setattr(backends, "_entries", lambda: {"fused": entry})
    with pytest.raises(BackendUnavailable, match=r"does not import.*no_such_module_of_ours.*'\.\[fused\]'"):
        backends.get("fused")


def test_a_backend_that_cannot_run_here_says_why(monkeypatch) -> None:
    class NeedsMoon(backends.ReferenceBackend):
        name = "moon"

        def unavailable(self) -> str | None:
            return "no moon in sight; wait for the night"

    monkeypatch.setattr(backends, "get", lambda name: NeedsMoon())
    with pytest.raises(BackendUnavailable, match="backend 'moon' can't run here: no moon in sight"):
        MoELayer(CONFIG, backend="moon")


def test_switching_is_checked_when_it_is_set() -> None:
    layer = MoELayer(CONFIG)
    with pytest.raises(BackendUnavailable):
        layer.backend = "nonsense"
    assert layer.backend == "ref"
    assert layer(torch.zeros(1, 8)).shape == (1, 8)


def test_doctor_finds_the_reference_ready() -> None:
    checks = {check.name: check for check in doctor.run_checks()}
    for name in ("Python", "torch", "numpy", "highspy", "networkx", "numba", "package data", "backend ref"):
        assert checks[name].state == "ok", checks[name]
    assert all(
        check.remedy or check.state == "ok" or "pip install" in check.found for check in doctor.reference_checks()
    )


def test_doctor_names_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda package: None if package == "highspy" else "1.0.0+cpu")
    checks = {check.name: check for check in doctor.reference_checks()}
    assert checks["highspy"].state == "problem"
    assert checks["highspy"].remedy == "pip install 'highspy>=1.13'"
    assert checks["torch"].state == "problem"
    assert "need 2.9" in checks["torch"].found
    assert checks["transformers"].state == "optional"


def test_a_check_that_raises_is_a_finding(monkeypatch) -> None:
    def broken() -> list[doctor.Check]:
        raise RuntimeError("the driver fell over")

    monkeypatch.setattr(doctor, "backend_checks", broken)
    assert any(c.state == "problem" and "driver fell over" in c.found for c in doctor.run_checks())


def test_each_backend_has_a_dtype_of_its_own(monkeypatch) -> None:
    class Coarse(backends.ReferenceBackend):
        default_dtype = "bfloat16"

    assert backends.default_dtype("ref") == "float32"
    monkeypatch.setattr(backends, "get", lambda name: Coarse())
    assert backends.default_dtype("coarse") == "bfloat16"
