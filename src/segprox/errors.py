"""The one error a user can cause."""


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
