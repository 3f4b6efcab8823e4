# SPDX-License-Identifier: Apache-2.0
# Compiles a consumer with the flags that pkg-config gives for the installation in PREFIX, and runs it.
#
#   cmake -DPREFIX=DIR -DCOMPILER=g++ -DDIR=DIR -DVERSION=0.2.0 [-DCUDA=TOOLKIT] -P pkg_config.cmake
set(ENV{PKG_CONFIG_PATH} ${PREFIX}/share/pkgconfig)
set(name gpushare)
set(options)
set(source main.cpp)
if(CUDA)
    set(name gpushare-cuda-runtime)
    set(options --define-variable=cuda=${CUDA})
    set(source cuda_runtime.cpp)
endif()
execute_process(COMMAND pkg-config ${options} --cflags --libs "${name} = ${VERSION}" OUTPUT_VARIABLE flags
                COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")

file(MAKE_DIRECTORY ${DIR})
execute_process(COMMAND ${COMPILER} -std=c++20 ${CMAKE_CURRENT_LIST_DIR}/${source} -o ${DIR}/consumer ${flags}
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${DIR}/consumer RESULT_VARIABLE result)
if((CUDA AND NOT result EQUAL 3) OR (NOT CUDA AND NOT result EQUAL 0))
    message(FATAL_ERROR "the consumer ended with ${result}")
endif()
