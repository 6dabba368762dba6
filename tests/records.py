"""Records and stores made by hand, as if something had been run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from segprox.report.results import RunResults, load_runs
from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.preview import encode_preview
from segprox.run.record import ClassCounts, ImageError, Record, Score
from segprox.run.store import Store

CLASSES = ("road", "car", "sky")
SCENE_CLASSES = ("road", "sky", "car")


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
    return load_runs([folder])


# --- runs with pictures -----------------------------------------------------------------------------------------------
PALETTE = ((120, 60, 120), (70, 130, 180), (0, 0, 140))
HEADER = {
    "started": "2026-03-01T12:00:00+0000",
    "classes": list(SCENE_CLASSES),
    "palette": [list(colour) for colour in PALETTE],
    "labels": "true",
    "norm": "linf",
    "environment": {"python": "3.12", "torch": "2.9", "devices": []},
}


def scene_record(image: str, linf: float, success: bool = True, **changes) -> Record:
    """Of an image whose 90 right pixels of 100 become 5, if the attack succeeds, or else 60."""
    right = 5 if success else 60
    road, sky = min(right, 50), max(right - 50, 0)  # right pixels of the 50 of each
    score = Score(linf=linf, l2=1.0, l1=9.0, apsr=0.95 if success else 0.4, success=success)
    fields = {
        "key": f"key-{image}", "version": "1", "image": image, "image_hash": f"hash of {image}",
        "height": 32, "width": 48, "labels": "true", "counted": 100,
        "clean_apsr": 0.1, "clean_accuracy": 0.9, "accuracy": right / 100,
        "norm": linf, "found": score, "rounded": score, "forwards": 60, "backwards": 59,
        "clean_counts": ClassCounts([50, 40, 0], [10, 0, 0], [0, 10, 0]),
        "counts": ClassCounts([road, sky, 0], [0, 50 - road, 50 - sky], [50 - road, 50 - sky, 0]),
        "saved": {}, "seconds": 1.5,
    }  # fmt: skip
    return Record(**fields | changes)


def make_preview(seed: int = 0, height: int = 32, width: int = 48) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(3, height, width, generator=generator)
    maps = {
        part: torch.randint(0, 3, (height, width), generator=generator) for part in ("label", "clean", "prediction")
    }
    maps["label"][:2] = 255
    noise = 0.02 * torch.randn(3, height, width, generator=generator)
    return encode_preview(image, (image + noise).clamp(0, 1), maps, PALETTE, 3)


def write_run(
    parent: Path,
    entries,
    model: str = "net",
    attack: str = "fmn",
    goal: str = "untargeted",
    previews: bool = False,
    header=HEADER,
    fields: Mapping[str, Any] = {},
    **settings,
) -> Path:
    """The folder of a run with these records and errors."""
    run = Run(
        model=model,
        dataset="scenes",
        attack=AttackEntry(name=attack, set=dict(fields)),
        goal=goal,
        settings=Settings(**settings),
    )
    folder = parent / run.folder
    with Store(folder) as store:
        store.start(run, header)
        for i, entry in enumerate(entries):
            if not previews or isinstance(entry, ImageError):
                store.append(entry)
                continue
            file = f"previews/{i}.zip"
            changed = Record(**{**vars(entry), "preview": file})
            store.append(changed, {file: make_preview(i)})
    return folder
