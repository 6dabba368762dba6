"""Ray: actors of a cluster that do the tasks, and what to do when they, or their nodes, die."""

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from segprox.attacks import Callback
from segprox.errors import SegproxError, told
from segprox.naming import Name
from segprox.optional import require
from segprox.registry import VARIABLE
from segprox.run.code import is_installed, ship
from segprox.run.engines import Done, Queue, Wanted, always
from segprox.run.worker import Result, Task, Worker, open_dataset

REACHED_WITHIN = 10.0  # seconds in which a cluster must answer
LOOK_AFTER = 5.0  # seconds without news, after which the nodes of a cluster are looked at
TRANSFER = 30.0  # seconds that results may take from another node
NO_ROOM = 300.0  # seconds in which a cluster may get a node with room for a worker


@dataclass(frozen=True)
class Ray:
    """Actors of a Ray cluster: one per device, wherever it is."""

    count: int
    address: str | None = None
    gpus: float = 0.0  # of each actor
    threads: int | None = 1

    def __call__(self, tasks: Sequence[Task], wanted: Wanted = always) -> Done:
        """Whoever is free does the next task. Actors that die, or whose nodes do, are replaced, their tasks redone."""
        ray: Any = require("ray", "ray")
        queue = Queue(tasks, wanted, self.count)
        with ExitStack() as undo:
            if not ray.is_initialized():
                self._connect(ray, undo.enter_context(_shipped_code(tasks)))
                undo.callback(ray.shutdown)
            make, nodes = self._maker(ray), _Nodes(ray, self.gpus)
            starting = dict(make() for _ in range(min(self.count, len(tasks))))  # which may wait for a place for long
            free: list[_Placed] = []
            under_way: dict[Any, _Given] = {}

            @undo.callback
            def end() -> None:
                placed = [*free, *(given.placed for given in under_way.values())]
                for actor in (*starting.values(), *(actor for actor, _ in placed)):
                    ray.kill(actor)

            while queue or under_way:
                while queue and free:
                    given = _Given.give(free.pop(), *queue.take())
                    under_way[given.placed.actor.work.remote(given.task)] = given
                for answer in nodes.answers(starting, under_way):
                    returned, death = _get(ray, answer)
                    if death:
                        starting.update([make()])
                    if answer in starting:
                        actor = starting.pop(answer)
                        if death:
                            queue.early_death(f"started: {death}")
                        else:
                            free.append(_Placed(actor, returned))
                        continue
                    given = under_way.pop(answer)
                    if death:
                        ray.kill(given.placed.actor)
                        begun = _get(ray, given.begun, timeout=0)[1] is None
                        yield from queue.worker_died(given.task, given.attempt, begun)
                    else:
                        free.append(given.placed)
                        yield given.task, queue.done(returned)

    def _connect(self, ray: Any, runtime_env: Mapping[str, str]) -> None:
        # Without an address, Ray would join whatever cluster was started on this machine last.
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        _check_reachable(address)
        try:
            ray.init(
                address=address, logging_level="warning", log_to_driver=False, include_dashboard=False,
                runtime_env=dict(runtime_env),
            )  # fmt: skip
        except ConnectionError as error:
            raise SegproxError(f"there is no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None

    def _maker(self, ray: Any) -> Callable[[], tuple[Any, Any]]:
        """What makes references to nodes, with the actors on them, which look for modules where this process does."""
        own = [str(folder) for folder in map(Path.absolute, map(Path, sys.path)) if not is_installed(folder)]
        variables = {"PYTHONPATH": os.pathsep.join([*own, "${PYTHONPATH}"]), VARIABLE: os.environ.get(VARIABLE, "")}
        remote = ray.remote(num_cpus=1, num_gpus=self.gpus, max_restarts=0, runtime_env={"env_vars": variables})
        deterministic = torch.are_deterministic_algorithms_enabled()
        new = partial(remote(_Actor).remote, self.threads, deterministic, str(Path.cwd()))

        def make() -> tuple[Any, Any]:
            actor = new()
            return actor.node.remote(), actor

        return make


def _check_reachable(address: str) -> None:
    """Refuse an address that nobody listens at: Ray would try it for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # auto, local
    try:
        socket.create_connection((host, int(port)), timeout=REACHED_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise SegproxError(f"there is no Ray cluster at {address!r}: {told(error)}") from None


@contextmanager
def _shipped_code(tasks: Sequence[Task]) -> Iterator[dict[str, str]]:
    """Ray's `runtime_env` with the Python files of models and plugins, which a node may not have."""
    models = [Name.parse(model) for model in {task.run.model for task in tasks}]
    places = [name.identifier.rpartition(":")[0] for name in models if name.source == "python"]
    places += filter(None, os.environ.get(VARIABLE, "").split(","))
    with TemporaryDirectory(prefix="segprox-") as folder:
        for place in places:
            ship(place.strip(), Path(folder))
        yield {"working_dir": folder} if any(Path(folder).iterdir()) else {}


def _get(ray: Any, answer: Any, timeout: float = TRANSFER) -> tuple[Any, str | None]:
    """What an actor returned, and None; or, if it died or its node did before it could, why."""
    errors = ray.exceptions
    try:
        return ray.get(answer, timeout=timeout), None
    except errors.RayTaskError as error:
        raise error.cause from None
    except errors.RuntimeEnvSetupError as error:
        raise SegproxError(f"Ray cannot start its workers: {error}") from None
    except (errors.RayActorError, errors.OutOfMemoryError, errors.ObjectLostError, errors.GetTimeoutError) as error:
        return None, str(error).strip().splitlines()[-1].strip()


class _Placed(NamedTuple):
    """An actor, and the node on which it is."""

    actor: Any
    node: str


class _Given(NamedTuple):
    """A task that an actor has."""

    placed: _Placed
    task: Task
    attempt: int
    begun: Any  # a reference that is there once the actor has begun

    @classmethod
    def give(cls, placed: _Placed, task: Task, attempt: int) -> "_Given":
        names = open_dataset(task.run.dataset).names
        expected = [names[i] for i in task.indices]
        return cls(placed, task, attempt, placed.actor.begin_here.remote(task, expected))


class _Nodes:
    """The nodes of a Ray cluster. Ray itself may wait for ever for some that are gone."""

    def __init__(self, ray: Any, gpus: float) -> None:
        self.ray, self.gpus = ray, gpus
        self.here = ray.get_runtime_context().get_node_id()
        self.had_room = time.monotonic()

    def answers(self, starting: Iterable[Any], under_way: Mapping[Any, _Given]) -> list[Any]:
        """Those that are there, or never will be because their nodes are gone; none if there is no news."""
        ready: list[Any] = self.ray.wait([*starting, *under_way], timeout=LOOK_AFTER, fetch_local=False)[0]
        if ready:
            return ready
        alive = {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}
        if self.here not in alive:
            raise SegproxError(
                f"the Ray node of this process, {platform.node()}, has died; start Ray again and repeat the command: "
                "it goes on with what is missing"
            )
        if any(room.get("CPU", 0) >= 1 and room.get("GPU", 0) >= self.gpus for room in alive.values()):
            self.had_room = time.monotonic()
        elif time.monotonic() - self.had_room > NO_ROOM:
            raise SegproxError(
                f"none of the {len(alive)} nodes of the Ray cluster has the CPU and the {self.gpus:g} GPUs of a worker"
            )
        return [answer for answer, given in under_way.items() if given.placed.node not in alive]


class _Actor(Worker):
    """A worker on some node of a Ray cluster, in the folder in which the driver is, if the node has it."""

    def __init__(self, threads: int | None, deterministic: bool, folder: str) -> None:
        super().__init__(threads, deterministic)
        if Path(folder).is_dir():
            os.chdir(folder)  # which relative paths are relative to

    def node(self) -> str:
        """The node that this is."""
        ray: Any = require("ray", "ray")
        return str(ray.get_runtime_context().get_node_id())

    def begin_here(self, task: Task, names: Sequence[str]) -> None:
        """Load what a task needs; `names` are those of its images where the task was made."""
        with _said_where():
            found = open_dataset(task.run.dataset).names
            if [found[i] for i in task.indices if i < len(found)] != names:
                raise SegproxError(f"{task.run.dataset} has other images than where the run was started")
            self.begin(task)

    def work(self, task: Task, callback: Callback | None = None) -> list[Result]:
        """Attack the images of a task."""
        with _said_where():
            return super().work(task, callback)


@contextmanager
def _said_where() -> Iterator[None]:
    """Add to an error on which node of a cluster it was."""
    try:
        yield
    except SegproxError as error:
        raise SegproxError(f"{error} (on {platform.node()}, for a Ray worker in {Path.cwd()})") from None
