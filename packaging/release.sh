#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a release of what is committed: the version in config.hpp, a section of CHANGELOG.md, a commit and a tag of it, archives
# and their checksums.
#
#   packaging/release.sh [--dry-run] VERSION DIR
#
# DIR gets gpushare-VERSION.tar.gz, .zip and SHA256SUMS. A dry run makes these and leaves the repository as it is; nothing is ever
# pushed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "release: $1" >&2
    exit 1
}

dry=
[[ ${1-} != --dry-run ]] || { dry=1 && shift; }
(($# == 2)) || fail "usage: packaging/release.sh [--dry-run] VERSION DIR"
version=$1
[[ $version =~ ^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$ ]] || fail "'$version' is no version such as 1.2.3"
numbers=("${BASH_REMATCH[@]:1}")
git -C "$root" rev-parse --git-dir >/dev/null 2>&1 || fail "$root is no git repository"
[[ -n $dry || -z $(git -C "$root" status --porcelain) ]] || fail "there are changes that aren't committed"
! git -C "$root" rev-parse -q --verify "refs/tags/v$version" >/dev/null || fail "there is a tag v$version"
mkdir -p "$2"
out=$(cd "$2" && pwd)

tree=$(mktemp -d)
trap 'git -C "$root" worktree remove --force "$tree" 2>/dev/null; rm -rf "$tree"' EXIT
git -C "$root" worktree add --quiet --force --detach "$tree" HEAD
cd "$tree"

config=include/gpushare/config.hpp
old=$(sed -nE 's/^#define GPUSHARE_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)$/\2/p' "$config" | paste -sd.)
newest=$(printf '%s\n' "$old" "$version" | sort -V | tail -n 1)
[[ $newest == "$version" ]] || fail "$version is older than $old"
sed -i -E -e "s/^(#define GPUSHARE_VERSION_MAJOR) .*/\1 ${numbers[0]}/" -e "s/^(#define GPUSHARE_VERSION_MINOR) .*/\1 ${numbers[1]}/" \
    -e "s/^(#define GPUSHARE_VERSION_PATCH) .*/\1 ${numbers[2]}/" \
    -e "s/^(#define GPUSHARE_ABI) .*/\1 v${version//./_}/" -e "s/gpushare::v${old//./_}/gpushare::v${version//./_}/" "$config"

sed -i "s/\"version-semver\": \"$old\"/\"version-semver\": \"$version\"/" packaging/vcpkg/gpushare/vcpkg.json
grep -rlF "find_package(gpushare ${old%.*} " --include=*.md --include=CMakeLists.txt . |
    xargs -r sed -i "s/find_package(gpushare ${old%.*} /find_package(gpushare ${version%.*} /"

# What is below Unreleased becomes the version's; it must say something. A section of the version that is there already stays.
if ! grep -qF "## [$version] - " CHANGELOG.md; then
    awk '/^## \[/ { inside = /^## \[Unreleased\]/ } inside && /^- / { found = 1 } END { exit !found }' CHANGELOG.md ||
        fail "CHANGELOG.md has nothing below [Unreleased]"
    sed -i "s/^## \[Unreleased\]$/&\n\n## [$version] - $(date -u +%F)/" CHANGELOG.md
fi

git add --all
content=$(git write-tree)
if [[ -z $dry ]]; then
    git diff --cached --quiet || git commit --quiet --message "Release $version"
    content=$(git rev-parse HEAD)
    git -C "$root" merge --quiet --ff-only "$content"
    git -C "$root" tag --annotate --message "gpushare $version" "v$version" "$content"
fi
for format in tar.gz zip; do
    git archive --format=$format --prefix="gpushare-$version/" --output="$out/gpushare-$version.$format" "$content"
done
cd "$out"
sha256sum "gpushare-$version.tar.gz" "gpushare-$version.zip" | tee SHA256SUMS
