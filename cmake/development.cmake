# SPDX-License-Identifier: Apache-2.0
# gpushare_development: what our own tests, examples and benchmarks are compiled with. Never exported.
add_library(gpushare_development INTERFACE)
target_link_libraries(gpushare_development INTERFACE gpushare::gpushare)
target_compile_options(
    gpushare_development INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                                   $<$<BOOL:${GPUSHARE_WARNINGS_AS_ERRORS}>:-Werror>
                                   # no path of the checkout in what is compiled: ccache finds it from any
                                   -ffile-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}/=)

# Data sets that may lie beside the checkout. Whoever uses them does without where the macro is missing. A target of its own, since
# what is compiled with a path of the checkout can't be shared with another one by ccache.
add_library(shared_data INTERFACE)
cmake_path(SET shared_data NORMALIZE ${CMAKE_CURRENT_SOURCE_DIR}/../shared/data)
if(IS_DIRECTORY ${shared_data})
    target_compile_definitions(shared_data INTERFACE GPUSHARE_SHARED_DATA="${shared_data}")
endif()

# An executor of PTX, for tests: kernels run on the CPU as nvcc compiled them.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/support/ptx/*.cpp)
list(FILTER sources EXCLUDE REGEX "/runtime.cpp$")
add_library(ptx_executor STATIC EXCLUDE_FROM_ALL ${sources})
target_link_libraries(ptx_executor PUBLIC gpushare_development)
target_include_directories(ptx_executor PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/tests)

# The toolkit that gpushare::cuda_runtime comes from: its nvcc, for which no language is enabled (cmake/cuda.cmake calls
# it), and a stand-in for its libcudart, with which code on CUDA runs where there is no device.
if(TARGET gpushare::cuda_runtime)
    if(NOT CMAKE_CUDA_COMPILER AND CUDAToolkit_NVCC_EXECUTABLE)
        set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
    endif()

    file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/support/cuda_standin/*.cpp)
    add_library(cuda_standin STATIC EXCLUDE_FROM_ALL ${sources})
    target_link_libraries(cuda_standin PUBLIC gpushare_development)
    target_include_directories(cuda_standin PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/tests)
    foreach(part IN ITEMS gpushare::cuda_runtime CUDA::toolkit CUDA::cupti)
        if(NOT TARGET ${part})
            message(STATUS "Without CUPTI: the stand-in for CUDA looks for cupti.h beside the runtime's headers")
            continue()
        endif()
        get_target_property(directories ${part} INTERFACE_INCLUDE_DIRECTORIES)
        target_include_directories(cuda_standin SYSTEM PUBLIC ${directories})
    endforeach()

    # The executor behind the stand-in, for programs with kernels in them: see gpushare_run_as_compiled.
    add_library(ptx_runtime STATIC EXCLUDE_FROM_ALL ${CMAKE_CURRENT_SOURCE_DIR}/tests/support/ptx/runtime.cpp)
    target_link_libraries(ptx_runtime PUBLIC cuda_standin ptx_executor)
endif()

# What benchmarks say that they were built with.
string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
string(STRIP "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${build_type}}" GPUSHARE_BENCH_FLAGS)
