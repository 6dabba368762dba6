"""What stores hold, ready for tables, figures and pages."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segprox.counts import Counts
from segprox.report.units import LINF, Unit
from segprox.run.columns import Columns, IndexedRecords, Latest, columns_of, read_latest
from segprox.run.evaluate import Status
from segprox.run.plan import Run
from segprox.run.record import ImageError, Record
from segprox.run.store import Store, stores

Sizes = NDArray[np.float64]
Image = tuple[str, int]  # its pixels, whatever its name; numbered where a dataset holds an image twice


@dataclass(frozen=True, eq=False)
class RunResults:
    """One run: what was run, its records by image name in order, and the images that could not be attacked."""

    folder: Path
    run: Run
    header: dict[str, Any]  # classes, palette, norm, cost, environment, ...
    records: Sequence[Record]
    errors: tuple[ImageError, ...]
    unit: Unit = LINF

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; numbers where the dataset has none."""
        known = tuple(self.header.get("classes") or ())
        count = self.columns["counts"].shape[2] if self.records else 0
        return known or tuple(str(k) for k in range(count))

    @cached_property
    def columns(self) -> Columns:
        """The records as arrays."""
        return self.records.columns if isinstance(self.records, IndexedRecords) else columns_of(self.records)

    @property
    def epsilon(self) -> float | None:
        """The size that the attack stays within by design; none for attacks that look for the smallest one."""
        return float(self.header["attack"]["epsilon"]) if self.header.get("family") == "fixed-epsilon" else None

    @cached_property
    def sizes(self) -> Sizes:
        """The size of each record's perturbation, whether or not it is a success."""
        sizes: Sizes = self.columns.get(f"found.{self.unit.norm}", self.columns["norm"])
        if self.epsilon is None:
            return sizes
        # Single precision rounds a perturbation of epsilon to a little more, which is within epsilon all the same.
        return np.where(np.isclose(sizes, self.epsilon, rtol=1e-5, atol=1e-6), self.epsilon, sizes)

    @cached_property
    def norms(self) -> Sizes:
        """The sizes that count: those of successes, and for all others what an image that was not broken counts as."""
        return np.where(self.success, self.sizes, self.unit.unbroken)

    @cached_property
    def by_image(self) -> dict[Image, float]:
        """Norms by image."""
        return self._by_image(self.norms.tolist())

    @cached_property
    def accuracy_by_image(self) -> dict[Image, float]:
        """The pixel accuracy that the attack left, by image."""
        return self._by_image(self.columns["accuracy"].tolist())

    def _by_image(self, values: Iterable[float]) -> dict[Image, float]:
        seen: Counter[str] = Counter()
        found = {}
        for image, value in zip(self.columns["image_hash"].tolist(), values):
            found[image, seen[image]] = value
            seen[image] += 1
        return found

    @cached_property
    def success(self) -> NDArray[np.bool_]:
        """Which images were broken."""
        return self.columns["found.success"].astype(np.bool_)

    def counts(self, clean: bool = False) -> Counts:
        """Pixels per class, `[images, classes]`, after the attack or before it."""
        tp, fp, fn = self.columns["clean_counts" if clean else "counts"].astype(np.int64).swapaxes(0, 1)
        return Counts(tp, fp, fn)


def load_runs(folders: Sequence[Path]) -> list[RunResults]:
    """All runs in these folders, each a run or a folder of runs."""
    return [load_run(store) for folder in folders for store in stores(folder)]


def load_run(store: Store) -> RunResults:
    """What is in the folder of a run."""
    return _load(store, read_latest(store))


def results_of(statuses: Sequence[Status]) -> list[RunResults]:
    """What an evaluation was asked for: not what else its folders may hold, such as images beyond its limit."""
    return [_load(status.store, Latest.of(status.records)) for status in statuses]


def _load(store: Store, latest: Latest) -> RunResults:
    return RunResults(store.folder, store.run, store.header, latest.records, latest.errors, Unit.of(store))
