#!/usr/bin/awk -f
# SPDX-License-Identifier: Apache-2.0
# What Doxygen reads in place of a page: no link's text is on two lines, which Doxygen 1.9.4 doesn't understand. The beginning
# of such a link goes to the next line; where the link begins its line, the end comes up.

# Where a link opens in the line that doesn't end there, or 0. Brackets in code are no links.
function opens(line,    at) {
    while (match(line, /`[^`]+`/)) line = substr(line, 1, RSTART - 1) sprintf("%" RLENGTH "s", "") substr(line, RSTART + RLENGTH)
    at = match(line, /\[[^][]*$/)
    return at
}
function emit(line) {
    if (line ~ /^ *```/) code = !code
    print line
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
