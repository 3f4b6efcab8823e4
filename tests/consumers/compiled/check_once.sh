#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# check_once.sh OBJECT...: of the classes that make up tenancies, limiters and their memory the objects
# have no member but templates of their own callables, so compiled.hpp declares all that a program
# reaches; and they do call some. One object isn't optimised: each function that was instantiated for
# it is there. In the other one, small functions are inlined, and what they call must be declared.
set -eu
names='tenancy|tenant|tenant_memory|compute_limiter|limiter_core|quota_resource|pool_resource'
names="$names|upstream_ref|deferred_frees|detail::(limiter_engine|admissions|batches|observer|device_watch"
names="$names|endings|settlement|late_points|submission_pool"
names="$names|submission|tenant_state|tenant_part|part_memory|shared_node|tenant_admission|tenant_claim|joint_change"
names="$names|pooled_memory|direct_memory|clean_memory|scrub_stream|spill_list|pool_store|pool_pending)"
status=0
for object in "$@"; do
    if nm -C "$object" | grep -E "^[0-9a-f]+ [WVTt] ([^(]* )?gpushare::v[0-9_]+::($names)<[^(]*>::[~a-z_]+\("; then
        echo "compiled in $object as well" >&2
        status=1
    fi
    nm -C "$object" | grep -qE " U .*gpushare::v[0-9_]+::tenant(_memory)?<.*>::" || { echo "$object calls nothing" >&2; status=1; }
done
exit $status
