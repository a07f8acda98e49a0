"""The vLLM plug-in: what the package announces is there, and what would load and draft wrongly is refused at start."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from conftest import plugin_installed

from eval.layouts import LAYOUTS
from eval.vllm_plugin import DRAFTS, TARGETS, register


def test_vllm_finds_the_plugin_and_every_class_of_it(tmp_path):
    text = next(plugin_installed(tmp_path).rglob("entry_points.txt")).read_text()
    assert text == "[vllm.general_plugins]\ndraftsmith = eval.vllm_plugin:register\n"
    assert importlib.import_module("eval.vllm_plugin").register is register
    for place in (DRAFTS | TARGETS).values():
        module, _, name = place.partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), type)


def test_an_export_for_every_class_is_checked_and_its_name_is_one_that_vllm_keeps():
    """vLLM renames an architecture of method eagle3 that does not begin so, and one of dflash that neither begins nor ends so."""
    served = [(method, architecture) for method, architecture in LAYOUTS if architecture in DRAFTS]
    assert sorted(architecture for _, architecture in served) == sorted(DRAFTS)
    kept = {"eagle3": lambda name: name.startswith("Eagle3"), "dflash": lambda name: name.startswith("DFlash") or name.endswith("DFlash")}
    assert all(kept[method](architecture) for method, architecture in served)


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
