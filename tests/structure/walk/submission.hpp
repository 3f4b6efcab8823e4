// SPDX-License-Identifier: Apache-2.0
// The walk of one submission: from tenant.submit() with a callback, through its run on the device,
// to the ticket whose work is done and whose callback was called.
//
//   // main() of a program compiled with -finstrument-functions
//   return walk::of_submission(node, argv[1], hold, let_go);
#pragma once

#include <gpushare/tenant/tenancy.hpp>

#include "structure/walk/recorder.hpp"

namespace walk {

struct nothing {
    template <class Context>
    void operator()(Context&) const {}
};

/// `hold(stream)`: nothing that is enqueued there from now on ends before `let_go(stream)`.
template <class Node, class Hold, class LetGo>
int of_submission(Node& node, const char* path, Hold hold, LetGo let_go) {
    using namespace gpushare::literals;
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 1_MiB, .compute = 50_pct});
    int called = 0;
    const auto submit = [&] {
        return chat.submit([](auto& stream) { stream.launch({.blocks = 1}, nothing{}); }, gpushare::no_options,
                           [&](const gpushare::completion&) { ++called; });
    };
    // Many alike: the limiter learns how long the work and the callback take, and a thread may be
    // interrupted anywhere.
    constexpr int rounds = 200;
    for (int i = 0; i < rounds; ++i) {
        // The work ends behind submit() and before wait() looks: how fast the device is changes no
        // walk.
        hold(chat.work_stream());
        begin();
        auto ticket = submit();
        pause();
        let_go(chat.work_stream());
        (void)chat.work_stream().record().wait(gpushare::never);
        go_on();
        ticket.wait();
        pause();
    }
    return called == rounds ? write(path) : 1;
}

}  // namespace walk
