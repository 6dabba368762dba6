"""The check of a model: a good one is green, and each fault turns its own row."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import segprox
from segprox import Sample, Segmenter, SegproxError
from segprox.models.demo import MEAN, STD
from segprox.run import check_model
from segprox.run.measurements import gap

ROWS = [
    "eval mode", "classes", "input", "logits", "repeatable", "batch",
    "accuracy", "saturation", "gradients", "finite differences", "black box",
]  # fmt: skip
SLOW = ["batch", "finite differences", "black box"]


class Around(nn.Module):
    """A network with something before it, and something after it."""

    def __init__(self, network, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.network, self.before, self.after = network, before, after

    def forward(self, x):
        return self.after(self.network(self.before(x)))


@pytest.fixture(scope="module")
def scenes():
    """Two crops, for speed, in which several classes occur."""
    crops = (segprox.load_dataset("demo")[i] for i in range(2))
    return [Sample(name, image[:, 32:96, 64:192], label[32:96, 64:192]) for name, image, label in crops]


def street(before=lambda x: x, after=lambda z: z, **options):
    """The embedded network, fed and read as told."""
    network = segprox.load_model("demo-standard").model
    return Segmenter(Around(network, before, after).eval(), **{"mean": MEAN, "std": STD, **options})


def normalised(x):
    return (x - MEAN[0]) / STD[0]


def rows(model, samples, *, quick=False, **options):
    """The check's rows by name; quick where a test is about one that needs no attack."""
    checks = check_model(model, samples, quick=quick, **options)
    assert [check.name for check in checks] == [name for name in ROWS if not (quick and name in SLOW)]
    return {check.name: check for check in checks}


def verdicts(found):
    return {name: check.verdict for name, check in found.items() if check.verdict != "green"}


@pytest.mark.parametrize("name", ["demo-standard", "demo-robust"])
def test_embedded_models_are_green(name, scenes):
    found = rows(segprox.load_model(name), scenes, num_classes=8)
    assert verdicts(found) == {}
    assert "8 outputs for the dataset's 8 classes" in found["classes"].finding
    assert "float64" in found["finite differences"].finding


def test_findings_are_one_sentence_each(scenes):
    for check in check_model(street(before=lambda x: (x * 8).round() / 8), scenes):
        assert "\n" not in check.finding
        assert not check.finding.endswith(".")


@pytest.mark.parametrize("declared", [False, True])
def test_softmax(scenes, declared):
    found = rows(street(after=lambda z: z.softmax(1), output="probabilities" if declared else "auto"), scenes)
    assert verdicts(found) == ({"logits": "amber"} if declared else {"logits": "red", "black box": "amber"})
    assert declared or "seems to return probabilities" in found["logits"].finding


def test_log_softmax_and_sigmoids(scenes):
    assert rows(street(after=lambda z: z.log_softmax(1)), scenes, quick=True)["logits"].verdict == "green"
    assert rows(street(after=torch.sigmoid), scenes, quick=True)["logits"].verdict == "amber"


def test_a_network_left_in_train_mode(scenes):
    network = Around(segprox.load_model("demo-standard").model, normalised)
    network.network.stem.train()
    found = rows(network, scenes)
    assert verdicts(found) == {"eval mode": "red"}
    assert "train mode in 1 of the batch norm and dropout layers, first in network.stem.1" in found["eval mode"].finding
    assert network.network.stem[1].training  # left as it was found
    assert not network.network.head.training


def test_a_segmenter_whose_network_was_put_into_train_mode(scenes):
    model = street()
    model.model.network.train()
    mean = model.model.network.stem[1].running_mean.clone()
    assert verdicts(rows(model, scenes)) == {"eval mode": "red"}
    assert torch.equal(model.model.network.stem[1].running_mean, mean)  # no forward in train mode


def test_a_network_that_was_in_train_mode_when_it_was_wrapped(scenes):
    network = segprox.load_model("demo-standard").model.train()
    assert verdicts(rows(Segmenter(network, mean=MEAN, std=STD), scenes)) == {"eval mode": "red"}


def test_train_mode_without_a_layer_that_cares(scenes):
    network = Around(segprox.load_model("demo-standard").model, normalised)
    network.training = True
    assert verdicts(rows(network, scenes)) == {"eval mode": "amber"}


@pytest.mark.parametrize(
    ("model", "verdict", "advice"),
    [
        (lambda: street(lambda x: normalised(x / 255), mean=(0.0,), std=(1.0,)), "red", "pass scale_255=True"),
        (lambda: street(scale_255=True), "red", "pass scale_255=False"),
        (lambda: street(lambda x: x.flip(1)), "amber", "pass bgr=True"),
        (lambda: street(bgr=True), "amber", "pass bgr=False"),
        (lambda: street(mean=(0.0,), std=(1.0,)), "red", "pass mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)"),
    ],
)
def test_a_model_that_is_fed_wrongly(scenes, model, verdict, advice):
    found = rows(model(), scenes, quick=True)["input"]
    assert found.verdict == verdict
    assert found.finding.endswith(advice)


def test_looking_at_other_ways_to_feed_changes_nothing(scenes):
    model = street()
    before = model(scenes[0].image[None])
    check_model(model, scenes)
    assert torch.equal(model(scenes[0].image[None]), before)
    assert (model.bgr, model.scale_255) == (False, False)


def test_without_labels_the_mirror_tells_how_a_model_is_fed(scenes):
    blind = [scene._replace(label=torch.full_like(scene.label, 255)) for scene in scenes]
    assert verdicts(rows(street(), blind)) == {"accuracy": "amber"}
    wrong = rows(street(lambda x: normalised(x / 255), mean=(0.0,), std=(1.0,)), blind, quick=True)["input"]
    assert wrong.verdict == "amber"
    assert "agreement when mirrored" in wrong.finding
    assert wrong.finding.endswith("pass scale_255=True")


def test_nan_logits(scenes):
    def poisoned(z):
        z = z.clone()
        z[:, 2, :8] = torch.nan
        return z

    found = rows(street(after=poisoned), scenes)
    assert found["logits"].verdict == "red"
    assert "NaN or infinite logits" in found["logits"].finding
    assert found["finite differences"].verdict == "red"
    assert found["repeatable"].verdict == "green"  # NaN twice is the same twice


def test_nan_gradients(scenes):
    found = rows(street(before=lambda x: x + (x - x).abs().sqrt()), scenes)  # the root of zero has no slope
    assert verdicts(found) == {"gradients": "red", "finite differences": "red", "black box": "red"}
    assert "NaN or infinite at up to 100.0%" in found["gradients"].finding


@pytest.mark.parametrize("before", [lambda x: (x * 8).round() / 8, lambda x: x.detach()])
def test_gradients_that_end(scenes, before):
    found = rows(street(before=before), scenes)
    assert {"gradients", "finite differences"} <= verdicts(found).keys()
    assert found["gradients"].verdict == "red"
    assert "exactly zero at 100.0% of the pixels" in found["gradients"].finding
    assert found["black box"].verdict == "red"
    assert "within 8/255 of scene-0000" in found["black box"].finding
    assert "gradients are masked" in found["black box"].finding


def test_a_network_without_a_graph(scenes):
    class Frozen(Around):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    found = rows(Segmenter(Frozen(segprox.load_model("demo-standard").model), mean=MEAN, std=STD), scenes)
    assert found["gradients"].verdict == "red"


def test_some_pixels_without_gradient(scenes):
    def skip(x):
        seen = torch.arange(x.shape[-1]) % 4 > 0
        return torch.where(seen, x, x.detach())

    found = rows(street(before=skip), scenes, quick=True)["gradients"]
    assert found.verdict == "amber"
    assert "exactly zero at 25.0% of the pixels" in found.finding


def test_a_pixel_with_gradient_in_one_channel_has_a_gradient(scenes):
    found = rows(street(before=lambda x: torch.cat([x[:, :1], x[:, 1:].detach()], 1)), scenes, quick=True)
    assert "exactly zero at 0.0% of the pixels" in found["gradients"].finding


def test_a_clamp_inside_the_network_does_not_disturb_finite_differences(scenes):
    harsh = [scene._replace(image=(10 * (scene.image - 0.5) + 0.5).clamp(0, 1)) for scene in scenes]
    model = street(before=lambda x: normalised(x.clamp(0, 1)), mean=(0.0,), std=(1.0,))
    assert rows(model, harsh)["finite differences"].verdict == "green"


def backward_times(factor):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            return factor * gradient

    return Wrong.apply


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "green"), (0.8, "amber"), (3.0, "red"), (-1.0, "red")])
def test_a_backward_that_is_wrong(scenes, factor, verdict):
    assert verdicts(rows(street(before=backward_times(factor)), scenes)) == (
        {} if verdict == "green" else {"finite differences": verdict} | ({"black box": "red"} if factor < 0 else {})
    )


def test_a_straight_through_estimator(scenes):
    found = rows(street(before=lambda x: x + ((x * 16).round() / 16 - x).detach()), scenes)
    assert found["gradients"].verdict == "green"  # they look fine
    assert found["finite differences"].verdict == "red"


def test_finite_differences_in_float32_where_a_network_insists_on_it(scenes):
    def insist(x):
        if x.dtype != torch.float32:
            raise RuntimeError("float32 only")
        return x

    found = rows(street(before=insist), scenes)
    assert verdicts(found) == {}
    assert "(float32)" in found["finite differences"].finding
    assert rows(street(before=lambda x: insist(backward_times(-1)(x))), scenes)["finite differences"].verdict == "red"


def test_dropout_that_never_sleeps(scenes):
    found = rows(street(before=lambda x: functional.dropout(x, 0.1, training=True)), scenes, quick=True)["repeatable"]
    assert found.verdict == "red"
    assert "dropout or noise" in found.finding


def test_noise_as_small_as_rounding(scenes):
    found = rows(street(after=lambda z: z + 1e-5 * torch.rand_like(z)), scenes, quick=True)["repeatable"]
    assert found.verdict == "amber"


@pytest.mark.parametrize(
    "before",
    [
        lambda x: x - x.mean((0, 2, 3), keepdim=True),
        lambda x: x / x.abs().max(),
        lambda x: functional.batch_norm(x, None, None, training=True),
    ],
)
def test_images_that_influence_each_other(scenes, before):
    found = rows(street(before=before), scenes)["batch"]
    assert found.verdict == "red"
    assert "beside another" in found.finding


def test_a_network_that_takes_one_image_only(scenes):
    def single(x):
        return x.reshape(1, *scenes[0].image.shape)

    found = rows(street(before=single), scenes)["batch"]
    assert found.verdict == "red"
    assert "fails on a batch of two" in found.finding


def test_classes_that_do_not_fit(scenes):
    cases = [(8, "green"), (7, "amber"), (9, "red"), (None, "green")]
    for wanted, verdict in cases:
        assert rows(street(), scenes[:1], num_classes=wanted, quick=True)["classes"].verdict == verdict
    found = rows(street(channels=[0, 1, 2]), scenes, quick=True)
    assert found["classes"].verdict == "red"
    assert "occurs but the model's classes are 0 to 2" in found["classes"].finding


def always(scenes, rank):
    """A model that sees nothing but the class of this rank among the most frequent ones."""
    labels = torch.cat([scene.label for scene in scenes]).flatten()
    chosen = labels[labels != 255].bincount(minlength=8).argsort(descending=True)[rank]
    return street(after=lambda z: z + 100 * functional.one_hot(chosen, 8).view(8, 1, 1))


@pytest.mark.parametrize(("rank", "verdict"), [(0, "amber"), (1, "red"), (7, "red")])
def test_a_model_that_says_the_same_everywhere(scenes, rank, verdict):
    found = rows(always(scenes, rank), scenes, quick=True)
    assert found["accuracy"].verdict == verdict
    assert found["saturation"].verdict == "amber"


def test_a_poor_model_has_learnt_something(scenes):
    noise = 7 * torch.randn(8, *scenes[0].image.shape[1:], generator=torch.Generator().manual_seed(0))
    assert rows(street(after=lambda z: z + noise[:, ::2, ::2]), scenes, quick=True)["accuracy"].verdict == "green"


def test_accuracy_needs_more_than_one_class(scenes):
    single = [scene._replace(label=torch.zeros_like(scene.label)) for scene in scenes]
    found = rows(street(), single, quick=True)["accuracy"]
    assert found.verdict == "amber"
    assert "take images with more than one class" in found.finding


def test_gap_of_logits():
    first = torch.tensor([0.0, 4.0, torch.nan, torch.inf])
    assert gap(first, first.clone()) == 0
    assert gap(first, torch.tensor([0.0, 3.0, torch.nan, torch.inf])) == 0.25
    assert gap(first, first.nan_to_num(nan=0)) == torch.inf
    assert gap(first.nan_to_num(nan=0), first) == torch.inf


def test_saturation_is_about_scale(scenes):
    found = rows(street(after=lambda z: 100 * z), scenes)
    assert verdicts(found) == {"saturation": "amber"}
    assert "trust attacks on margins" in found["saturation"].finding


def test_refusals(scenes):
    with pytest.raises(SegproxError, match="at least one image"):
        check_model(street(), [])
    with pytest.raises(SegproxError, match="label -1 is not one of the 8 classes"):
        check_model(street(), [scenes[0]._replace(label=torch.full_like(scenes[0].label, -1))])
