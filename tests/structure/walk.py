#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Walks one submission through the library, and counts what is on the way.

    walk.py host=PROGRAM [cuda=PROGRAM]              prints each header with its functions, in the order of the walk
    walk.py --write|--check host=PROGRAM [...]       writes the table in docs/architecture.md, or fails if it is another one

PROGRAM is a program of tests/structure/walk, compiled with -O0 -g -finstrument-functions. One rule counts:

- a function is a place in a header where a function begins, however many types it is instantiated for, down to accessors and
  lambdas. What the standard library has doesn't count;
- the vocabulary is what every header may use: units.hpp, error.hpp, concepts.hpp and detail/ (lists, counted references, stored
  callables). The backend is backend/, the library all else;
- an entry is a call of a function of the library from another header, or from the program. The standard library and the vocabulary
  are looked through; what the backend calls back doesn't count, nor what the device's threads do.
"""
import collections
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / 'docs' / 'architecture.md'
BEGIN, END = '<!-- made by tests/structure/walk.py -->\n', '<!-- end of what is made -->\n'
HEADERS = 'include/gpushare/'
VOCABULARY = ('units.hpp', 'error.hpp', 'concepts.hpp')
RUNS, OFTEN = 5, 30  # runs of 200 rounds each; the first rounds of each run are rare ones
SCOPES = re.compile(r'\b(gpushare|v\d+_\d+_\d+|detail|walk)::')


def without_brackets(name):
    """The text outside of <...> and (...), which are arguments; an operator keeps its sign."""
    name = re.sub(r'operator(<=>|<<|>>|<=|>=|<|>|->|\(\))',
                  lambda m: 'operator' + ''.join(chr(0xe000 + ord(c)) for c in m[1]), name)
    name = re.sub(r'\{lambda\(.*?\)#\d+\}', 'lambda', name)
    kept, depth = [], 0
    for c in name:
        depth += c in '<(['
        if depth == 0:
            kept.append(c)
        depth -= c in '>)]'
    return ''.join(chr(ord(c) - 0xe000) if 0xe000 <= ord(c) < 0xe100 else c for c in kept)


def short(name):
    """`gpushare::v1::detail::batches<S>::place(...) const` is `batches::place`."""
    if name.startswith('_Z'):
        return 'a function with a name that addr2line cannot read'
    name = without_brackets(name).replace(' const', '').strip()
    if '::operator ' not in name:
        name = name.split(' ')[-1]  # without what a template returns
    return SCOPES.sub('', name).replace('lambda::operator()', 'lambda')


def places(program, addresses):
    """For each address: (header below include/gpushare or None, line, name)."""
    asked = subprocess.run(['addr2line', '-f', '-C', '-e', program], input='\n'.join(addresses), text=True,
                           capture_output=True, check=True).stdout.splitlines()
    found = {}
    for address, name, place in zip(addresses, asked[::2], asked[1::2]):
        file, line = re.fullmatch(r'(.*):(\d+|\?)(?: \(discriminator \d+\))?', place).groups()
        header = file.rpartition(HEADERS)[2] if HEADERS in file else None
        if not name.endswith('::_FUN'):  # by which a lambda is called through a pointer
            found[address] = (header, line, short(name))
        else:
            found[address] = (None, line, '')
    return found


def recorded(program):
    """The walks that a program records, all of the same thing."""
    walks = []
    with tempfile.NamedTemporaryFile('r', suffix='.calls') as calls:
        for _ in range(RUNS):
            subprocess.run([program, calls.name], check=True, timeout=60)
            walks += [walk.split() for walk in pathlib.Path(calls.name).read_text().split('=0\n')[1:]]
    return walks


class Walk:
    """The shortest walk that a program records often: the limiter learns first, and a thread may be interrupted anywhere."""

    def __init__(self, program):
        walks = collections.Counter(tuple(walk) for walk in recorded(program))
        often = [walk for walk, times in walks.items() if times >= OFTEN] or list(walks)
        lines = min(often, key=lambda walk: len(set(walk)))
        place_of = places(program, sorted({line[1:] for line in lines}))
        self.functions = {}  # header: {(line, name): calls}, both in the order of the walk
        self.entries = {}    # header: calls from another one
        stack = []           # of headers, the nearest that counts as a caller
        for line in lines:
            if line[0] == '-':
                if stack:
                    stack.pop()
            else:
                header, at, name = place_of[line[1:]]
                caller = stack[-1] if stack else None
                if header is not None:
                    self.see(header, (at, name), caller)
                stack.append(caller if header is None or part_of(header) == 'vocabulary' else header)

    def see(self, header, function, caller):
        seen = self.functions.setdefault(header, {})
        seen[function] = seen.get(function, 0) + 1
        self.entries.setdefault(header, 0)
        if part_of(header) == 'library' and caller != header and (caller is None or part_of(caller) == 'library'):
            self.entries[header] += 1

    def counts(self, part):
        """Functions, headers, entries."""
        headers = [h for h in self.functions if part_of(h) == part]
        return sum(len(self.functions[h]) for h in headers), len(headers), sum(self.entries[h] for h in headers)

    def print(self, name):
        print(f'== {name}')
        for header, functions in self.functions.items():
            print(f'\n{header}: {len(functions)} functions' +
                  (f', {self.entries[header]} entries' if part_of(header) == 'library' else ''))
            for (line, function), calls in functions.items():
                print(f'  {line:>5}  {function}' + (f' ({calls} times)' if calls > 1 else ''))
        print()


def part_of(header):
    if header.startswith('backend/'):
        return 'backend'
    return 'vocabulary' if header in VOCABULARY or header.startswith('detail/') else 'library'


def table(walks):
    lines = ['| on | functions | in headers | entries | of the vocabulary | of the backend |', '|---|---|---|---|---|---|']
    for name, walk in walks.items():
        others = [walk.counts(part)[0] for part in ('vocabulary', 'backend')]
        lines.append('| ' + ' | '.join(map(str, [name, *walk.counts('library'), *others])) + ' |')
    return '\n'.join(lines) + '\n'


def main(arguments):
    mode = arguments.pop(0) if arguments and arguments[0].startswith('--') else None
    if not arguments or mode not in (None, '--write', '--check') or any('=' not in a for a in arguments):
        sys.exit(__doc__)
    walks = {name: Walk(program) for name, program in (a.split('=', 1) for a in arguments)}
    if mode is None:
        for name, walk in walks.items():
            walk.print(name)
        print(table(walks), end='')
        return
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    made, _, after = rest.partition(END)
    wanted = table(walks)
    if mode == '--write':
        PAGE.write_text(before + BEGIN + wanted + END + after)
    elif not set(wanted.splitlines()) <= set(made.splitlines()):
        sys.exit(f'docs/architecture.md has another walk than\n{wanted}Write it by ./dev walk --write')


if __name__ == '__main__':
    main(sys.argv[1:])
