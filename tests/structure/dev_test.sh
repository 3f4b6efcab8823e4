#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ./dev installs in `setup` alone: on a machine that has nothing, each other command ends with one
# line that names the `./dev setup` to run. `demo`, `test` and `check` begin with their setup. ./dev
# stays small, its files say what they are for, and its help names all areas.
#
#   dev_test.sh SCRATCH
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scratch=$1
unset CI

wrong=0
complain() {
    echo "$1" >&2
    wrong=1
}

# A copy, so that nothing is in build/, on a machine with a shell and little else. Installers only
# write down that they were called.
rm -rf "$scratch"
mkdir -p "$scratch/bin" "$scratch/bench"
cp -r "$root/dev" "$root/tools" "$scratch"
touch "$scratch/bench"/{core,collective,graph,serving}.cpp "$scratch/bench/adoption.py"
for program in bash cat cut date dirname env basename grep mkdir realpath rm sed sort touch tr; do
    ln -s "$(command -v "$program")" "$scratch/bin"
done
for program in apt-get python3 sudo; do
    # shellcheck disable=SC2016  # the scripts' own variables
    printf '#!/usr/bin/env bash\necho "${0##*/} $*" >>"%s/installed"\nexit 1\n' "$scratch" >"$scratch/bin/$program"
    chmod +x "$scratch/bin/$program"
done
bare() {  # COMMAND...
    : >"$scratch/installed"
    status=0
    said=$(env -i PATH="$scratch/bin" HOME="$scratch" CI="${CI-}" "$scratch/dev" "$@" 2>&1) || status=$?
}

# Of lines "AREA|COMMAND".
expect_named() {
    local area command
    while IFS='|' read -r area command; do
        # shellcheck disable=SC2086  # words of a command
        bare $command
        ((status == 3)) || complain "'./dev $command' ends with $status where nothing is installed: $said"
        [[ $said != *$'\n'* && $said == *"run: ./dev setup $area" ]] ||
            complain "'./dev $command' doesn't name 'setup $area' in one line: $said"
        [[ ! -s $scratch/installed ]] || complain "'./dev $command' installs: $(<"$scratch/installed")"
    done
}

expect_named <<'END'
docs|docs
docs|docs --missing
lint|lint
serve|serve
serve --gemma-terms-accepted|serve --gemma-terms-accepted
gpu|gpu --pack
test|walk
build|bench core
END

for command in setup "setup docs" demo test check "check clients"; do
    # shellcheck disable=SC2086  # words of a command
    bare $command
    grep -qE '^(apt-get|sudo)' "$scratch/installed" ||
        complain "'./dev $command' doesn't install where nothing is: $said"
done

# The same with all of Debian's packages and nothing from PyPI. Where CI is set, nothing is left
# out.
sed -i 's/^have_package() {.*/have_package() { return 0; }\nunused() {/' "$scratch/tools/packages.sh"
# shellcheck disable=SC2016  # its own variables
printf '#!/usr/bin/env bash\necho "Cuda compilation tools, release 13.0"\necho "#\$ TOP=/" >&2\n' >"$scratch/bin/nvcc"
chmod +x "$scratch/bin/nvcc"
expect_named <<'END'
serve|serve
serving|bench serving
graph|bench graph
END
export CI=true
expect_named <<'END'
test|walk
gpu|gpu
END

(($(wc -l <"$root/dev") < 250)) || complain "./dev has 250 lines or more"
for file in "$root"/tools/*.sh; do
    name=${file##*/}
    sed -n 3p "$file" | grep -qE '^# [A-Z`]' || complain "tools/$name doesn't begin with what it is for"
    [[ $name == packages.sh ]] || ! grep -nE 'apt-get|pip" (install|download)' "$file" ||
        complain "tools/$name installs; only packages.sh may"
    grep -qw "${name%.sh}" <(grep '^for file in' "$root/dev") || complain "./dev doesn't read tools/$name"
done
bare help
while read -r area; do
    grep -qwF -e "$area" <<<"$said" || complain "./dev help doesn't name the area '$area'"
done < <(sed -n '/^areas_of_setup=(/,/)/p' "$root/tools/setup.sh" | sed 's/.*(//; s/).*//' | xargs -n 1)
# Each command explains itself, without installing or building anything.
help=$said
for command in setup test check gpu bench docs lint walk; do
    bare "$command" --help
    [[ $status == 0 && ! -s $scratch/installed && $said == "  $command "* && $help == *"$said"* ]] ||
        complain "'./dev $command --help' ends with $status: $said"
    ! grep -E '^  [a-z]' <<<"$said" | grep -qv "^  $command " || complain "'./dev $command --help' has others' help: $said"
done
bare setup nonsense
[[ $status == 2 && ! -s $scratch/installed ]] || complain "'./dev setup nonsense' ends with $status: $said"
exit "$wrong"
