"""What a number in a policy may be. Accepted values become plain ``int`` and ``float``, so that the ``repr``
of equal settings, which is compared across ranks, does not depend on whether NumPy made them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Real


def check_int(policy: object, name: str, at_least: int, unit: str, remedy: str) -> None:
    """Make the field ``name`` of a frozen dataclass an ``int``.

    Raises:
        TypeError: it is a bool or not an integer (``operator.index`` decides).
        ValueError: it is less than ``at_least``.
    """
    value = getattr(policy, name)
    rule = f"an int >= {at_least} ({unit})"
    if isinstance(value, bool):
        raise TypeError(_message(policy, name, rule, value, remedy))
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(_message(policy, name, rule, value, remedy)) from error
    if number < at_least:
        raise ValueError(_message(policy, name, rule, value, remedy))
    object.__setattr__(policy, name, number)


def check_float(
    policy: object, name: str, rule: str, holds: Callable[[float], bool], remedy: str, *, none: bool = False
) -> None:
    """Make the field ``name`` of a frozen dataclass a finite ``float`` for which ``holds``.

    Args:
        none: ``None`` is a setting too (off), and stays.

    Raises:
        TypeError: it is a bool or not a real number.
        ValueError: it is not finite, or ``holds`` says no; ``rule`` says it in words.
    """
    value = getattr(policy, name)
    if value is None and none:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(policy, name, rule, value, remedy))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and holds(number)):
        raise ValueError(_message(policy, name, rule, value, remedy))
    object.__setattr__(policy, name, number)


def _message(policy: object, name: str, rule: str, value: object, remedy: str) -> str:
    return f"{type(policy).__name__}: {name} must be {rule}, but is {value!r}: {remedy}"
