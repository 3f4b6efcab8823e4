#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A dry run of a release makes archives of the new version that their checksums fit, and leaves the repository as it was; versions
# that can't be are refused.
#
#   check_release.sh SOURCE_DIR SCRATCH
set -euo pipefail
root=$1 scratch=$2 version=987.6.5
rm -rf "$scratch"
mkdir -p "$scratch"

# In a clone with a change to release: right after a release the changelog has none.
git clone --quiet --shared --no-tags "$root" "$scratch/repository"
cp "$root/packaging/release.sh" "$scratch/repository/packaging/"
root=$scratch/repository
sed -i '0,/^## \[Unreleased\]$/s//&\n\n### Added\n\n- A change./' "$root/CHANGELOG.md"
git -C "$root" -c user.name=test -c user.email=test@localhost commit --quiet --all --message "A change"

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
