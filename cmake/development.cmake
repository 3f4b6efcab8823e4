# SPDX-License-Identifier: Apache-2.0
# gpushare_development: what our own tests, examples and benchmarks are compiled with. Never exported.
add_library(gpushare_development INTERFACE)
target_link_libraries(gpushare_development INTERFACE gpushare::gpushare)
target_compile_options(
    gpushare_development INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                                   $<$<BOOL:${GPUSHARE_WARNINGS_AS_ERRORS}>:-Werror>)

# Data sets that may lie beside the checkout. Whoever uses them does without where the macro is missing.
cmake_path(SET shared_data NORMALIZE ${CMAKE_CURRENT_SOURCE_DIR}/../shared/data)
if(IS_DIRECTORY ${shared_data})
    target_compile_definitions(gpushare_development INTERFACE GPUSHARE_SHARED_DATA="${shared_data}")
endif()
