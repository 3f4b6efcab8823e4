# SPDX-License-Identifier: Apache-2.0
# Passes only if a command fails and says why: its output has to match a regular expression of CMake's kind.
#
#   cmake -DPATTERN=REGEX      -P expect_failure.cmake -- COMMAND [ARG...]
#   cmake -DPATTERN_FROM=FILE  -P expect_failure.cmake -- COMMAND [ARG...]    # FILE has a line "// must fail: REGEX"
if(PATTERN_FROM)
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
# CMake breaks its messages into lines, at words that depend on the length of paths.
string(REGEX REPLACE "[ \n]+" " " text "${output}")
if(result EQUAL 0)
    message(FATAL_ERROR "succeeded, but should have failed with: ${PATTERN}\n${output}")
elseif(NOT text MATCHES "${PATTERN}")
    message(FATAL_ERROR "failed, but not with: ${PATTERN}\n${output}")
endif()
