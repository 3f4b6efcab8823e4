#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# check_once.sh OBJECT: it calls members of tenancy and tenant, and has none of its own.
set -eu
for member in 'tenancy<.*>::admit(' 'tenant<.*>::close('; do
    if nm -C "$1" | grep " [WVT] .*gpushare.*$member"; then
        echo "compiled here as well: $member" >&2
        exit 1
    fi
    nm -C "$1" | grep -q " U .*gpushare.*$member" || { echo "not called: $member" >&2; exit 1; }
done
