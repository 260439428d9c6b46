"""Facts of an object that follow from others: a name, a rule, and the meaning in a string behind it, in two lines."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any


@abstractmethod
def _of_subclass(self: Any) -> Any:
    """The rule of a fact that a subclass has to give."""


def fact(rule: Callable[[Any], Any] = _of_subclass) -> Any:
    """Declares a fact: a property; abstract without a rule. The other names say what its value is."""
    return property(rule)


number = flag = text = fact
