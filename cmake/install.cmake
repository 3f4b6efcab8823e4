# SPDX-License-Identifier: Apache-2.0
# Installs the headers and what CMake and pkg-config need to find them; cpack makes archives of the same. All of it may be
# moved afterwards: nothing in it is an absolute path.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# `cmake --install` and cpack work at once, whatever tests and examples there are to build.
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)

# Nothing that CMake reads depends on the architecture, so the packages lie in share/, not in lib/.
set(package_dir ${CMAKE_INSTALL_DATADIR}/cmake/gpushare)
set(pkgconfig_dir ${CMAKE_INSTALL_DATADIR}/pkgconfig)

install(TARGETS gpushare EXPORT gpushare-targets FILE_SET HEADERS)
list(TRANSFORM on_top PREPEND gpushare_ OUTPUT_VARIABLE on_top_targets)
install(TARGETS ${on_top_targets} EXPORT gpushare-targets)
install(EXPORT gpushare-targets NAMESPACE gpushare:: DESTINATION ${package_dir})

# The compiled libraries lie in lib/, and what finds them beside the rest.
if(GPUSHARE_COMPILED)
    foreach(name IN ITEMS compiled compiled_cuda)
        if(TARGET gpushare_${name})
            install(TARGETS gpushare_${name} EXPORT gpushare-${name}-targets)
            install(EXPORT gpushare-${name}-targets NAMESPACE gpushare:: DESTINATION ${package_dir})
        endif()
    endforeach()
endif()

configure_file(cmake/gpushare-config.cmake.in gpushare-config.cmake @ONLY)
# Before 1.0 a minor version may break its users; from then on this becomes SameMajorVersion.
set(any_architecture ARCH_INDEPENDENT)
if(GPUSHARE_COMPILED)
    set(any_architecture)
endif()
write_basic_package_version_file(gpushare-config-version.cmake COMPATIBILITY SameMinorVersion ${any_architecture})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/gpushare-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/gpushare-config-version.cmake cmake/gpushare-cuda.cmake cmake/gpushare-graph.cmake
        DESTINATION ${package_dir})

file(RELATIVE_PATH prefix_from_pc /prefix/${pkgconfig_dir} /prefix)
foreach(name IN ITEMS gpushare gpushare-cuda-runtime)
    configure_file(cmake/${name}.pc.in ${name}.pc @ONLY)
    install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc DESTINATION ${pkgconfig_dir})
endforeach()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(PROJECT_IS_TOP_LEVEL)
    set(CPACK_GENERATOR TGZ DEB)
    set(CPACK_PACKAGE_FILE_NAME gpushare-${PROJECT_VERSION})
    set(CPACK_PACKAGE_VENDOR "the gpushare authors")
    set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
    set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
    set(CPACK_PACKAGE_CONTACT "the gpushare authors <authors@gpushare.invalid>")
    set(CPACK_DEBIAN_PACKAGE_NAME libgpushare-dev)
    set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
    set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE all)
    set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
    set(CPACK_DEBIAN_PACKAGE_DEPENDS "g++ (>= 4:12) | clang-16")
    include(CPack)
endif()
