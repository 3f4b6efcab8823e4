// SPDX-License-Identifier: Apache-2.0
// Two levels of ranks with kernels compiled by nvcc, on the executor: a device for each rank, whose
// kernels run side by side, and a device that ranks share.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu/two_level_sums.hpp"
#include "standins/cuda/session.hpp"
#include "standins/ptx/runtime.hpp"
#include "support/catch.hpp"

TEST_CASE("two levels of ranks give the exact sums as compiled, with a device each and on one", "[compiled]") {
    using two_level::layout;
    for (const layout how : {layout::apart, layout::shared})
        for (const std::vector<std::uint32_t>& ranks : {std::vector<std::uint32_t>{2, 2}, {4, 4}, {1, 3}}) {
            CAPTURE(static_cast<int>(how), ranks);
            ptx::runtime::options().who = how == layout::apart ? ptx::turns::shuffled : ptx::turns::adversarial;
            const standin::session gpu{{.devices = 8, .sms = 16}};
            constexpr std::size_t n = 2503;
            const auto got = two_level::sums_on_devices(ranks, how, n);
            for (const auto& f : got.faults) CHECK_FALSE(f);
            CHECK(got.wrong == std::vector<std::size_t>(ranks.size()));
            for (const auto& copied : got.copied) CHECK(copied == gpushare::bytes{2 * n * sizeof(float)});
        }
}

/// Last of all.
TEST_CASE("zz: every kernel of two levels was executed", "[compiled]") {
    const auto all = ptx::runtime::total();
    CHECK(all.executed == all.compiled);
    CHECK(all.compiled.size() ==
          4);  // a reduce-scatter and an all-gather of unequal parts, each on several devices and on one
}
