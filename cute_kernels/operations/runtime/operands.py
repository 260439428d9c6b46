"""The operands of one launch by name: what `Plan.operands` asks for, checked and laid out, on one device."""

import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cute_kernels.operations.compile import check_names
from cute_kernels.plan import Plan

Picker = Callable[[Sequence[Any]], tuple]


def picker(places: Sequence[int]) -> Picker:
    """Gives the values at these places, as a tuple however many there are."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class Operands(SimpleNamespace):
    """Tensors and numbers by the names of `Plan.operands`, as attributes; None, or left out, where there is none.

    Tensors are contiguous and aligned as the table says, in the shapes that the docstring of the plan's ``operands``
    gives, all on one device: `cute_kernels.operations` sees to that, and nothing is checked again here.
    """

    def replace(self, **changes: torch.Tensor | float | None) -> "Operands":
        return Operands(**(vars(self) | changes))

    def of(self, plan: Plan) -> "Operands":
        """The operands that a plan knows."""
        names = {operand.name for operand in plan.operands}
        return Operands(**{name: value for name, value in vars(self).items() if name in names})

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def addresses(self) -> dict[str, Any]:
        """Addresses by name; a number stays one."""
        given = vars(self).items()
        return {name: value.data_ptr() if isinstance(value, torch.Tensor) else value for name, value in given}

    def written(self, plan: Plan) -> dict[str, torch.Tensor]:
        """Tensors that the kernel writes, by name."""
        return {operand.name: getattr(self, operand.name) for operand in plan.operands if operand.written}

    def device(self, plan: Plan) -> torch.device:
        """Where all of them are. Raises TypeError: an operand that the plan needs is missing, or there is one that it
        does not know."""
        check_names(plan, vars(self))
        return next(iter(self.written(plan).values())).device
