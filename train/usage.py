"""What --help says of a launch script: its own first lines, the choices there are, and each key that it reads, with its default and the
comment beside its declaration in train/config.py."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from train.config import CONF, RunConfig, choices

FIELD = re.compile(r" {4}(\w+): [^#]*(?:# (.+))?")
ALWAYS = ("name", "run_dir")


def usage(about: str, sections: tuple[str, ...]) -> str:
    """about: the docstring of the script. sections: the keys at the top level of the config that it reads; none: all."""
    groups = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name != "conf")
    lines = [about.strip(), "", "conf=<name> chooses a file of conf/conf/, and <group>=<choice> another file of a group than it does:"]
    lines += [f"  {group}: {', '.join(choices(group))}" for group in ("conf", *groups)]
    lines += ["", "<key>=<value> changes a key of these files, which come before the defaults shown here:"]
    found = [key for key in keys(RunConfig) if not sections or re.split(r"[.=]", key[0])[0] in (*ALWAYS, *sections)]
    return "\n".join(lines + [f"  {key:<36} {comment}" for key, comment in found])


def keys(section: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """`<section>.<key>=<default>` and the comment of every key."""
    comments = {found[1]: found[2] or "" for line in inspect.getsource(section).splitlines() if (found := FIELD.fullmatch(line))}
    for name, default in vars(section()).items():
        if dataclasses.is_dataclass(default):
            yield from keys(type(default), f"{prefix}{name}.")
        else:
            yield (f"{prefix}{name}.<key>=" if default == {} else f"{prefix}{name}={_written(default)}"), comments[name]


def _written(value: Any) -> str:
    """As on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "" if value == "???" else "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
