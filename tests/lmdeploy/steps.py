"""LMDeploy's models and blocks on the CPU: LMDeploy has no CPU backend, so its portable operators
get kvx's attention, as its CUDA operators do on a GPU.

A Model is LMDeploy's own model with its own block pool; its step() is what LMDeploy's model agent
does with a scheduler's inputs.
"""

import torch
import transformers
from lmdeploy.pytorch.backends import selector
from lmdeploy.pytorch.backends.cuda.attention.default import (
    TritonAttentionMetadata,
    build_triton_attention_metadata,
)
from lmdeploy.pytorch.backends.cuda.step_metadata import CudaSequenceMetadata
from lmdeploy.pytorch.backends.default import DefaultOpsBackend
from lmdeploy.pytorch.config import CacheConfig, ModelConfig
from lmdeploy.pytorch.engine.cache_engine.plan import build_block_cache_plan
from lmdeploy.pytorch.model_inputs import ModelInputs, step_ctx_manager
from lmdeploy.pytorch.models.patch import BuildModelContext, build_patched_model
from lmdeploy.pytorch.weight_loader.model_weight_loader import load_model_weights

BLOCK = 16
SIZES = dict(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)


class CpuOpsBackend(DefaultOpsBackend):
    """LMDeploy's portable operators, and the steps' metadata that its CUDA backend makes."""

    @staticmethod
    def get_attention_metadata_cls():
        return TritonAttentionMetadata

    @classmethod
    def update_step_context(cls, step_context):
        step_context.attn_metadata = build_triton_attention_metadata(
            TritonAttentionMetadata,
            step_context,
            CudaSequenceMetadata.from_step_context(step_context),
        )
        return step_context


def use_cpu(monkeypatch):
    """LMDeploy takes CpuOpsBackend for its "cuda" until the test ends."""
    monkeypatch.setattr(selector, "_get_backend", lambda: CpuOpsBackend)


def save_model(folder, config_class=transformers.LlamaConfig, **options):
    """A random model in `folder`, large weights behind small embeddings: else it repeats itself.
    Returns it."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**SIZES, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_tokens" not in name:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return model.eval()


class Model:
    """LMDeploy's model of the folder, and num_blocks blocks of its own."""

    def __init__(self, folder, num_blocks=24, block_size=BLOCK, dtype=torch.float32, device="cpu"):
        self.config = ModelConfig.from_pretrained(str(folder), dtype="float16", device_type=device)
        self.config.dtype = dtype
        context = BuildModelContext(fp32_lm_head=self.config.fp32_lm_head)
        self.model = build_patched_model(self.config, torch.device(device), context)
        load_model_weights(self.model, str(folder), device=torch.device(device))
        self.cache_config = CacheConfig(
            max_batches=8, block_size=block_size, num_cpu_blocks=0, num_gpu_blocks=num_blocks
        )
        self.plan = build_block_cache_plan(self.config, self.cache_config, 1)
        self.caches = list(zip(*self.plan.allocate(num_blocks, device).tensor_views))
        self.device = device

    @torch.inference_mode()
    def step(self, sequences):
        """sequences: (new tokens, tokens stored before, block ids) each. Returns the logits of the
        new tokens, [tokens, vocabulary]."""
        tokens = [t for new, _, _ in sequences for t in new]
        new = [len(new) for new, _, _ in sequences]
        stored = [stored for _, stored, _ in sequences]
        width = max(len(blocks) for _, _, blocks in sequences)
        table = [list(blocks) + [0] * (width - len(blocks)) for _, _, blocks in sequences]
        lengths = [a + b for a, b in zip(new, stored)]

        def on_device(numbers, dtype=torch.long):
            return torch.tensor(numbers, dtype=dtype, device=self.device)

        inputs = ModelInputs(
            input_ids=on_device([tokens]),
            seq_length=on_device(new),
            history_lengths=on_device(stored),
            block_offsets=on_device(table, torch.int32),
            is_decoding=max(new) == 1 and min(stored) > 0,
            num_ignored_history=on_device([0] * len(new)),
            max_q_seqlen=max(new),
            max_kv_seqlen=max(lengths),
            sum_kv_seqlen=sum(lengths),
        )
        with step_ctx_manager(self.model.ctx_mgr):
            context = self.model.ctx_mgr.build_context(
                inputs, self.config, self.cache_config, kv_caches=self.caches
            )
            with self.model.ctx_mgr.context(context):
                arguments = self.model.prepare_inputs_for_generation(
                    past_key_values=self.caches, context=context
                )
                hidden = self.model(**arguments)
                return self.model.get_logits(hidden)[0]


def logits_in_steps(model, tokens, prompts, blocks):
    """Logits of every token of several sequences: prompts in one step, the rest one by one.

    tokens: the sequences; prompts: how many tokens of each are the prompt; blocks: of each
    """
    found = [[] for _ in tokens]
    work = [(t[:n], 0, b) for t, n, b in zip(tokens, prompts, blocks)]
    while work:
        rows = model.step(work).split([len(new) for new, _, _ in work])
        alive = [s for s in range(len(tokens)) if len_of(found[s]) < len(tokens[s])]
        for s, part in zip(alive, rows):
            found[s].append(part)
        work = [
            (tokens[s][n : n + 1], n, blocks[s])
            for s in range(len(tokens))
            if (n := len_of(found[s])) < len(tokens[s])
        ]
    return [torch.cat(parts) for parts in found]


def len_of(parts):
    return sum(len(part) for part in parts)
