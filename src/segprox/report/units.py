"""How sizes of perturbations are counted and written, for each norm."""

from dataclasses import dataclass
from typing import Any, get_args

from segprox.bands import bands_of
from segprox.errors import SegproxError
from segprox.norms import NormName
from segprox.run.plan import Run
from segprox.run.store import Store
from segprox.run.worker import open_dataset
from segprox.sizes import unbroken_size


@dataclass(frozen=True)
class Unit:
    """A norm as people in the field write it: linf in 255ths, all others as they are.

    Of images that are not of 8 bits, linf is written in percent of the range that their dataset declares.
    """

    norm: NormName
    eight_bit: bool = True

    @classmethod
    def of(cls, store: Store) -> "Unit":
        """The unit of a run: the norm that its attack minimises or stays within."""
        norm: Any = store.header.get("norm") or "linf"
        if norm not in get_args(NormName):
            raise SegproxError(f"{store.folder} measures in {norm!r}, which this segprox does not know")
        return cls(norm, is_eight_bit(store.header))

    @classmethod
    def of_run(cls, run: Run) -> "Unit":
        """The same before there is a store."""
        return cls(run.attack.make().norm, bands_of(open_dataset(run.dataset)).eight_bit)

    @property
    def factor(self) -> float:
        """What sizes are multiplied by."""
        return 1.0 if self.norm != "linf" else 255.0 if self.eight_bit else 100.0

    @property
    def name(self) -> str:
        """What numbers are, for headings."""
        return self.norm if self.norm != "linf" else "linf x 255" if self.eight_bit else "linf, % of the range"

    @property
    def unbroken(self) -> float:
        """What an image that was not broken counts as: in linf the whole range, as in the paper."""
        return unbroken_size(self.norm)

    @property
    def unbroken_text(self) -> str:
        """The same in words, after "counts as"."""
        return f"{self.factor:.0f}" if self.norm == "linf" else "infinite"

    @property
    def suffix(self) -> str:
        """For names of files, of which linf's have none."""
        return ("" if self.norm == "linf" else f"-{self.norm}") + ("" if self.eight_bit else "-range")

    @property
    def key(self) -> str:
        """Its name for scripts of a page: the norm, or `share` for percent of the range."""
        return "share" if self.norm == "linf" and not self.eight_bit else self.norm

    @property
    def rounded(self) -> str:
        """What perturbed images are after they were rounded as files hold them."""
        return "8 bits" if self.eight_bit else "rounded"

    @property
    def after(self) -> str:
        """What follows a number."""
        return f" in {self.norm}" if self.norm != "linf" else "/255" if self.eight_bit else "% of the range"

    def number(self, size: float) -> str:
        """A size without its unit.

        Example:
            >>> Unit("linf").number(0.0129), Unit("linf").number(0.001), Unit("l2").number(1234.5)
            ('3.3', '0.26', '1234')
        """
        value = size * self.factor
        fine = self.key == "share" and value < 0.1
        return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 3 if fine else 2}f}"

    def text(self, size: float) -> str:
        """A size with its unit.

        Example:
            >>> Unit("linf").text(0.0129), Unit("l2").text(3.14), Unit("linf", eight_bit=False).text(0.0129)
            ('3.3/255', '3.1 in l2', '1.3% of the range')
        """
        return f"{self.number(size)}{self.after}"


LINF = Unit("linf")


def is_eight_bit(header: dict[str, Any]) -> bool:
    """Whether a run attacked 8-bit pictures, by its header, which describes other values only."""
    return "values" not in header
