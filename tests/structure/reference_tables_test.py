#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of reference_tables.py: that each thing that it takes from the code shows, and that a table that is out of date is noticed."""
import importlib.util
import pathlib
import shutil
import tempfile
import unittest

spec = importlib.util.spec_from_file_location("reference_tables", pathlib.Path(__file__).resolve().parent / "reference_tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)

HEADER = """#pragma once
/// How it is
/// made.
struct made_options {
    int first = 3;            ///< of the | first
    static constexpr int usual = 1;  ///< a constant is no field
    /// Bytes of it. Nothing else
    /// counts.
    std::optional<bytes> second{1_GiB};
    std::function<void(int)> third{};  ///< called once,
                                       ///< or never
    std::string fourth =
        "x";                                  ///< a name
    nested fifth{.a = 1, .b = 2};
    /// No field.
    friend bool operator==(const made_options&, const made_options&) = default;
    [[nodiscard]] bool all() const { return first == 3; }  ///< nor this
};
"""


class ReferenceTablesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for path in ("docs/options.md", "docs/errors.md", "docs/events.md", "include/gpushare/error.hpp",
                     "include/gpushare/tenant/specification.hpp", "include/gpushare/compute/admission.hpp",
                     "examples/inference_server/lane.cpp", "examples/inference_server/grpc_server.cpp"):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tables.ROOT / path, self.root / path)
        self.write_all()

    def write_all(self):
        for path, text in tables.pages(self.root).items():
            (self.root / path).write_text(text)

    def change(self, path, old, new):
        text = (self.root / path).read_text()
        self.assertIn(old, text)
        (self.root / path).write_text(text.replace(old, new, 1))

    def stale(self):
        return [path for path, text in tables.pages(self.root).items() if (self.root / path).read_text() != text]

    def test_fields_have_their_defaults_and_all_of_their_comments(self):
        header = self.root / "include/gpushare/tenant/made.hpp"
        header.write_text(HEADER)
        page = tables.options_page(self.root / "include" / "gpushare", tables.options_module())
        at = page.index("## made_options")
        self.assertEqual(page[at + 2], "`tenant/made.hpp`: How it is made.")
        self.assertEqual(page[at + 6:at + 11], [
            "| `first` | `3` | of the \\| first |", "| `second` | `1_GiB` | Bytes of it. Nothing else counts. |",
            "| `third` |  | called once, or never |", '| `fourth` | `"x"` | a name |', "| `fifth` | `{.a = 1, .b = 2}` |  |"])
        self.assertNotIn("operator", "".join(page[at:]))

    def test_a_change_of_the_code_is_noticed(self):
        self.assertEqual(self.stale(), [])
        for path, old, new, page in (
                ("include/gpushare/tenant/specification.hpp", "std::uint32_t devices = 1;", "std::uint32_t devices = 2;", "docs/options.md"),
                ("include/gpushare/tenant/specification.hpp", "///< how many, on one node", "///< as many", "docs/options.md"),
                ("include/gpushare/error.hpp", "///< the tenant's own limit", "///< a limit", "docs/errors.md"),
                ("include/gpushare/error.hpp", 'return "over the quota"', 'return "too much"', "docs/errors.md"),
                ("examples/inference_server/lane.cpp", "case errc::out_of_memory: return {507", "case errc::out_of_memory: return {503", "docs/errors.md"),
                ("examples/inference_server/grpc_server.cpp", "case 504: return 4;", "case 504: return 14;", "docs/errors.md")):
            self.change(path, old, new)
            self.assertEqual(self.stale(), [page], old)
            self.change(path, new, old)

    def test_a_code_without_advice_and_advice_without_a_code_are_errors(self):
        self.change("include/gpushare/error.hpp", "    closed,             ///<", "    gone,             ///<")
        with self.assertRaisesRegex(ValueError, "gone"):
            self.stale()
        self.change("include/gpushare/error.hpp", "    gone,             ///<", "    // gone")
        with self.assertRaisesRegex(ValueError, "closed, which is no errc"):
            self.stale()

    def test_each_kind_of_event_has_a_row(self):
        self.change("docs/events.md", "| `undriven` |", "| `unseen` |")
        with self.assertRaisesRegex(ValueError, "limiter_event: undriven, unseen"):
            self.stale()

    def test_what_is_written_by_hand_stays(self):
        self.change("docs/errors.md", "wake the tenant |", "ring a bell |")
        self.write_all()
        self.assertIn("| ring a bell |", (self.root / "docs/errors.md").read_text())
        self.assertIn("# Errors\n", (self.root / "docs/errors.md").read_text())


if __name__ == "__main__":
    unittest.main()
