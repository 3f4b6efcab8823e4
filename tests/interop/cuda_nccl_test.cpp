// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// NCCL's own library, if it is found, on a machine without a device: it is linked, and reports that
// there is no device.
#include <gpushare/gradient/nccl.hpp>

#include <gpushare/config.hpp>

#ifdef GPUSHARE_TEST_NCCL

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/detail/device_order_lock.hpp>
#include <gpushare/numbers.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace gs = gpushare;

namespace {

/// Says that it has CUDA devices, which nothing here has looked for.
struct claimed_devices : gs::host::node {
    struct properties_type {
        int ordinal;
    };
    struct as_it_was {
        as_it_was() = default;
        as_it_was(const as_it_was&) = delete;
        as_it_was& operator=(const as_it_was&) = delete;
        ~as_it_was() {}  // NOLINT: as a guard has one
    };
    claimed_devices() : node({.devices = 2, .sms = 1}) {}
    [[nodiscard]] static as_it_was make_current(gs::device_id) { return {}; }
    [[nodiscard]] static properties_type properties(gs::device_id d) { return {static_cast<int>(d.index)}; }
};

/// A stream that says it is CUDA's.
struct claimed_stream : gs::host::stream {
    [[nodiscard]] static cudaStream_t native_handle() noexcept { return nullptr; }
};
static_assert(gs::timeline<claimed_stream>);

/// Compiled against NCCL's header and linked with its library.
template <class T, class Op>
void link_submit() {
    using submit =
        gs::errc (*)(gs::detail::device_order_lock&, std::span<const gs::device_id>, std::span<claimed_stream>,
                     gs::nccl_communicator&, std::span<const T* const>, std::span<T* const>, std::size_t, Op);
    // volatile: else the optimiser would see that nobody calls it.
    const volatile submit linked = &gs::submit_all_reduce<T, gs::detail::device_order_lock, claimed_stream, Op>;
    CHECK(linked != nullptr);
}

}  // namespace

TEMPLATE_TEST_CASE("an all-reduce by NCCL links with its own library", "[interop][nccl]", double, float, gs::float16,
                   gs::bfloat16, std::int8_t, std::uint8_t, std::int32_t, std::uint32_t, std::int64_t, std::uint64_t) {
    STATIC_REQUIRE(gs::nccl_number<TestType>);
    link_submit<TestType, gs::sum>();
    link_submit<TestType, gs::product>();
    link_submit<TestType, gs::minimum>();
    link_submit<TestType, gs::maximum>();
    link_submit<TestType, gs::average>();
    // And as a rank's transport, which nobody calls either.
    using reduce = gs::collective_fault (gs::nccl_transport::*)(std::span<const TestType>, std::span<TestType>,
                                                                const gs::sum&, gs::instant);
    const volatile reduce linked = &gs::nccl_transport::all_reduce<TestType, gs::sum>;
    CHECK(linked != nullptr);
}

TEST_CASE("errors have the codes and texts of NCCL's own library", "[interop][nccl]") {
    for (const ncclResult_t code : {ncclInvalidArgument, ncclUnhandledCudaError, ncclSystemError, ncclRemoteError})
        CHECK(std::string_view{ncclGetErrorString(code)}.size() > 3);
    CHECK(gs::to_errc(ncclCommAbort(nullptr)) == gs::errc::none);  // of nothing: NCCL lets it pass
    CHECK(support::code_of([] { gs::nccl_transport(nullptr, nullptr); }) == gs::errc::invalid_specification);
}

TEST_CASE("NCCL's library without a device: a typed error", "[interop][nccl]") {
    int version = 0;
    REQUIRE(ncclGetVersion(&version) == ncclSuccess);
    CHECK(version >= 22000);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return;
    const claimed_devices node;
    const std::vector<gs::device_id> both{{0}, {1}};
    const auto code = support::code_of([&] { gs::nccl_communicator{node, both}; });
    CHECK((code == gs::errc::no_driver || code == gs::errc::no_device));
}

#endif
