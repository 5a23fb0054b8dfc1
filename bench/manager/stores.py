"""Tiers beside what their medium gives: a folder and a disk tier beside fio, Redis beside
redis-benchmark, the host tier beside memcpy. Rounds are interleaved; the table has their medians.

    python3 bench/manager/stores.py build/release/bench [--folder /tmp] [--rounds 5]

It needs Debian's fio and redis-server, which only this script uses. redis-benchmark and fio move the
same bytes in pieces of the same size; kvx makes and checks a record of each block besides.
"""

import argparse
import json
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time

BLOCKS_KIB = (64, 256, 1024)


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Redis:
    def __init__(self):
        self.port = free_port()
        self.process = subprocess.Popen(
            ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--save", "",
             "--appendonly", "no", "--loglevel", "warning"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise SystemExit("redis-server does not listen")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def benchmark(self, kib, megabytes):
        """GB/s of SET and of GET: one connection, a batch of 8 MiB in its pipeline."""
        count = max(megabytes * 1024 // kib, 1)
        text = output_of(
            "redis-benchmark", "-p", str(self.port), "-t", "set,get", "-d", str(kib * 1024),
            "-n", str(count), "-c", "1", "-P", str(max(8192 // kib, 1)), "-r", str(count), "--csv",
        )  # fmt: skip
        rates = [float(line.split(",")[1].strip('"')) for line in text.splitlines()[1:]]
        output_of("redis-cli", "-p", str(self.port), "flushall")
        return [rate * kib * 1024 / 1e9 for rate in rates]


def fio(folder, kib, megabytes, *, files=1, overwrite=0):
    """GB/s of a sequential write and read through the page cache, as kvx's are: a disk tier writes
    over files that it has made before, a folder's records are new files."""
    rates = []
    for what in ("write", "read"):
        text = output_of(
            "fio", "--name=kvx", f"--directory={folder}", f"--rw={what}", f"--bs={kib}k",
            f"--size={megabytes}m", "--ioengine=psync", "--invalidate=0", f"--nrfiles={files}",
            "--file_service_type=sequential", "--fallocate=none", f"--overwrite={overwrite}",
            "--output-format=json",
        )  # fmt: skip
        rates.append(json.loads(text)["jobs"][0][what]["bw_bytes"] / 1e9)
    for path in pathlib.Path(folder).glob("kvx.*"):
        path.unlink()
    return rates


def store(programs, tier, kib, megabytes):
    line = output_of(str(programs / "kvx_store_bench"), tier, str(kib), str(megabytes), "1")
    return [float(word) for word in line.split()]


def tier(programs, kib, megabytes, *options):
    """memcpy out, store, memcpy back, load in GB/s, of a row of kvx_tier_bench."""
    text = output_of(str(programs / "kvx_tier_bench"), *options, str(megabytes))
    for line in text.splitlines():
        if line.startswith(f"| {kib} KiB"):
            numbers = [float(word) for word in re.findall(r"[\d.]+", line)]
            return [numbers[1], numbers[2], numbers[4], numbers[5]]
    raise SystemExit(f"kvx_tier_bench has no row of {kib} KiB")


def medians(rounds):
    return [statistics.median(values) for values in zip(*rounds)]


def row(name, kib, theirs, ours):
    shares = [100 * mine / other for mine, other in zip(ours, theirs)]
    print(
        f"| {name} | {kib} KiB | {theirs[0]:.2f} | {ours[0]:.2f} | {shares[0]:.0f} "
        f"| {theirs[1]:.2f} | {ours[1]:.2f} | {shares[1]:.0f} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", type=pathlib.Path, help="build/PRESET/bench")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for program in ("fio", "redis-server", "redis-benchmark"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is missing; install Debian's fio and redis-server")
    print("| what | block | writes alone, GB/s | kvx | % | reads alone, GB/s | kvx | % |")
    print("|---|---|---|---|---|---|---|---|")
    for kib in BLOCKS_KIB:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder, Redis() as redis:
            pairs = {"folder, beside fio": [], "disk, beside fio": [],
                     "Redis, beside redis-benchmark": [], "host, beside memcpy": []}  # fmt: skip
            size = given.megabytes
            for _ in range(given.rounds):
                files = max(size * 1024 // kib, 1)
                pairs["folder, beside fio"].append(
                    (fio(folder, kib, size, files=files),
                     store(given.programs, f'folder("{folder}/f")', kib, size))
                )  # fmt: skip
                disk = tier(given.programs, kib, size, "--files", folder)
                pairs["disk, beside fio"].append(
                    (fio(folder, kib, size, overwrite=1), [disk[1], disk[3]])
                )
                pairs["Redis, beside redis-benchmark"].append(
                    (redis.benchmark(kib, size),
                     store(given.programs, f"redis(redis://127.0.0.1:{redis.port})", kib, size))
                )  # fmt: skip
                host = tier(given.programs, kib, size)
                pairs["host, beside memcpy"].append(
                    ([host[0], host[2]], [host[1], host[3]])
                )
            for name, rounds in pairs.items():
                theirs, ours = zip(*rounds)
                row(name, kib, medians(theirs), medians(ours))


if __name__ == "__main__":
    main()
