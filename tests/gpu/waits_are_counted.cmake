# SPDX-License-Identifier: Apache-2.0
# Rehearses the experiment with streams that wait, on so many hardware queues. It has to count the streams that stand
# still: of 32 streams on 8 queues 3 have the same queue as the one that waits, one of its half and two of the other.
# Each figure has to have a row in bench/README.md, by its name without the number of queues.
#
#   cmake -DPROGRAM=gpu_rehearsal -DCONNECTIONS=8|32 -DREADME=bench/README.md -P waits_are_counted.cmake
set(ENV{CUDA_DEVICE_MAX_CONNECTIONS} ${CONNECTIONS})
execute_process(COMMAND ${PROGRAM} waits_on_${CONNECTIONS}_connections --small
                RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT code EQUAL 0)
    message(FATAL_ERROR "the rehearsal ends with ${code}:\n${output}")
endif()

# blocked(STREAMS ALL SAME OTHER)
function(blocked streams all same other)
    foreach(figure IN ITEMS "of_${streams} ${all}" "same_priority_of_${streams} ${same}" "other_priority_of_${streams} ${other}"
                            "same_partition_of_${streams} ${same}" "other_partition_of_${streams} ${other}")
        string(REPLACE " " "_on_${CONNECTIONS}_connections " figure "${figure}")
        string(FIND "${output}" "figure gpu.wait_blocks_${figure} streams\n" found)
        if(found EQUAL -1)
            message(FATAL_ERROR "no 'gpu.wait_blocks_${figure} streams':\n${output}")
        endif()
    endforeach()
endfunction()
blocked(8 0 0 0)
if(CONNECTIONS EQUAL 8)
    blocked(32 3 1 2)
    blocked(100 12 6 6)
else()
    blocked(32 0 0 0)
    blocked(100 3 1 2)
endif()

include(${CMAKE_CURRENT_LIST_DIR}/rows.cmake)
string(REPLACE "_on_${CONNECTIONS}_connections " " " output "${output}")
check_rows("${output}" ${README} 28)
