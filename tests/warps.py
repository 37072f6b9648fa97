"""Kernel code that a warp runs together, as plain Python on 32 lanes: for testing it where there is no GPU.

`load` executes a module's source with stand-ins for the CuTe DSL: an integer is `Lanes`, one value for each lane; what
lanes do together (shuffles, votes, reductions) works on all of them; `cute.jit` does nothing. A branch or a loop must
go the same way in all lanes: `Lanes` refuses to be a truth value otherwise, so code that would diverge shows. Code of
single threads runs on `Lanes` of width 1.

Lanes of a GPU don't run in step, so `Memory` checks the order of what they do: what a lane wrote, others may read or
write only after a barrier of the warp (`sync`). That a word is read before another lane writes it isn't checked.
"""

from __future__ import annotations

import importlib.util
import operator
import types
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 32
counts: Counter[str] = Counter()
"""How often the warp did what takes long: shuffles, votes, reductions, loads."""


class Lanes:
    """One int32 (or truth value) for each lane."""

    def __init__(self, values: Any) -> None:
        values = values.values if isinstance(values, Lanes) else np.asarray(values)
        self.values = values if values.dtype == bool else values.astype(np.int32)

    def __bool__(self) -> bool:
        values = self.values.reshape(-1)
        assert (values == values[0]).all(), f"a branch that lanes take differently: {values}"
        return bool(values[0])

    def __index__(self) -> int:
        values = self.values.reshape(-1)
        assert (values == values[0]).all(), f"a bound that lanes see differently: {values}"
        return int(values[0])

    def __invert__(self) -> Lanes:
        return Lanes(~self.values)

    def __neg__(self) -> Lanes:
        return Lanes(-self.values)


def _operator(name: str, reflected: bool):
    function = getattr(operator, name)

    def apply(self: Lanes, other: Any) -> Lanes:
        a, b = self.values, other.values if isinstance(other, Lanes) else np.asarray(other)
        if a.dtype != bool and b.dtype != bool:
            # differences of words of bits may wrap, sums and products must not
            a, b = a.astype(np.int64), b.astype(np.int64)
        found = function(b, a) if reflected else function(a, b)
        if found.dtype != bool and name in ("add", "mul"):
            assert (np.abs(found) < 1 << 31).all(), f"{name} leaves int32"
        return Lanes(found if found.dtype == bool else found.astype(np.int32))

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "lshift", "rshift"):
    setattr(Lanes, f"__{_name.rstrip('_')}__", _operator(_name, False))
    setattr(Lanes, f"__r{_name.rstrip('_')}__", _operator(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Lanes, f"__{_name}__", _operator(_name, False))


NOBODY, SEVERAL = -1, -2
"""Instead of a lane that has accessed a word."""


class Memory:
    """An array in shared memory; an address for each lane."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words
        # of each word the lane that wrote it since the last barrier
        self.writer = np.full(len(words), NOBODY)
        _memories.append(weakref.ref(self))

    def __getitem__(self, at: Any) -> Lanes:
        counts["load"] += 1
        where = _address(at)
        if where.shape == (WIDTH,):
            self._check(where, np.arange(WIDTH))
        return Lanes(self.words[where])

    def __setitem__(self, at: Any, value: Any) -> None:
        self.words[_address(at)] = value.values if isinstance(value, Lanes) else value

    def _check(self, where: np.ndarray, lanes: np.ndarray) -> None:
        writer = self.writer[where]
        ok = (writer == NOBODY) | (writer == lanes)
        assert ok.all(), f"lanes {lanes[~ok]} access what others wrote, without a barrier"

    def wrote(self, where: np.ndarray, lanes: np.ndarray, adds: bool = False) -> None:
        """Note that lanes wrote words; adds: so that others may do the same."""
        before = self.writer[where]
        if not adds:
            self._check(where, lanes)
        self.writer[where] = lanes
        again = (self.writer[where] != lanes) | ((before != NOBODY) & (before != lanes))
        assert adds or not again.any(), f"several lanes write a word: {lanes[again]}"
        self.writer[where[again]] = SEVERAL


_memories: list[weakref.ref[Memory]] = []


def _sync() -> None:
    """A barrier of the warp: what lanes wrote is there for all."""
    _memories[:] = [reference for reference in _memories if reference() is not None]
    for memory in filter(None, (reference() for reference in _memories)):
        memory.writer.fill(NOBODY)


def _address(at: Any) -> np.ndarray:
    values = at.values if isinstance(at, Lanes) else np.asarray(at)
    assert (values >= 0).all(), f"an address below the array: {values}"
    return values


def _spread(value: Any) -> np.ndarray:
    return np.broadcast_to(Lanes(value).values, (WIDTH,))


def _mask(bits: np.ndarray) -> Lanes:
    return Lanes(np.full(WIDTH, int(sum(1 << int(i) for i in np.flatnonzero(bits))), dtype=np.int64))


def _each(name: str, function: Any) -> Any:
    def together(value: Any) -> Lanes:
        counts[name] += 1
        return Lanes(np.full(WIDTH, function(_spread(value))))

    return together


def _from_lane(value: Any, lane: Any) -> Lanes:
    counts["shuffle"] += 1
    return Lanes(_spread(value)[_spread(lane) % WIDTH])


def _vote(condition: Any) -> Lanes:
    counts["vote"] += 1
    return _mask(_spread(condition))


def _count_bits(mask: Any) -> Lanes:
    return Lanes(np.array([int(v).bit_count() for v in (Lanes(mask).values.astype(np.int64) & 0xFFFFFFFF).reshape(-1)]))


def _put_where(m: Memory, condition: Any, at: Any, value: Any) -> None:
    on = _spread(condition)
    where = _address(_spread(at)[on])
    m.wrote(where, np.flatnonzero(on))
    m.words[where] = _spread(value)[on]


def _add_where(m: Memory, condition: Any, at: Any, value: Any) -> None:
    counts["atomic"] += 1
    on = _spread(condition)
    where = _address(_spread(at)[on])
    m.wrote(where, np.flatnonzero(on), adds=True)
    np.add.at(m.words, where, _spread(value)[on])


def _pick(condition: Any, yes: Any, no: Any) -> Lanes:
    return Lanes(np.where(Lanes(condition).values, Lanes(yes).values, Lanes(no).values))


def _smaller(a: Any, b: Any) -> Any:
    return min(a, b) if not isinstance(a, Lanes) and not isinstance(b, Lanes) else _pick(Lanes(a) < b, a, b)


def _larger(a: Any, b: Any) -> Any:
    return max(a, b) if not isinstance(a, Lanes) and not isinstance(b, Lanes) else _pick(Lanes(a) > b, a, b)


def load(path: Path) -> types.ModuleType:
    """A module of `moe_fast.kernel`, to be called with `Lanes` and `Memory`; it must name what lanes do together as
    `moe_fast.kernel.solver` does."""
    spec = importlib.util.spec_from_loader(f"warps.{path.stem}", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    source = path.read_text()
    for line in ("import cutlass\n", "import cutlass.cute as cute\n", "from cutlass import Boolean, Int32\n"):
        assert line in source, f"{path} doesn't hold {line!r}"
        source = source.replace(line, "\n", 1)
    cutlass = types.SimpleNamespace(
        range_constexpr=range, const_expr=lambda value: value, Constexpr=Any, select_=_pick,
    )  # fmt: skip
    cute = types.SimpleNamespace(
        jit=lambda function: function,
        make_rmem_tensor=lambda size, kind: [Lanes(0)] * size,
        arch=types.SimpleNamespace(),
    )
    stand_ins = {"cutlass": cutlass, "cute": cute, "Int32": Lanes, "Boolean": Lanes, "min": _smaller, "max": _larger}
    import sys

    sys.modules[spec.name] = module
    vars(module).update(stand_ins)
    exec(compile(source, str(path), "exec"), vars(module))
    vars(module).update(
        pick=_pick, from_lane=_from_lane, vote=_vote, count_bits=_count_bits, put_where=_put_where,
        add_where=_add_where, sync=_sync, least=_each("reduction", np.min), most=_each("reduction", np.max),
        total_of=_each("reduction", np.sum),
        union_of=_each("reduction", np.bitwise_or.reduce),
    )  # fmt: skip
    return module
