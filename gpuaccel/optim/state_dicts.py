"""A state_dict from elsewhere, made to fit an optimizer, or refused."""

import itertools

from ..errors import ArgumentError
from ..ops import UpdateRule


def match_by_name(state_dict: dict, param_groups: "list[dict]", names: "list[list[str]]") -> dict:
    """Put the tensors of a dict that names them in the order of the parameter groups.

    A tensor that the dict does not name has no state afterwards. A group's options are those of the
    stored group whose tensors it has. Where names decide nothing, order does, as in torch: there is
    one that is not known here, or a stored group is spread over several groups.

    Args:
        state_dict: of any optimizer; it stays as it is.
        param_groups: of the optimizer that loads it.
        names: of the tensors of each group.
    """
    stored = state_dict["param_groups"]
    if any(len(group.get("param_names", ())) != len(group["params"]) for group in stored):
        return state_dict
    group_of = {name: g for g, members in enumerate(names) for name in members}
    places = [{group_of.get(name) for name in group["param_names"]} for group in stored]
    targets = [g for place in places if len(place) == 1 for g in place if g is not None]
    if len(set(targets)) < len(stored):
        return state_dict
    number = {name: i for i, name in enumerate(itertools.chain(*names))}
    if len(number) < sum(map(len, names)):
        return state_dict
    groups = [dict(group) for group in param_groups]
    state = {}
    for g, group in zip(targets, stored):
        groups[g].update(group)
        for name, i in zip(group["param_names"], group["params"]):
            if i in state_dict["state"]:
                state[number[name]] = state_dict["state"][i]
    for group, members in zip(groups, names):
        group["params"] = [number[name] for name in members]
        group["param_names"] = members
    return {**state_dict, "state": state, "param_groups": groups}


def check_state_dict(state_dict: dict, param_groups: "list[dict]", names, rule: UpdateRule):
    """Compare a dict with the optimizer that is to load it.

    Args:
        state_dict: of any optimizer.
        param_groups: of the optimizer, as many and as large as the stored ones.
        names: of the tensors of each group, for messages.
        rule: of the optimizer.

    Raises:
        ArgumentError: for a state that is missing or has another shape than its parameter.
    """
    for group, stored, members in zip(param_groups, state_dict["param_groups"], names):
        for p, i, name in zip(group["params"], stored["params"], members):
            state = state_dict["state"].get(i)
            if not state:
                continue
            for key in ("step", *rule.state_keys, "master"):
                value = state.get(key)
                if value is None:
                    if key in rule.optional or key == "master":
                        continue
                    problem = "is missing"
                elif key != "step" and value.shape != p.shape:
                    problem = f"has shape {tuple(value.shape)}; expected {tuple(p.shape)}"
                else:
                    continue
                raise ArgumentError(f"state_dict: {key} of {name} {problem}")
