# SPDX-License-Identifier: Apache-2.0
# The compiled targets, which a program links in place of the header-only ones. Nothing else in it changes:
#
#   gpushare::compiled        gpushare::gpushare, and a library with the host backend and with tenancies on it
#   gpushare::compiled_cuda   gpushare::cuda_runtime, gpushare::compiled, and a library with tenancies on CUDA
#
# In this tree they are built where something links them, and always with GPUSHARE_COMPILED, which installs them, too.
function(gpushare_add_compiled name source definition)
    add_library(gpushare_${name} STATIC ${source})
    add_library(gpushare::${name} ALIAS gpushare_${name})
    set_target_properties(gpushare_${name} PROPERTIES EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON)
    if(NOT GPUSHARE_COMPILED)
        set_target_properties(gpushare_${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    endif()
    target_compile_definitions(gpushare_${name} PUBLIC GPUSHARE_COMPILED ${definition})
    target_link_libraries(gpushare_${name} PUBLIC ${ARGN})
    target_compile_options(gpushare_${name} PRIVATE -ffile-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}/=)  # the same wherever it is built
endfunction()

gpushare_add_compiled(compiled cmake/compiled.cpp GPUSHARE_COMPILED_HOST gpushare::gpushare)
if(TARGET gpushare::cuda_runtime)
    gpushare_add_compiled(compiled_cuda cmake/compiled_cuda.cpp GPUSHARE_COMPILED_CUDA gpushare::cuda_runtime
                          gpushare_compiled)
endif()
