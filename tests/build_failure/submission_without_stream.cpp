// SPDX-License-Identifier: Apache-2.0
// must fail: gpushare: work is a callable that takes the stream it enqueues on, stream&
// at most 20 lines
// A submission is called with the stream that it enqueues on.
#include <gpushare/compute/handles.hpp>

struct stream {
    using point = gpushare::immediate_point;
    point record() { return {}; }
};

gpushare::submission_work<stream> work() {
    return [](int&) {};
}
