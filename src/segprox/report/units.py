"""How sizes of perturbations are counted and written, for each norm."""

from dataclasses import dataclass
from typing import Any, get_args

from segprox.errors import SegproxError
from segprox.norms import NormName
from segprox.run.store import Store
from segprox.sizes import unbroken_size


@dataclass(frozen=True)
class Unit:
    """A norm as people in the field write it: linf in 255ths, all others as they are."""

    norm: NormName

    @classmethod
    def of(cls, store: Store) -> "Unit":
        """The unit of a run: the norm that its attack minimises or stays within."""
        norm: Any = store.header.get("norm") or "linf"
        if norm not in get_args(NormName):
            raise SegproxError(f"{store.folder} measures in {norm!r}, which this segprox does not know")
        return cls(norm)

    @property
    def factor(self) -> float:
        """What sizes are multiplied by."""
        return 255.0 if self.norm == "linf" else 1.0

    @property
    def name(self) -> str:
        """What numbers are, for headings."""
        return "linf x 255" if self.norm == "linf" else self.norm

    @property
    def unbroken(self) -> float:
        """What an image that was not broken counts as: in linf the whole range, as in the paper."""
        return unbroken_size(self.norm)

    @property
    def unbroken_text(self) -> str:
        """The same in words, after "counts as"."""
        return "255" if self.norm == "linf" else "infinite"

    @property
    def suffix(self) -> str:
        """For names of files, of which linf's have none."""
        return "" if self.norm == "linf" else f"-{self.norm}"

    def number(self, size: float) -> str:
        """A size without its unit.

        Example:
            >>> Unit("linf").number(0.0129), Unit("linf").number(0.001), Unit("l2").number(1234.5)
            ('3.3', '0.26', '1234')
        """
        value = size * self.factor
        return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 2}f}"

    def text(self, size: float) -> str:
        """A size with its unit.

        Example:
            >>> Unit("linf").text(0.0129), Unit("l2").text(3.14)
            ('3.3/255', '3.1 in l2')
        """
        return f"{self.number(size)}/255" if self.norm == "linf" else f"{self.number(size)} in {self.norm}"


LINF = Unit("linf")
