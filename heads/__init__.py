"""Draft heads. `build` makes one from its conf section; nothing else names a head."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from heads.base import DraftHead, TargetSpec


def build(head: dict[str, Any], target: TargetSpec) -> DraftHead:
    """Builds `head` (`_target_: heads.<file>.<Class>` and keyword arguments) on the current default device.

    Raises ValueError for a path outside heads/, an unknown class or an unknown argument, listing what is known.
    """
    arguments = dict(head)
    path = str(arguments.pop("_target_", ""))
    if not path.startswith("heads."):
        raise ValueError(f"head._target_ must start with 'heads.', not {path!r}: choose a head, e.g. head=eagle3")
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"head._target_ {path!r} does not exist: {error}") from None
    if not (inspect.isclass(cls) and issubclass(cls, DraftHead)):
        raise ValueError(f"head._target_ {path!r} is not a DraftHead")
    known = [n for n in inspect.signature(cls.__init__).parameters if n not in ("self", "target")]
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ValueError(f"unknown keys in head: {', '.join(unknown)}; {path} knows {', '.join(known)}")
    return cls(target=target, **arguments)
