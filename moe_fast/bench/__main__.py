"""python -m moe_fast.bench: `moe-ref bench`, with its one-line errors and its --debug."""

import sys

from moe_ref.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
