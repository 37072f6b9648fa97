"""The load model and files of real loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ref.balance.loads import LoadModel, as_prediction, read_loads, split_evenly
from moe_ref.placement.skew import zipf_popularity


def test_the_model_is_reproducible_and_has_the_skew_it_is_asked_for() -> None:
    model = LoadModel(8, 32, 1.0, seed=4)
    first, again = list(model.batches(3)), list(LoadModel(8, 32, 1.0, seed=4).batches(3))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not (first[0] == first[1]).all()
    assert all((counts.sum(axis=1) == 8192).all() for counts in first)
    assert np.sort(model.popularity())[::-1] == pytest.approx(zipf_popularity(32, 1.0))
    mean = np.mean([counts.sum(axis=0) for counts in model.batches(200)], axis=0) / (8 * 8192)
    assert np.abs(mean / model.popularity() - 1).max() < 0.1
    stale = model.stale_popularity()
    assert stale.sum() == pytest.approx(1.0)
    assert 0.2 < np.std(np.log(stale / model.popularity())) < 0.8
    assert as_prediction(stale).dtype == np.int64


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8), st.integers(1, 9))
def test_even_split(load: list[int], ranks: int) -> None:
    counts = split_evenly(np.array(load), ranks)
    assert counts.sum(axis=0).tolist() == load
    assert (np.ptp(counts, axis=0) <= 1).all()
    assert (np.diff(counts, axis=0) <= 0).all()  # remainders to the low ranks


def test_every_format_says_the_same(tmp_path: Path) -> None:
    loads = np.arange(24).reshape(2, 3, 4)
    np.savez(tmp_path / "a.npz", loads=loads.astype(np.uint16))
    (tmp_path / "b.json").write_text(json.dumps({"loads": loads.tolist()}))
    (tmp_path / "c.json").write_text(json.dumps(loads.tolist()))
    for name in ("a.npz", "b.json", "c.json"):
        read = read_loads(tmp_path / name)
        assert (read.load_NTE == loads).all()
        assert (read.domain_N, read.layer_N, read.domain_names) == ((0, 0), (0, 1), ("0",))
    (tmp_path / "d.csv").write_text("e0,e1\n1,2\n3,4\n\n")
    assert read_loads(tmp_path / "d.csv").load_NTE.tolist() == [[[1, 2], [3, 4]]]
    (tmp_path / "e.csv").write_text("1,2\n3,4.0\n")
    assert read_loads(str(tmp_path / "e.csv")).load_NTE.tolist() == [[[1, 2], [3, 4]]]


def test_domains_and_layers(tmp_path: Path) -> None:
    loads = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    np.savez(tmp_path / "x.npz", loads=loads, domains=np.array(["law", "code"]))
    read = read_loads(tmp_path / "x.npz")
    assert read.load_NTE.shape == (6, 4, 5)
    assert read.num_experts == 5
    assert read.domain_names == ("law", "code")
    for n, (domain, layer) in enumerate(zip(read.domain_N, read.layer_N, strict=True)):
        assert (read.load_NTE[n] == loads[domain, layer]).all()
    with pytest.raises(OSError, match=r"gone.npz"):
        read_loads(tmp_path / "gone.npz")
