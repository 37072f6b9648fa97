"""The fit finds parameters that are known, and the h200-2 preset is as near to its records as its docstring says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moe_ref.errors import UsageError
from moe_ref.runtime.calibrate import Calibration, balanced_routing, calibrate, simulate_ms
from moe_ref.runtime.callplan import count_experts
from moe_ref.runtime.machine import machine
from moe_ref.runtime.recorded import H200, Record, load_records
from moe_ref.runtime.workload import Workload


def test_known_parameters_are_found_again():
    truth = machine("h200-2").replace(chain_flops_share=0.6, product_us=20.0, issue_us=9.0, sync_us=200.0)
    works = [Workload(r, s, e) for r, s, e in ((1, 1024, 8), (2, 2048, 32), (2, 8192, 8), (1, 8192, 64))]
    records = [Record(k, w, simulate_ms(Record(k, w, 1.0), truth)) for w in works for k in ("products", "chain")]
    start = machine("h200-2").replace(chain_flops_share=0.9, product_us=40.0, issue_us=25.0, sync_us=500.0)
    found = calibrate(start, records)
    for name in ("chain_flops_share", "product_us", "issue_us", "sync_us", "pass_bytes_per_s"):
        assert getattr(found.machine, name) == pytest.approx(getattr(truth, name), rel=0.02), name
    assert max(abs(e) for e in found.errors) < 0.005
    assert found.machine.flops_16 == start.flops_16, "no record speaks of it"


def test_tile_records_fit_the_persistent_kernel():
    truth = machine("h200-2").replace(flops_16=600e12, flops_32=300e12, remote_us=4.0)
    works = [Workload(1, 2048, 8), Workload(1, 2048, 64), Workload(2, 2048, 16)]
    records = [Record("tiles", w, simulate_ms(Record("tiles", w, 1.0), truth)) for w in works]
    found = calibrate(machine("h200-2"), records)
    assert found.machine.flops_16 == pytest.approx(600e12, rel=0.05)
    assert found.machine.flops_32 == pytest.approx(found.machine.flops_16 * 421.5 / 843)
    assert max(abs(e) for e in found.errors) < 0.02


def test_the_preset_is_as_near_to_its_records_as_it_says():
    preset = machine("h200-2")
    found = Calibration(preset, H200, tuple(simulate_ms(r, preset) for r in H200)).summary()
    for kind, row in found.items():
        print(f"{kind}: {row['records']} records, mean {row['mean_abs']:.1%}, largest {row['max_abs']:.1%}")
    assert {kind: row["records"] for kind, row in found.items()} == {"products": 27, "chain": 27, "tiles": 5}
    for kind, mean, largest in (("tiles", 0.035, 0.075), ("products", 0.075, 0.195), ("chain", 0.085, 0.285)):
        assert found[kind]["mean_abs"] <= mean, kind
        assert found[kind]["max_abs"] <= largest, kind


def test_balanced_routing_is_balanced():
    for work in (Workload(2, 1024, 128, top_k=8), Workload(3, 1000, 8, top_k=2)):
        counts = np.stack([count_experts(ids, work.experts) for ids in balanced_routing(work)])
        assert counts.max() - counts.min() <= 1


def test_records_are_read_from_a_file_and_checked(tmp_path):
    path = tmp_path / "records.json"
    path.write_text(json.dumps([{"kind": "chain", "ms": 1.5, "ranks": 2, "tokens": 64, "experts": 8}]))
    assert load_records(path) == [Record("chain", Workload(2, 64, 8), 1.5)]
    for text, message in (
        ("{", "can't be read as JSON"),
        ("[]", "expected a list of records"),
        ('[{"kind": "chain", "ranks": 2, "tokens": 64, "experts": 8}]', "record 0 .* not usable: 'ms'"),
        ('[{"kind": "guess", "ms": 1, "ranks": 2, "tokens": 64, "experts": 8}]', "kind is 'guess'"),
        ('[{"kind": "chain", "ms": 0, "ranks": 2, "tokens": 64, "experts": 8}]', "ms is 0"),
        ('[{"kind": "chain", "ms": 1, "ranks": 0, "tokens": 64, "experts": 8}]', "ranks is 0"),
        ('[{"kind": "chain", "ms": 1, "rank": 2, "tokens": 64, "experts": 8}]', "unexpected keyword argument 'rank'"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            load_records(path)
    with pytest.raises(UsageError, match="1 records of kind chain can't fit"):
        calibrate(machine("h200-2"), [Record("chain", Workload(2, 64, 8), 1.0)])
    with pytest.raises(UsageError, match="calibrate needs records"):
        calibrate(machine("h200-2"), [])
