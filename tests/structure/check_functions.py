#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Functions in headers have at most 40 lines between their braces, so that a reader sees each one whole.

    check_functions.py FOLDER EXCEPTIONS

Prints every longer function, and fails if there is one that EXCEPTIONS doesn't name. A line of EXCEPTIONS is a header and the
function's name. A line that names no longer function fails as well, so the list can only shrink.
"""
import pathlib
import re
import sys

LONGEST = 40
# Comments become blanks, and text becomes underscores: neither may hold a brace that counts.
QUOTED = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
DIRECTIVE = re.compile(r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.M)
SCOPE = re.compile(r'(?:inline\s+)?namespace\b|extern\b|(?:template\s*<.*>\s*)?(?:requires\b.*)?(?:class|struct|union|enum)\b', re.S)
INITIALISES = re.compile(r'(?:=|,|\(|\breturn|\?|:)$')
NAME = re.compile(r'(operator\s*(?:\(\)|\S+?)|~?\w+)\s*\(')


def plain(text):
    """The code with as many lines and characters, but without comments, text and directives."""
    text = re.sub(r"(?<=\d)'(?=\d)", '_', text)
    text = QUOTED.sub(lambda m: re.sub(r'[^\n]', ' ' if m[0][0] == '/' else '_', m[0]), text)
    return DIRECTIVE.sub(lambda m: re.sub(r'[^\n]', ' ', m[0]), text)


def kind(head, parentheses, before, in_function):
    """What an opening brace begins, by the statement in front of it: 'value', 'scope', 'block' or 'function'."""
    if parentheses or not before.isspace() or INITIALISES.search(head):
        return 'value'
    if SCOPE.match(head):
        return 'scope'
    return 'function' if '(' in head and not in_function else 'block'


def functions(text):
    """(line, length, name) of each function that isn't in another one."""
    code = plain(text)
    opened, begin, parentheses = [], 0, 0
    for at, c in enumerate(code):
        if c in '()':
            parentheses += 1 if c == '(' else -1
        elif c == ';' and parentheses == 0:
            begin = at + 1
        elif c == '{':
            head = code[begin:at].strip()
            what = kind(head, parentheses, code[at - 1], any(k == 'function' for k, *_ in opened))
            opened.append((what, at, head, parentheses))
            if what != 'value':
                begin, parentheses = at + 1, 0
        elif c == '}' and opened:
            what, brace, head, parentheses = opened.pop()
            if what != 'value':
                begin = at + 1
            if what == 'function':
                name = NAME.search(re.sub(r'template\s*<[^{]*?>\s*(?=\S)|requires\s*\([^{]*?\)|\[\[.*?\]\]', '', head))
                yield code.count('\n', 0, brace) + 1, code.count('\n', brace, at) + 1, name[1] if name else head


def main(folder, exceptions):
    folder = pathlib.Path(folder)
    lines = [line.split('#')[0].strip() for line in pathlib.Path(exceptions).read_text().splitlines()]
    allowed, used, seen, failed = {line for line in lines if line}, set(), 0, False
    for header in sorted(p for p in folder.rglob('*') if p.suffix in ('.hpp', '.cuh')):
        path = header.relative_to(folder).as_posix()
        for line, length, name in functions(header.read_text()):
            seen += 1
            if length <= LONGEST:
                continue
            used.add(f'{path} {name}')
            if f'{path} {name}' not in allowed:
                print(f'{path}:{line}: {name} has {length} lines, more than {LONGEST}')
                failed = True
    for line in sorted(allowed - used):
        print(f'{line}: is no longer too long; take the line out of {exceptions}')
        failed = True
    if seen == 0:
        print(f'no functions in {folder}')
    return 1 if failed or seen == 0 else 0


if __name__ == '__main__':
    if len(sys.argv) != 3:
        sys.exit('usage: check_functions.py FOLDER EXCEPTIONS')
    sys.exit(main(*sys.argv[1:]))
