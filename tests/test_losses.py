import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segprox.losses import dlr, dlr_plus, margin

LOSSES = {"margin": margin, "dlr_plus": dlr_plus, "dlr": dlr}


def random_case(classes, seed=0, size=(2, 6, 5)):
    generator = torch.Generator().manual_seed(seed)
    batch, height, width = size
    logits = torch.randn(batch, classes, height, width, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, classes, size, generator=generator)
    weights = torch.rand(size, dtype=torch.float64, generator=generator)
    return logits, labels, weights


def by_definition(logits, labels, targeted):
    """DLR+ pixel by pixel, from the formula, with autograd."""
    rows, wanted = logits.movedim(1, -1).reshape(-1, logits.shape[1]), labels.flatten()
    values = []
    for z, y in zip(rows, wanted.tolist()):
        others = torch.cat([z[:y], z[y + 1 :]])
        ordered = list(z.sort(descending=True).values)
        while len(ordered) < 4:
            ordered.append(ordered[len(z) - 1] - 1)
        if targeted:
            values.append(-(z[y] - others.max()) / (ordered[0] - (ordered[2] + ordered[3]) / 2))
        else:
            values.append((z[y] - others.max()) / (ordered[0] - ordered[2]))
    return torch.stack(values).view(labels.shape)


@given(classes=st.integers(2, 8), seed=st.integers(0, 2**31), targeted=st.booleans())
def test_dlr_plus_and_its_gradient_follow_the_formula(classes, seed, targeted):
    logits, labels, weights = random_case(classes, seed, (2, 3, 2))
    values, pullback = dlr_plus(logits, labels, targeted=targeted)
    leaf = logits.clone().requires_grad_()
    expected = by_definition(leaf, labels, targeted)
    torch.testing.assert_close(values, expected.detach())
    (gradient,) = torch.autograd.grad((weights * expected).sum(), leaf)
    torch.testing.assert_close(pullback(weights), gradient)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 4, 9])
def test_gradients_match_finite_differences(name, targeted, classes):
    logits, labels, weights = random_case(classes)
    loss, h = LOSSES[name], 1e-6
    gradient = loss(logits, labels, targeted=targeted).pullback(weights)
    direction = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ahead, behind = (loss(logits + s * h * direction, labels, targeted=targeted).values for s in (1, -1))
    numeric = (weights * (ahead - behind)).sum() / (2 * h)
    torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [margin, dlr_plus])
@pytest.mark.parametrize("targeted", [False, True])
def test_sign_says_whether_the_goal_is_reached(loss, targeted):
    logits, labels, _ = random_case(5)
    reached = (logits.argmax(1) == labels) == targeted
    assert torch.equal(loss(logits, labels, targeted=targeted).values < 0, reached)


@pytest.mark.parametrize("loss", [margin, dlr_plus])
@pytest.mark.parametrize("targeted", [False, True])
def test_tolerance_tightens_the_constraint(loss, targeted):
    logits, labels, _ = random_case(5)
    plain, tight = (loss(logits, labels, targeted=targeted, tolerance=t).values for t in (0.0, 0.1))
    torch.testing.assert_close(tight, plain + 0.1)


@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3), targeted=st.booleans())
def test_dlr_plus_does_not_depend_on_the_scale_of_logits(seed, scale, targeted):
    logits, labels, _ = random_case(6, seed)
    one, other = (dlr_plus(z, labels, targeted=targeted).values for z in (logits, scale * logits + 3))
    torch.testing.assert_close(one, other)


@given(seed=st.integers(0, 2**31), targeted=st.booleans())
def test_dlr_plus_does_not_depend_on_the_order_of_classes(seed, targeted):
    logits, labels, weights = random_case(6, seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    value, pullback = dlr_plus(logits, labels, targeted=targeted)
    moved_value, moved_pullback = dlr_plus(logits[:, order], order.argsort()[labels], targeted=targeted)
    torch.testing.assert_close(value, moved_value)
    torch.testing.assert_close(pullback(weights)[:, order], moved_pullback(weights))


def test_two_classes_give_a_soft_sign_of_the_margin():
    logits, labels, _ = random_case(2)
    m = margin(logits, labels).values
    torch.testing.assert_close(dlr_plus(logits, labels).values, m / (1 + m.abs()))


def test_dlr_is_the_negative_of_dlr_plus():
    logits, labels, weights = random_case(5)
    torch.testing.assert_close(dlr(logits, labels).values, -dlr_plus(logits, labels).values)
    torch.testing.assert_close(dlr(logits, labels).pullback(weights), -dlr_plus(logits, labels).pullback(weights))


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_equal_logits_give_finite_values(classes):
    values, pullback = dlr_plus(torch.zeros(1, classes, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long))
    assert (values == 0).all()
    assert pullback(torch.ones(1, 2, 2)).isfinite().all()


def test_neither_logits_nor_weights_are_changed():
    logits, labels, weights = random_case(5)
    copies = logits.clone(), weights.clone()
    for loss in LOSSES.values():
        loss(logits, labels).pullback(weights)
    assert torch.equal(logits, copies[0])
    assert torch.equal(weights, copies[1])
