# SPDX-License-Identifier: Apache-2.0
# gradient/, placement/, serving/ and graph/ are libraries on top of the core: <gpushare/AREA/all.hpp> includes all headers of
# its folder that need no other library, and nothing else, and gpushare.hpp includes no header of these folders.
#
#   cmake -DCOMPILER=g++ -DINCLUDE=include -P umbrellas.cmake
#
# Prints a line per fault and fails if there is one.
cmake_minimum_required(VERSION 3.25)
set(of_others_gradient mpi nccl torch_gradients)  # headers that need another library
set(of_others_graph onnx)
set(faults)

execute_process(COMMAND ${COMPILER} -std=c++20 -MM -I${INCLUDE} ${INCLUDE}/gpushare/gpushare.hpp
                OUTPUT_VARIABLE core COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "gpushare/[a-z0-9_/]+\\.hpp" core "${core}")
if(NOT "gpushare/tenant/tenancy.hpp" IN_LIST core)
    list(APPEND faults "gpushare.hpp: tenant/tenancy.hpp isn't among what it includes")
endif()

foreach(area IN ITEMS gradient placement serving graph)
    foreach(header IN LISTS core)
        string(REGEX REPLACE "^gpushare/" "" header ${header})
        if(header MATCHES "^${area}/")
            list(APPEND faults "gpushare.hpp: includes ${header}")
        endif()
    endforeach()

    file(GLOB headers RELATIVE ${INCLUDE} ${INCLUDE}/gpushare/${area}/*.hpp)
    set(wanted)
    foreach(header IN LISTS headers)
        file(STRINGS ${INCLUDE}/${header} moved REGEX "^// Moved: include <" LIMIT_COUNT 1)
        cmake_path(GET header STEM name)
        if(NOT moved AND NOT name STREQUAL all AND NOT name IN_LIST of_others_${area})
            list(APPEND wanted "#include <${header}>")
        endif()
    endforeach()
    file(STRINGS ${INCLUDE}/gpushare/${area}/all.hpp found REGEX "^#include ")
    if(NOT wanted STREQUAL found)
        list(JOIN wanted " " wanted)
        list(JOIN found " " found)
        list(APPEND faults "${area}/all.hpp: has ${found} in place of ${wanted}")
    endif()
endforeach()

foreach(fault IN LISTS faults)
    message("${fault}")
endforeach()
if(faults)
    message(FATAL_ERROR "the core and the libraries on top of it are mixed up")
endif()
