"""What kvx raises."""


class Error(ValueError):
    """A call that kvx refuses. The message names the argument, its value and what was expected.

    Nothing has changed.
    """


class OutOfRangeError(Error):
    """Too many tokens, too few free blocks, or more memory than the machine has."""


class UnsupportedError(Error):
    """Something that kvx cannot do."""


class InternalError(RuntimeError):
    """A fault of kvx itself."""
