"""What it costs to read an evaluation as large as the paper's: CPU seconds and peak memory of each command.

Writes a store of made-up records, by the types that write real ones, and runs each command in a process of its own:

    python benchmarks/scale.py                                  # 203 runs, 185,012 records
    python benchmarks/scale.py --runs 1 --records 500
    python benchmarks/scale.py --runs 203 --records 467
    python benchmarks/scale.py --runs 1 --records 1000 --previews
    python benchmarks/scale.py --folder-images 10000            # opening a folder of so many pictures instead

A command that reads a large store for the first time also writes its index, so `runs` is measured twice.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.preview import encode_preview
from segprox.run.record import ClassCounts, Record, Score, to_line
from segprox.run.store import RECORDS, Store
from segprox.trace import Improvement

ATTACKS = ("alma-prox", "asma", "dag-0.001", "dag-0.003", "ddn", "fmn", "palma", "pdgd", "pdpgd")
PLACES = tuple((f"network-{m}", dataset) for dataset in ("voc:data/VOC", "cityscapes:data/City") for m in range(6))
GOALS = ("untargeted", "majority")
CLASSES, PIXELS, STEPS, TEMPLATES = 21, 500 * 375, 24, 64


def make_runs(count: int) -> list[Run]:
    """Attacks on networks and datasets, with as many seeds as are needed for so many runs."""
    grid = [
        Run(model=model, dataset=dataset, attack=AttackEntry(name=attack), goal=goal, settings=Settings(seed=seed))
        for seed in range(1 + count // (len(PLACES) * len(ATTACKS)))
        for goal in GOALS
        for model, dataset in PLACES
        for attack in ATTACKS
    ]
    return grid[:count]


def make_record(generator: np.random.Generator, weight: float) -> Record:
    """A plausible record; its names and hashes are set later."""
    linf = float(np.exp(generator.normal(-4.5 + weight, 0.8)))
    success = bool(generator.random() < 0.95)
    score = Score(linf=linf, l2=40 * linf, l1=3e4 * linf, apsr=0.99 if success else 0.7, success=success)
    before = generator.multinomial(PIXELS, generator.dirichlet(np.ones(CLASSES) / 4))
    right, left = (generator.binomial(before, share) for share in (0.93, 0.02))
    other = np.roll(before - left, 1)
    steps = np.sort(generator.choice(990, STEPS, replace=False)) + 1
    sizes = linf * np.linspace(3, 1, STEPS)
    return Record(
        key="", version="1", image="", image_hash="", model_hash="0" * 32, height=375, width=500, labels="true",
        counted=PIXELS, clean_apsr=0.07, clean_accuracy=float(right.sum() / PIXELS),
        accuracy=float(left.sum() / PIXELS), norm=linf,
        trace=tuple(Improvement(int(q), float(s)) for q, s in zip(steps, sizes)) if success else (),
        found=score, rounded=replace(score, linf=round(linf * 255) / 255), forwards=500, backwards=499,
        clean_counts=ClassCounts(right.tolist(), np.roll(before - right, 1).tolist(), (before - right).tolist()),
        counts=ClassCounts(left.tolist(), other.tolist(), (before - left).tolist()), saved={},
        seconds=float(generator.uniform(5, 9)),
    )  # fmt: skip


def make_store(folder: Path, runs: int, records: int, previews: bool) -> None:
    """Runs with as equal shares of the records as can be."""
    generator = np.random.default_rng(0)
    pictures = _previews(folder.parent, 64) if previews else []
    header = {
        "started": "2026-01-01T00:00:00+0000", "classes": [f"class {k}" for k in range(CLASSES)], "palette": [],
        "labels": "true", "norm": "linf", "family": "minimal", "environment": {},
    }  # fmt: skip
    for i, run in enumerate(make_runs(runs)):
        count = records // runs + (i < records % runs)
        templates = [make_record(generator, i % len(ATTACKS) / 9) for _ in range(min(TEMPLATES, count))]
        with Store(folder / run.folder) as store:
            store.start(run, {**header, "images": count})
            lines = []
            for j in range(count):
                name = f"2008_{j:06}"
                like = templates[j % len(templates)]
                size = like.norm * float(generator.uniform(0.9, 1.1))  # no two are equal, as in real curves
                record = replace(
                    like, image=name, image_hash=f"{j:032x}", key=f"{i:016x}{j:016x}", norm=size,
                    found=replace(like.found, linf=size), preview=f"previews/{name}.zip" if pictures else None,
                )  # fmt: skip
                lines.append(to_line(record))
                if pictures:
                    path = store.folder / f"previews/{name}.zip"
                    path.parent.mkdir(exist_ok=True)
                    os.link(pictures[j % len(pictures)], path)
            (store.folder / RECORDS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _previews(folder: Path, count: int) -> list[Path]:
    """Files that records share, since one for each of 185,012 would be 11 GB."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{seed}.zip" for seed in range(count)]
    for seed, path in enumerate(paths):
        path.write_bytes(_preview(seed))
    return paths


def _preview(seed: int) -> bytes:
    """Smooth colours and areas, with the size of real ones."""
    torch.manual_seed(seed)
    image = torch.nn.functional.interpolate(torch.rand(1, 3, 24, 32), (375, 500), mode="bicubic")[0].clamp(0, 1)
    areas = torch.randint(0, CLASSES, (1, 1, 12, 16)).float()
    label = torch.nn.functional.interpolate(areas, (375, 500), mode="nearest")[0, 0].long()
    seen = torch.where(torch.rand(375, 500) < 0.2, torch.randint(0, CLASSES, (375, 500)), label)
    noise = 0.01 * torch.randn_like(image).sign()
    return encode_preview(
        image, (image + noise).clamp(0, 1), {"label": label, "clean": label, "prediction": seen}, (), CLASSES
    )


def make_pictures(folder: Path, count: int) -> None:
    """A folder of pictures with labels, no word on classes."""
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    values = np.random.default_rng(0).integers(0, CLASSES, (24, 32), dtype=np.uint8).repeat(16, 0).repeat(16, 1)
    Image.fromarray(np.stack([values * 12] * 3, 2)).save(folder / "images" / "0.jpg")
    Image.fromarray(values).save(folder / "labels" / "0.png")
    for i in range(1, count):
        os.link(folder / "images" / "0.jpg", folder / "images" / f"{i}.jpg")
        os.link(folder / "labels" / "0.png", folder / "labels" / f"{i}.png")


def measure(code: str, *arguments: str) -> None:
    """Run Python code in a process of its own, and print what it took."""
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    title = arguments[0] if arguments else "open the folder"
    state = "" if process.returncode == 0 else f"  exit code {process.returncode}"
    print(f"{title:<24}{used.ru_utime + used.ru_stime:>9.1f} s{used.ru_maxrss / 1e3:>9.0f} MB{state}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=203)
    parser.add_argument("--records", type=int, default=185_012)
    parser.add_argument("--previews", action="store_true", help="with pictures of every record")
    parser.add_argument("--folder-images", type=int, help="measure opening a folder of so many pictures instead")
    parser.add_argument("--keep", type=Path, help="a folder for the store, to use again")
    given = parser.parse_args(arguments)
    command = "import sys; sys.argv[0] = 'segprox'; from segprox.cli import main; sys.exit(main())"
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary) / "store"
        if given.folder_images:
            make_pictures(folder, given.folder_images)
            measure(f"import segprox\nprint(segprox.load_dataset('folder:{folder.as_posix()}').names[0])")
            return
        if not folder.exists():
            make_store(folder, given.runs, given.records, given.previews)
        size = sum(path.stat().st_size for path in folder.glob(f"*/{RECORDS}"))
        print(f"{given.runs} runs, {given.records:,} records, {size / 1e6:.0f} MB of lines")
        measure(command, "runs", str(folder))
        measure(command, "runs", str(folder))
        report = Path(temporary) / "report"
        measure(command, "report", str(folder), "--out", str(report))
        for part in ("index.html", "pictures", "figures", "tables"):
            files = [p for p in [report / part, *(report / part).rglob("*")] if p.is_file()]
            if files:
                print(f"{part:<24}{sum(p.stat().st_size for p in files) / 1e6:>9.1f} MB in {len(files)} files")


if __name__ == "__main__":
    main()
