"""`python -m moe_ref` is `moe-ref`; this is the form that torchrun starts."""

from moe_ref.cli import main

main()
