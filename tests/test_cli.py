"""The command line, called as a user would."""

import errno
import io
import re

import pytest
import torch

from segprox.attacks import ATTACKS, describe, make_attack, state_bytes
from segprox.cli.base import SafeConsole
from segprox.data import DATASETS
from segprox.models import held_bytes, load_model
from segprox.report.progress import progress_bar
from segprox.run.store import stores
from segprox.run.worker import Worker


def test_version(segprox):
    code, output, _ = segprox("--version")
    assert code == 0
    assert output.startswith("segprox 0.")


def test_help_teaches(segprox):
    code, output, _ = segprox("demo", "--help")
    assert code == 0
    assert all(
        option in output for option in ("--model", "--images", "--attack", "--steps", "--set", "--target", "--out")
    )


@pytest.mark.parametrize(
    ("what", "expected"),
    [("attacks", "alma-prox"), ("models", "demo-robust"), ("datasets", "cityscapes")],
)
def test_list(segprox, what, expected):
    code, output, _ = segprox("list", what)
    assert code == 0
    assert expected in output


def test_datasets_are_listed_with_layout_and_options(segprox):
    _, output, _ = segprox("list", "datasets")
    for name in DATASETS:
        assert f" {name} " in output
    for text in ("leftImg8bit", "701_StillsRaw_full", "size=short-512", "split=validation", "reduce_labels"):
        assert text in output


def test_attacks_are_listed_by_family_with_their_cost(segprox):
    _, output, _ = segprox("list", "attacks")
    minimal, fixed = output.split("Fixed-epsilon attacks")
    assert "pgd-ce-13x40" in minimal
    assert "520" in minimal
    assert "Madry et al., ICLR 2018" in " ".join(minimal.split())
    assert "segpgd" in fixed
    assert "pgd-ce-13x40" not in fixed


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alma-prox", ["lambda(0)", "auto", "CVPR 2023", "500 forwards"]),
        ("pgd-dlr-13x4x10", ["rounds", "restarts", "520 forwards", "Madry"]),
        ("bisect:sea", ["bisection over sea", "11700 forwards"]),
    ],
)
def test_an_attack_is_shown_with_fields_and_citation(segprox, name, expected):
    code, output, _ = segprox("attacks", "show", name)
    assert code == 0
    for text in expected:
        assert text in output
    assert "epsilon: the largest" not in output


def test_audit_says_where_an_attack_is_too_weak(segprox, tmp_path):
    # DAG reaches the target well within half of the range; one step does not
    arguments = ["--limit", 1, "--epsilon", "0.5", "--minimal", "dag-0.003", "--fixed", "fgsm", "--target", "building"]
    code, output, _ = segprox("audit", *arguments, "--out", tmp_path)
    assert code == 0
    assert "The attacks disagree on 1: fgsm was too weak on 1; there, believe" in " ".join(output.split())
    line = next(line.split() for line in output.splitlines() if "scene-0000" in line)
    assert line[1:3] == ["dag-0.003", "fgsm"]
    code, output, _ = segprox("runs", tmp_path)
    assert code == 0
    assert output.count(" 1/1 ") == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--fixed", "fmn"], "fmn has no field 'epsilon'"),
        (["--minimal", "pgd"], "an audit needs a minimal attack first"),
        (["--minimal", "ddn"], "an audit needs two attacks of one norm, not l2 and linf"),
        (["--epsilon", "much"], "epsilon of anneal cannot be 'much'"),
        (["--epsilon", "2/255,4/255"], "epsilon of anneal cannot be '2/255,4/255'"),
        (["--set", "epsilon=2/255"], "an audit has one epsilon for both attacks"),
        (["--set", "stepz=2"], "no attack of the audit that is given by its name has a field 'stepz'"),
        (["--target", "nowhere"], "there is no class 'nowhere'"),
    ],
)
def test_audit_refuses(segprox, arguments, sentence, tmp_path):
    code, _, error = segprox("audit", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert error.startswith(f"error: {sentence}")
    assert not (tmp_path / "out").exists()


def test_check_of_a_good_model(segprox):
    code, output, _ = segprox("check", "--model", "demo-standard", "--limit", 1)
    assert code == 0
    assert "demo-standard on 1 image of demo" in output
    assert output.count("+ green") == 11
    assert output.rstrip().endswith("Fit to be evaluated.")


@pytest.mark.parametrize(
    ("spoil", "expected_code", "mark", "sentence"),
    [
        (lambda z: z.softmax(1), 1, "x red", "Not fit to be evaluated yet: red in 1 of 11 checks."),
        (lambda z: 100 * z, 0, "! amber", "Fit to be evaluated; first look at what is amber (1)."),
    ],
)
def test_check_of_a_spoilt_model(segprox, monkeypatch, spoil, expected_code, mark, sentence):
    model = load_model("demo-standard")
    model.model.head.register_forward_hook(lambda _module, _inputs, logits: spoil(logits))
    monkeypatch.setattr("segprox.models.load_model", lambda _, bands: model)
    code, output, _ = segprox("check", "--model", "spoilt", "--limit", 1)
    assert code == expected_code
    assert mark in output
    assert output.rstrip().endswith(sentence)
    if expected_code:
        assert "all in [0, 1] and summing to 1" in " ".join(output.split())  # brackets are not eaten as markup


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "no-such"], "there is no model 'no-such'"),
        (["--model", "demo-robust", "--dataset", "no-such"], "there is no dataset 'no-such'"),
    ],
)
def test_check_refuses(segprox, arguments, sentence):
    code, _, error = segprox("check", *arguments)
    assert code == 2
    assert error.startswith(f"error: {sentence}")


def test_demo_writes_a_table_and_a_page(segprox, tmp_path):
    arguments = ("demo", "--images", 2, "--steps", 3, "--set", "step_size=1e-2", "--out", tmp_path / "new")
    code, output, _ = segprox(*arguments)
    assert code == 0
    assert "scene-0001" in output
    assert "median" in output
    assert "2 not broken" in output
    assert "index.html in a browser" in " ".join(output.split())
    (store,) = stores(tmp_path / "new" / "runs")
    records = list(store.records())
    assert [record.image for record in records] == ["scene-0000", "scene-0001"]
    assert records[0].forwards == 3
    assert 0 < records[0].found.linf < 0.1
    page = (tmp_path / "new" / "index.html").read_text()
    assert "scene-0001" in page
    assert segprox(*arguments)[0] == 0  # again: nothing is left to do
    assert len(list(store.records())) == 2


def test_demo_towards_a_target(segprox, tmp_path):
    code, output, _ = segprox("demo", "--images", 1, "--steps", 2, "--target", "road", "--out", tmp_path)
    assert code == 0
    assert "goal road" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "no-such"], "there is no model 'no-such'; names look like: demo-robust, demo-standard"),
        (["--attack", "no-such"], "there is no attack 'no-such'; known are: alma, alma-prox"),
        (["--set", "step_size=-1"], "step_size of palma cannot be '-1': Input should be greater than 0"),
        (["--set", "step_size"], "--set takes FIELD=VALUE, such as step_size=0.01, but got 'step_size'"),
        (["--steps", "0"], "steps of palma cannot be 0"),
        (["--target", "elephant"], "there is no class 'elephant'; the classes are: sky"),
        (["--images", "1000"], "the demo has 100 images but 1000 were asked for"),
        (["--out", "/dev/null/folder"], "cannot write to /dev/null/folder: Not a directory; choose another folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(segprox, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    code, _, error = segprox("demo", *arguments)
    assert code == 2
    assert error.startswith(f"error: {sentence}")
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_typing_errors_end_with_2(segprox):
    code, _, error = segprox("demo", "--images", "0")
    assert code == 2
    assert "--images" in error


def test_interruption_keeps_what_is_done(segprox, monkeypatch, tmp_path):
    work, done = Worker.work, []

    def interrupted(self, *arguments):
        if done:
            raise KeyboardInterrupt
        done.append(True)
        return work(self, *arguments)

    monkeypatch.setattr(Worker, "work", interrupted)
    code, output, _ = segprox("demo", "--steps", 2, "--out", tmp_path)
    assert code == 130
    assert "Interrupted: 1 of 4 images are done." in output
    assert "median" in output
    assert [record.image for record in stores(tmp_path / "runs")[0].records()] == ["scene-0000"]


def test_a_full_disk_is_said_after_the_table(segprox, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("segprox.report.page.write_page", full)
    code, output, error = segprox("demo", "--images", 1, "--steps", 2, "--out", tmp_path)
    assert code == 2
    assert "scene-0000" in output
    assert "No space left on device" in error


def test_memory_says_what_would_be_held(segprox):
    code, output, _ = segprox("memory", "--model", "demo-standard", "--size", "6000x8000")  # nothing is computed
    assert code == 0
    rows = {line[:16].strip(): line[16:].split() for line in output.splitlines() if "1/" in line}
    assert list(rows) == ["plain", "lean", "lean, recompute"]
    model, images = load_model("demo-standard").to("meta"), torch.empty(1, 3, 6000, 8000, device="meta")
    held = held_bytes(model, images) / 2**30
    beside = state_bytes(6000, 8000, 8) / 2**30  # two maps of logits of eight classes, and the attack
    assert rows["plain"] == [f"{held:.2f}", "1/1.0", f"{held + beside:.2f}"]
    small, share, total = rows["lean"]
    assert float(small) < held / 60
    assert float(share.removeprefix("1/")) == pytest.approx(held / float(small), rel=0.05)  # of two digits
    assert float(total) == pytest.approx(float(small) + beside, abs=0.011)


@pytest.mark.parametrize("size", ["1024", "x", "12xy", "-3x4", "1024X2048"])
def test_memory_of_no_size(segprox, size):
    code, _, errors = segprox("memory", "--model", "demo-standard", f"--size={size}")
    assert code != 0
    assert "HEIGHTxWIDTH" in errors
    assert repr(size) in errors


def test_memory_of_an_unknown_model(segprox):
    code, _, errors = segprox("memory", "--model", "demo-unknown")
    assert code != 0
    assert "demo-unknown" in errors


@pytest.mark.parametrize("name", [*ATTACKS, "bisect:pgd"])
def test_every_attack_can_be_shown(segprox, name):
    code, output, _ = segprox("attacks", "show", name)
    assert code == 0
    assert re.search(r"^ steps\s+\d+\s+N: ", output, re.MULTILINE)
    for field in describe(make_attack(name)):
        assert field.meaning, field.name
        assert not field.meaning.startswith("of "), field  # a meaning has its noun


@pytest.mark.parametrize("width", [60, 80])
def test_a_bar_is_never_unrolled_into_lines(width):
    console = SafeConsole(file=io.StringIO(), width=width)
    with progress_bar(console, "images") as bar:
        bar.add_task("all runs", total=12, completed=3)
    text = console.file.getvalue()
    assert "Bar" not in text
    assert len(text.strip().splitlines()) == 1
