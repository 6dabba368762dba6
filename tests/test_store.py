"""A folder that survives anything."""

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

import segprox
from segprox import SegproxError
from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.record import ClassCounts, ImageError, Record, Saved, Score, from_line, same, to_line
from segprox.run.store import HEADER, LOCK, RECORDS, Store, stores

RUN = Run(model="demo-robust", dataset="demo", attack=AttackEntry(name="fmn"))
SCORE = Score(linf=0.1, l2=1.0, l1=3.0, apsr=0.5, success=False)
COUNTS = ClassCounts([1, 2], [3, 4], [5, 6])


def a_record(image="a", *, score=SCORE, **changes):
    fields = {
        "key": "k", "version": "1", "image": image, "image_hash": "h", "height": 2, "width": 3, "labels": "true",
        "counted": 6,
        "clean_apsr": 0.25, "clean_accuracy": 0.75, "accuracy": 0.5, "norm": 0.1, "found": score, "rounded": score,
        "forwards": 5, "backwards": 4, "clean_counts": COUNTS, "counts": COUNTS, "saved": {}, "seconds": 1.5,
    }  # fmt: skip
    return Record(**fields | changes)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "run")


def names(store):
    return [record.image for record in store.records()]


sizes, shares = st.floats(min_value=0), st.floats(0, 1)


@given(st.lists(sizes, min_size=5, max_size=5), st.lists(shares, min_size=4, max_size=4), st.text(), st.booleans())
def test_records_survive_bit_by_bit(lengths, rates, image, success):
    linf, l2, l1, norm, seconds = lengths
    apsr, clean, accuracy, after = rates
    score = Score(linf=linf, l2=l2, l1=l1, apsr=apsr, success=success)
    saved = {"png": Saved(file=f"images/{image}.png", score=score)}
    record = a_record(
        image, score=score, norm=norm, clean_apsr=clean, clean_accuracy=accuracy, accuracy=after, seconds=seconds,
        saved=saved,
    )  # fmt: skip
    line = to_line(record)
    assert "\n" not in line
    assert from_line(line) == record
    back = from_line(line)
    assert [math.copysign(1, back.norm), back.norm.hex()] == [math.copysign(1, norm), norm.hex()]
    assert isinstance(back.clean_counts, ClassCounts)
    assert isinstance(back.saved["png"].score, Score)


def test_records_from_before_there_were_traces():
    record = a_record(trace=[(3, 0.1), (7, 0.05)])
    assert from_line(to_line(record)) == record
    old = json.loads(to_line(record))
    del old["trace"]
    assert from_line(json.dumps(old)) == a_record()
    assert a_record().trace is None


@given(st.text(), st.text())
def test_failures_survive(image, reason):
    error = ImageError(version="1", key="k", image=image, reason=reason)
    assert from_line(to_line(error)) == error


def test_names_that_are_no_text_survive():
    error = ImageError(
        version="1", key="k", image=os.fsdecode(b"caf\xe9"), reason="r"
    )  # as a file system may have them
    assert from_line(to_line(error)) == error


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"key":"k","image":"a"}', "\x00\x00"])
def test_other_lines_are_refused(line):
    with pytest.raises(ValueError):  # noqa: PT011  # whatever it says
        from_line(line)


def test_a_misspelt_field_is_refused():
    line = to_line(ImageError(version="1", key="k", image="a", reason="r")).replace('"reason"', '"raeson"')
    with pytest.raises(ValueError, match="raeson"):
        from_line(line)


def test_same_looks_at_everything_but_time():
    assert same(a_record(seconds=1.0), a_record(seconds=2.0))
    assert not same(a_record(norm=0.1), a_record(norm=math.nextafter(0.1, 1)))
    assert not same(a_record(trace=[(3, 0.1)]), a_record(trace=[(4, 0.1)]))
    assert not same(a_record(), a_record(score=Score(linf=0.1, l2=1.0, l1=3.0, apsr=0.5, success=True)))
    error = ImageError(version="1", key="k", image="a", reason="r")
    assert same(error, error)
    assert not same(error, a_record())
    assert not same(a_record(), error)


def test_what_is_appended_is_read(store):
    error = ImageError(version="1", key="k", image="b", reason="why\nnot")
    with store:
        store.append(a_record("a"))
        store.append(error)
    assert list(store.records()) == [a_record("a"), error]
    with store:
        store.append(a_record("b"))
    assert names(store) == ["a", "b", "b"]
    assert store.latest() == {"a": a_record("a"), "b": a_record("b")}  # the last word counts


def test_nothing_is_written_without_the_lock(store):
    with pytest.raises(AssertionError):
        store.append(a_record())
    with store:
        pass
    with pytest.raises(AssertionError):
        store.append(a_record())
    assert not (store.folder / RECORDS).exists()


def test_an_empty_store(store):
    assert list(store.records()) == []
    assert store.latest() == {}
    assert not store.locked
    assert not store.folder.exists()  # reading writes nothing


@pytest.mark.parametrize("torn", [b"{", b'{"key":"k"', b"\x00" * 50, b"\xff\xfe", to_line(a_record("z")).encode()])
def test_a_torn_last_line_is_tolerated_and_cut(store, torn):
    with store:
        store.append(a_record("a"))
    whole = (store.folder / RECORDS).read_bytes()
    (store.folder / RECORDS).write_bytes(whole + torn)
    assert names(store) == ["a"]
    assert (store.folder / RECORDS).read_bytes() == whole + torn  # reading changes nothing
    with store:
        assert (store.folder / RECORDS).read_bytes() == whole
        store.append(a_record("b"))
    assert names(store) == ["a", "b"]


def test_a_first_line_that_is_torn(store):
    store.folder.mkdir()
    (store.folder / RECORDS).write_bytes(b'{"key"')
    with store:
        store.append(a_record("a"))
    assert names(store) == ["a"]


@pytest.mark.parametrize("damage", [b"{}\n", b"\n", b"\xff\xfe\n", b"\x00\x00\n", b'{"key":\n'])
def test_a_damaged_middle_line_is_named(store, damage):
    with store:
        store.append(a_record("a"))
        store.append(a_record("b"))
    first, second = (store.folder / RECORDS).read_bytes().splitlines(keepends=True)
    (store.folder / RECORDS).write_bytes(first + damage + second)
    with pytest.raises(SegproxError, match=r"line 2 of .*records\.jsonl is damaged"):
        list(store.records())


def test_a_second_writer_is_refused_and_told_who_is_first(store):
    with store:
        assert store.locked
        with pytest.raises(SegproxError, match=rf"another process \(pid {os.getpid()}\) is writing to .*run; wait"):
            Store(store.folder).__enter__()
        store.append(a_record())
    assert not store.locked
    with Store(store.folder):
        pass


def test_looking_at_the_lock_does_not_take_it(store):
    with store:
        pass
    with (store.folder / LOCK).open() as lock:
        assert not store.locked
        lock.read()
    with store:
        assert Store(store.folder).locked
        assert Store(store.folder).locked


WRITER = """
import sys
from pathlib import Path
from segprox.run.store import Store
with Store(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_writer(folder):
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_a_writer_in_another_process_and_its_death(store):
    with another_writer(store.folder) as process:
        assert store.locked
        with pytest.raises(SegproxError, match=rf"pid {process.pid}\b"):
            store.__enter__()
        assert list(store.records()) == []  # reading is always possible
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not store.locked
        with store:
            store.append(a_record())
    assert names(store) == ["a"]


def test_locks_that_do_not_work_are_no_other_process(store, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(OSError, match="No locks available"):
        store.__enter__()
    assert not store.locked


def test_the_header(store):
    about = {"images": 100, "environment": {"python": "3"}}
    with store:
        store.start(RUN, about)
    assert store.run == RUN
    assert store.header["images"] == 100
    assert store.header["segprox"] == segprox.__version__
    assert store.header["format"] == 2


def test_the_first_header_is_kept_but_for_what_is_wanted(store):
    with store:
        store.start(RUN, {"environment": {"host": "first"}})
    before = (store.folder / HEADER).stat()
    with store:
        store.start(RUN, {"environment": {"host": "second"}})
    assert (store.folder / HEADER).stat() == before
    more = Run(model="demo-robust", dataset="demo", attack=AttackEntry(name="fmn"), settings=Settings(limit=7))
    with store:
        store.start(more, {"environment": {"host": "third"}})
    assert store.header["environment"] == {"host": "first"}
    assert store.run.settings.limit == 7


def test_a_run_with_all_settings_survives(store):
    settings = Settings(
        limit=3, max_queries=9, save=("png", "float"), model_options={"mean": [0.5, 0.5], "device": "cpu"}
    )
    attack = AttackEntry(name="pgd", set={"epsilon": "8/255", "random_start": True, "steps": 3})
    run = Run(model="m", dataset="d", attack=attack, goal="road", settings=settings)
    with store:
        store.start(run, {})
    assert store.run == run
    assert store.run.folder == run.folder


def test_another_format_is_refused(store):
    with store:
        store.start(RUN, {})
    content = json.loads((store.folder / HEADER).read_text())
    (store.folder / HEADER).write_text(json.dumps(content | {"format": 1, "segprox": "0.0.9"}))
    for use in (lambda: store.header, lambda: store.run, lambda: store.start(RUN, {})):
        with pytest.raises(
            SegproxError,
            match=r"was written by segprox 0\.0\.9 in format 1, but this is .* format 2 only; write to another",
        ):
            use()
    assert json.loads((store.folder / HEADER).read_text())["format"] == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 2}', '{"format": 2, "run": {}}', "\udcff"])
def test_a_damaged_header_is_named(store, text):
    store.folder.mkdir()
    (store.folder / HEADER).write_text(text, errors="surrogateescape")
    with pytest.raises(SegproxError, match=r"run\.json is damaged"):
        _ = store.run


def test_a_folder_that_is_no_run(store):
    with pytest.raises(SegproxError, match=r"is not the folder of a run: it has no run\.json"):
        _ = store.header


# --- disks that fill up -------------------------------------------------------------------------------------------
def test_files_are_written_before_their_record_and_whole(store, monkeypatch):
    seen = []
    sync = os.fsync

    def watched(descriptor):
        images = store.folder / "images"
        seen.append((sorted(path.name for path in images.iterdir()), len(names(store))))
        sync(descriptor)

    with store:
        monkeypatch.setattr(os, "fsync", watched)
        store.append(a_record(), {"images/a.png": b"12", "images/b.png": b"345"})
        monkeypatch.undo()
    assert (store.folder / "images" / "a.png").read_bytes() == b"12"
    assert (store.folder / "images" / "b.png").read_bytes() == b"345"
    assert seen[0] == ([".a.png.tmp"], 0)  # never under its own name before it is whole
    assert (["a.png", "b.png"], 0) in seen
    assert (["a.png", "b.png"], 1) in seen
    assert sorted(path.name for path in (store.folder / "images").iterdir()) == ["a.png", "b.png"]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failing_sync_leaves_nothing_half_done(store, monkeypatch, failing):
    with store:
        store.append(a_record("a"))
        whole, calls = (store.folder / RECORDS).read_bytes(), []

        def full(_):
            calls.append(1)
            if len(calls) == failing:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            store.append(a_record("b"), {"images/b.png": b"1"})
        monkeypatch.undo()
        assert (store.folder / RECORDS).read_bytes() == whole
        assert not list(store.folder.rglob("*.tmp"))
        store.append(a_record("b"), {"images/b.png": b"1"})
    assert names(store) == ["a", "b"]


@contextmanager
def room_for(size):
    """No file may grow beyond this: a write gets as far as it can, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_disk_that_fills_up_in_the_middle_of_a_line(store, room):
    with store:
        store.append(a_record("a"))
        whole = (store.folder / RECORDS).read_bytes()
        with room_for(len(whole) + room), pytest.raises(OSError, match="File too large"):
            store.append(a_record("b"))
        assert (store.folder / RECORDS).read_bytes() == whole
        store.append(a_record("c"))
    assert names(store) == ["a", "c"]


def test_a_disk_that_fills_up_in_the_middle_of_a_file(store):
    with store:
        store.append(a_record("a"))
        with room_for(5000), pytest.raises(OSError, match="File too large"):
            store.append(a_record("b"), {"images/b.png": bytes(100_000)})
        assert list((store.folder / "images").iterdir()) == []
    assert names(store) == ["a"]


def test_an_interruption_in_the_middle_of_a_record(store, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    with store:
        store.append(a_record("a"))
        monkeypatch.setattr(os, "fsync", interrupted)
        for files in ({}, {"images/b.png": b"1"}):
            with pytest.raises(KeyboardInterrupt):
                store.append(a_record("b"), files)
        monkeypatch.undo()
    assert names(store) == ["a"]
    assert not list(store.folder.rglob("*.tmp"))


def test_stores_of_a_folder(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SegproxError, match="there are no runs in"):
            stores(folder)
    for name in ("b", "a"):
        with Store(tmp_path / name) as store:
            store.start(RUN, {})
    (tmp_path / "c").mkdir()
    assert [store.folder.name for store in stores(tmp_path)] == ["a", "b"]
    assert [store.folder.name for store in stores(tmp_path / "a")] == ["a"]
