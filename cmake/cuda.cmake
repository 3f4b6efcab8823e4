# SPDX-License-Identifier: Apache-2.0
# How our own tests compile .cu files: one call of nvcc per file for all architectures, which leaves the object, the PTX
# of each architecture and the assembler's report on registers. Needs CMAKE_CUDA_COMPILER.

# Every machine that the library is meant for: A100, H100 and H200, B200, RTX 50 and RTX PRO.
set(GPUSHARE_CUDA_ARCHITECTURES 80 90 100 120)
# The architectures that PTX is generated for. Newer ones assemble the PTX of the last: our code doesn't differ between them, and
# generating PTX is most of what nvcc does. Two exceptions: kernels.cu, which has a kernel of each kind, and `./dev gpu`, which
# measures.
set(GPUSHARE_CUDA_FRONTS 80 90 CACHE STRING "The architectures that tests and figures generate PTX for")

set(cuda_flags -std=c++20 -O2 -ccbin=${CMAKE_CXX_COMPILER} -Xcompiler=-Wall,-Wextra,-Wshadow)
if(GPUSHARE_WARNINGS_AS_ERRORS)
    list(APPEND cuda_flags -Werror=all-warnings)
endif()
set(cuda_includes -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/tests)

# gpushare_compile_cuda(NAME SOURCE [ARCHITECTURES 90...] [FRONTS 90...] [FLAGS ...] [PTX_ONLY]) sets
#   NAME_object   the object file
#   NAME_report   what ptxas says about each kernel on each architecture
#   NAME_ptx      the PTX files, one per front
# FRONTS are the architectures that PTX is generated for; by default those of GPUSHARE_CUDA_FRONTS, or ARCHITECTURES where that
# is given. The object has the PTX of the last one, too. With PTX_ONLY nothing is assembled, for programs that only the executor runs.
function(gpushare_compile_cuda name source)
    cmake_parse_arguments(PARSE_ARGV 2 arg "PTX_ONLY" "" "ARCHITECTURES;FRONTS;FLAGS")
    if(NOT arg_FRONTS)
        set(arg_FRONTS ${GPUSHARE_CUDA_FRONTS})
        if(arg_ARCHITECTURES)
            set(arg_FRONTS ${arg_ARCHITECTURES})
        endif()
    endif()
    if(NOT arg_ARCHITECTURES)
        set(arg_ARCHITECTURES ${GPUSHARE_CUDA_ARCHITECTURES})
    endif()
    cmake_path(ABSOLUTE_PATH source)
    cmake_path(GET source STEM stem)
    set(directory ${CMAKE_CURRENT_BINARY_DIR}/${name}.nvcc)
    file(MAKE_DIRECTORY ${directory})

    set(targets)
    set(ptx)
    list(LENGTH arg_FRONTS count)
    while(arg_FRONTS)
        list(POP_FRONT arg_FRONTS front)
        if(count GREATER 1)
            list(APPEND ptx ${directory}/${stem}.compute_${front}.ptx)
        else()
            list(APPEND ptx ${directory}/${stem}.ptx)
        endif()
        set(next 1000)
        if(arg_FRONTS)
            list(GET arg_FRONTS 0 next)
        endif()
        set(codes)
        foreach(architecture IN LISTS arg_ARCHITECTURES)
            if(NOT architecture LESS front AND architecture LESS next)
                list(APPEND codes sm_${architecture})
            endif()
        endforeach()
        if(arg_PTX_ONLY)
            set(codes compute_${front})
        elseif(NOT arg_FRONTS)
            list(APPEND codes compute_${front})
        endif()
        list(JOIN codes "," codes)
        list(APPEND targets "-gencode=arch=compute_${front},code=[${codes}]")
    endwhile()

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
