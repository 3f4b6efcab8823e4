#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The prose of documents, as far as a program can judge it:

- no clause without a head: "Who asks badly keeps others ..." is "A bad client keeps others ...", "for who waits" is "for a thread that waits".
  Questions may begin with these words. In a table the same holds for cells, which needn't end with a full stop, and a cell needs a verb:
  "each its share" is "each tenant gets its share". A table's head may ask.
- no word twice in a row
- as many cells in each row of a table as in its head
- lines of at most 100 columns, but for tables, code, links and figures' values, which bench/results.py fills in

Headers' comments keep to the same rules. A sample in a comment begins three columns in and is code. A test's name is a plain sentence: it
doesn't begin with such a word either.

    tests/structure/prose.py [DOCUMENT...]      # all of the repository's without arguments

The file `prose_pending` lists the documents that don't pass yet. One that passes must leave the list, and a new document passes.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PENDING = pathlib.Path(__file__).resolve().parent / "prose_pending"
WIDEST = 100
QUESTIONS = "who|whoever|what|whatever|whose|whichever|wherever"
OF_WHOM = re.compile(r"\b(?:for|to|of|by|from|with|than|and|or|but|as) (?:who|whoever)\b(?![-(])", re.I)
HEADLESS = [re.compile(rf"(?:^|[.;:!?]\s+|\*\*)(?:{QUESTIONS})\b[^.;?]*[.;](?!\w)", re.I), OF_WHOM]
# In a comment, a colon may list what a type holds or decides.
HEADLESS_IN_COMMENTS = [re.compile(rf"(?:^|[.;!?]\s+)(?:{QUESTIONS})\b[^.;?]*[.;](?!\w)", re.I), OF_WHOM]
# A cell's first clause and the clauses behind it, to the cell's end. A colon may say what a name means.
HEADLESS_IN_CELLS = [re.compile(rf"(?:^|[.;!?]\s+|\*\*)(?:{QUESTIONS})\b[^.;?]*(?:$|[.;](?!\w))", re.I),
                     re.compile(r", (?:what|whoever) [^.;?]*", re.I), re.compile(r"\beach (?:its|their)\b[^.;]*", re.I), OF_WHOM]
TWICE = re.compile(r"(?<![\w.-])([a-z]+) \1(?![\w-])", re.I)


def paragraphs(text):
    """[(its first line, its text)]: prose alone, a list item by itself."""
    found, code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
            found.append((number, ""))
        elif code or not line.strip() or line.startswith(("|", "#", "!", "<!--")):
            found.append((number, ""))
        elif re.match(r"\s*([-*]|\d+\.) ", line):
            found.append((number, re.sub(r"^\s*([-*]|\d+\.) ", "", line)))
        elif found and found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + " " + line.strip())
        else:
            found.append((number, line.strip()))
    return [(number, text) for number, text in found if text]


def cells(text):
    """[(its line, its text)]: the cells of tables, but for their heads."""
    lines, code, found = text.splitlines(), False, []
    for number, line in enumerate(lines, 1):
        code ^= line.lstrip().startswith("```")
        is_head = number < len(lines) and set(lines[number]) <= set("|-: ") and lines[number]
        if line.startswith("|") and not code and not is_head:
            found += [(number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
    return found


def ragged_rows(text):
    """[(line, what is wrong)]: rows of a table with more or fewer cells than its head. A viewer drops or shifts such cells silently."""
    found, head, code = [], None, False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.startswith("```")
        if code or not line.startswith("|"):
            head = None
            continue
        bars = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "code", line)))
        head = head or bars
        if bars != head:
            found.append((number, f"{bars - 1} cells, but {head - 1} in the table's head"))
    return found


def without_quotes(text):
    """Code, tests' names and quoted texts aren't prose of the document."""
    text = re.sub(r"`[^`]*`", "`code`", text)
    text = re.sub(r'"[^"]*"', '"quoted"', text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def width(line):
    """Of a line, as far as it could be broken: not within code, links and values."""
    line = re.sub(r" \*\*[^*]*\*\*", "", line) if re.search(r"`[a-z_.0-9]+` \*\*", line) else line
    atoms = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda found: found[0].replace(" ", "_"), line).split(" ")
    return len(line) if len(line) > WIDEST and len([a for a in atoms if a and a not in "-*"]) > 1 else 0


def clauses(parts, headless):
    """[(line, what is wrong)]: clauses without a head, and words twice in a row."""
    found = []
    for number, paragraph in parts:
        prose = without_quotes(paragraph)
        for rule in headless:
            found += [(number, f"a clause without a head: {hit[0].strip(' .;:*')[:60]}") for hit in rule.finditer(prose)]
        found += [(number, f"twice: {hit[0]}") for hit in TWICE.finditer(prose)]
    return found


def complaints(text):
    """[(line, what is wrong)] in a document."""
    found, code = clauses(paragraphs(text), HEADLESS) + clauses(cells(text), HEADLESS_IN_CELLS) + ragged_rows(text), False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code and not line.startswith(("|", "```", "<!--", "![")) and width(line) > WIDEST:
            found.append((number, f"{len(line)} columns, of at most {WIDEST}"))
    return sorted(found)


def comments(text):
    """The text with its comments alone, as prose: each line stays where it is, and samples are code."""
    lines, marker = [], re.compile(r"^\s*///?(?P<sample>   )? ?(?P<text>.*)$")
    for line in text.splitlines():
        found = marker.match(line)
        if found and not (found["sample"] and not re.match(r"^\s*[-*\d]", lines[-1] if lines else "")):
            lines.append(found["text"])
        else:
            lines.append("")
    return "\n".join(lines)


def complaints_of_header(text):
    """[(line, what is wrong)] in a header's comments. Behind the code of a line they count with the code."""
    found = clauses(paragraphs(comments(text)), HEADLESS_IN_COMMENTS)
    for number, line in enumerate(text.splitlines(), 1):
        comment = re.match(r"\s*///?(?!   )", line) or re.search(r"[^\s/]  ///?", line)
        if len(line) > WIDEST and comment and not re.match(r"\s*(//   |///   .*(;|\{|\.\.\.|  //.*)$)", line) and "NOLINT" not in line:
            found.append((number, f"{len(line)} columns, of at most {WIDEST}"))
    return sorted(found)


NAMED_TEST = re.compile(r'^[A-Z_]*TEST_CASE[A-Z_]*\((?:\w+, )?"([^"]*)', re.M)


def complaints_of_tests(text):
    """[(line, what is wrong)] in the names of tests."""
    return [(text[:test.start()].count("\n") + 1, f"a test's name without a head: {test[1][:60]}")
            for test in NAMED_TEST.finditer(text) if re.match(rf"(?:{QUESTIONS}|where|whom)\b", test[1], re.I)]


def by_hand(text):
    """Without what is made of headers' comments: lines stay where they are."""
    return re.sub(r"<!-- made by .*?<!-- end of what is made -->", lambda made: "\n" * made[0].count("\n"), text, flags=re.S)


def documents(root):
    names = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "bench/results/README.md", "standins/cuda/README.md",
             "standins/ptx/README.md"]
    return [root / name for name in names if (root / name).exists()] + sorted((root / "docs").rglob("*.md")) \
        + sorted((root / "include").rglob("*.[hc][pu][ph]")) \
        + [path for folder in ("tests", "standins") for end in ("cpp", "cu") for path in sorted((root / folder).rglob(f"*.{end}"))]


def check(paths, pending, root):
    """What is wrong, a line each."""
    wrong, seen = [], set()
    for path in paths:
        name = str(path.relative_to(root))
        seen.add(name)
        text = path.read_text()
        found = complaints_of_tests(text) if path.suffix in (".cpp", ".cu") else complaints_of_header(text) if path.suffix in (".hpp", ".cuh") \
            else complaints(by_hand(text))
        if name in pending and not found:
            wrong.append(f"{name}: passes now, so it leaves tests/structure/prose_pending")
        elif name not in pending:
            wrong += [f"{name}:{number}: {what}" for number, what in found]
    return wrong, seen


def main(arguments):
    pending = {line.strip() for line in PENDING.read_text().splitlines() if line.strip() and not line.startswith("#")}
    paths = [pathlib.Path(a).resolve() for a in arguments]
    wrong, seen = check(paths or documents(ROOT), set() if paths else pending, ROOT)
    if not paths:
        wrong += [f"tests/structure/prose_pending: there is no {name}" for name in sorted(pending - seen)]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
