# SPDX-License-Identifier: Apache-2.0
# Shows that check_headers.cmake can fail: writes a tree with one violation per rule, beside headers that are in
# order, and wants exactly these reports.
#
#   cmake -DSCRATCH=DIR -P check_headers_test.cmake
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${SCRATCH})
set(expected)

function(write path body)
    file(WRITE ${SCRATCH}/${path} "// SPDX-License-Identifier: Apache-2.0\n#pragma once\n${body}\n")
endfunction()

# A header that must be reported with `report`...
macro(bad path body report)
    write(${path} "${body}")
    list(APPEND expected "${path}: ${report}")
endmacro()

# ... for an #include that it must not have.
macro(bad_include path target report)
    bad(${path} "#include ${target}" "includes ${target}: ${report}")
endmacro()

# Headers that use every entry of the table, and two more entries, which are wrong.
include(${CMAKE_CURRENT_LIST_DIR}/layers.cmake)
foreach(layer IN LISTS layers)
    set(includes)
    foreach(other IN LISTS may_include_${layer})
        string(APPEND includes "#include <gpushare/${other}/a.cuh>\n")
    endforeach()
    write(${layer}/entries.cuh "${includes}")
endforeach()
file(WRITE ${SCRATCH}/layers.cmake "include(${CMAKE_CURRENT_LIST_DIR}/layers.cmake)\n"
                                   "list(APPEND may_include_partition closing)\nlist(APPEND may_include_memory tenant)\n")
list(APPEND expected "layers.cmake: partition -> closing: no header does, so take it out"
                     "layers.cmake: memory -> tenant: not below it")

# The page has a row for each directory but one.
include(${SCRATCH}/layers.cmake)
set(page "\n")
foreach(layer IN LISTS core extras)
    row_of(${layer} row)
    if(layer STREQUAL serving)
        list(APPEND expected "${SCRATCH}/page.md: has no row ${row}")
    else()
        string(APPEND page "${row}\n")
    endif()
endforeach()
file(WRITE ${SCRATCH}/page.md "${page}")

write(config.hpp "")
write(interop/good.hpp "#if __has_include(<x>)\n#include <range/v3/all.hpp>\n#endif\n#include <gpushare/memory/a.hpp>")
write(tenant/good.hpp "// __has_include is only named here\n#include <gpushare/memory/a.hpp>\n#include <vector>  // [")
write(gradient/detail/mpi_good.hpp "#if __has_include(<mpi.h>)\n#endif")
write(memory/bodies.hpp "#if GPUSHARE_BODIES\n#endif")
write(memory/equal.hpp "auto operator<=>(a, a) = default\nbool operator==(a, a) = default")
write(backend/host/good.hpp "#include <gpushare/backend/host/a.hpp>\n#include <gpushare/sm_split.hpp>")
write(placement/good.hpp "#include <gpushare/partition/a.hpp>\n#include <gpushare/placement/detail/a.hpp>")
write(compute/policies/good.hpp "#include <gpushare/compute/detail/a.hpp>\n#include <gpushare/detail/a.hpp>")
string(REPEAT "//\n" 500 any_length)
write(memory/detail/long.hpp "${any_length}")
write(gpushare.cuh "#include <gpushare/gpushare.hpp>\n#include <gpushare/backend/cuda/a.cuh>")

# A forward has no layer.
function(forward path named included)
    file(WRITE ${SCRATCH}/${path} "// SPDX-License-Identifier: Apache-2.0\n"
                                  "// Moved: include <gpushare/${named}> instead. This path stays until 0.3.\n"
                                  "#pragma once\n\n#include <gpushare/${included}>\n")
endfunction()
forward(tenant/moved.hpp placement/a.hpp placement/a.hpp)

bad_include(units.hpp <gpushare/error.hpp> "not from units")
bad_include(concepts.hpp <gpushare/sm_split.hpp> "not from concepts")
bad_include(sm_split.hpp <gpushare/detail/a.hpp> "not from sm_split")
bad_include(detail/detour.hpp <gpushare/compute/a.hpp> "not from detail")
bad_include(memory/sibling.hpp <gpushare/compute/a.hpp> "not from memory")
bad_include(compute/backend.hpp <gpushare/backend/host/a.hpp> "not from compute")
bad_include(partition/upwards.hpp <gpushare/tenant/a.hpp> "not from partition")
bad_include(placement/upwards.hpp <gpushare/serving/a.hpp> "not from placement")
bad_include(tenant/extra.hpp <gpushare/placement/a.hpp> "not from tenant")
bad_include(tenant/of_moved.hpp <gpushare/tenant/moved.hpp> "it has moved, and only forwards from there")
bad_include(tenant/stranger.hpp <gpushare/memory/detail/a.hpp> "internal to memory")
bad_include(placement/stranger.hpp <gpushare/tenant/detail/a.hpp> "internal to tenant")
bad_include(backend/cuda/detail/stranger.hpp <gpushare/backend/host/detail/a.hpp> "not from backend/cuda")
bad_include(backend/cuda/host.hpp <gpushare/backend/host/a.hpp> "not from backend/cuda")
bad_include(backend/host/cuda.hpp <gpushare/backend/cuda/a.hpp> "not from backend/host")
bad_include(collective/umbrella.hpp <gpushare/gpushare.hpp> "not from collective")
bad_include(backend/host/primitive.hpp <gpushare/memory/a.hpp> "not from backend/host")
bad_include(backend/host/tenant.hpp <gpushare/tenant/a.hpp> "not from backend/host")
bad_include(backend/sim/observe.hpp <gpushare/observe/a.hpp> "not from backend/sim")
bad_include(backend/sim/interop.hpp <gpushare/interop/a.hpp> "not from backend/sim")
bad_include(tenant/backend.hpp <gpushare/backend/host/a.hpp> "not from tenant")
bad_include(tenant/upwards.hpp <gpushare/observe/a.hpp> "not from tenant")
bad_include(interop/nccl.hpp <gpushare/gradient/mpi.hpp> "not from interop")
bad_include(interop/gradients.hpp <gpushare/gradient/a.hpp> "not from interop")
bad_include(observe/interop.hpp <gpushare/interop/a.hpp> "not from observe")
bad_include(gpushare.hpp <gpushare/backend/cuda/a.hpp> "the plain umbrella needs no CUDA")
bad_include(gpushare/extra.hpp <gpushare/placement/a.hpp> "not from gpushare")
bad_include(memory/cuda.hpp <gpushare/memory/a.cuh> "a .hpp must not need nvcc")
bad_include(memory/range.hpp <range/v3/all.hpp> "range-v3 belongs to interop")
bad_include(memory/relative.hpp "\"a.hpp\"" "write #include <...> from the root")
bad_include(memory/computed.hpp HEADER "write #include <...> from the root")
bad_include(memory/dots.hpp <gpushare/memory/../compute/a.hpp> "write the path without dots")
bad(memory/found.hpp "#if __has_include(<x>)\n#endif" "__has_include: layouts must not depend on which headers are found")
bad(serving/bodies.hpp "#if GPUSHARE_BODIES\n#endif" "GPUSHARE_BODIES: the library of gpushare::compiled has no extras")
bad(gradient/mpi/found.hpp "#if __has_include(<x>)\n#endif" "__has_include: layouts must not depend on which headers are found")
set(unequal "operator<=>(a, a) = default")
bad(memory/unequal.hpp "auto ${unequal}\nbool operator==(b, b) = default"
    "${unequal}: write out operator==(a, a) = default, too: nvcc 13 loses an implicit one")
bad(memory/short_form.hpp "namespace gpushare::inline GPUSHARE_ABI {"
    "write namespace gpushare { inline namespace GPUSHARE_ABI {: ctags and others don't read the short form")
bad(stray.hpp "" "in no known layer: add it to layers.cmake")
bad(strange/a.hpp "" "in no known layer: add it to layers.cmake")
bad(tenant/elsewhere.hpp "" "a forward includes the header that it names, and has nothing else")
forward(tenant/elsewhere.hpp memory/a.hpp memory/b.hpp)
bad(tenant/more.hpp "" "a forward includes the header that it names, and has nothing else")
forward(tenant/more.hpp memory/a.hpp "memory/a.hpp>\n#include <gpushare/memory/b.hpp")
bad(memory/licence.hpp "" "the first line is not the SPDX line")
file(WRITE ${SCRATCH}/memory/licence.hpp "\n#pragma once\n")
bad(memory/once.hpp "" "no #pragma once")
file(WRITE ${SCRATCH}/memory/once.hpp "// SPDX-License-Identifier: Apache-2.0\n")

execute_process(
    COMMAND ${CMAKE_COMMAND} -DROOT=${SCRATCH} -DPAGE=${SCRATCH}/page.md -DLAYERS=${SCRATCH}/layers.cmake
            -P ${CMAKE_CURRENT_LIST_DIR}/check_headers.cmake
    RESULT_VARIABLE result
    ERROR_VARIABLE output)
string(REGEX REPLACE "CMake Error at .*" "" output "${output}")
string(STRIP "${output}" reported)
string(REPLACE "\n" ";" reported "${reported}")
list(SORT expected)
list(SORT reported)
if(result EQUAL 0 OR NOT reported STREQUAL expected)
    list(JOIN expected "\n" expected)
    list(JOIN reported "\n" reported)
    message(FATAL_ERROR "expected:\n${expected}\n\nreported:\n${reported}")
endif()
