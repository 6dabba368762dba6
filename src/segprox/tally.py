"""How often each image of a batch was asked about."""

import torch
from torch import Tensor


class Tally:
    """Counts per image: on the host as long as all images count the same, so that nothing is launched for it."""

    def __init__(self, images: Tensor) -> None:
        self._size, self._device = len(images), images.device
        self._every = 0  # what was added for all images
        self._some: Tensor | None = None  # int64 [B]: what was added for some

    def add(self, chosen: Tensor | None, times: int = 1) -> None:
        """So many more for the chosen images (bool `[B]`, or how often for each; None: all)."""
        if chosen is None:
            self._every += times
        else:
            more = chosen if times == 1 else chosen * times
            self._some = more.long() if self._some is None else self._some + more

    def each(self) -> Tensor:
        """The count of each image, int64 `[B]`."""
        if self._some is None:
            return torch.full((self._size,), self._every, device=self._device)
        return self._some + self._every

    def total(self, other: "Tally") -> Tensor | int:
        """This and another together: a number where all images have the same."""
        if self._some is None and other._some is None:
            return self._every + other._every
        return self.each() + other.each()
