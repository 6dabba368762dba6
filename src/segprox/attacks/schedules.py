"""How numbers change over an attack; t runs from 1 to `steps`."""

import math


def share(t: int, steps: int) -> float:
    """How much of the attack is over, from 0 to 1."""
    return (t - 1) / max(steps - 1, 1)


def cosine(first: float, last: float, t: int, steps: int) -> float:
    """From the first value to the last along half a cosine."""
    return last + (first - last) * (1 + math.cos(math.pi * share(t, steps))) / 2


def exponential(first: float, last: float, t: int, steps: int) -> float:
    """From the first value to the last by a constant factor per step."""
    return float(first * (last / first) ** share(t, steps))


def linear(first: float, last: float, t: int, steps: int) -> float:
    """From the first value to the last by a constant difference per step."""
    return first + (last - first) * share(t, steps)
