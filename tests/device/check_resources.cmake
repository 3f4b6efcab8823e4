# SPDX-License-Identifier: Apache-2.0
# Checks what each kernel takes on each architecture, by the assembler's report: no memory for spilled registers or
# arrays, and no more registers than the committed table says.
#
#   cmake -DREPORT=report.txt -DTABLE=resources.txt [-DMOST=128] [-DUPDATE=ON] -P check_resources.cmake
#
# MOST is what none of them may take, whatever the table says.
# UPDATE writes the table anew: after a change that is worth more registers, or for another version of nvcc.
cmake_minimum_required(VERSION 3.25)
find_program(CXXFILT c++filt REQUIRED)

# "name arch registers" of each kernel of the report
set(measured "")
set(wrong "")
file(STRINGS ${REPORT} lines REGEX "Compiling entry|stack frame|Used [0-9]+ registers")
foreach(line IN LISTS lines)
    if(line MATCHES "entry function '([^']+)' for 'sm_([0-9]+)'")
        set(architecture ${CMAKE_MATCH_2})
        execute_process(COMMAND ${CXXFILT} ${CMAKE_MATCH_1} OUTPUT_VARIABLE name OUTPUT_STRIP_TRAILING_WHITESPACE)
        # void gpushare::v0_2_0::cuda::detail::run<KERNEL>(KERNEL): the kernel, without spaces and namespaces
        string(REGEX REPLACE "^.*detail::run<(.*)>\\(.*$" "\\1" name "${name}")
        string(REGEX REPLACE "[a-z0-9_]+::| " "" name "${name}")
    elseif(line MATCHES "([0-9]+) bytes stack frame, ([0-9]+) bytes spill stores, ([0-9]+) bytes spill loads")
        if(NOT "${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3}" STREQUAL "000")
            string(APPEND wrong "${name} on sm_${architecture}: local memory: ${line}\n")
        endif()
    elseif(line MATCHES "Used ([0-9]+) registers")
        list(APPEND measured "${name} ${architecture} ${CMAKE_MATCH_1}")
    endif()
endforeach()
list(SORT measured COMPARE NATURAL)

if(UPDATE)
    set(table "# Registers a thread of each kernel takes, at most: KERNEL ARCHITECTURE REGISTERS. Written by\n")
    string(APPEND table "# check_resources.cmake with nvcc 13.0.88.\n")
    list(JOIN measured "\n" rows)
    file(WRITE ${TABLE} "${table}${rows}\n")
endif()

file(STRINGS ${TABLE} allowed REGEX "^[^#]")
set(missing ${allowed})
foreach(row IN LISTS measured)
    string(REGEX MATCH "^(.* [0-9]+) ([0-9]+)$" ignored "${row}")
    set(key ${CMAKE_MATCH_1})
    set(registers ${CMAKE_MATCH_2})
    set(limit "")
    foreach(line IN LISTS allowed)
        string(FIND "${line}" "${key} " at)
        if(at EQUAL 0)
            string(REGEX REPLACE "^.* " "" limit "${line}")
            list(REMOVE_ITEM missing "${line}")
        endif()
    endforeach()
    if(limit STREQUAL "")
        string(APPEND wrong "${key}: not in the table\n")
    elseif(DEFINED MOST AND registers GREATER MOST)
        string(APPEND wrong "${key}: ${registers} registers, more than the ${MOST} that there are\n")
    elseif(registers GREATER limit)
        string(APPEND wrong "${key}: ${registers} registers, more than ${limit}\n")
    endif()
endforeach()
foreach(line IN LISTS missing)
    string(APPEND wrong "${line}: in the table, but there is no such kernel\n")
endforeach()
if(wrong)
    message(FATAL_ERROR "${wrong}")
endif()
