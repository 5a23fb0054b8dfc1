#!/usr/bin/env python3
"""Cycles that llvm-mca counts for a trace of kvx_tile_bench, a processor at a time.

usage: mca.py PROGRAM TRACE CPU...

The instructions are taken as one long straight line: loads always hit the first cache, branches
are always predicted, and a store costs its port alone.
"""
import re
import subprocess
import sys

MCA = "llvm-mca-16"


def instructions_of(program):
    """Text of each instruction by its address."""
    dump = subprocess.run(["objdump", "-d", "--no-show-raw-insn", program], check=True, text=True,
                          capture_output=True).stdout
    texts = {}
    for line in dump.splitlines():
        match = re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line)
        if match:
            texts[int(match[1], 16)] = match[2]
    return texts


def straight_line(program, trace):
    """The trace's instructions without their jumps and calls."""
    texts = instructions_of(program)
    lines = []
    with open(trace) as addresses:
        for address in addresses:
            text = texts.get(int(address, 16), "")
            text = re.sub(r"\s*(#|<).*", "", text)
            if text and not re.match(r"(j|call|ret|leave|bnd|notrack)", text):
                lines.append(text)
    return "\n".join(lines)


def cycles_on(cpu, code):
    report = subprocess.run([MCA, f"-mcpu={cpu}", "-iterations=1", "-instruction-info=0",
                             "-resource-pressure=0"], input=code, check=True, text=True,
                            capture_output=True).stdout
    return int(re.search(r"Total Cycles:\s+(\d+)", report)[1])


def main():
    program, trace, *cpus = sys.argv[1:]
    code = straight_line(program, trace)
    print("instructions", code.count("\n") + 1)
    for cpu in cpus:
        print(cpu, cycles_on(cpu, code), "cycles a tile")


if __name__ == "__main__":
    main()
