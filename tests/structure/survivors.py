#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that each surviving mutant names a line that still stands in the sources of kernels.

    survivors.py LIST FOLDER...

The long tests match mutants with LIST by the text of the line. A line that was changed since would
fail them after half an hour; this check takes a moment.
"""
import re
import sys
from pathlib import Path


def lines_of(folders):
    """The code of each line, by the name of its file: comments behind the code left out."""
    found = {}
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.suffix in (".hpp", ".cuh", ".cu"):
                lines = path.read_text(encoding="utf-8").splitlines()
                found.setdefault(path.name, set()).update(line.split("  // ")[0].strip() for line in lines)
    return found


def gone(mutants, known):
    """The mutants of the list whose line isn't in the file that they name."""
    for mutant in mutants:
        named = re.fullmatch(r"  (\S+), [^:]*: (.*): [^:]*", mutant)
        if not named or named[2] not in known.get(named[1], ()):
            yield mutant


def main():
    path, *folders = sys.argv[1:]
    mutants = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.startswith("  ")]
    missing = list(gone(mutants, lines_of(folders)))
    for mutant in missing:
        print(f"{path}: no such line any more:\n{mutant}")
    changed = "  " + "no_such_file.hpp, f: x < y: lt to le"
    if not mutants or list(gone([changed], {})) != [changed]:
        print(f"{path}: the check found nothing to check")
        return 1
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
