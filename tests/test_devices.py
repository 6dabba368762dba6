"""Attacks on a pretend accelerator: the same results, no waits, few launches, no float64 where there is none."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import segprox
from segprox.devices import without_tf32
from segprox.fusion import fusing
from segprox.losses import dlr_plus, margin, soft_margin
from segprox.losses import strips as strips_module
from segprox.norms import project
from segprox.problem import predictions
from segprox.prox import prox_linf_box, prox_norm
from segprox.shrinkage import threshold

from .pretend import PretendDevice

ATTACKS = [str(name) for name in segprox.list_attacks()]
LEAVE_OUT = [name for name in ATTACKS if name.startswith("dag") or "-13x" in name]  # images that are done


class Network(nn.Module):
    """A small smooth network, whose launches count as the model's."""

    def __init__(self, num_classes, device=None):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(6, 3, 3, 3, generator=generator))
        self.last = nn.Parameter(torch.randn(num_classes, 6, 1, 1, generator=generator))
        self.pretend = device

    def forward(self, images):
        hidden = torch.tanh(nn.functional.conv2d(images, self.first, padding=1))
        return nn.functional.conv2d(hidden, self.last)


def attacked(name, device, steps=6, num_classes=5, batch=2, **options):
    """The result of an attack on the network, on a device."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(batch, 3, 12, 16, generator=generator)
    model = segprox.Segmenter(Network(num_classes)).to(device)
    labels = model(images.to(device)).argmax(1)
    attack = segprox.make_attack(name, steps=steps)
    target = (labels + 1) % num_classes if attack.targeted_only else None
    return attack(model, images.to(device), labels, target=target, **options)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_find_the_same(name, kind):
    here = attacked(name, "cpu")
    with PretendDevice(kind) as device:
        found = attacked(name, "cuda:1" if kind == "cuda" else "mps")
        assert found.images.device.type == kind
        apsr, norm = found.apsr.cpu(), found.norm.cpu()
        assert found.forwards.cpu().tolist() == here.forwards.tolist()
    assert device.launched() > 0
    # rounding differs, and may decide whether a pixel gives way
    torch.testing.assert_close(apsr.double(), here.apsr, atol=0.02, rtol=0)
    torch.testing.assert_close(norm[here.success], here.norm[here.success], rtol=0.02, atol=1e-5)


def per_iteration(name, num_classes=5, batch=2):
    """Launches and waits of an iteration: those of a long run less those of a short one."""
    counts = []
    for steps in (24, 30):
        with PretendDevice() as device:
            forwards = int(attacked(name, "cuda", steps, num_classes, batch).forwards.max())
            counts.append((forwards, device.launched(), device.waits.total()))
    (few, *short), (many, *long) = counts
    return [(after - before) / (many - few) for before, after in zip(short, long)]


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in LEAVE_OUT])
def test_no_waits_in_the_loop(name):
    assert per_iteration(name)[1] == 0


@pytest.mark.parametrize("name", ["dag-0.001", "pgd-ce-13x40"])
def test_one_wait_where_images_are_left_out(name):
    assert per_iteration(name)[1] <= 1


@pytest.mark.parametrize("name", ["palma", "alma-prox", "apgd"])
def test_launches_grow_neither_with_classes_nor_with_the_batch(name):
    few = per_iteration(name, num_classes=4, batch=1)[0]
    many = per_iteration(name, num_classes=40, batch=3)[0]
    assert many == pytest.approx(few, abs=3)  # an image that succeeds may take another way


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_segprox_attack_and_evaluate(kind, tmp_path):
    scene = segprox.load_dataset("demo")[0]
    with PretendDevice(kind):
        model = segprox.load_model("demo-standard", device=kind)
        result = segprox.attack(model, scene.image[None, :, :32, :48], scene.label[None, :32, :48], steps=12)
        assert result.images.device.type == kind
        results = segprox.evaluate(model, "demo", "fmn", limit=2, steps=3, out=tmp_path, progress=False)
        assert len(results.rows()) == 2


def test_the_device_notices_another_device():
    with PretendDevice() as device:
        there = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.ones(3, device="cuda:1")
        with pytest.raises(TypeError, match="numpy"):
            np.asarray(there)
        with pytest.raises(RuntimeError, match="ordinal"):
            torch.ones(3, device="cuda:2")
        assert device.waits.total() == 0
        assert there.sum().item() == 3
        assert [why for why, *_ in device.waits] == ["read"]
        there.nonzero()
        assert device.waits.total() == 2
    with PretendDevice("mps"), pytest.raises(TypeError, match="float64"):
        torch.ones(3, device="mps").double()


def test_the_device_counts_launches_by_line():
    with PretendDevice() as device:
        logits, labels = torch.randn(1, 4, 3, 3, device="cuda"), torch.zeros(1, 3, 3, dtype=torch.long, device="cuda")
        device.clear()
        margin(logits, labels)
        assert device.launched() == len(device.launches) > 3
        assert all(line.startswith("losses/margins.py:") for _, _, line in device.launches)


@pytest.mark.parametrize("loss", [margin, dlr_plus, soft_margin])
@pytest.mark.parametrize("num_classes", [2, 3, 7])
@pytest.mark.parametrize("kind", ["plain", "ties", "nan", "strips"])
def test_losses_are_the_same(loss, num_classes, kind, monkeypatch):
    logits, labels = torch.randn(2, num_classes, 9, 5), torch.randint(num_classes, (2, 9, 5))
    if kind == "ties":
        logits = logits.round()
    if kind == "nan":
        logits[0, 0, 3:5] = torch.nan
    options = {"softness": torch.tensor([0.3, 2.0]).view(-1, 1, 1)} if loss is soft_margin else {}
    weights = torch.rand(2, 9, 5)
    expected = loss(logits, labels, **options)
    if kind == "strips":
        monkeypatch.setattr(strips_module, "LARGEST", 64)
        monkeypatch.setattr(strips_module, "free_bytes", lambda device: 2000)
    with PretendDevice():
        there = {name: value.to("cuda") for name, value in options.items()}
        found = loss(logits.to("cuda"), labels.to("cuda"), **there)
        values, gradient = found.values.cpu(), found.pullback(weights.to("cuda")).cpu()
    torch.testing.assert_close(values, expected.values, equal_nan=True)
    torch.testing.assert_close(gradient, expected.pullback(weights), equal_nan=True)


def test_predictions_are_the_same():
    logits = torch.randn(2, 4, 6, 5).round()  # with ties
    logits[1, 2, 0] = torch.nan
    with PretendDevice():
        found = predictions(logits.to("cuda")).cpu()
    assert found.equal(predictions(logits))
    assert (found[1, 0] == 4).all()


@pytest.mark.parametrize("norm", ["l0", "l1", "l2", "linf"])
def test_projections_are_the_same(norm):
    difference, radius = torch.randn(4, 3, 5, 6), torch.tensor([0.0, 3.7, 1e6, torch.inf])
    radius = radius if norm != "l2" else radius.clamp(max=1e6)
    with PretendDevice():
        found = project(difference.to("cuda"), radius.to("cuda"), norm).cpu()
    torch.testing.assert_close(found, project(difference, radius, norm))


@pytest.mark.parametrize("metric", [False, True])
def test_proximity_operators_are_the_same(metric):
    x = torch.rand(3, 3, 8, 9)
    point, step = torch.randn_like(x), torch.tensor([0.0, 0.4, 90.0])
    weight = torch.rand_like(x) + 0.1 if metric else None
    expected = prox_linf_box(point, step, -x, 1 - x, weight)
    shrunk = prox_norm(point, step, "linf")
    with PretendDevice() as device:
        there = [value.to("cuda") for value in (point, step, -x, 1 - x)]
        weight = weight.to("cuda") if metric else None
        device.clear()
        found, alone = prox_linf_box(*there, weight), prox_norm(there[0], there[1], "linf")
        assert not device.waits
        found, beta, alone = found.result.cpu(), found.beta.cpu(), alone.cpu()
    torch.testing.assert_close(beta, expected.beta, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found, expected.result, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(alone, shrunk, rtol=1e-6, atol=1e-6)


def oracle(size, reach, weight, total):
    """The smallest beta with F(beta) <= total, by trying every piece, in float64."""
    size, reach, weight = (np.asarray(values, dtype=np.float64) for values in (size, reach, weight))
    for low in [0.0, *np.unique(size)]:
        active = size > low
        ends = np.append(size[active], np.inf).min()
        if not active.any() or (weight * (reach - low))[active].sum() <= total:
            return low
        root = ((weight * reach)[active].sum() - total) / weight[active].sum()
        if low <= root <= ends:
            return root
    raise AssertionError


@settings(max_examples=2000)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 300), share=st.floats(0, 1.2), kind=st.integers(0, 3))
def test_threshold(seed, count, share, kind):
    source = np.random.default_rng(seed)
    size = source.random(count) ** source.integers(1, 6)
    size = np.round(size, 1) if kind == 1 else size  # with ties
    reach = size + (source.random(count) if kind == 2 else 0)
    weight = source.random(count) + 0.01 if kind == 3 else np.ones(count)
    size, reach, weight = (values.astype(np.float32) for values in (size, reach, weight))
    total = np.float32(share * (weight * reach).sum())
    expected = oracle(size, reach, weight, np.float64(total))
    tensors = [torch.from_numpy(values)[None] for values in (size, reach, weight)]
    found = threshold(*tensors[:2], tensors[2] if kind == 3 else None, torch.tensor([total]))
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_threshold_row_by_row_when_memory_is_short(monkeypatch):
    size = torch.rand(5, 40)
    expected = threshold(size, size, None, torch.arange(5.0))
    monkeypatch.setattr("segprox.shrinkage.SMALL", 0)
    monkeypatch.setattr("segprox.shrinkage.free_bytes", lambda device: 2 * 2 * 40 * 16 * 5)
    assert threshold(size, size, None, torch.arange(5.0)).equal(expected)


def test_attacks_run_without_tf32():
    seen = []
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    attacked("pgd", "cpu", callback=lambda _: seen.append(torch.backends.cudnn.allow_tf32))
    assert seen
    assert not any(seen)
    with without_tf32():
        assert not torch.backends.cuda.matmul.allow_tf32
    assert before == (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)


def test_tf32_is_off_however_it_was_switched_on():
    code = """
import torch
from segprox.devices import without_tf32
torch.backends.fp32_precision = "tf32"
parts = torch.backends.cuda.matmul, torch.backends.cudnn.conv
with without_tf32():
    print([part.fp32_precision for part in parts])
print([part.fp32_precision for part in parts])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[:2] == ["['ieee', 'ieee']", "['tf32', 'tf32']"]


def test_small_gradients_survive_half_precision():
    """A cotangent of 1e-7 per pixel, as that of a mean over millions, vanishes in float16 unless it is scaled."""
    images = torch.rand(2, 3, 12, 16)
    model = segprox.Segmenter(Network(5))
    problem = segprox.Problem.build(images, model(images).argmax(1))
    cotangent = torch.randn(2, 5, 12, 16) * torch.tensor([1e-7, 1e-12]).view(-1, 1, 1, 1)

    def pulled_back(precision):
        model.autocast = precision
        return segprox.Tracker(model, problem, "linf").query(images).gradient(cotangent)

    half, full = pulled_back(torch.float16), pulled_back(None)
    assert (half == 0).float().mean() < 0.01
    for low, exact in zip(half, full):
        torch.testing.assert_close(low / exact.abs().max(), exact / exact.abs().max(), atol=0.01, rtol=0)


def test_the_benchmark_of_launches(capsys, monkeypatch):
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", ["launches.py", "--attacks", "fmn", "--classes", "4", "--batches", "1,2"])
    import launches

    launches.main()
    assert "K=4 B=2" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own
def test_compiled_threshold():
    size, weight = torch.rand(2, 500), torch.rand(2, 500) + 0.1
    reach, total = size + torch.rand(2, 500), torch.tensor([3.0, 30.0])
    with fusing(True):
        fused = threshold(size, reach, weight, total)
    torch.testing.assert_close(fused, threshold(size, reach, weight, total), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["palma", "alma-prox"])
def test_compiled_pieces_compute_the_same(name):
    """With torch.compile on the CPU: the whole of each piece, no fallback."""
    images = torch.rand(1, 3, 12, 16)
    model = segprox.Segmenter(Network(5))
    labels = model(images).argmax(1)
    plain = segprox.make_attack(name, steps=12)(model, images, labels)
    model.fused = True
    fused = segprox.make_attack(name, steps=12)(model, images, labels)
    torch.testing.assert_close(fused.norm, plain.norm, rtol=1e-3, atol=1e-6)
    assert fused.apsr.tolist() == pytest.approx(plain.apsr.tolist(), abs=0.01)


def test_compiled_pieces_are_one_launch_each():
    with PretendDevice() as device:
        plain = attacked("palma", "cuda")
        device.clear()
        model = segprox.Segmenter(Network(5)).to("cuda")
        model.fused = True
        attack = segprox.make_attack("palma", steps=6)
        found = attack(model, plain.originals, model(plain.originals).argmax(1))
        assert found.norm.tolist() == plain.norm.tolist()
        assert any(operation == "fused" for _, operation, _ in device.launches)
