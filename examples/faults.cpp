// SPDX-License-Identifier: Apache-2.0
// Shows faults and how the library reports them: a kernel that throws, a client that fails again
// and again, memory that another process takes, work that doesn't end, and a lost device. One
// tenant's failure doesn't affect other tenants.
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "expect.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;

int main() {
    gpushare::host::node node{{.devices = 2, .memory = 64_MiB, .sms = 2}};
    std::vector<std::string> told;
    gpushare::tenancy shared{node, {.limiter = {.quarantine_after = 3}, .events = [&](const gpushare::tenant_event& e) {
                                        told.emplace_back(to_string(e.what));
                                    }}};
    auto chat = shared.admit({.name = "chat", .memory = 20_MiB, .compute = 50_pct, .on = {gpushare::device_id{0}}});
    auto bad = shared.admit({.name = "bad", .memory = 20_MiB, .compute = 50_pct, .on = {gpushare::device_id{0}}});
    const auto good = [](auto& stream) { stream.launch({.blocks = 1}, [](auto&) {}); };
    const auto throws = [](auto& stream) {
        stream.launch({.blocks = 1}, [](auto&) { throw std::runtime_error("no such page"); });
    };

    auto failed = bad.submit(throws);
    failed.wait();
    std::string why;
    try {
        failed.rethrow();
    } catch (const gpushare::error& e) {
        why = e.what();
    }
    expect(failed.status() == errc::kernel_failed && why.find("'bad'") < why.find("no such page"),
           "a ticket says who and why");
    for (int i = 0; i < 2; ++i) bad.submit(throws).wait();
    expect(bad.try_submit(good).code() == errc::quarantined, "who fails three times in a row is quarantined");
    auto beside = chat.submit(good);
    beside.wait();
    expect(beside.status() == errc::none, "others go on");
    bad.pardon();
    auto again = bad.submit(good);
    again.wait();
    expect(again.status() == errc::none, "until it is pardoned");

    // Other events may come first: on a busy machine, a wait may have exceeded its bound.
    bool kept = false;
    while (const auto event = shared.limiter_of({0}).take_event())
        kept = kept || event->what == gpushare::limiter_event::kind::quarantined;
    expect(kept, "the limiter keeps an event of it");

    (void)bad.memory().deallocate(&why, 100);
    expect(!told.empty() && told.back() == "wrong free", "a free of what isn't a block is told, and changes nothing");
    node.faults({0}).take_memory(40_MiB);  // as if another process took the memory
    expect(shared.remeasure() > 0_B && told.back() == "overcommitted",
           "memory that others took of what was promised is told");
    node.faults({0}).take_memory(0_B);

    node.faults({0}).lose_device();
    auto lost = chat.try_submit(good);
    if (lost) lost->wait();
    expect((lost ? lost->status() : lost.code()) == errc::device_lost,
           "on a lost device nothing runs, and nothing hangs");
    auto other = shared.admit({.name = "other", .memory = 20_MiB, .compute = 50_pct});
    expect(other.spec().on[0].index == 1, "nobody new is admitted there");
    auto fine = other.submit(good);
    fine.wait();
    expect(fine.status() == errc::none, "the other device works");
    expect(chat.close().complete && bad.close().complete, "and who was there closes as ever");
}
