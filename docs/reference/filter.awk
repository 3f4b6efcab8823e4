#!/usr/bin/awk -f
# SPDX-License-Identifier: Apache-2.0
# What Doxygen reads in place of a header. Each line becomes one line, so that warnings name the right one.
#
# - A header with names has a group of its own, a part of its area's: `memory/quota.hpp` is `memory_quota`. The comment on
#   top of the header, what it is for and its shortest use, becomes the group's text, and that of the file's page.
# - The inline namespace goes, so that names read as users write them, and its place opens the group.
# - A function that is defaulted needs no words of its own, and friendship with a class concerns nobody else.

# The area of include/gpushare/AREA/..., AREA/PART/...; of the headers on top: base, but for those that include all others.
function area_of(path) {
    sub(/^.*include\/gpushare\//, "", path)
    if (path !~ /\//) return path ~ /^gpushare\./ ? "umbrella" : "base"
    sub(/\/[^\/]*$/, "", path)
    gsub(/\//, "_", path)
    return path
}

# The header's own name: quota, or launch_cuh, since launch.hpp may lie beside it.
function name_of(path) {
    sub(/^.*\//, "", path)
    sub(/\.hpp$/, "", path)
    sub(/\./, "_", path)
    return path
}

function has_names(path,    line, found) {
    while ((getline line < path) > 0) found = found || line ~ /^inline namespace GPUSHARE_ABI \{/
    close(path)
    return found
}

# Text outside code: Doxygen takes ::name and #name for links.
function prose(line) {
    gsub(/::cuda::/, "\\::cuda::", line)
    gsub(/#/, "\\#", line)
    return line
}

# The comment on top: lines indented by three are code, but for those that go on with an item of a list.
function print_top(    i, in_item, code) {
    print own ? "/// @defgroup " group " " name " \\ilinebr @ingroup " area : "/// @file"
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
        if (code[i]) {
            print "/// " (code[i - 1] ? "" : "@code{.cpp}\\ilinebr") substr(top[i], 4) (code[i + 1] ? "" : " @endcode")
        } else {
            print "///" prose(top[i])
        }
    }
}

FNR == 1 {
    area = area_of(FILENAME)
    name = name_of(FILENAME)
    own = has_names(FILENAME)
    group = own ? area "_" name : area
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
    if (own) $0 = $0 " /** @file \\ilinebr @copydoc " group " */"
}
/^inline namespace GPUSHARE_ABI \{/ {
    print "/** @addtogroup " group " */ /** @{ */"
    next
}
/^\} *\/\/ namespace GPUSHARE_ABI/ {
    print "/** @} */"
    next
}
/^ *\/\/\// {
    print prose($0)
    has_words = 1
    next
}
/= default;$/ && !has_words { $0 = $0 (/operator(==|<=>)/ ? "  ///< Compares member by member." : "  ///< Defaulted.") }
/^ *friend (class|struct) .*;$/ && last !~ /^ *template/ { $0 = "" }
{
    print
    has_words = 0
    last = $0
}
