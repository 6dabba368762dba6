"""Attacks images and returns records. Needs no disk but the dataset's, so it may run anywhere."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

import segprox
from segprox.attacks import Attack, Callback
from segprox.counts import class_counts
from segprox.data import Dataset, Goal, Sample, load_dataset, make_goal, open_split, with_own_labels
from segprox.encoding import DECODERS, ENCODERS, SUFFIXES, to_bytes
from segprox.errors import SegproxError
from segprox.models import ModelOptions, Segmenter, build_model, settle
from segprox.norms import distance
from segprox.problem import Problem, predictions
from segprox.run.execution import HERE, Execution
from segprox.run.plan import Run
from segprox.run.preview import Part, encode_preview
from segprox.run.record import ClassCounts, ImageError, Record, Saved, Score, digest, weights_digest

MODELS_KEPT = 1  # loaded at a time: a GPU may not hold two
ATTEMPTS = 3  # after which an image that kills its workers is recorded as an error
WORKER_DIED = f"the worker died {ATTEMPTS} times while it attacked this image; the system may have run out of memory"


class Task(NamedTuple):
    """Some images of a run."""

    run: Run
    indices: tuple[int, ...]
    known: Mapping[str, str] = {}  # keys of images that need not be done again, by name
    execution: Execution = HERE
    device: str | None = None  # of the worker, if workers have different ones


class Result(NamedTuple):
    """What became of one image."""

    image: str
    record: Record | ImageError | None  # None: nothing has changed since its last record
    files: Mapping[str, bytes] = {}


class LoadedModel:
    """A model of which only the weights are there until it is asked something."""

    def __init__(self, name: str, options: ModelOptions) -> None:
        self.options, self.built = options, build_model(name, options)  # on the CPU
        described = {**self.built.described(), "precision": options.precision, "fold": options.fold}
        self.hash = weights_digest(self.built.model, described)

    @cached_property
    def segmenter(self) -> Segmenter:
        """The model, ready to be attacked."""
        return settle(self.built, self.options)


@dataclass(frozen=True)
class Prepared:
    """A run with everything loaded."""

    run: Run
    loaded: LoadedModel
    data: Dataset
    attack: Attack
    goal: Goal

    @property
    def model(self) -> Segmenter:
        """The model, ready to be attacked."""
        return self.loaded.segmenter

    def problem(self, sample: Sample) -> Problem:
        """What is to be achieved for one labelled image."""
        settings, device = self.run.settings, self.model.device
        target, mask, protect = (None if part is None else part[None].to(device) for part in self.goal(sample))
        return Problem.build(
            sample.image[None].to(device),
            sample.label[None].to(device),
            target=target,
            ignore=self.data.ignore,
            mask=mask,
            protect=protect,
            threshold=self.goal.share or settings.threshold,
            protect_threshold=self.goal.protect_share or settings.threshold,
            seed=settings.seed,
        )

    def key(self, sample: Sample) -> str:
        """A hash of all that determines the result for one image, found without asking the model anything."""
        settings = self.run.settings
        wanted = self.goal(sample) if self.data.labelled or not self.goal.uses_labels else ()
        return digest(
            sample.image, sample.label, *wanted, self.loaded.hash, self.attack.described(),
            [self.run.goal, self.data.labelled, self.data.ignore],
            [settings.threshold, settings.seed, settings.max_queries],
        )  # fmt: skip


def prepare(run: Run, execution: Execution = HERE, device: str | None = None) -> Prepared:
    """Load what a run needs; models, datasets and targets are kept for the next."""
    model = prepare_model(run, execution, device)
    return Prepared(run, model, open_dataset(run.dataset), run.attack.make(), prepare_goal(run))


def prepare_model(run: Run, execution: Execution = HERE, device: str | None = None) -> LoadedModel:
    """The model of a run; its weights are read, nothing is computed."""
    return _model(run.model, execution.model_options(run.model, run.settings.model_options, device))


def prepare_goal(run: Run) -> Goal:
    """The goal of a run; majorities are counted now."""
    return _goal(run.goal, run.dataset)


_model = lru_cache(MODELS_KEPT)(LoadedModel)


def forget_models() -> None:
    """Let go of the models that are kept for the next run."""
    _model.cache_clear()


def label_sample(model: Segmenter, sample: Sample, labelled: bool) -> tuple[Sample, Tensor]:
    """The sample with labels, if it has none with what the model sees in it; and its clean logits `[1, K, H, W]`."""
    with torch.no_grad():
        clean = model.full_precision(sample.image[None].to(model.device))
    if clean.isnan().any():
        raise SegproxError("the model returns NaN for this image")
    return sample if labelled else with_own_labels(sample, predictions(clean)[0].cpu()), clean


@lru_cache(8)
def open_dataset(name: str) -> Dataset:
    """The dataset of that name, listed once."""
    return load_dataset(name)


@lru_cache(8)
def _goal(goal: str, dataset: str) -> Goal:
    return make_goal(goal, open_dataset(dataset), partial(open_split, dataset))


class Worker:
    """Does tasks one after the other, and reads ahead."""

    def __init__(self, threads: int | None = None, deterministic: bool | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        usual = torch.are_deterministic_algorithms_enabled()
        if deterministic not in (None, usual):  # setting it imports much of torch
            torch.use_deterministic_algorithms(deterministic)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._ahead: dict[tuple[str, int], Future[Sample]] = {}

    def begin(self, task: Task) -> None:
        """Load what a task needs. A worker that dies before it has done so says nothing about the task's images."""
        prepare(task.run, task.execution, task.device)

    def read_ahead(self, task: Task) -> None:
        """Start to read the images of a task that comes next."""
        data = open_dataset(task.run.dataset)
        for index in task.indices:
            self._ahead[task.run.dataset, index] = self._reader.submit(data.__getitem__, index)

    def work(self, task: Task, callback: Callback | None = None) -> list[Result]:
        """Attack the images of a task that are not known yet.

        Whatever goes wrong with an image is recorded as its error. What goes wrong with the run itself is raised.
        """
        prepared = prepare(task.run, task.execution, task.device)
        results: list[Result] = []
        jobs: list[_Job] = []
        for index in task.indices:
            name = prepared.data.names[index]
            known = task.known.get(name)
            if known == image_error(name, WORKER_DIED).key:  # not even to be looked at
                results.append(Result(name, None))
                continue
            key = None
            try:
                sample = self._read(task.run.dataset, index)
                key = prepared.key(sample)
                if known != key:
                    jobs.append(_Job.make(prepared, sample, key))
                else:
                    results.append(Result(name, None))
            except Exception as error:  # whatever a file, a dataset or a network may raise
                found = image_error(name, _reason(error), key)
                results.append(Result(name, None if known == found.key else found))
        for _, group in groupby(jobs, key=lambda job: job.problem.images.shape):
            results += _attack(prepared, list(group), callback)
        return results

    def _read(self, dataset: str, index: int) -> Sample:
        ahead = self._ahead.pop((dataset, index), None)
        return open_dataset(dataset)[index] if ahead is None else ahead.result()


def image_error(name: str, reason: str, key: str | None = None) -> ImageError:
    """What is recorded of an image that could not be attacked; one that could not even be read has no key."""
    return ImageError(key=key or digest(name, reason), version=segprox.__version__, image=name, reason=reason)


class _Job(NamedTuple):
    """One image, looked at before the attack."""

    sample: Sample
    problem: Problem
    key: str
    clean: Tensor  # logits, [1, K, H, W]

    @classmethod
    def make(cls, prepared: Prepared, sample: Sample, key: str) -> "_Job":
        sample, clean = label_sample(prepared.model, sample, prepared.data.labelled)
        problem = prepared.problem(sample)
        problem.check_classes(clean.shape[1])
        return cls(sample, problem, key, clean)


def _attack(prepared: Prepared, jobs: list[_Job], callback: Callback | None) -> list[Result]:
    """Attack images of one size together; if that raises, in halves, and at last alone."""
    try:
        return list(_attack_together(prepared, jobs, callback))
    except Exception as error:
        reason = _reason(error)
    # Only here, where the error and with it all that the attack held in memory is gone, is there room to go on.
    if len(jobs) > 1:
        half = len(jobs) // 2
        return [result for part in (jobs[:half], jobs[half:]) for result in _attack(prepared, part, callback)]
    name = jobs[0].sample.name
    return [Result(name, image_error(name, reason, jobs[0].key))]


def _attack_together(prepared: Prepared, jobs: Sequence[_Job], callback: Callback | None) -> Iterator[Result]:
    problem = Problem.join([job.problem for job in jobs])
    found = prepared.attack.run(prepared.model, problem, callback, max_queries=prepared.run.settings.max_queries)
    for i, job in enumerate(jobs):
        image = found.images[i : i + 1]
        score, logits = score_image(prepared.model, job.problem, image)
        rounded = score_image(prepared.model, job.problem, to_bytes(image).to(image) / 255)[0]
        name, keep = _file_name(job.sample.name), prepared.run.settings.save
        saved: dict[str, Saved] = {}
        contents: dict[str, bytes] = {}
        for kind in (kind for kind in ENCODERS if kind in keep):
            file, content = f"images/{name}.{SUFFIXES[kind]}", ENCODERS[kind](image)
            again = score_image(prepared.model, job.problem, DECODERS[kind](content).to(image))[0]
            saved[kind], contents[file] = Saved(file=file, score=again), content
        preview = f"previews/{name}.zip" if keep else None
        if preview is not None:  # whoever keeps pictures wants to see them in reports as well
            contents[preview] = _preview(prepared, job, image, logits)
        clean_counts, counts = (_counts(job, prepared.data.ignore, values) for values in (job.clean, logits))
        record = Record(
            key=job.key,
            version=segprox.__version__,
            image=job.sample.name,
            image_hash=digest(job.problem.images),
            model_hash=prepared.loaded.hash,
            height=image.shape[2],
            width=image.shape[3],
            labels="true" if prepared.data.labelled else "model",
            counted=int(job.problem.counted),
            clean_apsr=job.problem.apsr(job.clean).item(),
            clean_accuracy=_accuracy(clean_counts),
            accuracy=_accuracy(counts),
            norm=found.norm[i].item(),
            trace=found.traces[i],
            found=score,
            rounded=rounded,
            forwards=int(found.forwards[i]),
            backwards=int(found.backwards[i]),
            clean_counts=clean_counts,
            counts=counts,
            saved=saved,
            preview=preview,
            seconds=found.seconds / len(jobs),
        )
        yield Result(job.sample.name, record, contents)


def score_image(model: Segmenter, problem: Problem, image: Tensor) -> tuple[Score, Tensor]:
    """What a perturbed image `[1, C, H, W]` is worth, in full precision, and its logits.

    Norms are added up in double precision: single would leave the fifth digit of l1 and l2 to the machine.
    """
    with torch.no_grad():
        logits = model.full_precision(image)
    apsr, difference = problem.apsr(logits), image.cpu().double() - problem.images.cpu().double()
    linf, l2, l1 = (distance(difference, norm).item() for norm in ("linf", "l2", "l1"))
    score = Score(linf=linf, l2=l2, l1=l1, apsr=apsr.item(), success=bool(problem.succeeded(apsr)))
    if problem.protected is not None:
        attacked, protected = (rate.item() for rate in problem.rates(logits))
        score = replace(score, attacked=attacked, protected=protected)
    return score, logits


def _preview(prepared: Prepared, job: _Job, image: Tensor, logits: Tensor) -> bytes:
    wanted = job.sample.label if not job.problem.targeted else torch.where(job.problem.mask, job.problem.labels, -1)[0]
    clean, attacked = (predictions(values)[0] for values in (job.clean, logits))
    maps: dict[Part, Tensor] = {"label": wanted, "clean": clean, "prediction": attacked}
    return encode_preview(job.problem.images[0], image[0], maps, prepared.data.palette, logits.shape[1])


def _counts(job: _Job, ignore: tuple[int, ...], logits: Tensor) -> ClassCounts:
    counted = class_counts(predictions(logits)[0].cpu(), job.sample.label, logits.shape[1], ignore)
    return ClassCounts(*(values.tolist() for values in counted))


def _accuracy(counts: ClassCounts) -> float:
    right, wrong = sum(counts.tp), sum(counts.fn)
    return right / max(right + wrong, 1)


def _file_name(image: str) -> str:
    """A name that any file system takes and that no other image of the run has."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in image)
    return f"{plain[:60]}-{digest(image)[:6]}"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    if _is_out_of_memory(error):
        return f"out of memory: {lines[0]}"
    return str(error) if isinstance(error, SegproxError) else f"{type(error).__name__}: {lines[0]}"


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error) if isinstance(error, RuntimeError) else ""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "out of memory" in text or ("memory" in text and "alloc" in text)
