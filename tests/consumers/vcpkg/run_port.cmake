# SPDX-License-Identifier: Apache-2.0
# Runs packaging/vcpkg/gpushare/portfile.cmake without vcpkg: its functions are replaced by the least that has their
# effect for a header-only port. So the port's own steps, options and files are tested; vcpkg's versions of these
# functions, its checks after the build and its resolution of features and dependencies are not.
#
#   cmake -DSOURCE_DIR=DIR -DVERSION=0.2.0 -DDIR=DIR -P run_port.cmake
cmake_minimum_required(VERSION 3.25)  # vcpkg sets policies for its ports, too
set(PORT gpushare)
set(CURRENT_PORT_DIR ${SOURCE_DIR}/packaging/vcpkg/${PORT})
set(CURRENT_PACKAGES_DIR ${DIR}/packages/${PORT})
set(build ${DIR}/buildtrees/${PORT})
file(REMOVE_RECURSE ${DIR})

# Of the features, none.
function(vcpkg_check_features)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "OUT_FEATURE_OPTIONS" "FEATURES")
    set(${arg_OUT_FEATURE_OPTIONS} -DGPUSHARE_COMPILED=OFF PARENT_SCOPE)
endfunction()

function(vcpkg_cmake_configure)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
    execute_process(COMMAND ${CMAKE_COMMAND} -S ${arg_SOURCE_PATH} -B ${build} -G Ninja -DCMAKE_BUILD_TYPE=Release
                            -DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR} ${arg_OPTIONS} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_cmake_install)
    execute_process(COMMAND ${CMAKE_COMMAND} --build ${build} --target install COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# Moves the package's files one directory up, from share/cmake/PORT to share/PORT.
function(vcpkg_cmake_config_fixup)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "CONFIG_PATH" "")
    file(RENAME ${CURRENT_PACKAGES_DIR}/${arg_CONFIG_PATH} ${CURRENT_PACKAGES_DIR}/share/${PORT})
    file(REMOVE_RECURSE ${CURRENT_PACKAGES_DIR}/share/cmake)
    set(targets ${CURRENT_PACKAGES_DIR}/share/${PORT}/gpushare-targets.cmake)
    file(READ ${targets} text)
    set(up [[get_filename_component(_IMPORT_PREFIX "${_IMPORT_PREFIX}" PATH)]])
    string(REPLACE "${up}\n${up}\n${up}\n" "${up}\n${up}\n" text "${text}")
    file(WRITE ${targets} "${text}")
endfunction()

function(vcpkg_fixup_pkgconfig)
endfunction()

function(vcpkg_install_copyright)
    cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
    file(COPY_FILE ${arg_FILE_LIST} ${CURRENT_PACKAGES_DIR}/share/${PORT}/copyright)
endfunction()

include(${CURRENT_PORT_DIR}/portfile.cmake)

# What vcpkg would complain about, and what its user sees.
foreach(file IN ITEMS copyright usage gpushare-config.cmake)
    if(NOT EXISTS ${CURRENT_PACKAGES_DIR}/share/${PORT}/${file})
        message(FATAL_ERROR "the port installs no share/${PORT}/${file}")
    endif()
endforeach()
file(READ ${CURRENT_PORT_DIR}/vcpkg.json manifest)
string(JSON version GET ${manifest} version-semver)
string(JSON feature GET ${manifest} features cuda dependencies 0)
if(NOT version STREQUAL VERSION OR NOT feature STREQUAL "cuda")
    message(FATAL_ERROR "vcpkg.json: version ${version} instead of ${VERSION}, or no feature cuda")
endif()
