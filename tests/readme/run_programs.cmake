# SPDX-License-Identifier: Apache-2.0
# Compiles and runs the programs of a document, and compares what they print.
#
#   cmake -DSOURCE_DIR=. -DDOCUMENT=docs/placement.md -DSCRATCH=DIR [-DCOMPILER=g++] [-DLIBRARY=libgpushare_compiled.a]
#         -P run_programs.cmake
#
# Each ```cpp block is saved as quickstart.cpp; the ```text block behind it is the output. They are compiled by the line of the
# document that starts with g++, which is run where `gpushare` is this tree and must make ./quickstart; or, where there is
# none, by COMPILER without optimisation and with LIBRARY, gpushare::compiled's: that compiles in the least time.
cmake_minimum_required(VERSION 3.25)
if(NOT COMPILER)
    set(COMPILER g++)
endif()
if(LIBRARY)
    set(compiled "-DGPUSHARE_COMPILED -DGPUSHARE_COMPILED_HOST")
endif()
set(compile "${COMPILER} -std=c++20 ${compiled} -I gpushare/include quickstart.cpp ${LIBRARY} -o quickstart -pthread")

file(READ ${SOURCE_DIR}/${DOCUMENT} rest)
if(rest MATCHES "\n(g\\+\\+ [^\n]*)")
    set(compile "${CMAKE_MATCH_1}")
elseif(DOCUMENT STREQUAL README.md)
    message(FATAL_ERROR "README.md: no line starts with g++")
endif()

# Takes the next block of a language off `rest`, without its fences.
macro(next_block language result)
    string(FIND "${rest}" "\n```${language}\n" start)
    if(start EQUAL -1)
        message(FATAL_ERROR "${DOCUMENT}: no further \`\`\`${language} block")
    endif()
    string(SUBSTRING "${rest}" ${start} -1 rest)
    string(REGEX REPLACE "^\n[^\n]*\n" "" rest "${rest}")
    string(FIND "${rest}" "```" end)
    string(SUBSTRING "${rest}" 0 ${end} ${result})
    string(SUBSTRING "${rest}" ${end} -1 rest)
endmacro()

file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH})
file(CREATE_LINK ${SOURCE_DIR} ${SCRATCH}/gpushare SYMBOLIC)
set(programs 0)
while(rest MATCHES "\n```cpp\n")
    next_block(cpp program)
    next_block(text wanted)
    file(WRITE ${SCRATCH}/quickstart.cpp "${program}")
    execute_process(COMMAND sh -c "${compile}" WORKING_DIRECTORY ${SCRATCH} COMMAND_ERROR_IS_FATAL ANY)
    execute_process(COMMAND ./quickstart WORKING_DIRECTORY ${SCRATCH} OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
    if(NOT printed STREQUAL wanted)
        message(FATAL_ERROR "the program printed:\n${printed}\n${DOCUMENT} says:\n${wanted}")
    endif()
    math(EXPR programs "${programs} + 1")
endwhile()
if(programs EQUAL 0)
    message(FATAL_ERROR "${DOCUMENT} has no program")
endif()
