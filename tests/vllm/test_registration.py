"""What register() does to vLLM, and what it logs for a vLLM that it does not support."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import kvx
import kvx.vllm
from kvx.vllm.recipe import recipe_of_layer


def selector(**changes):
    """What vLLM passes to a platform for a plain layer."""
    values = dict(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=128)
    fields = {
        field.name: field.default if field.default is not dataclasses.MISSING else False
        for field in _fields(AttentionSelectorConfig)
    }
    fields["attn_type"] = "decoder"
    return AttentionSelectorConfig(**{**fields, **values, **changes})


def _fields(named_tuple):
    defaults = named_tuple._field_defaults
    return [
        SimpleNamespace(name=name, default=defaults.get(name, dataclasses.MISSING))
        for name in named_tuple._fields
    ]


def test_the_cpu_platform_honours_custom_and_leaves_the_rest_alone():
    kvx.vllm.register()
    kvx.vllm.register()  # once a process, whatever vLLM does
    choose = CpuPlatform.get_attn_backend_cls
    assert choose(AttentionBackendEnum.CUSTOM, selector()) == "kvx.vllm.backend.KvxBackend"
    of_latent_rows = choose(AttentionBackendEnum.CUSTOM, selector(use_mla=True))
    assert of_latent_rows == "kvx.vllm.latent.KvxLatentBackend"
    stock = AttentionBackendEnum.CPU_ATTN.get_path()
    assert choose(None, selector()) == stock
    assert choose(AttentionBackendEnum.CPU_ATTN, selector()) == stock


def test_what_kvx_cannot_compute_is_refused_at_selection():
    kvx.vllm.register()
    for changes, message in [
        (dict(attn_type="encoder"), "attention type encoder not supported"),
        (dict(use_mla=True, use_sparse=True), "sparse not supported"),
        (dict(block_size=24), "block_size not supported"),
        (dict(kv_cache_dtype="nvfp4_ds_mla", use_mla=True), "nvfp4_ds_mla; name a recipe instead"),
        (dict(kv_cache_dtype="fp8_ds_mla"), "fp8_ds_mla; name a recipe instead"),
    ]:
        with pytest.raises(kvx.UnsupportedError, match=message):
            CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, selector(**changes))


def test_gpus_from_compute_capability_8_on_are_taken():
    from kvx.vllm.backend import KvxBackend

    for capability, is_taken in [
        ((7, 5), False),
        ((8, 0), True),
        ((8, 9), True),
        ((9, 0), True),
        ((12, 0), True),
    ]:
        reasons = KvxBackend.validate_configuration(
            device_capability=DeviceCapability(*capability), **selector()._asdict()
        )
        assert reasons == ([] if is_taken else ["compute capability not supported"])


def test_blocks_are_of_64_on_a_gpu_where_the_user_names_none(monkeypatch):
    from kvx.vllm import backend

    assert backend.KvxBackend.get_preferred_block_size(128) == 128  # the CPU platform's
    monkeypatch.setattr(backend.current_platform, "is_cuda", lambda: True)
    assert backend.KvxBackend.get_preferred_block_size(16) == 64


def test_an_unknown_interface_is_said_at_registration(monkeypatch, caplog):
    monkeypatch.setattr("vllm.v1.kv_cache_interface.AttentionSpec", _OtherSpec)
    assert kvx.vllm.interface_problem() == "AttentionSpec has no state_content_bytes"
    monkeypatch.setattr("vllm.v1.attention.backends.registry.register_backend", pytest.fail)
    vllm_logger = logging.getLogger("vllm.kvx")
    vllm_logger.addHandler(caplog.handler)
    kvx.vllm.register()
    vllm_logger.removeHandler(caplog.handler)
    assert "does not support the interface of vLLM" in caplog.text
    monkeypatch.setenv("KVX_VLLM_RECIPE", "int8")
    with pytest.raises(kvx.UnsupportedError, match="AttentionSpec has no state_content_bytes"):
        kvx.vllm.register()


@dataclasses.dataclass
class _OtherSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    kv_quant_mode: int


def config(recipe=None, cache_dtype="auto", **options):
    options = options if recipe is None else {"recipe": recipe, **options}
    return SimpleNamespace(
        additional_config={"kvx": options} if options else None,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )


def test_where_a_recipe_comes_from(monkeypatch):
    assert recipe_of_layer("auto", config()) == "int8"
    assert recipe_of_layer("auto", config("int4/int8")) == "int4/int8"
    assert recipe_of_layer("nvfp4", config(cache_dtype="nvfp4")) == "nvfp4"
    assert recipe_of_layer("fp8", config()) == "fp8_e4m3"  # a checkpoint's scheme
    skipped = config(cache_dtype="int4_per_token_head")
    assert recipe_of_layer("auto", skipped) == "bf16"  # --kv-cache-dtype-skip-layers
    monkeypatch.setenv("KVX_VLLM_RECIPE", "mxfp4")
    assert recipe_of_layer("auto", config()) == "mxfp4"
    assert recipe_of_layer("auto", config("int4")) == "int4"
    with pytest.raises(kvx.Error, match="recipe is 'mxfp4' and the cache's dtype is 'fp8'"):
        recipe_of_layer("fp8", config())


def test_recipes_that_pages_cannot_hold_are_refused():
    for recipe, message in [
        ("int5", "int5"),
        ("int8:source=given", "those of fp8 alone"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            recipe_of_layer("auto", config(recipe))
    with pytest.raises(kvx.Error, match="kvx.recipee; expected recipe, unit_scales or"):
        recipe_of_layer("auto", config(recipee="int8"))
