// SPDX-License-Identifier: Apache-2.0
// A program with the umbrella of gradient/ alone: two ranks average a gradient by buckets.
#include <gpushare/gradient/all.hpp>

#include <chrono>
#include <thread>
#include <vector>

int main() {
    using namespace std::chrono_literals;
    gpushare::communicator group(2);
    std::vector<float> of_rank[2]{std::vector<float>(10, 1), std::vector<float>(10, 3)};
    bool failed[2]{};
    const auto train = [&](unsigned r) {
        gpushare::gradient_buckets<> mine;
        mine.add("weights", of_rank[r]);
        gpushare::thread_transport net(group.rank(r));
        (void)mine.ready(0);
        failed[r] = bool(mine.reduce(net, gpushare::average{}, 10s));
    };
    {
        const std::jthread second([&] { train(1); });
        train(0);
    }
    return !failed[0] && !failed[1] && of_rank[0][9] == 2 && of_rank[1][9] == 2 ? 0 : 1;
}
