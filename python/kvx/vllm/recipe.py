"""Which kvx recipe a layer of vLLM's stores its keys and values by."""

import os

from kvx import _core
from kvx.errors import Error, UnsupportedError
from kvx.formats import parse_recipe

RECIPE_VARIABLE = "KVX_VLLM_RECIPE"
DEFAULT_RECIPE = "int8"

# What --kv-cache-dtype, or a checkpoint's own scheme, means to kvx.
_OF_CACHE_DTYPE = {
    "float16": "f16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "fp8_per_token_head": "fp8_e4m3:source=computed",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
    "nvfp4": "nvfp4",
    "nvfp4_4over6": "nvfp4:4over6",
}
# Of latent rows alone: what vLLM's and FlashMLA's records of 656 bytes hold, in kvx's pages.
_OF_LATENT_CACHE_DTYPE = {"fp8_ds_mla": "fp8_e4m3+bf16:source=computed,g128"}
_OF_MODEL_DTYPE = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
CACHE_DTYPES = ["auto", *_OF_CACHE_DTYPE]
LATENT_CACHE_DTYPES = [*CACHE_DTYPES, *_OF_LATENT_CACHE_DTYPE]


def options_of(vllm_config) -> dict:
    """The "kvx" part of --additional-config. Raises kvx.Error: an unknown option."""
    options = (vllm_config.additional_config or {}).get("kvx", {})
    unknown = sorted(set(options) - {"recipe", "unit_scales", "latent_prompts"})
    if unknown:
        raise Error(
            f"additional_config has kvx.{unknown[0]}; expected recipe, unit_scales or "
            f"latent_prompts"
        )
    return options


def latent_prompts_of(options: dict) -> str:
    """The form of latent layers' prompts. Raises kvx.Error: there is no such form."""
    wish = options.get("latent_prompts", "auto")
    if wish not in ("auto", "absorbed", "expanded"):
        raise Error(f"kvx.latent_prompts is {wish!r}; expected auto, absorbed or expanded")
    return wish


def recipe_wish(vllm_config) -> str | None:
    """The recipe that --additional-config or the environment requests."""
    return options_of(vllm_config).get("recipe") or os.environ.get(RECIPE_VARIABLE)


def recipe_of_layer(kv_cache_dtype: str, vllm_config) -> str:
    """kv_cache_dtype: the layer's; "auto" for layers that --kv-cache-dtype-skip-layers names too.

    Raises kvx.Error: two wishes at once, or a recipe that does not exist or was tuned for another
    model.
    """
    wish = recipe_wish(vllm_config)
    of_all_layers = vllm_config.cache_config.cache_dtype
    if wish and (kv_cache_dtype != "auto" or of_all_layers != "auto"):
        named = kv_cache_dtype if kv_cache_dtype != "auto" else of_all_layers
        raise Error(
            f"recipe is '{wish}' and the cache's dtype is '{named}' (by --kv-cache-dtype or the "
            f"checkpoint); expected one of the two"
        )
    if kv_cache_dtype != "auto":
        recipe = (_OF_CACHE_DTYPE | _OF_LATENT_CACHE_DTYPE)[kv_cache_dtype]
    elif of_all_layers != "auto":  # a skipped layer
        recipe = recipe_of_dtype(vllm_config.model_config.dtype)
    else:
        recipe = wish or DEFAULT_RECIPE
    _check(recipe)
    if is_tuned(recipe):
        model = vllm_config.model_config
        layers = model.hf_text_config.num_hidden_layers
        _core.check_tuned_model(recipe, model.model, model.hf_config.model_type, layers)
    return recipe


def recipe_of_dtype(dtype) -> str:
    """The recipe that keeps a model's numbers as they are. dtype: torch's."""
    return _OF_MODEL_DTYPE[str(dtype).removeprefix("torch.")]


def is_tuned(recipe: str) -> bool:
    """Whether the recipe has tables of its own, scales among them."""
    return recipe.startswith("tuned:")


def is_static(recipe: str) -> bool:
    """Whether the scales are the checkpoint's."""
    if is_tuned(recipe):
        return False
    parsed = parse_recipe(recipe)
    return "given" in (parsed.k.scale_source, parsed.v.scale_source) and _is_fp8(parsed)


def sides_with_tensor_scales(recipe: str) -> list[str]:
    """Those of "k" and "v" whose format has a second scale, which checkpoints can give."""
    if is_tuned(recipe):
        return []
    parsed = parse_recipe(recipe)
    return [side for side in ("k", "v") if getattr(parsed, side).format == "nvfp4"]


def _check(recipe):
    parsed = parse_recipe(recipe)
    for side in () if is_tuned(recipe) else (parsed.k, parsed.v):
        if side.scale_source == "given" and not side.format.startswith(("fp8", "f", "bf")):
            raise UnsupportedError(
                f"recipe is '{recipe}'; vLLM's k_scale and v_scale are those of fp8 alone"
            )


def _is_fp8(parsed):
    return parsed.k.format.startswith("fp8") or parsed.v.format.startswith("fp8")
