"""Reading what a user may have edited, or a full disk cut short; and sizes in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.errors import UserError


def read_object(path: Path, mend: str) -> dict[str, Any]:
    """The JSON object in a file. UserError with what would `mend` it: no such file, or something else in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; {mend}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); {mend}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}); {mend}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {type(content).__name__}, not a JSON object; {mend}")
    return content


def bytes_text(size: float) -> str:
    """1_500_000 -> 1.50 MB: in the unit that fits."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:,.2f} {unit}"
    return f"{size:.0f} bytes"
