"""Compile in parallel what the GPU tests and the benchmark need: compile_all.py RANKS [tests] [several] [bench]
[trace] [scaling] [balance] [transports] [wire]; RANKS: numbers of ranks, separated by commas."""

import os
import sys
import time


def variants_of(ranks: int, what: list[str]) -> list:
    """Kernels of the benchmark's commands that compare variants."""
    from moe_fast.bench import LAYERS
    from moe_fast.bench.variants import spread
    from moe_fast.kernel.constants import TRANSPORTS
    from moe_fast.kernel.shapes import KernelShape

    shapes = []
    if "balance" in what:
        for name in ("paper-e8", "paper-e32"):
            config = LAYERS[name]
            shapes.append(KernelShape.from_config(config, ranks, "spare_warps"))
            for trace in (False, True):
                placement = spread(config.experts, ranks, 2)
                shapes.append(KernelShape.from_config(config, ranks, "spare_warps", trace, placement=placement))
    if "wire" in what:
        for name in ("qwen3", "paper-e32"):
            for wire_format in ("routes", "tokens"):
                config = LAYERS[name].replace(wire_format=wire_format)
                shapes.append(KernelShape.from_config(config, ranks, "spare_warps"))
    if "transports" in what:
        for name in ("paper-e8", "qwen3"):
            fixed = LAYERS[name].replace(layout="fixed", capacity_factor=2.0)
            shapes.append(KernelShape.from_config(fixed, ranks, "spare_warps"))
            for transport in TRANSPORTS:
                shapes.append(KernelShape.from_config(LAYERS[name], ranks, "spare_warps", transport=transport))
    return shapes


def main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:0] = [here, os.path.dirname(here)]
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    import cases

    from moe_fast.bench import LAYERS, scaling
    from moe_fast.compiler import compile_all
    from moe_fast.kernel.shapes import KernelShape

    shapes, what = [], sys.argv[2:]
    for ranks in map(int, sys.argv[1].split(",")):
        if "tests" in what:
            shapes += cases.all_shapes(ranks)
        if "several" in what and ranks > 1:
            shapes += cases.several_shapes(ranks)
        for config in LAYERS.values():
            for scheduler in os.environ.get("SCHEDULERS", "spare_warps").split(","):
                if "bench" in what:
                    shapes.append(KernelShape.from_config(config, ranks, scheduler))
                if "trace" in what:
                    shapes.append(KernelShape.from_config(config, ranks, scheduler, trace=True))
        if "scaling" in what:
            shapes += scaling.shapes(scaling.plan(ranks), ranks)
        if ranks > 1:
            shapes += variants_of(ranks, what)
    shapes = list(dict.fromkeys(shapes))
    start = time.time()
    done = list(compile_all(shapes, jobs=os.cpu_count() or 1))
    print(f"{len(done)} kernels in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
