"""Which tensors an optimizer has, with their numbers and names."""

from torch import Tensor

from ..errors import ArgumentError
from ..ops.clip import unnamed


class Members:
    """The numbers and names of an optimizer's tensors.

    Over an arena a tensor's number is its index there, else its place in the parameter groups.
    Groups may be changed at any time: each method takes the current ones.

    Args:
        arena: of the optimizer, or None.
    """

    def __init__(self, arena):
        self.arena = arena
        self._numbers = {} if arena is None else {id(p): i for i, p in enumerate(arena.masters)}

    def number_of(self, p: Tensor) -> int:
        """The number of a tensor of the arena.

        Args:
            p: one of arena.parameters().

        Raises:
            ArgumentError: for another tensor.
        """
        if id(p) not in self._numbers:
            raise ArgumentError(
                f"a parameter of shape {tuple(p.shape)} is not in the optimizer's arena, whose "
                "tensors alone it updates; for another set of parameters: arena.release(), then a "
                "new Arena and a new optimizer"
            )
        return self._numbers[id(p)]

    def rows(self, groups: list[dict]) -> list[tuple[int, Tensor, int]]:
        """(group, parameter, number) of each parameter."""
        rows = [(g, p) for g, group in enumerate(groups) for p in group["params"]]
        if self.arena is None:
            return [(g, p, i) for i, (g, p) in enumerate(rows)]
        return [(g, p, self.number_of(p)) for g, p in rows]

    def gradient_holders(self, groups: list[dict]) -> list[Tensor]:
        """By number: the tensor whose `.grad` is the gradient."""
        if self.arena is None:
            return [p for group in groups for p in group["params"]]
        return self.arena.params

    def count(self, groups: list[dict]) -> int:
        """How many tensors have a number."""
        return len(self.gradient_holders(groups))

    def names(self, groups: list[dict]) -> list[str]:
        """By number."""
        if self.arena is not None:
            return [s.name for s in self.arena.segments]
        params = self.gradient_holders(groups)
        named = [name for group in groups for name in group.get("param_names", ())]
        return named if len(named) == len(params) else unnamed(params)

    def names_by_group(self, groups: list[dict]) -> list[list[str]]:
        """Of each group's tensors."""
        names, rows = self.names(groups), iter(self.rows(groups))
        return [[names[next(rows)[2]] for _ in group["params"]] for group in groups]
