"""Search for hyperparameters, with KerasTuner (`pip install keras-tuner`).

KerasTuner is imported when one of these names is first asked for, not before.
"""

import importlib

_FILES = {
    "BiasedRandomSearch": "biased_random_search",
    "BiasedRandomSearchOracle": "biased_random_search",
}

__all__ = ["BiasedRandomSearch", "BiasedRandomSearchOracle"]


def __getattr__(name: str):
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("keras_tuner")
    except ImportError as error:
        raise ImportError(
            f"`{name}` is built on KerasTuner, which is not installed. "
            "Install it with `pip install keras-tuner`."
        ) from error
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__():
    return __all__
