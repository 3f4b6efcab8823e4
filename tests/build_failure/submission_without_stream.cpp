// SPDX-License-Identifier: Apache-2.0
// must fail: could not convert .* to '[a-z0-9_:]*submission_work<stream>'
// A submission is called with the stream that it enqueues on.
#include <gpushare/compute/handles.hpp>

struct stream {
    using point = gpushare::immediate_point;
    point record() { return {}; }
};

gpushare::submission_work<stream> work() {
    return [](int&) {};
}
