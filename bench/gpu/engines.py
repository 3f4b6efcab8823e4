#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a program with the libtorch of the PyTorch that is installed here: engines.py PROGRAM [ARG...].

PROGRAM.libtorch says for which version the program was built, as "2.11": the libraries of another one have other functions.
Exit code 4: there is no such PyTorch, or one without CUDA; else the program's own.
"""
import importlib.metadata
import importlib.util
import os
import pathlib
import sys


def not_supported(why):
    print(f"not supported: {why}")
    sys.exit(4)


def main(program, *arguments):
    built_for = pathlib.Path(program + ".libtorch").read_text().strip()
    found = importlib.util.find_spec("torch")  # without loading it: that takes seconds
    if found is None or not found.submodule_search_locations:
        not_supported("PyTorch isn't installed, so there is no libtorch to run engines with")
    installed = importlib.metadata.version("torch")
    if ".".join(installed.split(".")[:2]) != built_for:
        not_supported(f"PyTorch is {installed}, and the engines were built for {built_for}")
    package = pathlib.Path(found.submodule_search_locations[0])
    if not (package / "lib" / "libtorch_cuda.so").exists():
        not_supported("this PyTorch is one without CUDA")
    # Its own, and those of the packages beside it that it needs; CUDA's come from there, too.
    folders = [package / "lib", *sorted(package.parent.glob("nvidia/*/lib")), "/usr/local/cuda/lib64",
               "/usr/local/cuda/extras/CUPTI/lib64", os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(str(f) for f in folders if f)
    sys.stdout.flush()
    os.execv(program, [program, *arguments])


main(*sys.argv[1:])
