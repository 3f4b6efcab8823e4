# SPDX-License-Identifier: Apache-2.0
# The target that needs ONNX's library (Debian: libonnx-dev), for the build tree and the installed package alike:
#
#   gpushare::graph   gpushare::gpushare, libonnx and protocol buffers: for <gpushare/graph/all.hpp> and graph/onnx.hpp
#
# gpushare_find_graph(REASON) defines it, or sets REASON to why it can't be had. Without onnx.hpp, gpushare::gpushare is enough.
function(gpushare_find_graph reason)
    set(${reason} "" PARENT_SCOPE)
    if(TARGET gpushare::graph)
        return()
    endif()
    find_path(GPUSHARE_ONNX_INCLUDE onnx/onnx_pb.h)
    find_library(GPUSHARE_ONNX_LIBRARY onnx)
    find_library(GPUSHARE_ONNX_PROTO_LIBRARY onnx_proto)
    find_library(GPUSHARE_PROTOBUF_LIBRARY protobuf)
    mark_as_advanced(GPUSHARE_ONNX_INCLUDE GPUSHARE_ONNX_LIBRARY GPUSHARE_ONNX_PROTO_LIBRARY GPUSHARE_PROTOBUF_LIBRARY)
    if(NOT GPUSHARE_ONNX_INCLUDE OR NOT GPUSHARE_ONNX_LIBRARY OR NOT GPUSHARE_ONNX_PROTO_LIBRARY
       OR NOT GPUSHARE_PROTOBUF_LIBRARY)
        set(${reason} "ONNX's headers and libraries weren't found (Debian: libonnx-dev)" PARENT_SCOPE)
        return()
    endif()

    # As visible as gpushare::gpushare: in a tree that has it as a subdirectory, everywhere.
    get_property(imported TARGET gpushare::gpushare PROPERTY IMPORTED)
    set(scope "")
    if(NOT imported)
        set(scope GLOBAL)
    endif()
    add_library(gpushare::graph INTERFACE IMPORTED ${scope})
    target_include_directories(gpushare::graph SYSTEM INTERFACE ${GPUSHARE_ONNX_INCLUDE})
    target_compile_definitions(gpushare::graph INTERFACE ONNX_ML=1 ONNX_NAMESPACE=onnx)
    target_link_libraries(gpushare::graph INTERFACE gpushare::gpushare ${GPUSHARE_ONNX_LIBRARY}
                                                    ${GPUSHARE_ONNX_PROTO_LIBRARY} ${GPUSHARE_PROTOBUF_LIBRARY}
                                                    ${CMAKE_DL_LIBS})
endfunction()
