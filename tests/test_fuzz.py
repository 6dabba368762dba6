"""Whatever is written where people write, or left of a damaged file: it is understood, or refused in one sentence."""

import contextlib
import io
import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from segprox import SegproxError, load_dataset, make_attack
from segprox.data import make_goal
from segprox.data.files import read_image, read_index
from segprox.models import build_model, model_options
from segprox.models.checkpoint import load_weights, read_checkpoint
from segprox.naming import Name
from segprox.report.requirements import read_requirements
from segprox.run.plan import Spec, check_runs
from segprox.run.record import to_line
from segprox.run.store import HEADER, RECORDS, Store
from segprox.text import read_yaml
from tests.records import make_record, make_run

few = settings(max_examples=60)
WORDS = (
    r"0 1 -1 9 99999999999 1e999 nan inf -inf 0x0 8x8 short-4 long-4 native true false auto random cpu cuda meta , : ; "
    r"/ 1/0 2/255 car sky,car rest none ~x [/x] palma pgd . .. x.png png: erase: permute: 1,2,0"
)
words = st.sampled_from([*WORDS.split(), "\0", "\x1b[2J", "\u03bb", "\u0663"])
values = words | st.text(max_size=8) | st.integers().map(str)


def options(known):
    """Options after the ? of a name, most of them known."""
    pairs = st.tuples(st.sampled_from(known) | st.text(max_size=5), values)
    return st.lists(pairs, max_size=3).map(lambda some: "&".join(f"{option}={value}" for option, value in some))


def refused_at_most():
    """Nothing but a refusal may be raised, and that is one sentence."""
    return contextlib.suppress(SegproxError)


MODEL_OPTIONS = [*vars(model_options("demo-standard"))]


@few
@given(options(MODEL_OPTIONS))
@example("resize=1x1x1")
@example("mean=,")
def test_models(text):
    name = f"demo-standard?{text}"
    with refused_at_most():
        build_model(name, model_options(name)).described()


@few
@given(options(["split", "length", "seed", "root"]))
def test_the_demo(text):
    with refused_at_most():
        assert len(load_dataset(f"demo?{text}").classes) == 8


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for part, mode in (("images", "RGB"), ("labels", "L")):
        (folder / part).mkdir()
        Image.new(mode, (8, 6)).save(folder / part / "a.png")
    return folder


@few
@given(text=options(["split", "size", "subset", "ids", "classes", "ignore", "reduce_labels"]))
def test_folders(pictures, text):
    with refused_at_most():
        name, image, label = load_dataset(f"folder:{pictures}?{text}")[0]
        assert name == "a"
        assert image.shape[1:] == label.shape


@few
@given(
    st.sampled_from(["untargeted", "sky", "erase:car", "permute:3", ""]) | values,
    options(["only", "protect", "share", "protect_share", "split"]),
)
def test_goals(goal, text):
    scenes = load_dataset("demo?length=1")
    with refused_at_most():
        aim = make_goal(f"{goal}?{text}", scenes)(scenes[0])
        assert aim.target is None or aim.target.shape == (128, 256)


@few
@given(
    st.sampled_from(["palma", "fmn", "pgd", "bisect:pgd", "bisect:"]) | values,
    st.dictionaries(
        st.sampled_from(["steps", "epsilon", "norm", "name", "self", "rounds"]) | st.text(max_size=4),
        values | st.none() | st.floats(),
        max_size=2,
    ),
)
def test_attacks(name, fields):
    with refused_at_most():
        assert sum(make_attack(name, **fields).cost()) > 0


@few
@given(st.text(max_size=40))
def test_names(text):
    with refused_at_most():
        assert Name.parse(text).source == text.partition("?")[0].partition(":")[0]


# --- YAML -------------------------------------------------------------------------------------------------------------
GRID = "grids: [{models: [demo-robust], datasets: [demo], attacks: [fmn, {name: pgd, set: {epsilon: [2/255]}}]}]"
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@few
@given(st.integers(0, len(GRID)), st.text("{}[]&*!|>?:-, \n\tabc1\"'#%@~", max_size=4), st.integers(0, 5))
def test_specs_that_were_mistyped(place, typed, lost):
    with refused_at_most():
        check_runs(Spec.read_text(GRID[:place] + typed + GRID[place + lost :]).runs())


@few
@given(plain, st.sampled_from(["grids", "models", "datasets", "attacks", "goals", "settings", "set"]))
def test_specs_of_anything(value, where):
    content = read_yaml(GRID, "x")
    grid = content["grids"][0]
    {"grids": content, "settings": content, "set": grid["attacks"][1]}.get(where, grid)[where] = value
    with refused_at_most():
        check_runs(Spec.read_text(json.dumps(content)).runs())


@few
@given(plain)
def test_requirements_of_anything(value):
    for content in (value, [value], [{"withstand": value}], [{"iou": 0.5, "of_class": value}]):
        with refused_at_most():
            read_requirements(content, "x")


# --- stores -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with Store(tmp_path_factory.mktemp("store") / "run") as made:
        made.start(make_run("pgd", set={"epsilon": 0.1}), {"images": 1, "classes": ["a"], "attack": {"epsilon": 0.1}})
    return made


def places(content, at=()):
    """The ways to all values within plain data."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else []
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


def replaced(content, place, value):
    if not place:
        return value
    content = content.copy()
    content[place[0]] = replaced(content[place[0]], place[1:], value)
    return content


LINE = json.loads(to_line(make_record("a", trace=[(3, 0.1)], saved={})))


@few
@given(place=st.sampled_from(places(LINE)), value=plain)
def test_records(store, place, value):
    (store.folder / RECORDS).write_text(json.dumps(replaced(LINE, place, value)) + "\n")
    with refused_at_most():
        assert len(store.latest()) == 1


@few
@given(data=st.data(), value=plain)
def test_headers(store, data, value):
    before = (store.folder / HEADER).read_text()
    content = json.loads(before)
    try:
        (store.folder / HEADER).write_text(
            json.dumps(replaced(content, data.draw(st.sampled_from(places(content))), value))
        )
        with refused_at_most():
            assert store.run.folder
            assert store.header["format"] == 2
    finally:
        (store.folder / HEADER).write_text(before)


# --- files ------------------------------------------------------------------------------------------------------------
def damaged(content, data):
    """A file that was cut off, or in which some bytes are others."""
    content = bytearray(content[: data.draw(st.integers(1, len(content)))] if data.draw(st.booleans()) else content)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    return bytes(content)


def checkpoint(old):
    stream = io.BytesIO()
    torch.save(nn.Conv2d(3, 4, 1).state_dict(), stream, _use_new_zipfile_serialization=not old)
    return stream.getvalue()


CHECKPOINTS = {old: checkpoint(old) for old in (False, True)}


@few
@given(data=st.data(), old=st.booleans())
def test_checkpoints(tmp_path_factory, data, old):
    path = tmp_path_factory.getbasetemp() / "weights.pt"
    path.write_bytes(damaged(CHECKPOINTS[old], data))
    with refused_at_most():
        load_weights(nn.Conv2d(3, 4, 1), read_checkpoint(path), path)


@few
@given(
    content=st.binary(max_size=60) | st.text(max_size=40).map(str.encode), suffix=st.sampled_from(["pt", "safetensors"])
)
def test_checkpoints_of_anything(tmp_path_factory, content, suffix):
    path = tmp_path_factory.getbasetemp() / f"anything.{suffix}"
    path.write_bytes(content)
    with pytest.raises(SegproxError):
        read_checkpoint(path)


def picture(kind):
    stream = io.BytesIO()
    Image.effect_noise((9, 7), 50).convert("P" if kind == "png" else "RGB").save(stream, format=kind)
    return stream.getvalue()


PICTURES = {kind: picture(kind) for kind in ("png", "jpeg", "bmp", "webp", "tiff")}


@pytest.mark.filterwarnings("ignore")  # Pillow warns of what is damaged before it gives up
@settings(max_examples=150)
@given(data=st.data(), kind=st.sampled_from([*PICTURES]), read=st.sampled_from([read_image, read_index]))
def test_pictures(tmp_path_factory, data, kind, read):
    path = tmp_path_factory.getbasetemp() / "picture.png"
    path.write_bytes(damaged(PICTURES[kind], data))
    with refused_at_most():
        read(path)
