import base64
import hashlib
import json
import re
import zipfile
from html.parser import HTMLParser

import pytest

from segprox.report.findings import statements, verdicts
from segprox.report.groups import group_runs
from segprox.report.page import write_page
from segprox.report.requirements import Judged, conclude, judge_all, read_requirements
from segprox.report.results import load_runs
from segprox.report.statistics import Interval
from segprox.run.record import ClassCounts, ImageError, Record, Score
from tests.records import HEADER, scene_record, write_run

HOSTILE = ("<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "<!--<script>", "\"'&{{ 7*7 }}")


class Elements(HTMLParser):
    """All elements with their attributes, and what is inside scripts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts = [], {}
        self.inside = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.inside = dict(attrs).get("id", "code")
            self.scripts[self.inside] = ""

    def handle_endtag(self, tag):
        self.inside = None if tag == "script" else self.inside

    def handle_data(self, data):
        if self.inside:
            self.scripts[self.inside] += data

    @property
    def data(self):
        return json.loads(self.scripts["data"])


def page(folder, **options):
    info = write_page(load_runs([folder]), folder / "page.html", **options)
    text = info.path.read_text(encoding="utf-8")
    assert info.bytes == info.path.stat().st_size
    return info, text, Elements(text)


def two_attacks(folder, **options):
    write_run(folder, [scene_record(f"i{k}", 0.01 * (k + 1)) for k in range(4)], attack="fmn", **options)
    write_run(folder, [scene_record(f"i{k}", 0.02 * (k + 1), k < 3) for k in range(4)], attack="ddn", **options)


def test_page(tmp_path):
    two_attacks(tmp_path, previews=True)
    info, text, elements = page(tmp_path)
    assert info.images == 8
    assert not list(tmp_path.glob(".*.tmp"))
    assert [len(run["records"]) for run in elements.data["runs"]] == [4, 4]
    assert elements.data["runs"][0]["records"][0]["pictures"]
    pictures = json.loads(elements.scripts["p-1-3"])
    assert set(pictures) == {"image", "adversarial", "perturbation", "label", "clean", "prediction"}
    kind, content = pictures["image"].split(",")
    assert kind == "data:image/webp;base64"
    assert base64.b64decode(content)[:4] == b"RIFF"
    assert info.beside == 0
    assert not (tmp_path / "pictures").exists()  # the page is one file
    assert "How robust is net?" in text
    assert "2026-03-01" in text


def test_same_records_same_page(tmp_path):
    two_attacks(tmp_path, previews=True)
    assert page(tmp_path)[1] == page(tmp_path)[1]


def test_nothing_from_outside(tmp_path):
    two_attacks(tmp_path, previews=True)
    _, text, elements = page(tmp_path)
    for tag, attributes in elements.found:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert not attributes.get("src")
        assert attributes.get("href", "#").startswith("#")
        assert "style" not in attributes  # the policy would refuse it
        assert not [name for name in attributes if name.startswith("on")]
    assert set(re.findall(r"https?://[^\"\s]+", text)) == {"http://www.w3.org/2000/svg"}


def policy(elements):
    return next(a["content"] for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")


def test_policy_names_exactly_our_code(tmp_path):
    two_attacks(tmp_path)
    _, text, elements = page(tmp_path)
    assert policy(elements).startswith("default-src 'none'")
    assert "unsafe" not in policy(elements)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    for directive, code in (("style-src", style), ("script-src", elements.scripts["code"])):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy(elements)


def test_names_stay_names(tmp_path):
    header = HEADER | {"classes": [*HOSTILE[:3]], "environment": {"host": HOSTILE[0]}}
    records = [scene_record(name, 0.01) for name in HOSTILE]
    errors = [ImageError(version="1", key="k", image=f"{HOSTILE[0]}!", reason=HOSTILE[1])]
    write_run(tmp_path, [*records, *errors], model=HOSTILE[0], goal=HOSTILE[1], header=header)
    _, text, elements = page(tmp_path)
    assert sorted(record["image"] for record in elements.data["runs"][0]["records"]) == sorted(HOSTILE)
    assert elements.data["runs"][0]["classes"] == list(HOSTILE[:3])
    assert not [attributes for tag, attributes in elements.found if "onerror" in attributes]
    assert len(elements.scripts) == 2  # data and code
    assert "alert(1)" in text


def test_more_pictures_than_a_page_should_hold_are_beside_it(tmp_path):
    two_attacks(tmp_path, previews=True)
    whole = page(tmp_path)
    info, text, elements = page(tmp_path, embedded=1000)
    assert info.images == whole[0].images == 8
    assert "base64," not in text
    assert "from the folder pictures beside this page" in text
    assert "img-src data: 'self' file:;" in policy(elements)
    assert "img-src data:;" in policy(whole[2])
    files = [path for path in (tmp_path / "pictures").rglob("*") if path.is_file()]
    assert info.beside == sum(path.stat().st_size for path in files)
    for name in ("p-0-0", "p-1-3"):
        for part, source in json.loads(elements.scripts[name]).items():
            embedded = json.loads(whole[2].scripts[name])[part].split(",")[1]
            assert (tmp_path / source).read_bytes() == base64.b64decode(embedded)


def test_of_too_many_records_the_worst_of_each_run_have_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr("segprox.report.pictures.PICTURED", 4)
    two_attacks(tmp_path, previews=True)
    info, text, elements = page(tmp_path)
    assert info.images == 4
    assert [[record["pictures"] for record in run["records"]] for run in elements.data["runs"]] == [
        [True, True, False, False]
    ] * 2
    assert "Of 8 records with pictures 4 show them, the worst of each run." in text


def test_curves_are_of_all_records_where_few_are_listed(tmp_path, monkeypatch):
    two_attacks(tmp_path)
    whole = page(tmp_path)[2].data
    monkeypatch.setattr("segprox.report.page.RECORD_LIMIT", 4)
    _, text, elements = page(tmp_path)
    assert "Of 8 records 4 are listed" in text
    assert [run["curves"] for run in elements.data["runs"]] == [run["curves"] for run in whole["runs"]]
    ddn = next(run for run in elements.data["runs"] if run["attack"] == "ddn")
    assert ddn["curves"]["broken"] == [pytest.approx([0, 5.1, 10.2, 15.3]), [1, 0.75, 0.5, 0.25]]


def test_unreadable_previews(tmp_path):
    folder = write_run(tmp_path, [scene_record(f"i{k}", 0.01) for k in range(5)], previews=True)
    (folder / "previews/0.zip").unlink()
    (folder / "previews/1.zip").write_bytes(b"not a zip")
    outside = tmp_path / "outside.zip"
    outside.write_bytes((folder / "previews/2.zip").read_bytes())
    (folder / "previews/2.zip").unlink()
    (folder / "previews/2.zip").symlink_to(outside)
    with zipfile.ZipFile(folder / "previews/4.zip", "w", zipfile.ZIP_DEFLATED) as archive:  # it would fill the memory
        archive.writestr("image.webp", bytes(10**8))
    info, text, _ = page(tmp_path)
    assert info.images == 1
    assert "4 previews could not be read" in text


BARE = {"started": None, "classes": []}
DEGENERATE = {
    "no previews": (
        [scene_record(f"i{k}", 0.01) for k in range(3)],
        HEADER,
        "No pictures were kept of these runs",
    ),
    "no success": (
        [scene_record(f"i{k}", 0.01, False) for k in range(3)],
        HEADER,
        "No image is broken by the attacks that were run.",
    ),
    "one image": ([scene_record("one", 0.01)], HEADER, "The image was broken"),
    "no classes": ([scene_record("one", 0.01)], BARE, "1 of 1 broken"),
    "errors only": ([ImageError(version="1", key="k", image="a", reason="no such file")], HEADER, "no such file"),
    "nothing": ([], {}, "No image was attacked"),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_runs(case, tmp_path):
    entries, header, said = DEGENERATE[case]
    write_run(tmp_path, entries, header=header)
    _, text, elements = page(tmp_path)
    assert said in text
    assert len(elements.data["runs"]) == 1


def test_no_runs_at_all(tmp_path):
    info = write_page([], tmp_path / "new" / "page.html")
    assert "No results" in info.path.read_text()


def test_table_marks_the_strongest_attack(tmp_path):
    two_attacks(tmp_path)
    _, text, _ = page(tmp_path)
    rows = dict(re.findall(r"<th scope=\"row\"[^>]*>(\w+)</th>(.*?)</tr>", text, re.DOTALL))
    strongest = 'best" data-column="Median"'
    assert [name for name in rows if strongest in rows[name]] == ["fmn"]
    assert "90.0 → 5.0" in rows["fmn"]
    assert "75%" in rows["ddn"]


def test_nothing_is_strongest_on_other_images(tmp_path):
    write_run(tmp_path, [scene_record("a", 0.01), scene_record("b", 0.01)], attack="fmn")
    write_run(tmp_path, [scene_record("a", 0.02)], attack="ddn")
    _, text, _ = page(tmp_path)
    assert 'number best"' not in text
    assert "Not all attacks have seen the same images yet" in text


def test_accuracy_falls_with_epsilon_by_whatever_fits(tmp_path):
    write_run(tmp_path, [scene_record("a", 0.01), scene_record("b", 0.01), scene_record("c", 0.02, False)])
    epsilon, accuracy = page(tmp_path)[2].data["runs"][0]["curves"]["accuracy"]
    assert epsilon == pytest.approx([0, 2.55, 5.1])
    assert accuracy == pytest.approx([0.9, (90 + 5 + 5) / 300, (60 + 5 + 5) / 300], rel=1e-4)


def test_curves_over_queries_only_where_they_were_recorded(tmp_path):
    traces = [[(3, 0.04), (9, 0.02)], [(5, 0.02)], []]
    records = [scene_record(f"i{k}", 0.02, k < 2, trace=trace) for k, trace in enumerate(traces)]
    write_run(tmp_path, records, attack="fmn")
    write_run(tmp_path, [*records[:1], scene_record("i1", 0.02)], attack="ddn")
    ddn, fmn = sorted(page(tmp_path)[2].data["runs"], key=lambda run: run["attack"])
    assert fmn["curves"]["anytime"] == [[0, 3, 5, 9, 119], pytest.approx([255, 255, 10.2, 5.1, 5.1])]
    assert "anytime" not in ddn["curves"]


def test_norms_are_never_mixed(tmp_path):
    write_run(tmp_path, [scene_record("a", 0.01)], attack="fmn")
    write_run(
        tmp_path,
        [scene_record("a", 0.01), scene_record("b", 0.01, False)],
        attack="ddn",
        header=HEADER | {"norm": "l2"},
    )
    _, text, elements = page(tmp_path)
    assert text.count('aria-label="Table: Smallest changes that break an image, in ') == 2
    assert "in linf \u00d7 255</h3>" in text
    assert "in l2</h3>" in text
    assert 'number best"' not in text
    assert {run["norm"]: run["records"][0]["size"] for run in elements.data["runs"]} == {"linf": 2.55, "l2": 1.0}
    assert "The attacks have no" not in text
    texts, found = said(tmp_path)
    assert "Sizes are in linf and l2, each attack in the norm it minimises: they are never compared." in texts
    assert [verdict.sentence for verdict in found] == [
        "The image breaks under a change of at most 2.6/255 of the brightness range.",
        "Half of the images break under a change of at most 1.0 in l2.",
    ]


def said(folder):
    groups = group_runs(load_runs([folder]))
    return [statement.text for statement in statements(groups)], verdicts(groups)


def test_models_are_compared_on_the_same_images(tmp_path):
    write_run(tmp_path, [scene_record(f"i{k}", 0.01) for k in range(8)], model="weak")
    write_run(tmp_path, [scene_record(f"i{k}", 0.03) for k in range(1, 10)], model="strong")
    texts, found = said(tmp_path)
    assert (
        "strong is more robust than weak: on the same 7 images, breaking it takes a change typically 3.0 times as "
        "large, and it needs the larger change on 7 of 7 (sign test, p = 0.016)." in texts
    )
    assert {v.group.model: v.half for v in found} == {"weak": 0.01, "strong": 0.03}


def test_models_without_common_images_are_not_compared(tmp_path):
    write_run(tmp_path, [scene_record("a", 0.01)], model="one")
    write_run(tmp_path, [scene_record("b", 0.01)], model="two")
    assert any("cannot be compared" in text for text in said(tmp_path)[0])


def test_equal_models(tmp_path):
    for model in ("one", "two"):
        write_run(tmp_path, [scene_record("a", 0.01)], model=model)
    assert any(
        text.startswith("No difference in robustness is shown between one and two") for text in said(tmp_path)[0]
    )


@pytest.mark.parametrize(("images", "models", "shown"), [(5, 2, False), (6, 2, True), (6, 3, False), (7, 3, True)])
def test_more_robust_only_where_the_paired_test_supports_it(images, models, shown, tmp_path):
    """The p-value of n wins of n is 2 / 2 ** n: 0.0625, 0.03125, 0.015625; two comparisons share the level of 0.05."""
    for model in range(models):
        records = [scene_record(f"i{k}", 0.01 * (model + 1)) for k in range(images)]
        write_run(tmp_path, records, model=f"m{model}")
    texts = said(tmp_path)[0]
    assert sum("is more robust than" in text for text in texts) == (models - 1 if shown else 0)
    assert sum("No difference in robustness" in text for text in texts) == (0 if shown else models - 1)


def fixed(epsilon):
    return HEADER | {"family": "fixed-epsilon", "attack": {"class": "Pgd", "epsilon": epsilon}}


def write_fixed(folder, epsilons, images=4, **options):
    """Runs of pgd that leave the less the larger epsilon is, at 100 / 255 nothing."""
    for epsilon in epsilons:
        left = ClassCounts([round(50 * (1 - epsilon)), 0, 0], [0, 0, 50], [50 - round(50 * (1 - epsilon)), 50, 0])
        records = [
            scene_record(f"i{k}", epsilon * 0.9, False, counts=left, accuracy=left.tp[0] / 100) for k in range(images)
        ]
        write_run(folder, records, attack="pgd", fields={"epsilon": epsilon}, header=fixed(epsilon), **options)


def test_fixed_epsilon_attacks_are_in_their_own_terms(tmp_path):
    write_run(tmp_path, [scene_record(f"i{k}", 0.01) for k in range(4)], attack="fmn")
    write_fixed(tmp_path, (0.4, 0.1, 0.2))
    _, text, elements = page(tmp_path)
    own = text[text.index("<h3>What is left within epsilon") : text.index('<section id="curves">')]
    assert "Median" not in own
    assert re.findall(r'data-column="Epsilon"[^>]*>([^<]+)<', own) == ["25.5", "51.0", "102"]  # by growing epsilon
    assert re.findall(r'data-column="Accuracy"[^>]*>([^<]+)<', own) == ["90.0 → 45.0", "90.0 → 40.0", "90.0 → 30.0"]
    assert re.findall(r'<th scope="row">(.+)</th>', own) == ["pgd"] * 3
    minimal = text[text.index("<h3>Smallest changes") : text.index("<h3>What is left within epsilon")]
    assert re.findall(r'<th scope="row">(.+)</th>', minimal) == ["fmn"]
    runs = {run["attack"]: run for run in elements.data["runs"]}
    assert [runs[f"pgd epsilon={e}"]["series"] for e in (0.1, 0.2, 0.4)] == ["pgd"] * 3
    assert runs["pgd epsilon=0.2"]["curves"] == {
        "accuracy": [[0, 51.0], [0.9, 0.4]],
        "miou": [[0, 51.0], [pytest.approx(0.81667, rel=1e-4), pytest.approx(0.26667, rel=1e-4)]],
    }
    assert runs["fmn"]["epsilon"] is None
    assert [run["attack"] for run in elements.data["runs"] if run["strongest"]] == ["fmn"]
    texts, (verdict,) = said(tmp_path)
    assert (
        "pgd was run within 25.5/255, 51.0/255 and 102/255: it tells what is left of the model there, not how small a "
        "change suffices." in texts
    )
    assert verdict.figure == ("2.6", "/255")


def test_only_fixed_epsilon_attacks(tmp_path):
    write_fixed(tmp_path, (0.1, 0.2))
    text = page(tmp_path)[1]
    assert "255/255" not in text
    (verdict,) = said(tmp_path)[1]
    assert verdict.figure == ("40%", " right at 51.0/255")
    assert verdict.sentence == (
        "An attacker who may change 51.0/255 leaves 40.0% of the pixels right. How small a change suffices was not "
        "looked for."
    )


def test_fixed_epsilon_attacks_compare_models_by_what_is_left(tmp_path):
    write_fixed(tmp_path, (0.1,), images=6, model="one")
    records = [scene_record(f"i{k}", 0.05, False, accuracy=0.2) for k in range(6)]
    write_run(tmp_path, records, attack="pgd", fields={"epsilon": 0.1}, header=fixed(0.1), model="two")
    assert (
        "one is more robust than two: on the same 6 images, it keeps more pixels right within the same epsilon on 6 of "
        "6 (sign test, p = 0.031)." in said(tmp_path)[0]
    )


def test_unbroken_is_not_unharmed(tmp_path):
    held = Score(linf=2.9 / 255, l2=1, l1=1, apsr=0.976, success=False)
    write_run(tmp_path, [scene_record("a", 2.9 / 255, False, found=held, accuracy=0.024), scene_record("b", 0.01)])
    _, text, elements = page(tmp_path)
    assert re.findall(r'data-column="Unbroken"[^>]*>([^<]+)<', text) == ["97.6% at 2.9"]
    assert (
        "On the image that is not broken, 97.6% of the pixels became wrong at 2.9/255, and 2.4% stayed right." in text
    )
    assert "withstood" not in text
    assert elements.data["runs"][0]["records"][0]["accuracy"] == 0.024


def test_requirements_come_first(tmp_path):
    two_attacks(tmp_path)
    groups = group_runs(load_runs([tmp_path]))
    wanted = read_requirements([{"withstand": "1/255", "share": 0.1}, {"accuracy": 0.5, "epsilon": "64/255"}])
    info = write_page(load_runs([tmp_path]), tmp_path / "p.html", judged=judge_all(wanted, groups))
    text = info.path.read_text()
    assert "<h2>1 of 2 requirements failed.</h2>" in text
    assert text.index('id="requirements"') < text.index('class="cards"')
    assert re.findall(r'class="outcome ([\w-]+)">([^<]+)<', text) == [("pass", "pass"), ("fail", "fail")]
    assert "<b>100.0 %</b> (51.0 to 100.0)" in text  # Wilson's interval of 4 of 4
    assert "<b>5.0 %</b> (5.0 to 5.0)" in text
    assert 'id="requirements"' not in page(tmp_path)[1]


@pytest.mark.parametrize(
    ("outcomes", "sentence"),
    [
        ("p", "The requirement is met."),
        ("pp", "All 2 requirements are met."),
        ("pf", "1 of 2 requirements failed."),
        ("pff?", "2 of 4 requirements failed; 1 of 4 cannot be decided with so few images."),
        ("p?", "1 of 2 cannot be decided with so few images; no requirement failed."),
    ],
)
def test_conclusion(outcomes, sentence):
    intervals = {"p": Interval(0.6, 0.8), "f": Interval(0.1, 0.2), "?": Interval(0.4, 0.6)}
    judged = [Judged("r", "w", 0.5, 0.5, intervals[outcome], 9) for outcome in outcomes]
    assert conclude(judged)[1] == sentence


def test_short_names(tmp_path):
    names = ("hub:long/first?name=A", "hub:long/second?name=B", "hub:long/third?name=B")
    for model in names:
        write_run(tmp_path, [scene_record("a", 0.01)], model=model)
    elements = page(tmp_path)[2]
    # a name that two models share tells nothing
    assert {run["model"] for run in elements.data["runs"]} == {"A", *names[1:]}
    (tmp_path / "one").mkdir()
    write_run(tmp_path / "one", [scene_record("a", 0.01)], model=names[0])
    assert "<h1>How robust is A?</h1>" in page(tmp_path / "one")[1]


def test_provenance_says_once_what_all_runs_share(tmp_path):
    two_attacks(tmp_path)
    text = page(tmp_path)[1]
    own = text[text.index('<section id="provenance">') : text.index("</main>")]
    assert own.count("<dd>net</dd>") == 1
    assert [own.count(f"<dd>{name}</dd>") for name in ("fmn", "ddn")] == [1, 1]


def test_attacks_are_ranked(tmp_path):
    two_attacks(tmp_path)
    texts, (verdict,) = said(tmp_path)
    assert verdict.statements == ("fmn has the smallest median, 5.1/255; ddn has 10.2/255.",)
    assert any(text.startswith("ddn missed 1 of 4 images that another attack broke: there") for text in texts)
    assert "Every one of the 4 images was broken by at least one attack." in texts


def test_fixed_epsilon_attacks_are_judged_within_epsilon(tmp_path):
    write_run(tmp_path, [scene_record(f"i{k}", (k + 1) * 6 / 255) for k in range(4)], attack="fmn")
    write_run(tmp_path, [scene_record(f"i{k}", 8 / 255, False) for k in range(4)], attack="pgd", header=fixed(8 / 255))
    texts, (verdict,) = said(tmp_path)
    assert any(text.startswith("pgd was run within 8.0/255: it tells what is left") for text in texts)
    assert any(
        text.startswith("pgd missed 1 of 1 image that another attack broke with at most 8.0/255") for text in texts
    )
    assert verdict.statements == ("Only fmn looked for the smallest change: another attack may find smaller ones.",)


def test_unknown_attacks_are_shown(tmp_path):
    write_run(tmp_path, [scene_record("a", 0.01)], attack="of-tomorrow")
    assert "of-tomorrow" in page(tmp_path)[1]


def test_wrong_without_a_change(tmp_path):
    write_run(tmp_path, [scene_record("a", 0.0)])
    assert "the model is wrong already" in said(tmp_path)[1][0].sentence


def test_half_is_not_between_broken_and_not_broken(tmp_path):
    write_run(tmp_path, [scene_record("a", 0.01), scene_record("b", 0.02, False)])
    assert said(tmp_path)[1][0].half == 0.01


def test_caveats(tmp_path):
    held = Score(linf=0.01, l2=1, l1=1, apsr=0.5, success=False)
    records = [scene_record("a", 0.01, labels="model", rounded=held), scene_record("b", 0.01, labels="model")]
    error = ImageError(version="1", key="k", image="c", reason="unreadable")
    write_run(tmp_path, [*records, error])
    texts = " ".join(said(tmp_path)[0])
    assert "undoes 1 of 2 successful attacks" in texts
    assert "the model's own predictions" in texts
    assert "1 image could not be attacked" in texts


def test_runs_of_one_attack_are_told_apart(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, [scene_record("a", 0.01)], seed=seed)
    other = tmp_path / "again"
    write_run(other, [scene_record("a", 0.01)], seed=1)
    results = load_runs([tmp_path, other])
    data = Elements(write_page(results, tmp_path / "p.html").path.read_text()).data
    names = {run["attack"] for run in data["runs"]}
    assert names == {"fmn seed=0", f"fmn seed=1 ({tmp_path.name})", "fmn seed=1 (again)"}
    assert len({run["id"] for run in data["runs"]}) == 3


def test_unknown_numbers_are_empty(tmp_path):
    write_run(tmp_path, [scene_record("a", 0.01, seconds=1.0)])
    (run,) = load_runs([tmp_path])
    broken = Record(**{**vars(run.records[0]), "accuracy": float("nan")})
    object.__setattr__(run, "records", (broken,))
    data = Elements(write_page([run], tmp_path / "p.html").path.read_text()).data
    assert data["runs"][0]["records"][0]["accuracy"] is None
