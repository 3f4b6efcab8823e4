# SPDX-License-Identifier: Apache-2.0
# For rehearsals: each figure that a program printed has to have a row in bench/README.md.

# check_rows(OUTPUT README LEAST [ENDINGS]): at least LEAST figures, each with a row by its name or by the name without an ending
# that matches ENDINGS. A planted fault has the row of its figure. A figure is void where the rehearsal's times make it so.
function(check_rows output readme least)
    file(READ ${readme} rows)
    string(FIND "${rows}" "\n## What makes a figure fail" end)  # a table that says nothing of what a figure is
    string(SUBSTRING "${rows}" 0 ${end} rows)
    string(REGEX MATCHALL "(figure|void) gpu\\.[a-z0-9_]+" figures "${output}")
    list(LENGTH figures found)
    if(found LESS least)
        message(FATAL_ERROR "${found} figures, which is too few:\n${output}")
    endif()
    foreach(figure IN LISTS figures)
        string(REGEX REPLACE "^(figure|void) |_with_a_planted_fault$" "" figure "${figure}")
        set(without "${figure}")
        if(ARGN)
            string(REGEX REPLACE "${ARGN}" "" without "${figure}")
        endif()
        string(FIND "${rows}" "`${figure}`" row)
        string(FIND "${rows}" "`${without}`" row_without)
        if(row EQUAL -1 AND row_without EQUAL -1)
            message(FATAL_ERROR "${figure} has no row in ${readme}")
        endif()
    endforeach()
endfunction()
