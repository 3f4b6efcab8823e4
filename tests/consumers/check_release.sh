#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A dry run of a release makes archives of the new version that their checksums fit, and leaves the repository as it was; versions
# that can't be are refused. A version that the changelog names already is tagged as it is.
#
#   check_release.sh SOURCE_DIR SCRATCH
set -euo pipefail
root=$1 scratch=$2 version=987.6.5
rm -rf "$scratch"
mkdir -p "$scratch"

# In a clone, whose changelog has nothing to release right after a release: then only the version that it names last can be made.
export GIT_AUTHOR_NAME=test GIT_AUTHOR_EMAIL=test@localhost GIT_COMMITTER_NAME=test GIT_COMMITTER_EMAIL=test@localhost
git clone --quiet --shared --no-tags "$root" "$scratch/repository"
cp "$root/packaging/release.sh" "$scratch/repository/packaging/"
root=$scratch/repository
sed -i '/^## \[Unreleased\]$/,/^## \[[0-9]/ { /^## \[/!d }' "$root/CHANGELOG.md"
git -C "$root" commit --quiet --all --allow-empty --message "Nothing to release"
head=$(git -C "$root" rev-parse HEAD)
! "$root/packaging/release.sh" --dry-run $version "$scratch" 2>/dev/null || { echo "nothing was released" >&2; exit 1; }
current=$(sed -nE 's/^#define GPUSHARE_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)$/\2/p' "$root/include/gpushare/config.hpp" | paste -sd.)
"$root/packaging/release.sh" "$current" "$scratch" >/dev/null
[[ $(git -C "$root" rev-parse "v$current^{commit}") == "$head" && $(git -C "$root" rev-parse HEAD) == "$head" ]]

# And with a change.
sed -i '0,/^## \[Unreleased\]$/s//&\n\n### Added\n\n- A change./' "$root/CHANGELOG.md"
git -C "$root" commit --quiet --all --message "A change"

state() { git -C "$root" status --porcelain && git -C "$root" rev-parse HEAD && git -C "$root" tag; }
before=$(state)
"$root/packaging/release.sh" --dry-run $version "$scratch"
[[ $(state) == "$before" ]] || { echo "the repository has changed" >&2; exit 1; }

cd "$scratch"
sha256sum --quiet --check SHA256SUMS
tar xzf gpushare-$version.tar.gz
cd gpushare-$version
for line in 'MAJOR 987' 'MINOR 6' 'PATCH 5'; do grep -qx "#define GPUSHARE_VERSION_$line" include/gpushare/config.hpp; done
grep -qx '#define GPUSHARE_ABI v987_6_5' include/gpushare/config.hpp
[[ $(grep -A2 -x '## \[Unreleased\]' CHANGELOG.md | tail -n 1) == "## [$version] - "* ]]

for bad in 1.2 v1.2.3 01.2.3 0.0.1; do
    ! "$root/packaging/release.sh" --dry-run $bad "$scratch" 2>/dev/null || { echo "$bad was accepted" >&2; exit 1; }
done
[[ $(state) == "$before" ]]
