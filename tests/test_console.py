"""What is said while work goes on: sizes in the unit that fits, and lines without loose ends."""

from __future__ import annotations

import pytest

from data.files import bytes_text
from data.progress import Progress


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1029, "1.03 kB"),
        (5.5e5, "550.00 kB"),
        (2e9, "2.00 GB"),
        (678.4e9, "678.40 GB"),
        (1.5e15, "1,500.00 TB"),
    ],
)
def test_a_size_is_said_in_the_unit_that_fits(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(("note", "line"), [("", "generate: 4/4 answers\n"), ("9 tokens/s", "generate: 4/4 answers, 9 tokens/s\n")])
def test_a_line_of_progress_ends_with_what_it_says(note, line, capsys):
    with Progress("generate", 4, "answers") as bar:
        bar.update(4, note)
    assert capsys.readouterr().err == line
