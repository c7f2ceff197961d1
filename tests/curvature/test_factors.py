"""Properties that the factors of one batch must have, whatever the network."""

import keras
import numpy as np
import oracle
import problems
import pytest

from keras_secondorder.curvature.statistics import UNROLLED

# Sums of some dozen float32 products, compared with the largest entry.
RTOL = 1e-5
DATA = problems.classification()
FIRST = DATA.batches()[0]


def close(ours, right, rtol=RTOL):
    """Compare nested lists of arrays, each by its largest entry."""
    ours, right = keras.tree.flatten(ours), keras.tree.flatten(right)
    assert len(ours) == len(right)
    for a, b in zip(ours, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


def different(ours, right, share=0.01):
    ours, right = keras.tree.flatten(ours), keras.tree.flatten(right)
    for a, b in zip(ours, right, strict=True):
        assert np.abs(a - b).max() > share * np.abs(b).max()


def input_factors(factors):
    return [A for A, _ in factors]


def gradient_factors(factors):
    return [G for _, G in factors]


def make_classifier(head="logits", loss=None):
    model = problems.classifier(head)
    model.compile(optimizer="sgd", loss=loss or problems.LOSSES[head])
    return model


@pytest.fixture(scope="module")
def classifier():
    return make_classifier()


@pytest.fixture(scope="module")
def exact(classifier):
    return problems.statistics_of(
        classifier, FIRST.x, FIRST.one_hot, FIRST.sample_weight
    )


def test_exact_factors_equal_the_oracle(classifier, exact):
    w = FIRST.sample_weight / len(FIRST.x)
    layers = problems.oracle_layers(classifier)
    close(exact, [list(f) for f in oracle.factors(layers, "ce_logits", FIRST.x, w)])


def test_empirical_factors_equal_the_oracle(classifier, exact):
    ours = problems.statistics_of(
        classifier, FIRST.x, FIRST.one_hot, FIRST.sample_weight, "empirical"
    )
    w = FIRST.sample_weight / len(FIRST.x)
    layers = problems.oracle_layers(classifier)
    right = oracle.empirical_gradient_factors(
        layers, "ce_logits", FIRST.x, FIRST.one_hot, w
    )
    close(gradient_factors(ours), right)
    close(input_factors(ours), input_factors(exact))


def test_empirical_factors_of_a_squared_loss_equal_the_oracle():
    """The loss is 2 / D times -log p, a constant that must enter once."""
    model = problems.classifier()
    model.compile(optimizer="sgd", loss="mse")
    y = FIRST.x[:, :3]
    ours = problems.statistics_of(model, FIRST.x, y, fisher="empirical")
    w = np.full(len(y), 1 / len(y))
    layers = problems.oracle_layers(model)
    right = oracle.empirical_gradient_factors(layers, "mse", FIRST.x, y, w)
    close(gradient_factors(ours), right)


@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_labels_r9(classifier, fisher):
    """R9: with every label flipped only the empirical Fisher matrix changes."""
    flipped = np.roll(FIRST.one_hot, 1, axis=1)
    before, after = (
        problems.statistics_of(classifier, FIRST.x, y, fisher=fisher)
        for y in (FIRST.one_hot, flipped)
    )
    close(input_factors(after), input_factors(before), rtol=1e-7)
    if fisher == "empirical":
        different(gradient_factors(after), gradient_factors(before))
    else:
        close(gradient_factors(after), gradient_factors(before), rtol=1e-7)


COPIES = 4000
# 32,000 independent draws, whose squares spread by about their mean: a standard error
# of 0.6% of the largest entry, of which 5 are allowed.
MONTE_CARLO_RTOL = 0.03


@pytest.mark.parametrize("loss", ["crossentropy", "mse"])
def test_sampled_factors_have_the_exact_ones_as_expectation(loss):
    """The batch repeated 4,000 times has the same exact factors, and other draws."""
    model = make_classifier(loss=problems.LOSSES["logits"] if loss != "mse" else "mse")
    once = problems.statistics_of(
        model, FIRST.x, FIRST.one_hot, FIRST.sample_weight, "exact"
    )
    many = [np.concatenate([a] * COPIES) for a in (FIRST.x, FIRST.one_hot)]
    weights = np.concatenate([FIRST.sample_weight] * COPIES)
    sampled = problems.statistics_of(model, *many, weights, "sampled")
    close(gradient_factors(sampled), gradient_factors(once), rtol=MONTE_CARLO_RTOL)


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("head", ["softmax", "softmax layer"])
def test_three_heads_are_one_model(classifier, head, fisher):
    ours = problems.statistics_of(
        make_classifier(head), FIRST.x, FIRST.one_hot, FIRST.sample_weight, fisher
    )
    right = problems.statistics_of(
        classifier, FIRST.x, FIRST.one_hot, FIRST.sample_weight, fisher
    )
    close(ours, right)


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
def test_sigmoid_with_and_without_logits_is_one_model(fisher):
    results = []
    for activation in (None, "sigmoid"):
        model = problems.sequential(
            [problems.dense(5, "tanh"), problems.dense(3, activation)]
        )
        loss = keras.losses.BinaryCrossentropy(from_logits=activation is None)
        model.compile(optimizer="sgd", loss=loss)
        results.append(
            problems.statistics_of(model, FIRST.x, FIRST.one_hot, fisher=fisher)
        )
    close(*results)


@pytest.mark.parametrize(
    "labels", ["classes", "column"], ids=["labels (N,)", "labels (N, 1)"]
)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_shape_of_labels(classifier, labels, fisher):
    sparse = make_classifier(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    ours = problems.statistics_of(
        sparse, FIRST.x, getattr(FIRST, labels), fisher=fisher
    )
    right = problems.statistics_of(classifier, FIRST.x, FIRST.one_hot, fisher=fisher)
    close(ours, right)


# --- the batch and its weights -----------------------------------------------------


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_batch_of_one_row_has_the_scale_of_many_r7(classifier, fisher):
    """R7: the statistics of one row are those of the same row eight times."""
    one = DATA.rows(slice(7, 8))
    eight = DATA.rows([7] * 8)
    close(
        problems.statistics_of(classifier, one.x, one.one_hot, fisher=fisher),
        problems.statistics_of(classifier, eight.x, eight.one_hot, fisher=fisher),
    )


@pytest.mark.parametrize("c", [0.25, 7.0])
def test_scaling_the_sample_weights_scales_the_curvature(classifier, exact, c):
    ours = problems.statistics_of(
        classifier, FIRST.x, FIRST.one_hot, c * FIRST.sample_weight
    )
    close(gradient_factors(ours), [c * G for G in gradient_factors(exact)])
    close(input_factors(ours), input_factors(exact))


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_row_of_weight_zero_leaves_every_statistic_r19(classifier, fisher):
    """R19: whatever is in the row; the mean still counts it in its divisor."""
    other = FIRST.x.copy()
    other[problems.ZERO_ROW] = 3.0
    before, after = (
        problems.statistics_of(
            classifier, x, FIRST.one_hot, FIRST.sample_weight, fisher
        )
        for x in (FIRST.x, other)
    )
    close(after, before)


def test_weights_0_1_3_are_rows_repeated_that_often_r19(classifier):
    """R19: exactly, in batches of eight whose other rows have weight 0."""
    weighted = problems.statistics_of(
        classifier, FIRST.x, FIRST.one_hot, np.float32([0, 1, 3, 0, 0, 0, 0, 0])
    )
    repeated = DATA.rows([1, 2, 2, 2, 0, 0, 0, 0])
    right = problems.statistics_of(
        classifier, repeated.x, repeated.one_hot, np.float32([1] * 4 + [0] * 4)
    )
    close(weighted, right)


@pytest.mark.parametrize(
    ("reduction", "times"),
    [("sum", 8.0), (None, 8.0), ("mean", 1.0), ("mean_with_sample_weight", None)],
)
def test_reductions_scale_the_curvature(classifier, exact, reduction, times):
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, reduction=reduction)
    if times is None:
        times = 8.0 / FIRST.sample_weight.sum()
    ours = problems.statistics_of(
        make_classifier(loss=loss), FIRST.x, FIRST.one_hot, FIRST.sample_weight
    )
    close(gradient_factors(ours), [times * G for G in gradient_factors(exact)])
    close(input_factors(ours), input_factors(exact))


def test_duplicating_the_batch_changes_nothing(classifier):
    """Neither all rows of 64 pairs nor, as a fraction, one of each pair."""
    once = problems.classification(64)
    right = problems.statistics_of(classifier, once.x, once.one_hot, once.sample_weight)
    pairs = once.rows(np.repeat(np.arange(64), 2))
    for fraction in (1.0, 0.5):
        ours = problems.statistics_of(
            classifier, pairs.x, pairs.one_hot, pairs.sample_weight, "exact", fraction
        )
        close(ours, right)


# --- several outputs ---------------------------------------------------------------


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_two_outputs_add_up_by_their_loss_weights(fisher):
    def build():
        inputs = keras.Input((problems.FEATURES,))
        trunk = problems.dense(4, "tanh")(inputs)
        outputs = [problems.dense(3)(trunk), problems.dense(2)(trunk)]
        model = keras.Model(inputs, outputs)
        problems.fill(model)
        return model

    def trunk_factors(losses, weights):
        model = build()
        model.compile(optimizer="sgd", loss=losses, loss_weights=weights)
        y = [FIRST.one_hot, FIRST.x[:, :2]]
        return problems.statistics_of(model, FIRST.x, y, fisher=fisher)[0]

    loss = problems.LOSSES["logits"]
    both = trunk_factors([loss, "mse"], [0.5, 3.0])
    first = trunk_factors([loss, None], None)
    second = trunk_factors([None, "mse"], None)
    close(both[0], first[0])
    if fisher == "exact":
        close(both[1], 0.5 * first[1] + 3.0 * second[1])
    else:  # the gradients of one example at its two labels add up before squaring
        cross = both[1] - 0.5 * first[1] - 3.0 * second[1]
        assert np.trace(both[1]) > 0
        assert np.abs(cross).max() > RTOL * np.abs(both[1]).max()


def test_more_outputs_than_are_unrolled():
    """Beyond UNROLLED reverse passes run in a loop, with the same result."""
    units = UNROLLED + 2
    model = problems.sequential([problems.dense(units, "softmax")], scale=0.3)
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    ours = problems.statistics_of(model, FIRST.x, FIRST.classes)
    w = np.full(8, 1 / 8)
    layers = problems.oracle_layers(model)
    close(ours, [list(f) for f in oracle.factors(layers, "ce", FIRST.x, w)])
