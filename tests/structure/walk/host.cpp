// SPDX-License-Identifier: Apache-2.0
// A submission on a device of the host, for walk.py.
#include <gpushare/backend/host/host.hpp>

#include <atomic>
#include <thread>

#include "structure/walk/submission.hpp"

namespace {

/// A kernel that ends once it is let go.
struct held {
    const std::atomic<bool>* go;

    template <class Context>
    void operator()(Context&) const {
        while (!go->load(std::memory_order_relaxed)) std::this_thread::yield();  // carries no data
    }
};

}  // namespace

int main(int, char** arguments) {
    gpushare::host::node node{{}};
    using stream = gpushare::host::stream;
    std::atomic<bool> go = true;
    return walk::of_submission(
        node, arguments[1],
        [&](stream& s) {
            go.store(false, std::memory_order_relaxed);
            s.launch({.blocks = 1}, held{&go});
        },
        [&](stream&) { go.store(true, std::memory_order_relaxed); });
}
