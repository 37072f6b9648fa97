"""Errors that carry an exit code, so that the command line and programs agree on what went wrong."""


class UsageError(ValueError):
    """Wrong use or a missing environment (exit code 2): says what was wrong, what was expected, what to do."""


class BackendUnavailable(UsageError):
    """A backend was asked for that can't run here (exit code 2); names the extra or the remedy."""


class CheckFailed(RuntimeError):
    """A check or a comparison failed (exit code 1)."""
