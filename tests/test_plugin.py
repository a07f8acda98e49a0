"""The vLLM plug-in: what the package announces is there, and what would load and draft wrongly is refused at start."""

from __future__ import annotations

import importlib
import tomllib
from types import SimpleNamespace

import pytest
from conftest import ROOT

from eval.layouts import LAYOUTS
from eval.vllm_plugin import DRAFTS, register


def test_vllm_finds_the_plugin_and_every_class_of_it():
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, name = entries["draftsmith"].partition(":")
    assert getattr(importlib.import_module(module), name) is register
    for architecture, place in DRAFTS.items():
        module, _, name = place.partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), type)
        assert architecture in {a for _, a in LAYOUTS}, "an export for it would not be checked"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "draft_model"}, "method draft_model"),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens=4: .* up to 3"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
    ],
)
def test_a_block_draft_refuses_what_it_was_not_trained_for(change, words):
    from eval.vllm_plugin.dflash import check_served

    given = {"method": "dflash", "num_speculative_tokens": 3, "sample_from_anchor": False, "block_size": 4} | change
    config = SimpleNamespace(hf_config=SimpleNamespace(**given))
    asked = SimpleNamespace(**given, draft_model_config=config)
    with pytest.raises(ValueError, match=words):
        check_served(SimpleNamespace(speculative_config=asked))
