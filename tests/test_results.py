"""The one format of result files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moe_ref.results import COMMIT_VARIABLE, PROVENANCE_KEYS, provenance, write_results


def test_provenance_says_how_a_result_came_about() -> None:
    record = provenance("moe-ref run", ("safetensors", "no-such-distribution"))
    assert tuple(record) == PROVENANCE_KEYS
    assert record["command"] == "moe-ref run"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["date"])
    assert record["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["commit"])
    assert re.match(r"\d+\.\d+", record["packages"]["torch"])
    assert record["packages"]["safetensors"]
    assert record["packages"]["no-such-distribution"] is None
    assert record["device"]


def test_who_copied_the_checkout_says_its_commit(monkeypatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "0123abc")
    assert provenance("x")["commit"] == "0123abc"
    monkeypatch.delenv(COMMIT_VARIABLE)
    assert provenance("x")["commit"] != "0123abc"


def test_results_are_written_as_they_are(tmp_path: Path) -> None:
    results = {**provenance("x"), "value": 1.5, "list": [1, 2]}
    path = tmp_path / "deep" / "result.json"
    write_results(path, results)
    assert json.loads(path.read_text()) == results


def test_results_without_provenance_or_with_nan_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(ValueError, match=r"result.json lacks the provenance keys \['date'"):
        write_results(path, {"value": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results(path, {**provenance("x"), "value": float("nan")})
    assert not path.exists()


def test_committed_results_have_provenance() -> None:
    folder = Path(__file__).parent.parent / "docs" / "results"
    files = sorted(folder.glob("*.json"))
    assert files
    for file in files:
        missing = set(PROVENANCE_KEYS) - set(json.loads(file.read_text()))
        assert not missing, f"{file.name} lacks {sorted(missing)}"
