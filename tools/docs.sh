# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# `./dev docs` and `./dev lint`: the site, what it lacks, formatting and prose.

# Any warning is an error.
docs() {  # [--missing [AREA]]
    local out=$root/build/docs
    if [[ ${1-} == --missing ]]; then
        asked_areas=docs need doxygen
        missing_docs "${2-}"
        return
    fi
    (($# == 0)) || fail 2 "unknown argument '$1': ./dev docs [--missing [AREA]]"
    uses docs
    step "documented" "$root/docs/reference/undocumented.sh" --check
    rm -rf "$out"
    mkdir -p "$out"
    step "docs" reference "$out"
    step "full text" "$root/docs/reference/full_text.py" "$out/html"
    # What pages show and link to beside themselves lies there as it does here: the folder is the
    # whole site.
    local beside place missing=0
    while read -r beside; do
        place=$root/docs/${beside#../}  # as pages of docs/guide and its like say it, or else those of docs/
        [[ -e $place ]] || place=$root/${beside#../}
        install -D -m 644 "$place" "$out/${beside#../}" || missing=1
    done < <(grep -rhoE '(src|href)="\.\./[^"#]+' "$out/html" --include='*.html' | cut -d'"' -f2 | sort -u)
    ((missing == 0)) || fail 1 "a page shows or links to what isn't there"
    echo "$out/html/index.html"
}

reference() {  # OUT
    local options=("OUTPUT_DIRECTORY = $1")
    [[ ! -s $root/docs/reference/incomplete.txt ]] || options+=('WARN_IF_UNDOCUMENTED = NO')
    (cd "$root" && { cat docs/reference/Doxyfile && printf '%s\n' "${options[@]}"; } | doxygen -)
}

missing_docs() {  # [AREA]
    local names
    names=$("$root/docs/reference/undocumented.sh")
    if [[ -z $1 ]]; then
        cut -d: -f1 <<<"$names" | uniq -c
    elif [[ $1 == base ]]; then
        grep '^[^/]*:' <<<"$names" || true
    else
        grep "^$1/" <<<"$names" || true
    fi
}

# Versions of clang-format disagree about the same settings, so only one of them is asked.
have_formatter() { command -v clang-format >/dev/null && clang-format --version | grep -q 'version 14\.'; }

lint() {  # [--fix]
    # shellcheck disable=SC2016  # for the other shell
    local one=(-n 1 sh -c 'clang-format "$1" | diff -u --label "$1" --label "$1, formatted" "$1" -' lint)
    uses lint
    [[ ${1-} != --fix ]] || one=(clang-format -i)
    cd "$root" || return
    find include tests standins examples bench -name "*.[ch]pp" -o -name "*.cu" -o -name "*.cuh" | sort | xargs -P "$jobs" "${one[@]}" ||
        fail 1 "these files are not formatted: ./dev lint --fix"
    "$root/tests/structure/prose.py" || fail 1 "the prose of these documents can be better: tests/structure/prose.py says by which rule"
}
