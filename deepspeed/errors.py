"""Errors that users see. Each says what went wrong, where, what was given and what to do about it.

Where callers of the upstream project catch a built-in class (ValueError, AssertionError, RuntimeError), the error raised
here derives from that class as well, so that existing `except` clauses keep working.
"""


class DeepSpeedError(Exception):
    """Base of every error this package raises for a user's mistake or a failing environment."""


class DeepSpeedConfigError(DeepSpeedError, ValueError, AssertionError):
    """The configuration is wrong: unknown key, wrong type, out of range, or in conflict with another key."""


class FeatureNotAvailableError(DeepSpeedConfigError, NotImplementedError):
    """The configuration switches on a feature that this release does not have yet."""


class PlanError(DeepSpeedError, ValueError, AssertionError):
    """Model, optimizer, topology and configuration cannot work together."""


class UsageError(DeepSpeedError, AssertionError, RuntimeError):
    """A method was called at a moment or with arguments that cannot work."""


class CheckpointError(DeepSpeedError, RuntimeError, ValueError, AssertionError):
    """A checkpoint cannot be written or read."""


class CommError(DeepSpeedError, RuntimeError):
    """Ranks disagree about what to communicate, or communication failed."""


class OffloadError(DeepSpeedError, RuntimeError):
    """State cannot be moved to or from host memory or disk."""


class OpBuildError(DeepSpeedError, RuntimeError):
    """A native operator is not available on this machine."""


class LauncherError(DeepSpeedError, ValueError, RuntimeError):
    """The launcher cannot start the job: hostfile, filters, master address or missing program."""
