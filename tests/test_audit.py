"""The cross-check of two attacks, and the worst case of several."""

import itertools
import json
import signal
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import segprox
from segprox import Audit, Results, SegproxError, make_attack
from segprox.report import agreement, mean_iou, worst_case_miou
from segprox.report.agreement import agreement_tables, agreements
from segprox.report.groups import group_runs
from segprox.report.page import write_page
from segprox.report.results import load_runs
from segprox.run.audit import audit_entries
from segprox.run.record import ImageError, Score, same
from segprox.run.store import stores
from tests.oracles import channels_as_logits
from tests.records import make_record, make_run, make_store

EPSILON = 8 / 255
FIXED = {"family": "fixed-epsilon", "attack": {"class": "Pgd", "epsilon": EPSILON}}


def error(image):
    return ImageError(version="1", key=f"key-{image}", image=image, reason="cannot read it")


def within(image, success, apsr):
    """What a fixed-epsilon attack leaves: a record at epsilon."""
    score = Score(linf=EPSILON, l2=1.0, l1=9.0, apsr=apsr, success=success)
    return make_record(image, EPSILON, success, found=score)


# One image for each way in which two attacks can end; what it means is in the tests.
MINIMAL = [
    make_record("a-both", 6 / 255), make_record("b-beyond", 9 / 255), make_record("c-minimal-missed", 12 / 255),
    make_record("d-fixed-missed", EPSILON), make_record("e-unbroken", 0.5, success=False),
    make_record("f-unbroken-missed", 0.5, success=False), error("g-unreadable"), make_record("h-error", 2 / 255),
    make_record("i-changed", 2 / 255, image_hash="before"), make_record("j-only-minimal", 2 / 255),
]  # fmt: skip
WITHIN = [
    within("a-both", True, 1.0), within("b-beyond", False, 0.75), within("c-minimal-missed", True, 0.995),
    within("d-fixed-missed", False, 0.98), within("e-unbroken", False, 0.5), within("f-unbroken-missed", True, 1.0),
    error("g-unreadable"), error("h-error"), within("i-changed", False, 0.1), within("k-only-fixed", True, 1.0),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    make_store(tmp_path, make_run("fmn"), MINIMAL)
    make_store(tmp_path, make_run("pgd"), WITHIN, FIXED)
    return tmp_path


# --- from records -----------------------------------------------------------------------------------------------------
def test_every_outcome_of_two_attacks(folder):
    audit = Audit(segprox.load_results(folder))
    both = ("minimal", "fixed")
    assert [(f.image, f.broken_by, f.too_weak, f.robust, [*f.errors]) for f in audit.findings] == [
        ("a-both", both, None, False, []),
        ("b-beyond", (), None, True, []),
        ("c-minimal-missed", ("fixed",), "minimal", False, []),
        ("d-fixed-missed", ("minimal",), "fixed", False, []),  # a norm of exactly epsilon is within epsilon
        ("e-unbroken", (), None, True, []),
        ("f-unbroken-missed", ("fixed",), "minimal", False, []),
        ("g-unreadable", (), None, False, [*both]),
        ("h-error", ("minimal",), None, False, ["fixed"]),
    ]  # i has changed between the runs, j and k were tried by one of them only
    assert audit.sentence == (
        "2 of 6 images withstood both attacks within 8.0/255. The attacks disagree on 3: fmn was too weak on 2, "
        "pgd was too weak on 1; there, believe the one that succeeded. "
        "2 images could not be attacked by both: not counted."
    )
    assert audit.rows()[3] == {
        "minimal": "fmn", "fixed": "pgd", "image": "d-fixed-missed", "epsilon": EPSILON, "norm": EPSILON, "apsr": 0.98,
        "broken_by": ["minimal"], "too_weak": "fixed", "robust": False, "masked": False,
        "errors": {},
    }  # fmt: skip
    assert audit.rows()[6]["errors"] == {"minimal": "cannot read it", "fixed": "cannot read it"}
    assert len(audit.results) == 2


@pytest.mark.parametrize(
    ("free", "reached", "apsr", "masked"),
    [
        ("fixed", 0.5, 0.75, True),  # far more damage within epsilon than along gradients at any size
        ("fixed", 0.5, 0.69, False),  # more, but a weak attack along gradients would look the same
        ("fixed", None, 0.75, False),  # gradients broke the image, though beyond epsilon
        ("minimal", 0.5, 0.75, False),  # the attack along gradients did the damage
        (None, 0.5, 0.75, False),  # both follow gradients
    ],
)
def test_far_more_damage_without_gradients_is_masking(tmp_path, free, reached, apsr, masked):
    """Neither breaks the image within epsilon; `reached` is the APSR of a minimal attack that never broke it."""
    score = Score(linf=0.5, l2=1.0, l1=9.0, apsr=reached or 1.0, success=reached is None)
    minimal = make_record("a", 0.5, reached is None, found=score, backwards=0 if free == "minimal" else 9)
    fixed = replace(within("a", False, apsr), backwards=0 if free == "fixed" else 9)
    make_store(tmp_path, make_run("palma"), [minimal])
    make_store(tmp_path, make_run("square"), [fixed], FIXED)
    audit = Audit(segprox.load_results(tmp_path))
    assert [(finding.robust, finding.masked) for finding in audit.findings] == [(True, masked)]
    verdict = (
        "Gradients are masked on a: square, which asks for no gradient, found what palma missed. Unless palma finds it "
        "with more steps, its figures say little about this model."
    )
    ending = verdict if masked else "The attacks agree on all of them."
    assert audit.sentence == f"1 of 1 images withstood both attacks within 8.0/255. {ending}"


def test_the_table_as_text_and_as_html(folder):
    audit = Audit(segprox.load_results(folder))
    lines = [line.split() for line in str(audit).splitlines()]
    assert str(audit).startswith("fmn and pgd within 8.0/255: m · d · untargeted\n")
    assert ["c-minimal-missed", "pgd", "fmn", "12.00", "99.50%"] in lines
    assert ["e-unbroken", "neither", "-", "-", "50.00%"] in lines
    assert ["g-unreadable", "fmn:", "error,", "pgd:", "error", "-", "-", "-"] in lines
    assert ["h-error", "fmn,", "pgd:", "error", "-", "2.00", "-"] in lines
    assert "h-error could not be attacked by pgd: cannot read it" in str(audit)
    html = audit._repr_html_()
    assert '<td style="text-align:left">d-fixed-missed</td><td style="text-align:left">fmn</td>' in html
    assert "g-unreadable could not be attacked by fmn: cannot read it" in html


def test_attacks_that_agree(tmp_path):
    make_store(tmp_path, make_run("fmn"), MINIMAL[:2])
    make_store(tmp_path, make_run("pgd"), WITHIN[:2], FIXED)
    sentence = Audit(segprox.load_results(tmp_path)).sentence
    assert sentence == "1 of 2 images withstood both attacks within 8.0/255. The attacks agree on all of them."


def test_nothing_to_compare(tmp_path):
    make_store(tmp_path, make_run("fmn"), [error("g")])
    make_store(tmp_path, make_run("pgd"), [error("g")], FIXED)
    audit = Audit(segprox.load_results(tmp_path))
    assert audit.sentence == (
        "0 of 0 images withstood both attacks within 8.0/255. 1 image could not be attacked by both: not counted."
    )
    assert agreement_tables(group_runs(audit.results)) == []


def test_an_audit_is_of_two_runs(folder):
    make_store(folder, make_run("ddn"), MINIMAL)
    loaded = segprox.load_results(folder)
    for runs in (loaded, loaded[:1], [*loaded.only(attack="fmn"), *loaded.only(attack="ddn")], []):
        with pytest.raises(SegproxError, match="an audit needs two runs, a minimal and a fixed-epsilon attack in one"):
            Audit(Results(runs))


# --- on the page ------------------------------------------------------------------------------------------------------
def test_every_pair_of_a_group_is_compared(folder):
    make_store(folder, make_run("ddn"), MINIMAL[:2])
    make_store(folder, make_run("fmn", model="other"), MINIMAL[:1])
    make_store(folder, make_run("fmn", set={"norm": "l2"}), MINIMAL, {"norm": "l2"})
    groups = group_runs(load_runs([folder]))
    pairs = [(pair.group.title, pair.minimal, pair.fixed) for pair in agreements(groups)]
    assert pairs == [("m · d · untargeted", "ddn", "pgd"), ("m · d · untargeted", "fmn", "pgd")]


class Cells(HTMLParser):
    """The text of the cells of each table of the section on agreement."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.inside = [], False
        start = text.find('<section id="agreement">')
        self.feed(text[start : text.index("</section>", start)] if start >= 0 else "")

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.tables[-1][-1][-1] += data


def section(folder):
    text = write_page(load_runs([folder]), folder / "page.html").path.read_text(encoding="utf-8")
    return text, Cells(text).tables


def test_the_page_counts_and_lists_disagreements_only(folder):
    _, (counts, rows) = section(folder)
    assert counts == [
        ["Minimal", "Fixed-epsilon", "Epsilon, linf \u00d7 255", "Images", "Neither broke", "Both broke",
         "Only the minimal", "Only the fixed"],
        ["fmn", "pgd", "8.00", "6", "2", "1", "1", "2"],
    ]  # fmt: skip
    assert rows == [
        [
            "Image",
            "Broken by",
            "Too weak",
            "Epsilon, linf \u00d7 255",
            "Smallest, linf \u00d7 255",
            "APSR within epsilon",
        ],
        ["c-minimal-missed", "pgd", "fmn", "8.00", "12.00", "99.50%"],
        ["d-fixed-missed", "fmn", "pgd", "8.00", "8.00", "98.00%"],
        ["f-unbroken-missed", "pgd", "fmn", "8.00", "-", "100.00%"],
    ]


def test_the_page_says_nothing_without_two_families(tmp_path):
    make_store(tmp_path, make_run("fmn"), MINIMAL)
    make_store(tmp_path, make_run("ddn"), MINIMAL)
    text, tables = section(tmp_path)
    assert tables == []
    assert "Do the attacks agree?" not in text


def test_the_page_names_groups_and_stops_somewhere(folder, monkeypatch):
    make_store(folder, make_run("fmn", model="<b>other"), MINIMAL[:1])
    make_store(folder, make_run("pgd", model="<b>other"), WITHIN[:1], FIXED)
    monkeypatch.setattr(agreement, "SHOWN", 2)
    text, (counts, rows) = section(folder)
    assert [row[0] for row in counts] == ["On", "<b>other · d · untargeted", "m · d · untargeted"]
    assert [row[:2] for row in rows[1:]] == [
        ["m · d · untargeted", name] for name in ("c-minimal-missed", "d-fixed-missed")
    ]
    assert "The first 2 of 3: segprox audit lists all of a pair." in text
    assert "<b>other" not in text


# --- what is run ------------------------------------------------------------------------------------------------------
def test_fields_go_to_the_attacks_that_have_them():
    first, second = audit_entries("fmn", "pgd", "4/255", {"steps": 7, "restarts": 2})
    assert first.set == {"steps": 7}
    assert second.set == {"steps": 7, "restarts": 2, "epsilon": "4/255"}


def test_attacks_that_are_made_already_keep_their_fields_but_epsilon():
    made = make_attack("palma", steps=9), make_attack("pgd", epsilon="1/255", steps=6)
    first, second = audit_entries(*made, EPSILON, {})
    assert first.make() == made[0]
    assert second.make() == make_attack("pgd", epsilon=EPSILON, steps=6)


@pytest.mark.parametrize(
    ("minimal", "fixed", "fields", "sentence"),
    [
        ("pgd", "anneal", {}, "an audit needs a minimal attack first, such as palma"),
        ("palma", "fmn", {}, "fmn has no field 'epsilon'"),
        ("ddn", "anneal", {}, "an audit needs two attacks of one norm, not l2 and linf"),
        ("palma", "pgd", {"stepz": 3}, "no attack of the audit that is given by its name has a field 'stepz'; the"),
        (make_attack("palma"), make_attack("pgd"), {"steps": 3}, "no attack of the audit .* a field 'steps'$"),
        ("palma", "pgd", {"epsilon": 1}, "an audit has one epsilon for both attacks"),
    ],
)
def test_refusals(minimal, fixed, fields, sentence):
    with pytest.raises(SegproxError, match=f"^{sentence}"):
        audit_entries(minimal, fixed, EPSILON, fields)


@pytest.mark.parametrize(
    ("minimal", "fixed", "epsilon", "robust", "too_weak"),
    [
        ({}, {}, "10/255", False, None),
        ({}, {}, "1/255", True, None),
        ({"steps": 2}, {}, "10/255", False, "minimal"),
        ({}, {"steps": 1}, "10/255", False, "fixed"),
        ({"steps": 2}, {"steps": 1}, "10/255", True, None),  # both too weak: nobody notices
    ],
)
def test_disagreement_names_the_weaker_attack(minimal, fixed, epsilon, robust, too_weak):
    image = 0.5 + 0.06 * (torch.rand(4, 16, 16, generator=torch.Generator().manual_seed(0)) - 0.5)
    model = channels_as_logits(4)
    attacks = make_attack("fmn", **minimal), make_attack("pgd", **fixed)
    data = [(image, model(image[None]).argmax(1)[0])]
    (found,) = segprox.audit(model, data, *attacks, epsilon=epsilon, progress=False).findings
    assert found.robust is robust
    assert found.too_weak == too_weak
    assert found.epsilon == pytest.approx(float(epsilon.split("/")[0]) / 255)


def test_only_the_images_that_are_asked_for(tmp_path):
    what = {"epsilon": "8/255", "steps": 2, "out": tmp_path, "save": (), "progress": False}
    segprox.audit("demo-standard", "demo", "fmn", "pgd", limit=2, **what)
    audit = segprox.audit("demo-standard", "demo", "fmn", "pgd", limit=1, **what)
    assert [finding.image for finding in audit.findings] == ["scene-0000"]
    assert len(segprox.load_results(tmp_path).rows()) == 4


# --- the command line -------------------------------------------------------------------------------------------------
def test_an_image_that_cannot_be_read_is_shown(segprox_cli, tmp_path):
    for image in ("a", "b"):
        (tmp_path / f"{image}.png").write_bytes(b"no picture")
    arguments = ["--dataset", f"images:{tmp_path}", "--minimal", "fmn", "--fixed", "pgd", "--steps", 2]
    code, output, _ = segprox_cli("audit", *arguments, "--out", tmp_path / "out")
    assert code == 1
    said = " ".join(output.split())
    assert "fmn: error, pgd: error" in said
    assert "2 images could not be attacked by both: not counted." in said


def test_an_audit_that_is_killed_goes_on(segprox_cli, tmp_path):
    """Killed in its second run: the first and what the second has are kept, and what comes out is what would have."""
    arguments = ["audit", "--model", "demo-standard", "--minimal", "fmn", "--fixed", "pgd", "--epsilon", "32/255"]
    arguments += ["--steps", "10", "--limit", "4", "--log", "json", "--out"]
    command = [sys.executable, "-m", "segprox", *arguments, tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(5):
            assert json.loads(process.stdout.readline())["event"] == "image"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    before = {store.run.attack.name: [*store.records()] for store in stores(tmp_path / "out")}
    assert len(before["fmn"]) == 4
    assert 0 < len(before["pgd"]) < 4
    found = {}
    for out in ("out", "whole"):
        code, output, _ = segprox_cli(*arguments, tmp_path / out)
        assert code == 0
        found[out] = [json.loads(line) for line in output.splitlines()]
    attacked = [event["image"] for event in found["out"] if event["event"] == "image"]
    assert attacked == [f"scene-000{k}" for k in range(len(before["pgd"]), 4)]
    findings = {out: [event for event in found[out] if event["event"] == "finding"] for out in found}
    assert findings["out"] == findings["whole"]
    assert [row["too_weak"] for row in findings["out"]] == [None, "fixed", None, "fixed"]
    for resumed, whole in zip(stores(tmp_path / "out"), stores(tmp_path / "whole"), strict=True):
        assert [*resumed.records()][: len(before[whole.run.attack.name])] == before[whole.run.attack.name]
        assert all(same(*pair) for pair in zip(resumed.records(), whole.records(), strict=True))


# --- the worst case of several attacks --------------------------------------------------------------------------------
def random_counts(seed, attacks=3, images=5, classes=4):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50, (3, attacks, images, classes))


@pytest.mark.parametrize("seed", range(20))
def test_worst_case_is_no_better_than_any_attack_and_close_to_the_best_choice(seed):
    counts = random_counts(seed)
    found, chosen = worst_case_miou(*counts)
    everything = np.arange(5)
    assert found == pytest.approx(mean_iou(*counts[:, chosen, everything]))
    assert all(found <= mean_iou(*counts[:, a]) + 1e-12 for a in range(3))
    best = min(mean_iou(*counts[:, list(choice), everything]) for choice in itertools.product(range(3), repeat=5))
    assert best - 1e-12 <= found <= best + 0.01


def test_mean_iou_leaves_out_classes_that_never_occur():
    tp, fp, fn = np.array([[3, 0, 1]]), np.array([[1, 0, 0]]), np.array([[0, 0, 1]])
    assert mean_iou(tp, fp, fn) == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert np.isnan(mean_iou(*np.zeros((3, 1, 2), dtype=int)))
