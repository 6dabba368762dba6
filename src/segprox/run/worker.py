"""Attacks images and returns records. Needs no disk but the dataset's, so it may run anywhere."""

import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, save
from torch import Tensor

from segprox.attacks import Attack, Callback
from segprox.counts import class_counts
from segprox.data import Dataset, Sample, Target, load_dataset, make_target, with_own_labels
from segprox.errors import SegproxError
from segprox.models import Segmenter, load_model
from segprox.naming import Name
from segprox.norms import distance
from segprox.problem import Problem, predictions
from segprox.run.plan import UNTARGETED, Run
from segprox.run.preview import Part, encode_preview
from segprox.run.record import ClassCounts, ImageError, Record, Saved, Score, digest, weights_digest

MODELS_KEPT = 1  # loaded at a time: a GPU may not hold two
ATTEMPTS = 3  # after which an image that kills its workers is recorded as an error
DEADLY = f"the worker died {ATTEMPTS} times while it attacked this image; the system may have run out of memory"


class Task(NamedTuple):
    """Some images of a run."""

    run: Run
    indices: tuple[int, ...]
    known: Mapping[str, str] = {}  # keys of images that need not be done again, by name
    device: str | None = None  # instead of the one the run's settings name


class Result(NamedTuple):
    """What became of one image."""

    image: str
    record: Record | ImageError | None  # None: nothing has changed since its last record
    files: Mapping[str, bytes] = {}


@dataclass(frozen=True)
class Prepared:
    """A run with everything loaded."""

    run: Run
    model: Segmenter
    model_hash: str
    data: Dataset
    attack: Attack
    target: Target | None

    @cached_property
    def attack_fields(self) -> dict[str, Any]:
        """What the attack is, in full: its name's defaults may change with a version."""
        return {"class": type(self.attack).__name__, **dataclasses.asdict(self.attack)}  # type: ignore[call-overload]  # a dataclass

    def problem(self, sample: Sample) -> Problem:
        """What is to be achieved for one image."""
        settings, device = self.run.settings, self.model.device
        return Problem.build(
            sample.image[None].to(device),
            sample.label[None].to(device),
            target=None if self.target is None else self.target(sample)[None].to(device),
            ignore=self.data.ignore,
            threshold=settings.threshold,
            seed=settings.seed,
        )

    def key(self, problem: Problem) -> str:
        """A hash of all that determines the result for one image."""
        settings = self.run.settings
        return digest(
            problem.images, problem.labels, problem.mask, self.model_hash, self.attack_fields,
            [problem.targeted, settings.threshold, settings.seed, settings.max_queries],
        )  # fmt: skip


def prepare(run: Run, device: str | None = None) -> Prepared:
    """Load what a run needs; models, datasets and targets are kept for the next."""
    model, model_hash = prepare_model(run, device)
    return Prepared(run, model, model_hash, open_dataset(run.dataset), run.attack.make(), prepare_target(run))


def prepare_model(run: Run, device: str | None = None) -> tuple[Segmenter, str]:
    """The model of a run, and the hash of its weights."""
    lean = {} if "lean" in Name.parse(run.model).options else {"lean": "auto"}
    options = lean | run.settings.model_options | ({} if device is None else {"device": device})
    return _model(run.model, json.dumps(options, sort_keys=True, default=str))


def prepare_target(run: Run) -> Target | None:
    """What the goal of a run wants to see, if it is a target."""
    return None if run.goal == UNTARGETED else _target(run.goal, run.dataset)


@lru_cache(MODELS_KEPT)
def _model(name: str, options: str) -> tuple[Segmenter, str]:
    model = load_model(name, **json.loads(options))
    return model, weights_digest(model.model, model.described())


@lru_cache(8)
def open_dataset(name: str) -> Dataset:
    """The dataset of that name, listed once."""
    return load_dataset(name)


@lru_cache(8)
def _target(goal: str, dataset: str) -> Target:
    return make_target(goal, open_dataset(dataset))


class Worker:
    """Does tasks one after the other, and reads ahead."""

    def __init__(self, threads: int | None = None, deterministic: bool | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        if deterministic is not None:
            torch.use_deterministic_algorithms(deterministic)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._ahead: dict[tuple[str, int], Future[Sample]] = {}

    def read_ahead(self, task: Task) -> None:
        """Start to read the images of a task that comes next."""
        data = open_dataset(task.run.dataset)
        for index in task.indices:
            self._ahead[task.run.dataset, index] = self._reader.submit(data.__getitem__, index)

    def work(self, task: Task, callback: Callback | None = None) -> list[Result]:
        """Attack the images of a task that are not known yet.

        Whatever goes wrong with an image is recorded as its error. What goes wrong with the run itself is raised.
        """
        prepared = prepare(task.run, task.device)
        results: list[Result] = []
        jobs: list[_Job] = []
        for index in task.indices:
            name = prepared.data.names[index]
            known = task.known.get(name)
            if known == image_error(name, DEADLY).key:  # not even to be looked at
                results.append(Result(name, None))
                continue
            try:
                job = _Job.make(prepared, self._read(task.run.dataset, index))
            except Exception as error:  # whatever a file, a dataset or a network may raise
                error_record = image_error(name, _reason(error))
                results.append(Result(name, None if known == error_record.key else error_record))
                continue
            if known == job.key:
                results.append(Result(name, None))
            else:
                jobs.append(job)
        for _, group in groupby(jobs, key=lambda job: job.problem.images.shape):
            results += _attack(prepared, list(group), callback)
        return results

    def _read(self, dataset: str, index: int) -> Sample:
        ahead = self._ahead.pop((dataset, index), None)
        return open_dataset(dataset)[index] if ahead is None else ahead.result()


def image_error(name: str, reason: str) -> ImageError:
    """What is recorded of an image of which nothing but a reason is known."""
    return ImageError(key=digest(name, reason), image=name, reason=reason)


class _Job(NamedTuple):
    """One image, looked at before the attack."""

    sample: Sample
    problem: Problem
    key: str
    clean: Tensor  # logits, [1, K, H, W]

    @classmethod
    def make(cls, prepared: Prepared, sample: Sample) -> "_Job":
        model = prepared.model
        with torch.no_grad():
            clean = model.full_precision(sample.image[None].to(model.device))
        if clean.isnan().any():
            raise SegproxError("the model returns NaN for this image")
        if not prepared.data.labelled:
            sample = with_own_labels(sample, predictions(clean)[0].cpu())
        problem = prepared.problem(sample)
        problem.check_classes(clean.shape[1])
        return cls(sample, problem, prepared.key(problem), clean)


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
    return [Result(name, ImageError(key=jobs[0].key, image=name, reason=reason))]


def _attack_together(prepared: Prepared, jobs: Sequence[_Job], callback: Callback | None) -> Iterator[Result]:
    problem = Problem.join([job.problem for job in jobs])
    found = prepared.attack.run(prepared.model, problem, callback, max_queries=prepared.run.settings.max_queries)
    for i, job in enumerate(jobs):
        image = found.images[i : i + 1]
        score, logits = score_image(prepared.model, job.problem, image)
        rounded = score_image(prepared.model, job.problem, to_bytes(image).to(image) / 255)[0]
        files = {kind: encode(image) for kind, encode in ENCODERS.items() if kind in prepared.run.settings.save}
        saved: dict[str, Saved] = {
            kind: Saved(
                file=f"images/{_file_name(job)}.{SUFFIXES[kind]}",
                score=score_image(prepared.model, job.problem, DECODERS[kind](content).to(image))[0],
            )
            for kind, content in files.items()
        }
        contents = {saved[kind].file: content for kind, content in files.items()}
        preview = None
        if "preview" in prepared.run.settings.save:
            preview = f"previews/{_file_name(job)}.zip"
            contents[preview] = _preview(prepared, job, image, logits)
        clean_counts, counts = (_counts(job, prepared.data.ignore, values) for values in (job.clean, logits))
        record = Record(
            key=job.key,
            image=job.sample.name,
            image_hash=digest(job.problem.images),
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
    return Score(linf=linf, l2=l2, l1=l1, apsr=apsr.item(), success=bool(problem.succeeded(apsr))), logits


def _preview(prepared: Prepared, job: _Job, image: Tensor, logits: Tensor) -> bytes:
    wanted = job.sample.label if prepared.target is None else torch.where(job.problem.mask, job.problem.labels, -1)[0]
    maps: dict[Part, Tensor] = {
        "label": wanted,
        "clean": predictions(job.clean)[0],
        "prediction": predictions(logits)[0],
    }
    return encode_preview(job.problem.images[0], image[0], maps, prepared.data.palette, logits.shape[1])


def _counts(job: _Job, ignore: tuple[int, ...], logits: Tensor) -> ClassCounts:
    counted = class_counts(predictions(logits)[0].cpu(), job.sample.label, logits.shape[1], ignore)
    return ClassCounts(*(values.tolist() for values in counted))


def _accuracy(counts: ClassCounts) -> float:
    right, wrong = sum(counts.tp), sum(counts.fn)
    return right / max(right + wrong, 1)


def _file_name(job: _Job) -> str:
    """A name that any file system takes and that no other image of the run has."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in job.sample.name)
    return f"{plain[:60]}-{digest(job.sample.name)[:6]}"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    if _is_out_of_memory(error):
        return f"out of memory: {lines[0]}"
    return str(error) if isinstance(error, SegproxError) else f"{type(error).__name__}: {lines[0]}"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or ("memory" in text and "alloc" in text))


def to_bytes(image: Tensor) -> Tensor:
    """The nearest 8-bit image, uint8."""
    return image.mul(255).round_().clamp_(0, 255).to(torch.uint8)


def _encode_float(image: Tensor) -> bytes:
    return save({"image": image[0].float().cpu().contiguous()})


def _decode_float(content: bytes) -> Tensor:
    return load(content)["image"][None]


def _encode_png(image: Tensor) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(to_bytes(image)[0].permute(1, 2, 0).cpu().numpy()).save(stream, format="png")
    return stream.getvalue()


def _decode_png(content: bytes) -> Tensor:
    pixels = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255


ENCODERS: dict[str, Callable[[Tensor], bytes]] = {"float": _encode_float, "png": _encode_png}
DECODERS: dict[str, Callable[[bytes], Tensor]] = {"float": _decode_float, "png": _decode_png}
SUFFIXES = {"float": "safetensors", "png": "png"}
