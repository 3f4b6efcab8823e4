#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An example that doesn't compile, a header that isn't in the table, and one without an example are found.

    header_examples_test.py COMPILER
"""
import contextlib
import io
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import header_examples  # noqa: E402


def told(compiler, example, table):
    """The exit status and what is printed, of one header with this example."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / 'gpushare' / 'area').mkdir(parents=True)
        purpose = '// Moved: include <gpushare/x.hpp> instead.' if example is None else '// What it is for.'
        example = example or []
        lines = ['// SPDX', purpose, '//', *(line if line.startswith('//  ') else '//   ' + line for line in example),
                 '#pragma once', 'inline int twice(int x) { return x * 2; }', '']
        (root / 'gpushare' / 'area' / 'one.hpp').write_text('\n'.join(lines))
        (root / 'table').write_text(table)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = header_examples.check(str(root / 'gpushare'), str(root / 'table'), compiler,
                                           '-std=c++20 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror', 'area/one.hpp')
        return status, said.getvalue()


def main(compiler):
    table = '[area/one.hpp]\nconst int x = 1;\n'
    good = ['#include <cstdlib>', 'if (twice(x) == 2) ...      // as it is', 'if (x) { (void)std::abs(x); ...; }']
    cases = [
        (good, table, 0, ''),
        (['thrice(x);'], table, 1, 'does not compile'),
        (['(void)std::abs(y);'], table, 1, 'does not compile'),
        (good, '', 1, 'not in'),
        (good, table + '[area/two.hpp]\n', 1, 'no such header'),
        (good, '[x]\nconst int x = 1;\n[area/one.hpp]\ntakes x\n', 0, ''),
        (['thrice(x);'], '[area/one.hpp]\nneeds no_such_file.h\n', 0, ''),
        (['thrice(x);'], '[area/one.hpp]\nneeds cstdlib\n', 1, 'does not compile'),
        (['struct pair {', '    template <class T> void set(T) { ... }', '};', 'pair{}.set(twice(x));'], table, 0, ''),
        (['struct pair { template <class T> void set(T) { thrice(1); } };'], table, 1, 'does not compile'),
        (['int x = twice(1);', 'extern "C" int f() { return x; }'], '[area/one.hpp]\ndeclares\n', 0, ''),
        ([*good, '//', '//  a table', '//     of words'], table, 0, ''),
        ([], table, 1, 'has no example'),
        (None, '', 0, ''),
        (None, table, 1, 'no such header'),
    ]
    wrong = 0
    for example, names, status, text in cases:
        got, said = told(compiler, example, names)
        if got != status or text not in said:
            print(f'{example}: {got}, {said}')
            wrong = 1
    return wrong


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
