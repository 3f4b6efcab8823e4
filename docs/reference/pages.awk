#!/usr/bin/awk -f
# SPDX-License-Identifier: Apache-2.0
# What Doxygen 1.9.4 reads in place of a page:
#
# - No link's text is on two lines, which Doxygen doesn't understand. The beginning of such a link goes to the next line; where
#   the link begins its line, the end comes up.
# - Headings have the anchors that other sites give them, with the page's name in front, since Doxygen knows only one of each
#   name. Links to headings are HTML's.

# Where a link opens in the line that doesn't end there, or 0. Brackets in code are no links.
function opens(line,    at) {
    while (match(line, /`[^`]+`/)) line = substr(line, 1, RSTART - 1) sprintf("%" RLENGTH "s", "") substr(line, RSTART + RLENGTH)
    at = match(line, /\[[^][]*$/)
    return at
}
# As a heading's anchor: without punctuation, words joined.
function anchor_of(heading) {
    sub(/^#+ +/, "", heading)
    heading = tolower(heading)
    gsub(/[^a-z0-9 _-]/, "", heading)
    gsub(/ /, "-", heading)
    return heading
}
# The site's name of a page that another page in `folder` links to, or "" of what isn't a page of docs/.
function page_of(folder, path) {
    path = folder "/" path
    while (sub(/[^\/]+\/\.\.\//, "", path)) {}
    if (path !~ /^docs\/.*\.md$/) return ""
    sub(/\.md$/, "", path)
    gsub(/\//, "_", path)
    return "md_" path
}
# Links to headings, in this page and others.
function linked(line,    done, link, text, to, page) {
    while (match(line, /\[[^][]*\]\([^()# ]*#[^() ]*\)/)) {
        link = substr(line, RSTART, RLENGTH)
        text = to = link
        sub(/\]\(.*/, "", text)
        sub(/^\[/, "", text)
        sub(/^.*\]\(/, "", to)
        sub(/\)$/, "", to)
        page = to ~ /^#/ ? here : page_of(folder, substr(to, 1, index(to, "#") - 1))
        sub(/^.*#/, "", to)
        if (page != "") link = "<a href=\"" page ".html#" page "-" to "\">" text "</a>"
        done = done substr(line, 1, RSTART - 1) link
        line = substr(line, RSTART + RLENGTH)
    }
    return done line
}
function emit(line) {
    if (line ~ /^ *```/) code = !code
    if (!code && line ~ /^##+ / && !there[anchor = anchor_of(line)]++) printf "<a name=\"%s-%s\"></a>\n\n", here, anchor
    print code ? line : linked(line)
}

NR == 1 {
    folder = FILENAME
    sub(/^.*\/docs\//, "docs/", folder)
    here = page_of("docs", substr(folder, 6))
    sub(/\/[^\/]*$/, "", folder)
}

NR > 1 {
    at = code || held ~ /^ *(```|\|)/ ? 0 : opens(held)
    if (at > 0 && match($0, /^[^][`]*(`[^`]*`[^][`]*)*\]\([^)]*\)[.,;:)]*/)) {
        match($0, /^ */)
        indent = substr($0, 1, RLENGTH)
        before = substr(held, 1, at - 1)
        link = substr(held, at) " " substr($0, RLENGTH + 1)
        if (before ~ /[^ ].* $/ && before !~ /^ *([-*]|[0-9]+\.) *$/) {
            sub(/ +$/, "", before)
            emit(before)
            held = indent link
        } else {
            held = before link
        }
        next
    }
    emit(held)
}
{ held = $0 }
END { if (NR > 0) emit(held) }
