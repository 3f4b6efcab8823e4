#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The example in a header's first comment compiles with that header alone.

    header_examples.py INCLUDE TABLE WITHOUT COMPILER [FLAG...]

TABLE says what an example takes for granted: a block for each header, `[area/name.hpp]` and then declarations, which come in front of the
example, in the same function; those behind a line `outside` come in front of the function. `...` in an example stands for what a
reader would write. A line `#include` of the example is one. WITHOUT names the headers whose examples aren't compiled yet; the list can only
shrink: a header in neither, or in both, fails.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Standard names that any example may use.
PRELUDE = '#include <array>\n#include <chrono>\n#include <cmath>\n#include <memory>\n#include <span>\n#include <string>\n#include <vector>\n'


def example_of(text):
    """The indented lines of the comment behind the licence."""
    lines = []
    for line in text.split('\n')[1:]:
        if not line.startswith('//'):
            break
        if line.startswith('//   '):
            lines.append(line[5:])
    return lines


def filled(line):
    """What stands for a reader's own code becomes code that does nothing."""
    code, comment = (re.split(r'(?=\s//)', line, maxsplit=1) + [''])[:2]
    code = re.sub(r'\)\s*\.\.\.\s*$', ') {}', code)
    return re.sub(r'(?<=[;{])\s*\.\.\.\s*;?', ' ', code) + comment


def tables_of(path):
    blocks, name = {}, None
    for line in pathlib.Path(path).read_text().split('\n'):
        if line.startswith('#') and not line.startswith('#include'):
            continue
        if match := re.fullmatch(r'\[(\S+)\]', line):
            name = match[1]
            blocks[name] = {'outside': [], 'inside': []}
            part = 'inside'
        elif line == 'outside':
            part = 'outside'
        elif name:
            blocks[name][part].append(line)
    return blocks


def program(header, text, block):
    lines = [filled(line) for line in example_of(text)]
    includes = [line for line in lines if line.startswith('#include')]
    body = [line for line in lines if not line.startswith('#include')]
    return '\n'.join([f'#include <gpushare/{header}>', *includes, PRELUDE, 'using namespace std::chrono_literals;',
                      *block['outside'], '[[maybe_unused]] static void example() {', *block['inside'], '{', *body, '}', '}', ''])


def main(include, table, without, compiler, *flags):
    headers = sorted(str(p.relative_to(include)) for p in pathlib.Path(include).rglob('*.hpp') if 'detail' not in p.parts)
    blocks = tables_of(table)
    missing = [line for line in pathlib.Path(without).read_text().split('\n') if line and not line.startswith('#')]
    bad = [f'{h}: neither in {table} nor in {without}' for h in headers if h not in blocks and h not in missing]
    bad += [f'{h}: compiled, and still in {without}' for h in missing if h in blocks]
    bad += [f'{h}: there is no such header' for h in [*missing, *blocks] if h not in headers]
    with tempfile.TemporaryDirectory() as folder:

        def compiled(header):
            file = pathlib.Path(folder) / (re.sub(r'\W', '_', header) + '.cpp')
            file.write_text(program(header, (pathlib.Path(include) / header).read_text(), blocks[header]))
            done = subprocess.run([compiler, *flags, '-fsyntax-only', '-w', f'-I{pathlib.Path(include).parent}', str(file)],
                                  capture_output=True, text=True)
            errors = [line for line in done.stderr.split('\n') if 'error' in line][:3]
            return [] if done.returncode == 0 else [f'{header}: its example does not compile:', *errors]

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for errors in pool.map(compiled, [h for h in blocks if h in headers]):
                bad += errors
    print('\n'.join(bad), end='\n' if bad else '')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
