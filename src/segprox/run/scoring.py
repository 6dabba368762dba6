"""What a perturbed image is worth: asked once, or of a model that answers at random, draw by draw."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from segprox.counts import class_counts
from segprox.data import Sample, with_own_labels
from segprox.devices import send
from segprox.draws import Sampling, scoring_draws
from segprox.errors import SegproxError
from segprox.models import Segmenter
from segprox.norms import distance
from segprox.problem import Problem, image_seed, predictions
from segprox.run.record import ClassCounts, Score


def label_sample(
    model: Segmenter, sample: Sample, labelled: bool, sampling: Sampling | None = None, seed: int = 0
) -> tuple[Sample, Tensor]:
    """The sample with labels, if it has none with what the model sees in it; and its clean logits `[1, K, H, W]`.

    The logits of a random model are the mean of the draws by which it is scored, from `seed` and the image.
    """
    image = send(sample.image[None], model.device)
    own = 0 if sampling is None else image_seed(sample.image, seed)
    clean = mean_logits(scoring_draws(model, image, own, sampling))
    if clean.isnan().any():
        raise SegproxError("the model returns NaN for this image")
    return sample if labelled else with_own_labels(sample, predictions(clean)[0].cpu()), clean


def mean_logits(answers: Iterable[Tensor]) -> Tensor:
    """The mean of logits `[1, K, H, W]`; one answer stays as it is."""
    total, count = None, 0
    for logits in answers:
        total, count = logits if total is None else total + logits, count + 1
    assert total is not None  # a model is asked at least once
    return total if count == 1 else total / count


class Scored(NamedTuple):
    """A perturbed image, scored."""

    score: Score
    prediction: Tensor  # what the model sees in it, int [H, W]; of a random model by the mean over its draws
    num_classes: int
    seen: list[Tensor]  # the same in each draw

    def counts(self, label: Tensor, ignore: tuple[int, ...]) -> ClassCounts:
        """Right and wrong pixels of each class in all draws, by labels `[H, W]`."""
        each = [class_counts(seen.long(), label, self.num_classes, ignore) for seen in self.seen]
        return ClassCounts(*(sum(part).tolist() for part in zip(*each)))


def score_image(model: Segmenter, problem: Problem, image: Tensor, sampling: Sampling | None = None) -> Scored:
    """What a perturbed image `[1, C, H, W]` is worth, in full precision; of a random model in draws from its seed."""
    seed = 0 if sampling is None else problem.seeds()[0]
    return score_answers(scoring_draws(model, image, seed, sampling), problem, image, sampling)


def score_answers(answers: Iterable[Tensor], problem: Problem, image: Tensor, sampling: Sampling | None) -> Scored:
    """The same by what the model answered: logits `[1, K, H, W]`, of which only the mean is held.

    Norms are added up in double precision: single would leave the fifth digit of l1 and l2 to the machine.
    """
    apsrs, rates, seen = list[Tensor](), list[Tensor](), list[Tensor]()

    def noted() -> Iterator[Tensor]:
        for logits in answers:
            apsrs.append(problem.apsr(logits))
            seen.append(predictions(logits)[0].to("cpu", torch.int32))
            if problem.protected is not None:
                rates.append(torch.stack(problem.rates(logits)))
            yield logits

    logits = mean_logits(noted())
    each = torch.cat(apsrs)
    apsr = each if sampling is None else sampling.reached(each)[None]
    difference = image.cpu().double() - problem.images.cpu().double()
    linf, l2, l1 = (distance(difference, norm).item() for norm in ("linf", "l2", "l1"))
    score = Score(linf=linf, l2=l2, l1=l1, apsr=apsr.item(), success=bool(problem.succeeded(apsr)))
    if rates:
        attacked, protected = torch.cat(rates, 1).mean(1).tolist()
        score = replace(score, attacked=attacked, protected=protected)
    if sampling is not None:
        share = problem.succeeded(each).double().mean().item()
        score = replace(score, draws=tuple(each.tolist()), share=share)
    return Scored(score, predictions(logits)[0].cpu(), logits.shape[1], seen)


def accuracy_of(counts: ClassCounts) -> float:
    """The share of counted pixels that are right; 0 if none counts."""
    right, wrong = sum(counts.tp), sum(counts.fn)
    return right / max(right + wrong, 1)
