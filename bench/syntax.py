#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether the benchmarks still compile, in a sixth of the time of a build: no code is made.

  syntax.py BUILD_DIR JOBS [AREA]    BUILD_DIR is configured by the preset bench
"""
import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys

root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def commands(build, area):
    listed = json.loads(subprocess.run(["ninja", "-C", build, "-t", "compdb"], check=True, capture_output=True, text=True).stdout)
    for entry in listed:
        name = os.path.relpath(os.path.join(entry["directory"], entry["file"]), root)
        if "/bench_" + area in entry["output"] and name.endswith(".cpp") and not generates(name):
            yield name, entry


def generates(name):
    """Whether a header that the source includes is made by the build."""
    with open(os.path.join(root, name), encoding="utf-8") as source:
        return re.search(r'#include "\w+\.pb\.h"', source.read())


def compiled(job):
    name, entry = job
    words = shlex.split(entry["command"])
    words = [w for w in words if not w.startswith("-O")] + ["-O0", "-fsyntax-only"]
    run = subprocess.run(words, cwd=entry["directory"], capture_output=True, text=True)
    return name, run.returncode, run.stderr


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    # A source may be in several targets: its name alone doesn't order them.
    jobs = sorted(commands(sys.argv[1], sys.argv[3] if len(sys.argv) == 4 else ""), key=lambda job: (job[0], job[1]["output"]))
    if not jobs:
        sys.exit("syntax.py: no benchmark is configured in " + sys.argv[1])
    failed = []
    with concurrent.futures.ThreadPoolExecutor(int(sys.argv[2])) as pool:
        for name, status, words in pool.map(compiled, jobs):
            if status:
                failed.append(name)
                print(words, file=sys.stderr)
    if failed:
        sys.exit("don't compile: " + ", ".join(failed))
    print(f"{len(jobs)} sources of benchmarks compile")


if __name__ == "__main__":
    main()
