"""Messages about wrong constructor arguments, the same for every optimizer."""


def check_one_of(name: str, value, choices: tuple) -> None:
    """Refuse a value that is not among the choices.

    Args:
        name: The argument's name.
        value: What was given.
        choices: What may be given.

    Raises:
        ValueError: It is another value.
    """
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {choices}. Received {name}={value!r}."
        )


def check_range(name: str, value, above: float, most: float | None = None) -> None:
    """Refuse a number outside a range.

    Args:
        name: The argument's name.
        value: What was given.
        above: The value must be larger than this.
        most: The value must not be larger than this, None for no bound.

    Raises:
        ValueError: It lies outside.
    """
    if not above < value or (most is not None and value > most):
        bound = "" if most is None else f" and at most {most}"
        raise ValueError(
            f"`{name}` must be above {above}{bound}. Received {name}={value}."
        )
