#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What documents print of code is what is compiled: says which block isn't.

  check_excerpts.py DOCUMENT...

A ```cpp block is a whole program, which run_programs.cmake compiles and runs; that of docs/cuda.md is run by tests/gpu as nvcc compiles it.
A ```c++ or ```py block is out of a file of tests/, bench/ or examples/ that the line above it names:
<!-- from tests/interop/ggml_test.cpp -->. Each of its paragraphs is in that file, line for line; how far it is indented there doesn't
matter. A recipe has 30 lines at most.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES, MOST_LINES = ROOT / "docs" / "recipes.md", 30
CUDA = ROOT / "docs" / "cuda.md"


def is_in(paragraph, lines):
    for at in range(len(lines) - len(paragraph) + 1):
        indent = lines[at][:len(lines[at]) - len(lines[at].lstrip())]
        if all(line == indent + wanted for line, wanted in zip(lines[at:], paragraph)):
            return True
    return False


def problem_of(block, source):
    """Why the block isn't what the file says; none if it is."""
    if not source or not (ROOT / source[1]).is_file() or source[1].split("/")[0] not in ("tests", "bench", "examples"):
        return "no <!-- from FILE --> above it, or no such file of tests/, bench/ or examples/"
    lines = (ROOT / source[1]).read_text().splitlines()
    for paragraph in re.split(r"\n\n+", block.strip("\n")):
        if not is_in(paragraph.splitlines(), lines):
            return f"{source[1]} hasn't got:\n{paragraph}"
    return None


def problems(document):
    text = document.read_text()
    for found in re.finditer(r"^([^\n]*)\n```(cpp|c\+\+|cuda|py)\n(.*?)^```$", text, re.M | re.S):
        above, language, block = found.groups()
        line = text[:found.start(2)].count("\n") + 1
        if language == "cpp" or (language == "cuda" and document == CUDA):
            why = None if "int main(" in block else "that is a whole program; what is part of one is ```c++"
        else:
            why = problem_of(block, re.fullmatch(r"<!-- from (\S+) -->", above.strip()))
        if not why and document == RECIPES and block.count("\n") > MOST_LINES:
            why = f"a recipe of {block.count(chr(10))} lines: {MOST_LINES} at most"
        if why:
            yield f"{document.relative_to(ROOT)}:{line}: {why}"


found = [problem for name in sys.argv[1:] for problem in problems(Path(name).resolve())]
print("\n".join(found), file=sys.stderr)
sys.exit(1 if found else 0)
