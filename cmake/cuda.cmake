# SPDX-License-Identifier: Apache-2.0
# How our own tests compile .cu files: one call of nvcc per file for all architectures, which leaves the object, the PTX
# of each architecture and the assembler's report on registers. Needs CMAKE_CUDA_COMPILER.

# Every machine that the library is meant for: A100, H100 and H200, B200, RTX 50 and RTX PRO.
set(GPUSHARE_CUDA_ARCHITECTURES 80 90 100 120)
# `./dev gpu` turns this on, because a device runs and measures what was compiled for it.
option(GPUSHARE_CUDA_FOR_A_DEVICE "Generate PTX for each architecture, and optimise the host code of .cu files" OFF)
# The architectures that PTX is generated for. Newer ones assemble the PTX of the last: our code doesn't differ between them, and
# generating PTX is half of what nvcc does. kernels.cu, which has a kernel of each kind, is always compiled for all.
set(cuda_fronts 80 90)
if(GPUSHARE_CUDA_FOR_A_DEVICE)
    set(cuda_fronts ${GPUSHARE_CUDA_ARCHITECTURES})
endif()

# nvcc's own -O is for the host code. Device code is always optimised.
set(cuda_flags -std=c++20 -O2 -ccbin=${CMAKE_CXX_COMPILER} -Xcompiler=-Wall,-Wextra,-Wshadow)
if(GPUSHARE_TESTS_COMPILE_QUICKLY AND NOT GPUSHARE_CUDA_FOR_A_DEVICE)
    list(TRANSFORM cuda_flags REPLACE "^-O2$" "-O1")
endif()
if(GPUSHARE_WARNINGS_AS_ERRORS)
    list(APPEND cuda_flags -Werror=all-warnings)
endif()
set(cuda_includes -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/tests)

# gpushare_compile_cuda(NAME SOURCE [ARCHITECTURES 90...] [FRONTS 90...] [FLAGS ...] [PTX_ONLY] [FOR_A_DEVICE] [OBJECT_ONLY]) sets
#   NAME_object   the object file
#   NAME_report   what ptxas says about each kernel on each architecture
#   NAME_ptx      the PTX files, one per front
#   NAME_ptx_90    the one for sm_90, which the executor runs
# FRONTS are the architectures that PTX is generated for; by default those of cuda_fronts, or ARCHITECTURES where that is given.
# The object has the PTX of the last one, too. With PTX_ONLY nothing is assembled, for programs that only the executor runs.
# OBJECT_ONLY: sets the first of these alone. The compiler's launcher, such as ccache, applies to the
# file, as it does to files of C++.
# FOR_A_DEVICE: machine code is of use on a device alone. Without GPUSHARE_CUDA_FOR_A_DEVICE the object has PTX for sm_90 only.
function(gpushare_compile_cuda name source)
    cmake_parse_arguments(PARSE_ARGV 2 arg "PTX_ONLY;FOR_A_DEVICE;OBJECT_ONLY" "" "ARCHITECTURES;FRONTS;FLAGS")
    if(arg_FOR_A_DEVICE AND NOT GPUSHARE_CUDA_FOR_A_DEVICE)
        set(arg_ARCHITECTURES 90)
        set(arg_PTX_ONLY TRUE)
    endif()
    if(NOT arg_FRONTS)
        set(arg_FRONTS ${cuda_fronts})
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
    set(compile ${CMAKE_CUDA_COMPILER} ${cuda_flags} ${arg_FLAGS} ${cuda_includes} ${targets})
    if(arg_OBJECT_ONLY)
        # Relative names, so that what ccache keeps fits other trees.
        cmake_path(RELATIVE_PATH object BASE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR} OUTPUT_VARIABLE relative)
        add_custom_command(
            OUTPUT ${object}
            COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${compile} -MMD -MF ${relative}.d -MT ${relative} -c ${source} -o ${relative}
            DEPENDS ${source}
            DEPFILE ${object}.d
            WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
            COMMENT "Compiling ${name} with nvcc for ${arg_ARCHITECTURES}"
            VERBATIM)
        set(${name}_object ${object} PARENT_SCOPE)
        return()
    endif()
    add_custom_command(
        OUTPUT ${object} ${directory}/report.txt ${ptx}
        COMMAND sh ${PROJECT_SOURCE_DIR}/cmake/run_nvcc.sh ${directory} ${compile} -Xptxas=-v -MMD -MF ${object}.d
                -MT ${object} -c ${source} -o ${object}
        DEPENDS ${source} ${PROJECT_SOURCE_DIR}/cmake/run_nvcc.sh
        DEPFILE ${object}.d
        COMMENT "Compiling ${name} with nvcc for ${arg_ARCHITECTURES}"
        VERBATIM)
    set(${name}_object ${object} PARENT_SCOPE)
    set(${name}_report ${directory}/report.txt PARENT_SCOPE)
    set(${name}_ptx ${ptx} PARENT_SCOPE)
    list(FILTER ptx INCLUDE REGEX "/${stem}(\\.compute_90)?\\.ptx$")
    set(${name}_ptx_90 ${ptx} PARENT_SCOPE)
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
