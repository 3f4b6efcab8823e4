#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cuda.consumers_passing: of the projects outside the tree that use the library, one per way of getting it, how many
# build and run. A skipped one, and one whose tool is missing, doesn't pass.
#
#   bench/consumers.sh BUILD_DIR [JSON]
set -euo pipefail

build=$1
json=${2-}
expected=(add_subdirectory add_subdirectory_cuda find_package cuda_runtime cuda pkg_config pkg_config_cuda tgz deb vcpkg conan fetch_content)

# A failing test is a figure here, not an error. The installation and the archives that they need run before them.
log=$build/consumers.log
ctest --test-dir "$build" -L '^consumer$' -j 2 >"$log" 2>&1 || true
passed=0
for name in "${expected[@]}"; do
    if grep -Eq "consumers\.$name \.+ +Passed" "$log"; then
        passed=$((passed + 1))
    else
        echo "# not passing: $name, see $log"
    fi
done
echo "# of ${#expected[@]}"
echo "figure cuda.consumers_passing $passed count"
if [[ -n $json ]]; then
    printf '{"figures": {"cuda.consumers_passing": {"value": %d, "is": "median", "unit": "of %d", "least": %d, "most": %d, "repeats": [%d]}}}\n' \
        "$passed" "${#expected[@]}" "$passed" "$passed" "$passed" >"$json"
fi
