#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows that undocumented.sh finds what it looks for, and nothing else: in undocumented/, the lines that declare a bare_NAME.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
header=memory/probe.hpp
diff -u --label expected --label reported \
    <(grep -niE '[ {]bare_' "$here/undocumented/include/gpushare/$header" | sed "s|:.*||; s|^|$header:|") \
    <("$here/../../docs/reference/undocumented.sh" "$here/undocumented" | cut -d: -f1,2 | uniq)
