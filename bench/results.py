#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Results as data: keeps what ./dev bench measured, fills the tables of the documents from it, and compares two runs.

  results.py keep BUILD_DIR AREA...     build/bench/AREA*.json become bench/results/MACHINE/AREA.json
  results.py fill [--check]             writes the measured cells of all documents and charts beside each AREA.json, or says which
                                        aren't up to date, or which results wouldn't be kept
  results.py use MACHINE                has all documents show the results of that machine, but for those of a GPU, then fills them
  results.py compare OLD NEW            what got better or worse beyond the spread: the middle halves of the repeats
                                        lie apart. OLD and NEW: an AREA.json each, or folders of them; a figure that
                                        several files of a folder have is compared by its values there, run by run

A table whose head has a column "measured" is filled: its cells get the value of the figure named in the row, either in
backticks or, where prose stands instead, in a comment: <!-- memory.refusal_ns -->. If the head has columns "bar" and "met" as well, the
latter says whether the bar is met; the bar has to be that of bench/README.md. In a table without such a column each cell names its
own figures: what stands behind a comment, as far as the next one or a semicolon, is that figure's value. Above the table stands the
machine: <!-- results: MACHINE -->; `none` leaves cells as they are. All figures of one table must come from one commit. In the text of the guide and of
the primitives' pages each figure in backticks, below such a line, has its value behind it: `memory.refusal_ns` **14 ns**. A figure that
bench/README.md defines and that these results lack is "not measured yet"; one that a control made void says why.

Each figure with a bar can fail: bench/README.md says by what, in its table "what makes it fail", and it is an error where that lacks one. A
figure that is named there as the control of others, and each NAME_with_a_planted_fault, has to miss their bars in all results. Where results have
one of the latter, each of their figures whose row there begins with "planted" has to have its own.
"""
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = ["README.md", "docs/placement.md", "docs/figures.md", "docs/cpu_engines.md"]
PAGES = ["docs/guide", "docs/primitives", "docs/training"]  # whose text has values, too


class Problem(Exception):
    """Something the reader of the message can mend."""


def load(path):
    """One area's results: {"commit": ..., "figures": {...}}. Those of ./dev gpu have them step by step."""
    try:
        result = json.loads(Path(path).read_text())
    except (OSError, ValueError) as e:
        raise Problem(f"{path}: {e}") from e
    if "steps" in result:
        parts = [step["result"] for step in result["steps"].values() if "result" in step and step["status"] == "passed"]
        heads = [part for part in parts if "commit" in part]
        if not heads:
            raise Problem(f"{path}: nothing was measured")
        result = heads[0] | {"figures": {k: v for part in parts for k, v in part["figures"].items()}}
    return result


def load_all(path):
    """name -> (unit, repeats) of a file or of all files in a folder; the repeats are runs where there are several."""
    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise Problem(f"{path}: no results")
    runs = {}
    for file in files:
        for name, f in load(file)["figures"].items():
            runs.setdefault(name, []).append(f)
    return {name: (all_[0]["unit"], all_[0]["repeats"] if len(all_) == 1 else [f["value"] for f in all_])
            for name, all_ in runs.items()}


def in_history(commit):
    """Whether this checkout can go back to it. True where there is no whole history to look at: an archive, a shallow clone."""
    def git(*arguments):
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if shutil.which("git") is None:
        return True
    top, *shallow = git("rev-parse", "--show-toplevel", "--is-shallow-repository").stdout.splitlines() or [""]
    if not top or Path(top) != ROOT.resolve() or shallow != ["false"]:
        return True
    return git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


# ---- keep

def machine_name(processor):
    """ "AMD EPYC, family 25, model 1, 2 cores" -> "amd-epyc-25-1-2-cores" """
    words = re.sub(r"\b(family|model|cpu|processor|\(r\)|\(tm\))(?=\W|$)", " ", processor.lower())
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-")


MOST_LOAD = 5  # percent of the cores; above 2 a timing says little


def why_not(area, result):
    """Why this result isn't worth keeping; empty if it is."""
    if result["commit"].endswith("-dirty"):
        return f"{area}: measured with uncommitted changes, so nobody could repeat it"
    if not in_history(result["commit"]):
        return f"{area}: measured at {result['commit']}, which isn't in this checkout's history, so nobody could repeat it"
    virtual = result.get("settings", {}).get("clock") == "virtual"  # whatever else the machine does
    for what, percent in result.get("load", {}).items():
        if what.endswith("_percent") and percent > MOST_LOAD and not virtual:
            return f"{area}: {what} of the cores was {percent}, so the figures are the machine's"
    return ""


def keep(folder, areas):
    """Keeps what it can, and says at the end what it couldn't."""
    problems = []
    for area in areas:
        result = load(folder / f"{area}.json")
        if why := why_not(area, result):
            problems.append(why)
            continue
        parts = sorted(folder.glob(f"{area}_*.json"))
        begun = (folder / f"{area}.json").stat().st_mtime_ns
        if stale := [part.name for part in parts if part.stat().st_mtime_ns < begun]:  # written behind it, in each run
            problems.append(f"{area}: {', '.join(stale)} are of an earlier run")
            continue
        for part in parts:
            result["figures"].update(load(part)["figures"])
        for name, why in result.get("void", {}).items():
            print(f"void {name}: {why}")
        machine = RESULTS / machine_name(result["processor"])
        machine.mkdir(parents=True, exist_ok=True)
        head = {k: v for k, v in result.items() if k != "figures"}
        lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        rows = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(result["figures"].items())]
        text = "{" + ",\n".join(lines)[1:] + ',\n "figures": {\n' + ",\n".join(rows) + "\n }}\n"
        (machine / f"{area}.json").write_text(text)
        print(f"kept {(machine / area).relative_to(ROOT)}.json")
    if problems:
        raise Problem("not kept: " + "; ".join(problems))


# ---- fill

def number(x):
    if x == 0 or (abs(x) >= 100 and float(x).is_integer()):
        return f"{x:,.0f}"
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"


TIMES = ["ns", "us", "ms", "s"]


def readable(figure):
    """The figure in the unit of time that people read: 280 ms, not 280,397 us."""
    while figure["unit"] in TIMES[:-1] and abs(figure["value"]) >= 1000:
        figure = figure | {key: figure[key] / 1000 for key in ("value", "least", "most")}
        figure["unit"] = TIMES[TIMES.index(figure["unit"]) + 1]
    return figure


def cell(figure):
    figure = readable(figure)
    unit = {"x": "x", "%": " %", "": ""}.get(figure["unit"], "" if figure["unit"] == "count" else " " + figure["unit"].replace("_", " "))
    if figure["least"] == figure["most"]:
        return number(figure["value"]) + unit
    return f"{number(figure['value'])}{unit} ({number(figure['least'])} to {number(figure['most'])})"


def is_met(document, name, bar, machine):
    """What the column "met" says of a row: "yes", "**no**", or nothing where there is no bar or no value. A bar is "at most 1.5",
    "at least 95", "all 12" or an exact "0", and is the one that bench/README.md has."""
    told = re.match(r"(at most |at least |all |)([0-9][0-9.,]*(?:e-[0-9]+)?)$", bar)
    if not told:
        return ""
    way, limit = told[1].strip(), float(told[2].replace(",", ""))
    there = bars().get(name, (way, limit))
    if there[1] != limit or (way in ("at most", "at least") and there[0] != way):
        raise Problem(f"{document}: {name} has the bar '{bar}', and another one in bench/README.md")
    path = RESULTS / machine / f"{name.split('.')[0]}.json"
    figure = load(path)["figures"].get(name) if path.exists() else None
    if figure is None:
        return ""
    value = figure["value"]
    met = {"at most": value <= limit, "at least": value >= limit, "all": value >= limit, "": value == limit}[way]
    return "yes" if met else "**no**"


def short(figure):
    return cell(figure | {"least": figure["value"], "most": figure["value"]})


def figure_of(row):
    named = re.search(r"<!-- ([a-z_]+\.[a-z0-9_]+) -->", row) or re.search(r"`([a-z_]+\.[a-z0-9_]+)`", row)
    return named[1] if named else None


GRID = -2  # instead of a column: each cell names its figures
FIGURE_IN_CELL = re.compile(r"<!-- ([a-z]+\.[a-z0-9_]+) -->([^;|<]*)")


def split_row(line):
    return [c.strip() for c in line.strip().strip("|").split("|")]


def measured(document, machine, name, known, show=cell, commits=None):
    """The text of a figure; notes its commit in `commits`, which may hold one."""
    path = RESULTS / machine / f"{name.split('.')[0]}.json"
    area = load(path) if path.exists() else {"commit": None, "figures": {}}
    if name in area["figures"]:
        if commits is not None:
            commits[area["commit"]] = name
            if len(commits) > 1:
                raise Problem(f"{document}: {' and '.join(commits.values())} were measured at different commits")
        return show(area["figures"][name])
    if name in area.get("void", {}):
        return "void: " + area["void"][name]
    if is_defined(name, known):
        return "not measured yet"
    raise Problem(f"{document}: {name} was not measured on {machine}, and bench/README.md doesn't define it")


def with_value(document, machine, line, known):
    """The line with each figure's value behind it."""
    def value(found):
        name, area = found[1], found[2]
        if machine is None and name in known:
            raise Problem(f"{document}: no <!-- results: MACHINE --> above {name}")
        if machine is None or not (RESULTS / machine / f"{area}.json").exists():
            return found[0]
        return f"`{name}` **{measured(document, machine, name, known, short)}**"
    return re.sub(r"`(([a-z]+)\.[a-z0-9_]+)`(?: \*\*[^*]*\*\*)?", value, line)


def filled(document, text):
    """The document with its measured cells as the results have them."""
    lines, machine, column, commits, known = [], None, None, {}, defined()
    with_values = any(document.startswith(folder) for folder in PAGES)
    for line in text.splitlines():
        told = re.match(r"<!-- results: (\S+) -->", line)
        if told:
            machine = told[1] if told[1] != "none" else None
            if machine and not (RESULTS / machine).is_dir():
                raise Problem(f"{document}: there are no results of {machine}")
        elif not line.startswith("|"):
            column, commits = None, {}
            if with_values:
                line = with_value(document, machine, line, known)
        elif column is None:
            head = split_row(line)
            column = head.index("measured") if machine and "measured" in head else GRID if machine else -1
        elif column == GRID and FIGURE_IN_CELL.search(line):
            line = FIGURE_IN_CELL.sub(
                lambda found: f"<!-- {found[1]} --> " + measured(document, machine, found[1], known, commits=commits).replace(";", ",") +
                " " * found[2].endswith(" "), line)
        elif column is not None and column >= 0 and not set(line) <= set("|-: "):
            name, cells = figure_of(line), split_row(line)
            if name is None:
                raise Problem(f"{document}: no figure is named in the row: {line}")
            text_of_it = measured(document, machine, name, known, commits=commits)
            comment = f"<!-- {name} --> " if f"<!-- {name} -->" in cells[column] else ""
            cells[column] = comment + text_of_it
            if "met" in head and "bar" in head:
                cells[head.index("met")] = is_met(document, name, cells[head.index("bar")], machine)
            line = "| " + " | ".join(cells) + " |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def documents():
    return DOCUMENTS + [str(page.relative_to(ROOT)) for folder in PAGES for page in sorted((ROOT / folder).glob("*.md"))]


def fill(check):
    stale = []

    def put(path, now):
        if path.exists() and path.read_text() == now:
            return
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.write_text(now)
            print(f"filled {stale[-1]}")

    for document in documents():
        put(ROOT / document, filled(document, (ROOT / document).read_text()))
    for file in sorted(RESULTS.glob("*.json")):  # data of pictures
        if check and (why := why_not(file.relative_to(ROOT), load(file))):
            raise Problem(why)
    rows, known = can_fail(), bars()
    for file in sorted(RESULTS.glob("*/*.json")):
        area = load(file)
        check_controls(file.relative_to(ROOT), area["figures"], rows, known)
        if check and (why := why_not(file.relative_to(ROOT), area)):
            raise Problem(why)
        if picture := chart(area):
            put(file.with_suffix(".svg"), picture)
        if picture := curve(area):
            put(file.with_name(file.stem + "_curve.svg"), picture)
    newest = max((load(file) for file in RESULTS.glob("*/engines.json")), key=lambda area: area["date"], default={"figures": {}})
    if picture := urgent_beside_busy(newest):
        put(RESULTS / "urgent_beside_busy.svg", picture)
    if check and stale:
        raise Problem(f"{', '.join(stale)}: figures differ from bench/results; run bench/results.py fill")


def use(machine):
    if not (RESULTS / machine).is_dir():
        raise Problem(f"there are no results of {machine}")
    for document in documents():
        path = ROOT / document
        text = re.sub(r"<!-- results: (?!none |nvidia-)\S+ -->", f"<!-- results: {machine} -->", path.read_text())
        path.write_text(re.sub(r"(bench/results/)[^/\s)]+(/[a-z_]+\.svg)", rf"\g<1>{machine}\g<2>", text))
    fill(check=False)


# ---- charts

def chart(area):
    """Each figure of the area that has a bar other than 0: where it is, and how far its repeats go, over its bar. SVG, or nothing
    where there is none."""
    rows = []
    for name, (direction, bar) in bars().items():
        figure = area["figures"].get(name)
        if not figure or bar == 0:
            continue
        # Over the bar, so that 1 is the bar and less is better.
        over = [figure[k] / bar if direction == "at most" else bar / max(figure[k], 1e-9) for k in ("value", "least", "most")]
        rows.append((name, *over))
    if not rows:
        return None
    left, width, height, decades = 330, 420, 18, 2  # a decade to either side of the bar

    def x(over):
        exponent = min(max(math.log10(max(over, 1e-9)), -decades / 2), decades / 2)
        return round(left + width * (exponent / decades + 0.5), 1)

    bottom = 40 + height * len(rows)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {bottom + 10}" font-family="sans-serif" '
             'font-size="11">',
             f'<rect width="{left + width + 20}" height="{bottom + 10}" fill="#fff"/>',
             f'<text x="10" y="18">{area["processor"]}; commit {area["commit"]}, {area["date"]}</text>']
    for over, label in ((0.1, "a tenth of the bar"), (1, "the bar"), (10, "ten times")):
        anchor = {0.1: "start", 1: "middle", 10: "end"}[over]
        lines.append(f'<line x1="{x(over)}" x2="{x(over)}" y1="36" y2="{bottom}" stroke="{"#c2410c" if over == 1 else "#ccc"}"/>')
        lines.append(f'<text x="{x(over)}" y="32" text-anchor="{anchor}" fill="#555">{label}</text>')
    for i, (name, value, *ends) in enumerate(rows):
        y = 50 + height * i
        colour = "#2b6cb0" if value <= 1 else "#c2410c"
        lines.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{name}</text>')
        lines.append(f'<line x1="{x(min(ends))}" x2="{x(max(ends))}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<circle cx="{x(value)}" cy="{y}" r="4" fill="{colour}"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


COLOURS = ["#777", "#8a6d4f", "#7d6a99", "#5d7d63", "#5f6f8f", "#31708e", "#8a6d1f", "#2b6cb0", "#c2410c", "#ea580c"]


def curve(area):
    """The area's text "curve": a title for x, a name for each line, then rows of x and percents. Ours are drawn thick. SVG, or
    nothing."""
    head, *rows = [row.split(";") for row in area.get("texts", {}).get("curve", "").splitlines()] or [[]]
    if not rows:
        return None
    rows = [[float(v) for v in row] for row in rows]
    low, high = math.floor(min(min(row[1:]) for row in rows)), math.ceil(max(max(row[1:]) for row in rows))
    left, top, width, height = 80, 80, 740, 480

    def x(v):
        return round(left + width * (v - rows[0][0]) / (rows[-1][0] - rows[0][0]), 1)

    def y(v):
        return round(top + height * (high - v) / (high - low), 1)

    lines = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1100 640" font-family="sans-serif" font-size="14">',
             '<rect width="1100" height="640" fill="#fff"/>',
             f'<text x="{left}" y="38">{area["settings"]["curve_of"]}</text>',
             f'<text x="{left}" y="58" fill="#666">commit {area["commit"]}, {area["date"]}</text>',
             f'<text x="{left + width / 2}" y="{top + height + 46}" text-anchor="middle" fill="#444">{head[0]}</text>']
    step = 5 if high - low > 12 else 1
    for percent in range(math.ceil(low / step) * step, high + 1, step):
        lines.append(f'<line x1="{left}" x2="{left + width}" y1="{y(percent)}" y2="{y(percent)}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{left - 10}" y="{y(percent) + 5}" text-anchor="end" fill="#444">{percent} %</text>')
    for row in rows:
        if row[0] % 10 == 0:
            lines.append(f'<text x="{x(row[0])}" y="{top + height + 22}" text-anchor="middle" fill="#444">{row[0]:.0f} %</text>')
    label = 0  # from the top, a line's height apart
    for i in sorted(range(1, len(head)), key=lambda i: -rows[-1][i]):
        colour, wide, end = COLOURS[(i - 1) % len(COLOURS)], 3 if "ours" in head[i] else 1.5, y(rows[-1][i])
        points = " ".join(f"{x(row[0])},{y(row[i])}" for row in rows)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{wide}"/>')
        label = max(end, label + 19)
        lines.append(f'<line x1="{left + width}" x2="{left + width + 14}" y1="{end}" y2="{label}" stroke="{colour}"/>')
        lines.append(f'<text x="{left + width + 18}" y="{label + 5}" fill="{colour}">{rows[-1][i]:.2f}  {head[i]}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


# How the busy model and the urgent one share the device: what of the figures' names, what people call it, and its colour.
WAYS = [("plain", "no library: one stream each", "#9aa5b1"), ("native", "no library: stream priorities", "#5f6f8f"),
        ("held", "gpushare: a launch gate", "#c2410c")]
NEIGHBOURS = [("inference", "ResNet-50 inference"), ("prefill", "language model prefill"), ("training", "ResNet-50 training")]


def urgent_beside_busy(area):
    """The picture on README's first screen: how long an urgent model takes beside a busy one, and what the busy one still gets done. SVG, or
    nothing where there are no such figures."""
    figures = area["figures"]
    if not all(f"engines.{what}_{n}_{way}" in figures for what in ("p99_vs_alone", "background_pct") for n, _ in NEIGHBOURS for way, *_ in WAYS):
        return None
    left, width, gap, height, top = 190, 330, 60, 20, 118
    decades = max(math.ceil(math.log10(figures[f"engines.p99_vs_alone_{n}_{w}"]["value"])) for n, _ in NEIGHBOURS for w, *_ in WAYS)
    right = left + width + gap
    bottom = top + len(NEIGHBOURS) * (height * len(WAYS) + 22)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + width + 60} {bottom + 44}" font-family="sans-serif" font-size="13">',
             f'<rect width="{right + width + 60}" height="{bottom + 44}" fill="#fff"/>',
             '<text x="16" y="28" font-size="17" font-weight="bold">An urgent BERT beside a busy model on one GPU</text>']
    for i, (_, label, colour) in enumerate(WAYS):
        lines.append(f'<rect x="{16 + 230 * i}" y="44" width="13" height="13" fill="{colour}"/>'
                     f'<text x="{35 + 230 * i}" y="55">{label}</text>')
    lines.append(f'<text x="{left}" y="{top - 30}" font-weight="bold">P99 latency of the urgent model, over that alone</text>'
                 f'<text x="{right}" y="{top - 30}" font-weight="bold">Work of the busy model, of that alone</text>')
    for ticks, at in (([(d / decades, f"{10 ** d}x") for d in range(decades + 1)], left), ([(t / 4, f"{25 * t} %") for t in range(5)], right)):
        for part, label in ticks:
            x = round(at + width * part, 1)
            lines.append(f'<line x1="{x}" x2="{x}" y1="{top - 8}" y2="{bottom - 14}" stroke="#ddd"/>'
                         f'<text x="{x}" y="{top - 13}" text-anchor="middle" font-size="11" fill="#666">{label}</text>')
    for i, (neighbour, label) in enumerate(NEIGHBOURS):
        y = top + i * (height * len(WAYS) + 22)
        lines.append(f'<text x="16" y="{y + height * len(WAYS) / 2}">beside</text>'
                     f'<text x="16" y="{y + height * len(WAYS) / 2 + 17}">{label}</text>')
        for j, (way, _, colour) in enumerate(WAYS):
            times, percent = (figures[f"engines.{what}_{neighbour}_{way}"]["value"] for what in ("p99_vs_alone", "background_pct"))
            for at, part, text in ((left, math.log10(max(times, 1)) / decades, f"{times:.3g}x"), (right, percent / 100, f"{percent:.0f} %")):
                long = max(round(width * part, 1), 2)
                lines.append(f'<rect x="{at}" y="{y + j * height}" width="{long}" height="{height - 3}" fill="{colour}"/>'
                             f'<text x="{at + long + 5}" y="{y + j * height + 13}" font-size="12">{text}</text>')
    lines += [f'<text x="16" y="{bottom + 8}" font-size="11" fill="#555">Requests arrive at random and take a quarter of the device. Replayed in '
              'virtual time from the launches that these models made on an NVIDIA H100.</text>',
              f'<text x="16" y="{bottom + 25}" font-size="11" fill="#555">./dev bench engines, commit {area["commit"]}, {area["date"]}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


# ---- compare

def bars():
    """What bench/README.md demands of a figure, by name: ("at most" or "at least", the bar)."""
    found = {}
    for line in (ROOT / "bench" / "README.md").read_text().splitlines():
        cells = split_row(line) if line.startswith("|") else []
        bar = re.match(r"(at most|at least) (.*)", cells[-1]) if cells else None
        limits = [float(n.replace(",", "")) for n in re.findall(r"[0-9][0-9.,]*(?:e-[0-9]+)?(?=, |[^0-9]|$)", bar[2])] if bar else []
        names = re.findall(r"`([a-z_]+\.[a-z0-9_]+)`", cells[0]) if limits else []
        for i, name in enumerate(names):  # "at least 72, 72, 70": a bar for each name
            found[name] = (bar[1], limits[i if len(limits) == len(names) else 0])
    return found


def defined():
    """The names of all figures that bench/README.md has."""
    return set(re.findall(r"`([a-z_]+\.[a-z0-9_]+)`", (ROOT / "bench" / "README.md").read_text()))


def is_defined(name, known):
    """Also where it is one of those with an end that bench/README.md has for several: `..._one_sm`, `serving.*_one_sm`."""
    return name in known or any(name == start + end for end in ends() for start in known)


def ends():
    return set(re.findall(r"`(?:\.\.\.|[a-z]+\.\*)(_[a-z0-9_]+)`", (ROOT / "bench" / "README.md").read_text()))


PLANTED = "_with_a_planted_fault"


def can_fail():
    """By what each figure fails: [(its name, the control's name or None)]. An error if one with a bar isn't in the table of these. The
    control of one that is planted is its own."""
    demanded, rows, column = set(), [], None
    for line in (ROOT / "bench" / "README.md").read_text().splitlines():
        cells = split_row(line) if line.startswith("|") else []
        if not cells:
            column = None
        elif column is None:
            column = cells[-1]
        elif column == "what makes it fail":
            controls = re.findall(r"`([a-z]+\.[a-z0-9_]+)`", cells[-1]) or [None]
            names = re.findall(r"`([a-z]+\.[a-z0-9_]+)`", cells[0])
            rows += [(name, control) for name in names for control in controls]
            rows += [(name, name + PLANTED) for name in names if cells[-1].startswith("planted")]
        elif column == "bar" and cells[-1] and not set(cells[-1]) <= set("-: "):
            demanded |= set(re.findall(r"`([a-z]+\.[a-z0-9_]+)`", cells[0]))
    if lacking := demanded - {name for name, _ in rows}:
        raise Problem(f"bench/README.md: nothing is said to make {', '.join(sorted(lacking))} fail")
    return rows


def check_controls(path, figures, rows, known):
    """That what has to miss a bar does, and is there if it was planted: results without any are of before that was done."""
    if any(PLANTED in name for name in figures):
        for name, control in rows:
            if control == name + PLANTED and name in figures and control not in figures:
                raise Problem(f"{path}: {name} lacks {control}, so nobody knows whether it could have failed")
    planted = [(name, name + PLANTED) for name in known]
    for name, control in planted + [row for row in rows if row[1] and row[0] in known]:
        if name not in figures or control not in figures:
            continue
        (way, bar), value = known[name], figures[control]["value"]
        if value <= bar if way == "at most" else value >= bar:
            raise Problem(f"{path}: {control} is {number(value)}, so {name} couldn't have failed")


def lower_is_better(name, unit, known):
    """None where nothing says so."""
    if name in known:
        return known[name][0] == "at most"
    return True if unit in ("ns", "us", "ms", "s") else None


def middle_half(values):
    """(first quartile, median, third quartile)"""
    if len(values) == 1:
        return values * 3
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def compare(old, new):
    """Returns how many figures got worse."""
    known, worse = bars(), 0
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            print(f"{name:46} only {'after' if name in new else 'before'}")
            continue
        unit = new[name][0]
        low, before, high = middle_half(old[name][1])
        least, after, most = middle_half(new[name][1])
        lower, verdict = lower_is_better(name, unit, known), ""
        if least > high or most < low:
            verdict = "changed" if lower is None else "better" if (after < before) == lower else "WORSE"
        worse += verdict == "WORSE"
        change = f"{100 * (after / before - 1):+.1f} %" if before else ""
        print(f"{name:46} {number(before):>8} -> {number(after):>8} {unit:6} {change:>10}  {verdict}")
    return worse


def main(arguments):
    command, *rest = arguments or ["--help"]
    if command in ("--help", "-h"):
        print(__doc__)
    elif command == "keep" and len(rest) > 1:
        keep(Path(rest[0]), rest[1:])
    elif command == "fill" and rest in ([], ["--check"]):
        fill(check=bool(rest))
    elif command == "use" and len(rest) == 1:
        use(rest[0])
    elif command == "compare" and len(rest) == 2:
        sys.exit(1 if compare(load_all(rest[0]), load_all(rest[1])) else 0)
    else:
        raise Problem("what to do? --help says what there is")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Problem as e:
        sys.exit(f"results: {e}")
