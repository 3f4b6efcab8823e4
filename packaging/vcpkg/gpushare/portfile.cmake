# SPDX-License-Identifier: Apache-2.0
# An overlay port that builds the checkout it lies in:
#
#   vcpkg install gpushare --overlay-ports=gpushare/packaging/vcpkg        or gpushare[cuda,compiled]
vcpkg_check_features(OUT_FEATURE_OPTIONS features FEATURES compiled GPUSHARE_COMPILED)
if(NOT "compiled" IN_LIST FEATURES)
    set(VCPKG_BUILD_TYPE release)  # header-only
endif()
cmake_path(SET SOURCE_PATH NORMALIZE "${CURRENT_PORT_DIR}/../../..")

vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS
        -DGPUSHARE_BUILD_TESTS=OFF
        -DGPUSHARE_BUILD_EXAMPLES=OFF
        -DGPUSHARE_BUILD_BENCH=OFF
        -DGPUSHARE_CUDA=OFF
        ${features}
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/gpushare)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/doc" "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")

file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
