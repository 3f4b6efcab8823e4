#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of options.py: which fields it sees, and what it complains of."""
import importlib.util
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
spec = importlib.util.spec_from_file_location("options", Path(__file__).with_name("options.py"))
options = importlib.util.module_from_spec(spec)
spec.loader.exec_module(options)

HEADER = """
struct pool_options {  // of a pool
    bytes segment = 32_MiB;   ///< for small; blocks
    std::function<bool(int)>
        room{[](int) { return true; }};
    static constexpr int usual = 3;
    std::vector<int>* out = nullptr;
};
"""
TEST = 'TEST_CASE("a pool "\n  "grows") {\n    pool({.segment = 1, .out = &x, .room = {}});\n}\n'
ROWS = "pool_options\nsegment | a.cpp: a pool grows\nroom | a.cpp: a pool grows\nout | a.cpp: a pool grows\n"


def said(rows, test=TEST):
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "pool.hpp").write_text(HEADER)
        found = options.fields(Path(directory))
    return list(options.complaints(found, options.rows(rows), lambda file: test if file == "a.cpp" else None))


class Options(unittest.TestCase):
    def test_all_rows_are_there(self):
        self.assertEqual(said(ROWS), [])

    def test_a_new_field_wants_a_row(self):
        self.assertIn("pool_options::room has no row", said(ROWS.replace("room | a.cpp: a pool grows\n", ""))[0])

    def test_a_field_that_went_leaves_no_row(self):
        self.assertIn("pool_options::part has a row", said(ROWS + "part | a.cpp: a pool grows\n")[0])

    def test_the_test_must_be_there_and_name_the_field(self):
        self.assertIn("no test 'a pool shrinks'", said(ROWS.replace("room | a.cpp: a pool grows", "room | a.cpp: a pool shrinks"))[0])
        self.assertIn("doesn't name room", said(ROWS, TEST.replace(".room", ".other"))[0])
        self.assertEqual(said(ROWS.replace("room |", "room as other |"), TEST.replace(".room", ".other")), [])
        self.assertIn("no file b.cpp", said(ROWS.replace("room | a.cpp", "room | b.cpp"))[0])


if __name__ == "__main__":
    unittest.main()
