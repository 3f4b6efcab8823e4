// SPDX-License-Identifier: Apache-2.0
// A program with the umbrella of serving/ alone: requests wait for each other and go as one batch.
#include <gpushare/serving/all.hpp>

#include <chrono>
#include <utility>

int main() {
    using namespace std::chrono_literals;
    const gpushare::instant now{};
    gpushare::batch_queue<int> waiting{{.max_size = 2, .max_delay = 2ms}};
    int first = 1, second = 2;
    const bool taken = waiting.try_push(std::move(first), now) == gpushare::errc::none &&
                       waiting.try_push(std::move(second), now) == gpushare::errc::none;
    return taken && waiting.take(now).size() == 2 ? 0 : 1;
}
