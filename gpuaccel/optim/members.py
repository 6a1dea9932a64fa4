"""Which tensors an optimizer has, with their numbers and names; a state_dict that fits them."""

import itertools

from torch import Tensor

from ..errors import ArgumentError
from ..ops.clip import unnamed
from .update_rule import UpdateRule


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
        """The number of one of arena.parameters(); ArgumentError for another tensor."""
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
        return self.arena.module_parameters

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


def fitted(state_dict: dict, param_groups: list[dict], members: Members, rule: UpdateRule):
    """A dict that an optimizer can load, with the tensors in its order.

    Where both sides name their tensors, they are matched by name. `state_dict` stays as it is.

    Raises:
        ArgumentError: for a state that is missing or has another shape than its parameter, and for
            other groups than an arena's.
    """
    names = members.names_by_group(param_groups)
    if members.arena is not None or all("param_names" in group for group in param_groups):
        state_dict = _matched(state_dict, param_groups, names)
    mine = [len(group["params"]) for group in param_groups]
    stored = [len(group["params"]) for group in state_dict["param_groups"]]
    # Without an arena torch says so.
    if members.arena is not None and mine != stored:
        raise ArgumentError(
            f"state_dict has parameter groups of {stored} tensors; expected {mine}, those of "
            "arena.parameter_groups(weight_decay). One group in the order of the model's "
            "parameters is that of ga.Arena(model, decay=lambda name, p: True)"
        )
    for group, other, its_names in zip(param_groups, state_dict["param_groups"], names):
        for p, i, name in zip(group["params"], other["params"], its_names):
            _check(state_dict["state"].get(i), p, name, rule)
    return state_dict


def _matched(state_dict: dict, param_groups: list[dict], names: list[list[str]]) -> dict:
    """Reorder a state_dict so that each stored group meets the group that has all of its tensors.

    Tensors that are not stored have no state afterwards. Groups are matched by order, as in torch,
    if a stored name is unknown, a stored group is spread over several groups, or two are in one."""
    stored = state_dict["param_groups"]
    group_of = {name: g for g, members in enumerate(names) for name in members}
    if len(group_of) < sum(map(len, names)):
        return state_dict
    if any(len(group.get("param_names", ())) != len(group["params"]) for group in stored):
        return state_dict
    places = [{group_of.get(name) for name in group["param_names"]} for group in stored]
    targets = [g for place in places if len(place) == 1 for g in place if g is not None]
    if len(set(targets)) < len(stored):
        return state_dict
    number = {name: i for i, name in enumerate(itertools.chain(*names))}
    groups = [dict(group) for group in param_groups]
    state = {}
    for g, group in zip(targets, stored):
        groups[g].update(group)
        for name, i in zip(group["param_names"], group["params"]):
            if i in state_dict["state"]:
                state[number[name]] = state_dict["state"][i]
    for group, members in zip(groups, names):
        group.update(params=[number[name] for name in members], param_names=members)
    return {**state_dict, "state": state, "param_groups": groups}


def _check(state: dict | None, p, name: str, rule: UpdateRule):
    for key in ("step", *rule.state_keys, "master") if state else ():
        value = state.get(key)  # type: ignore[union-attr]
        if value is None and (key in rule.optional or key == "master"):
            continue
        if value is None:
            raise ArgumentError(f"state_dict: {key} of {name} is missing")
        if key != "step" and value.shape != p.shape:
            raise ArgumentError(
                f"state_dict: {key} of {name} has shape {tuple(value.shape)}; expected "
                f"{tuple(p.shape)}"
            )
