"""A folder that survives anything: what was run once, and a line per image, synced before the next begins."""

import json
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

import segprox
from segprox.errors import SegproxError
from segprox.run.plan import Run
from segprox.run.record import ImageError, Record, from_line, to_line

FORMAT = 2  # of the folder; a change that older readers misunderstand raises it
HEADER, RECORDS, LOCK, OWNER = "run.json", "records.jsonl", "lock", "lock.owner"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="ignore"))
class Header:
    """What `run.json` must say where it says it; later versions may say more."""

    run: Run
    started: str | None = None
    classes: tuple[str, ...] | None = None
    palette: tuple[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt], ...] | None = None
    images: NonNegativeInt = 0
    norm: str | None = None
    family: str | None = None
    attack: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.family == "fixed-epsilon" and not isinstance((self.attack or {}).get("epsilon"), int | float):
            raise ValueError("a fixed-epsilon attack needs its epsilon")


class Store:
    """The records of one run.

    Reading needs nothing else. Writing needs the lock, which `with` takes: a second writer is refused.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / LOCK, thread_local=False)

    @property
    def header(self) -> dict[str, Any]:
        """What was run, where, and with what."""
        try:
            content: dict[str, Any] = json.loads((self.folder / HEADER).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SegproxError(f"{self.folder} is not the folder of a run: it has no {HEADER}") from None
        except (ValueError, RecursionError):
            raise SegproxError(f"{self.folder / HEADER} is damaged: it is not JSON") from None
        if not isinstance(content, dict):
            raise SegproxError(f"{self.folder / HEADER} is damaged: it does not describe a run")
        if content.get("format") != FORMAT:
            raise SegproxError(
                f"{self.folder} was written by segprox {content.get('segprox')} in format {content.get('format')}, "
                f"but this is {segprox.__version__}, which knows format {FORMAT} only; write to another folder, "
                "or read this one with the version that wrote it"
            )
        try:
            TypeAdapter(Header).validate_python(content)
        except ValidationError as error:
            damage = f"is damaged: it does not describe a run ({_first(error)})"
            raise SegproxError(f"{self.folder / HEADER} {_of_later_version(error) or damage}") from None
        return content

    @property
    def run(self) -> Run:
        """What was run."""
        return TypeAdapter(Run).validate_python(self.header["run"])

    def records(self) -> Iterator[Record | ImageError]:
        """The lines, oldest first. A torn last line, left by a crash, does not count."""
        path = self.folder / RECORDS
        if not path.exists():
            return
        classes: set[int] = set()  # how many there are
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    record = from_line(line)
                except (ValueError, RecursionError) as error:
                    raise SegproxError(f"line {number} of {path} {_unreadable(error)}") from None
                if isinstance(record, Record):
                    found = {len(part) for counts in (record.clean_counts, record.counts) for part in counts}
                    classes = classes or found
                    if found != classes or len(found) > 1:
                        raise SegproxError(
                            f"line {number} of {path} is damaged: it does not count the pixels of as many classes as "
                            "the other lines do"
                        )
                yield record

    def latest(self) -> dict[str, Record | ImageError]:
        """The last line of each image, by its name: what counts."""
        return {record.image: record for record in self.records()}

    @property
    def locked(self) -> bool:
        """Whether some process is writing."""
        if not (self.folder / LOCK).exists():
            return False
        try:
            with FileLock(self.folder / LOCK, timeout=0, thread_local=False):
                return False
        except Timeout:
            return True
        except OSError:  # a lock that cannot be asked
            return False

    def __enter__(self) -> "Store":
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise SegproxError(
                f"another process (pid {self._owner()}) is writing to {self.folder}; wait for it, or stop it"
            ) from None
        try:
            (self.folder / OWNER).write_text(str(os.getpid()))
            self._cut_torn_line()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._lock.release()

    def _owner(self) -> str:
        try:
            return (self.folder / OWNER).read_text().strip() or "unknown"
        except OSError:
            return "unknown"

    def start(self, run: Run, about: Mapping[str, Any]) -> None:
        """Say what is run. Going on later keeps the first description, but for how many images are wanted or kept."""
        content = {"format": FORMAT, "segprox": segprox.__version__, "run": _plain(run), **about}
        if (self.folder / HEADER).exists():
            before = self.header  # refuses another format
            content = before | {"run": content["run"]}
            if content == before:
                return
        write_file(self.folder / HEADER, json.dumps(content, indent=1).encode())

    def append(self, record: Record | ImageError, files: Mapping[str, bytes] | None = None) -> None:
        """Write a record, and before it the files it names; when this returns, both are on the disk."""
        assert self._lock.is_locked, "a store is written within `with`"
        for name, content in (files or {}).items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)
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


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")


def _of_later_version(error: ValidationError) -> str | None:
    """What to say of content that only has more fields than this version knows: it is none to be thrown away."""
    unknown = [found["loc"][-1] for found in error.errors() if found["type"] == "unexpected_keyword_argument"]
    if len(unknown) < error.error_count():
        return None
    return (
        f"has a field {unknown[0]!r}, which segprox {segprox.__version__} does not know; keep it, and read the folder "
        "with the version that wrote it"
    )


def _unreadable(error: Exception) -> str:
    """Why a line cannot be read."""
    if not isinstance(error, ValidationError):
        return "is damaged: it is not JSON; without it, its image is attacked again"
    return _of_later_version(error) or f"is damaged ({_first(error)}); without it, its image is attacked again"


def _plain(run: Run) -> Any:
    return TypeAdapter(Run).dump_python(run, mode="json")


def _write_all(file: FileIO, content: bytes) -> None:
    """Write everything; a disk that is nearly full takes a part without complaint."""
    while content:
        content = content[file.write(content) :]


def _sync_folder(folder: Path) -> None:
    """Make sure that new names in a folder are on the disk, as their files are; Windows has no way to ask for it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
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
