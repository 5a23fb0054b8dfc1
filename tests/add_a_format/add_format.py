"""Adds int3.py's format to an overlay of the sources, then shows that the list of files in
docs/howto/add-a-format.md is right:

  - the page lists the files that the format changes, each of them and no other, six at most;
  - without any one part the compiler refuses the tree;
  - a format that claims fast kernels, but has none for its packing, is refused as well;
  - the tree with all parts builds, and stores and reads the format's rows at every CPU level
    (project/int3_test.cpp), or with --nvcc: its reference kernels compile for the GPU.
"""

import argparse
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import int3

MOST_FILES = 6
PAGE = "docs/howto/add-a-format.md"
WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror"]
CUDA_SOURCES = ["src/ops/attend/cuda/reference/reference.cu", "src/ops/append/append.cu",
                "src/ops/gather/gather.cu"]


def fail(message):
    sys.exit(f"add_a_format: {message}")


def run(command, what):
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode != 0:
        fail(f"{what} failed:\n{done.stdout[-8000:]}{done.stderr[-8000:]}")


def files_of_page(source):
    """The paths in the first column of the page's table."""
    text = (source / PAGE).read_text()
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


def check_page(source):
    listed = files_of_page(source)
    changed = list(dict.fromkeys(part.file for part in int3.PARTS))
    if sorted(listed) != sorted(changed):
        fail(f"{PAGE} lists {sorted(listed)}; the format changes {sorted(changed)}")
    if len(listed) > MOST_FILES:
        fail(f"{PAGE} lists {len(listed)} files; expected {MOST_FILES} or fewer")
    print(f"{PAGE} lists {len(listed)} files:", *listed, sep="\n  ")


def write_overlay(source, overlay, parts):
    """The changed files alone; they come before the tree's in the compiler's search."""
    shutil.rmtree(overlay, ignore_errors=True)
    texts = {}
    for part in parts:
        if part.after is None:
            if (source / part.file).exists():
                fail(f"{part.file} is new to the format, but the tree has it")
            texts[part.file] = part.text
            continue
        text = texts.get(part.file) or (source / part.file).read_text()
        if text.count(part.after) != 1:
            fail(f"{part.file} has {part.after!r} {text.count(part.after)} times; "
                 "int3.py needs it once")
        texts[part.file] = text.replace(part.after, part.after + part.text)
    for file, text in texts.items():
        path = overlay / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def in_overlay(source, overlay, file):
    return overlay / file if (overlay / file).exists() else source / file


def includes(source, overlay):
    return [f"-I{root / folder}" for root in (overlay, source) for folder in ("src", "include")]


def errors_of(source, overlay, cxx, file, options=()):
    """What the compiler says against the file, or nothing."""
    command = [cxx, *WARNINGS, *options, *includes(source, overlay), "-fsyntax-only",
               str(in_overlay(source, overlay, file))]
    done = subprocess.run(command, text=True, capture_output=True)
    return "" if done.returncode == 0 else done.stderr


def check_that_forgetting_is_refused(source, build, cxx):
    overlay = build / "without"
    for left_out in int3.PARTS:
        write_overlay(source, overlay, [part for part in int3.PARTS if part is not left_out])
        errors = errors_of(source, overlay, cxx, left_out.refused_by)
        if not errors:
            fail(f"{left_out.refused_by} compiles without this part of {left_out.file}:\n"
                 f"{left_out.text}")
        # Of the format or of its packing, not of something else.
        if not re.search("Int3|INT3|int3|Triples", errors):
            fail(f"{left_out.refused_by} is refused for another reason:\n{errors}")


def check_that_missing_kernels_are_refused(source, build, cxx):
    """Kernels::kAll without branches in the vector kernels."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    overlay = build / "claims"
    write_overlay(source, overlay, int3.PARTS)
    path = overlay / "src/format/formats/int3.hpp"
    path.write_text(path.read_text().replace("Kernels::kReference", "Kernels::kAll"))
    options = ["-O1", "-mavx2", "-mfma", "-mf16c"]
    for file, expected in (
        ("src/ops/cpu/isa/avx2/level_avx2.cpp", "has no branch for this packing"),
        ("src/ops/attend/cpu/isa/avx2/level_avx2.cpp", "have no order for this packing"),
    ):
        errors = errors_of(source, overlay, cxx, file, options)
        if expected not in errors:
            fail(f"{file}: expected an error with {expected!r}, found:\n{errors or 'none'}")


def build_and_test(source, overlay, args):
    project = pathlib.Path(__file__).parent / "project"
    tree = args.build / "tree"
    configure = [args.cmake, "-G", "Ninja", "-S", str(project), "-B", str(tree),
                 f"-DKVX_SOURCE={source}", f"-DKVX_OVERLAY={overlay}",
                 f"-DCMAKE_CXX_COMPILER={args.cxx}",
                 f"-DCMAKE_CXX_COMPILER_LAUNCHER={args.launcher}"]
    run(configure, "configuring the tree with int3")
    jobs = str(len(os.sched_getaffinity(0)))
    run([args.cmake, "--build", str(tree), "-j", jobs], "building the tree with int3")
    subprocess.run([str(tree / "int3_test"), "--gtest_brief=1"], check=True)


def compile_reference_kernels(source, overlay, args):
    """nvcc without optimisation, for one architecture. The kernels stay unused."""
    launcher = [args.launcher] if args.launcher else []
    for file in CUDA_SOURCES:
        target = args.build / (pathlib.Path(file).stem + ".cubin")
        command = launcher + [
            args.nvcc, f"-ccbin={args.cxx}", "-std=c++20", "-DFMT_USE_CONSTEXPR=1",
            "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a",
            args.nvcc_options, *includes(source, overlay), "-x", "cu", "-cubin",
            str(in_overlay(source, overlay, file)), "-o", str(target)]
        run(command, f"compiling {file} with int3")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--cmake")
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--launcher", default="")
    parser.add_argument("--nvcc")
    parser.add_argument("--nvcc-options", default="-O0")
    args = parser.parse_args()
    check_page(args.source)
    overlay = args.build / "overlay"
    write_overlay(args.source, overlay, int3.PARTS)
    if args.nvcc:
        compile_reference_kernels(args.source, overlay, args)
        return
    check_that_forgetting_is_refused(args.source, args.build, args.cxx)
    check_that_missing_kernels_are_refused(args.source, args.build, args.cxx)
    build_and_test(args.source, overlay, args)


if __name__ == "__main__":
    main()
