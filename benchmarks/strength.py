"""Minimal attacks on real networks, image by image, beside the paper authors' own results.

    python benchmarks/strength.py --realbench FOLDER
    python benchmarks/strength.py --realbench FOLDER --cases camvid --attacks palma@150 alma-prox@500?prox=ternary

Cases are images of one network: `camvid` (the images of reference.json, true labels), `road` (two of them, every pixel
to become road), and two networks trained elsewhere whose own clean predictions are the labels, `small` and `large`. An
attack is NAME@STEPS with fields after a question mark; `authors@500` is the ALMA prox of the paper's authors, where
adv-lib is installed. Cells are linf x 255, "-" and the APSR where an attack fails.
Then ratios to the reference where it has the image, else to the first attack. `--json` keeps what was found, with
traces; what is there already is not computed again. `--figure` draws the best norm after every query.
"""

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from realbench import IGNORE, load_network, load_samples, references
from segprox import Problem, make_attack
from segprox.attacks.base import Attack, Cost, Watch
from segprox.naming import Name
from segprox.tracker import Tracker

CAMVID, ROAD = "espnet-camvid", 3
OTHERS = {"small": "espnetv2-0.5-cityscapes", "large": "espnetv2-1.5-cityscapes"}
ATTACKS = ["alma-prox@500", "palma@50", "palma@100", "palma@150", "palma@500"]


class Case(NamedTuple):
    """An image of a network."""

    kind: str
    network: str
    image: str

    def __str__(self) -> str:
        return f"{self.kind} {self.image}"


Found = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Authors(Attack):
    """adv-lib's ALMA prox with its defaults; what it returns is judged as any point is."""

    family = "minimal"
    norm: Literal["linf"] = "linf"
    steps: int = 500

    def cost(self) -> Cost:
        """What it asks for, and one query to judge it."""
        return Cost(self.steps + 1, self.steps)

    def search(self, tracker: Tracker, watch: Watch) -> None:
        """Its own queries are its own affair; the last point is ours."""
        from adv_lib.attacks.segmentation import alma_prox

        problem = tracker.problem
        images = alma_prox(
            tracker.model,
            problem.images,
            problem.labels,
            problem.mask,
            targeted=problem.targeted,
            adv_threshold=problem.threshold,
            num_steps=self.steps,
        )
        watch(tracker.query(images))


def list_cases(folder: Path, kinds: list[str]) -> list[Case]:
    known = list(references(folder, model=CAMVID, attack="alma-prox", steps=500, targeted=False))
    found = {"camvid": [Case("camvid", CAMVID, image) for image in known]}
    found["road"] = [Case("road", CAMVID, image) for image in known[:2]]
    for kind, network in OTHERS.items():
        found[kind] = [Case(kind, network, image) for image in known[::2]]
    return [case for kind in kinds for case in found[kind]]


def problem(folder: Path, case: Case) -> Problem:
    sample = load_samples(folder)[case.image]
    if case.kind in OTHERS:
        with torch.no_grad():
            own = load_network(folder, case.network)(sample.image[None]).argmax(1)
        return Problem.build(sample.image[None], own)
    road = ROAD if case.kind == "road" else None
    return Problem.build(sample.image[None], sample.label[None], target=road, ignore=IGNORE)


def attack(folder: Path, case: Case, text: str) -> Found:
    torch.set_num_threads(1)
    name, _, fields = text.partition("?")
    name, _, steps = name.partition("@")
    options = Name.parse(f"{name}?{fields}").options if fields else {}
    network, wanted = load_network(folder, case.network), problem(folder, case)
    chosen = Authors(steps=int(steps)) if name == "authors" else make_attack(name, steps=steps, **options)
    found = chosen.run(network, wanted)
    clean, changed = wanted.images, found.images
    rounded = changed.mul(255).round().div(255)
    with torch.no_grad():
        apsr = wanted.apsr(network(rounded))
    return {
        "success": bool(found.success),
        "norm": 255 * found.norm.item(),
        "apsr": found.apsr.item(),
        "trace": [[queries, 255 * norm] for queries, norm in found.traces[0]],
        "seconds": found.seconds,
        "changed": (changed != clean).float().mean().item(),
        "rounded": [255 * (rounded - clean).abs().max().item(), apsr.item(), (rounded != clean).float().mean().item()],
    }


def cell(found: Found) -> str:
    return f"{found['norm']:.3f}" if found["success"] else f"- ({found['apsr']:.1%})"


def run(options: argparse.Namespace, cases: list[Case]) -> dict[tuple[Case, str], Found]:
    kept: dict[str, Found] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    wanted = [(case, text) for case in cases for text in options.attacks]
    with ProcessPoolExecutor(options.workers) as pool:
        jobs = {
            pool.submit(attack, options.realbench, case, text): f"{case} {text}"
            for case, text in sorted(wanted, key=lambda pair: options.attacks.index(pair[1]))
            if f"{case} {text}" not in kept
        }
        for job in as_completed(jobs):
            kept[jobs[job]] = job.result()
            if options.json:
                options.json.write_text(json.dumps(kept))
    return {(case, text): kept[f"{case} {text}"] for case, text in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, required=True, help="folder with models, images and reference.json")
    parser.add_argument("--cases", nargs="+", default=["camvid", "road", *OTHERS], choices=["camvid", "road", *OTHERS])
    parser.add_argument("--attacks", nargs="+", default=ATTACKS, help="NAME@STEPS?FIELD=VALUE")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--json", type=Path, help="keep results here")
    parser.add_argument("--eight-bit", action="store_true", help="also say what is left of results in 8 bits")
    parser.add_argument("--figure", type=Path, help="write anytime curves here")
    options = parser.parse_args()
    cases = list_cases(options.realbench, options.cases)
    found = run(options, cases)
    known = references(options.realbench, model=CAMVID, attack="alma-prox", steps=500, targeted=False)
    console, table = Console(width=140), Table(title="linf x 255")
    for heading in ("case", "reference@500", *options.attacks):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    against: dict[Case, float] = {}
    for case in cases:
        entry = known.get(case.image) if case.kind == "camvid" else None
        reference = (
            "" if entry is None else f"{entry['linf255']:.3f}" if entry["success"] else f"- ({entry['apsr']:.1%})"
        )
        first = found[case, options.attacks[0]]
        against[case] = first["norm"] if first["success"] else math.nan
        if entry is not None:
            against[case] = float(str(entry["linf255"])) if entry["success"] else math.nan
        table.add_row(str(case), reference, *(cell(found[case, text]) for text in options.attacks))
    console.print(table)
    for text in options.attacks:
        results = [found[case, text] for case in cases]
        norms = {case: found[case, text]["norm"] if found[case, text]["success"] else math.inf for case in cases}
        ratios = [norms[case] / norm for case, norm in against.items() if norm == norm]
        if ratios:
            console.print(
                f"{text}: {sum(one['success'] for one in results)} of {len(results)} broken; ratios over {len(ratios)} "
                f"images: median {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}",
                highlight=False,
            )
    if options.eight_bit:
        console.print(eight_bit(options, cases, found))
    if options.figure:
        draw(options, cases, found)


def eight_bit(options: argparse.Namespace, cases: list[Case], found: dict[tuple[Case, str], Found]) -> Table:
    table = Table(title="rounded to 8 bits: linf x 255, APSR, share of values changed")
    for heading in ("case", *options.attacks):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for case in cases:
        rounded = [found[case, text]["rounded"] for text in options.attacks]
        table.add_row(str(case), *(f"{norm:.0f}, {apsr:.2%}, {changed:.0%}" for norm, apsr, changed in rounded))
    return table


def draw(options: argparse.Namespace, cases: list[Case], found: dict[tuple[Case, str], Found]) -> None:
    kinds = list(dict.fromkeys(case.kind for case in cases))
    columns = min(2, len(kinds))
    rows = math.ceil(len(kinds) / columns)
    figure = Figure(figsize=(5 * columns, 3.4 * rows), dpi=110, layout="constrained")
    for place, kind in enumerate(kinds, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for k, text in enumerate(options.attacks):
            curves = [found[case, text]["trace"] for case in cases if case.kind == kind]
            queries = sorted({int(point[0]) for curve in curves for point in curve})
            best = [[min([n for q, n in curve if q <= limit], default=255.0) for curve in curves] for limit in queries]
            axes.step(queries, [median(norms) for norms in best], where="post", color=f"C{k}", label=text)
        least = min(line.get_ydata()[-1] for line in axes.lines)
        axes.set_ylim(0.9 * least, 5 * least)  # what comes before the first successes says nothing
        axes.set(xscale="log", xlabel="queries (forwards + backwards)", title=kind)
        axes.grid(alpha=0.3, which="both")
    figure.supylabel("median of the best linf x 255 so far", fontsize="medium")
    figure.axes[0].legend()
    figure.savefig(options.figure)


if __name__ == "__main__":
    main()
