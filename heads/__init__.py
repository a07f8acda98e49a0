"""Draft heads. `build` makes one from its conf section; nothing else names a head."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, get_args, get_origin, get_type_hints

from heads.base import DraftHead, TargetSpec


def build(head: dict[str, Any], target: TargetSpec) -> DraftHead:
    """Builds `head` (`_target_: heads.<file>.<Class>` and keyword arguments) on the current default device.

    Raises ValueError for a path outside heads/, an unknown class, an unknown argument (listing what is known) or one of a wrong type.
    """
    arguments = dict(head)
    path = str(arguments.pop("_target_", ""))
    if not path.startswith("heads."):
        raise ValueError(f"head._target_ must start with 'heads.', not {path!r}: choose a head, e.g. head=eagle3")
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:  # another ImportError is a fault of the module itself
        raise ValueError(f"head._target_ {path!r} does not exist: {error}") from None
    if not (inspect.isclass(cls) and issubclass(cls, DraftHead)):
        raise ValueError(f"head._target_ {path!r} is not a DraftHead")
    known = [n for n in inspect.signature(cls.__init__).parameters if n not in ("self", "target")]
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ValueError(f"unknown keys in head: {', '.join(unknown)}; {path} knows {', '.join(known)}")
    hints = get_type_hints(cls.__init__)
    for key, value in arguments.items():
        if key in hints and not _fits(value, hints[key]):
            kind = hints[key].__name__ if isinstance(hints[key], type) and not get_args(hints[key]) else hints[key]
            raise ValueError(f"head.{key}={value}: must be {kind}")
    if (target.embed_scale, target.logit_softcap) != (1.0, None) and not cls.scaled:
        raise ValueError(
            f"{path} reads embedding and lm_head unscaled, and this target ({target.architecture}) scales its embedding by "
            f"{target.embed_scale:g} and caps its logits at {target.logit_softcap}: choose a head made for this family"
        )
    return cls(target=target, **arguments)


def _fits(value: Any, hint: Any) -> bool:
    """Whether `value` is of the type that a constructor asks for: a class, a union, or a list of one of them."""
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if get_args(hint):
        return any(_fits(value, part) for part in get_args(hint))
    if isinstance(value, bool):  # an int to Python, but `depths: true` is a mistake
        return hint in (bool, Any)
    return hint is Any or isinstance(value, (int, float) if hint is float else hint)
