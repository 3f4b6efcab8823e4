# SPDX-License-Identifier: Apache-2.0
# Rehearses the experiment with engines: it has to run through, with all strategies, and each of its
# figures has to have a row in bench/README.md, by its name or by the name without "_held", "_native",
# "_plain" or "_acquire".
#
#   cmake -DPROGRAM=gpu_engines_rehearsal -DREADME=bench/README.md -P engines_have_rows.cmake
set(output)
foreach(part IN ITEMS "" --more)
    execute_process(COMMAND ${PROGRAM} --small ${part} RESULT_VARIABLE code OUTPUT_VARIABLE printed ERROR_VARIABLE printed)
    # The words for which a graph waits are never freed, and the stand-in ends with 1 for that.
    if(part)
        if(NOT printed MATCHES "left behind: 1 host allocations")
            message(FATAL_ERROR "no graph has waits in it, and the rehearsal ends with ${code}:\n${printed}")
        endif()
        math(EXPR code "${code} - 1")
    endif()
    if(NOT code EQUAL 0)
        message(FATAL_ERROR "the rehearsal ${part} ends with ${code}:\n${printed}")
    endif()
    string(APPEND output "${printed}")
endforeach()
if(NOT output MATCHES "gated: by waits in streams")
    message(FATAL_ERROR "streams don't wait:\n${output}")
endif()
include(${CMAKE_CURRENT_LIST_DIR}/rows.cmake)
check_rows("${output}" ${README} 150 "_(held|native|plain|acquire)$")
