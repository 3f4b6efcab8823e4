#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/ that are made of the code: all options (docs/options.md, of the headers' comments) and all error codes (docs/errors.md,
of error.hpp and of the example server's two tables of statuses). What stands between the lines BEGIN and END is made; the last column of
the error codes, what to do, is written by hand and kept. The tables of docs/events.md are written by hand, with a row for each kind.

    tests/structure/reference_tables.py            # checks that the tables are up to date; --write makes them so
"""
import importlib.util
import pathlib
import re
import sys
import textwrap

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parents[2]
BEGIN, END = "<!-- made by tests/structure/reference_tables.py -->", "<!-- end of what is made -->"


FIRST = ["tenant", "compute", "memory", "serving"]  # of the areas, in docs/options.md


def options_module():
    spec = importlib.util.spec_from_file_location("options", HERE.parent / "options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def split_comments(line):
    """(code, the comment behind it, or None)"""
    code, mark, comment = line.partition("///<")
    if mark:
        return code, comment.strip()
    code, mark, comment = line.partition("///")
    return (code, None) if mark else (re.sub(r"//.*", "", line), None)


def documented_fields(body):
    """[(name, default, meaning)] of a struct's data members; `body` begins behind its brace."""
    found, above, code, behind, depth = [], [], "", [], 1
    for line in body.split("\n"):
        stripped = line.strip()
        if depth == 1 and stripped.startswith("///<"):
            if found and not code.strip():
                found[-1][2].append(stripped[4:].strip())
            else:
                behind.append(stripped[4:].strip())
            continue
        if depth == 1 and stripped.startswith("///"):
            above.append(stripped[3:].strip())
            continue
        told, comment = split_comments(line)
        for c in told:
            depth += (c == "{") - (c == "}")
            if depth == 0:
                return [(name, default, " ".join(words)) for name, default, words in found]
            code += c
            if depth == 1 and c == ";":
                statement, code = " ".join(code[:-1].split()), ""
                named = re.fullmatch(r".*?[ &*>](\w+)(?: = (.*)|\{(.*)\})?", statement)
                if named and statement.split(" ")[0] not in ("friend", "using", "static", "enum", "struct"):
                    default = named[2] if named[2] is not None else named[3] or ""
                    default = f"{{{default}}}" if default.startswith(".") else default.replace("( ", "(")
                    found.append((named[1], default, above + behind + ([comment] if comment else [])))
                comment = None  # of this statement, whether it has a row or not
                above, behind = [], []
            elif depth == 1 and c == "}" and re.search(r"\)[\w\s]*$", code.split("{")[0]):  # a function
                above, behind, code = [], [], ""
        if comment:
            behind.append(comment)
    raise ValueError("a struct without an end")


def documented_structs(include, options):
    """[(struct, header, what it is, its fields)] of all options, by area and header."""
    def place(path):  # what most users set comes first
        area = path.relative_to(include).parts[0]
        return FIRST.index(area) if area in FIRST else len(FIRST), path
    for path in sorted(include.rglob("*.hpp"), key=place):
        if "detail" in path.relative_to(include).parts:
            continue
        text = path.read_text()
        for found in options.STRUCT.finditer(text):
            if "//" in text[text.rfind("\n", 0, found.start()) + 1:found.start()]:
                continue
            names = options.members(re.sub(r"//[^\n]*", "", text[found.end():]))
            if not names:
                continue
            fields = documented_fields(text[found.end():])
            if {f[0] for f in fields} != set(names):
                raise ValueError(f"{path.name}: {found[1]}: found {sorted(f[0] for f in fields)}, not {sorted(names)}")
            above = []
            for line in reversed(text[:text.rfind("\n", 0, found.start()) + 1].splitlines()):
                if not line.strip().startswith("///"):
                    break
                above.insert(0, line.strip()[3:].strip())
            yield found[1], str(path.relative_to(include)), " ".join(above), fields


def cell(text):
    return text.replace("|", "\\|")


def options_page(include, options):
    """A table for each struct: `options.py` knows which these are."""
    lines = []
    for struct, header, what, fields in documented_structs(include, options):
        lines += ["", f"## {struct}", "", *textwrap.wrap(f"`{header}`" + (f": {what}" if what else ""), 100, break_long_words=False,
                                                     break_on_hyphens=False), "", "| field | default | what it is |", "|---|---|---|"]
        lines += [f"| `{name}` | {f'`{cell(default)}`' if default else ''} | {cell(meaning)} |" for name, default, meaning in fields]
    return lines[1:]


def switch(text, start):
    """{case: value} of a C++ switch behind `start`; `default` as None."""
    found, waiting = {}, []
    for case, value in re.findall(r"case ([\w:]+):|(?:default: )?return \{?([^;]*);", text[text.index(start):].split("\n}\n")[0]):
        if case:
            waiting.append(case)
        else:
            found.update(dict.fromkeys(waiting or [None], value))
            waiting = []
    return found


GRPC = {3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND", 8: "RESOURCE_EXHAUSTED", 9: "FAILED_PRECONDITION", 12: "UNIMPLEMENTED",
        13: "INTERNAL", 14: "UNAVAILABLE", 16: "UNAUTHENTICATED"}


def errors_page(error, lane, grpc, written):
    """A row for each errc. `written`: {errc: what to do}."""
    body = error[error.index("enum class errc"):].split("};")[0]
    codes, group = [], ""
    for line in body.splitlines()[1:]:
        if found := re.match(r"    (\w+),\s+///< (.*)", line):
            codes.append((group, *found.groups()))
        elif found := re.match(r"    // (.*)", line):
            group = found[1]
    sentences = dict(re.findall(r'case errc::(\w+): return "([^"]*)";', error))
    http, status = switch(lane, "refused text_of(const gpushare::failure& why)"), switch(grpc, "int code_of(int http)")
    lines, last = [], None
    for group, code, meaning in codes:
        if code == "none":
            continue
        if group != last:
            lines += ["", f"## {group.capitalize()}", "", "| `errc` | message | meaning | HTTP | gRPC | what to do |", "|---|---|---|---|---|---|"]
            last = group
        answer = http.get(f"errc::{code}", http[None]).rstrip("}").split(", ")
        number = int(status.get(answer[0], status[None]))
        if not written.get(code):
            raise ValueError(f"docs/errors.md doesn't say what to do about {code}")
        lines.append(f"| `{code}` | {sentences[code]} | {cell(meaning)} | {answer[0]}{', retry' if len(answer) > 2 else ''} | {GRPC[number]} | "
                     f"{written[code]} |")
    if strange := written.keys() - {code for _, code, _ in codes}:
        raise ValueError(f"docs/errors.md has {', '.join(sorted(strange))}, which is no errc")
    return lines[1:]


def written_advice(page):
    """{errc: the last column} of docs/errors.md."""
    return {cells[0].strip("`"): cells[-1] for line in page.partition(BEGIN)[2].splitlines() if re.match(r"\| `(?!errc`)", line)
            for cells in [[c.strip() for c in line.strip("| ").split("|")]]}


def with_tables(page, lines):
    before, _, rest = page.partition(BEGIN + "\n")
    _, found, after = rest.partition(END + "\n")
    if not found:
        raise ValueError("no lines that say where the table is")
    return "\n".join([before + BEGIN, "", *lines, "", END]) + "\n" + after


def check_events(page, headers):
    """docs/events.md has a row for each kind of event, and no other."""
    for header, struct in headers:
        kinds = header[header.index(f"struct {struct} {{"):].split("enum class kind")[1].split("};")[0]
        kinds = set(re.findall(r"^ +(\w+),", kinds, re.M))
        rows = set(re.findall(r"^\| `(\w+)` \|", page.split(f"| `{struct}::kind` |")[1].split("\n\n")[0], re.M))
        if kinds != rows:
            raise ValueError(f"docs/events.md: kinds of {struct}: {', '.join(sorted(kinds ^ rows))} in one of page and header only")


def pages(root):
    """{page: its text as it should be}"""
    read = lambda path: (root / path).read_text()
    check_events(read("docs/events.md"), [(read("include/gpushare/tenant/specification.hpp"), "tenant_event"),
                                          (read("include/gpushare/compute/admission.hpp"), "limiter_event")])
    options, errors = read("docs/options.md"), read("docs/errors.md")
    server = "examples/inference_server/"
    return {"docs/options.md": with_tables(options, options_page(root / "include" / "gpushare", options_module())),
            "docs/errors.md": with_tables(errors, errors_page(read("include/gpushare/error.hpp"), read(server + "lane.cpp"),
                                                              read(server + "grpc_server.cpp"), written_advice(errors)))}


def main(arguments):
    stale = []
    for path, text in pages(ROOT).items():
        if (ROOT / path).read_text() != text:
            stale.append(path)
            if "--write" in arguments:
                (ROOT / path).write_text(text)
    if stale and "--write" not in arguments:
        print(f"{', '.join(stale)}: not what the code says; run tests/structure/reference_tables.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as e:
        sys.exit(f"reference_tables: {e}")
