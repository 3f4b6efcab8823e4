// SPDX-License-Identifier: Apache-2.0
// Puts containers of the standard library into two tenants' memory. Each tenant is refused at its
// own quota, and doesn't notice the other tenant's refusal.
#include <cstdint>
#include <map>
#include <memory_resource>
#include <new>
#include <string>
#include <vector>

#include <gpushare/interop/pmr.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/statistics_resource.hpp>

#include "expect.hpp"

using namespace gpushare::literals;

int main() {
    gpushare::quota host{64_MiB};
    // batch may use 40 MiB more while they are free
    gpushare::quota chat_quota{host, 8_MiB}, batch_quota{host, 16_MiB, 40_MiB};

    // A quota in front of any allocator, then statistics in front of the quota, then all of it as a
    // std::pmr resource.
    gpushare::quota_resource chat_limited{chat_quota, *std::pmr::new_delete_resource(), "chat"};
    gpushare::statistics_resource chat_counted{chat_limited};
    gpushare::pmr_adaptor chat{chat_counted};
    gpushare::quota_resource batch_limited{batch_quota, *std::pmr::new_delete_resource(), "batch"};
    gpushare::pmr_adaptor batch{batch_limited};

    std::pmr::vector<std::uint8_t> big(&batch);
    big.resize(50 << 20);
    expect(batch_quota.usage().borrowed == 34_MiB, "batch has 16 MiB of its own and 34 that are lent");

    // nodes and strings, all in chat's memory
    std::pmr::map<int, std::pmr::string> sessions(&chat);
    for (int i = 0; i < 1'000; ++i) sessions[i] = std::string(1'000, 'x');
    expect(chat_quota.usage().current >= 1'000'000_B, "what a container's elements allocate is charged as well");
    expect(chat_counted.statistics().allocations == 2'000, "a node and a string each");

    bool refused = false;
    try {
        std::pmr::vector<double> v(&chat);
        v.resize(2 << 20);                       // 16 MiB
    } catch (const gpushare::memory_error& e) {  // a std::bad_alloc
        refused = e.tenant() == "chat" && e.figures().limit == (8_MiB).count();
    }
    expect(refused, "over its quota chat is refused, by name and with the figures");
    std::pmr::vector<double> exact(&chat);
    exact.reserve(chat_quota.free().count() / sizeof(double) / 2);
    expect(exact.capacity() != 0, "what fits is there, whatever batch has borrowed");

    sessions.clear();
    exact = std::pmr::vector<double>(&chat);
    expect(chat_quota.usage().current == 0_B && chat_counted.leaks().empty(), "nothing is left behind");
}
