"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from moe_ref.doctor import rows_are_invariant

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """One thread for products, here and in child processes: workers share the cores, small products need no more."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit-for-bit claims fix the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def same_rows():
    """Whether two tensors have the same bits, or on a BLAS that mixes rows agree to 1e-6; says how they differ."""
    invariant = {dtype: rows_are_invariant(dtype) for dtype in (torch.float32, torch.float64)}

    def check(a: torch.Tensor, b: torch.Tensor) -> bool:
        a, b = a.detach(), b.detach()
        dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
        if invariant[dtype] and not torch.equal(a, b):
            print(f"bits differ, largest difference {float((a - b).abs().max())}")
            return False
        if not invariant[dtype]:
            print("this BLAS does not keep the bits of a row; comparing norm-wise to 1e-6")
            return float((a - b).double().norm()) <= 1e-6 * float(b.double().norm())
        return True

    return check
