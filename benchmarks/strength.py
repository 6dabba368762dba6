"""Minimal attacks on real networks, case by case, as ratios to the smallest norm that anything has ever found.

    python benchmarks/strength.py --realbench FOLDER --best FILE
    python benchmarks/strength.py --realbench FOLDER --half development --attacks alma-prox@500?prox=ternary

Cases are those of `cases.py`: `judged` by default, `development` to make choices on. An attack is NAME@STEPS with
fields after a question mark; `authors@500` is the ALMA prox of the paper's authors, where adv-lib is installed (it
needs three classes and says so). A run of PALMA is the beginning of every longer one, so only the longest of each kind
is computed and the others are read from its trace, which leaves out changes below 1 %: those norms may be that much too
large. `--json` keeps what was found, with traces, and what is there is not computed again. `--best` keeps the smallest
norm known of each case, and by what it was found; up to 2,000 steps of any attack may go in there. `--figure` draws the
norm after every fifth step over the best known.
"""

import argparse
import json
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from cases import HALVES, Case, list_cases, load_case
from segprox import SegproxError, make_attack
from segprox.attacks.base import Attack, Cost, ProgressReporter
from segprox.naming import Name
from segprox.tracker import Tracker

KINDS = ["whole", "crop", "targeted", "binary", "transformer"]
ATTACKS = ["palma@50", "palma@100", "palma@200", "palma@500", "alma-prox@500", "fmn@500"]

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

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Its own queries are its own affair; the last point is ours."""
        from adv_lib.attacks.segmentation import alma_prox

        problem = tracker.problem
        with torch.no_grad():
            if tracker.model(problem.images).shape[1] < 3:
                raise SegproxError("adv-lib's ALMA prox needs three classes")
        images = alma_prox(
            tracker.model,
            problem.images,
            problem.labels,
            problem.mask,
            targeted=problem.targeted,
            adv_threshold=problem.threshold,
            num_steps=self.steps,
        )
        report(tracker.query(images))


def split(text: str) -> tuple[str, int, dict[str, Any]]:
    """Name, steps and fields of NAME@STEPS?FIELDS."""
    name, _, fields = text.partition("?")
    name, _, steps = name.partition("@")
    return name, int(steps), Name.parse(f"{name}?{fields}").options if fields else {}


def attack(folder: Path, case: Case, text: str) -> Found:
    """What an attack finds; `error` says why it could not be run."""
    torch.set_num_threads(1)
    name, steps, options = split(text)
    network, problem = load_case(folder, case)
    chosen = Authors(steps=steps) if name == "authors" else make_attack(name, steps=steps, **options)
    try:
        found = chosen.run(network, problem)
    except SegproxError as error:
        return {"error": str(error)}
    rounded = found.images.mul(255).round().div(255)
    with torch.no_grad():
        apsr = problem.apsr(network(rounded))
    levels = 255 * (rounded - problem.images).abs().max().item()
    return {
        "success": bool(found.success),
        "norm": 255 * found.norm.item(),
        "apsr": found.apsr.item(),
        "trace": [[queries, 255 * norm] for queries, norm in found.traces[0]],
        "seconds": found.seconds,
        "rounded": [levels, apsr.item(), (rounded != problem.images).float().mean().item()],
    }


def longest(attacks: list[str], text: str) -> str:
    """The run from which an attack's result is read: of PALMA, the longest with the same fields."""
    name, _, options = split(text)
    if name != "palma" or options.get("masking") == "decay":
        return text
    same = [other for other in attacks if split(other)[0] == name and split(other)[2] == options]
    return max(same, key=lambda other: split(other)[1])


def norm_of(found: Found, steps: int) -> float:
    """The norm after so many steps of a forward and a backward each; infinite before the first success."""
    if "error" in found:
        return math.nan
    return min((norm for queries, norm in found["trace"] if queries <= 2 * steps), default=math.inf)


def run(options: argparse.Namespace, cases: list[Case]) -> dict[tuple[Case, str], Found]:
    kept: dict[str, Found] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    needed = list(dict.fromkeys(longest(options.attacks, text) for text in options.attacks))
    wanted = [(case, text) for text in needed for case in cases]
    with ProcessPoolExecutor(options.workers) as pool:
        jobs = {
            pool.submit(attack, options.realbench, case, text): f"{case} {text}"
            for case, text in wanted
            if f"{case} {text}" not in kept
        }
        for job in as_completed(jobs):
            kept[jobs[job]] = job.result()
            if options.json:
                options.json.write_text(json.dumps(kept))
    return {(case, text): kept[f"{case} {text}"] for case, text in wanted}


def know(options: argparse.Namespace, found: dict[tuple[Case, str], Found]) -> dict[str, float]:
    """The smallest norm of each case: of this run, and of all before that `--best` has kept."""
    best: dict[str, list[Any]] = {}
    if options.best and options.best.exists():
        best = json.loads(options.best.read_text())
    for (case, text), result in found.items():
        norm = norm_of(result, split(text)[1])
        if math.isfinite(norm) and norm < best.get(str(case), [math.inf])[0]:
            best[str(case)] = [norm, text]
    if options.best:
        options.best.write_text(json.dumps(best, indent=1))
    return {case: norm for case, (norm, _) in best.items()}


def summary(ratios: list[float]) -> str:
    """Median, 90th percentile and largest; how many of them are failures."""
    if not ratios:
        return "-"
    failed = sum(math.isinf(ratio) for ratio in ratios)
    nearly_all = quantiles(ratios, n=10, method="inclusive")[-1] if len(ratios) > 1 else ratios[0]
    finite = [ratio for ratio in ratios if math.isfinite(ratio)]
    text = f"{median(ratios):.3f}  {nearly_all:.2f}  {max(finite, default=math.inf):.2f}"
    return f"{text}  {failed} unbroken" if failed else text


def table(title: str, rows: dict[str, list[Case]], attacks: list[str], ratio: Callable[[Case, str], float]) -> Table:
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for text in attacks:
        result.add_column(text, justify="right")
    for name, cases in rows.items():
        ratios = [[ratio(case, text) for case in cases] for text in attacks]
        result.add_row(f"{name} ({len(cases)})", *(summary([r for r in some if not math.isnan(r)]) for some in ratios))
    return result


def each(cases: list[Case], attacks: list[str], norm: Callable[[Case, str], float], best: dict[str, float]) -> Table:
    result = Table(title="linf x 255", title_justify="left")
    for heading in ("case", "best known", *attacks):
        result.add_column(heading, justify="left" if heading == "case" else "right")
    for case in cases:
        cells = [norm(case, text) for text in attacks]
        shown = ["" if math.isnan(cell) else "-" if math.isinf(cell) else f"{cell:.3f}" for cell in cells]
        result.add_row(str(case), f"{best.get(str(case), math.nan):.3f}", *shown)
    return result


def eight_bit(cases: list[Case], attacks: list[str], found: dict[tuple[Case, str], Found]) -> Table:
    result = Table(title="rounded to 8 bits: linf x 255, APSR, share of values changed", title_justify="left")
    for heading in ("case", *attacks):
        result.add_column(heading, justify="left" if heading == "case" else "right")
    for case in cases:
        rounded = [found[case, longest(attacks, text)]["rounded"] for text in attacks]
        result.add_row(str(case), *(f"{norm:.0f}, {apsr:.2%}, {changed:.0%}" for norm, apsr, changed in rounded))
    return result


def draw(file: Path, cases: list[Case], found: dict[tuple[Case, str], Found], best: dict[str, float]) -> None:
    kinds = [kind for kind in KINDS if any(case.kind == kind for case in cases)]
    rows = math.ceil(len(kinds) / 2)
    figure = Figure(figsize=(10, 3.2 * rows), dpi=110, layout="constrained")
    texts = list(dict.fromkeys(text for _, text in found if not text.startswith("authors")))  # which has no trace
    for place, kind in enumerate(kinds, start=1):
        axes = figure.add_subplot(rows, 2, place)
        some = [case for case in cases if case.kind == kind]
        for k, text in enumerate(texts):
            steps = list(range(5, split(text)[1] + 1, 5))
            ratios = [[norm_of(found[case, text], n) / best[str(case)] for case in some] for n in steps]
            axes.plot(steps, [median(ratio) for ratio in ratios], color=f"C{k}", label=text)
            worst = [max(ratio) for ratio in ratios]
            axes.plot(steps, worst, color=f"C{k}", linestyle=":", linewidth=1)
        axes.set(xscale="log", yscale="log", xlim=(10, None), ylim=(0.95, 10), xlabel="steps")
        axes.set_title(f"{kind}, {len(some)} cases")
        axes.set_xticks([10, 20, 50, 100, 200, 500], labels=["10", "20", "50", "100", "200", "500"])
        axes.set_yticks([1, 2, 5, 10], labels=["1", "2", "5", "10"])
        axes.minorticks_off()
        axes.grid(alpha=0.3, which="both")
    figure.supylabel("norm over the best known: median, and (dotted) the largest", fontsize="medium")
    figure.axes[0].legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, required=True, help="folder with networks and images")
    parser.add_argument("--half", choices=list(HALVES), default="judged")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="only cases of these kinds")
    parser.add_argument("--attacks", nargs="+", default=ATTACKS, help="NAME@STEPS?FIELD=VALUE")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--json", type=Path, help="keep results here")
    parser.add_argument("--best", type=Path, help="keep the smallest norms known here")
    parser.add_argument("--to", help="also print ratios to this one of the attacks")
    parser.add_argument("--eight-bit", action="store_true", help="also say what is left of results in 8 bits")
    parser.add_argument("--figure", type=Path, help="write anytime curves here")
    options = parser.parse_args()
    cases, attacks = list_cases(options.half, options.kinds), options.attacks
    found = run(options, cases)
    best = know(options, found)

    def norm(case: Case, text: str) -> float:
        return norm_of(found[case, longest(attacks, text)], split(text)[1])

    rows = {"all": cases} | {kind: [case for case in cases if case.kind == kind] for kind in KINDS}
    rows = {name: some for name, some in rows.items() if some}
    console = Console(width=200)
    console.print(each(cases, attacks, norm, best))
    title = "ratio to the best known: median, 90th percentile, largest"
    console.print(table(title, rows, attacks, lambda case, text: norm(case, text) / best.get(str(case), math.nan)))
    if options.to:
        others = [case for case in cases if math.isfinite(norm(case, options.to))]
        console.print(
            f"{options.to} breaks {len(others)} of {len(cases)} cases; ratios are over those", highlight=False
        )
        title = f"ratio to {options.to}: median, 90th percentile, largest"
        console.print(
            table(title, {"all": others}, attacks, lambda case, text: norm(case, text) / norm(case, options.to))
        )
    if options.eight_bit:
        console.print(eight_bit(cases, attacks, found))
    if options.figure:
        draw(options.figure, cases, found, best)


if __name__ == "__main__":
    main()
