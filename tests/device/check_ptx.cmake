# SPDX-License-Identifier: Apache-2.0
# Checks instructions in the PTX of kernels. Every kernel whose mangled name matches ENTRY must contain what each regular
# expression of NEEDS matches and nothing that FORBIDS matches; each file must have such a kernel.
#
#   cmake -DPTX=FILE;... -DENTRY=REGEX -DNEEDS=REGEX;... [-DFORBIDS=REGEX;...] -P check_ptx.cmake
cmake_minimum_required(VERSION 3.25)

set(wrong "")
foreach(file IN LISTS PTX)
    file(READ ${file} text)
    string(REGEX REPLACE "[][;]" "," text "${text}")  # what CMake's lists would trip over
    set(found FALSE)
    string(REPLACE ".entry " ";" entries "${text}")
    list(POP_FRONT entries)
    foreach(entry IN LISTS entries)
        string(REGEX MATCH "^[A-Za-z0-9_]+" name "${entry}")
        if(NOT name MATCHES "${ENTRY}")
            continue()
        endif()
        set(found TRUE)
        foreach(regex IN LISTS NEEDS)
            if(NOT entry MATCHES "${regex}")
                string(APPEND wrong "${file}: ${name}: no '${regex}'\n")
            endif()
        endforeach()
        foreach(regex IN LISTS FORBIDS)
            if(entry MATCHES "${regex}")
                string(APPEND wrong "${file}: ${name}: '${CMAKE_MATCH_0}' is forbidden\n")
            endif()
        endforeach()
    endforeach()
    if(NOT found)
        string(APPEND wrong "${file}: no kernel '${ENTRY}'\n")
    endif()
endforeach()
if(wrong OR NOT PTX)
    message(FATAL_ERROR "${wrong}")
endif()
