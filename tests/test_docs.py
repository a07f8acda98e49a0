"""The commands in README and guide are ones that work: their scripts exist, their words are known, and a shell reads them as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from train.config import load

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN = re.compile(r"(gpus|part|plan|device|sample|show|check|untrained|out|dry_run)=")  # words of the scripts' own, or of no weight here
NOT_YET = ("head=stairs", "launch/sweep.py")  # what the page itself adds; several runs in one line


def commands(page: Path) -> list[str]:
    """Lines that call a script, of bash blocks (continued ones joined) and of inline code."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line.strip() for line in [*blocks.splitlines(), *inline] if re.search(r"\b(python|torchrun)\b.* ?launch/\w+\.py", line)]


FOUND = [(page.name, line) for page in PAGES for line in commands(page)]


def test_the_commands_are_found():
    assert len(FOUND) > 20 and {"README.md", "quickstart.md", "training.md", "data.md"} <= {page for page, _ in FOUND}


@pytest.mark.parametrize(("page", "line"), FOUND, ids=[f"{page}: {line[:60]}" for page, line in FOUND])
def test_every_command_of_the_guide_is_one_that_works(page, line):
    raw = shlex.split(line.rstrip("& "), comments=True, posix=False)
    assert not any(set(word) & set("[]{}*()") and word[0] not in "\"'" for word in raw), "a shell would read this itself: quote it"
    words = [word.replace("<name>", "llama8b_eagle3").replace("<n>", "2") for word in shlex.split(line.rstrip("& "), comments=True)]
    script = next(found[0] for word in words if (found := re.search(r"\blaunch/\w+\.py", word)))
    assert (ROOT / script).is_file()
    if not any(word in line for word in NOT_YET) and "..." not in words:
        settings = [word for word in words if "=" in word and not OWN.match(word) and not word.startswith("-") and "launch/" not in word]
        assert load(settings if any(word.startswith("conf=") for word in settings) else ["conf=tiny_mtp", *settings])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)\)", prose)
    assert all((page.parent / link).exists() for link in links), links
