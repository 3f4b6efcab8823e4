# SPDX-License-Identifier: Apache-2.0
# Installs the tree with the library of gpushare::compiled.
#
#   cmake -DSOURCE_DIR=DIR -DDIR=DIR -DPREFIX=DIR -DCOMPILER=g++ -P install_compiled.cmake
file(REMOVE_RECURSE ${DIR} ${PREFIX})
set(parts -DGPUSHARE_BUILD_TESTS=OFF -DGPUSHARE_BUILD_EXAMPLES=OFF -DGPUSHARE_BUILD_BENCH=OFF -DGPUSHARE_CUDA=OFF)
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${DIR} -G Ninja -DCMAKE_CXX_COMPILER=${COMPILER} ${parts}
                        -DGPUSHARE_GRAPH=OFF -DGPUSHARE_COMPILED=ON -DCMAKE_CXX_FLAGS=-O0 COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${DIR} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${DIR} --prefix ${PREFIX} COMMAND_ERROR_IS_FATAL ANY)
