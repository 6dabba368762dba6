"""Weights from files: every layout that frameworks write, and nothing that runs code."""

import os
import sys
import zipfile
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from segprox import SegproxError
from segprox.models.checkpoint import Checkpoint, load_weights, read_checkpoint

WEIGHTS = {"0.weight": torch.arange(6.0).view(2, 3, 1, 1), "0.bias": torch.tensor([1.0, 2.0])}


def saved(tmp_path, content):
    torch.save(content, tmp_path / "net.pth")
    return tmp_path / "net.pth"


def assert_weights(checkpoint):
    assert checkpoint.weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(checkpoint.weights[key], WEIGHTS[key]) for key in WEIGHTS)


def test_safetensors(tmp_path):
    save_file(WEIGHTS, tmp_path / "net.safetensors")
    assert_weights(read_checkpoint(tmp_path / "net.safetensors"))


@pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict", "model_state", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_where_frameworks_put_weights(tmp_path, key, prefix):
    weights = {prefix + name: value for name, value in WEIGHTS.items()}
    content = weights if key is None else {key: weights, "epoch": 3, "optimizer": {"state": {}}, "meta": {"a": 1}}
    checkpoint = read_checkpoint(saved(tmp_path, content))
    assert_weights(checkpoint)
    assert checkpoint.meta == ({} if key is None else {"a": 1})


def test_the_old_format_of_torch(tmp_path):
    torch.save({"state_dict": WEIGHTS}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(tmp_path / "old.pth")
    assert_weights(read_checkpoint(tmp_path / "old.pth"))


def test_numpy_in_metadata(tmp_path):
    meta = {"loss": np.float64(0.5), "flag": np.bool_(True), "history": np.arange(3), "half": np.float16(1)}
    checkpoint = read_checkpoint(saved(tmp_path, {"state_dict": WEIGHTS, "meta": meta}))
    assert_weights(checkpoint)
    assert checkpoint.meta["history"].tolist() == [0, 1, 2]


def renamed(path, old, new):
    """A torch file whose pickle names `new` where it named `old`."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    target = path.with_name("renamed.pth")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data.replace(old, new) if name.endswith("data.pkl") else data)
    return target


def test_numpy_as_its_first_version_named_itself(tmp_path):
    path = saved(tmp_path, {"state_dict": WEIGHTS, "meta": {"loss": np.float64(0.5)}})
    old = renamed(path, b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert old.read_bytes() != path.read_bytes()
    assert read_checkpoint(old).meta["loss"] == 0.5


def test_logs_of_mmengines_runner(tmp_path, monkeypatch):
    """They pickle bound methods by getattr, which must never be called."""

    class HistoryBuffer:
        def __init__(self):
            self.methods = {"mean": self.mean}

        def mean(self):
            return 0

    module = ModuleType("mmengine.logging.history_buffer")
    module.HistoryBuffer = HistoryBuffer
    HistoryBuffer.__module__, HistoryBuffer.__qualname__ = module.__name__, "HistoryBuffer"
    for name in ("mmengine", "mmengine.logging"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = saved(tmp_path, {"state_dict": WEIGHTS, "message_hub": {"loss": HistoryBuffer()}})
    assert b"getattr" in path.read_bytes()
    assert_weights(read_checkpoint(path))


class RunsCode:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("old", [True, False])
def test_code_is_refused_and_not_run(tmp_path, old):
    evil = RunsCode(os.mkdir, str(tmp_path / "made"))
    torch.save({"state_dict": WEIGHTS, "extra": evil}, tmp_path / "evil.pth", _use_new_zipfile_serialization=not old)
    with pytest.raises(SegproxError, match=r"evil.pth holds more than weights \(posix.mkdir\) .* safetensors"):
        read_checkpoint(tmp_path / "evil.pth")
    assert not (tmp_path / "made").exists()


def test_getattr_leads_nowhere(tmp_path):
    """What a pickle gets instead of an attribute is inert."""
    reached = RunsCode(getattr, np.ndarray, "tolist")
    checkpoint = read_checkpoint(saved(tmp_path, {"state_dict": WEIGHTS, "meta": {"method": reached}}))
    assert type(checkpoint.meta["method"]).__name__ == "_Inert"


@pytest.mark.parametrize("name", ["net.pth", "net.safetensors"])
def test_files_that_are_no_checkpoints(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(SegproxError, match=rf"there is no checkpoint .*{name}"):
        read_checkpoint(path)
    path.write_text("weights, honestly")
    with pytest.raises(SegproxError, match=rf"{name} is (neither|not)"):
        read_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(SegproxError, match=rf"{name} is (neither|not)"):
        read_checkpoint(path)


def test_a_truncated_file(tmp_path):
    path = saved(tmp_path, {"state_dict": {"w": torch.rand(1000)}})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(SegproxError, match=r"net.pth is"):
        read_checkpoint(path)


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], {"state_dict": {"a": 1}}])
def test_no_weights(tmp_path, content):
    with pytest.raises(SegproxError, match=r"net.pth holds no weights: a state_dict is expected"):
        read_checkpoint(saved(tmp_path, content))


def network():
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))


def loaded(change, **options):
    target = network()
    weights = network().state_dict()
    change(weights)
    load_weights(target, Checkpoint(weights, {}), "net.pth", **options)
    return target, weights


def test_every_weight_finds_its_place():
    target, weights = loaded(lambda w: w.pop("1.num_batches_tracked"))
    assert all(torch.equal(target.state_dict()[key], value) for key, value in weights.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("0.bias"), r"1 weights are missing \(such as 0.bias\)"),
        (lambda w: w.update(other=torch.zeros(1)), r"1 weights are unknown to it \(such as other\)"),
        (
            lambda w: w.update({"0.bias": torch.zeros(5)}),
            r"1 have another shape \(such as 0.bias: \[5\] in the file, \[2\] in",
        ),
    ],
)
def test_weights_that_do_not_fit(change, message):
    with pytest.raises(SegproxError, match=rf"net.pth does not fit the model: {message}"):
        loaded(change)


def test_optional_weights():
    loaded(lambda w: (w.pop("0.bias"), w.update({"aux.w": torch.zeros(1)})), optional=["0.bias", "aux."])
