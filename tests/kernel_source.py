"""Single functions of `moe_fast.kernel` on the CPU, without the DSL, by one thread or by some that meet."""

from __future__ import annotations

import ast
import textwrap
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import moe_fast.kernel
from moe_fast.kernel.ring import ring_phase, ring_place


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse((Path(moe_fast.kernel.__path__[0]) / f"{module}.py").read_text())


def loop(*bounds: int, unroll: int = 1) -> range:
    """`cutlass.range`."""
    return range(*bounds)


def stand_ins() -> dict[str, Any]:
    """For names that most functions use."""
    cutlass = types.SimpleNamespace(
        const_expr=lambda value: value, range_constexpr=range, range=loop, Constexpr=defaultdict(int)
    )
    rings = {"ring_place": ring_place, "ring_phase": ring_phase}
    return {"cutlass": cutlass, "Int32": int, "Int64": int, "Boolean": bool, **rings}


def kernel_function(module: str, name: str, **names: Any) -> Any:
    """A function of `moe_fast.kernel` as plain Python, with stand-ins for what it calls; see `stand_ins` for those that
    all have."""
    (found,) = (node for node in parsed(module).body if isinstance(node, ast.FunctionDef) and node.name == name)
    found.decorator_list = []
    space = stand_ins() | names
    code = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), found], [])
    exec(compile(ast.fix_missing_locations(code), f"{module}.py", "exec"), space)
    return space[name]


def kernel_loop(module: str, name: str, *variables: str, **names: Any) -> Any:
    """The last outer loop of a function, as a function of the variables that it changes; else as `kernel_function`."""
    (found,) = (node for node in parsed(module).body if isinstance(node, ast.FunctionDef) and node.name == name)
    loop_node = [node for node in found.body if isinstance(node, ast.While)][-1]
    source = f"def {name}_loop({', '.join(variables)}):\n{textwrap.indent(ast.unparse(loop_node), '    ')}\n"
    space = stand_ins() | names
    exec(compile(source, f"{module}.py", "exec"), space)
    return space[f"{name}_loop"]


def run_together(count: int, role: Callable[[int], Any], *barriers: threading.Barrier) -> list[Any]:
    """role(0) to role(count - 1) in threads that meet in the barriers; what they return. If one fails, the barriers let
    the others go, and its error is raised, not theirs."""
    answers: list[Any] = [None] * count
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            answers[number] = role(number)
        except BaseException as error:
            failed.append(error)
            for barrier in barriers:
                barrier.abort()

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if failed:
        raise next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0])
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return answers
