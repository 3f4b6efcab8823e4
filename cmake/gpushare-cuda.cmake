# SPDX-License-Identifier: Apache-2.0
# The targets that need a CUDA toolkit, for the build tree and the installed package alike:
#
#   gpushare::cuda_runtime   gpushare::gpushare, the CUDA runtime and CCCL's headers: for plain C++, no nvcc
#   gpushare::cuda           gpushare::cuda_runtime and the flags that our headers need from nvcc
#   gpushare::cuda_launch_gate   gpushare::cuda_runtime and CUPTI, where the toolkit has it: for backend/cuda/launch_gate.hpp
#
# gpushare_find_cuda(REASON) defines them, or sets REASON to why they can't be had. gpushare::gpushare is the same
# either way.
function(gpushare_find_cuda reason)
    set(${reason} "" PARENT_SCOPE)
    if(TARGET gpushare::cuda)
        return()
    endif()

    # As visible as gpushare::gpushare: in a tree that has it as a subdirectory, everywhere.
    get_property(imported TARGET gpushare::gpushare PROPERTY IMPORTED)
    set(scope "")
    if(NOT imported)
        set(scope GLOBAL)
        set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
    endif()

    # CMake 3.25.1 marks a library as deprecated that CUDA 13 no longer has, and fails, in projects that ask for 3.25.
    if(CMAKE_VERSION VERSION_LESS 3.26)
        set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
    endif()
    find_package(CUDAToolkit 13.0 QUIET)
    if(NOT CUDAToolkit_FOUND)
        set(found "")
        if(CUDAToolkit_VERSION)
            set(found ", and CUDA ${CUDAToolkit_VERSION} is too old")
        endif()
        set(${reason} "no CUDA toolkit 13.0 or newer was found (set CUDAToolkit_ROOT to where it is)${found}" PARENT_SCOPE)
        return()
    elseif(NOT TARGET CUDA::cudart)
        set(${reason} "the CUDA toolkit ${CUDAToolkit_VERSION} has no libcudart to link with" PARENT_SCOPE)
        return()
    endif()

    add_library(gpushare::cuda_runtime INTERFACE IMPORTED ${scope})
    target_link_libraries(gpushare::cuda_runtime INTERFACE gpushare::gpushare CUDA::cudart)
    # libcu++, Thrust and CUB moved there in CUDA 13, and CMake 3.25 looks above.
    foreach(directory IN LISTS CUDAToolkit_INCLUDE_DIRS)
        if(EXISTS ${directory}/cccl/cuda/std/version)
            target_include_directories(gpushare::cuda_runtime INTERFACE ${directory}/cccl)
        endif()
    endforeach()

    if(TARGET CUDA::cupti)
        add_library(gpushare::cuda_launch_gate INTERFACE IMPORTED ${scope})
        target_link_libraries(gpushare::cuda_launch_gate INTERFACE gpushare::cuda_runtime CUDA::cupti)
    endif()

    add_library(gpushare::cuda INTERFACE IMPORTED ${scope})
    target_link_libraries(gpushare::cuda INTERFACE gpushare::cuda_runtime)
    # A flag instead of the feature cuda_std_20, which CMake 3.25 doesn't know of this compiler.
    target_compile_options(gpushare::cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
endfunction()
