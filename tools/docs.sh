# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2154  # shares its variables with ./dev
# `./dev docs` and `./dev lint`: the site, missing documentation, formatting and prose.

# Builds the site. Any warning is an error.
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
    step "full text" "$root/docs/reference/full_text.py" "$out/html" "$out/parts/layout.xml"
    # Copies the files outside of its own folder that a page shows, or to which it links, so that
    # the output folder is the whole site.
    local beside place missing=0
    while read -r beside; do
        place=$root/docs/${beside#../}  # for a page in a folder of docs/, `..` is docs/; for a page of docs/, the root
        [[ -e $place ]] || place=$root/${beside#../}
        install -D -m 644 "$place" "$out/${beside#../}" || missing=1
    done < <(grep -rhoE '(src|href)="\.\./[^"#]+' "$out/html" --include='*.html' | cut -d'"' -f2 | sort -u)
    ((missing == 0)) || fail 1 "a page shows or links to what isn't there"
    echo "$out/html/index.html"
}

reference() {  # OUT
    local kind options=("OUTPUT_DIRECTORY = $1" "EXAMPLE_PATH = $1/parts" "LAYOUT_FILE = $1/parts/layout.xml")
    mkdir -p "$1/parts"
    navigation <"$root/docs/reference/layout.xml" >"$1/parts/layout.xml"
    # For the first page: the first program of README, and the program's output.
    for kind in cpp text; do
        sed -n "/^\`\`\`$kind\$/,/^\`\`\`\$/{/^\`\`\`/!p;/^\`\`\`\$/q}" "$root/README.md" >"$1/parts/quickstart.${kind/text/txt}"
    done
    [[ ! -e $theme/doxygen-awesome.css ]] || dress "$1/parts"
    [[ ! -s $root/docs/reference/incomplete.txt ]] || options+=('WARN_IF_UNDOCUMENTED = NO')
    (cd "$root" && { cat docs/reference/Doxyfile && printf '%s\n' "${options[@]}"; } | doxygen -)
}

# The site's navigation, with the chapters of the guide and of other tracks.
navigation() {
    local line track page title
    while IFS= read -r line; do
        if [[ ! $line =~ "<!-- chapters of docs/"([a-z]+)" -->" ]]; then
            printf '%s\n' "$line"
            continue
        fi
        track=${BASH_REMATCH[1]}
        [[ -e $root/docs/$track.md ]] || continue
        printf '    <tab type="usergroup" visible="yes" url="@ref md_docs_%s" title="%s">\n' "$track" "${track^}"
        for page in "$root/docs/$track"/*.md; do
            title=$(sed -n '1s/^# //p' "$page")
            [[ ! $title =~ [Cc]hapter\ ([0-9]+):\ (.*)$ ]] || title="${BASH_REMATCH[1]}. ${BASH_REMATCH[2]^}"
            printf '      <tab type="user" visible="yes" url="@ref md_docs_%s_%s" title="%s"/>\n' "$track" "$(basename "$page" .md)" "$title"
        done
        echo '    </tab>'
    done
}

# Adds the theme: its styles and our own, its scripts, and its licence.
theme=$root/build/tools/doxygen_awesome/doxygen_awesome_css
dress() {  # PARTS
    local files=("$theme"/doxygen-awesome{-darkmode-toggle,-fragment-copy-button}.js)
    (cd "$1" && doxygen -w html header.html footer.html default.css)
    cp "$theme"/../doxygen_awesome_css-*.dist-info/licenses/LICENSE "$1/doxygen-awesome-LICENSE.txt"
    sed -i '/<\/head>/e cat '"$root"'/docs/reference/head.html' "$1/header.html"
    options+=("HTML_HEADER = $1/header.html" "HTML_EXTRA_FILES = ${files[*]} $1/doxygen-awesome-LICENSE.txt"
        "HTML_EXTRA_STYLESHEET = $theme/doxygen-awesome.css $theme/doxygen-awesome-sidebar-only.css $theme/doxygen-awesome-sidebar-only-darkmode-toggle.css $root/docs/reference/site.css")
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

# Different versions of clang-format format differently with the same settings, so only one version
# counts.
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
