#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles what a newcomer compiles with every compiler and CUDA toolkit that is here, and writes down what was tested: the marked part
of docs/toolkits.md. Status 1 if anything fails. It takes half an hour of two cores; begun again, it goes on where it was ended.

  toolkits.py SCRATCH [--zig ZIG] [--cuda HOME]...
"""
import argparse
import concurrent.futures
import datetime
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"
TABLE = ROOT / "docs" / "toolkits.md"
BEGIN, END = "<!-- what follows is written by ./dev check toolkits -->", "<!-- end of what is written -->"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
CLANG_BEHIND_NVCC = ",-Wno-gnu-designator,-Wno-unused-function,-Wno-deprecated-declarations"
FAILED = []


def run(name, *commands):
    """The commands one after the other: "yes", or "**no**" with what was said on the terminal. A command may be (command, statuses)."""
    for command in commands:
        command, fine = command if isinstance(command, tuple) else (command, (0,))
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
        if done.returncode not in fine:
            FAILED.append(name)
            said = (done.stdout + done.stderr).splitlines()
            errors = [line for line in said if "error" in line] or said
            print(f"== {name}: status {done.returncode}: {' '.join(map(str, command))}", *errors[:10], sep="\n  ")
            return "**no**"
    return "yes"


def digest():
    """Of all that is compiled here."""
    seen = hashlib.sha256(Path(__file__).read_bytes() + (ROOT / "README.md").read_bytes())
    for folder in ("include", "tests/consumers", "bench/gpu", "tests/cuda", "tests/interop"):
        for file in sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in (".hpp", ".cuh", ".cu", ".cpp")):
            seen.update(file.read_bytes())
    return seen.hexdigest()


class Rows:
    """The rows of the tables, in their order. One that has passed with the same sources isn't tested again."""

    def __init__(self, file):
        self.file, self.sources, self.lock, self.tables = file, digest(), threading.Lock(), ([], [])
        known = json.loads(file.read_text()) if file.exists() else {}
        self.known = known["rows"] if known.get("sources") == self.sources else {}

    def add(self, pool, table, head, test):
        """`head`: the first cells. `test` gives the others."""
        self.tables[table].append(head)
        if head not in self.known:
            return pool.submit(self.run, head, test)
        return None

    def run(self, head, test):
        cells = " | ".join(test())
        with self.lock:
            self.known[head] = cells
            passed = {h: c for h, c in self.known.items() if "**no**" not in c}
            self.file.write_text(json.dumps({"sources": self.sources, "rows": passed}))
            self.write()

    def write(self):
        table = lambda which, cells: [f"| {head} | {self.known.get(head, ' | '.join(['not run yet'] * cells))} |" for head in self.tables[which]]
        lines = [f"Tested on {datetime.date.today()}.", "",
                 "| compiler | C++ library | standard | every header, no warning | README's program | a consumer | plain C++ on CUDA |",
                 "|---|---|---|---|---|---|---|", *table(0, 4), "",
                 "| nvcc | CCCL | host compiler | standard | every .cuh header | a kernel | the collectives' kernels | adapters to libcu++ "
                 "and Thrust |", "|---|---|---|---|---|---|---|---|", *table(1, 4)]
        before, rest = TABLE.read_text().split(BEGIN)
        TABLE.write_text("\n".join([before + BEGIN, *lines, END + rest.split(END)[1]]))
        return lines


def version(command, pattern):
    return re.search(pattern, subprocess.run([str(c) for c in command], capture_output=True, text=True).stdout)[1]


class Toolkit:
    def __init__(self, home):
        self.home = Path(home)
        self.version = version([self.nvcc, "--version"], r"release ([0-9.]+)")
        cccl = (self.home / "include/cccl/cuda/std/__cccl/version.h").read_text()
        number = int(re.search(r"define CCCL_VERSION (\d+)", cccl)[1])
        self.cccl = f"{number // 1000000}.{number // 1000 % 1000}.{number % 1000}"
        self.includes = ["-isystem", self.home / "include", "-isystem", self.home / "include/cccl"]
        self.libraries = [f"-L{self.home}/lib64", "-lcudart", f"-Wl,-rpath,{self.home}/lib64"]

    @property
    def nvcc(self):
        return self.home / "bin" / "nvcc"


def compilers(zig):
    """(name, command, standard library, standards' flags) of each that is here, from the oldest that is supported."""
    for family, oldest, label in (("g++", 12, "g++"), ("clang++", 16, "clang")):
        for number in range(oldest, 40):
            if shutil.which(f"{family}-{number}"):
                exact = version([f"{family}-{number}", "--version"], r"(\d+\.\d+\.\d+)")
                yield f"{label} {exact}", [f"{family}-{number}"], f"libstdc++ {libstdcxx()}"
    if zig:
        exact = version([zig, "c++", "--version"], r"clang version (\d+\.\d+\.\d+)")
        yield (f"clang {exact} (`zig c++`)", [zig, "c++", "-Wno-unused-command-line-argument"], f"libc++ {exact.split('.')[0]}")


def libstdcxx():
    return version(["g++", "--version"], r"(\d+\.\d+)\.\d+")


def every_header(scratch, with_cuda):
    """A file that includes all of them. Debian's libtorch isn't C++23, so its header is left out."""
    names = sorted(str(h.relative_to(INCLUDE)) for h in INCLUDE.rglob("*.hpp"))
    names = [n for n in names if not n.endswith("torch_gradients.hpp") and (with_cuda or "backend/cuda" not in n)]
    file = scratch / "every_header.cpp"
    file.write_text("".join(f"#include <{n}>\n" for n in names))
    return file


def first_program(scratch):
    """README's program, how it is compiled, and what it prints."""
    text = (ROOT / "README.md").read_text()
    block = lambda language: re.search(rf"\n```{language}\n(.*?)```", text, re.S)[1]
    (scratch / "quickstart.cpp").write_text(block("cpp"))
    line = re.search(r"\ng\+\+ -std=c\+\+20 (.*) -I gpushare/include quickstart.cpp -o quickstart (.*) && ./quickstart\n", text)
    return line[1].split(), line[2].split(), block("text")


def with_compiler(scratch, toolkit, name, command, standard):
    folder = scratch / re.sub(r"[^a-z0-9]+", "_", f"{name} {standard}")
    folder.mkdir(exist_ok=True)
    compiler = [*command, f"-std={standard.replace('23', '2b')}", "-I", INCLUDE]  # as clang 16 calls it, too
    options, tail, wanted = first_program(scratch)
    program, consumer, on_cuda = folder / "quickstart", folder / "consumer", folder / "on_cuda"
    (folder / "wanted").write_text(wanted)
    cells = [
        run(f"{name}, {standard}: every header", [*compiler, *WARNINGS, *(toolkit.includes if toolkit else []), "-c",
                                                  scratch / "every_header.cpp", "-o", folder / "every_header.o"]),
        run(f"{name}, {standard}: README's program", [*compiler, *options, scratch / "quickstart.cpp", "-o", program, *tail],
            ["sh", "-c", f"{program} | diff - {folder}/wanted"]),
        run(f"{name}, {standard}: a consumer", [*compiler, ROOT / "tests/consumers/main.cpp", "-o", consumer, "-pthread"], [consumer]),
    ]
    # Without a driver it ends by a typed error, which is status 3.
    cells.append(run(f"{name}, {standard}: plain C++ on CUDA",
                     [*compiler, *toolkit.includes, ROOT / "tests/consumers/cuda_runtime.cpp", "-o", on_cuda, "-pthread",
                      *toolkit.libraries], ([on_cuda], (0, 3))) if toolkit else "-")
    return cells


def with_toolkit(scratch, toolkit, name, host, standard):
    what = f"nvcc {toolkit.version} with {name}, {standard}"
    folder = scratch / re.sub(r"[^a-z0-9]+", "_", what)
    folder.mkdir(exist_ok=True)
    headers = folder / "every_header.cu"
    headers.write_text("".join(f"#include <{h.relative_to(INCLUDE)}>\n" for h in sorted(INCLUDE.rglob("*.cuh"))))
    nvcc = [toolkit.nvcc, f"-ccbin={host}", f"-std={standard}", "-O2", "-arch=sm_90",
            # nvcc hands all on as one file: clang then warns of what system headers do, and of designators that nvcc has rewritten.
            "-Xcompiler=-Wall,-Wextra,-Wshadow" + (CLANG_BEHIND_NVCC if "clang" in str(host) else ""),
            "-Werror=all-warnings", "-I", INCLUDE]
    plain = [host, f"-std={standard}", "-fsyntax-only", "-I", INCLUDE, "-I", ROOT / "tests", *toolkit.includes]
    cells = [
        run(f"{what}: every .cuh header", [*nvcc, "-c", headers, "-o", folder / "headers.o"]),
        run(f"{what}: a kernel", [*nvcc, ROOT / "tests/consumers/cuda.cu", "-o", folder / "kernel"], ([folder / "kernel"], (0, 3))),
        run(f"{what}: collectives", [*nvcc, "-I", ROOT / "bench", "-I", ROOT / "tests", "-c", ROOT / "bench/gpu/collective_kernels.cu",
                                     "-o", folder / "collectives.o"]),
        run(f"{what}: CCCL", [*plain, ROOT / "tests/cuda/mr_test.cpp", ROOT / "tests/interop/cuda_thrust_test.cpp"]),
    ]
    return cells


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--zig")
    parser.add_argument("--cuda", action="append", default=[])
    asked = parser.parse_args()
    asked.scratch.mkdir(parents=True, exist_ok=True)
    toolkits = sorted((Toolkit(home) for home in asked.cuda), key=lambda t: [int(n) for n in t.version.split(".")])
    every_header(asked.scratch, bool(toolkits))
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = os.environ["ZIG_LOCAL_CACHE_DIR"] = str(asked.scratch / "zig")
    found = list(compilers(asked.zig))
    rows, newest = Rows(asked.scratch / "rows.json"), toolkits[-1] if toolkits else None
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        begun = []
        for name, command, library in found:
            for standard in ("c++20", "c++23"):
                begun.append(rows.add(pool, 0, f"{name} | {library} | {standard.replace('c', 'C')}",
                                      functools.partial(with_compiler, asked.scratch, newest, name, command, standard)))
        # nvcc knows C++23 from 13.1 on, with a host compiler that is new enough for it.
        hosts = [(name, command[0]) for name, command, _ in found if len(command) == 1]
        pairs = [(t, *hosts[0], "c++20") for t in toolkits]
        if newest and newest.version != "13.0" and len(hosts) > 1:
            pairs.append((newest, *hosts[-1], "c++23"))
        for toolkit, name, host, standard in pairs:
            begun.append(rows.add(pool, 1, f"{toolkit.version} | {toolkit.cccl} | {name} | {standard.replace('c', 'C')}",
                                  functools.partial(with_toolkit, asked.scratch, toolkit, name, host, standard)))
        for row in filter(None, begun):
            row.result()
    print(*rows.write(), sep="\n")
    if FAILED:
        sys.exit(f"toolkits: {len(FAILED)} failed: {'; '.join(FAILED)}")


if __name__ == "__main__":
    main()
