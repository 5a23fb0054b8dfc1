"""An engine that computes prompts, in a process of its own: one line of JSON in, one out."""

import json
import sys

from engines import Engine
from vllm import SamplingParams


def main(model, recipe, endpoint, options):
    transfer = {
        "kv_connector": "KvxTransferConnector",
        "kv_connector_module_path": "kvx.vllm.transfer",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"endpoint": endpoint},
    }
    with Engine(model, recipe, kv_transfer_config=transfer, **json.loads(options)) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            sampling = SamplingParams(
                temperature=0,
                max_tokens=1,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": {"do_remote_decode": True}},
            )
            prompt = {"prompt_token_ids": json.loads(line)}
            (output,) = engine.llm.generate([prompt], sampling, use_tqdm=False)
            print(json.dumps(output.kv_transfer_params), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
