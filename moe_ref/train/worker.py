"""One rank of a local run: `python -m moe_ref.train.worker [--debug] TASK`, started by moe_ref.train.launch."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from moe_ref.cli import exit_code


def main(argument: str, debug: bool = False) -> int:
    """Run the task (see moe_ref.train.commands.Task) as this rank; returns the exit code."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Late, so that the usage errors of the parent need none of this.
    from moe_ref.train.commands import Task, run_here

    try:
        run_here(Task.from_dict(json.loads(argument)))
    except KeyboardInterrupt:
        return 130  # the parent says it
    except BaseException as error:
        return exit_code(error, debug)
    return 0


def _end_with(parent: int) -> None:
    """End this process when whoever started it is gone: nobody would read what it does."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[-1], "--debug" in sys.argv[1:-1]))
