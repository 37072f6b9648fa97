"""One rank of a local run: `python -m moe_ref.train.worker TASK`, started by moe_ref.train.launch."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from rich.markup import escape

from moe_ref.console import err
from moe_ref.errors import CheckFailed


def main(argument: str) -> int:
    """Run the task (see moe_ref.train.commands.Task) as this rank; returns the exit code."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Late, so that the usage errors of the parent need none of this.
    from moe_ref.train.commands import Task, run_here

    try:
        run_here(Task.from_dict(json.loads(argument)))
    except CheckFailed as error:
        return _failed(error, 1)
    except (ValueError, TypeError, OSError, ImportError) as error:
        return _failed(error, 2)
    except RuntimeError as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        return 130  # the parent says it
    return 0


def _end_with(parent: int) -> None:
    """End this process when whoever started it is gone: nobody would read what it does."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _failed(error: Exception, code: int) -> int:
    err.print(f"[bold red]error:[/] {escape(' '.join(str(error).split()))}", soft_wrap=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
