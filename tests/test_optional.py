"""Optional libraries: what is said when one is missing, or does not fit."""

import pytest

from segprox.errors import SegproxError
from segprox.optional import require, torchvision_explained


def test_a_missing_library_is_named_with_its_extra():
    with pytest.raises(SegproxError, match=r"needs no_such_library, .* pip install 'segprox\[extra\]'"):
        require("no_such_library", "extra")


def unfit(way):
    """As torchvision itself fails, and as libraries that import it do."""
    error = RuntimeError("operator torchvision::nms does not exist")
    if way == "itself":
        raise error
    raise ModuleNotFoundError("Could not import module 'SegformerForSemanticSegmentation'") from error


@pytest.mark.parametrize("way", ["itself", "by another library"])
@pytest.mark.parametrize(
    ("version", "cuda", "index"), [("2.13.0+cpu", None, "cpu"), ("2.13.0", "12.8", "cu128"), ("2.9.0", None, "cpu")]
)
def test_a_torchvision_that_does_not_fit_is_told_with_the_command_that_helps(monkeypatch, way, version, cuda, index):
    monkeypatch.setattr("torch.__version__", version)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"torchvision": "0.28.0"}[name])
    with pytest.raises(SegproxError) as refused, torchvision_explained("hf:some-model"):
        unfit(way)
    sentence = str(refused.value)
    assert sentence.startswith(
        "hf:some-model needs torchvision, and the installed torchvision 0.28.0 was not built for"
    )
    assert sentence.endswith(
        f"torch=={version.partition('+')[0]} torchvision --index-url https://download.pytorch.org/whl/{index}"
    )


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="no memory"), torchvision_explained("hf:some-model"):
        raise RuntimeError("no memory")
