"""Attacks images and returns records. Needs no disk but the dataset's, so it may run anywhere."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

import segprox
from segprox.attacks import Attack, Callback
from segprox.bands import Bands, bands_of
from segprox.data import Dataset, Goal, Sample, load_dataset, make_goal, open_split
from segprox.data.base import NODATA
from segprox.devices import check_deterministic, send, use_deterministic, uses_tf32, without_tf32
from segprox.encoding import SUFFIXES, decode, encode, file_kinds
from segprox.errors import SegproxError
from segprox.models import ModelOptions, Segmenter, build_model, settle
from segprox.problem import Problem
from segprox.run.execution import HERE, Execution
from segprox.run.plan import Run
from segprox.run.preview import Part, encode_preview
from segprox.run.record import Conditions, ImageError, Record, Saved, digest, weights_digest
from segprox.run.scoring import Scored, accuracy_of, label_sample, score_answers, score_image

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

    def __init__(self, name: str, options: ModelOptions, bands: Bands) -> None:
        self.options, self.built = options, build_model(name, options, bands)  # on the CPU
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
    look_every: int = 1

    @property
    def model(self) -> Segmenter:
        """The model, ready to be attacked."""
        return self.loaded.segmenter

    @property
    def bands(self) -> Bands:
        """What the values of the images mean."""
        return bands_of(self.data)

    def problem(self, sample: Sample) -> Problem:
        """What is to be achieved for one labelled image."""
        settings, device = self.run.settings, self.model.device
        target, mask, protect = (None if part is None else send(part[None], device) for part in self.goal(sample))
        return Problem.build(
            send(sample.image[None], device),
            send(sample.label[None], device),
            target=target,
            ignore=self.data.ignore,
            mask=mask,
            protect=protect,
            fixed=sample.label[None] == NODATA if NODATA in self.data.ignore else None,
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
            settings.identity, *([] if self.bands.eight_bit else [dataclasses.asdict(self.bands)]),
        )  # fmt: skip


def prepare(run: Run, execution: Execution = HERE, device: str | None = None) -> Prepared:
    """Load what a run needs; models, datasets and targets are kept for the next."""
    model = prepare_model(run, execution, device)
    data, attack = open_dataset(run.dataset), run.attack.make()
    return Prepared(run, model, data, attack, prepare_goal(run), execution.look_every)


def prepare_model(run: Run, execution: Execution = HERE, device: str | None = None) -> LoadedModel:
    """The model of a run; its weights are read, nothing is computed."""
    return _model(run.model, _options(run, execution, device), bands_of(open_dataset(run.dataset)))


def _options(run: Run, execution: Execution, device: str | None) -> ModelOptions:
    return execution.model_options(run.model, run.settings.model_options, device)


def prepare_goal(run: Run) -> Goal:
    """The goal of a run; majorities are counted now."""
    return _goal(run.goal, run.dataset)


_model = lru_cache(MODELS_KEPT)(LoadedModel)


def forget_models() -> None:
    """Let go of the models that are kept for the next run."""
    _model.cache_clear()


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
        if deterministic is not None:
            use_deterministic(deterministic)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._ahead: dict[tuple[str, int], Future[Sample]] = {}

    def begin(self, task: Task) -> None:
        """Load what a task needs. A worker that dies before it has done so says nothing about the task's images."""
        prepare(task.run, task.execution, task.device)

    def read_ahead(self, task: Task) -> None:
        """Start to read the images of a task that comes next, into memory from which a GPU copies by itself."""
        data, options = open_dataset(task.run.dataset), _options(task.run, task.execution, task.device)
        read = partial(_read_pinned, data) if options.torch_device().type == "cuda" else data.__getitem__
        for index in task.indices:
            self._ahead[task.run.dataset, index] = self._reader.submit(read, index)

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


def _read_pinned(data: Dataset, index: int) -> Sample:
    name, image, label = data[index]
    return Sample(name, image.pin_memory(), label.pin_memory())


def image_error(name: str, reason: str, key: str | None = None) -> ImageError:
    """What is recorded of an image that could not be attacked; one that could not even be read has no key."""
    return ImageError(key=key or digest(name, reason), version=segprox.__version__, image=name, reason=reason)


class _Job(NamedTuple):
    """One image, looked at before the attack."""

    sample: Sample
    problem: Problem
    key: str
    clean: Scored  # without logits: those of a whole batch would take too much memory

    @classmethod
    def make(cls, prepared: Prepared, sample: Sample, key: str) -> "_Job":
        settings = prepared.run.settings
        sample, clean = label_sample(prepared.model, sample, prepared.data.labelled, settings.sampling, settings.seed)
        problem = prepared.problem(sample)
        problem.check_classes(clean.shape[1])
        if settings.sampling is None:  # then it has been asked already
            return cls(sample, problem, key, score_answers([clean], problem, problem.images, None))
        return cls(sample, problem, key, score_image(prepared.model, problem, problem.images, settings.sampling))


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
    model, settings = prepared.model, prepared.run.settings
    problem = Problem.join([job.problem for job in jobs])
    sampling = settings.sampling
    with without_tf32():
        found = prepared.attack.run(model, problem, callback, settings.max_queries, prepared.look_every, sampling)
        precision = str(model.autocast or model.mean.dtype).removeprefix("torch.")
        conditions = Conditions(device=model.device.type, batch=len(jobs), precision=precision, tf32=uses_tf32())
    for i, job in enumerate(jobs):
        image, bands = found.images[i : i + 1], prepared.bands
        score = partial(score_image, model, job.problem, sampling=sampling)
        attacked, rounded = score(image), score(bands.rounded(image)).score if bands.whole else None
        name, keep = _file_name(job.sample.name), settings.save
        saved: dict[str, Saved] = {}
        contents: dict[str, bytes] = {}
        for kind in file_kinds(keep, image.shape[1], bands):
            file, content = f"images/{name}.{SUFFIXES[kind]}", encode(kind, image[0], bands)
            again = score(decode(kind, content, bands)[None].to(image)).score
            saved[kind], contents[file] = Saved(file=file, score=again), content
        preview = f"previews/{name}.zip" if keep else None
        if preview is not None:  # whoever keeps pictures wants to see them in reports as well
            contents[preview] = _preview(prepared, job, image, attacked)
        both = job.clean, attacked
        clean_counts, counts = (scored.counts(job.sample.label, prepared.data.ignore) for scored in both)
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
            clean_apsr=job.clean.score.apsr,
            clean_accuracy=accuracy_of(clean_counts),
            accuracy=accuracy_of(counts),
            norm=found.norm[i].item(),
            trace=found.traces[i],
            found=attacked.score,
            rounded=rounded,
            forwards=int(found.forwards[i]),
            backwards=int(found.backwards[i]),
            clean_counts=clean_counts,
            counts=counts,
            saved=saved,
            preview=preview,
            seconds=found.seconds / len(jobs),
            conditions=conditions,
        )
        yield Result(job.sample.name, record, contents)


def _preview(prepared: Prepared, job: _Job, image: Tensor, attacked: Scored) -> bytes:
    wanted = job.sample.label if not job.problem.targeted else torch.where(job.problem.mask, job.problem.labels, -1)[0]
    maps: dict[Part, Tensor] = {"label": wanted, "clean": job.clean.prediction, "prediction": attacked.prediction}
    images = job.problem.images[0], image[0]
    return encode_preview(*images, maps, prepared.data.palette, attacked.num_classes, prepared.bands)


def _file_name(image: str) -> str:
    """A name that any file system takes and that no other image of the run has."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in image)
    return f"{plain[:60]}-{digest(image)[:6]}"


def _reason(error: Exception) -> str:
    """What is recorded as an image's error; what any other image would raise as well is raised."""
    check_deterministic(error)
    lines = str(error).strip().splitlines() or [""]
    if _is_out_of_memory(error):
        return f"out of memory: {lines[0]}"
    return str(error) if isinstance(error, SegproxError) else f"{type(error).__name__}: {lines[0]}"


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error) if isinstance(error, RuntimeError) else ""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "out of memory" in text or ("memory" in text and "alloc" in text)
