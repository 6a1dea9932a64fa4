"""A state_dict from elsewhere, made to fit an optimizer, or refused."""

import itertools

from ..errors import ArgumentError
from .members import Members
from .update_rule import UpdateRule


def fitted(state_dict: dict, param_groups: list[dict], members: Members, rule: UpdateRule):
    """A dict that an optimizer can load, with the tensors in its order.

    Where both sides name their tensors, they are matched by name.

    Args:
        state_dict: of any optimizer; it stays as it is.
        param_groups: of the optimizer that loads it.
        members: of this optimizer.
        rule: of this optimizer.

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
