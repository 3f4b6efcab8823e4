# SPDX-License-Identifier: Apache-2.0
# Installs the headers and a package that may be moved afterwards: nothing in it is an absolute path.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# Nothing here depends on the architecture, so the package lies in share/, not in lib/.
set(package_dir ${CMAKE_INSTALL_DATADIR}/cmake/gpushare)

install(TARGETS gpushare EXPORT gpushare-targets FILE_SET HEADERS)
install(EXPORT gpushare-targets NAMESPACE gpushare:: DESTINATION ${package_dir})

configure_package_config_file(cmake/gpushare-config.cmake.in gpushare-config.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break its users; from then on this becomes SameMajorVersion.
write_basic_package_version_file(gpushare-config-version.cmake COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gpushare-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/gpushare-config-version.cmake
        DESTINATION ${package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
