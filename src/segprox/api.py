"""The calls most people need: attack a batch, evaluate a dataset, audit two attacks."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

from torch import Tensor, nn

from segprox.attacks import Attack, Callback, make_attack
from segprox.data import UNTARGETED, Dataset
from segprox.errors import SegproxError
from segprox.naming import checked
from segprox.report.audit import Audit
from segprox.report.evaluation import Results
from segprox.report.results import results_of
from segprox.result import AttackResult
from segprox.run.audit import audit_entries
from segprox.run.engines import choose_engine
from segprox.run.evaluate import Evaluation
from segprox.run.execution import Execution
from segprox.run.objects import describe_entry, named_dataset, named_model
from segprox.run.plan import AttackEntry, Grid, SaveFormat, Settings, Spec
from segprox.run.progress import follow

AnyAttack = str | Attack | AttackEntry  # by its name, as an object, or as a run describes it


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
    if isinstance(epsilon, (list, tuple)):
        each = [_choose(attack, options | {"epsilon": value}) for value in epsilon]
    else:
        each = [_choose(attack, options if epsilon is None else options | {"epsilon": epsilon})]
    found = [
        chosen(
            model, images, labels, target=target, ignore=ignore, mask=mask, protect=protect, threshold=threshold,
            protect_threshold=protect_threshold, seed=seed, callback=callback, max_queries=max_queries,
        )
        for chosen in each
    ]  # fmt: skip
    return found if isinstance(epsilon, (list, tuple)) else found[0]


def _choose(attack: str | Attack, options: dict[str, Any]) -> Attack:
    if isinstance(attack, str):
        return make_attack(attack, **options)
    _refuse_fields(options)
    return attack


def _refuse_fields(fields: dict[str, Any]) -> None:
    if fields:
        names = ", ".join(fields)
        raise SegproxError(f"{names} cannot be given beside an attack that is made already: give it to the attack")


def evaluate(
    model: str | nn.Module,
    dataset: str | Dataset | Iterable[Any],
    attacks: AnyAttack | Sequence[AnyAttack] = "palma",
    *,
    goals: str | Sequence[str] = UNTARGETED,
    limit: int | None = None,
    threshold: float = 0.99,
    seed: int = 0,
    max_queries: int | None = None,
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
            a torch dataset or data loader; images are floats in [0, 1] `[3, H, W]`, labels integers `[H, W]`.
        attacks: names or attacks, one or several.
        goals: `untargeted`, or targets as `segprox target` takes them, with regions such as
            `untargeted?only=person&protect=rest`; one or several.
        limit: how many images; all if left out.
        threshold: the share of pixels that makes a success.
        seed: of random starts.
        max_queries: the most forwards plus backwards per image.
        ignore: label values of pixels that do not count, where the dataset does not say it itself.
        out: a folder for records that `segprox runs`, `report` and `load_results` read, and from which the same call
            goes on after an interruption; left out, nothing is kept.
        save: what to keep of perturbed images in that folder: `float`, `png`, `preview`.
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
    chosen = [attacks] if isinstance(attacks, AnyAttack) else list(attacks)
    if not any(isinstance(attack, str) for attack in chosen):
        _refuse_fields(fields)
    entries = tuple(_entry(attack, fields) for attack in chosen)
    settings = checked(
        Settings, "an evaluation", limit=limit, threshold=threshold, seed=seed, max_queries=max_queries,
        save=tuple(save) if out is not None else (),
    )  # fmt: skip
    with ExitStack() as undo:
        model_name = undo.enter_context(named_model(model))
        dataset_name = undo.enter_context(named_dataset(dataset, ignore, limit))
        if workers > 1 and not (isinstance(model, str) and isinstance(dataset, str)):
            raise SegproxError("several workers need a model and a dataset that have names: see register_model")
        where = Path(out) if out is not None else Path(undo.enter_context(TemporaryDirectory(prefix="segprox-")))
        grid = Grid(
            models=(model_name,), datasets=(dataset_name,), attacks=entries,
            goals=(goals,) if isinstance(goals, str) else tuple(goals),
        )  # fmt: skip
        runs = Spec(grids=(grid,), settings=settings).runs()
        own = isinstance(model, str)
        execution = Execution(
            workers=workers, batch=batch, devices=(device,) if device else () if own else (_device_of(model),),
            lean=None if own else False,
        )  # fmt: skip
        evaluation = Evaluation(runs, where, execution, retry_errors)
        evaluation.validate()
        follow(evaluation, choose_engine(execution), progress)
        return Results(results_of(evaluation.status()))


def _entry(attack: AnyAttack, fields: dict[str, Any]) -> AttackEntry:
    if isinstance(attack, AttackEntry):
        return attack
    return AttackEntry(name=attack, set=fields) if isinstance(attack, str) else describe_entry(attack)


def audit(
    model: str | nn.Module,
    dataset: str | Dataset | Iterable[Any],
    minimal: str | Attack = "palma",
    fixed: str | Attack = "anneal",
    *,
    epsilon: float | str,
    goal: str = UNTARGETED,
    limit: int | None = None,
    threshold: float = 0.99,
    seed: int = 0,
    max_queries: int | None = None,
    ignore: tuple[int, ...] = (255,),
    out: str | Path | None = None,
    save: Sequence[SaveFormat] = ("preview",),
    workers: int = 1,
    batch: int = 1,
    device: str | None = None,
    retry_errors: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Audit:
    """Attack each image twice, by attacks of two families, and say where one missed what the other found.

    An image that only one of them breaks within epsilon shows that the other is too weak there. It is an evaluation of
    two attacks: what is not explained here is as in `evaluate`.

    Args:
        model: a name or a network.
        dataset: a name, a `Dataset`, or (image, label) pairs.
        minimal: the attack that looks for the smallest perturbation, or its name.
        fixed: the attack that does the most damage within epsilon, in the same norm.
        epsilon: the size within which they are compared, such as `"8/255"`; `fixed` gets it, whatever it had.
        goal: `untargeted`, or a target as `segprox target` takes it.
        limit: how many images; all if left out.
        threshold: the share of pixels that makes a success.
        seed: of random starts.
        max_queries: the most forwards plus backwards per image and attack.
        ignore: label values of pixels that do not count, where the dataset does not say it itself.
        out: a folder for the records, from which the same call goes on after an interruption.
        save: what to keep of perturbed images in that folder.
        workers: processes.
        batch: images of one size that are attacked together.
        device: where the model goes.
        retry_errors: try images again that could not be attacked.
        progress: show a bar.
        fields: fields of the attacks that are given by their names, such as `steps`; each goes to those that have it.

    Example:
        >>> import segprox
        >>> audit = segprox.audit("demo-standard", "demo", epsilon="8/255", limit=2, steps=30, progress=False)
        >>> audit.sentence
        '0 of 2 images withstood both attacks within 8.0/255. The attacks agree on all of them.'
        >>> [finding.broken_by for finding in audit.findings]
        [('minimal', 'fixed'), ('minimal', 'fixed')]
    """
    results = evaluate(
        model, dataset, audit_entries(minimal, fixed, epsilon, fields), goals=goal, limit=limit, threshold=threshold,
        seed=seed, max_queries=max_queries, ignore=ignore, out=out, save=save, workers=workers, batch=batch,
        device=device, retry_errors=retry_errors, progress=progress,
    )  # fmt: skip
    return Audit(results)


def _device_of(model: str | nn.Module) -> str:
    """Where a network is."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return "cpu" if first is None else str(first.device)
