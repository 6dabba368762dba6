"""Records and stores made by hand, as if something had been run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from segprox.report.results import RunResults, load_results
from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.record import ClassCounts, ImageError, Record, Score
from segprox.run.store import Store

CLASSES = ("road", "car", "sky")


def make_run(attack: str = "fmn", model: str = "m", goal: str = "untargeted", **more: Any) -> Run:
    """A run of an attack with its fields in `set` and settings in `settings`."""
    entry = AttackEntry(name=attack, set=more.pop("set", {}))
    settings = Settings(**more.pop("settings", {}))
    return Run(model=model, dataset=more.pop("dataset", "d"), attack=entry, goal=goal, settings=settings, **more)


def make_record(image: str = "a", linf: float = 0.01, success: bool = True, **more: Any) -> Record:
    """An attacked image; everything that is not said is plausible."""
    score = Score(linf=linf, l2=linf * 10, l1=linf * 100, apsr=1.0 if success else 0.5, success=success)
    fields: dict[str, Any] = {
        "key": f"key-{image}", "version": "1", "image": image, "image_hash": f"hash-{image}", "height": 4, "width": 5,
        "labels": "true", "counted": 20, "clean_apsr": 0.1, "clean_accuracy": 0.9, "accuracy": 0.1, "norm": linf,
        "found": score, "rounded": score, "forwards": 10, "backwards": 9, "seconds": 0.5, "saved": {},
        "clean_counts": ClassCounts([10, 6, 2], [1, 1, 0], [1, 0, 1]),
        "counts": ClassCounts([1, 0, 1], [9, 6, 3], [10, 6, 2]),
    }  # fmt: skip
    return Record(**{**fields, **more})


def make_store(
    folder: Path, run: Run, records: Sequence[Record | ImageError], about: Mapping[str, Any] | None = None
) -> Path:
    """A finished run in a folder of folders; returns the run's own."""
    with Store(folder / run.folder) as store:
        store.start(run, {"classes": CLASSES, "images": len(records), "norm": "linf", **(about or {})})
        for record in records:
            store.append(record)
    return folder / run.folder


def make_results(
    folder: Path, norms: Mapping[str, Sequence[float | None]], errors: int = 0, **run: Any
) -> list[RunResults]:
    """A run for each attack, with a norm for each image, or None where it was not broken."""
    for attack, values in norms.items():
        records: list[Record | ImageError] = [
            make_record(f"i{n:03}", 0.5 if value is None else value, value is not None)
            for n, value in enumerate(values)
        ]
        records += [ImageError(version="1", key=f"f{n}", image=f"f{n}", reason="cannot read it") for n in range(errors)]
        make_store(folder, make_run(attack, **run), records)
    return load_results([folder])
