// SPDX-License-Identifier: Apache-2.0
// Temporary storage for CUB from a tenant's memory. A device-wide algorithm of CUB is called twice: to ask how many
// bytes it needs, and to run. This makes both calls, and frees the bytes in the order of the stream.
//
//   gpushare::with_temporary_storage(tenant.memory(), stream, [&](void* temporary, std::size_t& size) {
//       return cub::DeviceReduce::Sum(temporary, size, in, out, n, stream.native_handle());
//   });
#pragma once

#include <algorithm>
#include <cstddef>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/interop/stream_resource.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// An algorithm in CUB's two phases: with null it writes the size that it needs; with that many bytes it enqueues itself.
/// It returns a status whose zero, as cudaSuccess, means that it went well.
template <class F>
concept two_phase_algorithm = requires(F& f, void* temporary, std::size_t& size) {
    f(temporary, size) == decltype(f(temporary, size)){};
};

/// Calls `algorithm` twice and returns its last status; after a failure in the first phase there is no second. `from`
/// must free in the order of the stream that `algorithm` enqueues on: a stream_resource, a pool's cache for that stream.
/// Throws what `from` throws, a std::bad_alloc, and what `algorithm` throws.
template <memory_resource Resource, two_phase_algorithm Algorithm>
auto with_temporary_storage(Resource& from, Algorithm&& algorithm) {
    std::size_t size = 0;
    const auto asked = algorithm(static_cast<void*>(nullptr), size);
    if (asked != decltype(algorithm(nullptr, size)){}) return asked;
    size = std::max<std::size_t>(size, 1);  // a null pointer would make it ask again
    const scratch_memory<Resource> temporary(from, size);
    return algorithm(temporary.data(), size);
}

/// The same with any memory that can free in stream order. `on` is the stream that `algorithm` enqueues on. While it is
/// captured, the storage is the graph's, and stays charged until that is gone.
template <class Memory, timeline Stream, two_phase_algorithm Algorithm>
requires stream_ordered_memory<Memory, typename Stream::point>
auto with_temporary_storage(Memory& memory_of, Stream& on, Algorithm&& algorithm) {
    stream_resource<Memory, Stream> ordered(memory_of, on);
    return with_temporary_storage(ordered, algorithm);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
