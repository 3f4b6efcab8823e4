#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The words that the library puts in front of an error's reason, or in its place, each with its file: `error_words` holds them as somebody
has read them last. The reasons are in tests/base/errors.txt; an error says "tenant 'chat': WORDS: REASON".

    tests/structure/error_words.py            # compares
    tests/structure/error_words.py --write    # takes over what there is: read the difference
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "structure" / "error_words"
CALL = re.compile(r"\b(?:raise|memory_error|operation_error|refuse_field|check_field|check|value|refuse|fail|of\([^()]*\)\.add|m\.add)\(")
TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')


def arguments(text, at):
    """What is between the parenthesis at `at` and its end."""
    depth, quoted, i = 0, False, at
    while i < len(text):
        c = text[i]
        if quoted:
            if c == "\\":
                i += 1
            quoted = c != '"'
        elif c == '"':
            quoted = True
        else:
            depth += (c == "(") - (c == ")")
            if depth == 0:
                return text[at + 1:i]
        i += 1
    raise ValueError("a call without an end")


def words(include):
    """Lines of FILE: WORDS, without repetitions."""
    found = []
    for path in sorted(p for p in include.rglob("*") if p.suffix in (".hpp", ".cuh")):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        text = re.sub(r'"\s*\n\s*"', "", text)  # one text on several lines
        for call in CALL.finditer(text):
            texts = [t for t in TEXT.findall(arguments(text, call.end() - 1)) if re.search("[a-z]{2}", t)]
            line = f"{path.relative_to(include)}: {' ... '.join(t.strip() for t in texts)}"
            if texts and line not in found:
                found.append(line)
    return found


def main():
    now = "".join(line + "\n" for line in words(ROOT / "include" / "gpushare"))
    if "--write" in sys.argv:
        LIST.write_text(now)
        return 0
    read = LIST.read_text()
    if now == read:
        return 0
    for line in sorted(set(now.splitlines()) ^ set(read.splitlines())):
        print("new, and read by nobody:" if line in now else "gone:", line)
    print("read them as a stranger would, then: tests/structure/error_words.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
