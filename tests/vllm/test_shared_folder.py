"""Folders in shared memory: those of processes that were killed go, those of living ones stay."""

import subprocess
import sys

import pytest

from kvx.vllm.shared_folder import SharedFolder

HOLD = """
import sys
from kvx.vllm.shared_folder import SharedFolder
folder = SharedFolder(sys.argv[1])
(folder.path / "block.kvx").write_bytes(b"bytes")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder kvx-other."""
    path = tmp_path / "kvx-other"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process, path
        process.kill()


def test_a_killed_process_leaves_nothing_behind_the_next_start(holder, tmp_path):
    process, path = holder
    SharedFolder(tmp_path / "kvx-first")
    assert (path / "block.kvx").exists(), "its process lives"
    process.kill()
    process.wait()
    assert path.exists()
    SharedFolder(tmp_path / "kvx-second")
    assert not path.exists()


def test_a_folder_stays_while_one_of_its_processes_lives(holder, tmp_path):
    process, path = holder
    shared = SharedFolder(path)
    process.kill()
    process.wait()
    SharedFolder(tmp_path / "kvx-new")
    assert (path / "block.kvx").exists()
    shared.delete()
    assert not path.exists()
    shared.delete()


def test_folders_and_links_of_others_stay(tmp_path):
    aside = tmp_path / "aside"
    aside.mkdir()
    (aside / "in-use").touch()
    (tmp_path / "kvx-link").symlink_to(aside)
    (tmp_path / "kvx-plain").mkdir()
    (tmp_path / "other-engine").mkdir()
    (tmp_path / "other-engine" / "in-use").touch()
    SharedFolder(tmp_path / "kvx-new")
    assert (aside / "in-use").exists()
    assert (tmp_path / "kvx-plain").exists() and (tmp_path / "other-engine").exists()
