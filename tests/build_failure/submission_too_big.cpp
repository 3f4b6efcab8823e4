// SPDX-License-Identifier: Apache-2.0
// must fail: the callable is too big to be stored in place: capture less, or a pointer to what it needs
// A submission captures little: it is stored without allocating.
#include <array>

#include <gpushare/compute/handles.hpp>

struct stream {
    using point = gpushare::immediate_point;
    point record() { return {}; }
};

gpushare::submission_work<stream> work(const std::array<char, 129>& tensor) {
    return [tensor](stream&) { (void)tensor; };
}
