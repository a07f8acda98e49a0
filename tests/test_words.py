"""A launch script's own words: taken from the command line, the rest left as it was."""

from __future__ import annotations

import sys

import pytest

from data.errors import UserError
from train.words import number, take


def test_own_words_leave_the_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "conf=a", "count=1", "show", "out=p=q", "count=2", "data.out=r"])
    assert take("count", "out", "show") == {"count": "2", "out": "p=q"}
    assert sys.argv == ["x.py", "conf=a", "show", "data.out=r"]


def test_numbers_are_whole_and_large_enough():
    assert number("0", "show", "answers", 0) == 0 and number("12", "gpus", "GPUs", 1) == 12
    for given, least, text in (("x", 0, "show=x: must be a number of answers"), ("0", 1, "show=0: must be a number of answers, 1 or more")):
        with pytest.raises(UserError) as error:
            number(given, "show", "answers", least)
        assert str(error.value) == text
