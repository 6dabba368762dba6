"""The records of a run as arrays, and an index of them beside the lines, by which large stores are read quickly.

The lines are the truth. An index names the bytes that it was made from: one of other bytes, of another version, or
damaged, is made again; where it cannot be written, or a run is small, the lines are read as they are.
"""

import gc
import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

import segprox
from segprox.run.record import ImageError, Record, from_line, to_line
from segprox.run.store import RECORDS, Store

INDEX = "records.npz"
LAYOUT = 2  # of the index
SMALL = 200_000  # bytes of lines that are read faster than an index is worth
NUMBERS = (
    "height", "width", "clean_accuracy", "accuracy", "norm", "forwards", "backwards", "seconds",
    *(f"{score}.{name}" for score in ("found", "rounded")
      for name in ("linf", "l2", "l1", "apsr", "success", "attacked", "protected", "share")),
)  # fmt: skip
TEXTS = ("image", "image_hash", "key", "labels", "preview")
Columns = dict[str, NDArray[Any]]


def columns_of(records: Sequence[Record]) -> Columns:
    """An array for each number and text (NaN and nothing where there is none), the counts, and all traces in a row."""
    numbers = {name: np.array([*map(_getter(name), records)], dtype=np.float64) for name in NUMBERS}
    texts = {name: np.array([getattr(record, name) or "" for record in records], dtype=np.str_) for name in TEXTS}
    counts = {
        name: np.array([getattr(record, name) for record in records], dtype=np.int64).reshape(len(records), 3, -1)
        for name in (("clean_counts", "counts") if records else ())
    }
    steps = [step for record in records for step in record.trace or ()]
    return {
        **numbers,
        **texts,
        **counts,
        "traced": np.array([record.trace is not None for record in records], dtype=np.bool_),
        "trace_ends": np.cumsum([len(record.trace or ()) for record in records], dtype=np.int64),
        "trace": np.array(steps, dtype=np.float64).reshape(-1, 2),  # queries and norm
    }


def _getter(name: str) -> Callable[[Record], Any]:
    """What reads a number of a record; floats are not rounded, and have no score of that."""
    get = attrgetter(name)
    if not name.startswith("rounded."):
        return get
    return lambda record: None if record.rounded is None else get(record)


class IndexedRecords(Sequence[Record]):
    """Records whose arrays are there; their lines are read when one of them is asked for."""

    def __init__(self, columns: Columns, read: Callable[[], Sequence[Record]]) -> None:
        self.columns = columns
        self._read = read

    @cached_property
    def _records(self) -> Sequence[Record]:
        return self._read()

    def __len__(self) -> int:
        return len(self.columns["image"])

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        return self._records[index]


class Latest(NamedTuple):
    """The last line of each image, by name: attacked images, and those that could not be."""

    records: Sequence[Record]
    errors: tuple[ImageError, ...]

    @classmethod
    def of(cls, lines: dict[str, Record | ImageError]) -> "Latest":
        """In the order of names."""
        ordered = [lines[name] for name in sorted(lines)]
        return cls(
            tuple(record for record in ordered if isinstance(record, Record)),
            tuple(record for record in ordered if isinstance(record, ImageError)),
        )


def read_latest(store: Store) -> Latest:
    """What counts of a run, from its index if it has one of just these lines; a large run that has none gets one."""
    path = store.folder / RECORDS
    if not path.exists() or path.stat().st_size < SMALL:
        return Latest.of(store.latest())
    state = hashlib.blake2b(f"{segprox.__version__} {LAYOUT} ".encode(), digest_size=16)
    state.update(path.read_bytes())
    columns = _load(store, made_of := state.hexdigest())
    if columns is None:
        with _uncollected():
            found = Latest.of(store.latest())
            columns = columns_of(found.records)
        columns["errors"] = np.array([to_line(error) for error in found.errors], dtype=np.str_)
        _save(store, columns, made_of)
    errors = tuple(from_line(line) for line in columns["errors"].tolist())
    return Latest(
        IndexedRecords(columns, lambda: Latest.of(store.latest()).records),
        tuple(error for error in errors if isinstance(error, ImageError)),
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from looking at all records again and again while they are made: half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _load(store: Store, made_of: str) -> Columns | None:
    try:
        with (store.folder / INDEX).open("rb") as file, np.load(file) as index:
            return {name: index[name] for name in index.files} if str(index["made_of"]) == made_of else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _save(store: Store, columns: Columns, made_of: str) -> None:
    """Written aside and moved into place; a folder that cannot be written to does without."""
    aside = store.folder / f".{INDEX}.{os.getpid()}"
    small = {name: _narrow(values) for name, values in columns.items()}
    with suppress(OSError):
        try:
            with aside.open("wb") as file:
                np.savez(file, allow_pickle=False, made_of=np.array(made_of), **small)
            aside.replace(store.folder / INDEX)
        finally:
            aside.unlink(missing_ok=True)


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers in half the bytes, where they fit."""
    if values.dtype != np.int64 or values.max(initial=0) > np.iinfo(np.int32).max:
        return values
    return values.astype(np.int32)
