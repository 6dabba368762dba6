"""Kill evaluations at random moments, go on, and compare the records with those of one that nobody killed.

    python benchmarks/soak.py --kills 200 --engines local,processes,ray
    python benchmarks/soak.py --kills 10 --engines ray

Each round starts `segprox evaluate`, kills something at a random moment with a random signal (`SIGKILL`, `SIGTERM` or
`SIGINT`), and repeats until so many kills of the round have hit; then the command runs undisturbed. The victim is the
process itself or, two times in three where there are some, its workers: processes, or actors of Ray. An evaluation
survives the deaths of its workers, so several of them are killed in one, and then most often the process too. The
moment is somewhere between the start and the end, or when what is waited for appears: a lock or a worker (start), a
first record and some time (attack), a record (append), a file that is being written (files), a report's files
(report). Printed is how many rounds ended with the same records as the run that was not disturbed, and with the same
report.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from segprox.run.record import same
from segprox.run.store import Store, stores
from segprox.run.worker import ATTEMPTS

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ENGINES = {
    "local": [],
    "processes": ["--workers", "2"],
    "ray": ["--engine", "ray", "--workers", "2"],
}
WITH_WORKERS = ("processes", "ray")
IMAGES = 24
Moments = dict[str, Callable[[], Callable[[], bool]]]  # by name what makes a test of whether a moment has come


def evaluate(engine: str, out: Path) -> list[str]:
    """The command that is killed."""
    attack = ["--attack", "fmn", "--set", "steps=6", "--limit", str(IMAGES), "--save", "png", "--log", "quiet"]
    names = ["--model", "demo-standard", "--dataset", "demo"]
    return [sys.executable, "-m", "segprox", "evaluate", *names, *attack, *ENGINES[engine], "--out", str(out)]


def report(runs: Path, out: Path) -> list[str]:
    """The command that writes a report."""
    return [sys.executable, "-m", "segprox", "report", str(runs), "--out", str(out)]


def children(pid: int) -> list[int]:
    """All processes that a process has started, theirs included."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        found.setdefault(parent, []).append(int(path.parent.name))
    direct = found.get(pid, [])
    return direct + [grandchild for child in direct for grandchild in children(child)]


def is_worker(pid: int) -> bool:
    """Whether a process attacks images: a spawned one, or an actor of Ray."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"spawn_main" in command or b"_Actor" in command


def workers(pid: int) -> list[int]:
    """The processes that attack images for a process."""
    return [child for child in children(pid) if is_worker(child)]


class Soak:
    """Rounds of kills, and what came of them."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.kills: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def undisturbed(self, command: list[str]) -> float:
        """Run a command to its end; returns its seconds."""
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return time.monotonic() - start

    def disturbed(self, command: list[str], what: str, seconds: float, moments: Moments) -> None:
        """Run a command and kill it, or some of its workers, at random moments."""
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        of_workers = what in WITH_WORKERS and self.chance.random() < 2 / 3
        try:
            # One kill fewer than those after which an image counts as the one that kills workers.
            for _ in range(ATTEMPTS - 1 if of_workers else 0):
                self._strike(process, what, seconds, moments, True)
            if not of_workers or self.chance.random() < 0.7:  # else it goes on to its end without them
                self._strike(process, what, seconds, moments, False)
            process.wait(600)
        finally:  # nothing may be left that writes
            for pid in [process.pid, *children(process.pid)]:
                if process.poll() is None:
                    os.kill(pid, signal.SIGKILL)

    def _strike(
        self, process: subprocess.Popen[bytes], what: str, seconds: float, moments: Moments, of_workers: bool
    ) -> None:
        moment = self.chance.choice(["any", *moments])
        until = time.monotonic() + (self.chance.uniform(0, seconds) if moment == "any" else 600)
        arrived = moments[moment]() if moment in moments else bool
        victims: list[int] = []
        while process.poll() is None and not victims:
            if time.monotonic() >= until or arrived():
                victims = workers(process.pid) if of_workers else [process.pid]
            time.sleep(0.001)
        how = self.chance.choice(SIGNALS)
        if victims:
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(victims), how)
                self.kills[f"{what}, {moment}, {'worker' if of_workers else 'parent'}, {how.name}"] += 1

    def round(self, engine: str, kills: int, expected: Path) -> tuple[bool, bool]:
        """Whether records, and reports, are equal after so many kills."""
        runs, written = self.folder / "runs", self.folder / "report"
        for folder in (runs, written):
            shutil.rmtree(folder, ignore_errors=True)

        def lines() -> int:
            return sum(path.read_bytes().count(b"\n") for path in runs.glob("*/records.jsonl"))

        def start() -> Callable[[], bool]:
            return lambda: any(runs.glob("*/lock.owner"))

        def append() -> Callable[[], bool]:
            wanted = lines() + self.chance.randint(1, 2)
            return lambda: lines() >= wanted

        def attack() -> Callable[[], bool]:
            appended, delay = append(), self.chance.uniform(0, 0.5)
            return lambda: appended() and not time.sleep(delay)

        def files() -> Callable[[], bool]:
            return lambda: any(runs.glob("*/*/.*.tmp"))

        moments: Moments = {"start": start, "append": append, "attack": attack, "files": files}
        for _ in range(kills):
            if lines() == IMAGES:  # nothing is left to be killed at
                break
            self.disturbed(evaluate(engine, runs), engine, self.seconds[engine], moments)
        self.undisturbed(evaluate(engine, runs))
        command = report(runs, written)
        self.disturbed(command, "report", self.seconds["report"], {"writing": lambda: lambda: any(written.glob("*/*"))})
        present = {path.name for path in written.glob("*") if not path.name.startswith(".")}
        whole = present in (set(), {path.name for path in (expected / "report").glob("*")})
        self.undisturbed(command)
        equal = equal_records(stores(runs)[0], stores(expected / "runs")[0])
        return equal, whole and digests(written) == digests(expected / "report")


def equal_records(first: Store, second: Store) -> bool:
    """Whether two stores have the same records, each once, and the same files."""
    one, other = first.latest(), second.latest()
    once = len(list(first.records())) == len(one)
    pictures = [digests(store.folder / "images") for store in (first, second)]
    return (
        one.keys() == other.keys() and all(same(one[k], other[k]) for k in one) and once and pictures[0] == pictures[1]
    )


def digests(folder: Path) -> dict[str, str]:
    """The files of a folder that do not say when or how fast they were made."""
    files = (path for path in folder.rglob("*") if path.suffix in (".png", ".svg") and path.stem != "queries")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    """Soak each engine, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="of evaluations, shared by the engines")
    parser.add_argument("--per-round", type=int, default=8, help="evaluations that are killed before one is not")
    parser.add_argument("--engines", default="local,processes,ray")
    parser.add_argument("--minutes", type=float, default=600, help="after which no new round begins")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    engines, end = arguments.engines.split(","), time.monotonic() + 60 * arguments.minutes
    with TemporaryDirectory(prefix="segprox-soak-") as name:
        folder = Path(name)
        soak, expected = Soak(folder, random.Random(arguments.seed)), folder / "expected"
        soak.seconds["local"] = soak.undisturbed(evaluate("local", expected / "runs"))
        soak.seconds["report"] = soak.undisturbed(report(expected / "runs", expected / "report"))
        for engine in set(engines) - {"local"}:
            soak.seconds[engine] = soak.undisturbed(evaluate(engine, folder / engine))
        rounds: Counter[str] = Counter()
        while sum(soak.kills.values()) < arguments.kills and time.monotonic() < end:
            engine = engines[rounds["all"] % len(engines)]
            records, reports = soak.round(engine, arguments.per_round, expected)
            rounds.update({"all": 1, "equal records": int(records), "equal reports": int(reports)})
            print(f"{engine}: {dict(rounds)}, {sum(soak.kills.values())} kills", flush=True)
    for kind, count in sorted(soak.kills.items()):
        print(f"{count:5}  {kind}")
    print(f"{sum(soak.kills.values())} kills in {rounds['all']} rounds: records equal in {rounds['equal records']}, "
          f"reports equal in {rounds['equal reports']}")  # fmt: skip


if __name__ == "__main__":
    main()
