"""Every exception that tfdist raises on purpose.

Each message states the rule, the value received and the fix, and names the rank whenever ranks can
disagree. All derive from `TfdistError`, so `except tfdist.TfdistError` catches them; each also derives
from the built-in exception that a caller would expect (`ValueError`, `TimeoutError`, ...).
"""

from typing import TYPE_CHECKING


class TfdistError(Exception):
    """Base class of all errors raised by tfdist."""

    # AutoGraph re-raises an error from inside `tf.function` in its own class only if that class is made by
    # this very constructor; the built-in second bases bring others.
    if not TYPE_CHECKING:  # where the assignment would make every error Any
        __init__ = Exception.__init__


class NotInitializedError(TfdistError, RuntimeError):
    """`tfdist.init()` has not been called, or `tfdist.shutdown()` already was."""


class LauncherError(TfdistError, ValueError):
    """The launcher's environment is contradictory or incomplete."""


class BackendUnavailableError(TfdistError, RuntimeError):
    """The requested collective backend cannot run here."""


class CollectiveError(TfdistError, RuntimeError):
    """A collective operation failed; base class of the precise causes below."""


class CollectiveMismatchError(CollectiveError):
    """Ranks called the same collective with different shapes, dtypes or operations."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A rank did not arrive at a collective (or at start-up) within the bound."""


class PeerLostError(CollectiveError):
    """Another rank ended, or its connection broke, while the world was still running."""


class PeerFailedError(TfdistError, RuntimeError):
    """Another rank left `fit()` with an error of its own, so this rank's `fit()` ends, too. The world goes on."""


class OutOfSyncError(TfdistError, RuntimeError):
    """Ranks that must hold identical values do not."""
