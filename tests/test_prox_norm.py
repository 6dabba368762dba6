import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segprox.norms import project
from segprox.prox import prox_norm
from tests.oracles import prox_by_sorting

NORMS = {"l1": 1, "l2": 2, "linf": torch.inf}
DUALS = {"l1": torch.inf, "l2": 2, "linf": 1}
SEEDS = st.integers(0, 2**31)
STEPS = st.floats(-3, 2).map(lambda power: 10**power)
LEVELS = st.sampled_from([None, 1])  # few distinct values: many zeros and equal elements


def random_points(seed, shape=(2, 3, 2, 3), levels=None, dtype=torch.float64):
    points = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (points if levels is None else torch.round(points * levels) / levels).to(dtype)


def length(points, order):
    return torch.linalg.vector_norm(points.flatten(1), order, dim=1)


def objective(p, point, step, norm):
    return 0.5 * (p - point).square().flatten(1).sum(1) + step * length(p, NORMS[norm])


def by_closed_form(point, step, norm):
    """Soft thresholding, block soft thresholding and, for linf, the walk through sorted sizes; float64."""
    point, step = point.double(), step.double()
    if norm == "linf":
        box = torch.full_like(point, torch.inf)
        return prox_by_sorting(point, step, -box, box, torch.ones_like(point))
    steps = step.view(-1, *[1] * (point.ndim - 1))
    if norm == "l1":
        return torch.where(point.abs() > steps, point - steps * point.sign(), 0.0)
    lengths = length(point, 2).view_as(steps)
    return torch.where(lengths > steps, (lengths - steps) * point / lengths, 0.0)


@pytest.mark.parametrize("norm", NORMS)
@given(seed=SEEDS, step=STEPS, levels=LEVELS, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_agrees_with_closed_forms(norm, seed, step, levels, dtype):
    points, steps = random_points(seed, levels=levels, dtype=dtype), torch.tensor([step, step / 7], dtype=dtype)
    found = prox_norm(points, steps, norm)
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.double(), by_closed_form(points, steps, norm), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("step", [1e-3, 1.0, 50.0, 2000.0])
def test_linf_agrees_with_sorting_when_there_are_many_elements(step):
    points, steps = random_points(0, (1, 3, 40, 40), dtype=torch.float32), torch.tensor([step])
    expected = by_closed_form(points, steps, "linf")
    torch.testing.assert_close(prox_norm(points, steps, "linf").double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", NORMS)
@given(seed=SEEDS, step=STEPS, levels=LEVELS)
def test_nothing_nearby_is_better(norm, seed, step, levels):
    points, steps = random_points(seed, levels=levels), torch.tensor([step, step / 7], dtype=torch.float64)
    found = prox_norm(points, steps, norm)
    least = objective(found, points, steps, norm)
    for closeness in (1e-4, 1e-2, 1.0):
        for noise in random_points(seed + 1, (10, *points.shape)):
            assert (objective(found + closeness * noise, points, steps, norm) >= least - 1e-12).all()
    for other in (points, torch.zeros_like(points), 0.9 * found, 1.1 * found):  # and along the way to both ends
        assert (objective(other, points, steps, norm) >= least - 1e-12).all()


@given(seed=SEEDS, step=STEPS, levels=LEVELS)
def test_what_the_step_takes_off_linf_is_a_projection_onto_the_l1_ball(seed, step, levels):
    # Moreau: a point is its prox of a norm plus its projection onto the ball of the dual norm.
    points, steps = random_points(seed, levels=levels), torch.tensor([step, step / 7], dtype=torch.float64)
    torch.testing.assert_close(prox_norm(points, steps, "linf") + project(points, steps, "l1"), points)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("levels", [None, 1])
def test_a_step_of_0_changes_nothing(norm, levels):
    points = random_points(0, levels=levels)
    points[1] = 0
    torch.testing.assert_close(prox_norm(points, torch.zeros(2), norm), points, rtol=1e-15, atol=0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("step", [1e9, torch.inf])
def test_a_huge_step_ends_at_0(norm, step):
    points = random_points(0)
    points[1] = 0
    assert (prox_norm(points, torch.full((2,), step, dtype=torch.float64), norm) == 0).all()


@pytest.mark.parametrize("norm", NORMS)
@given(seed=SEEDS)
def test_the_least_step_that_ends_at_0_is_the_dual_norm(norm, seed):
    points = random_points(seed)
    enough = length(points, DUALS[norm])
    assert (prox_norm(points, enough * (1 + 1e-9), norm) == 0).all()
    assert (prox_norm(points, enough * (1 - 1e-9), norm) != 0).flatten(1).any(1).all()


@pytest.mark.parametrize("norm", NORMS)
def test_results_do_not_depend_on_the_batch(norm):
    points, steps = random_points(0, (3, 3, 37, 29), dtype=torch.float32), torch.tensor([0.1, 1e9, 2.0])
    for point, step, found in zip(points, steps, prox_norm(points, steps, norm)):
        assert torch.equal(prox_norm(point[None], step[None], norm)[0], found)


@pytest.mark.parametrize("norm", NORMS)
def test_images_may_have_any_shape_and_number(norm):
    points, steps = random_points(0), torch.tensor([0.3, 0.7], dtype=torch.float64)
    assert torch.equal(prox_norm(points.flatten(1), steps, norm), prox_norm(points, steps, norm).flatten(1))
    assert prox_norm(points[:0], steps[:0], norm).shape == (0, 3, 2, 3)


@pytest.mark.parametrize("norm", NORMS)
def test_the_point_is_not_changed(norm):
    points = random_points(0)
    copy = points.clone()
    for step in (0.0, 0.3):
        prox_norm(points, torch.full((2,), step, dtype=torch.float64), norm).fill_(7.0)
        assert torch.equal(points, copy)


def test_l0_is_refused():
    with pytest.raises(ValueError, match="l0"):
        prox_norm(torch.ones(1, 3, 1, 1), torch.ones(1), "l0")
