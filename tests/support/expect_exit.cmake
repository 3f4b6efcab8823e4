# SPDX-License-Identifier: Apache-2.0
# Passes only if a command ends as it should and says what it should: its output, both streams, has to match a regular
# expression of CMake's kind. Without CODE it has to fail, with any exit code but 0.
#
#   cmake [-DCODE=2] -DPATTERN=REGEX      -P expect_exit.cmake -- COMMAND [ARG...]
#   cmake [-DCODE=2] -DPATTERN_FROM=FILE  -P expect_exit.cmake -- COMMAND [ARG...]    # a line "// must fail: REGEX"
#
# With a line "// at most N lines" in FILE, its output may have no more: what is short is read.
if(PATTERN_FROM)
    file(STRINGS ${PATTERN_FROM} line REGEX "^// at most [0-9]+ lines" LIMIT_COUNT 1)
    string(REGEX REPLACE "^// at most ([0-9]+) lines.*" "\\1" most_lines "${line}")
    file(STRINGS ${PATTERN_FROM} line REGEX "^// must fail: " LIMIT_COUNT 1)
    string(REPLACE "// must fail: " "" PATTERN "${line}")
endif()
if(PATTERN STREQUAL "")
    message(FATAL_ERROR "${PATTERN_FROM}: no line '// must fail: REGEX'")
endif()

math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE ${last})
    if(DEFINED command)
        list(APPEND command "${CMAKE_ARGV${i}}")
    elseif(CMAKE_ARGV${i} STREQUAL "--")
        set(command "")
    endif()
endforeach()

execute_process(COMMAND ${command} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
string(REGEX MATCHALL "\n" breaks "${output}")
list(LENGTH breaks lines)
if(most_lines AND lines GREATER most_lines)
    message(FATAL_ERROR "${lines} lines, and at most ${most_lines} are read\n${output}")
endif()
# CMake breaks its messages into lines, at words that depend on the length of paths.
string(REGEX REPLACE "[ \n]+" " " text "${output}")
if(DEFINED CODE AND NOT result STREQUAL CODE)
    message(FATAL_ERROR "exit code ${result} instead of ${CODE}\n${output}")
elseif(NOT DEFINED CODE AND result EQUAL 0)
    message(FATAL_ERROR "succeeded, but should have failed with: ${PATTERN}\n${output}")
elseif(NOT text MATCHES "${PATTERN}")
    message(FATAL_ERROR "the output does not match: ${PATTERN}\n${output}")
endif()
