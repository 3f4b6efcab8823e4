# SPDX-License-Identifier: Apache-2.0
# Compiles and runs the programs of README.md, and of docs/placement.md, as the README says, and compares what they print.
#
#   cmake -DSOURCE_DIR=. -DSCRATCH=DIR -P run_quickstart.cmake
#
# The README holds, in this order: a ```cpp block (saved as quickstart.cpp), a ```sh block with a line that starts
# with g++ (run where `gpushare` is this tree, and must make ./quickstart), and a ```text block with the output; then
# further ```cpp blocks, each with a ```text block, which the same line compiles. Other documents hold such pairs only.
cmake_minimum_required(VERSION 3.25)
if(NOT EXISTS ${SOURCE_DIR}/README.md)
    message("there is no README.md")
    return()
endif()
set(document README.md)
file(READ ${SOURCE_DIR}/${document} rest)

# Takes the next block of a language off `rest`, without its fences.
macro(next_block language result)
    string(FIND "${rest}" "\n```${language}\n" start)
    if(start EQUAL -1)
        message(FATAL_ERROR "${document}: no further \`\`\`${language} block")
    endif()
    string(SUBSTRING "${rest}" ${start} -1 rest)
    string(REGEX REPLACE "^\n[^\n]*\n" "" rest "${rest}")
    string(FIND "${rest}" "```" end)
    string(SUBSTRING "${rest}" 0 ${end} ${result})
    string(SUBSTRING "${rest}" ${end} -1 rest)
endmacro()

# Compiles a program by `compile`, and compares what it prints.
function(check program wanted)
    file(WRITE ${SCRATCH}/quickstart.cpp "${program}")
    execute_process(COMMAND sh -c "${compile}" WORKING_DIRECTORY ${SCRATCH} COMMAND_ERROR_IS_FATAL ANY)
    execute_process(COMMAND ./quickstart WORKING_DIRECTORY ${SCRATCH} OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
    if(NOT printed STREQUAL wanted)
        message(FATAL_ERROR "the program printed:\n${printed}\n${document} says:\n${wanted}")
    endif()
endfunction()

next_block(cpp program)
next_block(sh commands)
next_block(text wanted)
if(NOT "\n${commands}" MATCHES "\n(g\\+\\+ [^\n]*)")
    message(FATAL_ERROR "README.md: the \`\`\`sh block has no line that starts with g++")
endif()
set(compile "${CMAKE_MATCH_1}")

file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH})
file(CREATE_LINK ${SOURCE_DIR} ${SCRATCH}/gpushare SYMBOLIC)
check("${program}" "${wanted}")
macro(check_all)
    while(rest MATCHES "\n```cpp\n")
        next_block(cpp program)
        next_block(text wanted)
        check("${program}" "${wanted}")
    endwhile()
endmacro()
check_all()
foreach(document docs/placement.md)
    file(READ ${SOURCE_DIR}/${document} rest)
    check_all()
endforeach()
