"""Blocks in files: another engine goes on from them, and believes none that is damaged."""

import pytest
from engines import BLOCK, Engine, prompts, save_model
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

import kvx

pytestmark = pytest.mark.usefixtures("in_this_process")


def connected(model, folder, recipe="int8", **options):
    transfer = {
        "kv_connector": "KvxFileConnector",
        "kv_connector_module_path": "kvx.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(folder), **options.pop("extra", {})},
    }
    return Engine(model, recipe, kv_transfer_config=transfer, **options)


def counts(engine):
    """The scheduler's."""
    return engine.llm.llm_engine.engine_core.engine_core.scheduler.connector.counts


def files_of(folder):
    """Once all of them are written, where an engine is at work."""
    if has_kv_transfer_group():
        get_kv_transfer_group().flush()
    return sorted(folder.glob("*/*.kvx"))


def test_another_process_goes_on_from_the_files(model, tmp_path, monkeypatch):
    (prompt,) = prompts([120])
    with connected(model, tmp_path) as engine:
        expected = engine.tokens([prompt], count=40)
        assert counts(engine)["found"] == 0
    # 160 tokens but the last, which was never fed: the prompt's blocks, and what was said
    assert len(files_of(tmp_path)) == 159 // BLOCK
    assert sum(kvx.verify(file) for file in files_of(tmp_path)) == 4 * 4  # a block copy a layer
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with connected(model, tmp_path) as engine:
        (output,) = engine.outputs([prompt], count=40)
        assert output.num_cached_tokens == 96  # whole blocks, less the last token
        assert [output.outputs[0].token_ids] == expected


def test_a_file_holds_its_blocks_tokens_compressed_if_wanted(model, tmp_path):
    (prompt,) = prompts([70])
    with connected(model, tmp_path, "int4", extra={"zstd_level": 3}) as engine:
        expected = engine.tokens([prompt])
    found = [kvx.inspect(file) for file in files_of(tmp_path)]
    assert {file.block_size for file in found} == {BLOCK} and "recipe int4" in found[0].fingerprint
    with connected(model, tmp_path, "int4") as engine:
        assert engine.tokens([prompt]) == expected
        assert counts(engine)["found"] == 2


def test_sliding_windows_load_what_they_still_see(tmp_path_factory, tmp_path):
    model = save_model("gemma2", tmp_path_factory.mktemp("gemma2"))
    (prompt,) = prompts([150])
    options = dict(max_num_batched_tokens=48, enable_chunked_prefill=True)
    with connected(model, tmp_path, "f32", **options) as engine:
        expected = engine.tokens([prompt], count=60)
    with connected(model, tmp_path, "f32", **options) as engine:
        (output,) = engine.outputs([prompt], count=60)
        assert output.num_cached_tokens == 128 and [output.outputs[0].token_ids] == expected


def test_another_recipe_has_files_of_its_own(model, tmp_path):
    (prompt,) = prompts([70])
    with connected(model, tmp_path, "int8") as engine:
        engine.tokens([prompt], count=1)
    with connected(model, tmp_path, "int4") as engine:
        engine.tokens([prompt], count=1)
        assert counts(engine)["found"] == 0
    assert len({file.parent for file in files_of(tmp_path)}) == 2


def test_a_damaged_file_is_a_miss_counted_and_written_anew(model, tmp_path):
    (prompt,) = prompts([120])
    with connected(model, tmp_path) as engine:
        expected = engine.tokens([prompt])
    sound = {file: file.read_bytes() for file in files_of(tmp_path)}
    for file, content in sound.items():  # one bit, in a page
        damaged = bytearray(content)
        damaged[100] ^= 4
        file.write_bytes(damaged)
    with connected(model, tmp_path) as engine:
        (output,) = engine.outputs([prompt])
        assert [output.outputs[0].token_ids] == expected and output.num_cached_tokens == 0
        assert counts(engine) == {"bad": 1}  # the first; those after it are of no use
    # The blocks that were looked at or filled anew are sound again; others wait for their turn.
    first_anew = [file for file, content in sound.items() if file.read_bytes() == content]
    assert len(first_anew) == 1


def test_a_file_of_another_block_is_a_miss(model, tmp_path):
    first, second = prompts([70, 70])
    second["prompt_token_ids"][0] += 1 if second["prompt_token_ids"][0] < 90 else -1
    with connected(model, tmp_path) as engine:
        engine.tokens([first], count=1)
        names = files_of(tmp_path)
        expected = engine.tokens([second])
    others = [file for file in files_of(tmp_path) if file not in names]
    for file, other in zip(others, names):
        file.write_bytes(other.read_bytes())
    with connected(model, tmp_path) as engine:
        assert engine.tokens([second]) == expected
        assert counts(engine)["bad"] == 1 and counts(engine)["found"] == 0


def test_what_files_cannot_serve_is_refused(model, tmp_path):
    with pytest.raises(kvx.Error, match="has no path"):
        connected(model, "")
    with pytest.raises(kvx.UnsupportedError, match="needs --attention-backend CUSTOM"):
        connected(model, tmp_path, None)
