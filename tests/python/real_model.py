"""The demo's model as a folder that vLLM and LMDeploy load: the GGUF's numbers in bfloat16."""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def save_real_model(folder):
    """KVX_TEST_MODEL names the GGUF. Returns the folder's name."""
    gguf = Path(os.environ["KVX_TEST_MODEL"])
    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    model.hf_quantizer = None  # its weights are dequantised; transformers saves no GGUF
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return str(folder)
