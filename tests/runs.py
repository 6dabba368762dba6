"""Stores with made-up records, for tests of reports."""

from pathlib import Path

import torch

from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.preview import encode_preview
from segprox.run.record import ClassCounts, ImageError, Record, Score
from segprox.run.store import Store

CLASSES = ("road", "sky", "car")
PALETTE = ((120, 60, 120), (70, 130, 180), (0, 0, 140))
HEADER = {
    "started": "2026-03-01T12:00:00+0000",
    "classes": list(CLASSES),
    "palette": [list(colour) for colour in PALETTE],
    "labels": "true",
    "norm": "linf",
    "environment": {"python": "3.12", "torch": "2.9", "devices": []},
}


def make_record(image: str, linf: float, success: bool = True, **changes) -> Record:
    """Of an image whose 90 right pixels of 100 become 5, if the attack succeeds, or else 60."""
    right = 5 if success else 60
    score = Score(linf=linf, l2=1.0, l1=9.0, apsr=0.95 if success else 0.4, success=success)
    fields = {
        "key": f"key-{image}", "version": "1", "image": image, "image_hash": f"hash of {image}",
        "height": 32, "width": 48, "labels": "true", "counted": 100,
        "clean_apsr": 0.1, "clean_accuracy": 0.9, "accuracy": right / 100,
        "norm": linf, "found": score, "rounded": score, "forwards": 60, "backwards": 59,
        "clean_counts": ClassCounts([50, 40, 0], [10, 0, 0], [0, 10, 0]),
        "counts": ClassCounts([right, 0, 0], [0, 50 - right, 50], [50 - right, 50, 0]), "saved": {}, "seconds": 1.5,
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
    **settings,
) -> Path:
    """The folder of a run with these records and errors."""
    run = Run(model=model, dataset="scenes", attack=AttackEntry(name=attack), goal=goal, settings=Settings(**settings))
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
