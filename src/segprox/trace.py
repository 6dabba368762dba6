"""What an attack would have returned had it been stopped earlier."""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 64  # improvements kept of an image: about 2 kB of a record
FINEST = 0.01  # relative changes of the norm below this are never kept


class Improvement(NamedTuple):
    """From so many queries (forwards and backwards) on, the attack's best point was a success of this norm."""

    queries: int
    norm: float


Trace = tuple[Improvement, ...]


class Journal:
    """Writes down a batch's best norms query by query, and does not wait for the device until it is read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._queries: list[Tensor | int] = []
        self._norms: list[Tensor] = []
        self._successes: list[Tensor] = []

    def note(self, queries: Tensor | int, norm: Tensor, success: Tensor) -> None:
        """What has been spent and what is best by now, `[B]` each; tensors that nobody changes later.

        `queries` may be a number where it is the same for all images.
        """
        self._queries.append(queries)
        self._norms.append(norm)
        self._successes.append(success)

    def traces(self) -> tuple[Trace, ...]:
        """One per image, empty if there was no success."""
        if not self._norms:
            return ((),) * self.size
        norms = torch.stack(self._norms, 1).cpu().double()
        norms = torch.where(torch.stack(self._successes, 1).cpu(), norms, torch.nan)
        like = self._norms[0]
        spent = [torch.full_like(like, q, dtype=torch.long) if isinstance(q, int) else q for q in self._queries]
        queries = torch.stack(spent, 1).cpu()
        before = torch.cat([torch.full_like(norms[:, :1], torch.nan), norms[:, :-1]], 1)
        changed = ((norms != before) & ~norms.isnan()).tolist()
        return tuple(
            thin([Improvement(*step) for step in compress(zip(*image), chosen)])
            for *image, chosen in zip(queries.tolist(), norms.tolist(), changed)
        )


def thin(steps: Sequence[Improvement], most: int = MOST) -> Trace:
    """At most so many of the steps: the first, the last, and between them those that change the norm noticeably.

    Example:
        >>> thin([Improvement(1, 0.5), Improvement(3, 0.499), Improvement(5, 0.25), Improvement(7, 0.2499)])
        (Improvement(queries=1, norm=0.5), Improvement(queries=5, norm=0.25), Improvement(queries=7, norm=0.2499))
    """
    noticeable = FINEST
    while len(kept := _noticed(steps, noticeable)) > most:
        noticeable *= 2
    return tuple(kept)


def _noticed(steps: Sequence[Improvement], noticeable: float) -> list[Improvement]:
    kept = list(steps[:1])
    for step in steps[1:]:
        if abs(step.norm - kept[-1].norm) > noticeable * kept[-1].norm:
            kept.append(step)
    return kept if kept == [] or kept[-1] == steps[-1] else [*kept, steps[-1]]
