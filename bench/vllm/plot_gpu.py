"""A picture of gpu.py's decode tables.

    python bench/vllm/plot_gpu.py docs/vllm-gpu.svg BATCH.txt FIXED_MEMORY.txt ONE_LONG.txt

Reads what runs of gpu.py printed: a batch, --cache-gb and one long request. Bars are tokens/s beside
the first engine of the run.
"""

import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ORDER = ["FLASH_ATTN", "FLASH_ATTN/fp8", "TRITON_ATTN/int8_per_token_head"]
ORDER += ["bf16", "int8", "nvfp4", "int4"]
VLLMS, KVXS = "#9aa5b1", "#1f6feb"


def main():
    output, *files = sys.argv[1:]
    figure, axes = plt.subplots(1, len(files), figsize=(4.2 * len(files), 3.4), squeeze=False)
    for axis, file in zip(axes[0], files):
        draw(axis, results_in(Path(file).read_text()))
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None} if output.endswith("svg") else None)


def results_in(output):
    found = [json.loads(result) for result in re.findall(r" decode_\S+: (\{.*\})", output)]
    return sorted(found, key=lambda result: ORDER.index(result["name"]))


def draw(axis, results):
    base = results[0]["tokens_a_second"]
    names = [label_of(result, results) for result in results]
    times = [result["tokens_a_second"] / base for result in results]
    colors = [VLLMS if result["name"].split("/")[0].isupper() else KVXS for result in results]
    bars = axis.barh(names, times, color=colors)
    axis.bar_label(bars, [f"{time:.2f}" for time in times], padding=3)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.15 * max(times))
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("tokens/s beside FLASH_ATTN")
    context = results[0]["context"]
    batches = {result["batch"] for result in results}
    fixed = len(batches) > 1
    requests = "as many requests as 40 GB hold" if fixed else f"{batches.pop()} requests"
    axis.set_title(f"{requests}, {context} tokens".replace("1 requests", "1 request"), fontsize=10)


def label_of(result, results):
    name = result["name"].replace("TRITON_ATTN/", "").replace("FLASH_ATTN/fp8", "fp8 (vLLM)")
    name = name if result["name"].split("/")[0].isupper() else f"kvx {name}"
    fixed = len({other["batch"] for other in results}) > 1
    return f"{name} x {result['batch']}" if fixed else name


if __name__ == "__main__":
    main()
