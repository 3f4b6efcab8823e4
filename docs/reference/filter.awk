#!/usr/bin/awk -f
# SPDX-License-Identifier: Apache-2.0
# What Doxygen reads in place of a header. Each line becomes one line, so that warnings name the right one.
#
# - The comment on top of the header, what it is for and its shortest use, becomes the page of the file.
# - The inline namespace goes, so that names read as users write them, and its place opens the group of the area.
# - A function that is defaulted needs no words of its own.

# The group of include/gpushare/AREA/...; of the headers on top: base, but for those that include all others.
function area_of(path) {
    sub(/^.*include\/gpushare\//, "", path)
    if (path ~ /\//) {
        sub(/\/.*$/, "", path)
        return path
    }
    return path ~ /^gpushare\./ ? "umbrella" : "base"
}

# Text outside code: Doxygen takes ::name and #name for links.
function prose(line) {
    line = gensub_global(line, "::cuda::", "\\::cuda::")
    gsub(/#/, "\\#", line)
    return line
}

function gensub_global(line, from, to,    at, done) {
    while ((at = index(line, from)) > 0) {
        done = done substr(line, 1, at - 1) to
        line = substr(line, at + length(from))
    }
    return done line
}

# The comment on top: lines indented by three are code, but for those that go on with an item of a list.
function print_top(    i, in_code, in_item, code) {
    print "/// @file"
    for (i = 1; i <= tops; i++) {
        if (top[i] ~ /^ *$/) {
            in_item = 0
        } else if (top[i] ~ /^ (- |[0-9]+\. )/) {
            in_item = 1
        } else if (top[i] !~ /^   /) {
            in_item = 0
        }
        code[i] = top[i] ~ /^   / && !in_item
    }
    for (i = 2; i < tops; i++) {  # an empty line within code is code
        if (top[i] ~ /^ *$/ && code[i - 1] && top[i + 1] ~ /^   /) code[i] = 1
    }
    for (i = 1; i <= tops; i++) {
        print "///" (code[i] ? (code[i - 1] ? "" : " @code{.cpp}") top[i] (code[i + 1] ? "" : " @endcode") : prose(top[i]))
    }
}

FNR == 1 {
    area = area_of(FILENAME)
    on_top = 1
    tops = 0
    next
}
on_top && /^\/\// {
    top[++tops] = substr($0, 3)
    next
}
on_top {
    print_top()
    on_top = 0
}
/^inline namespace GPUSHARE_ABI \{/ {
    print "/** @addtogroup " area " */ /** @{ */"
    next
}
/^\} *\/\/ namespace GPUSHARE_ABI/ {
    print "/** @} */"
    next
}
/^ *\/\/\// {
    print prose($0)
    next
}
/= default;$/ {
    print $0 (/operator(==|<=>)/ ? "  ///< Compares member by member." : "  ///< Defaulted.")
    next
}
{ print }
