"""The registry of backends: whoever computes a layer's forward.

Backends are found through the entry-point group `moe_ref.backends`, so `moe_ref` never imports those of other packages.
An entry is a class like `ReferenceBackend` below: created without arguments, cheap to create.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from moe_ref import counts, pipeline
from moe_ref.errors import BackendUnavailable
from moe_ref.gate import Routing

if TYPE_CHECKING:
    from moe_ref.layer import MoELayer

EXTRAS = {
    "fused": ("fused", "one persistent kernel, needs a Hopper GPU"),
    "unfused": ("fused", "torch + NCCL + grouped_mm, needs a GPU"),
}
"""Backends of this project that live in another package: the extra that brings each, and what it is."""


@runtime_checkable
class Backend(Protocol):
    """What the layer and the differential harness ask of a backend.

    What one may have beside these: `quick(layer, x)`, y of a plain forward without statistics, or None where `forward`
    is to be called behind all checks; `refuse(layer)`, which tells other ranks that this one's input was refused;
    `resume`, see `ReferenceBackend`; `default_dtype` and `tolerances`.
    """

    name: str

    def unavailable(self) -> str | None:
        """Why this backend can't run here and what to do about it; None if it can."""

    def forward(
        self, layer: MoELayer, x_SH: Sequence[Tensor], routing: Sequence[Routing] | None, *, keep: bool = False
    ) -> pipeline.Record:
        """Results per local rank in `y_SH`, with `counts_PE`, `plan` and the rest of the record's integers filled in;
        with `keep` every intermediate that exists, rows in the order (slot, source, token)."""
        ...


class ReferenceBackend:
    """Plain PyTorch on the device of the layer: the oracle."""

    name = "ref"

    def unavailable(self) -> str | None:
        return None

    def forward(
        self, layer: MoELayer, x_SH: Sequence[Tensor], routing: Sequence[Routing] | None, *, keep: bool = False
    ) -> pipeline.Record:
        return pipeline.run(layer, x_SH, routing, keep=keep)

    def refuse(self, layer: MoELayer) -> None:
        """Tell the other ranks that this one's input was refused."""
        counts.refuse(layer)

    def resume(
        self, layer: MoELayer, x_SH: Sequence[Tensor], routing: Sequence[Routing], given: pipeline.Record
    ) -> pipeline.Record:
        """Forward that takes the buffers in `given` instead of computing them; keeps every intermediate."""
        return pipeline.run(layer, x_SH, routing, given=given, keep=True)


def _entries() -> dict:
    return {entry.name: entry for entry in entry_points(group="moe_ref.backends")}


def default_dtype(name: str) -> str:
    """The dtype that commands take where none is asked for: a backend's own `default_dtype`, else float32.

    Raises:
        BackendUnavailable: as `get`.
    """
    return getattr(get(name), "default_dtype", "float32")


def tolerance(backend: Backend, dtype: str) -> float:
    """Largest relative deviation that a backend's own arithmetic explains beyond the dtype's: an attribute `tolerances`
    names it by dtype (products of TF32 in float32 layers); else 0."""
    return getattr(backend, "tolerances", {}).get(dtype, 0.0)


def available() -> dict[str, str | None]:
    """Every known backend and why it can't run here; None if it can.

    >>> available()["ref"] is None
    True
    """
    result: dict[str, str | None] = {}
    entries = _entries()
    for name in sorted({"ref", *EXTRAS, *entries}):
        try:
            result[name] = get(name).unavailable()
        except BackendUnavailable as error:
            result[name] = str(error)
    return result


def get(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        BackendUnavailable: no such backend, its extra is not installed, or it does not import; the message says which.
    """
    if name == "ref":
        return ReferenceBackend()
    entry = _entries().get(name)
    if entry is None:
        if name in EXTRAS:
            extra, what = EXTRAS[name]
            raise BackendUnavailable(f"backend {name!r} ({what}) is not installed; pip install -e '.[{extra}]'")
        known = ", ".join(sorted({"ref", *EXTRAS, *_entries()}))
        raise BackendUnavailable(f"unknown backend {name!r}, expected one of {known}")
    try:
        return entry.load()()
    except Exception as error:  # another package's code: whatever it raises, the cause is that this backend is broken
        extra = EXTRAS.get(name, (name, ""))[0]
        raise BackendUnavailable(
            f"backend {name!r} does not import ({type(error).__name__}: {error}); pip install -e '.[{extra}]'"
        ) from error
