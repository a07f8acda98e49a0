"""The words of a launch script's own on its command line, which are no keys of the config."""

from __future__ import annotations

import sys
from difflib import get_close_matches

from data.errors import UserError


def take(*keys: str) -> dict[str, str]:
    """Removes `key=value` words with these keys from sys.argv and returns them; of two with one key the last counts."""
    mine = [word for word in sys.argv[1:] if word.partition("=")[0] in keys and "=" in word]
    sys.argv = [word for word in sys.argv if word not in mine]
    return dict(word.split("=", 1) for word in mine)


def number(given: str, key: str, what: str, least: int) -> int:
    """UserError: not a whole number, or less than `least`."""
    if not given.isdigit() or int(given) < least:
        raise UserError(f"{key}={given}: must be a number of {what}{f', {least} or more' if least else ''}")
    return int(given)


def check_words(argv: list[str], confs: list[str]) -> None:
    """Refuses (UserError) what is no `key=value`, or names no conf, with what was probably meant."""
    if flags := [word for word in argv if word.startswith("--")]:
        raise UserError(f"unknown flag {flags[0]}; options are written key=value, and --help shows what there is")
    for i, word in enumerate(argv):
        if "=" in word or word.startswith("~"):
            continue
        before, after = "".join(argv[i - 1 : i]), "".join(argv[i + 1 : i + (3 if argv[i + 1 : i + 2] == ["="] else 2)])
        meant = before + word if before.endswith(("=", ",")) else f"conf={word}" if word in confs else ""
        meant = meant or f"{word}={after.removeprefix('=') if '=' not in after[1:] and after else '<value>'}"
        raise UserError(f"{word}: no key=value, which is written without spaces; did you mean {meant}?")
    names = [word.removeprefix("conf=") for word in argv if word.startswith("conf=")]
    if not names:
        raise UserError(f"no conf given; add conf=<name>, one of: {', '.join(confs)}")
    if names[-1] not in confs:
        meant = "".join(f"did you mean conf={name}? " for name in get_close_matches(names[-1], confs, 1))
        raise UserError(f"conf={names[-1]} does not exist (conf/conf/{names[-1]}.yaml); {meant}one of: {', '.join(confs)}")
