"""Single functions of `moe_fast.kernel` on the CPU, one thread at a time, without the DSL."""

from __future__ import annotations

import ast
import textwrap
import types
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import moe_fast.kernel


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
    return {"cutlass": cutlass, "Int32": int, "Int64": int, "Boolean": bool}


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
