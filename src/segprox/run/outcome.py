"""One sample attacked, with everything a table or a picture of it needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from segprox.attacks import Attack, Callback
from segprox.data import Sample
from segprox.models import Segmenter
from segprox.norms import distance
from segprox.problem import Problem, predictions


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an attack did to one sample; tensors without a batch axis."""

    sample: Sample
    targeted: bool
    image: Tensor  # the adversarial image, [3, H, W]
    clean_prediction: Tensor  # [H, W]
    prediction: Tensor  # of the adversarial image, [H, W]
    clean_accuracy: float  # share of counted pixels
    apsr: float
    success: bool
    norm: float  # of the perturbation, in the attack's norm
    linf: float
    l2: float
    forwards: int
    backwards: int
    seconds: float


def attack_sample(
    model: Segmenter,
    sample: Sample,
    attack: Attack,
    *,
    ignore: tuple[int, ...] = (255,),
    target: Tensor | int | None = None,
    threshold: float = 0.99,
    callback: Callback | None = None,
) -> Outcome:
    """Attack one sample and look at the prediction before and after."""
    images, labels = sample.image[None].to(model.device), sample.label[None].to(model.device)
    problem = Problem.build(images, labels, target=target, ignore=ignore, threshold=threshold)
    truth = Problem.build(images, labels, ignore=ignore)
    found = attack.run(model, problem, callback)
    with torch.no_grad():
        clean, adversarial = model(problem.images), model(found.images)
    difference = found.images - problem.images
    return Outcome(
        sample=sample,
        targeted=problem.targeted,
        image=found.images[0].cpu(),
        clean_prediction=predictions(clean)[0].cpu(),
        prediction=predictions(adversarial)[0].cpu(),
        clean_accuracy=1 - truth.apsr(clean).item(),
        apsr=found.apsr.item(),
        success=bool(found.success),
        norm=found.norm.item(),
        linf=distance(difference, "linf").item(),
        l2=distance(difference, "l2").item(),
        forwards=int(found.forwards),
        backwards=int(found.backwards),
        seconds=found.seconds,
    )
