# SPDX-License-Identifier: Apache-2.0
# gpushare_development: what our own tests, examples and benchmarks are compiled with. Never exported.
add_library(gpushare_development INTERFACE)
target_link_libraries(gpushare_development INTERFACE gpushare::gpushare)
target_compile_options(
    gpushare_development INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                                   $<$<BOOL:${GPUSHARE_WARNINGS_AS_ERRORS}>:-Werror>
                                   # no path of the checkout in what is compiled: ccache finds it from any
                                   -ffile-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}/=)

# By -Og a file compiles in two thirds of the time. Targets with the property GPUSHARE_OWN_LEVEL
# choose their own level: what must be fast, because tests wait for it, and what is tested as the
# optimiser leaves it. With -Og g++ 12 takes range-v3's variants and libstdc++'s stop_source for
# uninitialised; the builds by -O2 have the warning.
option(GPUSHARE_TESTS_COMPILE_QUICKLY "Compile our own programs with -Og, but for those of the optimiser" OFF)
if(GPUSHARE_TESTS_COMPILE_QUICKLY AND NOT GPUSHARE_CUDA_FOR_A_DEVICE)  # figures of a device are of -O2
    target_compile_options(
        gpushare_development INTERFACE
        $<$<NOT:$<BOOL:$<TARGET_PROPERTY:GPUSHARE_OWN_LEVEL>>>:-Og;$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized>>)
endif()

# g++ spends a seventh of its time on collecting garbage, and makes the same objects without. That takes a third more memory,
# up to 3 GB a file of tests.
cmake_host_system_information(RESULT memory_mb QUERY TOTAL_PHYSICAL_MEMORY)
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
math(EXPR memory_mb_per_core "${memory_mb} / ${cores}")
if(memory_mb_per_core GREATER 4000)
    target_compile_options(gpushare_development INTERFACE "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=2000000>")
endif()

# Data sets that may lie beside the checkout. Whoever uses them does without where the macro is missing. A target of its own, since
# what is compiled with a path of the checkout can't be shared with another one by ccache.
add_library(shared_data INTERFACE)
cmake_path(SET shared_data NORMALIZE ${CMAKE_CURRENT_SOURCE_DIR}/../shared/data)
if(IS_DIRECTORY ${shared_data})
    target_compile_definitions(shared_data INTERFACE GPUSHARE_SHARED_DATA="${shared_data}")
endif()

# The toolkit that gpushare::cuda_runtime comes from has nvcc, for which no language is enabled: cmake/cuda.cmake calls it.
if(TARGET gpushare::cuda_runtime AND NOT CMAKE_CUDA_COMPILER AND CUDAToolkit_NVCC_EXECUTABLE)
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
endif()

# What benchmarks say that they were built with.
string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
string(STRIP "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${build_type}}" GPUSHARE_BENCH_FLAGS)
