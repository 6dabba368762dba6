"""Who does the tasks: this process, several processes, or actors of a Ray cluster. The results are the same."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from segprox.attacks import Callback
from segprox.errors import SegproxError
from segprox.run.execution import Execution
from segprox.run.worker import ATTEMPTS, WORKER_DIED, Result, Task, Worker, image_error, open_dataset

Done = Iterator[tuple[Task, list[Result]]]  # tasks in any order, each with its results
Wanted = Callable[[Task], bool]  # asked when a task's turn comes: it may have become needless
Engine = Callable[[Sequence[Task], Wanted], Done]  # does the tasks that are still wanted when their turn comes


def always(_: Task) -> bool:
    """Want every task."""
    return True


@dataclass(frozen=True)
class Local:
    """This process."""

    threads: int | None = 1
    callback: Callback | None = None

    def __call__(self, tasks: Sequence[Task], wanted: Wanted = always) -> Done:
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

    def __call__(self, tasks: Sequence[Task], wanted: Wanted = always) -> Done:
        """Whoever is free does the next task. One that dies is replaced and its task done again."""
        queue = Queue(tasks, wanted, self.count)
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
                        yield task, queue.done(answer)
                    elif isinstance(answer, Exception):
                        raise answer
                    elif not process.busy:
                        yield from queue.worker_died(task, attempt, process.begun)
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
        self.begun = False  # whether it has loaded what its task needs
        self.process: BaseProcess | None = None  # before its first task, and after its death

    def _start(self) -> None:
        # A fresh interpreter: a forked one would inherit torch's threads in an unknown state.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, self.threads, torch.are_deterministic_algorithms_enabled())
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
        self.task, self.begun = (task, attempt), False
        if self.process is None:
            self._start()
        with suppress(OSError):  # it died while it was idle; `take` will notice
            self.pipe.send(task._replace(device=self.device))

    def take(self) -> list[Result] | Exception | None:
        """Results, what made the run itself impossible, or None: then it has begun, or died if it is busy no more."""
        try:
            answer: list[Result] | Exception | None = self.pipe.recv()
        except (EOFError, OSError):
            self.stop()
            self.task = None
            return None
        if answer is None:
            self.begun = True
        else:
            self.task = None
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
            worker.begin(task)
            pipe.send(None)
            answer: Any = worker.work(task)
        except BrokenPipeError:
            return
        except SegproxError as error:  # about the run itself
            answer = error
        except Exception as error:  # the same; it may not travel as it is
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:
            return


class Queue:
    """Tasks to be given out, with the numbers of their attempts; true while there is one that is wanted."""

    def __init__(self, tasks: Sequence[Task], wanted: Wanted, workers: int) -> None:
        self.waiting = deque((task, 1) for task in tasks)
        self.wanted, self.workers = wanted, workers
        self.early_deaths = 0  # of workers that had not begun, since one had

    def __bool__(self) -> bool:
        while self.waiting and not self.wanted(self.waiting[0][0]):
            self.waiting.popleft()
        return bool(self.waiting)

    def take(self) -> tuple[Task, int]:
        """The next task, and the number of this attempt."""
        return self.waiting.popleft()

    def done(self, results: list[Result]) -> list[Result]:
        """Results that a worker returned, so that workers are known to begin."""
        self.early_deaths = 0
        return results

    def worker_died(self, task: Task, attempt: int, begun: bool) -> Done:
        """Put back what a worker had that died: one by one, as its images may not all be to blame.

        Images whose workers died again and again are given out, with that as their error; a worker that died before it
        had begun with them does not count.
        """
        if not begun:
            self.early_death(f"loaded {task.run.model}; the system may have run out of memory: use fewer workers")
            self.waiting.appendleft((task, attempt))
        elif attempt < ATTEMPTS:
            self.waiting.extendleft((task._replace(indices=(index,)), attempt + 1) for index in reversed(task.indices))
        else:
            names = [open_dataset(task.run.dataset).names[i] for i in task.indices]
            yield task, [Result(name, image_error(name, WORKER_DIED)) for name in names]

    def early_death(self, while_it: str) -> None:
        """Count workers that died before they had begun; if none ever begins, the run is impossible."""
        self.early_deaths += 1
        if self.early_deaths >= ATTEMPTS * self.workers:
            raise SegproxError(f"{self.early_deaths} workers died one after the other, the last while it {while_it}")


def choose_engine(execution: Execution, callback: Callback | None = None) -> Engine:
    """The engine that an execution asks for; the callback sees iterations of this process only."""
    if execution.engine == "ray":
        from segprox.run.cluster import Ray  # which is built from what is above

        gpus = 1.0 if torch.cuda.is_available() else 0.0
        return Ray(execution.workers, execution.address, gpus, execution.threads)
    if execution.workers > 1:
        return Processes(execution.workers, execution.devices, execution.threads)
    return Local(execution.threads, callback)
