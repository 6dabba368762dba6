"""The calls most people need: attack a batch, evaluate a dataset, audit two attacks."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import Any, get_args, overload

from torch import Tensor, nn

from segprox.attacks import Attack, Callback, make_attack
from segprox.data import UNTARGETED
from segprox.errors import SegproxError
from segprox.naming import checked
from segprox.report.audit import Audit
from segprox.report.evaluation import Results, SummaryTable
from segprox.report.progress import Follower, follow, make_bar
from segprox.report.results import load_runs, results_of
from segprox.report.transfer import transfer_tables
from segprox.result import AttackResult
from segprox.run.audit import audit_entries
from segprox.run.execution import Execution
from segprox.run.objects import AnyAttack, AnyDataset, make_evaluation, named_model
from segprox.run.plan import SaveFormat, Settings
from segprox.run.store import stores
from segprox.run.transfer import Reference, transfer_runs


@overload
def attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    attack: str | Attack = "palma",
    *,
    target: Tensor | int | None = None,
    ignore: Iterable[int] = (255,),
    mask: Tensor | None = None,
    protect: Tensor | None = None,
    threshold: float = 0.99,
    protect_threshold: float | None = None,
    seed: int = 0,
    callback: Callback | None = None,
    max_queries: int | None = None,
    samples: int | None = None,
    score_draws: int | None = None,
    score_share: float | None = None,
    epsilon: float | str | None = None,
    **options: Any,
) -> AttackResult: ...


@overload
def attack(
    model: nn.Module, images: Tensor, labels: Tensor | None = None, attack: str | Attack = "palma", *,
    epsilon: list[Any] | tuple[Any, ...], **options: Any,
) -> list[AttackResult]: ...  # fmt: skip


def attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    attack: str | Attack = "palma",
    *,
    target: Tensor | int | None = None,
    ignore: Iterable[int] = (255,),
    mask: Tensor | None = None,
    protect: Tensor | None = None,
    threshold: float = 0.99,
    protect_threshold: float | None = None,
    seed: int = 0,
    callback: Callback | None = None,
    max_queries: int | None = None,
    samples: int | None = None,
    score_draws: int | None = None,
    score_share: float | None = None,
    epsilon: float | str | Sequence[float | str] | None = None,
    **options: Any,
) -> AttackResult | list[AttackResult]:
    """Find the smallest perturbation of each image that makes (almost) every pixel wrong, or what you want it to be.

    Args:
        model: a `Segmenter`, or any network that takes images in [0, 1] and returns logits. A plain network is left as
            it was found: its train mode and `requires_grad` flags are put back.
        images: floats in [0, 1], `[B, C, H, W]`. They do not influence each other.
        labels: true labels `[B, H, W]`.
        attack: an attack, or its name; `segprox list attacks` lists them.
        target: attack towards this class or label map instead of away from `labels`.
        ignore: label values of pixels that do not count.
        mask: True where a pixel counts, `[B, H, W]`.
        protect: True where a pixel shall stay what `labels` say, `[B, H, W]`; the other pixels that count are attacked.
        threshold: the share of attacked pixels that makes a success.
        protect_threshold: the share of protected pixels that a success needs as well; `threshold` if left out.
        seed: of random starts; an image gets the same ones in any batch.
        callback: called with a `Progress` at every iteration.
        max_queries: the most forwards plus backwards of an image; the attack's own number if left out.
        samples: for a model that answers at random: the draws of every query, whose logits and gradients are averaged.
        score_draws: the draws by which such a model is then judged, 20 if left out.
        score_share: the share of those that must be successes, 0.5 if left out.
        epsilon: the largest perturbation, for fixed-epsilon attacks. With a list there is a list of results.
        options: the attack's other hyper-parameters, such as `steps`, where `attack` is a name.

    Example:
        >>> import torch, segprox
        >>> network = torch.nn.Conv2d(3, 4, kernel_size=1)
        >>> images, labels = torch.rand(2, 3, 8, 8), torch.randint(0, 4, (2, 8, 8))
        >>> result = segprox.attack(network, images, labels, steps=5)
        >>> result.images.shape, result.norm.shape
        (torch.Size([2, 3, 8, 8]), torch.Size([2]))
        >>> curve = segprox.attack(network, images, labels, "pgd", epsilon=["2/255", "8/255"], steps=5)
        >>> [bool(result.norm.max() <= limit) for result, limit in zip(curve, [2.01 / 255, 8.01 / 255])]
        [True, True]
    """
    several = epsilon if isinstance(epsilon, (list, tuple)) else [epsilon]
    each = [_choose(attack, options if value is None else options | {"epsilon": value}) for value in several]
    found = [
        chosen(
            model, images, labels, target=target, ignore=ignore, mask=mask, protect=protect, threshold=threshold,
            protect_threshold=protect_threshold, seed=seed, callback=callback, max_queries=max_queries,
            samples=samples, score_draws=score_draws, score_share=score_share,
        )
        for chosen in each
    ]  # fmt: skip
    return found if several is epsilon else found[0]


def _choose(attack: str | Attack, options: dict[str, Any]) -> Attack:
    if isinstance(attack, str):
        return make_attack(attack, **options)
    if options:
        names = ", ".join(options)
        raise SegproxError(f"{names} cannot be given beside an attack that is made already: give it to the attack")
    return attack


def evaluate(
    model: str | nn.Module,
    dataset: AnyDataset,
    attacks: AnyAttack | Sequence[AnyAttack] = "palma",
    *,
    goals: str | Sequence[str] = UNTARGETED,
    limit: int | None = None,
    until: float | str | None = None,
    threshold: float = 0.99,
    seed: int = 0,
    max_queries: int | None = None,
    samples: int | None = None,
    score_draws: int | None = None,
    score_share: float | None = None,
    precision: str | None = None,
    ignore: tuple[int, ...] = (255,),
    out: str | Path | None = None,
    save: Sequence[SaveFormat] = ("preview",),
    workers: int = 1,
    batch: int = 1,
    device: str | None = None,
    retry_errors: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Results:
    """Attack a model on a dataset and return what was found, image by image.

    Args:
        model: a name (`segprox.list_models()`), a network that takes images in [0, 1] and returns logits, or a
            `Segmenter`. A network is left as it was found.
        dataset: a name (`segprox.list_datasets()`), a `Dataset`, or any sequence or iterable of (image, label), such as
            a torch dataset or data loader; images are floats in [0, 1] `[C, H, W]`, labels integers `[H, W]`.
        attacks: names or attacks, one or several.
        goals: `untargeted`, or targets as `segprox target` takes them, with regions such as
            `untargeted?only=person&protect=rest`; one or several.
        limit: how many images; all if left out.
        until: stop when the 95 % interval of the median is within plus or minus this share of it, such as 0.05 or "5%";
            images then come in random order, by the seed. For minimal attacks.
        threshold: the share of pixels that makes a success.
        seed: of random starts, and of the order of images if there is an `until`.
        max_queries: the most forwards plus backwards per image.
        samples: for a model that answers at random: the draws of every query, whose logits and gradients are averaged.
        score_draws: the draws by which an image of such a model is judged, 20 if left out.
        score_share: the share of those that must be successes, 0.5 if left out.
        precision: `bfloat16` or `float16` for gradients; successes are verified in float32.
        ignore: label values of pixels that do not count, where the dataset does not say it itself.
        out: a folder for records that `segprox runs`, `report` and `load_results` read, and from which the same call
            goes on after an interruption; left out, nothing is kept.
        save: what to keep of perturbed images in that folder: `float`, `png`, or `preview`, which the others include.
        workers: processes; more than one needs a model, a dataset and attacks that have names.
        batch: images of one size that are attacked together.
        device: where the model goes; where it is, or a GPU if there is one, if left out.
        retry_errors: try images again that could not be attacked.
        progress: show a bar, in a terminal or a notebook.
        fields: fields of every attack that is given by its name, such as `steps`.

    Example:
        >>> import segprox
        >>> results = segprox.evaluate("demo-standard", "demo", ["palma", "fmn"], limit=2, steps=20, progress=False)
        >>> results
        Results(2 runs, 4 attacked images)
        >>> results.accuracy(0.5 / 255) > 0.9 > 0.1 > results.accuracy(64 / 255)
        True
    """
    settings = checked(
        Settings, "an evaluation", limit=limit, until=until, threshold=threshold, seed=seed, max_queries=max_queries,
        samples=samples, score_draws=score_draws, score_share=score_share, save=tuple(save),
        model_options={"precision": precision} if precision else {},
    )  # fmt: skip
    execution = Execution(workers=workers, batch=batch, devices=(device,) if device else ())
    with make_evaluation(
        model, dataset, attacks, goals, settings, out=out, execution=execution, retry_errors=retry_errors,
        ignore=ignore, fields=fields,
    ) as evaluation:  # fmt: skip
        evaluation.validate()
        for sentence in evaluation.red_checks():
            warnings.warn(sentence, stacklevel=2)
        follow(evaluation, make_bar() if progress else Follower())
        return Results(results_of(evaluation.status()))


def audit(
    model: str | nn.Module,
    dataset: AnyDataset,
    minimal: str | Attack = "palma",
    fixed: str | Attack = "anneal",
    *,
    epsilon: float | str,
    goal: str = UNTARGETED,
    **options: Any,
) -> Audit:
    """Attack each image twice, by attacks of two families, and say where one missed what the other found.

    An image that only one of them breaks within epsilon shows that the other is too weak there.

    Args:
        model: a name or a network.
        dataset: a name, a `Dataset`, or (image, label) pairs.
        minimal: the attack that looks for the smallest perturbation, or its name.
        fixed: the attack that does the most damage within epsilon, in the same norm.
        epsilon: the size within which they are compared, such as `"8/255"`; `fixed` gets it, whatever it had.
        goal: `untargeted`, or a target as `segprox target` takes it.
        options: what `evaluate` takes, such as `limit`, `out` or `progress`; and fields of the attacks that are given
            by their names, such as `steps`: each goes to those that have it.

    Example:
        >>> import segprox
        >>> audit = segprox.audit("demo-standard", "demo", epsilon="8/255", limit=2, steps=30, progress=False)
        >>> audit.sentence
        '0 of 2 images withstood both attacks within 8.0/255. The attacks agree on all of them.'
        >>> [finding.broken_by for finding in audit.findings]
        [('minimal', 'fixed'), ('minimal', 'fixed')]
    """
    known = {name for name, option in signature(evaluate).parameters.items() if option.kind is option.KEYWORD_ONLY}
    fields = {name: value for name, value in options.items() if name not in known - {"goals"}}
    own = {name: value for name, value in options.items() if name not in fields}
    return Audit(evaluate(model, dataset, audit_entries(minimal, fixed, epsilon, fields), goals=goal, **own))


def transfer(
    folder: str | Path,
    models: str | nn.Module | Sequence[str | nn.Module],
    *,
    reference: Reference | None = None,
    device: str | None = None,
) -> SummaryTable:
    """Score the saved images of an evaluation on other models: does what breaks one break another?

    The result is a table for each dataset and goal, with a line for each model that was attacked and a column for each
    model that was scored. It is kept beside the records, and reports show it.

    Args:
        folder: what `evaluate` wrote to, with `float` or `png` in its `save`.
        models: names or networks. A network that was evaluated as an object is to be among them.
        reference: `labels` or `prediction`, the model's own of the clean image. If left out, labels for models with
            the classes of the dataset, and the prediction for others.
        device: where the models go.

    Example:
        >>> import tempfile, segprox
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = segprox.evaluate("demo-standard", "demo", limit=1, steps=5, out=out, save=["float"], progress=False)
        ...     segprox.transfer(out, "demo-robust").tables[0].rows[0][:3]
        ('demo-standard', 'palma', 1)
    """
    if reference not in (None, *get_args(Reference)):
        raise SegproxError(f"reference must be labels or prediction but is {reference!r}")
    given = [models] if isinstance(models, str | nn.Module) else list(models)
    with ExitStack() as undo:
        transfer_runs(stores(Path(folder)), [undo.enter_context(named_model(m)) for m in given], reference, device)
    return SummaryTable(transfer_tables(load_runs([Path(folder)])))
