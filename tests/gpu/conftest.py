"""Programs that the GPU tests start in processes of their own are no test modules."""

collect_ignore = [
    "cases.py", "compile_all.py", "harness.py", "one_gpu.py", "sanitizer.py", "scenarios.py", "solving.py"
]  # fmt: skip
