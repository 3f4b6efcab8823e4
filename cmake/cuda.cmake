# SPDX-License-Identifier: Apache-2.0
# How our own tests compile .cu files: one call of nvcc per file for all architectures, which leaves the object, the PTX
# of each architecture and the assembler's report on registers. Needs CMAKE_CUDA_COMPILER.

# Every machine that the library is meant for: A100, H100 and H200, B200, RTX 50 and RTX PRO. The last as PTX, too.
set(GPUSHARE_CUDA_ARCHITECTURES 80 90 100 120)

set(cuda_flags -std=c++20 -O2 -ccbin=${CMAKE_CXX_COMPILER} -Xcompiler=-Wall,-Wextra,-Wshadow)
if(GPUSHARE_WARNINGS_AS_ERRORS)
    list(APPEND cuda_flags -Werror=all-warnings)
endif()
set(cuda_includes -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/tests)

# gpushare_compile_cuda(NAME SOURCE [ARCHITECTURES 90...] [FLAGS ...] [PTX_ONLY]) sets
#   NAME_object   the object file
#   NAME_report   what ptxas says about each kernel on each architecture
#   NAME_ptx      the PTX files, one per architecture
# With PTX_ONLY nothing is assembled, for programs that only the executor runs.
function(gpushare_compile_cuda name source)
    cmake_parse_arguments(PARSE_ARGV 2 arg "PTX_ONLY" "" "ARCHITECTURES;FLAGS")
    if(NOT arg_ARCHITECTURES)
        set(arg_ARCHITECTURES ${GPUSHARE_CUDA_ARCHITECTURES})
    endif()
    cmake_path(ABSOLUTE_PATH source)
    cmake_path(GET source STEM stem)
    set(directory ${CMAKE_CURRENT_BINARY_DIR}/${name}.nvcc)
    file(MAKE_DIRECTORY ${directory})

    list(GET arg_ARCHITECTURES -1 newest)
    set(targets)
    set(ptx)
    foreach(architecture IN LISTS arg_ARCHITECTURES)
        if(arg_PTX_ONLY)
            list(APPEND targets -gencode=arch=compute_${architecture},code=compute_${architecture})
        elseif(architecture EQUAL newest)
            list(APPEND targets -gencode=arch=compute_${newest},code=[sm_${newest},compute_${newest}])
        else()
            list(APPEND targets -gencode=arch=compute_${architecture},code=sm_${architecture})
        endif()
        list(LENGTH arg_ARCHITECTURES count)
        if(count GREATER 1)
            list(APPEND ptx ${directory}/${stem}.compute_${architecture}.ptx)
        else()
            list(APPEND ptx ${directory}/${stem}.ptx)
        endif()
    endforeach()

    set(object ${directory}/${name}.o)
    add_custom_command(
        OUTPUT ${object} ${directory}/report.txt ${ptx}
        COMMAND sh ${PROJECT_SOURCE_DIR}/cmake/run_nvcc.sh ${directory} ${CMAKE_CUDA_COMPILER} ${cuda_flags} ${arg_FLAGS}
                ${cuda_includes} ${targets} -Xptxas=-v -MMD -MF ${object}.d -MT ${object} -c ${source} -o ${object}
        DEPENDS ${source} ${PROJECT_SOURCE_DIR}/cmake/run_nvcc.sh
        DEPFILE ${object}.d
        COMMENT "Compiling ${name} with nvcc for ${arg_ARCHITECTURES}"
        VERBATIM)
    set(${name}_object ${object} PARENT_SCOPE)
    set(${name}_report ${directory}/report.txt PARENT_SCOPE)
    set(${name}_ptx ${ptx} PARENT_SCOPE)
endfunction()

# gpushare_run_as_compiled(TARGET PTX...): links the program, which has the objects of these PTX files in it, to run their
# kernels on the CPU, one architecture of each. sm_90 where there is a choice: others differ in dialect only.
function(gpushare_run_as_compiled target)
    set(text "extern const char* const ptx_files[];\nconst char* const ptx_files[] = {")
    foreach(file IN LISTS ARGN)
        string(APPEND text "\n    \"${file}\",")
    endforeach()
    string(APPEND text "\n    nullptr};\n")
    file(CONFIGURE OUTPUT ${target}_ptx.cpp CONTENT "${text}" @ONLY)
    target_sources(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/${target}_ptx.cpp)
    target_link_libraries(${target} PRIVATE ptx_runtime)
endfunction()
