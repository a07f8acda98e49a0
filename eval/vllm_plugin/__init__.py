"""Engine-side classes for heads that stock vLLM (0.32) does not load, and for targets whose states it does not hand out, as a vLLM
plug-in (entry point `vllm.general_plugins` in pyproject.toml). Nothing of vLLM is patched; an export's config.json names the class."""

# vLLM renames an architecture of method eagle3 that does not begin with Eagle3, and one of method dflash that neither begins nor ends
# with DFlash.
DRAFTS = {
    "Eagle3HydraDraft": "eval.vllm_plugin.drafts:HydraDraft",
    "Eagle3MLPDraft": "eval.vllm_plugin.mlp:MLPDraft",
    "DraftsmithDFlash": "eval.vllm_plugin.dflash:DFlash",
    "DraftsmithDSparkDFlash": "eval.vllm_plugin.dflash:DSpark",
}
TARGETS = {  # data.engine_job.CAPTURED_AS asks for them
    "DraftsmithMiMo": "eval.vllm_plugin.mimo:MiMo",
    "DraftsmithGlm4Moe": "eval.vllm_plugin.glm4_moe:Glm4Moe",
}


def register() -> None:
    """vLLM calls this in every one of its processes, more than once in some. A class is imported when a config names it."""
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for architecture, place in (DRAFTS | TARGETS).items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, place)
