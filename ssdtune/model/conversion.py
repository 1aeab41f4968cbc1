"""transformers' weight conversions as rules that can be applied to one parameter at a time.

`from_pretrained` and `save_pretrained` convert whole state dicts. The functions here follow
`convert_and_load_state_dict_in_model`, `revert_weight_conversion` (transformers.core_model_loading) and
`save_pretrained` (transformers.modeling_utils) of transformers 5 step by step, with transformers' own tables
and operations, but collect names only. All uses of its private functions are in this module.
`ssdtune.model.keys` is the way in.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """Where one tensor lies inside a larger one: ("narrow", dim, start, length) and ("select", dim, index) steps."""

    steps: tuple[tuple[Any, ...], ...]

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part as a view."""
        for operation, *arguments in self.steps:
            tensor = getattr(tensor, operation)(*arguments)
        return tensor


class ModelView:
    """Stands for the model in conversion operations, even after peft has renamed its modules."""

    def __init__(self, model: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        self.model = model
        self.config = model.config
        self.shapes = shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the parameter's shape."""
        return torch.empty(self.shapes[name], device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@dataclass(frozen=True)
class Rule:
    """How some tensors become others: a plain renaming, or a conversion by transformers.

    Attributes:
        key: Name (or first name) of what is made.
        inputs: Names of the tensors that it takes, in order.
        patterns: For each input, the pattern of the converter that it matched.
        converter: transformers' WeightConverter, or None for a renaming.
        renamings: Applied to the names that the converter makes.
        places: For each input, where it lies in the result; None unless the conversion only moves data.
    """

    key: str
    inputs: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    converter: Any = None
    renamings: tuple[Any, ...] = ()
    places: tuple[Place, ...] | None = None

    def apply(self, tensors: Sequence[torch.Tensor], view: ModelView) -> dict[str, torch.Tensor]:
        """Make the outputs from the input tensors (given in the order of `inputs`)."""
        if self.converter is None:
            return {self.key: tensors[0]}
        from transformers.core_model_loading import apply_renamings

        converter = copy.deepcopy(self.converter)
        for name, pattern, tensor in zip(self.inputs, self.patterns, tensors):
            converter.add_tensor(self.key, name, pattern, tensor)
        del tensors
        made = converter.convert(self.key, model=view, config=view.config)
        return {
            apply_renamings(name, list(self.renamings)): value[0]
            if isinstance(value, list)
            else value
            for name, value in made.items()
        }


def load_rules(model: Any, tensors: Iterable[str]) -> tuple[list[Rule], list[str]]:
    """Return the rules that make the model's parameters, and the tensors that none of them takes.

    Follows `convert_and_load_state_dict_in_model`. As after loading, `model._weight_conversions` holds the
    conversions in use, which saving reverts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    collected: dict[str, list[tuple[str | None, str]]] = {}
    unexpected = []
    for name in sorted(tensors, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if key not in state and name in state:
            key, pattern = rename_source_key(name, [], [], prefix, state)
        if key not in state or (pattern is None and key in collected):
            unexpected.append(name)
        else:
            collected.setdefault(key, []).append((pattern, name))
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]
    rules = [_rule(key, sources, converter_of) for key, sources in collected.items()]
    return rules, unexpected


def _rule(key: str, sources: list[tuple[str | None, str]], converter_of: dict[str, Any]) -> Rule:
    inputs = tuple(name for _, name in sources)
    if sources[0][0] is None:
        return Rule(key, inputs[:1])
    patterns = tuple(pattern or "" for pattern, _ in sources)
    return Rule(key, inputs, patterns, _empty_copy(converter_of[patterns[0]]))


def _empty_copy(converter: Any) -> Any:
    result = copy.deepcopy(converter)
    result.collected_tensors.clear()
    result.layer_targets.clear()
    return result


def places(rule: Rule, shapes: Sequence[tuple[int, ...]]) -> tuple[Place, ...] | None:
    """Return where each input lies in the result if the conversion only stacks and concatenates.

    Args:
        shapes: The inputs' shapes.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if rule.converter is None:
        return (Place(()),)
    kinds = [type(operation) for operation in rule.converter.operations]
    merges, concatenates = MergeModulelist in kinds, Concatenate in kinds
    if kinds not in ([MergeModulelist], [Concatenate], [MergeModulelist, Concatenate]):
        return None
    sources = rule.converter.source_patterns
    if len(rule.converter.target_patterns) != 1 or (not concatenates and len(sources) != 1):
        return None
    # The result is a concatenation, in the order of the patterns, of stacks of what matched each pattern.
    result: dict[int, Place] = {}
    start = 0
    for source in sources:
        members = [i for i, pattern in enumerate(rule.patterns) if pattern == source]
        for index, i in enumerate(members):
            steps: list[tuple[Any, ...]] = []
            if concatenates:
                dim = rule.converter.operations[-1].dim
                stacked = list(shapes[i])
                if merges:
                    stacked.insert(rule.converter.operations[0].dim, len(members))
                steps.append(("narrow", dim, start, stacked[dim]))
            if merges:
                steps.append(("select", rule.converter.operations[0].dim, index))
            elif concatenates:
                start += shapes[i][rule.converter.operations[-1].dim]
            result[i] = Place(tuple(steps))
        if merges and concatenates and members:
            start += stacked[dim]
    return tuple(result[i] for i in range(len(rule.inputs)))


def save_rules(model: Any) -> list[Rule]:
    """Return the rules that make the tensors which `save_pretrained` writes, in its order.

    Follows `save_pretrained` and `revert_weight_conversion`; `load_rules` must have seen the model, and its
    weights must be tied.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    reverse = [entry.reverse_transform() for entry in model._weight_conversions[::-1]]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    collected: dict[str, list[tuple[str | None, str]]] = {}
    for name in sorted(state, key=dot_natural_key):
        key, pattern = apply_converters(name, converters)
        if pattern is None:
            key = apply_renamings(name, renamings)
        collected.setdefault(key, []).append((pattern, name))
    rules = []
    for key, sources in collected.items():
        rule = _rule(key, sources, converter_of)
        if rule.converter is not None:
            rule = Rule(key, rule.inputs, rule.patterns, rule.converter, tuple(renamings))
        rules.append(rule)
    return rules


def not_ignorable(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the unused tensors that transformers would warn about."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return [name for name in unexpected if not any(re.search(p, name) for p in patterns)]
