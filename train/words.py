"""The words of a launch script's own on its command line, which are no keys of the config."""

from __future__ import annotations

import sys

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
