"""What can be wrong with a model before it serves: one-line messages for the operator."""

from __future__ import annotations


class ModelSourceError(ValueError):
    """The model cannot be found, fetched or converted."""


class UnsupportedArchitectureError(ValueError):
    """The model's architecture would be served wrongly, so it is not served."""


class PackageClashError(RuntimeError):
    """An installed package takes the place of one of ours."""


def first_line(error: Exception) -> str:
    """What an error of another library says, without its advice below."""
    return str(error).strip().partition("\n")[0]
