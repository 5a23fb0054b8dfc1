"""The documented server: its command on a real model, and eight clients at once."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from ports import reserved_ports
from real_model import save_real_model

RECIPE = "int8"
CLIENTS = 8
START_SECONDS = 600  # on a machine that is busy with other things


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its address and the file that holds what it prints."""
    folder = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", save_real_model(folder / "model"), "--served-model-name", "model"]
    command += ["--host", "127.0.0.1", "--max-model-len", "1024"]
    command += ["--attention-backend", "CUSTOM", "--enforce-eager"]
    command += ["--additional-config", json.dumps({"kvx": {"recipe": RECIPE}})]
    log = folder / "log.txt"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with reserved_ports() as port, open(log, "w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_healthy(address, process, log)
            yield address, log
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_healthy(address, process, log):
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            last = log.read_text(errors="replace")[-3000:]
            assert process.poll() is None, f"the server has ended:\n{last}"
            assert time.monotonic() < deadline, f"the server does not answer:\n{last}"
            time.sleep(0.5)


def complete(address, prompt):
    body = {"model": "model", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps({**body, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def test_eight_clients_at_once_get_whole_answers(server):
    address, log = server
    prompts = [f"Here are {n} facts about the city of Lisbon:" for n in range(3, 3 + CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda prompt: complete(address, prompt), prompts))
    for answer in answers:
        assert answer["usage"]["completion_tokens"] == 24
        assert answer["choices"][0]["text"].strip()
    assert f"kvx stores keys and values as {RECIPE}" in log.read_text(errors="replace")


def test_a_prompt_that_is_too_long_is_an_answer_and_no_end(server):
    address, _ = server
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(address, "Lisbon " * 3000)
    assert refused.value.code == 400
    assert complete(address, "Lisbon is")["choices"][0]["text"].strip()
