"""What stores hold, ready for tables, figures and pages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segprox.counts import Counts
from segprox.report.units import LINF, Unit
from segprox.run.evaluate import Status
from segprox.run.plan import Run
from segprox.run.record import ImageError, Record
from segprox.run.store import Store, stores

Sizes = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RunResults:
    """One run: what was run, its records by image name in order, and the images that could not be attacked."""

    folder: Path
    run: Run
    header: dict[str, Any]  # classes, palette, norm, cost, environment, ...
    records: tuple[Record, ...]
    errors: tuple[ImageError, ...]
    unit: Unit = LINF

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; numbers where the dataset has none."""
        known = tuple(self.header.get("classes") or ())
        count = len(self.records[0].counts.tp) if self.records else 0
        return known or tuple(str(k) for k in range(count))

    @cached_property
    def sizes(self) -> Sizes:
        """The size of each record's perturbation, whether or not it is a success."""
        return np.array([self.unit.size(record) for record in self.records], dtype=np.float64)

    @cached_property
    def norms(self) -> Sizes:
        """The sizes that count: those of successes, and for all others what an image that was not broken counts as."""
        return np.array([self.unit.counted(record) for record in self.records], dtype=np.float64)

    @cached_property
    def by_image(self) -> dict[tuple[str, int], float]:
        """Norms by the image's pixels, whatever its name; numbered where a dataset holds an image twice."""
        seen: Counter[str] = Counter()
        found = {}
        for record, norm in zip(self.records, self.norms.tolist()):
            found[record.image_hash, seen[record.image_hash]] = norm
            seen[record.image_hash] += 1
        return found

    @cached_property
    def success(self) -> NDArray[np.bool_]:
        """Which images were broken."""
        return np.array([record.found.success for record in self.records], dtype=bool)

    def counts(self, clean: bool = False) -> Counts:
        """Pixels per class, `[images, classes]`, after the attack or before it."""
        chosen = [record.clean_counts if clean else record.counts for record in self.records]
        return Counts(*(np.array([getattr(c, name) for c in chosen], dtype=np.int64) for name in ("tp", "fp", "fn")))


def load_runs(folders: Sequence[Path]) -> list[RunResults]:
    """All runs in these folders, each a run or a folder of runs."""
    return [_load(store, store.latest()) for folder in folders for store in stores(folder)]


def results_of(statuses: Sequence[Status]) -> list[RunResults]:
    """What an evaluation was asked for: not what else its folders may hold, such as images beyond its limit."""
    return [_load(status.store, status.records) for status in statuses]


def _load(store: Store, records: Mapping[str, Record | ImageError]) -> RunResults:
    latest = sorted(records.values(), key=lambda record: record.image)
    return RunResults(
        folder=store.folder,
        run=store.run,
        header=store.header,
        records=tuple(record for record in latest if isinstance(record, Record)),
        errors=tuple(record for record in latest if isinstance(record, ImageError)),
        unit=Unit.of(store),
    )
