"""The one error a user can cause, and how errors of others are told."""

from collections.abc import Iterator
from contextlib import contextmanager


class SegproxError(ValueError):
    """Something about the input is wrong; the message is one sentence that says what to do about it.

    Example:
        >>> import segprox
        >>> try:
        ...     segprox.make_attack("no-such")
        ... except segprox.SegproxError as error:
        ...     print(error)
        there is no attack 'no-such'; known are: alma, alma-prox, ...
    """


def told(error: BaseException) -> str:
    r"""What someone else's code raised, on one line: the kind of the error and the first line of its message.

    Example:
        >>> told(KeyError("weight")), told(RuntimeError("no memory\nat line 3"))
        ("KeyError: 'weight'", 'RuntimeError: no memory')
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what a library or a user's own code raises into one sentence."""
    try:
        yield
    except SegproxError:
        raise
    except (Exception, SystemExit) as error:  # whatever a library or a file of the user may do
        raise SegproxError(f"{what}: {told(error)}") from error
