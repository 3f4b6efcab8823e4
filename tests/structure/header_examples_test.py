#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An example that doesn't compile, a header without an example's table and one that is in both lists are found.

    header_examples_test.py COMPILER
"""
import contextlib
import io
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import header_examples  # noqa: E402


def told(compiler, example, table, missing):
    """The exit status and what is printed, of one header with this example."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / 'gpushare' / 'area').mkdir(parents=True)
        lines = ['// SPDX', '// What it is for.', '//', *('//   ' + line for line in example), '#pragma once', 'inline int twice(int x) { return x * 2; }', '']
        (root / 'gpushare' / 'area' / 'one.hpp').write_text('\n'.join(lines))
        (root / 'table').write_text(table)
        (root / 'missing').write_text(missing)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = header_examples.check(str(root / 'gpushare'), str(root / 'table'), str(root / 'missing'), compiler,
                                           '-std=c++20 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror', 'area/one.hpp')
        return status, said.getvalue()


def main(compiler):
    table = '[area/one.hpp]\nconst int x = 1;\n'
    good = ['#include <cstdlib>', 'if (twice(x) == 2) ...      // as it is', 'if (x) { (void)std::abs(x); ...; }']
    cases = [
        (good, table, '', 0, ''),
        (good, '', 'area/one.hpp\n', 0, ''),
        (['thrice(x);'], table, '', 1, 'does not compile'),
        (['(void)std::abs(y);'], table, '', 1, 'does not compile'),
        (good, '', '', 1, 'neither in'),
        (good, table, 'area/one.hpp\n', 1, 'still in'),
        (good, table, 'area/two.hpp\n', 1, 'no such header'),
        (good, '[x]\nconst int x = 1;\n[area/one.hpp]\ntakes x\n', '', 0, ''),
        (['thrice(x);'], '[area/one.hpp]\nneeds no_such_file.h\n', '', 0, ''),
        (['thrice(x);'], '[area/one.hpp]\nneeds cstdlib\n', '', 1, 'does not compile'),
        (['struct pair {', '    template <class T> void set(T) { ... }', '};', 'pair{}.set(twice(x));'], table, '', 0, ''),
        (['struct pair { template <class T> void set(T) { thrice(1); } };'], table, '', 1, 'does not compile'),
        ([], table, '', 1, 'has no example'),
    ]
    wrong = 0
    for example, names, missing, status, text in cases:
        got, said = told(compiler, example, names, missing)
        if got != status or text not in said:
            print(f'{example}: {got}, {said}')
            wrong = 1
    return wrong


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
