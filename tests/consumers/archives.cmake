# SPDX-License-Identifier: Apache-2.0
# Makes the TGZ and the DEB by cpack, checks the latter's control file, and unpacks them to DIR/tgz and DIR/deb.
#
#   cmake -DBUILD_DIR=DIR -DVERSION=0.2.0 -DDIR=DIR -P archives.cmake
file(REMOVE_RECURSE ${DIR})
file(MAKE_DIRECTORY ${DIR}/tgz ${DIR}/deb)
cmake_path(GET CMAKE_COMMAND PARENT_PATH tools)
execute_process(COMMAND ${tools}/cpack --config ${BUILD_DIR}/CPackConfig.cmake -G "TGZ;DEB" -B ${DIR}
                COMMAND_ERROR_IS_FATAL ANY)

execute_process(COMMAND ${CMAKE_COMMAND} -E tar xzf ${DIR}/gpushare-${VERSION}.tar.gz WORKING_DIRECTORY ${DIR}/tgz
                COMMAND_ERROR_IS_FATAL ANY)
set(deb ${DIR}/libgpushare-dev_${VERSION}_all.deb)
execute_process(COMMAND dpkg-deb -x ${deb} ${DIR}/deb COMMAND_ERROR_IS_FATAL ANY)

execute_process(COMMAND dpkg-deb -f ${deb} OUTPUT_VARIABLE control COMMAND_ERROR_IS_FATAL ANY)
foreach(field IN ITEMS "Package: libgpushare-dev" "Version: ${VERSION}" "Architecture: all" "Section: libdevel"
                       "Priority: optional" "Maintainer: [^\n]+ <[^\n]+@[^\n]+>" "Depends: [^\n]*g\\+\\+"
                       "Description: [^\n]+" "Installed-Size: [1-9]")
    if(NOT "\n${control}" MATCHES "\n${field}")
        message(FATAL_ERROR "the control file has no '${field}':\n${control}")
    endif()
endforeach()

# Every file lies below /usr, can be read by all, and belongs to root.
execute_process(COMMAND dpkg-deb -c ${deb} OUTPUT_VARIABLE contents COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE "\n$" "" contents "${contents}")
string(REPLACE "\n" ";" contents "${contents}")
foreach(line IN LISTS contents)
    if(NOT line MATCHES "^(-rw-r--r--|drwxr-xr-x) root/root .* \\./usr/(include|share)(/|$)" AND NOT line MATCHES " \\./usr/$")
        message(FATAL_ERROR "the DEB holds: ${line}")
    endif()
endforeach()
