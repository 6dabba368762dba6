"""Is a model fit to be evaluated? Most robustness figures that turn out to be wrong were so before the first attack."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from segprox.attacks import Attack, Pgd, Square
from segprox.counts import Counts, class_counts
from segprox.data import Sample
from segprox.errors import SegproxError
from segprox.models import Segmenter, restored
from segprox.problem import Problem, predictions
from segprox.run.certificate import certify
from segprox.run.measurements import (
    Glance,
    gap,
    glance,
    mirror_agreement,
    pixel_accuracy,
    repeated_gap,
    same_draw,
    slope,
    variants,
)

Severity = Literal["green", "amber", "red"]
Finding = tuple[Severity, str]  # the verdict of a check, and its sentence

CLEARLY_BETTER = 0.02  # in accuracy or agreement: beyond what another kind of preprocessing gains by chance
ROUNDING = 1e-3  # of the logits' range: what another order of summation may change, with TensorFloat32 as well
SATURATED = 0.25  # share of pixels
NO_GRADIENT = (0.1, 0.9)  # amber and red above these, as a share of pixels
WRONG_SLOPE = (0.1, 0.5)  # the same, as a relative error
EPSILON = 8 / 255  # within which attacks with and without gradients are compared
FAR_MORE = 0.05  # of the pixels: a margin for chance; embedded networks lose far more along their true gradients
LITTLE = 0.2  # of the way from a constant guess to perfection: a model that learnt something goes further

RANDOM_BATCH = "not judged: a batch draws other random numbers; with samples, images are asked one at a time"


@dataclass(frozen=True)
class Check:
    """One line of the verdict on a model."""

    name: str
    verdict: Severity  # green: fine; amber: look at it; red: figures of this model would be wrong
    finding: str  # one sentence, with numbers and what to do


def check_model(
    model: nn.Module,
    samples: Iterable[Sample],
    *,
    ignore: tuple[int, ...] = (255,),
    num_classes: int | None = None,
    quick: bool = False,
    draws: int | None = None,
) -> list[Check]:
    """Look for what makes robustness figures meaningless, with a few queries.

    Args:
        model: a `Segmenter`, or any network that takes images in [0, 1] and returns logits. A plain network is left as
            it was found.
        samples: a few images with labels; where every label is one to ignore, accuracy is not judged.
        ignore: label values of pixels that do not count.
        num_classes: of the dataset.
        quick: leave out what needs more memory than an attack, a batch of two and a copy of the network in float64,
            and the two short attacks.
        draws: of a query, if the model is to be attacked on the average of its answers: `samples` of an evaluation.

    Example:
        >>> import segprox
        >>> from segprox.run import check_model
        >>> checks = check_model(segprox.load_model("demo-standard"), [segprox.load_dataset("demo")[0]])
        >>> {check.verdict for check in checks}
        {'green'}
    """
    samples = list(samples)
    if not samples:
        raise SegproxError("a check needs at least one image but got none")
    mode = _eval_mode(model)  # first, because a Segmenter puts the network into eval mode
    with nullcontext() if isinstance(model, Segmenter) else restored(model):
        segmenter = model if isinstance(model, Segmenter) else Segmenter(model)
        segmenter.eval()
        problems = [
            Problem.build(sample.image[None].to(segmenter.device), sample.label[None], ignore=ignore)
            for sample in samples
        ]
        first = problems[0]
        rounding, difference = _rounding(segmenter), repeated_gap(segmenter, first.images)
        random = difference > rounding >= repeated_gap(same_draw(segmenter), first.images)
        segmenter = same_draw(segmenter) if random else segmenter  # so that noise is not taken for anything else
        glances = [glance(segmenter, problem) for problem in problems]
        findings: dict[str, Finding] = {
            "eval mode": mode,
            "classes": _classes(glances, problems, num_classes),
            "input": _input(segmenter, problems),
            "logits": _logits(segmenter, first, glances),
            "repeatable": _repeatable(difference, rounding, random, draws),
            **({} if quick else {"batch": ("green", RANDOM_BATCH) if random else _batch(segmenter, first)}),
            "accuracy": _accuracy(glances, problems),
            "saturation": _saturation(glances),
            "gradients": _gradients(glances),
            **({} if quick else {"finite differences": _differences(segmenter, first)}),
            **({} if quick else {"black box": _black_box(segmenter, first, samples[0].name)}),
            **_certificate(segmenter, problems),
        }
        return [Check(name, *finding) for name, finding in findings.items()]


def _eval_mode(model: nn.Module) -> Finding:
    network = model.model if isinstance(model, Segmenter) else model
    before = model.found_training if isinstance(model, Segmenter) else []
    training = {
        name or "the network": module for name, module in network.named_modules() if module.training or name in before
    }
    affected = [f"{name} ({type(module).__name__})" for name, module in training.items() if _has_modes(module)]
    if affected:
        return "red", (
            f"train mode in {len(affected)} of the batch norm and dropout layers, first in {affected[0]}: segprox uses "
            "eval mode itself, but figures made elsewhere with this model may not; call model.eval()"
        )
    if training:
        return "amber", "in train mode, though without a layer known to behave differently; call model.eval()"
    return "green", f"all {len(list(network.modules()))} layers are in eval mode"


def _has_modes(module: nn.Module) -> bool:
    """Whether a layer does something else in train mode."""
    # By name too: stochastic depth and its like (DropPath, DropBlock) are classes of their libraries.
    known = nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd
    return isinstance(module, known) or "drop" in type(module).__name__.lower()


def _classes(glances: Sequence[Glance], problems: Sequence[Problem], wanted: int | None) -> Finding:
    outputs, highest = glances[0].num_classes, _highest_label(problems)
    if highest >= outputs:
        return "red", (
            f"label {highest} occurs but the model's classes are 0 to {outputs - 1}: take weights trained for this "
            "dataset, or declare the label as one to ignore"
        )
    if wanted is None:
        return "green", f"{outputs} outputs, and every label is one of them"
    finding = f"{outputs} outputs for the dataset's {wanted} classes"
    if outputs < wanted:
        return "red", f"{finding}: take weights trained for this dataset"
    if outputs > wanted:
        advice = "pass channels=[...] to choose the outputs that mean them"
        return "amber", f"{finding}: those beyond are never right; {advice}"
    return "green", finding


def _input(model: Segmenter, problems: Sequence[Problem]) -> Finding:
    labelled = _labelled(problems)
    measure, what = (pixel_accuracy, "pixel accuracy") if labelled else (mirror_agreement, "agreement when mirrored")
    now = measure(model, problems)
    others = [(measure(variant.model, problems), variant) for variant in variants(model, problems[0].images.shape[1])]
    score, best = max(others, key=lambda other: other[0])
    finding = f"{what} {now:.1%} as fed now"
    if score <= now + CLEARLY_BETTER:
        tried = ", ".join(f"{variant.expects} {value:.1%}" for value, variant in others)
        return "green", f"{finding}; no other way is clearly better ({tried})"
    advice = f"but {score:.1%} with {best.expects}: the model seems to expect that; pass {best.option}"
    # Agreement is a weaker witness than accuracy.
    return "red" if labelled and best.grave else "amber", f"{finding} {advice}"


def _logits(model: Segmenter, problem: Problem, glances: Sequence[Glance]) -> Finding:
    nonfinite = max(look.nonfinite for look in glances)
    if nonfinite:
        what = f"up to {nonfinite:.1%} of an image's pixels have NaN or infinite logits"
        return "red", f"{what}, which no attack can judge"
    try:
        with torch.no_grad():
            model(problem.images)  # unlike model.logits, it looks at the values
    except SegproxError as error:
        return "red", str(error)
    low, high = min(look.lowest for look in glances), max(look.highest for look in glances)
    span = f"from {low:.3g} to {high:.3g}"
    if model.output == "probabilities":
        return "amber", f"the logarithm of probabilities, {span}: if you can, return logits instead"
    if low >= 0 and high <= 1:
        return "amber", f"all in [0, 1], {span}: if these are sigmoids, return what goes into them"
    return "green", f"{span}, not probabilities"


def _repeatable(difference: float, rounding: float, random: bool, draws: int | None) -> Finding:
    if difference == 0:
        return "green", "the same image gives the same logits twice"
    finding = f"the same image gives logits that differ by {difference:.1e} of their range"
    if difference <= rounding:
        return "amber", f"{finding}, as rounding may; torch.use_deterministic_algorithms(True) may end it"
    if not random:
        own = "it has random numbers of its own, and nothing that is found can be repeated"
        return "red", f"{finding}, even where torch, NumPy and Python draw the same: {own}"
    if draws is not None:
        return "green", f"{finding}: it answers at random, and is attacked on the average of {draws} draws"
    return "red", (
        f"{finding}: switch off the dropout or noise that is active in eval mode, or if it is meant to be, attack the "
        "model on the average of its answers, with samples=4 (--samples 4)"
    )


@torch.no_grad()
def _batch(model: Segmenter, problem: Problem) -> Finding:
    images = problem.images
    other = (1 - images) / 2  # with another mean, another range
    alone = torch.cat([model.logits(images), model.logits(other)])
    try:
        together = model.logits(torch.cat([images, other]))
    except RuntimeError as error:
        return "red", f"fails on a batch of two: {str(error).splitlines()[0]}"
    difference = gap(alone, together)
    if difference <= _rounding(model):
        return "green", f"an image has the same logits alone and beside another ({difference:.1e} of their range apart)"
    finding = f"an image's logits change by {difference:.1e} of their range beside another"
    return "red", f"{finding}: make every layer use what it learnt, not statistics of the batch"


def _accuracy(glances: Sequence[Glance], problems: Sequence[Problem]) -> Finding:
    if not _labelled(problems):
        return "amber", "unknown, because no pixel is labelled: check the predictions by eye"
    counts = _pooled_counts(glances, problems)
    accuracy, miou = float(counts.pixel_accuracy()), float(np.nanmean(counts.iou()))
    shares = (counts.tp + counts.fn) / (counts.tp + counts.fn).sum()
    guess, guess_miou = float(shares.max()), float(shares.max() / (shares > 0).sum())
    finding = f"pixel accuracy {accuracy:.1%}, mean IoU {miou:.1%}; the most frequent class alone gives {guess:.1%}"
    if guess == 1:
        return "amber", f"{finding}, which says nothing: take images with more than one class"
    if accuracy < guess and miou < guess_miou:
        return "red", f"{finding}: check weights, order of classes and normalisation"
    # Where one class rules, a good model may be no better than a guess by one measure, but not by both.
    if accuracy < guess + LITTLE * (1 - guess) and miou < guess_miou + LITTLE * (1 - guess_miou):
        return "amber", f"{finding}: little better; check weights, order of classes and normalisation"
    return "green", finding


def _saturation(glances: Sequence[Glance]) -> Finding:
    share = float(np.mean([look.saturated for look in glances]))
    finding = f"{share:.1%} of the pixels have a probability that rounds to 1 in float32"
    if share <= SATURATED:
        return "green", finding
    advice = "trust attacks on margins, such as palma, only"
    return "amber", f"{finding}: gradients of cross-entropy vanish there; {advice}"


def _gradients(glances: Sequence[Glance]) -> Finding:
    nonfinite = max(look.nonfinite_gradient for look in glances)
    if nonfinite:
        return "red", f"NaN or infinite at up to {nonfinite:.1%} of an image's pixels: no attack can follow them"
    zero = float(np.mean([look.no_gradient for look in glances]))
    finding = f"exactly zero at {zero:.1%} of the pixels"
    advice = "look for rounding, thresholds, detach() or a stride that skips pixels; attacks cannot see through them"
    verdict = _grade(zero, NO_GRADIENT)
    return verdict, f"finite, {finding}" if verdict == "green" else f"{finding}: {advice}"


def _differences(model: Segmenter, problem: Problem) -> Finding:
    found = slope(model, problem.images)
    if not np.isfinite([found.autograd, found.differences]).all():
        return "red", "NaN or infinite loss or gradient: there is nothing to compare"
    if found.autograd == 0:
        return "red", "autograd says that the loss is flat: there is no gradient to compare with"
    verdict = _grade(found.error, WRONG_SLOPE)
    finding = (
        f"slope {found.differences:.3g}, autograd says {found.autograd:.3g}: {found.error:.1%} apart "
        f"({str(found.dtype).removeprefix('torch.')})"
    )
    advice = "; look for a custom backward, a straight-through estimator or rounding inside the network"
    return verdict, finding if verdict == "green" else finding + advice


def _black_box(model: Segmenter, problem: Problem, name: str) -> Finding:
    """Whether random search, which asks for no gradient, does more damage than steps along the gradient."""
    with torch.no_grad():
        logits = model.logits(problem.images)
    predicted, num_classes = predictions(logits), logits.shape[1]
    own = Problem.build(problem.images, predicted, ignore=(num_classes,))  # of NaN pixels nothing is known
    along: Attack = Pgd(objective="dl", steps=10, step_size=0.25, epsilon=EPSILON)
    without: Attack = Square(steps=30, epsilon=EPSILON)
    try:
        followed, searched = (attack.run(model, own).apsr.item() for attack in (along, without))
    except SegproxError as error:
        return "amber", f"not compared with gradients, because the model cannot be attacked: {error}"
    finding = (
        f"within {_size(EPSILON, model)} of {name}, 10 steps along the gradient change {followed:.1%} of the pixels, "
        f"30 queries of random search {searched:.1%}"
    )
    if searched <= followed + FAR_MORE:
        return "green", finding
    return "red", f"{finding}: gradients are masked; attack it without gradients too, such as by square"


def _certificate(model: Segmenter, problems: Sequence[Problem]) -> dict[str, Finding]:
    """A row for networks whose layers are simple enough."""
    found = [certificate for problem in problems if (certificate := certify(model, problem)) is not None]
    if not found:
        return {}
    linf, l2 = (min(float(radii.min()) for radii in norm) for norm in zip(*found))
    share = f"{problems[0].threshold:.0%} of an image's pixels"
    bound = "by the product of its layers' Lipschitz constants"
    return {
        "certificate": (
            "green",
            f"below {_size(linf, model)} in linf or {l2:.2g} in l2 nothing makes {share} wrong, {bound}",
        )
    }


def _size(linf: float, model: Segmenter) -> str:
    """A size as it is written of the images that a model is fed."""
    return f"{255 * linf:.2g}/255" if model.range is None else f"{linf:.2%} of the range"


def _grade(value: float, limits: tuple[float, float]) -> Severity:
    amber, red = limits
    return "red" if value > red else "amber" if value > amber else "green"


def _rounding(model: Segmenter) -> float:
    return max(ROUNDING, 8 * torch.finfo(model.mean.dtype).eps)


def _labelled(problems: Sequence[Problem]) -> bool:
    return any(int(problem.counted.sum()) for problem in problems)


def _highest_label(problems: Sequence[Problem]) -> int:
    return max(int(problem.labels.max()) for problem in problems)


def _pooled_counts(glances: Sequence[Glance], problems: Sequence[Problem]) -> Counts:
    """Counts `[K]` of all images, with room for labels that the model does not know."""
    size = max(glances[0].num_classes, _highest_label(problems) + 1)
    each = []
    for look, problem in zip(glances, problems):
        prediction = look.prediction.masked_fill(look.prediction == look.num_classes, size)  # NaN
        mask = problem.mask[0]
        each.append(class_counts(prediction[mask], problem.labels[0][mask], size, ignore=()))
    return Counts(*np.sum(each, axis=0))
