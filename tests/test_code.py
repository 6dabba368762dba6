"""Code of the user that is sent to other machines."""

import sys
from pathlib import Path

import pytest

from segprox.run.code import LARGEST, ship


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with code of the user, which is the current one and which Python looks for modules in."""
    for name in ("net.py", "nets/deep.py", "single_module.py", "own_package/__init__.py", "own_package/parts/layer.py"):
        path = tmp_path / "here" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    (tmp_path / "here/own_package/weights.bin").write_bytes(bytes(LARGEST + 1))
    (tmp_path / "here/own_package/sizes.bin").write_bytes(bytes(LARGEST))
    (tmp_path / "here/own_package/__pycache__").mkdir()
    (tmp_path / "here/own_package/__pycache__/x.pyc").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("place", "sent"),
    [
        ("net.py", {"net.py"}),
        ("nets/deep.py", {"nets/deep.py"}),
        ("single_module", {"single_module.py"}),
        ("own_package.parts.layer", {f"own_package/{name}" for name in ("__init__.py", "parts/layer.py", "sizes.bin")}),
        ("../here/net.py", set()),
        (str(Path(__file__).absolute()), set()),
        ("not_there.py", set()),
        ("not_there", set()),
        ("json", set()),
        ("torch.nn", set()),
        ("sys", set()),
    ],
)
def test_what_is_sent(here, tmp_path, place, sent):
    target = tmp_path / "sent"
    target.mkdir()
    ship(place, target)
    assert set(files(target)) == sent
    assert all((here / name).read_bytes() == content for name, content in files(target).items())
    assert not {"own_package", "single_module"} & set(sys.modules)  # nothing is imported
