#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every option is honoured or refused: each field of each specification and option has a row in `options`, which names the test that
sees so. Reads the fields from the headers, so a new one without a row is an error.

    tests/structure/options.py            # checks; --show prints the fields
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
STRUCT = re.compile(r"\bstruct (\w*(?:options|settings|spec|rule|change))\s*\{")


def members(body):
    """The names of the data members in a struct's body, which begins behind its brace."""
    depth, statement, names = 1, "", []
    for c in body:
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return names
        if depth == 1 and c == ";":
            name = re.search(r"(\w+)$", statement.split("=")[0].strip())
            if name and not statement.split()[0].startswith(("friend", "using", "static", "enum")):
                names.append(name.group(1))
            statement = ""
        elif depth == 1 and c not in "{}":
            statement += c
    raise ValueError("a struct without an end")


def fields(include):
    """{struct: {field, ...}} of all public headers; structs of one name together."""
    found = {}
    for path in sorted(include.rglob("*.hpp")):
        if "detail" in path.relative_to(include).parts:
            continue
        text = re.sub(r"//[^\n]*", "", path.read_text())
        for m in STRUCT.finditer(text):
            names = members(text[m.end():])
            if names:
                found.setdefault(m.group(1), set()).update(names)
    return found


def rows(table):
    """{struct: {field: (file, test, word)}}; test is empty where all of the file is one program."""
    found, struct = {}, None
    for line in table.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if "|" not in line:
            struct = found.setdefault(line, {})
            continue
        field, where = (part.strip() for part in line.split("|", 1))
        file, _, test = where.partition(": ")
        field, _, word = field.partition(" as ")
        if field in struct:
            raise ValueError(f"two rows for {field}")
        struct[field] = (file, test, word or field)
    return found


def case(text, name):
    """The body of a test, or None."""
    joined = re.sub(r'"\s*\n\s*"', "", text)
    at = joined.find(f'"{name}"')
    if at < 0:
        return None
    end = joined.find("\n}\n", at)
    return joined[at:end if end >= 0 else len(joined)]


def complaints(found, table, read):
    """What is wrong, a line each. `read` gives a test file's text or None."""
    for struct, names in sorted(found.items()):
        have = table.get(struct, {})
        for field in sorted(names - have.keys()):
            yield f"{struct}::{field} has no row: which test sees it honoured, or refused by name?"
        for field in sorted(have.keys() - names):
            yield f"{struct}::{field} has a row, and isn't there"
    for struct in sorted(table.keys() - found.keys()):
        yield f"there is no {struct}"
    for struct, have in table.items():
        for field, (file, test, word) in have.items():
            text = read(file)
            if text is None:
                yield f"{struct}::{field}: no file {file}"
                continue
            body = case(text, test) if test else text
            if body is None:
                yield f"{struct}::{field}: {file} has no test '{test}'"
            elif not re.search(rf"\b{word}\b", body):
                yield f"{struct}::{field}: {file} doesn't name {word}"


def main():
    found = fields(ROOT / "include" / "gpushare")
    if "--show" in sys.argv:
        for struct, names in sorted(found.items()):
            print(struct, *sorted(names))
        return 0

    def read(file):
        path = ROOT / "tests" / file
        return path.read_text() if path.is_file() else None

    wrong = list(complaints(found, rows((ROOT / "tests" / "structure" / "options").read_text()), read))
    print(*wrong, f"{sum(len(n) for n in found.values())} fields of {len(found)} structs", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
