"""The same records from this process, from several, and from a Ray cluster; and what happens when one of them dies."""

import dataclasses
import os
import platform
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from segprox import SegproxError
from segprox.run.cluster import Ray
from segprox.run.engines import Local, Processes
from segprox.run.plan import AttackEntry, Run
from segprox.run.record import ImageError, Record, same
from segprox.run.worker import ATTEMPTS, WORKER_DIED, Task

ATTACKS = (AttackEntry(name="fmn", set={"steps": 5}), AttackEntry(name="pgd", set={"steps": 3}))
# Codes of images, in the red of their first pixel: 10 does nothing, 20 stops a while, 30 kills, 40 kills once.
NETWORK = """
import os, time, torch
from pathlib import Path

class Net(torch.nn.Module):
    def forward(self, x):
        code, here = round(x[0, 0, 0, 0].item() * 255, 3), Path(__file__).parent
        with (here / "seen").open("a") as seen:
            seen.write(f"{code:.0f}\\n")
        if code == 20 and not (here / "pid").exists():
            (here / "parent").write_text(str(os.getppid()))
            (here / "writing").write_text(str(os.getpid()))
            (here / "writing").rename(here / "pid")
            time.sleep(900)
        if code == 30 or (code == 40 and not (here / "died").exists()):
            (here / "died").touch()
            os._exit(1)
        return torch.cat([x, 1 - x, x / 2], 1) * 5
"""

FRAGILE = """
import os, torch
from pathlib import Path

def make():  # kills its process as often as `deaths` has letters
    deaths = Path(__file__).with_name("deaths")
    if left := deaths.read_text():
        deaths.write_text(left[1:])
        os._exit(1)
    return torch.nn.Conv2d(3, 20, 1)
"""

PLUGIN = """
import segprox

@segprox.register_dataset("two-scenes")
def two_scenes():
    return segprox.load_dataset("demo", length=2)
"""


def demo_tasks(size=2):
    runs = [Run(model="demo-standard", dataset="demo", attack=attack) for attack in ATTACKS]
    return [Task(run, tuple(range(i, i + size))) for run in runs for i in range(0, 4, size)]


def outcomes(dones):
    return {
        (task.run.attack.name, result.image): result.record
        for task, results in dones
        for result in results
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    found = outcomes(Local()(demo_tasks()))
    assert len(found) == 8
    return found


@pytest.fixture
def dangerous(tmp_path):
    """Images with codes, and the network that knows them; `dangerous(10, 20)` is the run of these."""
    (tmp_path / "network.py").write_text(NETWORK)
    for part in ("images", "labels"):
        (tmp_path / part).mkdir()

    def run(*codes):
        for i, code in enumerate(codes):
            picture = np.full((16, 16, 3), 128, dtype=np.uint8)
            picture[0, 0, 0] = code
            Image.fromarray(picture).save(tmp_path / f"images/{i}-{code}.png")
            Image.fromarray(np.zeros((16, 16), dtype=np.uint8)).save(tmp_path / f"labels/{i}-{code}.png")
        return Run(model=f"python:{tmp_path}/network.py:Net", dataset=f"folder:{tmp_path}?classes=6", attack=ATTACKS[0])

    return run


def assert_all_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(same(found[key], expected[key]) for key in expected)


def test_this_process_does_tasks_in_order(expected):
    tasks = demo_tasks(size=1)
    dones = list(Local()(tasks))
    assert [task for task, _ in dones] == tasks
    assert_all_same(outcomes(dones), expected)
    assert all(isinstance(record, Record) for record in expected.values())


class Enough:
    """What is wanted until so many results are there; it has the results."""

    def __init__(self, count):
        self.count, self.results = count, []

    def of(self, engine):
        for _, results in engine(demo_tasks(size=1), lambda _: len(self.results) < self.count):
            self.results += results
        return len(self.results)


def test_tasks_that_are_not_wanted_any_more_are_not_begun():
    assert Enough(3).of(Local()) == 3
    assert 3 <= Enough(3).of(Processes(2)) <= 4  # one may be under way
    assert Enough(0).of(Processes(2)) == Enough(0).of(Local()) == 0


def test_no_tasks():
    assert list(Local()([])) == list(Processes(2)([])) == []


def when_it_appears(path: Path, act):
    """Do something to the process that writes its number there."""

    def watch():
        end = time.monotonic() + 300
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
        act(int(path.read_text()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def test_other_processes_give_the_same_and_are_replaced_when_they_die(expected, dangerous, tmp_path):
    run = dangerous(10, 30, 20, 10)
    watcher = when_it_appears(tmp_path / "pid", kill)
    start = time.monotonic()
    risky = [Task(run, (0, 1)), Task(run, (2,)), Task(run, (3,))]
    found = outcomes(Processes(2)([*risky, *demo_tasks()]))
    watcher.join()
    assert time.monotonic() - start < 600  # nobody waited for the one that slept
    assert_all_same({key: found.pop(key) for key in expected}, expected)
    assert len(found) == 4
    deadly = found.pop(("fmn", "1-30"))
    assert isinstance(deadly, ImageError)
    assert deadly.reason == WORKER_DIED
    assert all(isinstance(record, Record) for record in found.values())  # also the one beside the deadly one
    assert (tmp_path / "seen").read_text().split().count("30") == 3


def test_an_image_is_not_to_blame_for_workers_that_die_before_they_begin(tmp_path):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    run = Run(model=f"python:{tmp_path}/fragile.py:make", dataset="demo?length=1", attack=ATTACKS[0])
    (tmp_path / "deaths").write_text("x" * ATTEMPTS)
    found = outcomes(Processes(2)([Task(run, (0,))]))
    assert [type(record) for record in found.values()] == [Record]
    (tmp_path / "deaths").write_text("x" * 99)
    with pytest.raises(SegproxError, match=f"3 workers died one after the other, the last while it loaded {run.model}"):
        list(Processes(1)([Task(run, (0,))]))
    assert len((tmp_path / "deaths").read_text()) == 96


def test_what_is_wrong_with_the_run_is_raised_here():
    run = Run(model="no-such", dataset="demo", attack=ATTACKS[0])
    with pytest.raises(SegproxError, match="there is no model 'no-such'"):
        list(Processes(1)([Task(run, (0,))]))


def test_devices_go_round():
    engine = Processes(3, devices=("cuda:0", "cuda:1"))
    assert [engine._device(i) for i in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert Processes(3)._device(0) is None


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
# How soon Ray notices that a node is gone; as it comes, that takes 15 seconds or more.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
ray_warns = pytest.mark.filterwarnings("default")


@needs_ray
@ray_warns
def test_a_ray_cluster_gives_the_same_and_replaces_actors_that_die(expected, dangerous, tmp_path):
    import ray

    run = dangerous(40, 10)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        # three actors on two processors: nothing waits for the third
        found = outcomes(Ray(3)([Task(run, (0, 1)), *demo_tasks()]))
        risky = {key: found.pop(key) for key in [("fmn", "0-40"), ("fmn", "1-10")]}
        assert_all_same(found, expected)
        assert all(isinstance(record, Record) for record in risky.values())
        assert (tmp_path / "died").exists()
        wrong = Run(model="no-such", dataset="demo", attack=ATTACKS[0])
        with pytest.raises(SegproxError, match="there is no model 'no-such'"):
            list(Ray(1)([Task(wrong, (0,))]))
        assert 3 <= Enough(3).of(Ray(2)) <= 4
        assert ray.is_initialized()  # a cluster that was there before stays
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def head():
    """A cluster on this machine with one node, for the driver."""
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK}
    made = Cluster(initialize_head=True, head_node_args=settings)
    yield made
    made.shutdown()


@pytest.fixture
def cluster(head):
    """It, and two nodes with room for a worker."""
    while len(head.worker_nodes) < 2:
        head.add_node(num_cpus=1)
    return head


def raylet(node):
    return node.all_processes["raylet"][0].process.pid


@needs_ray
@ray_warns
@pytest.mark.parametrize("fault", ["an actor is killed", "a raylet is killed", "a node is frozen", "a node is removed"])
def test_records_are_equal_whatever_happens_to_a_cluster(fault, cluster, dangerous, tmp_path):
    run = dangerous(10, 20, 10, 10)
    tasks = [Task(run, (0, 1)), Task(run, (2,)), Task(run, (3,))]
    gone = []

    def act(pid):
        node = next(node for node in cluster.worker_nodes if raylet(node) == int((tmp_path / "parent").read_text()))
        if fault == "an actor is killed":
            kill(pid)
            return
        if fault == "a node is frozen":  # as one that swaps, or whose network is gone: nothing of it answers
            for frozen in (raylet(node), pid):
                os.kill(frozen, signal.SIGSTOP)
            gone.append(node)
            return
        if fault == "a raylet is killed":
            kill(raylet(node))
        cluster.remove_node(node)

    watcher = when_it_appears(tmp_path / "pid", act)
    found = outcomes(Ray(2, cluster.address)(tasks))
    watcher.join()
    for node in gone:
        kill(raylet(node))
        cluster.remove_node(node)
    assert_all_same(found, outcomes(Local()(tasks)))  # which nothing interrupts any more
    assert all(isinstance(record, Record) for record in found.values())
    assert len(found) == 4


@needs_ray
@ray_warns
def test_actors_find_what_this_process_finds(cluster, dangerous, tmp_path, monkeypatch):
    (tmp_path / "pid").touch()
    run = dangerous(10, 20)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "somewhere.py").write_text(NETWORK)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setenv("SEGPROX_PLUGINS", "plugin.py")
    named = {"python:network.py:Net": "folder:.?classes=6", "python:somewhere:Net": "two-scenes"}
    runs = [dataclasses.replace(run, model=model, dataset=dataset) for model, dataset in named.items()]
    tasks = [Task(run, (0, 1)) for run in runs]
    dones = list(Ray(2, cluster.address)(tasks))
    assert {task.run.folder for task, _ in dones} == {run.folder for run in runs}  # the names are as they were
    for run in runs:
        of_run = [done for done in dones if done[0].run == run]
        assert_all_same(outcomes(of_run), outcomes(Local()([Task(run, (0, 1))])))
        assert [type(record) for record in outcomes(of_run).values()] == [Record, Record]

    # A node that does not have this folder has the code all the same, but not the data, and says so.
    monkeypatch.setattr(Path, "cwd", lambda: Path("/not/on/that/node"))
    (tmp_path / "network.py").rename(tmp_path / "renamed.py")
    demo = dataclasses.replace(run, model="python:renamed.py:Net", dataset="demo?length=1")
    assert [type(record) for record in outcomes(Ray(1, cluster.address)([Task(demo, (0,))])).values()] == [Record]
    with pytest.raises(
        SegproxError, match=rf"there is no folder labels.* \(on {platform.node()}, for a Ray worker in .*\)"
    ):
        list(Ray(1, cluster.address)([Task(dataclasses.replace(demo, dataset="folder:.?classes=6"), (0,))]))


@needs_ray
@ray_warns
def test_a_cluster_without_room_for_a_worker_is_told(cluster, monkeypatch):
    monkeypatch.setattr("segprox.run.cluster.LOOK_AFTER", 0.5)
    monkeypatch.setattr("segprox.run.cluster.NO_ROOM", 1.0)
    with pytest.raises(
        SegproxError, match="none of the 3 nodes of the Ray cluster has the CPU and the 1 GPUs of a worker"
    ):
        list(Ray(1, cluster.address, gpus=1.0)(demo_tasks()))


@needs_ray
@ray_warns
def test_the_death_of_the_own_node_is_told(dangerous, tmp_path, monkeypatch):
    run = dangerous(20)
    for name, value in QUICK.items():
        monkeypatch.setenv(f"RAY_{name}", str(value))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # a node that may be killed is one of our own
    watcher = when_it_appears(tmp_path / "pid", lambda _: kill(int((tmp_path / "parent").read_text())))
    with pytest.raises(SegproxError, match=r"the Ray node of this process, .*, has died; start Ray again"):
        list(Ray(1)([Task(run, (0,))]))
    watcher.join()
