"""Messages about wrong constructor arguments, the same for every optimizer."""

import math
import numbers

import keras

from keras_secondorder.solvers.bounds import RelativeRadius, RelativeStep
from keras_secondorder.solvers.damping import AdaptiveDamping
from keras_secondorder.solvers.step_rules import StepRule


def check_one_of(name: str, value, choices) -> None:
    """Refuse a value that is not among the choices.

    Args:
        name: The argument's name.
        value: What was given.
        choices: What may be given, a tuple or a dictionary's keys.

    Raises:
        ValueError: It is another value.
    """
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {tuple(choices)}. Received {name}={value!r}."
        )


def check_together(name: str, value, other: str, other_value, choices: dict) -> None:
    """Refuse an unknown value of one argument, or one that another does not go with.

    Args:
        name: The argument's name.
        value: What was given for it.
        other: The other argument's name.
        other_value: What was given for that.
        choices: What the other may be, for each value of the first.

    Raises:
        ValueError: They are not among the choices.
    """
    check_one_of(name, value, choices)
    if other_value not in choices[value]:
        raise ValueError(
            f"{name}={value!r} goes with `{other}` one of {tuple(choices[value])}. "
            f"Received {other}={other_value!r}."
        )


def check_range(name: str, value, above: float, most: float | None = None) -> None:
    """Refuse a number outside a range.

    Args:
        name: The argument's name.
        value: What was given.
        above: The value must be larger than this.
        most: The value must not be larger than this, None for no bound.

    Raises:
        ValueError: It lies outside, or is no finite number.
    """
    within = _is_finite(value) and above < value
    if not within or (most is not None and value > most):
        bound = _upper_bound(value, most)
        raise ValueError(
            f"`{name}` must be above {above}{bound}. Received {name}={value!r}."
        )


def check_numbers(values: dict, most: float | None = None, auto: bool = False) -> None:
    """Refuse numbers that are not above 0, and strings.

    Args:
        values: By name: numbers, or what is checked elsewhere, as schedules and None.
        most: None may be larger than this, None for no bound.
        auto: Whether they may be "auto".

    Raises:
        ValueError: One lies outside, or is a string.
    """
    for name, value in values.items():
        if isinstance(value, str) and not (auto and value == "auto"):
            choices = "a number or 'auto'" if auto else "a number"
            raise ValueError(f"`{name}` must be {choices}. Received {name}={value!r}.")
        if _is_number(value):
            check_range(name, value, 0, most)


def check_count(name: str, value, least: int = 1) -> None:
    """Refuse what does not count anything.

    Args:
        name: The argument's name.
        value: What was given.
        least: The value must not be smaller than this.

    Raises:
        ValueError: It is no integer, or too small.
    """
    whole = isinstance(value, numbers.Integral) and _is_number(value)
    if not whole or value < least:
        raise ValueError(
            f"`{name}` must be an integer of at least {least}. "
            f"Received {name}={value!r}."
        )


def check_counts(values: dict, optional: dict) -> None:
    """Refuse what does not count anything.

    Args:
        values: By name: integers of at least 1.
        optional: By name: the same, or None.

    Raises:
        ValueError: One is no integer, or too small.
    """
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**values, **given}.items():
        check_count(name, value)


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_finite(value) -> bool:
    return _is_number(value) and math.isfinite(value)


def _upper_bound(value, most: float | None) -> str:
    if most is not None:
        return f" and at most {most}"
    return " and finite" if value == math.inf else ""


def check_rates(learning_rate, momentum) -> None:
    """Refuse a learning rate and a momentum that do not go together.

    Args:
        learning_rate: A number, a schedule or "adaptive".
        momentum: A number, a schedule, "auto", or "adaptive" with that learning rate.

    Raises:
        ValueError: They are something else.
    """
    adaptive = isinstance(learning_rate, str)
    if adaptive and learning_rate != "adaptive":
        raise ValueError(
            "`learning_rate` must be a number, a schedule or 'adaptive'. "
            f"Received learning_rate={learning_rate!r}."
        )
    choices = ("auto", "adaptive") if adaptive else ("auto",)
    if isinstance(momentum, str) and momentum not in choices:
        raise ValueError(
            "`momentum` must be a number or a schedule, or 'adaptive' where the "
            f"learning rate is. Received momentum={momentum!r} with "
            f"learning_rate={learning_rate!r}."
        )
    if not (isinstance(momentum, str) or callable(momentum)):  # schedules are
        check_momentum(momentum)


def check_bounds(norm_constraint, relative_step, learning_rate=None) -> None:
    """Refuse what does not bound a step.

    Args:
        norm_constraint: Bound on the step in the metric of the curvature.
        relative_step: Bound on the step of a layer; "auto" or None where the learning
            rate is "adaptive".
        learning_rate: The learning rate.

    Raises:
        ValueError: One of them is something else.
    """
    schedule = keras.optimizers.schedules.LearningRateSchedule
    for name, value, kind in (
        ("norm_constraint", norm_constraint, RelativeRadius),
        ("relative_step", relative_step, RelativeStep),
    ):
        if _is_number(value):
            check_range(name, value, 0)
        elif not (value in (None, "auto") or isinstance(value, schedule | kind)):
            raise ValueError(
                f"`{name}` must be a number, a schedule, a `{kind.__name__}`, None or "
                f"'auto'. Received {name}={value!r}."
            )
    if learning_rate == "adaptive" and relative_step not in (None, "auto"):
        raise ValueError(
            "`relative_step` bounds steps of a given learning rate; with 'adaptive', "
            "the quadratic model sets them, and `norm_constraint` bounds them. "
            f"Received relative_step={relative_step!r}."
        )


def check_step_rule(
    step_rule, learning_rate, momentum, norm_constraint, relative_step
) -> None:
    """Refuse what is no step rule, or one that would ignore an argument.

    Args:
        step_rule: A rule with a momentum and bounds of its own, or None.
        learning_rate: A number, a schedule or "adaptive".
        momentum: "auto" beside a rule, as are the two that follow.
        norm_constraint: Bound on the step in the metric of the curvature.
        relative_step: Bound on the step of a layer.

    Raises:
        ValueError: It is no rule, has a number out of its range, or does not go with
            the arguments.
    """
    if step_rule is None:
        return
    check_kind("step_rule", step_rule, StepRule, "a `StepRule`, or None")
    if learning_rate == "adaptive" and not step_rule.needs_model:
        raise ValueError(
            "learning_rate='adaptive' is the rule `AdaptiveStep`, and another was "
            f"given. Received step_rule={step_rule!r}. Leave one of them out."
        )
    given = {
        "momentum": momentum,
        "norm_constraint": norm_constraint,
        "relative_step": relative_step,
    }
    own = {name: getattr(step_rule, name, None) for name in given}
    mu = own.pop("momentum")
    if not (mu is None or callable(mu)):  # schedules are
        check_momentum(mu)
    check_numbers(own)
    check_bounds(**own)
    for name, value in given.items():
        if value != "auto":
            raise ValueError(
                f"`step_rule` has a momentum and bounds of its own: `{name}` would be "
                f"ignored. Received {name}={value!r} with step_rule={step_rule!r}. "
                f"Give it to the rule, as in `TrustRegionStep({name}=...)`."
            )


def check_momentum(momentum: float) -> None:
    """Refuse a momentum outside of [0, 1).

    Args:
        momentum: A number.

    Raises:
        ValueError: It lies outside.
    """
    if not (_is_finite(momentum) and 0 <= momentum < 1):
        raise ValueError(
            "`momentum` must be at least 0 and below 1. "
            f"Received momentum={momentum!r}."
        )


def check_damping(
    damping, shared: dict, zero: bool = False, blocks: bool = False
) -> None:
    """Refuse what is no damping, or one that cannot be adapted.

    Args:
        damping: A positive number, a schedule, a rule, or "auto".
        shared: Keras's shared arguments.
        zero: Whether it may be 0.
        blocks: Whether the curvature has blocks, to which damping can be relative.

    Raises:
        ValueError: It is a number below that, or something else; a rule would measure
            steps that are not made.
    """
    if getattr(damping, "relative", False) and not blocks:
        raise ValueError(
            "`AdaptiveDamping(relative=True)` is in units of the blocks of `KFAC`. "
            f"Received damping={damping!r}. Leave `relative` out."
        )
    schedule = keras.optimizers.schedules.LearningRateSchedule
    number = _is_number(damping)
    if not (number or isinstance(damping, schedule | AdaptiveDamping)) and (
        damping != "auto"
    ):
        raise ValueError(
            "`damping` must be a number, a schedule, an `AdaptiveDamping` object or "
            f"'auto'. Received damping={damping!r}."
        )
    accumulated = shared.get("gradient_accumulation_steps")
    if accumulated and (damping == "auto" or isinstance(damping, AdaptiveDamping)):
        raise ValueError(
            "Damping is adapted to what a step does to the loss, and the steps of "
            "single batches are not made where their directions are averaged. Received "
            f"gradient_accumulation_steps={accumulated} with damping={damping!r}. "
            "Pass a number or a schedule as `damping`, or train on larger batches."
        )
    if number:
        (check_at_least if zero else check_range)("damping", damping, 0)


def check_at_least(name: str, value, least: float, most: float | None = None) -> None:
    """Refuse a number outside a range that includes its ends.

    Args:
        name: The argument's name.
        value: What was given.
        least: The value must not be smaller than this.
        most: The value must not be larger than this, None for no bound.

    Raises:
        ValueError: It lies outside, or is no finite number.
    """
    within = _is_finite(value) and value >= least
    if not within or (most is not None and value > most):
        bound = _upper_bound(value, most)
        raise ValueError(
            f"`{name}` must be at least {least}{bound}. Received {name}={value!r}."
        )


def check_kind(name: str, value, kind: type, words: str) -> None:
    """Refuse an object of another kind.

    Args:
        name: The argument's name.
        value: What was given.
        kind: What it must be an instance of.
        words: That kind in words.

    Raises:
        ValueError: It is no such object.
    """
    if not isinstance(value, kind):
        raise ValueError(
            f"`{name}` must be {words}. Received {name}={value!r}, a "
            f"{type(value).__name__}."
        )


def check_rows(name: str, data) -> None:
    """Refuse what is no nest of arrays with a row for each example.

    Args:
        name: The argument's name.
        data: What was given: `(x, y, ...)`, of which all but `x` may be None.

    Raises:
        ValueError: Something in it is no array, or the numbers of rows differ.
    """
    flat = [t for t in keras.tree.flatten(list(data)) if t is not None]
    lengths = [t.shape[0] if getattr(t, "shape", ()) else None for t in flat]
    if data[0] is None or None in lengths or len({*lengths}) > 1:
        found = [type(t).__name__ for t in data] if None in lengths else lengths
        raise ValueError(
            f"`{name}` must hold arrays with as many rows as each other. Received "
            f"{', '.join(map(str, found))}."
        )
