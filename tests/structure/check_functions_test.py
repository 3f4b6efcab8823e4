#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of check_functions.py: what counts as a function, and what fails."""
import contextlib
import importlib.util
import io
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
spec = importlib.util.spec_from_file_location("check_functions", Path(__file__).with_name("check_functions.py"))
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)


def found(text):
    return [(length, name) for _, length, name in check.functions(text)]


class Functions(unittest.TestCase):
    def test_counts_the_lines_between_the_braces(self):
        self.assertEqual(found("int f() {\n    return 1;\n}\n"), [(3, "f")])
        self.assertEqual(found("int f() { return 1; }\n"), [(1, "f")])

    def test_knows_a_class_from_a_function(self):
        text = "template <class R, class... A>\nclass task<R(A...)> {\n    void run() {\n    }\n    int n_{0};\n};\n"
        self.assertEqual(found(text), [(2, "run")])

    def test_a_constructor_with_initialisers_is_one_function(self):
        self.assertEqual(found("struct s {\n    explicit s(int a) : a_{a}, b_(std::max({a, 2})) {\n    }\n};\n"), [(2, "s")])

    def test_a_lambda_belongs_to_its_function(self):
        self.assertEqual(found("void f() {\n    auto g = [&](int) {\n    };\n}\n"), [(4, "f")])

    def test_braces_in_text_and_comments_do_not_count(self):
        self.assertEqual(found('void f() {  // {\n    g("}", \'{\', R"x(}})x", 1\'000);\n}\n#define M {\nvoid h() {}\n'), [(3, "f"), (1, "h")])

    def test_operators_and_requirements(self):
        text = "template <class T>\n    requires(sizeof(T) > 1)\nbool operator()(T t) const noexcept {\n}\n"
        self.assertEqual(found(text), [(2, "operator()")])


class Checks(unittest.TestCase):
    def run_on(self, lines, exceptions=""):
        with tempfile.TemporaryDirectory() as folder:
            header = Path(folder) / "include" / "memory" / "a.hpp"
            header.parent.mkdir(parents=True)
            header.write_text("void f() {\n" + "    g();\n" * lines + "}\n")
            listed = Path(folder) / "listed"
            listed.write_text(exceptions)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                status = check.main(Path(folder) / "include", listed)
            return status, said.getvalue()

    def test_forty_lines_pass_and_one_more_fails(self):
        self.assertEqual(self.run_on(38), (0, ""))
        self.assertEqual(self.run_on(39), (1, "memory/a.hpp:1: f has 41 lines, more than 40\n"))

    def test_an_exception_passes_only_while_it_is_needed(self):
        self.assertEqual(self.run_on(39, "memory/a.hpp f  # why\n"), (0, ""))
        status, said = self.run_on(38, "memory/a.hpp f\n")
        self.assertEqual(status, 1)
        self.assertIn("memory/a.hpp f: is no longer too long", said)

    def test_a_folder_without_functions_fails(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            (Path(folder) / "listed").write_text("")
            self.assertEqual(check.main(folder, Path(folder) / "listed"), 1)


if __name__ == "__main__":
    unittest.main()
