// SPDX-License-Identifier: Apache-2.0
// Splits a device's SMs. Tenants of different slices never run on each other's SMs and never wait
// for each other, whatever their levels are. Tenants of one slice share the slice's time.
#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <set>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "expect.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;

struct seen_sms {
    std::mutex mutex{};
    std::set<std::uint32_t> all{};
    void note(std::uint32_t sm) {
        const std::lock_guard lock(mutex);
        all.insert(sm);
    }
};

int main() {
    constexpr gpushare::device_id device{0};
    gpushare::host::node node{{.memory = 64_MiB, .sms = 4, .timing = gpushare::host::timing::modelled}};
    gpushare::tenancy shared{node};
    const std::array<std::uint32_t, 2> weights{3, 1};
    expect(shared.slice<gpushare::host::device_sms>(device, weights) == gpushare::errc::none, "it can be split");
    expect(shared.slices(device) == std::vector{75_pct, 25_pct}, "three of its four SMs, and one");

    // A share is still a share of the device, and has to fit into a slice.
    auto chat = shared.admit({.name = "chat", .memory = 1_MiB, .compute = 50_pct});
    auto voice = shared.admit({.name = "voice", .memory = 1_MiB, .compute = 25_pct, .slice = 1});
    auto batch = shared.admit({.name = "batch", .memory = 1_MiB, .compute = 25_pct});
    expect(chat.slice() == 0 && batch.slice() == 0 && voice.slice() == 1, "each is in one slice");
    expect(!shared.try_admit({.name = "more", .memory = 1_MiB, .compute = 1_pct}), "no share is left in either");

    seen_sms of_chat, of_voice;
    const auto work = [](seen_sms& seen) {
        return [at = &seen](auto& stream) {
            stream.launch({.blocks = 12, .hold = 1ms}, [at](auto& ctx) { at->note(ctx.sm()); });
        };
    };
    auto a = chat.submit(work(of_chat)), b = voice.submit(work(of_voice));
    a.wait(), b.wait();
    expect(of_chat.all.size() <= 3 && of_voice.all.size() == 1, "a kernel has the SMs of its tenant's slice");
    expect(!of_chat.all.contains(*of_voice.all.begin()), "and no others");

    // Work that waits in one slice doesn't delay work in the other slice.
    std::vector<decltype(a)> line;
    for (int i = 0; i < 20; ++i) line.push_back(batch.submit([](auto& stream) { stream.enqueue(20ms); }));
    voice.submit([](auto& stream) { stream.enqueue(1ms); }).wait();
    expect(!line.back().done(), "voice is done long before batch's line is");
    shared.verify(device);  // throws if a stream isn't confined to its slice
    expect(batch.close(shared.now() + 10s).complete, "closed: what waited is cancelled");
}
