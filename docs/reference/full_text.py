#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A search in the text of the site's pages, beside Doxygen's in names and titles: what full_text.html loads, by lunr, without
a server. Also looks for pages that the navigation forgets, and for links to no heading, and
for Doxygen's commands in pages, where it has lost its way.

  full_text.py HTML_DIR LAYOUT   the folder that Doxygen wrote, and its navigation; says how many parts of pages can be found, or what can't be
"""
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

from lunr import lunr

LUNR = Path("/usr/share/javascript/lunr/lunr.min.js")
# What must be found by words of its text alone: words, and a part of the page that is found first.
KNOWN = {"torn line journal": "usage", "kvcached": "recipes", "lanes side by side": "page_store", "green context": "sm_partition"}

SEARCH = """const index = lunr.Index.load(fullText.index), words = document.getElementById("words"), found = document.getElementById("found");
function search() {
    found.replaceChildren();
    // What a reader types is words, never lunr's own language.
    const typed = words.value.toLowerCase().split(/[^a-z0-9_]+/).filter(w => w);
    if (!typed.length) return;
    const hits = index.query(q => typed.forEach(w => { q.term(lunr.tokenizer(w), { boost: 10 }); q.term(w, { wildcard: lunr.Query.wildcard.TRAILING, usePipeline: false }); }));
    for (const hit of hits.slice(0, 30)) {
        const line = document.createElement("li"), link = document.createElement("a");
        link.href = hit.ref, link.textContent = fullText.titles[hit.ref];
        line.append(link), found.append(line);
    }
    if (!hits.length) found.textContent = "nothing";
}
words.addEventListener("input", search);
words.value = new URLSearchParams(location.search).get("q") || "";
search();
"""


class Parts(HTMLParser):
    """A page as parts: what stands below each heading that can be linked to."""

    def __init__(self, file):
        super().__init__()
        self.file, self.title, self.inside, self.parts, self.heading = file, "", False, [], None
        self.begin("")

    def begin(self, anchor):
        self.parts.append({"ref": self.file + ("#" + anchor if anchor else ""), "heading": "", "text": ""})

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "div" and attributes.get("class") in ("header", "contents"):
            self.inside = True
        elif tag == "div" and attributes.get("id") == "nav-path":
            self.inside = False
        elif tag in ("h1", "h2", "h3") and self.inside:
            self.heading = tag
        elif tag == "a" and attributes.get("class") == "anchor" and self.heading:
            self.begin(attributes["id"])
        elif tag == "div" and attributes.get("class") == "title":
            self.heading = "title"

    def handle_endtag(self, tag):
        if tag == self.heading or (tag == "div" and self.heading == "title"):
            self.heading = None

    def handle_data(self, data):
        if self.heading == "title":
            self.title += data
        elif self.heading:
            self.parts[-1]["heading"] += data
        elif self.inside:
            self.parts[-1]["text"] += data + " "


def parts_of(page):
    parser = Parts(page.name)
    parser.feed(page.read_text())
    title = " ".join(parser.title.split())
    for part in parser.parts:
        heading = " ".join(part["heading"].split())
        text = re.sub(r"\s+", " ", part["text"])
        if text.strip():
            yield {"ref": part["ref"], "title": f"{title}: {heading}" if heading else title, "text": text}


def broken_links(html):
    """Of the pages, links to a place that no page has: "page: link"."""
    texts = {page.name: page.read_text() for page in html.glob("md_docs_*.html")}
    places = {name: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for name, text in texts.items()}
    links = [(name, *link) for name, text in texts.items() for link in re.findall(r'href="([^":/]*)#([^"]+)"', text)]
    return sorted({f"{name}: {page}#{place}" for name, page, place in links
                   if page.endswith(".md") or place not in places.get(page or name, {place})})


def main():
    html = Path(sys.argv[1])
    places = Path(sys.argv[2]).read_text()
    forgotten = [page.stem for page in sorted(html.glob("md_docs_*.html")) if f'"@ref {page.stem}"' not in places]
    if forgotten:
        sys.exit(f"full_text: the navigation, layout.xml, has no place for {', '.join(forgotten)}")
    documents = [part for page in sorted(html.glob("md_docs_*.html")) for part in parts_of(page)]
    unread = [part["ref"] for part in documents if re.search(r"[@\\\\](ref|code|endcode)\b", part["text"])]
    if unread:
        sys.exit(f"full_text: Doxygen didn't understand these pages: {', '.join(unread)}")
    if astray := broken_links(html):
        sys.exit("full_text: links to headings that aren't there: " + ", ".join(astray))
    index = lunr(ref="ref", fields=[{"field_name": "title", "boost": 5}, "text"], documents=documents)
    for words, wanted in KNOWN.items():
        found = [hit["ref"] for hit in index.search(words)]
        if not any(wanted in ref for ref in found[:3]):
            sys.exit(f"full_text: '{words}' finds {found[:3]}, and {wanted} isn't among them")
    told = {"index": index.serialize(), "titles": {d["ref"]: d["title"] for d in documents}}
    (html / "full_text.js").write_text("const fullText = " + json.dumps(told) + ";\n")
    (html / "full_text_search.js").write_text(SEARCH)
    shutil.copy(LUNR, html)
    print(f"full text: {len(documents)} parts of pages")


if __name__ == "__main__":
    main()
