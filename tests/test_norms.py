import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segprox import Problem
from segprox.norms import distance, dual, elementwise_, project, random_within, scale, steepest, unit

NORMS = ["l0", "l1", "l2", "linf"]
SEEDS = st.integers(0, 2**31)


def random_images(seed, batch=2, channels=3, height=2, width=3, spread=1.0, levels=None, dtype=torch.float64):
    """Perturbations, with `levels` rounded to multiples of 1 / levels: many zeros and equal elements."""
    g = torch.Generator().manual_seed(seed)
    images = spread * torch.randn(batch, channels, height, width, dtype=torch.float64, generator=g)
    return (images if levels is None else torch.round(images * levels) / levels).to(dtype)


def size(image, norm):
    """The norm of one image from its definition, element by element."""
    pixels = image.double().flatten(1).T.tolist()
    elements = [abs(value) for pixel in pixels for value in pixel]
    if norm == "l0":
        return sum(any(pixel) for pixel in pixels)
    if norm == "linf":
        return max(elements)
    return math.fsum(elements) if norm == "l1" else math.sqrt(math.fsum(e * e for e in elements))


def into_ball(image, radius, norm):
    """A point of the ball, in whatever direction `image` is, but not the nearest one."""
    if norm == "l0":
        kept = torch.zeros_like(image[0]).flatten()
        kept[: int(radius)] = 1
        return image * kept.view_as(image[0])
    return image * min(1.0, radius / size(image, norm))


def shrinkage_by_bisection(sizes, radius):
    """The t with sum of max(sizes - t, 0) = radius."""
    low, high = 0.0, sizes.max().item()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (sizes - middle).clamp(min=0).sum() > radius else (low, middle)
    return high


def nearest_by_definition(image, radius, norm):
    """The projection of one image in float64, with none of the formulas of `project`."""
    image = image.double()
    if norm == "linf":
        return torch.where(image.abs() <= radius, image, radius * image.sign())
    if norm == "l2":
        return image if size(image, "l2") <= radius else image * (radius / size(image, "l2"))
    if size(image, "l1") <= radius:
        return image
    return image.sign() * (image.abs() - shrinkage_by_bisection(image.abs(), radius)).clamp(min=0)


def test_distances_of_a_known_image():
    # One pixel changed in two channels, one in one channel, two pixels not at all.
    image = torch.tensor([[[3.0, 0.0], [0.0, 0.0]], [[-4.0, 0.0], [0.0, 12.0]], [[0.0, 0.0], [0.0, 0.0]]])
    expected = {"l0": 2, "l1": 19, "l2": 13, "linf": 12}
    for norm, value in expected.items():
        assert distance(torch.stack([image, 0 * image]), norm).tolist() == [value, 0]


@pytest.mark.parametrize("norm", NORMS)
@given(seed=SEEDS, levels=st.sampled_from([None, 1]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_distances_follow_their_definitions(norm, seed, levels, dtype):
    images = random_images(seed, levels=levels, dtype=dtype)
    found = distance(images, norm)
    assert found.dtype == dtype
    assert found.tolist() == pytest.approx([size(image, norm) for image in images], rel=1e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_batch_has_no_distances(norm, dtype):
    found = distance(torch.zeros(0, 3, 2, 2, dtype=dtype), norm)
    assert found.shape == (0,)
    assert found.dtype == dtype


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
def test_the_dual_norm_is_the_most_a_linear_function_grows_in_the_unit_ball(norm):
    gradient = torch.tensor([0.8, -0.3], dtype=torch.float64)
    angles = torch.linspace(0, 2 * math.pi, 80_001, dtype=torch.float64)  # includes the corners of both squares
    directions = torch.stack([angles.cos(), angles.sin()])
    p = {"l1": 1, "l2": 2, "linf": math.inf}[norm]
    most = (gradient @ (directions / torch.linalg.vector_norm(directions, p, dim=0))).max()
    torch.testing.assert_close(distance(gradient.view(1, 2, 1, 1), dual(norm))[0], most, rtol=1e-6, atol=0)


def test_l0_shares_its_dual_with_l1():
    assert (
        dual("l0") == "linf"
    )  # by convention (FMN): an element moves by any amount, so only the largest slope matters


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 2, 2)])
def test_scale_gives_every_image_its_own_factor(shape):
    batch = random_images(0, 3, 1, 2, 4).flatten()[: math.prod(shape)].view(shape)
    scaled = scale(batch, torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64))
    assert torch.equal(scaled, torch.stack([batch[0] + batch[0], torch.zeros_like(batch[1]), -batch[2]]))
    assert scale(batch[:0], torch.zeros(0)).shape == (0, *shape[1:])


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@pytest.mark.parametrize("spread", [1e-12, 1.0, 1e12])
def test_unit_keeps_the_direction_and_has_norm_1(norm, spread):
    images = random_images(0, spread=spread, dtype=torch.float32)
    images[1] = 0
    found = unit(images, norm)
    assert size(found[0], norm) == pytest.approx(1, rel=1e-6)
    assert (found[1] == 0).all()  # not NaN
    factor = size(images[0], norm)
    torch.testing.assert_close(found[0].double() * factor, images[0].double(), rtol=1e-6, atol=0)


def test_unit_is_of_l2_unless_told_otherwise():
    assert unit(torch.tensor([[3.0, 4.0]])).flatten().tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(("norm", "its_dual"), [("l2", "l2"), ("linf", "l1")])
@given(seed=SEEDS, levels=st.sampled_from([None, 1]))
def test_the_steepest_direction_grows_by_the_dual_norm(norm, its_dual, seed, levels):
    gradient = random_images(seed, levels=levels)
    gradient[:, 0, 0, 0] = 1.0  # never all zero
    for g, found in zip(gradient, steepest(gradient, norm)):
        assert size(found, norm) == pytest.approx(1)
        assert (g * found).sum().item() == pytest.approx(size(g, its_dual))


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_where_nothing_grows_there_is_no_steepest_direction(norm):
    assert (steepest(torch.zeros(1, 3, 2, 2), norm) == 0).all()


@pytest.mark.parametrize("norm", NORMS)
@given(
    seed=SEEDS,
    radius=st.floats(1e-3, 20),
    levels=st.sampled_from([None, 1]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_projections_are_inside_and_leave_what_was_inside(norm, seed, radius, levels, dtype):
    images = random_images(seed, levels=levels, dtype=dtype)
    found = project(images, torch.full((2,), radius, dtype=dtype), norm)
    assert found.dtype == dtype
    for before, after in zip(images, found):
        rounding = 4 * torch.finfo(dtype).eps * (radius + size(before, norm))
        assert size(after, norm) <= radius + rounding
        if size(before, norm) <= radius - rounding:  # next to the border rounding decides
            assert torch.equal(before, after)


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@given(
    seed=SEEDS,
    radius=st.floats(1e-3, 20),
    levels=st.sampled_from([None, 1]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_projections_agree_with_an_independent_solution(norm, seed, radius, levels, dtype):
    images = random_images(seed, levels=levels, dtype=dtype)
    radii = torch.tensor([radius, radius / 3], dtype=dtype)
    expected = torch.stack([nearest_by_definition(*pair, norm) for pair in zip(images, radii.tolist())])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(project(images, radii, norm).double(), expected, rtol=tolerance, atol=tolerance)


@given(seed=SEEDS, radius=st.integers(0, 7), levels=st.sampled_from([None, 1]))
def test_l0_keeps_the_best_of_all_sets_of_pixels(seed, radius, levels):
    image = random_images(seed, batch=1, levels=levels)
    error = (project(image, torch.tensor([float(radius)]), "l0") - image).square().sum()
    lost = image[0].square().sum(0).flatten()
    best = min(sum(left) for left in itertools.combinations(lost.tolist(), max(6 - radius, 0)))
    assert error.item() == pytest.approx(best, abs=1e-12)


@given(seed=SEEDS)
def test_l0_rounds_radii_down(seed):
    images = random_images(seed, batch=4)
    found = project(images, torch.tensor([0.9, 1.0, 2.5, torch.inf]), "l0")
    assert [size(image, "l0") for image in found] == [0, 1, 2, 6]


@pytest.mark.parametrize("norm", NORMS)
@given(seed=SEEDS, radius=st.floats(0.1, 8), closeness=st.sampled_from([1e-4, 1e-2, 1.0]))
def test_no_point_of_the_ball_is_nearer(norm, seed, radius, closeness):
    image = random_images(seed, batch=1)
    found = project(image, torch.tensor([radius], dtype=torch.float64), norm)
    error = (found - image).square().sum()
    for noise in random_images(seed + 1, batch=20, spread=closeness):
        other = into_ball(found[0] + noise, radius, norm)
        assert size(other, norm) <= radius + 1e-9
        assert (other - image).square().sum() >= error - 1e-12


@pytest.mark.parametrize("norm", NORMS)
def test_a_ball_of_radius_0_holds_only_0(norm):
    images = random_images(0)
    images[1] = 0
    assert (project(images, torch.zeros(2, dtype=torch.float64), norm) == 0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_ball_of_infinite_radius_holds_everything(norm):
    images = random_images(0, dtype=torch.float32)
    found = project(images, torch.full((2,), torch.inf), norm)
    assert torch.equal(found, images)


@pytest.mark.parametrize("norm", NORMS)
def test_projections_do_not_depend_on_the_batch(norm):
    images = random_images(0, batch=3, height=17, width=13, dtype=torch.float32)
    radii = {"l0": [5.0, 500.0, 0.0], "l1": [10.0, 1e4, 0.5], "l2": [3.0, 1e3, 0.1], "linf": [0.5, 9.0, 0.1]}[norm]
    together = project(images, torch.tensor(radii), norm)
    for image, radius, found in zip(images, radii, together):
        assert torch.equal(project(image[None], torch.tensor([radius]), norm)[0], found)


@pytest.mark.parametrize("norm", NORMS)
def test_projections_of_an_empty_batch_are_empty(norm):
    assert project(torch.zeros(0, 3, 2, 2), torch.zeros(0), norm).shape == (0, 3, 2, 2)


@pytest.mark.parametrize("norm", NORMS)
def test_projections_leave_their_input_alone(norm):
    images = random_images(0)
    copy = images.clone()
    for radius in (0.5, 100.0):  # outside and inside
        project(images, torch.full((2,), radius, dtype=torch.float64), norm).fill_(7.0)
        assert torch.equal(images, copy)


def draw(images, norm, seeds, radii):
    return random_within(images, radii, norm, [torch.Generator().manual_seed(seed) for seed in seeds])


@pytest.mark.parametrize("norm", ["l2", "linf"])
@given(seed=SEEDS, radius=st.floats(1e-3, 10), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_random_points_are_within_the_ball(norm, seed, radius, dtype):
    drawn = draw(torch.zeros(2, 3, 2, 2, dtype=dtype), norm, [seed, seed + 1], torch.tensor([radius, 0.0], dtype=dtype))
    assert drawn.dtype == dtype
    assert 0 < size(drawn[0], norm) <= radius * (1 + 1e-6)
    assert (drawn[1] == 0).all()


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_random_points_depend_on_their_image_only(norm):
    images = torch.rand(3, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    labels, radii = torch.zeros(3, 5, 4, dtype=torch.long), torch.tensor([0.1, 0.2, 0.3])

    def drawn(chosen):
        sources = Problem.build(images[chosen], labels[chosen], seed=3).generators()
        return [random_within(images[chosen], radii[chosen], norm, sources) for _ in range(2)]

    first, second = drawn([0, 1, 2])
    assert not torch.equal(first, second)  # one source gives new numbers every time
    assert not torch.allclose(first[0] / radii[0], first[1] / radii[1])  # and images differ from each other
    for order in ([2, 0, 1], [1], [1, 1]):
        again = drawn(order)
        assert torch.equal(again[0], first[order])
        assert torch.equal(again[1], second[order])


def test_random_points_of_linf_are_uniform():
    count = 40_000
    drawn = draw(torch.zeros(1, 4, 100, 100), "linf", [0], torch.tensor([0.5]))
    shares = torch.histc(drawn, bins=10, min=-0.5, max=0.5) / count
    assert shares.sum() == pytest.approx(1)
    assert (shares - 0.1).abs().max() < 5 * math.sqrt(0.1 * 0.9 / count)


def test_random_points_of_l2_are_uniform():
    count = 4000
    drawn = draw(torch.zeros(count, 2, 1, 1), "l2", range(count), torch.full((count,), 2.0)).flatten(1)
    lengths = torch.linalg.vector_norm(drawn, dim=1)
    for share in (0.1, 0.25, 0.5, 0.9):  # a disc around the centre holds as many points as its area says
        within = (lengths <= 2.0 * math.sqrt(share)).double().mean().item()
        assert within == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / count))
    quadrants = ((drawn[:, 0] > 0) * 2 + (drawn[:, 1] > 0).long()).bincount(minlength=4) / count
    assert (quadrants - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / count)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_no_images_need_no_random_points(norm):
    drawn = random_within(torch.zeros(0, 3, 2, 2, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), norm, [])
    assert drawn.shape == (0, 3, 2, 2)
    assert drawn.dtype == torch.float64


@pytest.mark.parametrize("function", [torch.sigmoid, torch.nn.functional.softplus])
def test_elementwise_functions_do_not_depend_on_the_batch(function):
    """At this size, the plain functions of these images do."""
    images = random_images(3, batch=50, height=7, width=11, spread=3.0, dtype=torch.float32)
    together = elementwise_(function, images.clone())
    torch.testing.assert_close(together, function(images))
    for i in range(len(images)):
        assert torch.equal(together[i : i + 1], elementwise_(function, images[i : i + 1].clone()))
