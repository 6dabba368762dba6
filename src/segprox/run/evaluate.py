"""From runs to records: what is missing is done, what is there is kept."""

import platform
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from segprox.attacks.base import Cost
from segprox.bands import bands_of
from segprox.devices import check_deterministic, wait_for
from segprox.errors import SegproxError
from segprox.run.check import check_model
from segprox.run.columns import read_latest
from segprox.run.engines import Engine
from segprox.run.execution import HERE, Execution
from segprox.run.plan import Run, check_runs
from segprox.run.record import ImageError, Record, digest
from segprox.run.store import Store
from segprox.run.worker import Prepared, Task, forget_models, open_dataset, prepare_goal, prepare_model
from segprox.sizes import is_narrow

Key = TypeVar("Key", bound=Hashable)


class Status(NamedTuple):
    """How far a run is."""

    run: Run
    store: Store
    total: int  # images that are wanted
    records: dict[str, Record | ImageError]  # of these, by name

    @property
    def done(self) -> int:
        """Images with a record."""
        return sum(isinstance(record, Record) for record in self.records.values())

    @property
    def errors(self) -> int:
        """Images that could not be attacked."""
        return len(self.records) - self.done

    @property
    def enough(self) -> bool:
        """Whether the median is known as well as the run's `until` asks for, so that no other image is needed."""
        until = self.run.settings.until
        if until is None:
            return False
        norm = self.run.attack.make().norm
        return is_narrow([r.counted_size(norm) for r in self.records.values() if isinstance(r, Record)], until)

    @property
    def left(self) -> int:
        """Images without a record that are still to be attacked, or may be, if the run has an `until`."""
        return 0 if self.enough else self.total - len(self.records)

    def needs(self, task: Task) -> bool:
        """Whether a task of this run is to be done: it looks at images with a record again, or others are needed."""
        names = open_dataset(self.run.dataset).names
        return not self.enough or any(names[i] in self.records for i in task.indices)


@dataclass(frozen=True)
class Evaluation:
    """Runs and where their records go.

    Args:
        runs: what to run.
        out: the folder that holds a folder per run.
        execution: how they are executed.
        retry_errors: whether images with an error are tried again.
    """

    runs: Sequence[Run]
    out: Path
    execution: Execution = HERE
    retry_errors: bool = False

    def status(self) -> list[Status]:
        """How far each run is."""
        return [self._status(run, Store(self.out / run.folder)) for run in self.runs]

    def _status(self, run: Run, store: Store) -> Status:
        names = set(_names(run))
        records = {name: record for name, record in store.latest().items() if name in names}
        return Status(run, store, len(names), records)

    def go(self, engine: Engine) -> Iterator[tuple[Status, Record | ImageError]]:
        """Do what is missing. Each record is on the disk before it is given out, with the status of its run.

        Several workers may have images under way when a run has enough. These are recorded; should they make the
        interval of the median too wide again, the run goes on.
        """
        if self.execution.workers > 1 or self.execution.engine != "local":
            forget_models()  # others load them: this process asks them nothing any more
        with ExitStack() as locks:
            statuses = {}
            for run in self.runs:
                store = locks.enter_context(Store(self.out / run.folder))
                statuses[run.folder] = self._status(run, store)  # only now: nobody else changes it any more
            tasks = [task for status in statuses.values() for task in self._tasks(status)]
            started: set[str] = set()
            needless: list[Task] = []
            left: Counter[str] = Counter()  # images of each run that are still to come

            def ended(task: Task) -> None:
                left[task.run.folder] -= len(task.indices)
                if not left[task.run.folder]:
                    read_latest(statuses[task.run.folder].store)  # which makes the index of a large run

            def wanted(task: Task) -> bool:
                if statuses[task.run.folder].needs(task):
                    return True
                needless.append(task)
                ended(task)
                return False

            while tasks:
                for task in tasks:
                    left[task.run.folder] += len(task.indices)
                for task, results in engine(tasks, wanted):
                    status = statuses[task.run.folder]
                    if task.run.folder not in started:
                        status.store.start(task.run, about(task.run))
                        started.add(task.run.folder)
                    for name, record, files in results:
                        if record is not None:
                            status.store.append(record, files)
                            status.records[name] = record
                            yield status, record
                    ended(task)
                tasks = [task for task in needless if statuses[task.run.folder].needs(task)]
                needless.clear()

    def _tasks(self, status: Status) -> Iterator[Task]:
        """Images without a record need one; those with one are looked at, in case they have changed.

        If the median decides how many images are needed, they come in an order that depends on the seed and on their
        names only, so it is the same for all models and attacks, and those with a record come first.
        """
        names, batch, seed = _names(status.run), self.execution.batch, status.run.settings.seed
        parts = [list(range(len(names)))]
        if status.run.settings.until is not None:
            order = sorted(parts[0], key=lambda i: digest(seed, names[i]))
            parts = [[i for i in order if (names[i] in status.records) == recorded] for recorded in (True, False)]
        kept = {
            name: record.key
            for name, record in status.records.items()
            if isinstance(record, Record) or not self.retry_errors
        }
        for indices in (part[start : start + batch] for part in parts for start in range(0, len(part), batch)):
            known = {names[i]: kept[names[i]] for i in indices if names[i] in kept}
            yield Task(status.run, tuple(indices), known, self.execution)

    def validate(self) -> None:
        """Refuse runs that cannot work, all reasons at once: names, files, attacks, goals, devices, numbers of classes.

        The model and the dataset of every run are loaded. Models of runs with images left are asked for one prediction
        for each dataset, on the CPU; nothing is attacked.
        """
        runs = self.runs
        datasets = _reasons({run.dataset: partial(open_dataset, run.dataset) for run in runs})
        opened = [run for run in runs if run.dataset not in datasets]
        models = _reasons({(run.model, run.dataset): partial(self._check_model, run) for run in opened})
        fine = [run for run in runs if run.dataset not in datasets and (run.model, run.dataset) not in models]
        goals = _reasons({(run.dataset, run.goal): partial(prepare_goal, run) for run in fine})
        pairs = _reasons({(run.model, run.dataset): partial(self._check_pair, run) for run in fine if self._left(run)})
        rounding = _reasons({run.folder: partial(_check_rounding, run) for run in fine})
        found = (datasets, models, goals, pairs, rounding)
        problems = [*check_runs(runs), *(reason for reasons in found for reason in reasons.values())]
        if problems:
            raise SegproxError("; ".join(dict.fromkeys(problems)))

    def _left(self, run: Run) -> bool:
        return self._status(run, Store(self.out / run.folder)).left > 0

    def _check_model(self, run: Run) -> None:
        """Whether a model can be loaded, and its devices used."""
        options = prepare_model(run, self.execution).options
        for device in self.execution.devices or (options.device,):
            replace(options, device=device).check_device()

    def _check_pair(self, run: Run) -> None:
        """Whether a model and a dataset go together."""
        model, data = prepare_model(run, self.execution).built, open_dataset(run.dataset)
        try:
            image = data[0].image
        except SegproxError:
            return  # an unreadable image is recorded when its turn comes
        try:
            with torch.no_grad():
                outputs = model(image[None].to(model.device)).shape[1]
        except SegproxError:  # the model is not what it should be
            raise
        except Exception:  # an image that the model cannot take, or has no memory for, is recorded in its turn as well
            return
        if len(data.classes) > outputs:
            raise SegproxError(f"{run.model} tells {outputs} classes apart but {run.dataset} has {len(data.classes)}")

    def red_checks(self) -> list[str]:
        """What `segprox check` would be red about, a sentence for each model and dataset with images left.

        The first image of the dataset is looked at, with a few forwards and a backward; nothing is attacked.
        """
        sentences = []
        for (model, dataset), run in {(run.model, run.dataset): run for run in self.runs if self._left(run)}.items():
            data = open_dataset(dataset)
            try:
                segmenter, classes = prepare_model(run, self.execution).segmenter, len(data.classes) or None
                checks = check_model(
                    segmenter, [data[0]], ignore=data.ignore, num_classes=classes, quick=True,
                    draws=run.settings.samples,
                )  # fmt: skip
            except Exception as error:  # whatever an image, a dataset or a network raises is recorded in its turn
                check_deterministic(error)
                continue
            if red := ", ".join(check.name for check in checks if check.verdict == "red"):
                sentences.append(
                    f"segprox check is red for {model} on {dataset}: {red}. Figures of this model may be wrong; "
                    "segprox check, or segprox.run.check_model in Python, says why."
                )
        return sentences


def _check_rounding(run: Run) -> None:
    """Whether an attack that searches among images of so many steps attacks images of as many."""
    try:
        steps = run.attack.make().rounds_to
    except SegproxError:
        return  # which is said elsewhere
    bands = bands_of(open_dataset(run.dataset))
    if steps and steps != bands.steps:
        has = f"has {bands.steps}" if bands.steps else "has bands of several" if bands.whole else "holds floats"
        advice = "set bits=16" if bands.steps == 65535 else "take an attack that does not round, such as palma"
        raise SegproxError(f"{run.attack} rounds values to {steps} steps but {run.dataset} {has}: {advice}")


def _names(run: Run) -> list[str]:
    return list(open_dataset(run.dataset).names[: run.settings.limit])


def about(run: Run) -> dict[str, Any]:
    """What a report and a reader of a run's folder need to know besides the run itself."""
    data = open_dataset(run.dataset)
    attack = run.attack.make()
    cost = most_queries(run)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "classes": list(data.classes),
        "palette": [list(colour) for colour in data.palette],
        "labels": "true" if data.labelled else "the model's own clean prediction",
        "images": len(data),
        "norm": attack.norm,
        "family": attack.family,
        "attack": attack.described(),
        "cost": {"forwards": cost.forwards, "backwards": cost.backwards},
        **({} if (bands := bands_of(data)).eight_bit else {"values": asdict(bands)}),
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _reasons(checks: Mapping[Key, Callable[[], object]]) -> dict[Key, str]:
    """What went wrong, by the key of the check."""
    problems = {}
    for key, check in checks.items():
        try:
            check()
        except SegproxError as error:
            problems[key] = str(error)
    return problems


class Estimate(NamedTuple):
    """What a run will take."""

    run: Run
    images: int
    forwards: int
    backwards: int
    seconds: float | None  # None if there is nothing to time


def most_queries(run: Run) -> Cost:
    """The most that a run asks of its model, per image, with all draws of a random one."""
    cost, sampling = run.attack.make().cost(), run.settings.sampling
    return cost if sampling is None else Cost(*sampling.most(*cost))


def estimate(status: Status, timed: Mapping[str, tuple[float, float] | None], retry_errors: bool = False) -> Estimate:
    """The most that is left of a run, by its model's seconds of a forward and of a backward."""
    images = status.left + (status.errors if retry_errors else 0)
    cost, limit = most_queries(status.run), status.run.settings.max_queries
    forwards, backwards = cost.forwards * images, cost.backwards * images
    if limit is not None and cost.forwards + cost.backwards > limit:
        share = limit / (cost.forwards + cost.backwards)
        forwards, backwards = round(forwards * share), round(backwards * share)
    times = timed.get(f"{status.run.model} {status.run.dataset}")
    seconds = None if times is None else forwards * times[0] + backwards * times[1]
    return Estimate(status.run, images, forwards, backwards, seconds)


def time_model(prepared: Prepared) -> tuple[float, float]:
    """Seconds of a forward and of a backward on the first image of a dataset, after one to warm up."""
    model = prepared.model
    images = prepared.data[0].image[None].to(model.device).requires_grad_()
    for _ in range(2):
        start = _now(model.device)
        logits = model.logits(images)
        middle = _now(model.device)
        torch.autograd.grad(logits.sum(), images)
        end = _now(model.device)
    return middle - start, end - middle


def _now(device: torch.device) -> float:
    """The time at which a device has done what it was told."""
    wait_for(device)
    return time.perf_counter()
