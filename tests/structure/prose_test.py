#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of prose.py: each rule finds what it is for, and lets good prose pass."""
import importlib.util
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
spec = importlib.util.spec_from_file_location("prose", pathlib.Path(__file__).resolve().parent / "prose.py")
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)
LONG = "A sentence that goes on. " * 5


class ProseTest(unittest.TestCase):
    def check(self, text, *words):
        found = prose.complaints(text)
        self.assertEqual(len(found), len(words), found)
        for (_, what), word in zip(found, words):
            self.assertIn(word, what)

    def test_clauses_without_a_head(self):
        self.check("Who asks badly keeps others for a stated time.", "Who asks badly")
        self.check("A call ends. What takes longer\nthan ever keeps the others for that once.", "What takes longer than ever")
        self.check("- **Whoever closes** it is told.\n", "Whoever")
        self.check("It has a bound: who waits longer is told.", "who waits longer")
        self.check("It is told to whoever waits.", "to whoever")
        self.check("A kept SM is for who can't wait.", "for who")

    def test_clauses_without_a_head_in_tables(self):
        def check(cell, *words):
            self.check(f"| what you want | who |\n|---|---|\n| a queue | {cell} |\n", *words)

        check("who waited, was let in and ran", "who waited, was let in and ran")
        check("records waits; whoever waited is named", "whoever waited is named")
        check("for who waits", "for who")
        check("each its share, what one doesn't use for the others", "what one doesn't use", "each its share")
        check("each of their names, each their own", "each their own")
        check("as as it is", "as as")
        check("each tenant gets its share, and the others what it doesn't use")
        check("Who waited, and was let in? A tenant of `what you want`")
        check("`why_not`: what is missing, with figures")
        check('the test "who waits is told"')
        self.check("```text\n| a | b |\n|---|---|\n| who waits is told | c |\n```\n")

    def test_rows_have_as_many_cells_as_the_head(self):
        head = "| a task | a part |\n|---|---|\n"
        self.check(head + "| a queue `a_queue` |\n", "1 cells, but 2")
        self.check(head + "| a queue | a part | one more |\n", "3 cells, but 2")
        self.check(head + "| `a | b` | a \\| b |\n\n| one cell |\n|---|\n| a cell |\n")
        self.check("```text\n| a | b |\n| c |\n```\n")

    def test_good_prose(self):
        self.check("A bad client can delay others only by a stated bound.\n\nWho asks badly? A client that waits for what it gets.\n")
        self.check("## What it promises\n\n| what | who |\n|---|---|\n| a request | a thread that waits is told. |\n")
        self.check("```text\nWho asks badly keeps others.\n```\n")
        self.check('The test `a_test.cpp`: "who asks badly is told. What follows is kept" has it; `for who` as well.\n')
        self.check("A book by who-knows-whom had had no author.", "had had")

    def test_a_word_twice(self):
        self.check("It was as as it is.", "as as")
        self.check("The end of the\nthe line.", "the the")
        self.check("A file `the the` and the.the and a long-long word and 5 5.")

    def test_columns(self):
        self.check(LONG, "columns")
        self.check("| " + LONG + " |\n")
        self.check("```sh\n" + LONG + "\n```\n")
        self.check("![" + LONG + "](a.svg)\n")
        self.check("[" + "a" * 60 + "](" + "b" * 60 + ")\n")
        value = "It costs `memory.refusal_ns` **" + "9" * 70 + " ns**, which is little.\n"
        self.check(value)
        self.check(value.replace("little", "very little" + ", and more so on a machine with fast instructions of that kind"), "columns")

    def test_comments_of_headers(self):
        def check(text, *words):
            found = prose.complaints_of_header(text)
            self.assertEqual(len(found), len(words), found)
            for (_, what), word in zip(found, words):
                self.assertIn(word, what)

        check("/// What a rank calls.\nint calls;\n", "What a rank calls")
        check("// A call ends.\n// Whoever waits\n// is told.\n", "Whoever waits")
        check("// It was as as it is.\n", "as as")
        check("// Decisions as a value: whose turn it is, and why.\n// - first: one\n//   two.\n// why() and who() tell.\n")
        check("// " + LONG + "\n", "columns")
        check("int x;" + " " * 2 + "///< " + LONG + "\n", "columns")
        check("int x = " + "1 + " * 30 + "1;\n")
        check("// A sample:\n//\n//   What(x); " + LONG + "\n")
        check('    explicit type(int);  // NOLINT: ' + LONG + "\n")

    def test_names_of_tests(self):
        names = ["who waits is told", "a thread that waits is told", "where it fits", "whole blocks"]
        text = "".join(f'TEST_CASE("{name}", "[area]") {{}}\n' for name in names)
        text += 'TEMPLATE_TEST_CASE("what is lent costs nothing", "[area]", int) {}\nTEST_CASE_METHOD(rig, "whoever comes") {}\n'
        text += '//   TEST_CASE("what holds", "[area]") {}\n'
        text += 'TEST_CASE("What is freed is credited", "[area]") {}\n'
        self.assertEqual([line for line, _ in prose.complaints_of_tests(text)], [1, 3, 5, 6, 8])

    def test_the_names_of_tests_are_looked_at(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "tests" / "area").mkdir(parents=True)
            test = root / "tests" / "area" / "x_test.cpp"
            test.write_text('// Who asks is told.\nTEST_CASE("who asks is told") {}\n')
            self.assertEqual(prose.documents(root), [test])
            self.assertEqual(len(prose.check([test], set(), root)[0]), 1)

    def test_what_is_made_of_headers_is_not_judged(self):
        made = "<!-- made by x.py -->\nWhat it is.\n<!-- end of what is made -->\nWho asks is told.\n"
        self.assertEqual([line for line, _ in prose.complaints(prose.by_hand(made))], [4])

    def test_the_list_of_pending_documents_only_shrinks(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            good, bad = root / "docs" / "good.md", root / "docs" / "bad.md"
            good.write_text("A good page.\n")
            bad.write_text("Who asks badly is told.\n")
            self.assertEqual(prose.check([good, bad], {"docs/bad.md"}, root)[0], [])
            self.assertIn("docs/bad.md:1", prose.check([good, bad], set(), root)[0][0])
            self.assertIn("docs/good.md: passes now", prose.check([good, bad], {"docs/bad.md", "docs/good.md"}, root)[0][0])


if __name__ == "__main__":
    unittest.main()
