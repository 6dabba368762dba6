"""Who does the tasks: this process, several processes, or actors of a Ray cluster. The results are the same."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from segprox.attacks import Callback
from segprox.errors import SegproxError
from segprox.optional import require
from segprox.registry import VARIABLE
from segprox.run.execution import Execution
from segprox.run.worker import ATTEMPTS, WORKER_DIED, Result, Task, Worker, image_error, open_dataset

Done = Iterator[tuple[Task, list[Result]]]  # tasks in any order, each with its results
Wanted = Callable[[Task], bool]  # asked when a task's turn comes: it may have become needless


class Engine(Protocol):
    """Whoever does tasks, or those of them that are still wanted when their turn comes."""

    def __call__(self, tasks: Sequence[Task], wanted: Wanted = ...) -> Done:
        """Do the tasks."""


def _always(_: Task) -> bool:
    return True


@dataclass(frozen=True)
class Local:
    """This process."""

    threads: int | None = 1
    callback: Callback | None = None

    def __call__(self, tasks: Sequence[Task], wanted: Wanted = _always) -> Done:
        """Do the tasks in order; the next one's images are read meanwhile."""
        worker = Worker(self.threads)
        for i, task in enumerate(tasks):
            if not wanted(task):
                continue
            if i + 1 < len(tasks):
                worker.read_ahead(tasks[i + 1])
            yield task, worker.work(task, self.callback)


@dataclass(frozen=True)
class Processes:
    """Several processes of this machine, each with a device of its own if there are several."""

    count: int
    devices: Sequence[str] = ()
    threads: int | None = 1

    def __call__(self, tasks: Sequence[Task], wanted: Wanted = _always) -> Done:
        """Whoever is free does the next task. One that dies is replaced and its task done again."""
        queue = _Queue(tasks, wanted)
        processes = [_WorkerProcess(self._device(i), self.threads) for i in range(min(self.count, len(tasks)))]
        try:
            while queue or any(process.busy for process in processes):
                for process in processes:
                    if queue and not process.busy:
                        process.give(*queue.take())
                for process in _ready(processes):
                    task, attempt = process.holds()
                    answer = process.take()
                    if isinstance(answer, list):
                        yield task, answer
                    elif isinstance(answer, Exception):
                        raise answer
                    elif attempt < ATTEMPTS:
                        queue.put_back(task, attempt)
                    else:
                        yield task, died(task)
        finally:
            for process in processes:
                process.stop()

    def _device(self, i: int) -> str | None:
        return self.devices[i % len(self.devices)] if self.devices else None


class _WorkerProcess:
    """A process that works, and what it is working on."""

    def __init__(self, device: str | None, threads: int | None) -> None:
        self.device, self.threads = device, threads
        self.task: tuple[Task, int] | None = None
        self.process: BaseProcess | None = None  # before its first task, and after its death

    def _start(self) -> None:
        # A fresh interpreter: a forked one would inherit torch's threads in an unknown state.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        deterministic = torch.are_deterministic_algorithms_enabled()
        arguments = (theirs, self.threads, deterministic)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()  # so that our end notices when the process is gone

    @property
    def busy(self) -> bool:
        return self.task is not None

    def holds(self) -> tuple[Task, int]:
        assert self.task is not None
        return self.task

    def give(self, task: Task, attempt: int) -> None:
        self.task = (task, attempt)
        if self.process is None:
            self._start()
        with suppress(OSError):  # it died while it was idle; `take` will notice
            self.pipe.send(task._replace(device=self.device))

    def take(self) -> list[Result] | Exception | None:
        """Results, what made the run itself impossible, or None if the process died."""
        self.task = None
        try:
            answer: list[Result] | Exception = self.pipe.recv()
        except (EOFError, OSError):
            self.stop()
            return None
        return answer

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        self.process.join(5)
        self.process.kill()  # which cannot be ignored
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.process = None


def _ready(processes: Iterable[_WorkerProcess]) -> list[_WorkerProcess]:
    busy = {process.pipe: process for process in processes if process.busy}
    return [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]


def _serve(pipe: Connection, threads: int | None, deterministic: bool) -> None:
    """The life of a process: until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    worker = Worker(threads, deterministic)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: Any = worker.work(task)
        except SegproxError as error:  # about the run itself
            answer = error
        except Exception as error:  # the same; it may not travel as it is
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:
            return


class _Queue:
    """Tasks to be given out, with the numbers of their attempts; true while there is one that is wanted."""

    def __init__(self, tasks: Sequence[Task], wanted: Wanted) -> None:
        self.waiting = deque((task, 1) for task in tasks)
        self.wanted = wanted

    def __bool__(self) -> bool:
        while self.waiting and not self.wanted(self.waiting[0][0]):
            self.waiting.popleft()
        return bool(self.waiting)

    def take(self) -> tuple[Task, int]:
        return self.waiting.popleft()

    def put_back(self, task: Task, attempt: int) -> None:
        """The images of a task whose worker died, one by one: they may not all be to blame."""
        self.waiting.extendleft((task._replace(indices=(index,)), attempt + 1) for index in reversed(task.indices))


def died(task: Task) -> list[Result]:
    """What is recorded of images whose worker died again and again."""
    names = open_dataset(task.run.dataset).names
    return [Result(names[i], image_error(names[i], WORKER_DIED)) for i in task.indices]


@dataclass(frozen=True)
class Ray:
    """Actors of a Ray cluster: one per device, wherever it is."""

    count: int
    address: str | None = None
    gpus: float = 0.0  # of each actor
    threads: int | None = 1

    def __call__(self, tasks: Sequence[Task], wanted: Wanted = _always) -> Done:
        """Whoever is free does the next task. An actor that dies is replaced and its task done again."""
        ray: Any = require("ray", "ray")
        ours = not ray.is_initialized()
        if ours:
            self._connect(ray)
        named = os.environ.get(VARIABLE)  # plugins, which a worker elsewhere needs as well
        where = {"runtime_env": {"env_vars": {VARIABLE: named}}} if named else {}
        actors = ray.remote(num_cpus=1, num_gpus=self.gpus, max_restarts=0, **where)(Worker)
        make = partial(actors.remote, self.threads, torch.are_deterministic_algorithms_enabled())
        deaths = ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError, ray.exceptions.ObjectLostError
        queue = _Queue(tasks, wanted)
        free = [make() for _ in range(min(self.count, len(tasks)))]
        under_way: dict[Any, tuple[Any, Task, int]] = {}
        try:
            while queue or under_way:
                while queue and free:
                    actor, (task, attempt) = free.pop(), queue.take()
                    under_way[actor.work.remote(task)] = (actor, task, attempt)
                (ready,), _ = ray.wait(list(under_way))
                actor, task, attempt = under_way.pop(ready)
                try:
                    results = ray.get(ready)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except deaths:
                    free.append(make())
                    if attempt < ATTEMPTS:
                        queue.put_back(task, attempt)
                    else:
                        yield task, died(task)
                    continue
                if queue:
                    free.append(actor)
                else:
                    ray.kill(actor)  # to make room for one that has a task but no place yet
                yield task, results
        finally:
            for actor in [*free, *(actor for actor, _, _ in under_way.values())]:
                ray.kill(actor)
            if ours:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        try:
            ray.init(address=self.address, logging_level="warning", log_to_driver=False, include_dashboard=False)
        except ConnectionError as error:
            raise SegproxError(f"there is no Ray cluster at {self.address!r}: {str(error).splitlines()[0]}") from None


def choose_engine(execution: Execution, callback: Callback | None = None) -> Engine:
    """The engine that an execution asks for; the callback sees iterations of this process only."""
    if execution.engine == "ray":
        gpus = 1.0 if torch.cuda.is_available() else 0.0
        return Ray(execution.workers, execution.address, gpus, execution.threads)
    if execution.workers > 1:
        return Processes(execution.workers, execution.devices, execution.threads)
    return Local(execution.threads, callback)
