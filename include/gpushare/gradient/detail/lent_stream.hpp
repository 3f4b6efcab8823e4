// SPDX-License-Identifier: Apache-2.0
// Finds this library's stream for a caller's handle. If the node can borrow streams, the handle is
// that of a framework's stream. Otherwise the handle points to one of this library's streams.
//
//   lent_stream<node_type> of_rank;
//   of_rank.as(node, handle).wait(point);
#pragma once

#include <optional>
#include <type_traits>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The stream of one caller.
template <class Node>
class lent_stream {
    using stream = typename Node::stream;

public:
    /// The caller's stream. If the previous call had the same handle, there is no lookup. Throws
    /// what the node throws, and operation_error (invalid_specification) for a null handle.
    [[nodiscard]] stream& as(Node& node, void* handle) {
        if constexpr (borrows) {
            if (!as_ || handle_ != handle) {
                as_.emplace(node.borrow(static_cast<decltype(std::declval<stream&>().native_handle())>(handle)));
                handle_ = handle;
            }
            return *as_;
        } else {
            if (handle == nullptr)
                raise({.code = errc::invalid_specification}, {}, "an array on a device without a stream");
            return *static_cast<stream*>(handle);
        }
    }

private:
    struct none {};
    static constexpr bool borrows = requires(Node & n, stream& s) { n.borrow(s.native_handle()); };

    void* handle_ = nullptr;
    std::optional<std::conditional_t<borrows, stream, none>> as_{};
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
