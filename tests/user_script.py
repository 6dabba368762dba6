"""What a user may write: all of the public Python API in one script, with types that mypy checks strictly.

python user_script.py FOLDER
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

import segprox
from segprox.losses import margin
from segprox.models import ModelOptions
from segprox.norms import NormName
from segprox.query import Query
from segprox.report import mean_class_accuracy

EPSILON = 4 / 255


# --- add your own -----------------------------------------------------------------------------------------------------
@segprox.register_attack("typed-signs")
@dataclass(frozen=True, kw_only=True)
class Signs(segprox.MinimalAttack):
    """Steps along the signs of the gradient; half way back after a success."""

    norm: NormName = "linf"
    steps: int = 6
    step_size: float = 0.01

    def search(self, tracker: segprox.Tracker, report: segprox.ProgressReporter) -> None:
        """Query and step."""
        problem: segprox.Problem = tracker.problem
        delta = torch.zeros_like(problem.images)
        for step in range(self.steps):
            query = tracker.query((problem.images + delta).clamp(0, 1))
            report(query)
            if step < self.steps - 1:
                lead, pullback = margin(query.logits, problem.labels, targeted=problem.targeted)
                gradient = query.gradient(pullback(problem.shares(lead.dtype)))
                delta = torch.where(
                    query.success.view(-1, 1, 1, 1), delta / 2, delta - self.step_size * gradient.sign()
                )


@segprox.register_objective("typed-lead")
def lead(query: Query, problem: segprox.Problem, progress: float) -> segprox.Loss:
    """Minus the margin by which the label leads."""
    values, pullback = margin(query.logits, problem.labels, targeted=problem.targeted)
    return segprox.Loss(-values, lambda weights: pullback(-weights))


@segprox.register_dataset("typed-scenes")
def scenes(count: int = 2) -> segprox.Dataset:
    """The first street scenes."""
    return segprox.load_dataset("demo", length=count)


@segprox.register_model("typed-network")
def network() -> nn.Module:
    """One convolution."""
    return nn.Conv2d(3, 8, kernel_size=1)


@segprox.register_model_source("typed-library", "typed-library:8", "one convolution, with so many classes")
def build(identifier: str, options: ModelOptions) -> nn.Module:
    """One convolution with this many classes."""
    return nn.Conv2d(3, int(identifier), kernel_size=1)


class Tiles:
    """Float images of six bands between 0 and 1.5, already as shares of that range, with labels."""

    bands = segprox.Bands(range=((0.0, 1.5),), whole=False, shown=(4, 3, 2), declared=True)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(6, 8, 8), torch.randint(0, 4, (8, 8))


# --- attack a batch ---------------------------------------------------------------------------------------------------
def attack(folder: Path) -> None:
    """Attack one scene by name, by object and at several epsilons."""
    model: segprox.Segmenter = segprox.load_model("demo-standard")
    scene: segprox.Sample = segprox.load_dataset("demo")[0]
    images, labels = scene.image[None], scene.label[None]
    seen: list[int] = []

    def watch(progress: segprox.Progress) -> None:
        seen.append(progress.iteration)

    result: segprox.AttackResult = segprox.attack(model, images, labels, steps=3, callback=watch)
    sizes: Tensor = result.norm
    print(result, float(sizes.max()), bool(result.success.all()), len(result), seen)
    result.to("cpu").plot(0).savefig(folder / "attack.png")
    files: list[Path] = result.save(folder / "images", names=[scene.name])
    curve: list[segprox.AttackResult] = segprox.attack(
        model, images, labels, "pgd", epsilon=["1/255", EPSILON], steps=2
    )
    chosen: segprox.Attack = segprox.make_attack("pgd", objective="typed-lead", epsilon=EPSILON, steps=2)
    again = chosen(model, images, labels, target=3)
    own = segprox.Palma(steps=2)(model, images, labels)
    print(len(files), len(curve), again.forwards.tolist(), own.apsr.tolist(), segprox.AlmaProx().steps)
    print(segprox.Anneal(epsilon=EPSILON).epsilon, issubclass(segprox.Anneal, segprox.FixedEpsilonAttack))


# --- evaluate a dataset -----------------------------------------------------------------------------------------------
def evaluate(folder: Path) -> None:
    """Evaluate names and objects, and use everything that comes back."""
    out = folder / "runs"
    results: segprox.Results = segprox.evaluate(
        "demo-standard", "typed-scenes?count=3", ["fmn", "typed-signs"], goals=["untargeted", "road"], limit=2, steps=8,
        until="20%", out=out, save=["float", "preview"], threshold=0.9, seed=1, max_queries=30, batch=2, progress=False,
    )  # fmt: skip
    print(results, results.summary(), [run.run.title for run in results], results[0].unit.name, len(results[1:]))
    free: segprox.Results = results.only(goal="untargeted", model="demo-standard")
    best: dict[str, float] = free.best()
    left: float = free.accuracy(EPSILON) + free.miou(EPSILON) + free.accuracy(EPSILON, mean_class_accuracy)
    x, y = free.curve()
    rows = [row["image"] for row in results.rows()]
    print(best, left, x.tolist(), y.tolist(), rows)
    axes: Axes = free.plot(pyplot.subplots()[1])
    axes.set_title("demo")
    judged = free.require({"withstand": "1/255", "share": 0.5}, {"accuracy": 0.5, "epsilon": EPSILON})
    print(judged, judged.met, judged.outcomes)
    print(free.only(attack="fmn").compare(free.only(attack="typed-signs")), results.against("paper"))
    card = free.card()
    print(card.markdown, card.write(folder / "card"))
    page: Path = free.write_report(folder / "report", require=[{"withstand": "1/255"}], critical=["person"])
    stored: segprox.Results = segprox.load_results(out)
    print(page.name, stored.to_pandas().shape, segprox.transfer(out, ["demo-standard", "demo-robust"]))

    data: Sequence[tuple[Tensor, Tensor]] = [(torch.rand(3, 8, 8), torch.randint(0, 4, (8, 8))) for _ in range(2)]
    segmenter = segprox.Segmenter(nn.Conv2d(3, 4, kernel_size=1), mean=(0.5,) * 3, std=(0.5,) * 3)
    for model in (segmenter, nn.Conv2d(3, 4, kernel_size=1)):
        print(segprox.evaluate(model, data, segprox.Palma(steps=2), ignore=(0,), progress=False)[0].success.tolist())
    many = segprox.evaluate(nn.Conv2d(6, 4, kernel_size=1), Tiles(), segprox.Palma(steps=2), progress=False)
    print(many.summary(), many[0].unit.name)
    found: segprox.Audit = segprox.audit("demo-standard", "demo", epsilon=EPSILON, limit=1, steps=3, progress=False)
    print(found.sentence, [finding.broken_by for finding in found.findings], found.rows())
    try:
        segprox.evaluate("typed-network", "typed-scenes", "no-such-attack")
    except segprox.SegproxError as error:
        print(error)


def main(folder: Path) -> None:
    """Do all of it, in a folder."""
    print(segprox.__version__, [len(names) for names in (segprox.list_models(), segprox.list_datasets())])
    print("typed-signs" in segprox.list_attacks(), segprox.load_model("typed-library:5").device)
    attack(folder)
    evaluate(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
