#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of bench/results.py: what it fills in, and what it refuses to say."""
import contextlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom
from pathlib import Path

sys.dont_write_bytecode = True
spec = importlib.util.spec_from_file_location(
    "results", Path(__file__).resolve().parent.parent.parent / "bench" / "results.py")
results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(results)

TABLE = """<!-- results: epyc -->

| figure | measured | bar |
|---|---|---|
| `memory.refusal_ns` | 0 | at most 15 |
| a charge <!-- not this --> | <!-- memory.pair --> 9 | |

| measured by whom |
|---|
| others |
"""


def figure(*repeats, unit="ns"):
    return {"value": repeats[len(repeats) // 2], "is": "median", "unit": unit, "least": min(repeats),
            "most": max(repeats), "repeats": list(repeats)}


class ResultsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        results.ROOT = Path(folder.name)
        results.RESULTS = results.ROOT / "bench" / "results"
        (results.RESULTS / "epyc").mkdir(parents=True)
        (results.ROOT / "bench" / "README.md").write_text(
            "| figure | what | bar |\n|---|---|---|\n| `a.share` | x | at least 95.8 |\n| `a.cost` | x | at most 1,000 |\n| `a.error` | x | at most 1e-6 |\n"
            "| `..._of_two` | both | |\n"
            "\n| figures | what makes it fail |\n|---|---|\n| `a.share` | `a.other` |\n| `a.cost`, `a.error` | a test |\n")

    def keep(self, area, commit="c0ffee", machine="epyc", **figures):
        text = json.dumps({"commit": commit, "date": "2026-11-24", "processor": "AMD EPYC, family 25, model 1, 2 cores",
                           "figures": {f"{area}.{name}": f for name, f in figures.items()}})
        (results.RESULTS / machine / f"{area}.json").write_text(text)

    def compared(self, old, new):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            worse = results.compare(old, new)
        return worse, out.getvalue()

    def test_fills_measured_cells_and_nothing_else(self):
        self.keep("memory", refusal_ns=figure(9, 10, 12), pair=figure(1.384, unit="x"))
        text = results.filled("x.md", TABLE)
        self.assertIn("| `memory.refusal_ns` | 10 ns (9 to 12) | at most 15 |", text)
        self.assertIn("| a charge <!-- not this --> | <!-- memory.pair --> 1.38x |  |", text)
        self.assertIn("| others |", text)
        self.assertEqual(results.filled("x.md", text), text)

    def test_fills_the_cells_of_a_grid_each_by_its_figures(self):
        self.keep("memory", pair=figure(1, 2, 3), pair_of_two=figure(4), level=figure(5, unit="%"))
        grid = ("<!-- results: epyc -->\n| | alone | both |\n|-|-|-|\n"
                "| pair | <!-- memory.pair --> | by two: <!-- memory.pair_of_two --> 9; level <!-- memory.level -->7 |\n"
                "| share | by hand | <!-- a.share_of_two --> |\n")
        text = results.filled("x.md", grid)
        self.assertIn("| pair | <!-- memory.pair --> 2 ns (1 to 3) | by two: <!-- memory.pair_of_two --> 4 ns; level <!-- memory.level --> 5 % |",
                      text)
        self.assertIn("| share | by hand | <!-- a.share_of_two --> not measured yet |", text)
        self.assertEqual(results.filled("x.md", text), text)
        with self.assertRaisesRegex(results.Problem, "doesn't define"):
            results.filled("x.md", grid.replace("a.share_of_two", "a.share_of_three"))
        by_hand = grid.replace("results: epyc", "results: none")
        self.assertEqual(results.filled("x.md", by_hand), by_hand)
        self.keep("core", commit="decade", pair=figure(1))
        with self.assertRaisesRegex(results.Problem, "different commits"):
            results.filled("x.md", grid.replace("by hand", "<!-- core.pair -->"))

    def test_a_figure_with_a_bar_that_nothing_makes_fail_is_an_error(self):
        results.DOCUMENTS = []
        readme = results.ROOT / "bench" / "README.md"
        results.fill(check=True)
        readme.write_text(readme.read_text().replace("| `a.cost`, `a.error` |", "| `a.cost` |"))
        with self.assertRaisesRegex(results.Problem, "nothing is said to make a.error fail"):
            results.fill(check=True)

    def test_a_control_that_meets_the_bar_is_an_error(self):
        results.DOCUMENTS = []
        for name, control, good, bad in (("share", "other", 95.7, 95.8), ("cost", "cost_with_a_planted_fault", 1001, 1000)):
            unit = {"unit": "%"}
            self.keep("a", **{name: figure(1, **unit), control: figure(good, **unit)})
            with contextlib.redirect_stdout(io.StringIO()):
                results.fill(check=False)
            self.keep("a", **{name: figure(1, **unit), control: figure(bad, **unit)})
            with self.assertRaisesRegex(results.Problem, f"a.{control} is .*, so a.{name} couldn't have failed"):
                results.fill(check=True)

    def test_a_figure_without_the_control_that_is_planted_is_an_error(self):
        results.DOCUMENTS = []
        readme = results.ROOT / "bench" / "README.md"
        readme.write_text(readme.read_text().replace("| `a.cost`, `a.error` | a test |", "| `a.cost`, `a.error` | planted: a fault |"))

        def check(**figures):
            self.keep("a", **figures)
            with contextlib.redirect_stdout(io.StringIO()):
                results.fill(check=False)
            results.fill(check=True)
        both = {"cost": figure(1), "error": figure(0)}
        check(**both)  # of before there were controls
        check(cost=figure(1), cost_with_a_planted_fault=figure(1001))  # the other one is void
        check(**both, cost_with_a_planted_fault=figure(1001), error_with_a_planted_fault=figure(1))
        with self.assertRaisesRegex(results.Problem, "a.error lacks a.error_with_a_planted_fault"):
            check(**both, cost_with_a_planted_fault=figure(1001))

    def test_a_table_that_is_out_of_date_fails_the_check(self):
        self.keep("memory", refusal_ns=figure(9, 10, 12), pair=figure(1.384, unit="x"))
        results.DOCUMENTS = ["x.md"]
        (results.ROOT / "x.md").write_text(results.filled("x.md", TABLE))
        results.fill(check=True)
        self.keep("memory", refusal_ns=figure(9, 11, 12), pair=figure(1.384, unit="x"))
        with self.assertRaisesRegex(results.Problem, "x.md"):
            results.fill(check=True)

    def test_figures_in_the_text_of_pages_have_their_values(self):
        self.keep("memory", refusal_ns=figure(9, 10, 12), sent=figure(2, unit="GB_a_day"))
        page = "<!-- results: epyc -->\nIt is `memory.refusal_ns` **9 ns**, or\n`memory.sent`; `arena.commit` and `a.share` aren't measured.\n"
        told = page.replace("9 ns", "10 ns").replace("`memory.sent`", "`memory.sent` **2 GB a day**")
        self.assertEqual(results.filled("docs/guide/x.md", page), told)
        self.assertEqual(results.filled("docs/guide/x.md", told), told)
        self.assertEqual(results.filled("x.md", page), page)
        for wrong in ("`a.share`\n", "<!-- results: epyc -->\n`memory.nothing`\n"):
            with self.assertRaises(results.Problem):
                results.filled("docs/guide/x.md", wrong)
        (results.ROOT / "docs" / "guide").mkdir(parents=True)
        (results.ROOT / "docs" / "guide" / "x.md").write_text(page)
        results.DOCUMENTS = []
        with self.assertRaisesRegex(results.Problem, "docs/guide/x.md"):
            results.fill(check=True)

    def test_a_table_never_mixes_commits(self):
        self.keep("memory", refusal_ns=figure(10))
        self.keep("compute", commit="decade", admit=figure(80))
        table = "<!-- results: epyc -->\n\n| f | measured |\n|-|-|\n| `memory.refusal_ns` | |\n| `compute.admit` | |\n"
        with self.assertRaisesRegex(results.Problem, "different commits"):
            results.filled("x.md", table)

    def test_what_is_no_figure_is_an_error_and_what_is_one_may_come(self):
        self.keep("memory", refusal_ns=figure(10))
        table = "<!-- results: epyc -->\n| f | measured |\n|-|-|\n| `a.share` | |\n"
        self.assertIn("| `a.share` | not measured yet |", results.filled("x.md", table))
        for row in ("`memory.pair`", "`core.pair`", "nothing"):
            with self.assertRaises(results.Problem):
                results.filled("x.md", f"<!-- results: epyc -->\n| f | measured |\n|-|-|\n| {row} | |\n")
        with self.assertRaisesRegex(results.Problem, "no results of xeon"):
            results.filled("x.md", "<!-- results: xeon -->\n")

    def test_keeps_an_area_with_its_parts_by_machine(self):
        build = results.ROOT / "build"
        build.mkdir()
        self.keep("core", pair=figure(1, 2, 3))
        (results.RESULTS / "epyc" / "core.json").rename(build / "core.json")
        (build / "core_include.json").write_text(json.dumps({"figures": {"core.include_ratio": figure(1.9)}}))
        with contextlib.redirect_stdout(io.StringIO()):
            results.keep(build, ["core"])
        kept = json.loads((results.RESULTS / "amd-epyc-25-1-2-cores" / "core.json").read_text())
        self.assertEqual(sorted(kept["figures"]), ["core.include_ratio", "core.pair"])
        self.assertEqual(kept["commit"], "c0ffee")

    def test_a_part_of_an_earlier_run_is_not_mixed_in(self):
        build = results.ROOT / "build"
        build.mkdir()
        self.keep("core", pair=figure(1, 2, 3))
        (build / "core_include.json").write_text(json.dumps({"figures": {"core.include_ratio": figure(1.9)}}))
        (results.RESULTS / "epyc" / "core.json").rename(build / "core.json")
        os.utime(build / "core_include.json", ns=(0, 0))
        with self.assertRaisesRegex(results.Problem, "core_include.json are of an earlier run"):
            results.keep(build, ["core"])
        self.assertFalse((results.RESULTS / "amd-epyc-25-1-2-cores" / "core.json").exists())

    def test_refuses_what_nobody_could_repeat(self):
        build = results.ROOT / "build"
        build.mkdir()
        self.keep("core", commit="c0ffee-dirty", pair=figure(1))
        (results.RESULTS / "epyc" / "core.json").rename(build / "core.json")
        with self.assertRaisesRegex(results.Problem, "uncommitted"):
            results.keep(build, ["core"])

    @unittest.skipIf(shutil.which("git") is None, "there is no git")
    def test_refuses_commits_that_nobody_else_has(self):
        def git(*arguments):
            subprocess.run(["git", "-C", results.ROOT, "-c", "user.name=x", "-c", "user.email=x", *arguments], check=True,
                           capture_output=True)
        results.DOCUMENTS = []
        self.keep("memory", refusal_ns=figure(10))
        results.fill(check=True)  # no checkout
        git("init", "--quiet")
        git("commit", "--quiet", "--allow-empty", "--message", "x")
        with self.assertRaisesRegex(results.Problem, "memory.json: measured at c0ffee"):
            results.fill(check=True)
        (results.RESULTS / "epyc" / "memory.json").rename(results.ROOT / "memory.json")
        with self.assertRaisesRegex(results.Problem, "history"):
            results.keep(results.ROOT, ["memory"])
        self.keep("memory", commit="HEAD", refusal_ns=figure(10))
        results.fill(check=True)
        git("clone", "--quiet", "--depth", "1", f"file://{results.ROOT}", "shallow")
        root = results.ROOT
        for results.ROOT in (root / "in_a_checkout_of_something_else", root / "shallow"):
            results.RESULTS = results.ROOT / "bench" / "results"
            (results.RESULTS / "epyc").mkdir(parents=True)
            (results.ROOT / "bench" / "README.md").write_text("")
            self.keep("memory", refusal_ns=figure(10))
            results.fill(check=True)

    def test_refuses_what_was_measured_beside_other_programs(self):
        build = results.ROOT / "build"
        build.mkdir()
        for what, kept in (("others_percent", 5.1), ("stolen_percent", 9)):
            text = {"commit": "c0ffee", "processor": "x", "load": {"average_before": 90, what: kept}, "figures": {}}
            (build / "core.json").write_text(json.dumps(text))
            (build / "memory.json").write_text(json.dumps({**text, "load": {what: 2}}))
            with self.assertRaisesRegex(results.Problem, what), contextlib.redirect_stdout(io.StringIO()):
                results.keep(build, ["core", "memory"])
            self.assertTrue((results.RESULTS / "x" / "memory.json").exists())  # the others are kept
            self.assertFalse((results.RESULTS / "x" / "core.json").exists())
            (build / "core.json").write_text(json.dumps({**text, "settings": {"clock": "virtual"}}))
            with contextlib.redirect_stdout(io.StringIO()):
                results.keep(build, ["core"])  # of a device in virtual time: others don't matter
            (results.RESULTS / "x" / "core.json").unlink()
            (build / "core.json").write_text(json.dumps(text))
        results.DOCUMENTS = []
        (build / "core.json").rename(results.RESULTS / "x" / "core.json")  # nor by hand
        with self.assertRaisesRegex(results.Problem, "stolen_percent"):
            results.fill(check=True)

    def test_a_void_figure_says_so_in_the_table(self):
        build = results.ROOT / "build"
        build.mkdir()
        text = {"commit": "c0ffee", "processor": "AMD EPYC", "void": {"a.share": "the control was beyond the bound"}, "figures": {}}
        (build / "a.json").write_text(json.dumps(text))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            results.keep(build, ["a"])
        self.assertIn("void a.share", out.getvalue())
        table = "<!-- results: amd-epyc -->\n| f | measured |\n|-|-|\n| `a.share` | |\n"
        self.assertIn("| void: the control was beyond the bound |", results.filled("x.md", table))

    def test_documents_change_to_another_machine(self):
        results.DOCUMENTS = ["x.md"]
        (results.RESULTS / "xeon").mkdir()
        self.keep("a", machine="xeon", share=figure(97, unit="%"))
        (results.ROOT / "x.md").write_text(
            "![](../bench/results/epyc/a.svg)\n<!-- results: none -->\n| a | b |\n\n<!-- results: epyc -->\n"
            "| f | measured |\n|-|-|\n| `a.share` | |\n")
        with contextlib.redirect_stdout(io.StringIO()):
            results.use("xeon")
        text = (results.ROOT / "x.md").read_text()
        self.assertIn("<!-- results: none -->", text)
        self.assertIn("results/xeon/a.svg", text)
        self.assertIn("| `a.share` | 97 % |", text)
        results.fill(check=True)

    def test_a_table_of_a_gpu_stays_one(self):
        results.DOCUMENTS = ["x.md"]
        document = results.ROOT / "x.md"
        document.write_text("<!-- results: nvidia-x -->\n\n<!-- results: none -->\n\n<!-- results: old -->\n")
        for machine in ("nvidia-x", "old"):
            (results.RESULTS / machine).mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            results.use("epyc")
        self.assertEqual(document.read_text(),
                         "<!-- results: nvidia-x -->\n\n<!-- results: none -->\n\n<!-- results: epyc -->\n")

    def test_steps_of_a_gpu_are_one_area_as_far_as_they_passed(self):
        def step(status, **result):
            return {"status": status, "seconds": 1, "result": result}
        path = results.RESULTS / "epyc" / "gpu.json"
        path.write_text(json.dumps({"steps": {
            "conformance": {"status": "passed", "seconds": 1},
            "pytorch": step("passed", figures={"gpu.p": figure(1)}),
            "one": step("passed", commit="c0ffee", figures={"gpu.a": figure(2)}),
            "two": step("failed with exit code 1", commit="c0ffee", figures={"gpu.b": figure(3)})}}))
        loaded = results.load(path)
        self.assertEqual(loaded["commit"], "c0ffee")
        self.assertEqual(set(loaded["figures"]), {"gpu.p", "gpu.a"})
        path.write_text(json.dumps({"steps": {"one": {"status": "out of time", "seconds": 1}}}))
        with self.assertRaisesRegex(results.Problem, "nothing was measured"):
            results.load(path)

    def test_charts_are_up_to_date_too(self):
        results.DOCUMENTS = []
        self.keep("a", share=figure(97, 98), cost=figure(900, 2000))
        with self.assertRaisesRegex(results.Problem, "a.svg"):
            results.fill(check=True)
        with contextlib.redirect_stdout(io.StringIO()):
            results.fill(check=False)
        results.fill(check=True)
        chart = (results.RESULTS / "epyc" / "a.svg").read_text()
        self.assertIn("a.share", chart)
        self.assertEqual(chart.count("<circle"), 2)
        self.assertEqual(chart.count('r="4" fill="#c2410c"'), 1)  # beyond its bar

    def test_a_curve_is_drawn_from_what_was_measured(self):
        area = {"commit": "c0ffee", "date": "2026-11-26", "settings": {"curve_of": "a list"},
                "texts": {"curve": "asked for %;bound;ours, with moves\n80;79;78\n90;89.5;88\n100;97;95.25\n"}}
        drawn = results.curve(area)
        xml.dom.minidom.parseString(drawn)
        self.assertEqual(drawn.count("<polyline"), 2)
        self.assertEqual(drawn.count('stroke-width="3"'), 1)  # ours
        self.assertIn("95.25  ours, with moves", drawn)
        self.assertIsNone(results.curve({"texts": {}}))

    def test_a_column_says_which_bars_are_met(self):
        def met(bar, value, figure_="a.cost"):
            self.keep("a", cost=figure(value), error=figure(value), passing=figure(value))
            table = f"<!-- results: epyc -->\n| f | bar | measured | met |\n|-|-|-|-|\n| `{figure_}` | {bar} | | wrong |\n"
            return results.split_row(results.filled("x.md", table).splitlines()[-1])[-1]
        self.assertEqual((met("at most 1,000", 1000), met("at most 1,000", 1001)), ("yes", "**no**"))
        self.assertEqual((met("all 12", 12, "a.passing"), met("all 12", 11, "a.passing")), ("yes", "**no**"))
        self.assertEqual((met("0", 0, "a.passing"), met("0", 1, "a.passing")), ("yes", "**no**"))
        self.assertEqual((met("", 1), met("2 expected", 1, "a.passing")), ("", ""))
        for other in ("at most 999", "at least 1,000"):  # than that of bench/README.md
            with self.assertRaisesRegex(results.Problem, "another one in bench/README.md"):
                met(other, 1)
        self.keep("a", cost=figure(1))
        self.assertIn("| not measured yet |  |", results.filled(
            "x.md", "<!-- results: epyc -->\n| f | bar | measured | met |\n|-|-|-|-|\n| `a.error` | at most 1e-6 | | yes |\n"))

    def test_times_are_in_the_unit_that_people_read(self):
        self.assertEqual(results.cell(figure(280397, 280398, unit="us")), "280 ms (280 to 280)")
        self.assertEqual(results.short(figure(999)), "999 ns")
        self.assertEqual(results.short(figure(7200, unit="s")), "7,200 s")
        self.assertEqual(results.short(figure(-1500)), "-1.5 us")

    def test_a_row_of_several_figures_has_a_bar_for_each(self):
        readme = results.ROOT / "bench" / "README.md"
        readme.write_text("| `a.b`, `a.c` | x | at least 1,072.5, 70 |\n| `a.d`, `a.e` | x | at most 2 |\n")
        self.assertEqual(results.bars(), {"a.b": ("at least", 1072.5), "a.c": ("at least", 70), "a.d": ("at most", 2), "a.e": ("at most", 2)})

    def test_the_picture_of_an_urgent_model_is_of_the_newest_results(self):
        results.DOCUMENTS = []
        figures = {f"{what}_{n}_{way}": figure(factor, unit="x") for n, _ in results.NEIGHBOURS
                   for (way, *_), factor in zip(results.WAYS, (80, 20, 2)) for what in ("p99_vs_alone", "background_pct")}
        self.keep("engines", **figures)
        with self.assertRaisesRegex(results.Problem, "urgent_beside_busy.svg"):
            results.fill(check=True)
        with contextlib.redirect_stdout(io.StringIO()):
            results.fill(check=False)
        results.fill(check=True)
        drawn = (results.RESULTS / "urgent_beside_busy.svg").read_text()
        xml.dom.minidom.parseString(drawn)
        self.assertEqual((drawn.count(">80x<"), drawn.count(">20 %<"), drawn.count(">2x<")), (3, 3, 3))
        del figures["p99_vs_alone_training_held"]
        self.assertIsNone(results.urgent_beside_busy({"figures": {"engines." + name: f for name, f in figures.items()}}))

    def test_bars_are_numbers_in_any_form(self):
        self.assertEqual(results.bars(), {"a.share": ("at least", 95.8), "a.cost": ("at most", 1000), "a.error": ("at most", 1e-6)})

    def test_compares_by_the_middle_halves_and_the_bar_s_direction(self):
        old = {"a.share": ("%", [95, 96, 97]), "a.cost": ("x", [10, 11, 12]), "a.t": ("ns", [10, 11, 30]), "a.x": ("x", [1])}
        new = {"a.share": ("%", [90, 91, 92]), "a.cost": ("x", [1, 2, 3]), "a.t": ("ns", [11, 12, 10]), "a.x": ("x", [2])}
        worse, text = self.compared(old, new)
        self.assertEqual(worse, 1)
        self.assertRegex(text, r"a\.share .*WORSE")
        self.assertRegex(text, r"a\.cost .*better")
        self.assertRegex(text, r"a\.x .*changed")
        self.assertNotRegex(text, r"a\.t .*(WORSE|better|changed)")
        self.assertEqual(self.compared(old, old)[0], 0)

    def test_runs_of_a_folder_are_compared_by_their_values(self):
        for run, value in enumerate((3, 1, 2)):
            self.keep(f"core.{run}", machine="epyc", pair=figure(value))
        for file in (results.RESULTS / "epyc").glob("*.json"):
            text = json.loads(file.read_text())
            text["figures"] = {"core.pair": next(iter(text["figures"].values()))}
            file.write_text(json.dumps(text))
        self.assertEqual(results.load_all(results.RESULTS / "epyc"), {"core.pair": ("ns", [3, 1, 2])})


if __name__ == "__main__":
    unittest.main()
