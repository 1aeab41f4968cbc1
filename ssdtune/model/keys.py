"""Which checkpoint tensors make which parameter of a transformers model, and back for saving.

transformers may name and pack weights otherwise in memory than in the checkpoint (experts fused into one
tensor, renamed modules, a prefix that is or isn't there). This module runs transformers' own conversion
tables on names and shapes only: what `from_pretrained` and `save_pretrained` do becomes two lists of rules,
one parameter (or few) each, which `ssdtune.model.source` and `ssdtune.export.weights` apply one at a time.
Private functions of transformers are used in `ssdtune.model.conversion` only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ssdtune.errors import ConfigError, FormatError
from ssdtune.model import conversion
from ssdtune.model.checkpoint import FLOAT_DTYPES, HfCheckpoint, same_bytes
from ssdtune.model.conversion import Place, Rule
from ssdtune.model.safetensors_file import DTYPE_NAMES, TORCH_DTYPES, SavedTensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveRule:
    """How the tensors `outputs` of a checkpoint are made from parameters of the model.

    `places[i]` is where `outputs[i]` lies inside the one parameter; None where the rule has to compute.
    """

    rule: Rule
    outputs: tuple[SavedTensor, ...]
    places: tuple[Place, ...] | None


@dataclass(frozen=True)
class KeyMap:
    """The correspondence of one model and one checkpoint; make it with `KeyMap.build`.

    Attributes:
        load_rules: For each parameter and persistent buffer that the checkpoint has, the rule that makes it.
        save_rules: In the order in which `save_pretrained` writes.
        shapes: Shape of each parameter and persistent buffer, by its name in the model.
        buffers: Names of the persistent buffers among them.
        aliases: Further names of tied parameters, with the one that named_parameters() and `load_rules` use.
        unexpected: Checkpoint tensors that the model has no use for.
        initial: Persistent buffers that the checkpoint lacks, with the values that the model gives them.
        num_parameters: Elements of all parameters, tied ones once.
    """

    load_rules: dict[str, Rule]
    save_rules: tuple[SaveRule, ...]
    shapes: dict[str, tuple[int, ...]]
    buffers: frozenset[str]
    aliases: dict[str, str]
    unexpected: tuple[str, ...]
    num_parameters: int
    context: conversion.ModelView
    initial: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, model: Any, checkpoint: HfCheckpoint) -> KeyMap:
        """Match a transformers model with a checkpoint.

        Args:
            model: A PreTrainedModel not wrapped by peft, its parameters on the meta device, its buffers real. It is
                changed as loading would: its weights get tied, and the conversions in use are noted in it.

        Raises:
            FormatError: A parameter has no tensor, or one of another shape.
            ConfigError: A parameter has a dtype that can't be trained.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        buffers = shapes.keys() - {
            name for name, _ in model.named_parameters(remove_duplicate=False)
        }
        view = conversion.ModelView(model, shapes)
        rules, unexpected = conversion.load_rules(model, checkpoint.tensors)
        load_rules: dict[str, Rule] = {}
        for rule in rules:
            _check_dtypes(rule, checkpoint, buffers)
            input_shapes = [checkpoint.tensors[name].shape for name in rule.inputs]
            rule = replace(rule, places=conversion.places(rule, input_shapes))
            for name in _check_shapes(rule, checkpoint, shapes, view):
                load_rules[name] = rule
        _tie(model, checkpoint, load_rules)
        aliases = _aliases(model, load_rules)
        missing = shapes.keys() - load_rules.keys() - aliases.keys()
        initial = {name: model.get_buffer(name).detach().clone() for name in missing & buffers}
        if missing - buffers:
            _refuse_missing(checkpoint, missing - buffers, unexpected)
        _report(model, checkpoint, unexpected, initial)
        return cls(
            load_rules=load_rules,
            save_rules=_save_rules(model, checkpoint, load_rules, aliases, view),
            shapes=shapes,
            buffers=frozenset(buffers),
            aliases=aliases,
            unexpected=tuple(unexpected),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            context=view,
            initial=initial,
        )

    @classmethod
    def of_config(cls, model: Any) -> KeyMap:
        """Return the map of a model that has no checkpoint: nothing can be loaded or saved, only planned."""
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        model.tie_weights()
        return cls(
            load_rules={},
            save_rules=(),
            shapes=shapes,
            buffers=frozenset(),
            aliases={},
            unexpected=(),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            context=conversion.ModelView(model, shapes),
        )

    def canonical(self, name: str) -> str:
        """Return the name under which a parameter is loaded; tied names share one.

        Raises:
            ValueError: The model has no such parameter.
        """
        name = self.aliases.get(name, name)
        if name not in self.load_rules and name not in self.initial:
            raise ValueError(f'the model has no parameter or persistent buffer "{name}"')
        return name

    def dtype_of(self, name: str, checkpoint: HfCheckpoint) -> torch.dtype:
        """Return the dtype in which the checkpoint holds a parameter; float32 if its tensors differ."""
        rule = self.load_rules[self.canonical(name)]
        dtypes = {checkpoint.tensors[tensor].dtype for tensor in rule.inputs}
        return TORCH_DTYPES[dtypes.pop()] if len(dtypes) == 1 else torch.float32


def _check_dtypes(rule: Rule, checkpoint: HfCheckpoint, buffers: Iterable[str]) -> None:
    if rule.key in buffers:
        return
    for name in rule.inputs:
        extent = checkpoint.tensors[name]
        if extent.dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f'tensor "{name}" in {extent.path} has dtype {extent.dtype}, which can\'t be trained '
                f"({', '.join(FLOAT_DTYPES)} can). Save the model as bf16 or fp32 first."
            )


def _check_shapes(
    rule: Rule,
    checkpoint: HfCheckpoint,
    shapes: Mapping[str, tuple[int, ...]],
    view: conversion.ModelView,
) -> list[str]:
    """Return the parameters that a rule makes, having compared their shapes with the model's."""
    extents = [checkpoint.tensors[name] for name in rule.inputs]
    try:
        made = rule.apply([_meta(extent.shape) for extent in extents], view)
    except (RuntimeError, ValueError, IndexError) as error:
        raise FormatError(
            f'tensors "{extents[0].name}" … "{extents[-1].name}" ({len(extents)}) in {extents[0].path} do not '
            f'make up "{rule.key}": {error}. Download the model again, or check config.json.'
        ) from error
    for name, tensor in made.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            tensors = f'tensor "{extents[0].name}"' + (
                f" and {len(extents) - 1} others, as" if len(extents) > 1 else ", as"
            )
            raise FormatError(
                f'{tensors} "{name}", has shape {list(tensor.shape)} in {extents[0].path}; config.json says '
                f"{list(shapes[name])}. Use the config.json that belongs to these weights, or download again."
            )
    return [name for name in made if name in shapes]


def _meta(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _tie(model: Any, checkpoint: HfCheckpoint, load_rules: dict[str, Rule]) -> None:
    """Tie the model's weights, unless the checkpoint holds two different tensors for them.

    This is what transformers does: the values in the checkpoint win over its settings.
    """
    for alias, name in list(model.all_tied_weights_keys.items()):
        if alias in load_rules and name in load_rules:
            first, second = (
                [checkpoint.tensors[tensor] for tensor in load_rules[key].inputs]
                for key in (alias, name)
            )
            if not all(same_bytes(*pair) for pair in zip(first, second)):
                logger.warning(
                    '"%s" and "%s" are to be tied by config.json, but differ in the checkpoint: they are '
                    "trained apart.", alias, name,
                )  # fmt: skip
                del model.all_tied_weights_keys[alias]
                _untie(model, alias)
    model.tie_weights(recompute_mapping=False)


def _untie(model: Any, name: str) -> None:
    module_name, _, attribute = name.rpartition(".")
    parameter = model.get_parameter(name)
    setattr(
        model.get_submodule(module_name), attribute, torch.nn.Parameter(torch.empty_like(parameter))
    )


def _aliases(model: Any, load_rules: dict[str, Rule]) -> dict[str, str]:
    """Return the further names of shared parameters, with the name that named_parameters() gives.

    The rules move to that name.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    aliases: dict[str, str] = {}
    for name, *others in names_of.values():
        aliases |= {other: name for other in others}
        for other in others:
            rule = load_rules.pop(other, None)
            if rule is not None and name not in load_rules:
                load_rules[name] = replace(rule, key=name) if rule.converter is None else rule
    return aliases


def _refuse_missing(checkpoint: HfCheckpoint, missing: set[str], unexpected: list[str]) -> None:
    names = sorted(missing)
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    hint = f" It has, unused: {', '.join(unexpected[:3])}." if unexpected else ""
    raise FormatError(
        f"{checkpoint.path} lacks {len(names)} of the model's weights: {listed}.{hint} Download the model again, "
        "or check config.json."
    )


def _report(
    model: Any, checkpoint: HfCheckpoint, unexpected: list[str], initial: dict[str, Any]
) -> None:
    surprising = conversion.not_ignorable(model, unexpected)
    if surprising:
        logger.warning(
            "%d tensors of %s are not used by %s and will not be in the tuned model: %s",
            len(surprising), checkpoint.path, type(model).__name__, ", ".join(surprising[:5]),
        )  # fmt: skip
    if initial:
        logger.warning(
            "%s lacks %d buffers; they keep their initial values: %s",
            checkpoint.path, len(initial), ", ".join(sorted(initial)[:5]),
        )  # fmt: skip


def _save_rules(
    model: Any,
    checkpoint: HfCheckpoint,
    load_rules: dict[str, Rule],
    aliases: dict[str, str],
    view: conversion.ModelView,
) -> tuple[SaveRule, ...]:
    result = []
    alive = []  # a storage's address must not be taken by a later one
    for rule in conversion.save_rules(model):
        inputs = [_meta(view.shapes[name]) for name in rule.inputs]
        made = rule.apply(inputs, view)
        alive.append(made)
        name = aliases.get(rule.inputs[0], rule.inputs[0])
        if name in load_rules:
            default = checkpoint.tensors[load_rules[name].inputs[0]].dtype
        else:
            default = DTYPE_NAMES[model.get_buffer(name).dtype]
        outputs = tuple(
            SavedTensor(
                output,
                tuple(tensor.shape),
                checkpoint.tensors[output].dtype if output in checkpoint.tensors else default,
                storage=tensor.untyped_storage()._cdata if rule.converter else 0,
            )
            for output, tensor in made.items()
        )
        places = _places_of(rule, outputs, load_rules.get(name))
        result.append(SaveRule(rule, outputs, places))
    return tuple(result)


def _places_of(
    rule: Rule, outputs: tuple[SavedTensor, ...], load_rule: Rule | None
) -> tuple[Place, ...] | None:
    """Take the places from the loading rule where saving is exactly its inverse."""
    if rule.converter is None:
        return (Place(()),)
    if (
        load_rule is None
        or load_rule.converter is None
        or load_rule.places is None
        or len(rule.inputs) != 1
    ):
        return None
    place_of = dict(zip(load_rule.inputs, load_rule.places))
    if place_of.keys() != {output.name for output in outputs}:
        return None
    return tuple(place_of[output.name] for output in outputs)
