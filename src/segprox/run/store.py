"""A folder that survives anything: what was run once, and a line per image, synced before the next begins."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

import segprox
from segprox.errors import SegproxError
from segprox.run.plan import Run
from segprox.run.record import ImageError, Record, from_line, to_line

FORMAT = 1  # of the folder; a change that older readers misunderstand raises it
HEADER, RECORDS, LOCK, IMAGES = "run.json", "records.jsonl", "lock", "images"


class Store:
    """The records of one run.

    Reading needs nothing else. Writing needs the lock, which `with` takes: a second writer is refused.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: IO[str] | None = None

    @property
    def header(self) -> dict[str, Any]:
        """What was run, where, and with what."""
        try:
            content: dict[str, Any] = json.loads((self.folder / HEADER).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SegproxError(f"{self.folder} is not the folder of a run: it has no {HEADER}") from None
        except ValueError:
            raise SegproxError(f"{self.folder / HEADER} is damaged: it is not JSON") from None
        if not isinstance(content, dict):
            raise SegproxError(f"{self.folder / HEADER} is damaged: it does not describe a run")
        if content.get("format") != FORMAT:
            raise SegproxError(
                f"{self.folder} was written by segprox {content.get('segprox')} in format {content.get('format')}, "
                f"but this is {segprox.__version__}, which knows format {FORMAT} only; use another folder"
            )
        return content

    @property
    def run(self) -> Run:
        """What was run."""
        try:
            return TypeAdapter(Run).validate_python(self.header["run"])
        except (KeyError, ValidationError):
            raise SegproxError(f"{self.folder / HEADER} is damaged: it does not describe a run") from None

    def records(self) -> Iterator[Record | ImageError]:
        """The lines, oldest first. A torn last line, left by a crash, does not count."""
        path = self.folder / RECORDS
        if not path.exists():
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield from_line(line)
                except ValueError:
                    raise SegproxError(f"line {number} of {path} is damaged; remove it to have it done again") from None

    def latest(self) -> dict[str, Record | ImageError]:
        """The last line of each image, by its name: what counts."""
        return {record.image: record for record in self.records()}

    @property
    def locked(self) -> bool:
        """Whether some process is writing."""
        try:
            with (self.folder / LOCK).open("r") as lock:
                return not _try_lock(lock, fcntl.LOCK_SH)
        except OSError:  # no lock, or none that could be asked
            return False

    def __enter__(self) -> "Store":
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            lock = undo.enter_context((self.folder / LOCK).open("a+"))
            if not _try_lock(lock, fcntl.LOCK_EX):
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                raise SegproxError(
                    f"another process (pid {owner}) is writing to {self.folder}; wait for it, or stop it"
                )
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            self._cut_torn_line()
            undo.pop_all()
        self._lock = lock
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._lock is not None
        self._lock.close()  # which releases it
        self._lock = None

    def start(self, run: Run, about: Mapping[str, Any]) -> None:
        """Say what is run. Going on later keeps the first description, but for how many images are wanted or kept."""
        content = {"format": FORMAT, "segprox": segprox.__version__, "run": _plain(run), **about}
        if (self.folder / HEADER).exists():
            before = self.header  # refuses another format
            content = before | {"run": content["run"]}
            if content == before:
                return
        _write(self.folder / HEADER, json.dumps(content, indent=1).encode())

    def append(self, record: Record | ImageError, files: Mapping[str, bytes] | None = None) -> None:
        """Write a record, and before it the files it names; when this returns, both are on the disk."""
        assert self._lock is not None, "a store is written within `with`"
        for name, content in (files or {}).items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, content)
        path = self.folder / RECORDS
        # Without a buffer: one that could not be written whole would be written again when the file is closed.
        with path.open("ab", buffering=0) as lines:
            before = lines.tell()
            try:
                _write_all(lines, to_line(record).encode() + b"\n")
                os.fsync(lines.fileno())
            except BaseException:  # a disk that filled up half-way, or an interruption
                os.truncate(path, before)
                raise
        if before == 0:
            _sync_folder(self.folder)

    def _cut_torn_line(self) -> None:
        path = self.folder / RECORDS
        if not path.exists():
            return
        with path.open("rb+") as lines:
            content = lines.read()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                lines.truncate(whole)


def stores(folder: Path) -> list[Store]:
    """The runs in a folder, or the one that it is."""
    if (folder / HEADER).is_file():
        return [Store(folder)]
    found = [Store(path.parent) for path in sorted(folder.glob(f"*/{HEADER}"))]
    if not found:
        raise SegproxError(f"there are no runs in {folder}; segprox evaluate and segprox run write some")
    return found


def _plain(run: Run) -> Any:
    return TypeAdapter(Run).dump_python(run, mode="json")


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:  # other errors say that there are no locks here, not that someone has it
        return False
    return True


def _write_all(file: FileIO, content: bytes) -> None:
    """Write everything; a disk that is nearly full takes a part without complaint."""
    while content:
        content = content[file.write(content) :]


def _sync_folder(folder: Path) -> None:
    """Make sure that new names in a folder are on the disk, as their files are."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
