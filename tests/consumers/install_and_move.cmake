# SPDX-License-Identifier: Apache-2.0
# Installs, moves the result to PREFIX and checks that it doesn't remember where it came from.
#
#   cmake -DBUILD_DIR=DIR -DSOURCE_DIR=DIR -DPREFIX=DIR -P install_and_move.cmake
set(first ${PREFIX}.first)
file(REMOVE_RECURSE ${first} ${PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${first} COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${first} ${PREFIX})

file(GLOB_RECURSE files ${PREFIX}/*)
if(NOT files)
    message(FATAL_ERROR "nothing was installed")
endif()
foreach(file IN LISTS files)
    file(READ ${file} text)
    foreach(origin IN ITEMS ${first} ${BUILD_DIR} ${SOURCE_DIR})
        string(FIND "${text}" "${origin}" position)
        if(NOT position EQUAL -1)
            message(FATAL_ERROR "${file} names ${origin}: the package can't be moved")
        endif()
    endforeach()
endforeach()
