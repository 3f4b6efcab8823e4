# SPDX-License-Identifier: Apache-2.0
# Checks what a compiler doesn't: which layer includes which, and the form of a header.
#
#   cmake -DROOT=include/gpushare -P check_headers.cmake
#
# Prints a line per violation and fails if there is one.
cmake_minimum_required(VERSION 3.25)

# The layers, lowest first. A layer is a directory, or a header of the top directory by its name; it includes what
# its line lists and nothing else. The four primitives know neither each other nor a backend, and no backend
# knows who runs on it.
set(base config version units error concepts gang)
set(primitives memory compute partition collective)
set(may_include_config)
set(may_include_version config)
set(may_include_units config version)
set(may_include_error config version units)
set(may_include_concepts config version units error)
set(may_include_gang config version units error concepts)
set(may_include_detail ${base} detail)
foreach(primitive IN LISTS primitives)
    set(may_include_${primitive} ${base} detail ${primitive})
endforeach()
set(may_include_backend ${base} detail backend)
set(may_include_tenant ${base} detail ${primitives} tenant)
set(may_include_observe ${base} detail ${primitives} tenant observe)
set(may_include_interop ${base} detail ${primitives} tenant interop)
set(may_include_gpushare ${base} detail ${primitives} tenant observe backend)  # the umbrellas
set(layers ${base} detail ${primitives} backend tenant observe interop gpushare)

set(line_limit 400)

# config.hpp -> config, memory/quota.hpp -> memory, backend/host/node.hpp -> backend
function(layer_of path result)
    string(REGEX REPLACE "(/.*|\\.cuh|\\.hpp)$" "" layer ${path})
    set(${result} ${layer} PARENT_SCOPE)
endfunction()

function(violation text)
    set_property(GLOBAL APPEND PROPERTY violations "${text}")
endfunction()

function(check_include path layer target)
    if(NOT target MATCHES "^<.*>$")
        violation("${path}: includes ${target}: write #include <...> from the root")
        return()
    elseif(target MATCHES "\\.\\.?/")
        violation("${path}: includes ${target}: write the path without dots")
        return()
    elseif(target MATCHES "^<range/v3/" AND NOT layer STREQUAL interop)
        violation("${path}: includes ${target}: range-v3 belongs to interop")
        return()
    elseif(NOT target MATCHES "^<gpushare/(.*)>$")
        return()
    endif()

    set(included ${CMAKE_MATCH_1})
    layer_of(${included} included_layer)
    if(path MATCHES "\\.hpp$" AND included MATCHES "\\.cuh$")
        violation("${path}: includes ${target}: a .hpp must not need nvcc")
    elseif(path STREQUAL "gpushare.cuh" AND included STREQUAL "gpushare.hpp")
        # The CUDA umbrella adds to the plain one.
    elseif(NOT included_layer IN_LIST may_include_${layer})
        violation("${path}: includes ${target}: not from ${layer}")
    elseif(path STREQUAL "gpushare.hpp" AND included MATCHES "^backend/cuda/")
        violation("${path}: includes ${target}: the plain umbrella needs no CUDA")
    endif()
endfunction()

function(check_header path)
    layer_of(${path} layer)
    if(NOT layer IN_LIST layers)
        violation("${path}: in no known layer: add it to check_headers.cmake")
        return()
    endif()

    file(READ ${ROOT}/${path} text)
    if(NOT text MATCHES "^// SPDX-License-Identifier: Apache-2\\.0\n")
        violation("${path}: the first line is not the SPDX line")
    endif()
    if(NOT text MATCHES "\n#pragma once\n")
        violation("${path}: no #pragma once")
    endif()
    string(REGEX REPLACE "[^\n]" "" newlines "${text}")
    string(LENGTH "${newlines}" lines)
    if(lines GREATER line_limit)
        violation("${path}: ${lines} lines, more than ${line_limit}")
    endif()
    string(REGEX REPLACE "//[^\n]*" "" code "${text}")
    if(code MATCHES "__has_include" AND NOT layer STREQUAL interop)
        violation("${path}: __has_include: layouts must not depend on which headers are found")
    endif()

    file(STRINGS ${ROOT}/${path} includes REGEX "^[ \t]*#[ \t]*include")
    foreach(line IN LISTS includes)
        string(REGEX REPLACE "^[ \t]*#[ \t]*include(_next)?[ \t]*(<[^>]*>|[^ \t]*).*$" "\\2" target "${line}")
        check_include(${path} ${layer} "${target}")
    endforeach()
endfunction()

file(GLOB_RECURSE headers RELATIVE ${ROOT} ${ROOT}/*.hpp ${ROOT}/*.cuh)
if(NOT headers)
    message(FATAL_ERROR "no headers in '${ROOT}'")
endif()
foreach(header IN LISTS headers)
    check_header(${header})
endforeach()

get_property(violations GLOBAL PROPERTY violations)
foreach(line IN LISTS violations)
    message("${line}")
endforeach()
list(LENGTH violations count)
if(count GREATER 0)
    message(FATAL_ERROR "violations: ${count}")
endif()
