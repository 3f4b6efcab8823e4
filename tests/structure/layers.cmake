# SPDX-License-Identifier: Apache-2.0
# Which layer includes which: check_headers.cmake compares this table with the headers, both ways. A layer is a directory, or a header
# of the top directory by its name. Its line lists the other layers whose headers it includes: no header includes anything else, and each
# entry is of use to some header.
#
# Lowest first: a layer includes only what stands before it here. So the core includes no extra, whatever its lines say.
set(root config units error concepts numbers detail closing sm_split)
set(core memory compute partition collective backend/host backend/cuda backend/sim tenant)
set(umbrellas gpushare)
set(extras placement gradient observe serving graph interop)
set(layers ${root} ${core} ${umbrellas} ${extras})

set(may_include_config)
set(may_include_units config)
set(may_include_error config units)
set(may_include_concepts config units error)
set(may_include_numbers config)
set(base config units error concepts)  # what most layers include
set(may_include_detail ${base})
set(may_include_closing config units detail)
set(may_include_sm_split ${base})

# The four primitives know neither each other nor a backend; a backend knows neither who runs on it nor another backend.
set(may_include_memory ${base} detail closing)
set(may_include_compute ${base} detail sm_split)
set(may_include_partition ${base})
set(may_include_collective ${base} numbers detail)
set(may_include_backend/host ${base} detail closing sm_split)
set(may_include_backend/cuda ${base} detail closing sm_split)
set(may_include_backend/sim ${base} detail)
set(may_include_tenant ${base} detail closing sm_split memory compute partition)
set(may_include_gpushare ${base} numbers memory compute partition backend/cuda tenant)

set(may_include_placement config units error detail partition tenant)
set(may_include_gradient ${base} numbers detail collective)
set(may_include_observe config units error compute tenant)
set(may_include_serving ${base} detail closing memory compute tenant)
set(may_include_graph ${base} numbers detail memory compute collective serving)
set(may_include_interop ${base} detail closing memory partition)

# A directory's row in docs/architecture.md: | `tenant/` | `memory/`, `compute/`, `partition/` |
function(row_of layer result)
    set(others ${may_include_${layer}})
    list(REMOVE_ITEM others ${root})
    list(TRANSFORM others REPLACE "(.+)" " `\\1/`")
    list(JOIN others "," others)
    set(${result} "| `${layer}/` |${others} |" PARENT_SCOPE)
endfunction()
