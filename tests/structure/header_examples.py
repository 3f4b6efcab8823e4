#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The example in a header's first comment compiles with that header alone.

    header_examples.py check INCLUDE TABLE COMPILER FLAGS [HEADER...]     looks at the table, and compiles these headers' programs
    header_examples.py write INCLUDE TABLE FOLDER HEADER...               writes the programs: FOLDER/gpushare_area_name_hpp.cpp or _cuh.cu

A program is the header, twice, and its example in a function. An example is the lines of the first comment that are indented by three blanks; a line that
is indented by two begins a table, which is no code. `...` stands for what a reader would write. A line `#include` of the example is one, and what
begins with `struct`, `template`, `namespace` or `extern "C"` stands in front of the function.

TABLE says what an example takes for granted: a block for each header, `[area/name.hpp]` and then declarations, which come in front of the
example, in the same function; those behind a line `outside` come in front of the function, those behind `before` in front of the header.
`takes NAME` is all of the block `[NAME]`; `needs FILE` leaves the example out where there is no such file to include; `returns TYPE` says
what the function returns, of a coroutine; `declares` puts the whole example in front of the function; `some<T>()` is an object of type T.
A header without a block fails, but for one that forwards to where its contents are now ("// Moved: ...").
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Standard names that any example may use. A header that is included alone names what it needs by itself: these come behind it.
PRELUDE = '\n'.join(f'#include <{name}>' for name in ('array', 'chrono', 'cmath', 'cstdio', 'memory', 'span', 'string', 'vector'))

# What an example takes for granted is often an object that somebody else made: no program is linked or run.
SOME = 'template <class T> T& some();'

# An example shows names that nobody uses afterwards, and shadows what the table declares.
QUIET = '\n'.join(f'#pragma GCC diagnostic ignored "-W{name}"' for name in ('unused', 'unused-variable', 'unused-but-set-variable', 'unused-value',
                  'unused-result', 'shadow', 'empty-body', 'extra-semi', 'dangling-else', 'parentheses', 'unused-local-typedefs'))


def example_of(text):
    """The lines of the comment behind the licence that are indented by three blanks. One indented by two begins a table."""
    lines, table = [], False
    for line in text.split('\n')[1:]:
        if not line.startswith('//'):
            break
        table = re.match(r'//  \S', line) is not None or (table and line.startswith('//  '))
        if line.startswith('//   ') and not table:
            lines.append(line[5:])
    return lines


def filled(line):
    """What stands for a reader's own code becomes code that does nothing."""
    code, comment = (re.split(r'(?:(?<=\s)|^)(?=//)', line, maxsplit=1) + [''])[:2]
    code = re.sub(r'\)\s*\.\.\.\s*;?\s*(?=}|$)', ') {} ', code)
    return re.sub(r'((?<=[;{}])|^)\s*\.\.\.\s*;?', ' ', code) + comment


def split(lines, declares=False):
    """Includes, what stands outside of functions (`declares`: all else), and statements."""
    includes, outside, inside, depth = [], [], [], None
    for line in lines:
        code = line.split('//')[0]
        if line.startswith('#include'):
            includes.append(line)
            continue
        if depth is None and re.match(r'(struct|template|namespace)\b|extern "C"', line):
            depth = 0
        if depth is None:
            (outside if declares else inside).append(line)
            continue
        outside.append(line)
        depth += code.count('{') - code.count('}')
        if depth == 0 and re.search(r'[;}]\s*$', code):
            depth = None
    return includes, outside, inside


def tables_of(path):
    blocks, name = {}, None
    for line in pathlib.Path(path).read_text().split('\n'):
        if line.startswith('# '):
            continue
        if match := re.fullmatch(r'\[(\S+)\]', line):
            name = match[1]
            blocks[name] = {'before': [], 'outside': [], 'inside': [], 'needs': [], 'returns': [], 'declares': []}
            part = 'inside'
        elif line in ('before', 'outside'):
            part = line
        elif match := re.fullmatch(r'takes (.*)', line):
            for other in match[1].split():
                for which, lines in blocks[other].items():
                    blocks[name][which] += lines
        elif match := re.fullmatch(r'(needs|returns) (\S+)', line):
            blocks[name][match[1]].append(match[2])
        elif line == 'declares':
            blocks[name]['declares'].append(line)
        elif name:
            blocks[name][part].append(line)
    return blocks


def program(header, text, block):
    """The header's program. Without a block it is the header alone."""
    twice = [f'#include <gpushare/{header}>'] * 2
    if block is None:
        return '\n'.join([*twice, ''])
    includes, outside, inside = split([filled(line) for line in example_of(text)], bool(block['declares']))
    returns = (block['returns'] or ['void'])[-1]
    names = ['using namespace std::chrono_literals;']
    if header.endswith('.cuh'):
        names.append('#pragma nv_diag_suppress 174, 177, 550, 2809')
    if re.search(r'\d_(B|KiB|MiB|GiB|TiB|pct)\b', '\n'.join([*inside, *block['inside']])):
        names.append('using namespace gpushare::literals;')
    condition = ' && '.join(f'__has_include(<{name}>)' for name in block['needs'])
    ahead = [line for line in block['outside'] if line.startswith('#')]
    outside = [line for line in block['outside'] if not line.startswith('#')] + outside
    # In a namespace, or a name would shadow another one where a template of the header is instantiated.
    return '\n'.join([*block['before'], *twice, *([f'#if {condition}'] if condition else []), *includes, *ahead, PRELUDE, QUIET,
                      'namespace example_of_header {', *names, SOME, *outside,
                      f'[[maybe_unused]] static {returns} example() {{', *block['inside'], '{', *inside, '}', '}', '}',
                      *(['#endif'] if condition else []), ''])


def file_of(header, folder):
    return pathlib.Path(folder) / (re.sub(r'\W', '_', 'gpushare/' + header) + ('.cu' if header.endswith('.cuh') else '.cpp'))


def write(include, table, folder, *headers):
    blocks = tables_of(table)
    for header in headers:
        file = file_of(header, folder)
        text = program(header, (pathlib.Path(include) / header).read_text(), blocks.get(header))
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
    return 0


def forwards(text):
    return text.split('\n')[1].startswith('// Moved: include <gpushare/')


def faults_of_table(include, table):
    files = [p for p in pathlib.Path(include).rglob('*') if p.suffix in ('.hpp', '.cuh') and 'detail' not in p.parts]
    files = [p for p in files if not forwards(p.read_text())]
    headers = sorted(str(p.relative_to(include)) for p in files)
    blocks = [name for name in tables_of(table) if name.endswith(('.hpp', '.cuh'))]
    bad = [f'{h}: not in {table}' for h in headers if h not in blocks]
    bad += [f'{h}: there is no such header' for h in blocks if h not in headers]
    bad += [f'{h}: its first comment has no example' for h in headers if not example_of((pathlib.Path(include) / h).read_text())]
    return bad


def check(include, table, compiler, flags, *headers):
    bad = faults_of_table(include, table)
    with tempfile.TemporaryDirectory() as folder:
        write(include, table, folder, *headers)

        def compiled(header):
            file = file_of(header, folder)
            done = subprocess.run([compiler, *flags.split(), '-fsyntax-only', f'-I{pathlib.Path(include).parent}', str(file)],
                                  capture_output=True, text=True)
            errors = [line for line in done.stderr.split('\n') if 'error' in line][:3]
            return [] if done.returncode == 0 else [f'{header}: its example does not compile:', *errors]

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for errors in pool.map(compiled, headers):
                bad += errors
    print('\n'.join(bad), end='\n' if bad else '')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit({'check': check, 'write': write}[sys.argv[1]](*sys.argv[2:]))
