"""Attacks on a pretend accelerator: the same results, no waits, few launches, no float64 where there is none."""

import gc
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
from segprox import devices
from segprox.attacks.objectives import OBJECTIVES
from segprox.devices import uses_tf32, without_tf32
from segprox.errors import SegproxError
from segprox.fusion import fusing
from segprox.losses import dlr_plus, margin, soft_margin
from segprox.losses import strips as strips_module
from segprox.models import make_lean
from segprox.models.options import ModelOptions
from segprox.norms import project
from segprox.problem import predictions
from segprox.prox import SOLVERS, prox_linf_box, prox_norm
from segprox.run.check import check_model
from segprox.run.evaluate import Evaluation
from segprox.run.execution import Execution
from segprox.run.plan import AttackEntry, Run, Settings
from segprox.run.record import same
from segprox.run.store import Store
from segprox.run.verify import verify_run
from segprox.run.worker import Task, Worker
from segprox.seeding import seeded
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


def attacked(name, device, steps=None, num_classes=5, batch=2, **options):
    """The result of an attack on the network, on a device; those with ten restarts get fewer steps."""
    steps = steps or (2 if name.endswith("x10") else 6)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(batch, 3, 12, 16, generator=generator)
    model = segprox.Segmenter(Network(num_classes)).to(device)
    labels = model(images.to(device)).argmax(1)
    attack = segprox.make_attack(name, steps=steps)
    target = (labels + 1) % num_classes if attack.targeted_only else None
    return attack(model, images.to(device), labels, target=target, **options)


@pytest.fixture
def as_a_batch(monkeypatch):
    """Lets the CPU compute a batch as accelerators do: images together, all classes at once."""
    monkeypatch.setattr(devices.together, "__code__", (lambda batch: True).__code__)


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_find_what_they_find_on_the_cpu_as_a_batch(name, as_a_batch):
    here = attacked(name, "cpu")
    with PretendDevice() as device:
        found = attacked(name, "cuda:1")
        assert found.images.device == torch.device("cuda:1")
        images, norm, apsr = (value.cpu() for value in (found.images, found.norm, found.apsr))
        counts = [value.tolist() for value in (found.forwards, found.backwards, found.success)]
    assert device.launched() > 0
    assert counts == [value.tolist() for value in (here.forwards, here.backwards, here.success)]
    assert images.equal(here.images)  # to the last bit
    assert norm.equal(here.norm)
    assert apsr.equal(here.apsr)
    assert found.traces == here.traces


@pytest.mark.parametrize("kind", ["cpu", "mps"])
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_find_nearly_the_same_one_by_one_and_without_float64(name, kind, as_a_batch, request):
    """Rounding differs, and may decide whether a pixel gives way."""
    here = attacked(name, "cpu")
    if kind == "cpu":
        request.getfixturevalue("monkeypatch").undo()
        norm, apsr = (getattr(attacked(name, "cpu"), field) for field in ("norm", "apsr"))
    else:
        with PretendDevice("mps"):
            found = attacked(name, "mps")
            norm, apsr = found.norm.cpu(), found.apsr.cpu()
    torch.testing.assert_close(apsr.double(), here.apsr, atol=0.02, rtol=0)
    torch.testing.assert_close(norm[here.success], here.norm[here.success], rtol=0.02, atol=1e-5)


def per_iteration(name, num_classes=5, batch=2, lengths=(16, 20)):
    """Launches and waits of an iteration: those of a long run less those of a short one."""
    counts = []
    for steps in lengths:
        with PretendDevice() as device:
            forwards = int(attacked(name, "cuda", steps, num_classes, batch).forwards.max())
            counts.append((forwards, device.launched(), device.waits.total()))
    (few, *short), (many, *long) = counts
    return [(after - before) / (many - few) for before, after in zip(short, long)]


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in LEAVE_OUT])
def test_no_waits_in_the_loop(name):
    assert per_iteration(name)[1] == 0


@pytest.mark.parametrize(("name", "lengths"), [("dag-0.001", (16, 20)), ("pgd-ce-13x40", (4, 6))])
def test_one_wait_where_images_are_left_out(name, lengths):
    assert 0 < per_iteration(name, lengths=lengths)[1] <= 1


@pytest.mark.parametrize("name", ["palma", "apgd"])
def test_a_limit_on_queries_waits_for_nothing(name):
    counts = []
    for limit in (21, 41):
        with PretendDevice() as device:
            attacked(name, "cuda", 60, max_queries=limit)
            counts.append(device.waits.total())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["dag-0.001", "dag-0.003", "pgd-ce-13x40"])
def test_looking_at_every_fourth_query_changes_no_result(name, as_a_batch, monkeypatch):
    monkeypatch.undo()  # one by one: then not even rounding
    each = attacked(name, "cpu", batch=3)
    images, model = each.originals, segprox.Segmenter(Network(5))
    problem = segprox.Problem.build(images, model(images).argmax(1))
    attack = segprox.make_attack(name, steps=6)
    fourth = attack.run(model, problem, look_every=4)
    for field in ("images", "norm", "apsr", "success", "forwards", "backwards"):
        assert getattr(fourth, field).equal(getattr(each, field)), field
    waits = []
    for every in (1, 4):
        with PretendDevice() as device:
            there = segprox.Segmenter(Network(5)).to("cuda")
            on_device = segprox.Problem.build(images.to("cuda"), there(images.to("cuda")).argmax(1))
            device.clear()
            segprox.make_attack(name, steps=12).run(there, on_device, look_every=every)
            waits.append(sum(n for (why, _, line), n in device.waits.items() if "tracker.py" in line))
    assert waits[1] <= waits[0] / 3


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


def evaluated(folder, device, batch=2, attack="palma", **options):
    """A run of two images of the demo, whose records are in the folder, and their lines."""
    settings = Settings(limit=2, save=("float",), **options)
    run = Run(
        model="demo-standard",
        dataset="demo",
        attack=AttackEntry(name=attack, set={"steps": 8}),
        settings=settings,
    )
    execution = Execution(devices=(device,), batch=batch)
    results = Worker().work(Task(run, (0, 1), execution=execution))
    return [result.record for result in results]


@pytest.mark.parametrize("kind", ["cuda:1", "mps"])
def test_records_are_those_of_the_cpu_as_a_batch(kind, tmp_path, as_a_batch):
    here = evaluated(tmp_path / "here", "cpu")
    with PretendDevice(kind.partition(":")[0]):
        there = evaluated(tmp_path / "there", kind)
    for one, other in zip(here, there, strict=True):
        assert (one.conditions.device, other.conditions.device) == ("cpu", kind.partition(":")[0])
        assert one.conditions.batch == other.conditions.batch == 2
        assert not other.conditions.tf32
        if kind == "cuda:1":
            assert same(one, other)
        else:
            assert other.norm == pytest.approx(one.norm, rel=0.02)


@pytest.mark.parametrize("kind", ["cuda:1", "mps"])
def test_evaluate_audit_verify_and_check(kind, tmp_path):
    with PretendDevice(kind.partition(":")[0]):
        options = {"limit": 2, "steps": 4, "device": kind, "batch": 2, "out": tmp_path, "progress": False}
        audit = segprox.audit("demo-standard", "demo", epsilon="8/255", save=("float",), **options)
        assert len(audit.findings) == 2
        results = segprox.load_results(tmp_path)
        assert len(results.rows()) == 4
        for folder in sorted(path for path in tmp_path.iterdir() if path.is_dir()):
            for found in verify_run(Store(folder), kind):
                assert found.agree == found.images == 2
        sample = segprox.load_dataset("demo")[0]
        assert len(check_model(segprox.load_model("demo-standard", device=kind), [sample])) == 11


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
from segprox import devices
from segprox.attacks.objectives import OBJECTIVES
from segprox.devices import uses_tf32, without_tf32
from segprox.errors import SegproxError
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


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_objectives_are_the_same(name, as_a_batch):
    attack = segprox.make_attack("pgd", objective=name, steps=4)
    images, network = torch.rand(2, 3, 12, 16), segprox.Segmenter(Network(5))
    labels = network(images).argmax(1)
    expected = attack(network, images, labels).images
    with PretendDevice() as device:
        there = segprox.Segmenter(Network(5)).to("cuda")
        found = attack(there, images.to("cuda"), labels.to("cuda")).images.cpu()
    assert found.equal(expected)
    assert device.launched()


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_are_the_same(solver, as_a_batch):
    x = torch.rand(3, 3, 8, 9)
    point, step = torch.randn_like(x), torch.tensor([0.0, 0.4, 3.0])
    expected = prox_linf_box(point, step, -x, 1 - x, solver=solver)
    with PretendDevice():
        found = prox_linf_box(*(value.to("cuda:1") for value in (point, step, -x, 1 - x)), solver=solver)
        result, beta = found.result.cpu(), found.beta.cpu()
    assert result.equal(expected.result)
    assert beta.equal(expected.beta)


@pytest.mark.parametrize("device", ["cuda:1", "mps:0"])
def test_random_models_are_the_same_and_leave_no_trace(device):
    class Noisy(Network):
        def forward(self, images):
            return super().forward(images + 0.01 * torch.randn(images.shape).to(images.device))

    images, model = torch.rand(2, 3, 12, 16), segprox.Segmenter(Noisy(5))
    labels = model(images).argmax(1)
    expected = segprox.attack(model, images, labels, "fmn", steps=4, samples=2, score_draws=6)
    with PretendDevice(torch.device(device).type) as there:
        there.seeds = [7] * there.count
        with seeded(torch.device(device), 3):
            assert there.seeds == [3 if place == torch.device(device).index else 7 for place in range(there.count)]
        found = segprox.attack(model.to(device), images.to(device), labels.to(device), "fmn", steps=4, samples=2,
                               score_draws=6)  # fmt: skip
        assert there.seeds == [7] * there.count
        assert found.images.cpu().equal(expected.images)
        assert found.draws.cpu().float().equal(expected.draws.float())  # MPS has no float64


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lean", [False, True])
def test_low_precision_and_lean_gradients(precision, lean):
    images = torch.rand(2, 3, 12, 16)
    with PretendDevice() as device:
        model = segprox.Segmenter(Network(5)).to("cuda")
        labels = model(images.to("cuda")).argmax(1)
        if lean:
            assert make_lean(model).error < 1e-6
        model.autocast = precision
        result = segprox.make_attack("palma", steps=20)(model, images.to("cuda"), labels)
        assert device.launched()
        full = segprox.Problem.build(images.to("cuda"), labels).apsr(model.full_precision(result.images))
        assert full.tolist() == result.apsr.tolist()  # what is reported holds in float32
        norm, labels = result.norm.cpu(), labels.cpu()
    plain = segprox.make_attack("palma", steps=20)(segprox.Segmenter(Network(5)), images, labels)
    torch.testing.assert_close(norm, plain.norm, rtol=0.2, atol=0)


def test_lean_gradients_are_the_same():
    images = torch.rand(1, 3, 64, 64)
    gradients = []
    with PretendDevice():
        for lean in (False, True):
            model = segprox.load_model("demo-standard", device="cuda")
            if lean:
                make_lean(model)
            there = images.to("cuda").requires_grad_()
            gradients.append(torch.autograd.grad(model(there).sum(), there)[0].cpu())
    plain, lean = gradients
    assert (lean - plain).abs().max() < 1e-5 * plain.abs().max()  # of the largest entry: sums cancel elsewhere


def test_auto_is_cuda_then_mps_then_the_cpu():
    assert ModelOptions().torch_device().type == "cpu"
    for kind in ("mps", "cuda"):
        with PretendDevice(kind):
            assert ModelOptions().torch_device().type == kind


@pytest.mark.parametrize("device", ["cuda:2", "mps", "tpu", "meta", "cuda:x", ""])
def test_unknown_devices_are_refused(device):
    with PretendDevice(), pytest.raises(SegproxError, match=f"device '{device}' cannot be used"):
        ModelOptions(device=device).check_device()


class Pooling(Network):
    """A network with an operation that torch has in no deterministic form on GPUs."""

    def __init__(self, kind):
        super().__init__(5)
        self.kind = kind

    def forward(self, images):
        if self.kind == "pooling":
            images = images + nn.functional.adaptive_avg_pool2d(images, (3, 4)).mean((2, 3), keepdim=True)
        elif self.kind == "padding":
            images = nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 1:-1]
        else:
            images = images + 0.01 * images.cumsum(3)
        return super().forward(images)


@pytest.mark.parametrize("kind", ["pooling", "padding", "cumulative sum"])
def test_what_is_not_deterministic_is_said_at_once(kind, monkeypatch):
    monkeypatch.setenv(*devices.CUBLAS)
    pairs = [(torch.rand(3, 12, 16), torch.zeros(12, 16, dtype=torch.long)) for _ in range(3)]
    devices.use_deterministic(True)
    try:
        with PretendDevice(), pytest.raises(SegproxError, match=r"_cuda.*reflection.*Leave out --deterministic"):
            segprox.evaluate(Pooling(kind), pairs, "pgd", steps=3, device="cuda", progress=False)
    finally:
        devices.use_deterministic(False)


def test_the_next_image_is_pinned_and_sent_without_a_wait():
    run = Run(
        model="demo-standard",
        dataset="demo",
        attack=AttackEntry(name="pgd", set={"steps": 2}),
        settings=Settings(save=()),
    )
    with PretendDevice() as device:
        worker, execution = Worker(), Execution(devices=("cuda",))
        worker.read_ahead(Task(run, (0,), execution=execution))
        (ahead,) = worker._ahead.values()
        assert ahead.result().image.pinned
        worker.begin(Task(run, (0,), execution=execution))
        device.clear()
        worker.work(Task(run, (0,), execution=execution))
        assert not any(why == "to device" and line.startswith("devices.py") for why, _, line in device.waits)


def test_nothing_of_an_image_survives_it():
    run = Run(
        model="demo-standard",
        dataset="demo",
        attack=AttackEntry(name="palma", set={"steps": 4}),
        settings=Settings(save=()),
    )

    def alive():
        found = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        return sum(tuple(value.shape[-2:]) == (128, 256) for value in found)

    worker = Worker()
    worker.work(Task(run, (0, 1), execution=Execution(batch=2)))
    gc.collect()
    before = alive()
    gc.disable()  # memory of a GPU is not given back before the garbage is collected, whenever that is
    try:
        worker.work(Task(run, (2, 3), execution=Execution(batch=2)))
        assert alive() == before
    finally:
        gc.enable()


def test_clean_logits_of_a_batch_are_not_kept(monkeypatch):
    run = Run(
        model="demo-standard",
        dataset="demo",
        attack=AttackEntry(name="pgd", set={"steps": 2}),
        settings=Settings(save=()),
    )
    seen = []

    def attack(prepared, jobs, callback):
        logits = [
            value
            for value in gc.get_objects()
            if issubclass(type(value), torch.Tensor) and value.shape[1:] == (8, 128, 256)
        ]
        seen.append((len(jobs), len(logits)))
        return []

    monkeypatch.setattr("segprox.run.worker._attack", attack)
    Worker().work(Task(run, (0, 1, 2), execution=Execution(batch=3)))
    assert seen == [(3, 0)]


def test_the_parent_holds_no_model_while_others_work(tmp_path):
    run = Run(
        model="demo-standard",
        dataset="demo",
        attack=AttackEntry(name="pgd", set={"steps": 2}),
        settings=Settings(limit=1),
    )
    evaluation = Evaluation([run], tmp_path, Execution(workers=2))
    evaluation.validate()
    evaluation.red_checks()
    held = []

    def engine(tasks, wanted):
        held.append(sum(issubclass(type(value), segprox.Segmenter) for value in gc.get_objects()))
        return iter(())

    gc.collect()
    before = sum(issubclass(type(value), segprox.Segmenter) for value in gc.get_objects())
    list(evaluation.go(engine))
    assert held[0] < before


def test_tf32_is_known():
    with without_tf32():
        assert not uses_tf32()
    assert uses_tf32()  # cuDNN's own default
